"""What a measurement needs on each process under FSDP2: by formula, and checked on two gloo processes with a tiny policy.

Bytes above the training's own (shards of weights, gradient and two moments). P parameters, N processes, b bytes a number, E the
parameters that are not sharded (embedding, final norm), layer the parameters of one layer. A measure that gathers the whole
model needs P·b on every process; one that works through the sharded model needs one gathered layer at a time.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
from typing import Any

import torch

from experiments.benchmarks.common import SHAPES, Row, cost, random_model

WHOLE = {"shares": 2, "update shares": 4, "loss surface": 2, "head norms": 1}
"""Measure -> whole copies of the model's size on each process: weights, gradient, two moments."""
LAYERWISE = ("local norms", "critical sharpness")
"""Measures that work through the sharded model, one gathered layer at a time."""


def sizes(shape: str) -> tuple[float, float]:
    """Parameters of a shape in all, and of one layer."""
    s = SHAPES[shape] if shape != "7b" else dict(zip(SHAPES["3b"], (28, 3584, 28, 4, 18_944, 152_064), strict=True))
    d, kv = s["width"], s["width"] // s["heads"] * s["key_heads"]
    layer = 2 * d * d + 2 * d * kv + 3 * d * s["feed_forward"]
    tables = s["vocabulary"] * d * (2 if shape == "7b" else 1)  # the embeddings of 7b are not tied
    return s["layers"] * layer + tables, layer


def fsdp(shapes: tuple[str, ...] = ("1.5b", "3b", "7b"), check: bool = True) -> list[Row]:
    """The table by formula, and one measured copy against its formula."""
    rows = []
    for measure in (*LAYERWISE, *WHOLE):
        copies = {shape: sizes(shape) for shape in shapes}  # whole copies, or two gathered layers; float32
        gib = {
            s: 4 * (WHOLE[measure] * whole if measure in WHOLE else 2 * one) / 2**30
            for s, (whole, one) in copies.items()
        }
        note = "; ".join(f"{shape}: {value:.3g} GiB" for shape, value in gib.items())
        rows.append(Row(f"FSDP2, {measure}, on each process, float32", gib[shapes[-1]], "GiB", "", "", note))
    if check:
        found, expected = _checked()
        note = f"{found / 2**20:.0f} MiB measured for weights and gradient of {expected / 8e6:.3g} M parameters"
        rows.append(
            Row("a gathered copy, measured over the formula, two processes", found / expected, "×", "", "", note)
        )
    return rows


CHECKED = {"layers": 8, "width": 512, "heads": 8, "key_heads": 8, "feed_forward": 1536, "vocabulary": 2048}


def _checked() -> tuple[float, float]:
    """Peak bytes of a gathered copy of weights and gradient in a process of two, and those of the formula."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        started = [context.Process(target=_rank, args=(rank, port, folder)) for rank in range(2)]
        for process in started:
            process.start()
        for process in started:
            process.join()
        if any(process.exitcode for process in started):
            raise RuntimeError("fsdp: a process failed")
        parameters, found = torch.load(f"{folder}/0")
    return found, 8.0 * parameters


def _rank(rank: int, port: str, folder: str) -> None:
    from sharpscope.policy.sharding import gathered_copy, shard

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    model = random_model(CHECKED)
    parameters = sum(p.numel() for p in model.parameters())
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.ones(1, 8, dtype=torch.long)).logits.sum().backward()
    copies: list[Any] = []
    found = cost(lambda: copies.append(gathered_copy(model, optimizer, torch.device("cpu"), moments=False)))
    torch.save((parameters, float(found.extra)), f"{folder}/{rank}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()

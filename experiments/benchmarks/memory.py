"""What a measurement needs on each process under FSDP2: by formula, and checked on two gloo processes with a small policy.

Bytes above the training's own (shards of weights, gradient and two moments) and above activations, in numbers of b bytes:
P parameters, N processes, E those outside the layers (embedding, output layer, final norm), L those of one layer. A measure that
works through the sharded model needs E, and two layers, since FSDP2 gathers the next one while one computes.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from experiments.benchmarks.common import SHAPES, Row, peak, random_model, random_rows

MEASURES: dict[str, Callable[[float, float, float, int], float]] = {
    "statistics of tokens (mismatch)": lambda P, E, L, N: E + 2 * L,
    "norms of the gradient and the update by layer": lambda P, E, L, N: max(E, L) / N,
    "local norms": lambda P, E, L, N: E + 2 * L,
    "shares": lambda P, E, L, N: 2 * E + 3 * L,
    "exact norms": lambda P, E, L, N: 2 * E + 3 * L + P / N,
    "critical sharpness": lambda P, E, L, N: E + 2 * L + 2 * P / N,
    "held-out influence, loss surface, rotation": lambda P, E, L, N: 2 * P,
}
"""Measure -> numbers held on each process: of the gathered weights, tangents or gradients, and of what is in shards."""


def sizes(shape: str) -> tuple[float, float, float]:
    """Parameters of a shape in all, outside its layers, and of one layer."""
    s = (
        SHAPES[shape]
        if shape != "7b"
        else dict(zip(SHAPES["3b"], (28, 3584, 28, 4, 18_944, 152_064), strict=True))
    )
    d, kv = s["width"], s["width"] // s["heads"] * s["key_heads"]
    layer = 2 * d * d + 2 * d * kv + 3 * d * s["feed_forward"]
    tables = s["vocabulary"] * d * (2 if shape == "7b" else 1)  # the embeddings of 7b are not tied
    return s["layers"] * layer + tables, tables, layer


def fsdp(shapes: tuple[str, ...] = ("1.5b", "3b", "7b"), processes: int = 8) -> list[Row]:
    """The table by formula, and what two processes of a small policy took, against the formula."""
    rows = []
    for measure, formula in MEASURES.items():
        gib = {shape: 4 * formula(*sizes(shape), processes) / 2**30 for shape in shapes}
        note = "; ".join(f"{shape}: {value:.2g} GiB" for shape, value in gib.items())
        rows.append(
            Row(
                f"FSDP2, {measure}, on each of {processes} processes",
                gib[shapes[-1]],
                "GiB",
                "",
                "",
                note + " (float32)",
            )
        )
    P, E, L, found = _checked()
    for measure, took in found.items():
        expected = 4 * MEASURES[measure](P, E, L, 2)
        note = f"{took / 2**20:.0f} MiB on each of two processes, {expected / 2**20:.0f} by formula; {P / 1e6:.3g} M parameters"
        rows.append(
            Row(f"FSDP2, {measure}, measured over the formula", took / expected, "×", "", "", note)
        )
    return rows


CHECKED = {
    "layers": 8,
    "width": 512,
    "heads": 8,
    "key_heads": 8,
    "feed_forward": 1536,
    "vocabulary": 4096,
}


def _checked() -> tuple[float, float, float, dict[str, float]]:
    """P, E and L of the small policy, and the peak bytes of measures in one process of two."""
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
        return torch.load(f"{folder}/0")  # type: ignore[no-any-return]


def _rank(rank: int, port: str, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    from sharpscope.policy.sharding import gathered_copy
    from sharpscope.surface import critical_sharpness, update_direction
    from sharpscope.tokens.sharded import ShardedProbes

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    model: Any = random_model(CHECKED)
    P, layer = (
        float(sum(p.numel() for p in part.parameters())) for part in (model, model.model.layers[0])
    )
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for part in (*model.model.layers, model):  # as TRL's trainers do
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    ids, mask = random_rows(model, 1, 8)

    def loss() -> torch.Tensor:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()
        loss().backward()
    probes, given, kept = ShardedProbes(model), (ids, mask, torch.ones_like(ids)), list[Any]()
    gradient = [p.grad for p in model.parameters()]
    works: dict[str, Callable[[], object]] = {
        "local norms": lambda: probes.local(*given, 1.0),
        "shares": lambda: probes.along(*given, gradient, 1.0),
        "exact norms": lambda: probes.exact(ids, mask * (mask.cumsum(1) == 3), given[2], 1.0),
        "critical sharpness": lambda: critical_sharpness(
            lambda: float(loss().detach()),
            model,
            update_direction(optimizer, model),
            guess=1e-3,
            max_evaluations=4,
        ),
        "held-out influence, loss surface, rotation": lambda: kept.append(
            gathered_copy(model, optimizer, torch.device("cpu"), moments=False)
        ),
    }
    found = {}
    for name, work in works.items():
        with torch.set_grad_enabled(name != "critical sharpness"):
            if not name.startswith("held-out"):
                work()  # the self-check
            found[name] = float(peak(work))
    torch.save((P, P - CHECKED["layers"] * layer, layer, found), f"{folder}/{rank}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()

"""What recording verl's actor costs: steps of one TrainingWorker, with and without the recorder in turns.

`python -m experiments.benchmarks.verl`, in an environment with verl, prints shares of the processor time of verl's own update (no
generation, which a real step has as well). One process on a CPU, FSDP2, the embedded policy.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def measure(steps: int, rows: int, length: int) -> dict[str, list[float]]:
    """Processor time [s] of `steps` updates of each kind, of `rows` sequences of `length` tokens, a quarter of them prompt.

    Kinds: `plain`; `recorded`, without probes; `norms`, with the local score norms of all response tokens; `critical`, with the critical
    sharpness.
    """
    folder = Path(tempfile.mkdtemp(prefix="sharpscope-bench-"))
    os.environ["SHARPSCOPE_VERL"] = str(folder / "run")
    from sharpscope.policy import PolicySpec, load_policy
    from tests.integrations.verl.worker import nested, worker_of

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    import verl  # noqa: F401 - loads the platform and the plugin
    from verl.utils import tensordict_utils as tu

    policy = load_policy(PolicySpec(model="embedded:knights_knaves"))
    policy.model.save_pretrained(folder / "model")
    policy.tokenizer.save_pretrained(folder / "model")
    worker = worker_of(str(folder / "model"), {}, {"lr": 1e-6}, packed=False)
    draw = torch.Generator().manual_seed(0)
    cut = length // 4
    found: dict[str, list[float]] = {"plain": [], "recorded": [], "norms": [], "critical": []}
    for turn in range(steps + 1):
        ids = torch.randint(5, policy.head.weight.shape[0], (rows, length), generator=draw)
        count = length - cut
        given = {
            "prompts": list(ids[:, :cut]),
            "responses": list(ids[:, cut:]),
            "response_mask": [torch.ones(count, dtype=torch.long)] * rows,
            "advantages": [torch.randn(1, generator=draw).expand(count).clone() for _ in range(rows)],
            "noise": [torch.zeros(count, 2)] * rows,
            "reward": [0.0] * rows,
        }
        columns = nested(given, policy.model)
        for kind, times in found.items():
            tensors = {
                name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in columns.items()
            }
            options = {"mini_batch_size": rows, "epochs": 1, "seed": 7, "dataloader_kwargs": {"shuffle": False}}
            options |= {"temperature": 1.0, "global_batch_size": rows, "calculate_entropy": False}
            data = tu.get_tensordict(tensors | {"uid": ["0"] * rows}, options)
            step: Any = type(worker).train_mini_batch
            recorder = getattr(worker, "_sharpscope_recorder", None)
            if recorder is not None:
                recorder.every = {
                    "score_norm_local": int(kind == "norms"),
                    "critical_sharpness": int(kind == "critical"),
                }
            started = time.process_time()
            (step.__wrapped__ if kind == "plain" else step)(worker, data)
            if turn:
                times.append(time.process_time() - started)
    return found


def main() -> None:
    """Print the share of each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    given = vars(parser.parse_args())
    torch.set_num_threads(1)
    found = measure(**given)
    plain = statistics.median(found["plain"])
    print(f"verl's update alone: {plain:.2f} s ({given['rows']} sequences of {given['length']} tokens)")
    for kind in ("recorded", "norms", "critical"):
        shares = [own / other - 1 for own, other in zip(found[kind], found["plain"], strict=True)]
        print(f"{kind}: {statistics.median(shares):+.0%} (from {min(shares):+.0%} to {max(shares):+.0%})")


if __name__ == "__main__":
    main()

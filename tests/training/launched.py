"""What every process of a launched run does in tests: train some configurations, keep the first gradient of each.

python -m tests.training.launched FOLDER: reads FOLDER/configs.json, a list of [values, resume, sharded]; writes FOLDER/<name>.gradient.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

STUCK_S = 400


def keep_gradient(path: Path):
    """Replace the function that clips gradients by one that first writes the whole ones of the first update to `path`."""
    from sharpscope import distributed
    from sharpscope.policy.sharding import full_tensor
    from sharpscope.training import learner

    original, known = learner.scale_gradients, []

    def scaled(parameters, factor):
        if not known:
            known.append(True)
            found = [None if p.grad is None else full_tensor(p.grad).clone() for p in parameters]
            if distributed.is_rank_zero():
                torch.save(found, path)
        original(parameters, factor)

    learner.scale_gradients = scaled
    return original


def run_all(folder: Path) -> None:
    """Train every configuration of the folder in turn."""
    from sharpscope.config import build_config
    from sharpscope.training import learner, train

    for values, resume, sharded in json.loads((folder / "configs.json").read_text()):
        os.environ["ACCELERATE_USE_FSDP"] = str(
            sharded
        ).lower()  # what accelerate launch --use_fsdp sets, read at each start
        original = keep_gradient(folder / f"{values['name']}.gradient")
        try:
            train(build_config(values=values), resume=resume)
        finally:
            learner.scale_gradients = original


def launch(folder: Path, configs: list, count: int = 2) -> None:
    """Train in `count` processes on the CPU, as `accelerate launch [--use_fsdp --fsdp_version 2]` would start them."""
    (folder / "configs.json").write_text(json.dumps(configs))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.training.launched", str(folder)],
            text=True,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(count)
    ]
    try:
        errors = [process.communicate(timeout=STUCK_S + 30)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    failed = [error for process, error in zip(started, errors, strict=True) if process.returncode]
    assert not failed, "\n\n".join(error[-3000:] for error in failed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(STUCK_S, exit=True)  # says where processes wait for each other
    run_all(Path(sys.argv[1]))

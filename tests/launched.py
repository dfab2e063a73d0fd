"""Processes of tests, forked from a server that has imported torch and transformers: a new interpreter takes seconds to do so."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import transformers.models.qwen2.modeling_qwen2  # noqa: F401  (else every child imports it)

from sharpscope import distributed
from sharpscope.config import build_config
from sharpscope.policy.sharding import full_tensor
from sharpscope.training import train, updates

STUCK_S = 400


def server() -> ForkServerContext:
    """The context whose processes are forked from one server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def run_ranks(folder: Path, target: Callable[..., None], *arguments: Any, count: int = 2) -> None:
    """Call `target(*arguments)` in `count` processes on the CPU, with the environment that `accelerate launch` would give them.

    Their output goes to rank-N.log in `folder`, and into the message if one fails.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    logs = [folder / f"rank-{rank}.log" for rank in range(count)]
    started = [
        server().Process(
            target=_rank,
            args=(log, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, target, arguments),
            daemon=True,
        )
        for rank, log in enumerate(logs)
    ]
    for process in started:
        process.start()
    stuck = time.monotonic() + STUCK_S + 30
    for process in started:
        process.join(max(0.0, stuck - time.monotonic()))
    for process in started:
        process.kill()
        process.join()
    failed = [
        log.read_text()[-3000:]
        for process, log in zip(started, logs, strict=True)
        if process.exitcode
    ]
    assert not failed, "\n\n".join(failed)


def _rank(
    log: Path, environment: dict[str, str], target: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(environment)
    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    torch.set_num_threads(1)
    faulthandler.enable()
    # says where processes wait for each other
    faulthandler.dump_traceback_later(STUCK_S, exit=True)
    target(*arguments)


def launch(folder: Path, configs: list, count: int = 2) -> None:
    """Train configurations, a list of (values, resume, sharded), as `accelerate launch [--use_fsdp --fsdp_version 2]` would."""
    run_ranks(folder, train_all, folder, configs, count=count)


def train_all(folder: Path, configs: list) -> None:
    """Train every configuration in turn, and keep the first gradient of each in `folder`/<name of its run's folder>.gradient."""
    os.environ |= {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
    for values, resume, sharded in configs:
        # what accelerate launch --use_fsdp sets, read at each start
        os.environ["ACCELERATE_USE_FSDP"] = str(sharded).lower()
        original = keep_gradient(folder / f"{Path(values['out']).name}.gradient")
        try:
            train(build_config(values=values), resume=resume)
        finally:
            updates._scale_gradients = original


def keep_gradient(path: Path):
    """Replace the function that clips gradients by one that first writes the whole ones of the first update to `path`."""
    original, known = updates._scale_gradients, []

    def scaled(parameters, factor):
        if not known:
            known.append(True)
            found = [None if p.grad is None else full_tensor(p.grad).clone() for p in parameters]
            if distributed.is_rank_zero():
                torch.save(found, path)
        original(parameters, factor)

    updates._scale_gradients = scaled
    return original

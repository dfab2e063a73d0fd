"""Sweeps on a Ray cluster: a task a run, started again where the process or the node that has it dies."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sharpscope.config import RunConfig, make_config
from sharpscope.errors import UserError, first_line
from sharpscope.sweeps import INTERRUPTED, Ending, PlannedRun, ending

if TYPE_CHECKING:
    from types import ModuleType

RETRIES = 3
"""How often a run is started again after its process or node has died, from its last checkpoint."""


CONNECTION_SECONDS = 5.0
LOCK_TRIES, LOCK_SECONDS = 15, 2.0
"""How often, and after how long each time, a run is looked at again that a dead process seems to hold."""


def execute_on_ray(
    runs: Sequence[PlannedRun],
    *,
    address: str,
    threads: int,
    tell: Callable[[str], None],
) -> dict[PlannedRun, tuple[Ending, str]]:
    """Execute the runs of a sweep that are planned or interrupted on a Ray cluster; as `sweeps.execute`.

    A task takes `threads` CPUs and, where the cluster has GPUs and the run may use them, one GPU. The nodes need this version of
    sharpscope, and a file system in common that has the current folder at the same path.

    Args:
        runs: of a sweep.
        address: of the cluster: `auto`, `host:port` or `ray://host:port`.
        threads: of each run.
        tell: called with a line on each run that has ended.

    Raises:
        UserError: Ray is not installed, no cluster answers, or none of its nodes is large enough.
    """
    ray = _connected(address)
    try:
        cluster = ray.cluster_resources()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        # a task that no node can hold would wait for ever
        gpus = max(options(run.config, threads, cluster)["num_gpus"] for run in runs)
        most = max(node.get("CPU", 0) for node in nodes if node.get("GPU", 0) >= gpus)
        if threads > most:
            on = "node with a GPU" if gpus else "node"
            raise UserError(
                f"--ray {address}: a run has {threads} threads, and the largest {on} {most:g} CPUs; --set fewer threads"
            )
        # a process of its own for each run: nothing of the one before is left in it
        train = ray.remote(max_calls=1)(train_here)
        waiting = {
            train.options(**options(run.config, threads, cluster)).remote(
                run.config.model_copy(update={"threads": threads}).model_dump(mode="json"),
                str(Path.cwd()),
            ): run
            for run in runs
            if run.status in ("planned", "interrupted")
        }
        found = _endings(ray, waiting, tell)
    finally:
        ray.shutdown()
    return {run: found.get(run) or ending(run, False, 0, "") for run in runs}


def _connected(address: str) -> ModuleType:
    """The module `ray`, connected to a cluster."""
    try:
        import ray
    except ImportError as error:
        raise UserError("--ray: Ray is not installed; pip install 'sharpscope[ray]'") from error
    try:
        _check_port(address)
        ray.init(address=address, log_to_driver=False)
    except (OSError, ValueError, RuntimeError) as error:  # OSError: ConnectionError, too
        raise UserError(
            f"--ray {address}: no cluster answers ({first_line(error)}); start one with `ray start --head`"
        ) from error
    return ray


def _check_port(address: str) -> None:
    """Ask whether something listens at `host:port`, where Ray itself waits for over a minute and then ends the process.

    Raises:
        OSError: nothing does, or the host is not known.
        ValueError: the port is no number.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECTION_SECONDS).close()


def options(config: RunConfig, threads: int, cluster: Mapping[str, float]) -> dict[str, int]:
    """What the task of a run takes of a cluster with these resources, and how often it is tried again."""
    gpus = int(config.policy.device != "cpu" and cluster.get("GPU", 0) >= 1)
    return {"num_cpus": threads, "num_gpus": gpus, "max_retries": RETRIES}


def _endings(
    ray: ModuleType,
    waiting: dict[object, PlannedRun],
    tell: Callable[[str], None],
) -> dict[PlannedRun, tuple[Ending, str]]:
    """How the runs of the tasks end. After Ctrl-C active ones end with a checkpoint and others do not start; a second one raises."""
    found: dict[PlannedRun, tuple[Ending, str]] = {}
    stopped = False
    while waiting:
        try:
            done, _ = ray.wait(list(waiting), num_returns=1)
        except KeyboardInterrupt:
            if stopped:
                raise
            stopped = True
            for task in waiting:
                ray.cancel(task)
            continue
        for task in done:
            run = waiting.pop(task)
            found[run] = ending(run, True, *_result(ray, task))
            tell(f"{run.name}: {found[run][0]}")
    return found


def _result(ray: ModuleType, task: object) -> tuple[int, str]:
    """Exit code and output of a task, as of a process; see `train_here`."""
    try:
        code, text = ray.get(task)
        return int(code), str(text)
    except ray.exceptions.TaskCancelledError:
        return 0, ""
    except ray.exceptions.RayTaskError as error:  # an error of the program, which would repeat
        return 1, f"error: {str(error).strip().splitlines()[-1]}"
    except ray.exceptions.RayError as error:
        return -signal.SIGKILL, first_line(error)


def train_here(settings: Mapping[str, object], folder: str) -> tuple[int, str]:
    """Train a run in this process, or go on with it from its last checkpoint; its exit code, and the error if there is one.

    Args:
        settings: of the run.
        folder: that paths in them are relative to.
    """
    from sharpscope.training import train

    try:
        os.chdir(folder)
    except OSError as error:
        return 1, f"error: {socket.gethostname()} has no folder {folder} ({error.strerror})"
    run = PlannedRun(make_config(settings))
    status = _unlocked(run)
    if status == "finished":  # by a process that died before it could say so
        return 0, ""
    try:
        outcome = train(run.config, resume=status == "interrupted")
    except UserError as error:
        return 1, f"error: {error}"
    return {"finished": 0, "interrupted": INTERRUPTED}.get(outcome.status, 1), ""


def _unlocked(run: PlannedRun) -> str:
    """The status of a run, once a shared file system has noticed that the process that held its lock is dead."""
    for _ in range(LOCK_TRIES):
        if run.status != "running":
            break
        time.sleep(LOCK_SECONDS)
    return run.status

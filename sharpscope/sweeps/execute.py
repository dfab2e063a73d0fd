"""Execute planned runs in worker processes or on a Ray cluster. Finished runs are skipped."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sharpscope.errors import UserError
from sharpscope.sweeps.plan import PlannedRun, write_config
from sharpscope.traces import held_text, read_run_info
from sharpscope.traces.files import set_aside

POLL_S = 1.0


@dataclass
class SweepOutcome:
    """Result of a sweep; runs are given by folder name.

    Attributes:
        finished: runs that finished in this call.
        skipped: runs that had finished before.
        failed: runs that ended with an error or by a health rule. Without run.json they restart at the next call, otherwise
            with `retry`.
        interrupted: runs that the next call continues.
        held: run in use by another process -> message with the process and the fix.
        errors: run that failed, or was interrupted other than by the user -> reason.
    """

    finished: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    interrupted: list[str] = field(default_factory=list)
    held: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


Ended = dict[PlannedRun, tuple[int, str]]
"""Run -> exit code and output of its worker, for workers that were not interrupted by the user."""

Progress = Callable[[Sequence[PlannedRun], Sequence[PlannedRun]], None]
"""Called about once a second with all runs to execute and the active ones."""


def to_do(runs: Sequence[PlannedRun], retry: bool) -> tuple[list[PlannedRun], list[PlannedRun]]:
    """Split runs into those to execute and those to skip: finished, running and, unless `retry`, failed ones."""
    skip = {"finished", "running"} | (set() if retry else {"failed"})
    pending = [run for run in runs if run.status not in skip]
    return pending, [run for run in runs if run not in pending]


def run_command(run: PlannedRun, configs: Path, threads: int) -> list[str]:
    """Command line that starts a run or resumes it from its last checkpoint; a run without a checkpoint restarts."""
    base = [sys.executable, "-m", "sharpscope", "run", "--quiet"]
    if run.status in ("interrupted", "failed"):
        from sharpscope.training.checkpoint import checkpoints  # imports torch, which planning a study does without

        if checkpoints(run.run_dir):
            return [*base, "--resume", str(run.run_dir)]
        # Without a checkpoint the traces of the aborted attempt are kept under another name.
        set_aside(run.run_dir)
    return [*base, str(write_config(run, configs, threads))]


def execute(
    runs: Sequence[PlannedRun],
    *,
    workers: int,
    threads: int,
    retry: bool = False,
    ray: str | None = None,
    on_progress: Progress | None = None,
) -> SweepOutcome:
    """Execute the unfinished runs of a sweep.

    After Ctrl-C every active run completes its step and saves a checkpoint; the next call resumes it.

    Args:
        runs: all runs of the sweep.
        workers: number of processes.
        threads: number of threads per process.
        retry: execute failed runs again.
        ray: `local` or HOST:PORT of a Ray cluster; None uses worker processes.
        on_progress: called about once a second.

    Raises:
        UserError: Ray is not installed, or its cluster cannot be reached.
    """
    pending, _ = to_do(runs, retry)
    ended: Ended = {}
    with tempfile.TemporaryDirectory(prefix="sharpscope-sweep-") as folder:
        backend = _processes if ray is None else _ray
        backend(
            pending, Path(folder), workers, threads, ray or "", ended, on_progress or (lambda pending, active: None)
        )
    outcome = SweepOutcome()
    for run in runs:
        _add_run(outcome, run, run in pending, *ended.get(run, (0, "")))
    return outcome


def _add_run(outcome: SweepOutcome, run: PlannedRun, executed: bool, code: int, text: str) -> None:
    """Add a run to `outcome`, given the exit code and the output of its worker (0 and empty if it had none)."""
    name, status = run.run_dir.name, run.status
    if status == "finished":
        (outcome.finished if executed else outcome.skipped).append(name)
    elif status == "running":
        outcome.held[name] = held_text(run.run_dir)
    elif status == "failed" or code > 0 or (code < 0 and status == "planned"):
        # A positive exit code is an error of the program, which would repeat.
        outcome.failed.append(name)
        outcome.errors[name] = _reason(run, code, text)
    else:
        outcome.interrupted.append(name)
        if code < 0:
            outcome.errors[name] = _reason(run, code, text)


def _reason(run: PlannedRun, code: int, text: str) -> str:
    """Why a run did not finish: the worker's error, the end in run.json, the signal, or the last line of output."""
    lines = text.strip().splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if errors:
        return errors[-1]
    if run.status == "failed" and read_run_info(run.run_dir).get("end"):
        return str(read_run_info(run.run_dir)["end"])
    if code < 0:
        return f"process ended by signal {-code} ({signal.strsignal(-code)})"
    return lines[-1] if lines else f"exit code {code} without output"


def _processes(
    pending: list[PlannedRun],
    configs: Path,
    workers: int,
    threads: int,
    ray: str,
    ended: Ended,
    on_progress: Progress,
) -> None:
    waiting = list(pending)
    active: dict[PlannedRun, tuple[subprocess.Popen[bytes], Path]] = {}
    environment = worker_environment(threads)
    with _forward_interrupts(lambda: [process for process, _ in active.values()]) as stopping:
        while waiting or active:
            while waiting and len(active) < workers and not stopping():
                run = waiting.pop(0)
                log = configs / f"{run.config.run_name}.log"
                with log.open("wb") as stream:
                    process = subprocess.Popen(
                        run_command(run, configs, threads),
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                        env=environment,
                        start_new_session=True,
                    )
                active[run] = (process, log)
            if stopping():
                waiting.clear()
            time.sleep(min(POLL_S, 0.2))
            for run, (process, log) in list(active.items()):
                if process.poll() is not None:
                    del active[run]
                    if not stopping():
                        ended[run] = process.returncode, log.read_text(encoding="utf-8", errors="replace")
            on_progress(pending, list(active))


def _ray(
    pending: list[PlannedRun],
    configs: Path,
    workers: int,
    threads: int,
    ray: str,
    ended: Ended,
    on_progress: Progress,
) -> None:
    """Execute the runs on a Ray cluster, whose nodes need access to the run folders (a shared disk)."""
    try:
        import ray as cluster
    except ImportError:
        raise UserError("--ray: Ray is not installed; pip install 'sharpscope[ray]'") from None
    if ray != "local":
        _check_address(ray)
    try:
        if ray == "local":
            cluster.init(
                num_cpus=workers * threads, include_dashboard=False, log_to_driver=False, configure_logging=False
            )
        else:
            cluster.init(address=ray, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"--ray {ray}: the cluster cannot be reached ({error}); start one with `ray start --head`"
        ) from None
    environment = worker_environment(threads)

    def work(command: list[str], folder: str) -> tuple[int, str]:
        """Run a command; return its exit code and the end of its output."""
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
        )
        return done.returncode, (done.stdout + done.stderr)[-2000:]

    try:
        remote = cluster.remote(num_cpus=threads, max_retries=0)(work)
        tasks = {remote.remote(run_command(run, configs, threads), str(Path.cwd())): run for run in pending}
        waiting = list(tasks)
        while waiting:
            done, waiting = cluster.wait(waiting, num_returns=1, timeout=POLL_S)
            for task in done:
                ended[tasks[task]] = cluster.get(task)
            on_progress(pending, [tasks[task] for task in waiting if tasks[task].status == "running"])
    finally:
        cluster.shutdown()


def _check_address(address: str) -> None:
    """Raise UserError if the cluster does not respond; Ray itself retries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"--ray {address}: must be `local`, HOST:PORT of a head node, or ray://HOST:PORT for a client")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--ray {address}: the cluster cannot be reached ({error}); start one with `ray start --head`"
        ) from None


def worker_environment(threads: int) -> dict[str, str]:
    """Environment of a worker, with its number of threads for every numerical library."""
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    return {**os.environ, **limits, "TOKENIZERS_PARALLELISM": "false"}


@contextmanager
def _forward_interrupts(processes: Callable[[], list[subprocess.Popen[bytes]]]) -> Iterator[Callable[[], bool]]:
    """Forward Ctrl-C to the workers: the first ends their step, the second stops them. Yields whether it was pressed."""
    stopping = False

    def handler(number: int, frame: object) -> None:
        """Interrupt all runs and start no more."""
        nonlocal stopping
        stopping = True
        for process in processes():
            process.send_signal(signal.SIGINT)

    try:
        previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread
        yield lambda: False
        return
    try:
        yield lambda: stopping
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def estimate_step_seconds(run: PlannedRun, threads: int, steps: int = 2) -> float:
    """Measure the median time of one step of `run` [s] in a temporary folder; the first step is excluded."""
    from sharpscope.traces import load_run
    from sharpscope.training import train

    with tempfile.TemporaryDirectory(prefix="sharpscope-estimate-") as folder:
        disabled = {"every": 0}
        config = run.config.model_copy(
            update={
                "out": folder,
                "name": "estimate",
                "steps": steps + 1,
                "threads": threads,
                "evaluation": run.config.evaluation.model_copy(update=disabled),
                "probes": run.config.probes.model_copy(update=disabled),
            }
        )
        train(config)
        table = load_run(config.run_dir).steps.iloc[1:]
        shutil.rmtree(config.run_dir, ignore_errors=True)
    return float(table[["generation_s", "training_s", "recording_s"]].sum(axis=1).median())

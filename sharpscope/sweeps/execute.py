"""Execute planned runs: worker processes with divided threads, or a Ray cluster. Finished runs are never repeated."""

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
from sharpscope.traces import lock_owner, read_run_info
from sharpscope.traces.files import set_aside
from sharpscope.traces.lock import held_text
from sharpscope.training.checkpoint import checkpoints

POLL_S = 1.0


@dataclass
class SweepOutcome:
    """How the runs of a sweep ended, by folder name.

    Attributes:
        finished: finished now.
        skipped: finished before.
        failed: ended by a mistake or a rule; those that have no run.json begin anew at the next call, the others on retry.
        interrupted: the same call goes on with them.
        held: folder name → who else is running it, and what to do about it.
        errors: folder name → why a run failed, or was interrupted by other than the user.
    """

    finished: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    interrupted: list[str] = field(default_factory=list)
    held: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


Ended = dict[PlannedRun, tuple[int, str]]
"""Exit code and output of every worker that ended by itself; a user's Ctrl-C is no failure."""


Progress = Callable[[Sequence[PlannedRun], Sequence[PlannedRun]], None]
"""Called about once a second with all runs that are to be done and those that are active."""


def to_do(runs: Sequence[PlannedRun], retry: bool) -> tuple[list[PlannedRun], list[PlannedRun]]:
    """(runs to execute, runs to leave): finished ones are left, failed ones too unless `retry`."""
    leave = {"finished", "running"} | (set() if retry else {"failed"})
    wanted = [run for run in runs if run.status not in leave]
    return wanted, [run for run in runs if run not in wanted]


def run_command(run: PlannedRun, configs: Path, threads: int) -> list[str]:
    """The command line of one run: anew, or on from its last checkpoint; a run without one is started over."""
    base = [sys.executable, "-m", "sharpscope", "run", "--quiet"]
    if run.status in ("interrupted", "failed"):
        if checkpoints(run.run_dir):
            return [*base, "--resume", str(run.run_dir)]
        # Nothing to go on from: what the aborted attempt recorded is kept aside, never merged.
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
    """Execute what is left of a sweep with `workers` processes of `threads` threads each.

    Ctrl-C lets every active run end its step and save a checkpoint; the same call later goes on from there.

    Raises:
        UserError: Ray is asked for and not installed, or its cluster cannot be reached.
    """
    wanted, _ = to_do(runs, retry)
    ended: Ended = {}
    with tempfile.TemporaryDirectory(prefix="sharpscope-sweep-") as folder:
        backend = _processes if ray is None else _ray
        backend(
            wanted, Path(folder), workers, threads, ray or "", ended, on_progress or (lambda everything, active: None)
        )
    outcome = SweepOutcome()
    for run in runs:
        _count(outcome, run, run in wanted, *ended.get(run, (0, "")))
    return outcome


def _count(outcome: SweepOutcome, run: PlannedRun, executed: bool, code: int, text: str) -> None:
    """Say in `outcome` how a run stands whose worker, if it had one, ended with exit code `code` and printed `text`."""
    name, status = run.run_dir.name, run.status
    if status == "finished":
        (outcome.finished if executed else outcome.skipped).append(name)
    elif status == "running":
        outcome.held[name] = held_text(run.run_dir, lock_owner(run.run_dir))
    elif status == "failed" or code > 0 or (code < 0 and status == "planned"):
        # A positive code is the program's own refusal: the same call again would only meet it again.
        outcome.failed.append(name)
        outcome.errors[name] = _reason(run, code, text)
    else:
        outcome.interrupted.append(name)
        if code < 0:
            outcome.errors[name] = _reason(run, code, text)


def _reason(run: PlannedRun, code: int, text: str) -> str:
    """Why a run did not finish: its worker's error, what run.json says of its end, the signal, or the last line printed."""
    lines = text.strip().splitlines()
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if told:
        return told[-1]
    if run.status == "failed" and read_run_info(run.run_dir).get("end"):
        return str(read_run_info(run.run_dir)["end"])
    if code < 0:
        return f"its process was ended by signal {-code} ({signal.strsignal(-code)})"
    return lines[-1] if lines else f"it ended with exit code {code} and printed nothing"


def _processes(
    wanted: list[PlannedRun],
    configs: Path,
    workers: int,
    threads: int,
    ray: str,
    ended: Ended,
    on_progress: Progress,
) -> None:
    waiting = list(wanted)
    active: dict[PlannedRun, tuple[subprocess.Popen[bytes], Path]] = {}
    environment = worker_environment(threads)
    with _forward_interrupts(lambda: [process for process, _ in active.values()]) as stopping:
        while waiting or active:
            while waiting and len(active) < workers and not stopping():
                run = waiting.pop(0)
                log = configs / f"{run.config.run_name}.log"
                with log.open("wb") as stream:
                    process = subprocess.Popen(
                        run_command(run, configs, threads), stdout=stream, stderr=subprocess.STDOUT, env=environment,
                        start_new_session=True,
                    )  # fmt: skip
                active[run] = (process, log)
            if stopping():
                waiting.clear()
            time.sleep(min(POLL_S, 0.2))
            for run, (process, log) in list(active.items()):
                if process.poll() is not None:
                    del active[run]
                    if not stopping():
                        ended[run] = process.returncode, log.read_text(encoding="utf-8", errors="replace")
            on_progress(wanted, list(active))


def _ray(
    wanted: list[PlannedRun],
    configs: Path,
    workers: int,
    threads: int,
    ray: str,
    ended: Ended,
    on_progress: Progress,
) -> None:
    """The same on a Ray cluster; the cluster's nodes must see the folder of the runs (a shared disk)."""
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
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
        )
        return done.returncode, (done.stdout + done.stderr)[-2000:]

    try:
        remote = cluster.remote(num_cpus=threads, max_retries=0)(work)
        tasks = {remote.remote(run_command(run, configs, threads), str(Path.cwd())): run for run in wanted}
        pending = list(tasks)
        while pending:
            done, pending = cluster.wait(pending, num_returns=1, timeout=POLL_S)
            for task in done:
                ended[tasks[task]] = cluster.get(task)
            on_progress(wanted, [tasks[task] for task in pending if tasks[task].status == "running"])
    finally:
        cluster.shutdown()


def _check_address(address: str) -> None:
    """UserError at once for a cluster that does not answer: Ray itself would go on trying for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise UserError(
            f"--ray {address}: must be `local` or HOST:PORT of a cluster's head (ray://HOST:PORT for a client)"
        )
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--ray {address}: the cluster cannot be reached ({error}); start one with `ray start --head`"
        ) from None


def worker_environment(threads: int) -> dict[str, str]:
    """The environment of a worker: its share of the threads for every numerical library."""
    shares = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    return {**os.environ, **shares, "TOKENIZERS_PARALLELISM": "false"}


@contextmanager
def _forward_interrupts(processes: Callable[[], list[subprocess.Popen[bytes]]]) -> Iterator[Callable[[], bool]]:
    """Pass the first Ctrl-C on to the workers as "end your step", the second as the same again, which stops them at once."""
    asked = False

    def handler(number: int, frame: object) -> None:
        nonlocal asked
        asked = True
        for process in processes():
            process.send_signal(signal.SIGINT)

    try:
        previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread
        yield lambda: False
        return
    try:
        yield lambda: asked
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def estimate_step_seconds(run: PlannedRun, threads: int, steps: int = 2) -> float:
    """Seconds of one step of `run`, measured in a throw-away folder (the first step, a warm-up, is not counted)."""
    from sharpscope.traces import load_run
    from sharpscope.training import train

    with tempfile.TemporaryDirectory(prefix="sharpscope-estimate-") as folder:
        quick = {"every": 0}
        config = run.config.model_copy(
            update={
                "out": folder, "name": "estimate", "steps": steps + 1, "threads": threads,
                "evaluation": run.config.evaluation.model_copy(update=quick),
                "probes": run.config.probes.model_copy(update=quick),
            }
        )  # fmt: skip
        train(config)
        table = load_run(config.run_dir).steps.iloc[1:]
        shutil.rmtree(config.run_dir, ignore_errors=True)
    return float(table[["generation_s", "training_s", "recording_s"]].sum(axis=1).median())

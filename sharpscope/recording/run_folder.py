"""A run's folder, created, resumed in and ended, also when the disk fails; and the machine that it is on: threads, device, memory."""

from __future__ import annotations

import errno
import functools
import os
import platform
import shutil
import subprocess
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from sharpscope import distributed
from sharpscope.config.run import EMBEDDED_PREFIX
from sharpscope.errors import UserError
from sharpscope.methods import method_label
from sharpscope.policy import Policy
from sharpscope.traces import (
    TraceWriter,
    create_run_info,
    read_run_info,
    rewind,
    update_run_info,
    write_atomic,
)
from sharpscope.traces.files import (
    ASIDE,
    RUN_FILE,
    TRACES,
    never_began,
    now,
    set_aside,
    start_files,
)

if TYPE_CHECKING:
    from sharpscope.config import RunConfig

TRACEBACK = "traceback.txt"
_REFUSALS = (
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
)


def begin_run_dir(config: RunConfig, policy: Policy, info: dict[str, object]) -> None:
    """Write config.yaml, tokenizer/ and, last, run.json, which marks a run."""
    from sharpscope.settings import to_yaml

    folder = config.run_dir
    try:
        write_atomic(folder / "config.yaml", to_yaml(config))
        policy.tokenizer.save_pretrained(folder / "tokenizer")
        create_run_info(folder, info)
    except Exception as error:  # tokenizers raise a plain Exception where the disk is full
        discard_unused(folder)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(
            f"out: {folder} cannot be written ({reason}); choose another --out, or free some space"
        ) from error


def run_info(
    config: RunConfig, policy: Policy, threads: int, launch: distributed.Launch
) -> dict[str, object]:
    """Contents of run.json for a new run."""
    cpu = f"{platform.machine()} CPU, {psutil.cpu_count(logical=False) or os.cpu_count()} cores"
    return {
        "method": method_label(config.method),
        "task": config.task.kind,
        "seed": config.seed,
        "config": config.model_dump(mode="json"),
        "versions": versions(),
        "commit": commit(),
        "device": torch.cuda.get_device_name(policy.device)
        if policy.device.type == "cuda"
        else cpu,
        "threads": threads,
        "processes": launch.processes,
        "sharded": launch.sharded,
        "parameters": sum(p.numel() for p in policy.model.parameters()),
        "trainable_parameters": sum(
            p.numel() for p in policy.model.parameters() if p.requires_grad
        ),
        "vocabulary": policy.head.weight.shape[0],
    }


def discard_unused(folder: Path) -> None:
    """Remove the files of a new run if nothing was recorded; other files in the folder stay."""
    if any((folder / TRACES).rglob("part-*.parquet")):
        return
    with suppress(OSError):
        for path in [*start_files(folder), folder / RUN_FILE, folder / TRACEBACK]:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        folder.rmdir()


def check_resume(config: RunConfig) -> None:
    """Refuse to resume a folder without a run, and a finished or reduced run. The caller holds its lock."""
    folder = config.run_dir
    if not (folder / RUN_FILE).exists():
        if not never_began(folder):
            raise UserError(f"run '{folder}' has no {RUN_FILE}; give the folder of a run")
        return
    info = read_run_info(folder)
    done = info.get("steps_done") or 0
    if info.get("status") == "finished" and done >= config.steps:
        raise UserError(
            f"run '{folder}' is finished: all of its steps are done (steps = {config.steps}); start a new run with another --out"
        )


def wind_back(folder: Path, step: int | None) -> list[str]:
    """Remove the rows after `step` from a run's traces, or rename these if it is None; returns notes for run.json."""
    notes = []
    traces = folder / TRACES
    if step is None and any(
        path.is_file() and not path.name.endswith(ASIDE) for path in traces.rglob("*")
    ):
        kept = set_aside(traces)
        notes = [
            f"no checkpoint to go on from: the run began again, what it had recorded is kept in {kept}"
        ]
    damaged = rewind(folder, -1 if step is None else step)
    return notes + [f"{name} is set aside: {why}" for name, why in damaged.items()]


def check_reference(folder: Path, fingerprint: str) -> None:
    """Keep the fingerprint of the reference policy in run.json; on resume, refuse one with other weights."""
    known = read_run_info(folder).get("reference_sha256")
    if known is None:
        update_run_info(folder, reference_sha256=fingerprint)
    elif known != fingerprint:
        raise UserError(
            f"run '{folder}': policy.model has other weights than when this run began, so its KL reference is lost; put "
            "the first model back, or start a new run"
        )


def refused_write(error: OSError, folder: Path) -> str:
    """A message on a write that the disk refused, with what to do; empty for any other error."""
    number = error.errno
    # from Rust: "No space left on device (os error 28)"
    if number is None and "os error" in str(error):
        number = int("".join(c for c in str(error).rpartition("os error ")[2] if c.isdigit()) or 0)
    if number not in _REFUSALS:
        return ""
    text = " ".join(str(error).split())
    return f"{folder} cannot be written ({text}); free space or allow writing, then: sharpscope run --resume {folder}"


def keep_traceback(folder: Path, error: BaseException) -> str:
    """Write an unexpected error's traceback into the run's folder; returns the error in one line."""
    with suppress(OSError):
        if distributed.is_rank_zero():  # the others' are on their standard error
            write_atomic(folder / TRACEBACK, "".join(traceback.format_exception(error)))
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class NoWriter:
    """Stands for a TraceWriter in processes that do not write: the first process writes the same rows."""

    def __enter__(self) -> NoWriter:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing was opened."""

    def append(self, table: str, columns: Mapping[str, object]) -> int:
        """Do nothing."""
        return 0

    def flush(self) -> None:
        """Do nothing."""


def trace_writer(folder: Path) -> TraceWriter | NoWriter:
    """The writer of a run's traces in the first process; in the others one that does nothing."""
    return TraceWriter(folder) if distributed.is_rank_zero() else NoWriter()


def note(folder: Path, **changes: object) -> None:
    """Update entries of run.json, in the first process."""
    if distributed.is_rank_zero():
        update_run_info(folder, **changes)


def end_run(folder: Path, **changes: object) -> None:
    """Write the last entries of run.json. On a full disk its status stays `running`, and readers see that no process runs."""
    with suppress(OSError):
        note(folder, finished=now(), **changes)


# -- the machine -------------------------------------------------------------------------------------------------------

PACKAGES = (
    *("sharpscope", "torch", "transformers", "tokenizers", "numpy", "scipy", "pandas", "pyarrow"),
    *("accelerate", "peft", "trl"),
)
THREADS = torch.get_num_threads()
TINY = 20 * 2**20
"""Weights up to this size [bytes] are computed with one thread: a second gains little, and waits for the first at each of
thousands of small operations, which on a shared machine costs more than it gains."""


def default_threads(model: str | None = None) -> int:
    """Default number of CPU threads: one for a tiny model, else torch's own."""
    return 1 if model is not None and _is_tiny(model) else THREADS


def set_threads(threads: int | None, model: str | None = None) -> int:
    """Give torch its CPU threads, `threads` or by default those of `default_threads(model)`; returns the number set."""
    chosen = default_threads(model) if threads is None else threads
    torch.set_num_threads(chosen)
    return chosen


def _is_tiny(model: str) -> bool:
    """Whether a model is an embedded one, or a folder with few weights that are not an adapter's."""
    folder = Path(model).expanduser()
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    whole = not (folder / "adapter_config.json").exists()
    return model.startswith(EMBEDDED_PREFIX) or (0 < weights <= TINY and whole)


@functools.cache  # 0.1 s: each is read from the package's metadata
def versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers depend on, of those that are installed."""
    installed = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def commit() -> str | None:
    """The commit of the sharpscope sources, with `+` where files differ from it; None outside a git checkout."""
    root = Path(__file__).resolve().parents[2]
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
    try:
        found = subprocess.run(
            command, cwd=root, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() if (root / ".git").exists() else None


def peak_memory_bytes(device: torch.device) -> dict[str, int]:
    """Peak memory of this process, as far as its system tells, and on a GPU of the allocator [bytes]."""
    peak: dict[str, int] = {}
    with suppress(ImportError):
        import resource  # of POSIX

        unit = 1 if sys.platform == "darwin" else 1024
        peak["process"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if device.type == "cuda":
        peak["device"] = torch.cuda.max_memory_allocated(device)
    return peak

"""The machine a run is on: threads, device, versions, memory."""

from __future__ import annotations

import functools
import os
import platform
import resource
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from sharpscope.config.run import EMBEDDED_PREFIX

OPTIONAL = ("accelerate", "peft", "trl")
PACKAGES = ("sharpscope", "torch", "transformers", "tokenizers", "numpy", "scipy", "pandas", "pyarrow", *OPTIONAL)
TINY = 20 * 2**20
"""Weights up to this size [bytes] are computed with one thread: a second gains little, and waits for the first at each of
thousands of small operations, which on a shared machine costs more than it gains."""


def default_threads(model: str | None = None) -> int:
    """Default number of CPU threads for a model, as `policy.model` names it; one on the hub is taken to be large.

    One for a tiny model, else `OMP_NUM_THREADS` where it is set, else the physical cores of this process divided by the run's
    processes on this machine.
    """
    if model is not None and _is_tiny(model):
        return 1
    if os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or usable
    return max(1, min(usable, physical) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


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


def describe_device(device: torch.device) -> str:
    """A readable name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {psutil.cpu_count(logical=False) or os.cpu_count()} cores"


@functools.cache  # 0.1 s: each is read from the package's metadata
def versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers depend on."""
    installed = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            if package not in OPTIONAL:
                installed[package] = "not installed as a package"
    return installed


def commit() -> str | None:
    """The commit of the sharpscope sources, with `+` where files differ from it; None outside a git checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", "sharpscope") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def peak_memory_bytes(device: torch.device) -> dict[str, int]:
    """Peak resident memory of this process and, on a GPU, of the allocator [bytes]."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak: dict[str, Any] = {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if device.type == "cuda":
        peak["device"] = torch.cuda.max_memory_allocated(device)
    return peak

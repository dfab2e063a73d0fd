"""Memory that is in use and memory that is free, on the machine, in a container and on a GPU."""

from __future__ import annotations

import math
from pathlib import Path

import psutil
import torch
from safetensors import safe_open

from sharpscope.errors import UserError

CGROUP = Path("/sys/fs/cgroup")
GIB = 2**30


def memory_share(device: torch.device) -> float:
    """Share of memory in use: of the model's GPU, or of the machine or this process's container, whichever is fuller."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return 1 - free / total
    used, limit = container_memory(CGROUP)
    return max(float(psutil.virtual_memory().percent) / 100, used / limit)


def container_memory(folder: Path) -> tuple[float, float]:
    """Memory of a control group in use, without reclaimable page cache, and its limit [bytes]; 0 and infinity without a limit."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return (
            (used - int(counts.get("inactive_file", 0)), int(limit))
            if limit != "max"
            else (0.0, float("inf"))
        )
    except (OSError, ValueError):
        return 0.0, float("inf")


def free_memory(device: torch.device) -> float:
    """Memory that a process can still take on a device [bytes]."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(
            free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        )
    used, limit = container_memory(CGROUP)
    return min(float(psutil.virtual_memory().available), limit - used)


def require_memory(needed: float, device: torch.device, what: str, advice: str) -> None:
    """Check that `needed` bytes are free before they are taken.

    Raises:
        UserError: less is free; the message says what needs how much, and `advice`.
    """
    free = free_memory(device)
    if needed > free:
        raise UserError(
            f"memory: {what} takes about {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are free; {advice}"
        )


def stored_numbers(folder: Path) -> int:
    """Number of values in the safetensors files of a folder, from their headers."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - no mapping
    return count

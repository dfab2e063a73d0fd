"""Every random draw of a run comes from a generator that is a function of (seed, purpose, step).

Nothing has to be saved to resume exactly, and adding a probe never shifts another draw.
"""

from __future__ import annotations

import hashlib

import torch


def derive(seed: int, purpose: str, *parts: int) -> int:
    """A 63-bit seed from the run's seed, a purpose and integers such as the step."""
    text = f"{seed}/{purpose}/" + "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, purpose: str, *parts: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh torch generator for one purpose at one step."""
    return torch.Generator(device=device).manual_seed(derive(seed, purpose, *parts))

"""Seeds of random draws. Every draw of a run uses a generator derived from (seed, purpose, step).

Resuming therefore needs no saved random state, and a new probe does not change other draws.
"""

from __future__ import annotations

import hashlib

import torch


def derive(seed: int, purpose: str, *parts: int) -> int:
    """Derive a 63-bit seed from the run's seed, a purpose and integers such as the step."""
    text = f"{seed}/{purpose}/" + "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(
    seed: int,
    purpose: str,
    *parts: int,
    device: torch.device | str = "cpu",
) -> torch.Generator:
    """New torch generator with the seed of `derive`."""
    return torch.Generator(device=device).manual_seed(derive(seed, purpose, *parts))

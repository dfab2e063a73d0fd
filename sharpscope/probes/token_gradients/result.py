"""What `score_norms` returns, and the ledger in which the tiers add it up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from sharpscope.probes.token_gradients.rows import Rows

Tier = Literal["head", "local", "sketch", "exact"]
TIERS: tuple[Tier, ...] = ("head", "local", "sketch", "exact")


@dataclass(frozen=True)
class ScoreNorms:
    """‖∇_θ log π_t‖₂ of every token where the mask is 1; all tensors (N, S) and 0 where it is 0.

    Attributes:
        values: the norm, the root of `squared` (of its positive part).
        squared: the squared norm as estimated; the sketch's may be negative.
        std_error: standard error of `squared` (sketch), zeros (exact; head for its own definition), None where the
            error is not known (local).
        tier: how it was computed.
        groups: norms by group of parameters, on two divisions of the same sum of squares: by kind (embedding,
            attention, mlp, norm, head, other) and by layer (layers.0, …); empty for the sketch.
        checked: largest relative error that the self-check found on this model; None = not checked.
    """

    values: Tensor
    squared: Tensor
    std_error: Tensor | None
    tier: Tier
    groups: Mapping[str, Tensor]
    checked: float | None = None


@dataclass
class Ledger:
    """Sums of squared norms (M,) of a chunk's chosen tokens, per group of parameters."""

    groups_of: Mapping[str, tuple[str, ...]]
    total: Tensor
    groups: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, squares: Tensor, index: Tensor | None = None) -> None:
        """Add parameter `name`'s part: (M,), or (m,) for the tokens `index`."""
        squares = squares.to(self.total)
        for key in self.groups_of[name]:
            self.groups.setdefault(key, torch.zeros_like(self.total))
        for target in (self.total, *(self.groups[key] for key in self.groups_of[name])):
            if index is None:
                target.add_(squares)
            else:
                target.index_add_(0, index, squares)


@dataclass
class Collector:
    """Lays the chunks' results out in the caller's shape."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    squared: Tensor = field(init=False)
    groups: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.squared = self._blank()

    def _blank(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def write(self, rows: Rows, ledger: Ledger) -> None:
        """Put a chunk's sums where its tokens belong."""
        rows.write(self.squared, ledger.total)
        for name, squares in ledger.groups.items():
            rows.write(self.groups.setdefault(name, self._blank()), squares)

    def result(self, tier: Tier, std_error: Tensor | None) -> ScoreNorms:
        """The finished result; group squares are non-negative but for rounding."""
        groups = {name: squares.clamp_min(0).sqrt() for name, squares in sorted(self.groups.items())}
        return ScoreNorms(self.squared.clamp_min(0).sqrt(), self.squared, std_error, tier, groups)

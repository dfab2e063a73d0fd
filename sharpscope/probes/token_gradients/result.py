"""Result of `score_norms`, and the accumulators of the tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from sharpscope.probes.estimate import html_table
from sharpscope.probes.token_gradients.rows import Rows

Tier = Literal["head", "local", "sketch", "exact"]
TIERS: tuple[Tier, ...] = ("head", "local", "sketch", "exact")


@dataclass(frozen=True)
class ScoreNorms:
    """Score norms ‖∇_θ log π_t‖₂; all tensors are (N, S) and 0 where the mask is 0.

    Attributes:
        values: norms, the square root of the positive part of `squared`.
        squared: estimated squared norms; those of `sketch` may be negative.
        std_error: standard error of `squared` for `sketch`, 0 for `exact` and `head`, None for `local`.
        tier: tier that computed the norms.
        groups: norms by kind of parameter (embedding, attention, mlp, norm, head, other) and by layer (layers.0, …), two
            partitions of the same sum of squares; empty for `sketch`.
        checked: largest relative error found by the self-check on this model; None if not checked.
    """

    values: Tensor
    squared: Tensor
    std_error: Tensor | None
    tier: Tier
    groups: Mapping[str, Tensor]
    checked: float | None = None

    def _repr_html_(self) -> str:
        norms = self.values[self.values > 0].double()
        rows = {"tokens with a norm above 0": f"{norms.numel():,}"}
        if norms.numel():
            rows |= {"median": f"{norms.median().item():.4g}", "largest": f"{norms.max().item():.4g}"}
        rows["error found by the self-check"] = "not checked" if self.checked is None else f"{self.checked:.1e}"
        return html_table(f"score norms, tier {self.tier}", rows)


@dataclass
class Ledger:
    """Sums of squared norms (M,) of the chosen tokens of a chunk, by group of parameters."""

    groups_of: Mapping[str, tuple[str, ...]]
    total: Tensor
    groups: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, squares: Tensor, index: Tensor | None = None) -> None:
        """Add squared norms of parameter `name`: (M,), or (m,) for the tokens `index`."""
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
    """Collects the results of chunks in the caller's shape."""

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
        """Write the sums of a chunk to the positions of its tokens."""
        rows.write(self.squared, ledger.total)
        for name, squares in ledger.groups.items():
            rows.write(self.groups.setdefault(name, self._blank()), squares)

    def result(self, tier: Tier, std_error: Tensor | None) -> ScoreNorms:
        """The result; squared norms of groups are clamped at 0, which only removes rounding."""
        groups = {name: squares.clamp_min(0).sqrt() for name, squares in sorted(self.groups.items())}
        return ScoreNorms(self.squared.clamp_min(0).sqrt(), self.squared, std_error, tier, groups)

"""Result of `score_norms` and its accumulators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sharpscope.probes.token_gradients.rows import Rows

NormMethod = Literal["head", "local", "exact"]


@dataclass(frozen=True)
class ScoreNorms:
    """Score norms ‖∇_θ log π_t‖₂; all tensors are (N, S) and 0 where the mask is 0.

    Attributes:
        values: norms.
        squared: squared norms.
        method: method that computed the norms.
        groups: norms by kind of parameter (embedding, attention, mlp, norm, head, other) and by layer (layers.0, …), two
            partitions of the same sum of squares.
        checked: largest relative error found by the self-check on this model; None if not checked.
    """

    values: Tensor
    squared: Tensor
    method: NormMethod
    groups: Mapping[str, Tensor]
    checked: float | None = None


class Sums:
    """Sums of squared norms (M,) of the chosen tokens of a chunk, in all and by group of parameters."""

    def __init__(self, rows: Rows, groups_of: Mapping[str, tuple[str, ...]], dtype: torch.dtype) -> None:
        self.total = torch.zeros(int(rows.chosen.sum()), dtype=dtype, device=rows.ids.device)
        self.groups: dict[str, Tensor] = {}
        self._groups_of = groups_of

    def add(self, name: str, squares: Tensor, index: Tensor | None = None) -> None:
        """Add squared norms of parameter `name`: (M,), or (m,) for the tokens `index`."""
        squares = squares.to(self.total)
        for group in self._groups_of[name]:
            self.groups.setdefault(group, torch.zeros_like(self.total))
        for target in (self.total, *(self.groups[group] for group in self._groups_of[name])):
            if index is None:
                target.add_(squares)
            else:
                target.index_add_(0, index, squares)


class Collector:
    """Collects the sums of chunks in the caller's shape."""

    def __init__(self, rows: Rows, dtype: torch.dtype) -> None:
        self.dtype, self.groups = dtype, dict[str, Tensor]()
        self.squared = torch.zeros(rows.shape, dtype=dtype, device=rows.ids.device)

    def write(self, rows: Rows, sums: Sums) -> None:
        """Write the sums of a chunk to the positions of its tokens."""
        rows.write(self.squared, sums.total)
        for name, squares in sums.groups.items():
            rows.write(self.groups.setdefault(name, torch.zeros_like(self.squared)), squares)

    def result(self, method: NormMethod) -> ScoreNorms:
        """The result; squared norms of groups are clamped at 0, which only removes rounding."""
        groups = {name: squares.clamp_min(0).sqrt() for name, squares in sorted(self.groups.items())}
        return ScoreNorms(self.squared.clamp_min(0).sqrt(), self.squared, method, groups)

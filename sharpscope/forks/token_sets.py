"""Tokens of a step that `fork RUN --without` leaves out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from sharpscope.errors import UserError
from sharpscope.policy import Rollouts


@dataclass(frozen=True)
class TokenSet:
    """Tokens of a step that are left out, as they are named: `top:12`, `prompt:3`, `completion:17` or `file:tokens.csv`."""

    kind: str
    value: str

    @classmethod
    def parse(cls, text: str) -> TokenSet:
        """Check what the user wrote."""
        kind, _, value = text.partition(":")
        known = ("top", "prompt", "completion", "file")
        number = value.isdecimal() and (kind != "top" or int(value) > 0)
        if kind not in known or not (number if kind != "file" else Path(value).is_file()):
            raise UserError(
                f"--without {text}: give top:12, prompt:3 (its group in the step), completion:17 (its row), or file:PATH of a CSV with "
                "columns rollout, position and, if it has several steps, step"
            )
        return cls(kind, value)

    def __str__(self) -> str:
        return f"{self.kind}:{self.value}" if self.kind == "file" else f"{self.kind} {self.value}"

    def chosen(self, step: int, rollouts: Rollouts, score: Tensor | None) -> Tensor:
        """(N, T) bool, the tokens of a step; `score` ranks those of `top`."""
        shape = rollouts.completion_mask.shape
        if self.kind == "top":
            assert score is not None
            found = self._leading(step, score)
        elif self.kind == "file":
            found = self._listed(step, shape)
        else:
            labels = rollouts.group.cpu() if self.kind == "prompt" else torch.arange(shape[0])
            number = int(self.value)
            if not bool((labels == number).any()):
                raise UserError(
                    f"--without {self}: step {step} has the numbers 0 to {int(labels.max())}"
                )
            found = (labels == number)[:, None].expand(shape)
        return found & rollouts.completion_mask.bool().cpu()

    def _leading(self, step: int, score: Tensor) -> Tensor:
        """The tokens with the largest |score|."""
        size = score.abs().nan_to_num(0.0).flatten()
        count = int(self.value)
        some = int((size > 0).sum())
        if some < 2 * count:
            raise UserError(
                f"--without top:{count}: only {some} tokens of step {step} have a part in its gradient; give at most {some // 2}"
            )
        chosen = torch.zeros(size.shape, dtype=torch.bool)
        chosen[size.argsort(descending=True, stable=True)[:count]] = True
        return chosen.view_as(score)

    def _listed(self, step: int, shape: torch.Size) -> Tensor:
        """The tokens that the file has of a step."""
        table = pd.read_csv(self.value)
        if "step" in table:
            table = table[table["step"] == step]
        if not {"rollout", "position"} <= set(table):
            raise UserError(f"--without {self}: needs the columns rollout and position")
        rollout = table["rollout"]
        position = table["position"]
        inside = rollout.between(0, shape[0] - 1) & position.between(0, shape[1] - 1)
        if not bool(inside.all()):
            first = table[~inside].iloc[0]
            raise UserError(
                f"--without {self}: step {step} has no token at rollout {first['rollout']}, position {first['position']}"
            )
        chosen = torch.zeros(shape, dtype=torch.bool)
        chosen[rollout.to_list(), position.to_list()] = True
        return chosen

"""Completions, and completions with rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True)
class Completions:
    """Completions of a policy: N = prompts × G rows, the rows of a group adjacent; P prompt and T completion positions.

    Attributes:
        input_ids: (N, P+T) long, left-padded prompts followed by right-padded completions.
        attention_mask: (N, P+T) long, 0 on padding.
        completion_ids: (N, T) long, the last T columns of `input_ids`.
        completion_mask: (N, T) long, 1 for tokens sampled by the policy, which are in the loss (including the end-of-text
            token), 0 for padding and text from an environment.
        behavior_logp: (N, T) float32 [nats], log-probability under softmax(z/T) before top-p and top-k; 0 outside the
            mask. Greedy completions (temperature 0) have it at temperature 1.
        sampler_logp: (N, T) float32 [nats], log-probability after top-p and top-k; None if neither is used (it would equal
            `behavior_logp`).
        group: (N,) long, index of the prompt.
        truncated: (N,) bool, ended by the token limit instead of an end-of-text token.
        texts: N completions as text, without the end-of-text token.
    """

    input_ids: Tensor
    attention_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    behavior_logp: Tensor
    sampler_logp: Tensor | None
    group: Tensor
    truncated: Tensor
    texts: list[str]

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def prompt_width(self) -> int:
        """P, the number of prompt columns of `input_ids`."""
        return self.input_ids.shape[1] - self.completion_ids.shape[1]

    @property
    def lengths(self) -> Tensor:
        """(N,) completion lengths [tokens], including environment text and end-of-text token."""
        return self.attention_mask[:, self.prompt_width :].sum(1)

    @property
    def prompt_lengths(self) -> Tensor:
        """(N,) prompt lengths [tokens] without padding."""
        return self.attention_mask[:, : self.prompt_width].sum(1)

    def rows(self, index: Tensor) -> Self:
        """Select the rows `index` (long or bool), without changing the width."""
        order = index.nonzero()[:, 0] if index.dtype == torch.bool else index
        selected = {name: v[order.to(v.device)] for name, v in self._tensors().items()}
        return replace(self, **selected, texts=[self.texts[i] for i in order.tolist()])

    def to(self, device: torch.device) -> Self:
        """Move the tensors to `device`."""
        moved = {name: v.to(device) for name, v in self._tensors().items()}
        return replace(self, **moved, texts=self.texts)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def with_reward(self, reward: Tensor) -> Rollouts:
        """Add rewards (N,), converted to float32 on the completions' device."""
        values = {field.name: getattr(self, field.name) for field in fields(Completions)}
        return Rollouts(**values, reward=reward.to(self.input_ids.device, torch.float32))


@dataclass(frozen=True)
class Rollouts(Completions):
    """Completions with rewards.

    Attributes:
        reward: (N,) float32.
    """

    reward: Tensor


def completions_of(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    counted: Sequence[Sequence[bool]] | None = None,
    device: torch.device | str = "cpu",
) -> Completions:
    """Token IDs of N prompts and completions without a sampler: `behavior_logp` is NaN, each row is a group, texts are empty.

    `counted`: for each completion's tokens, whether they are in the loss; None: all are.
    """
    mask = [[1] * len(row) for row in completions] if counted is None else counted
    asked = padded(prompts, -1, left=True).to(device)
    given = padded(completions, -1).to(device)
    ids = torch.cat([asked, given], 1)
    return Completions(
        input_ids=ids.clamp_min(0),
        attention_mask=(ids >= 0).long(),
        completion_ids=given.clamp_min(0),
        completion_mask=padded(mask).to(device),
        behavior_logp=torch.full(given.shape, torch.nan, device=device),
        sampler_logp=None,
        group=torch.arange(len(ids), device=device),
        truncated=torch.zeros(len(ids), dtype=torch.bool, device=device),
        texts=[""] * len(ids),
    )


def padded(rows: Sequence[Sequence[int]], value: int = 0, left: bool = False) -> Tensor:
    """(n, width) long: the rows followed by `value`, or preceded by it."""
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    return pad_sequence(
        tensors,
        batch_first=True,
        padding_value=value,
        padding_side="left" if left else "right",
    )


C = TypeVar("C", bound=Completions)


def join_rollouts(*parts: C) -> C:
    """Concatenate rows; prompts are padded on the left and completions on the right to the widest."""
    prompt = max(part.prompt_width for part in parts)
    width = max(part.completion_ids.shape[1] for part in parts)

    def widened(part: C, name: str) -> Tensor:
        """A tensor of a part as wide as the widest part."""
        value: Tensor = getattr(part, name)
        if value.ndim != 2:
            return value
        left = prompt - part.prompt_width if name in ("input_ids", "attention_mask") else 0
        return torch.nn.functional.pad(value, (left, width - part.completion_ids.shape[1]), value=0)

    joined: dict[str, Any] = {"texts": [text for part in parts for text in part.texts]}
    for name in (field.name for field in fields(parts[0]) if field.name != "texts"):
        present = all(getattr(part, name) is not None for part in parts)
        joined[name] = torch.cat([widened(part, name) for part in parts]) if present else None
    return replace(parts[0], **joined)

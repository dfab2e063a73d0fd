"""Losses L(θ) of a causal language model over fixed rows of tokens, for the probes of the loss surface.

Each is a sum over rows whose coefficients are fixed for the whole batch, so that values, gradients and Hessians do not
depend on the microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import get_args

import torch
from torch import Tensor

from sharpscope.config.probes import ObjectiveName
from sharpscope.errors import UserError
from sharpscope.policy import Rollouts, completions_of

OBJECTIVES: tuple[ObjectiveName, ...] = get_args(ObjectiveName)


@dataclass(frozen=True)
class TokenBatch:
    """Rows of tokens with padding on the right, which a causal model does not see."""

    input_ids: Tensor  # (N, S) long
    lengths: Tensor  # (N,) tokens without padding
    scored: Tensor  # (N, S) bool, tokens whose log-probability enters the loss; never the first token of a row
    anchor_logp: Tensor  # (N, S) [nats], log-probability of the scored tokens under the policy that drew them
    reward: Tensor  # (N,); a success in [0, 1] for `expected_failure`

    def __len__(self) -> int:
        return len(self.input_ids)

    def rows(self, index: Tensor) -> TokenBatch:
        """The rows `index`, truncated to the longest of them."""
        width = int(self.lengths[index].max())
        return TokenBatch(
            self.input_ids[index, :width],
            self.lengths[index],
            self.scored[index, :width],
            self.anchor_logp[index, :width],
            self.reward[index],
        )

    @cached_property
    def prompts(self) -> list[int]:
        """Prompt index of each row, from 0; rows with equal tokens before the first scored token share a prompt."""
        known: dict[tuple[int, ...], int] = {}
        width = self.scored.shape[1]
        ends = torch.where(self.scored.any(1), self.scored.long().argmax(1), width).tolist()
        texts = [tuple(ids[:end]) for ids, end in zip(self.input_ids.tolist(), ends, strict=True)]
        return [known.setdefault(text, len(known)) for text in texts]

    def to(self, device: torch.device | str) -> TokenBatch:
        """The batch on another device."""
        return TokenBatch(**{part.name: getattr(self, part.name).to(device) for part in fields(self)})


def token_batch(
    input_ids: Tensor,
    attention_mask: Tensor,
    scored: Tensor,
    *,
    anchor_logp: Tensor | None = None,
    reward: Tensor | None = None,
) -> TokenBatch:
    """A `TokenBatch` from rows with padding anywhere.

    Args:
        input_ids: (N, S) tokens.
        attention_mask: (N, S), 0 on padding.
        scored: (N, S), 1 on the tokens whose log-probability enters the loss.
        anchor_logp: (N, S) [nats]; None for zeros, which `Objective.anchored` replaces.
        reward: (N,); None for ones.

    Raises:
        UserError: no token is scored, or a scored token has no prefix.
    """
    present = attention_mask.bool()
    order = torch.argsort(~present, dim=1, stable=True)  # real tokens first, in their order
    lengths = present.sum(1)
    width = int(lengths.max()) if len(lengths) else 0
    order = order[:, :width]

    keep = torch.arange(width, device=input_ids.device) < lengths[:, None]
    marked = scored.bool().gather(1, order) & keep
    if not bool(marked.any()):
        raise UserError("probe data: no token is scored; completions must not be empty")
    if bool(marked[:, 0].any()):
        raise UserError("probe data: a scored token has no prefix; every row needs a prompt of at least one token")
    anchors = torch.zeros(marked.shape, device=marked.device) if anchor_logp is None else anchor_logp.gather(1, order)
    worth = torch.ones(len(marked), device=marked.device) if reward is None else reward
    ids = input_ids.gather(1, order).long()
    # Fill the padding with the row's first token; pad tokens would make transformers warn.
    return TokenBatch(torch.where(keep, ids, ids[:, :1]), lengths, marked, anchors.masked_fill(~marked, 0.0), worth)


def completion_batch(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, reward: Tensor | None = None
) -> TokenBatch:
    """A `TokenBatch` from token ids of prompts and completions, with the completion tokens scored.

    Raises:
        UserError: a prompt or a completion is empty.
    """
    for number, (prompt, completion) in enumerate(pairs):
        if not prompt or not completion:
            raise UserError(f"probe data, row {number}: the {'completion' if prompt else 'prompt'} is empty")
    rows = completions_of([prompt for prompt, _ in pairs], [completion for _, completion in pairs])
    scored = torch.nn.functional.pad(rows.completion_mask, (rows.prompt_width, 0))
    return token_batch(rows.input_ids, rows.attention_mask, scored, reward=reward)


def rollout_batch(rollouts: Rollouts, *, reward: Tensor | None = None) -> TokenBatch:
    """A `TokenBatch` with the loss tokens scored and `behavior_logp` as anchors; `reward` (N,) replaces the rollouts' own."""
    left = (rollouts.input_ids.shape[1] - rollouts.completion_mask.shape[1], 0)
    return token_batch(
        rollouts.input_ids,
        rollouts.attention_mask,
        torch.nn.functional.pad(rollouts.completion_mask, left),
        anchor_logp=torch.nn.functional.pad(rollouts.behavior_logp, left),
        reward=rollouts.reward if reward is None else reward,
    )


@dataclass(frozen=True)
class Objective:
    """A scalar loss over one batch.

    With ℓ_it = log π_θ(token t of row i | prefix) and r_it = exp(ℓ_it − anchor_it):

    - `nll`: −Σ_it ℓ_it / number of scored tokens.
    - `expected_failure`: mean_i [1 − R_i exp(Σ_t log r_it)]. If the rows were drawn from the policy at the anchors, its value,
      gradient and Hessian are unbiased estimates of those of 1 − E_y R(y). (The Hessian of −mean R·Σ log π is biased.)

    Attributes:
        name: `nll` or `expected_failure`.
        batch: rows of tokens.
        temperature: softmax temperature of the log-probabilities.
        stale: whether the rows were drawn by another policy and keep their recorded anchors. If False, the probes replace
            the anchors by the probed policy's log-probabilities, so that r = 1.
    """

    name: ObjectiveName
    batch: TokenBatch
    temperature: float = 1.0
    stale: bool = False

    def __post_init__(self) -> None:
        worth = self.batch.reward
        if self.name == "expected_failure" and not bool(((worth >= 0) & (worth <= 1)).all()):
            raise UserError(
                f"reward, {float(worth.min()):g} to {float(worth.max()):g}: expected_failure needs a success in [0, 1]"
            )

    @cached_property
    def prompt_weight(self) -> Tensor:
        """(k,) share of each prompt in the mean over the batch, of scored tokens for `nll`, of rows for the others; sums to 1."""
        batch = self.batch
        each = batch.scored.sum(1).double() if self.name == "nll" else torch.ones(len(batch)).double()
        prompt = torch.tensor(batch.prompts)
        total = torch.zeros(int(prompt.max()) + 1, dtype=torch.float64).index_add_(0, prompt, each.cpu())
        return total / total.sum()

    def by_prompt(self, shares: Tensor) -> Tensor:
        """One value for each prompt, whose mean is L and whose standard error of the mean is that of L over prompts, (k,).

        The values are L + k·(s_i − w_i·L), s_i the prompt's part of L and w_i its `prompt_weight`: those of the linearized
        ratio estimator Σ s_i/Σ w_i, so that prompts with more tokens or rows weigh more. They are linear in the shares.

        Args:
            shares: (N,) parts of L (see `row_shares`), or of a derivative of L, by row.
        """
        weight = self.prompt_weight
        prompt = torch.tensor(self.batch.prompts)
        parts = torch.zeros_like(weight).index_add_(0, prompt, shares.detach().double().cpu())
        return parts.sum() + len(weight) * (parts - weight * parts.sum())

    def ceiling(self, loss: float) -> float:
        """The largest rise that L can have from the value `loss`: 1 − loss for `expected_failure`; NaN for `nll`, which has no bound.

        At its anchors 1 − loss is the share of correct completions.
        """
        return 1 - loss if self.name == "expected_failure" else math.nan

    def row_shares(self, index: Tensor, logp: Tensor) -> Tensor:
        """The part of L that each of the rows `index` (n,) contributes, (n,); the parts of all rows sum to L.

        Args:
            index: (n,) rows.
            logp: (n, width) log-probabilities with their graph, used on scored tokens only.
        """
        batch, width = self.batch, logp.shape[1]
        scored = batch.scored[index, :width]
        logp = torch.where(scored, logp, 0.0)
        if self.name == "nll":
            return -logp.sum(1) / float(batch.scored.sum())
        log_ratio = logp - batch.anchor_logp[index, :width].to(logp.dtype)  # both 0 off the scored tokens
        success = batch.reward[index].to(logp.dtype) * log_ratio.sum(1).exp()  # (n,)
        return (1 - success) / len(batch)

    def anchored(self, logp: Tensor) -> Objective:
        """The objective with log-probabilities (N, S) as anchors; a stale objective keeps its own."""
        if self.stale:
            return self
        held = torch.where(self.batch.scored, logp.detach(), 0.0)
        return replace(self, batch=replace(self.batch, anchor_logp=held))

    def rows(self, index: Tensor) -> Objective:
        """The objective over some of the rows, normalized over these."""
        return replace(self, batch=self.batch.rows(index))

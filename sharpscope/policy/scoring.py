"""Log-probabilities and statistics of rollouts, in microbatches distributed over processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from sharpscope import distributed
from sharpscope.policy.adapters import without_adapters
from sharpscope.policy.forward import PerToken, Scored, microbatches, score_completions
from sharpscope.policy.head import bare
from sharpscope.policy.rollouts import Rollouts
from sharpscope.policy.sharding import is_sharded
from sharpscope.policy.token_stats import STAT_NAMES, TokenStats

# Maximum size of the activations of a forward and backward pass.
ACTIVATION_BYTES = {"cpu": 4 * 2**30, "cuda": 16 * 2**30}


def activation_tokens(model: nn.Module, gradient_checkpointing: bool) -> int:
    """Number of tokens whose activations take about `ACTIVATION_BYTES`, from the sizes of a transformer's layers."""
    config, parameter = bare(model).config.get_text_config(), next(model.parameters())
    hidden, layers = config.hidden_size, config.num_hidden_layers
    layer = 16 * hidden + 4 * (getattr(config, "intermediate_size", None) or 4 * hidden)
    numbers = layers * hidden + layer if gradient_checkpointing else layers * layer
    budget = ACTIVATION_BYTES.get(parameter.device.type, ACTIVATION_BYTES["cuda"])
    return max(1, budget // (numbers * max(4, parameter.element_size())))


@dataclass(frozen=True)
class Scorer:
    """Forward passes of a policy over rollouts.

    Attributes:
        model: The policy.
        temperature: T > 0 of the softmax.
        microbatch_tokens: Maximum tokens of a forward pass, including prompts; fewer if `activation_tokens` is less.
        share_prompt: Whether to run a group's prompt once for all its rows. It has no effect for sharded models: all
            processes must run the layers equally often, so each microbatch is one pass.
        compute: Type of matrix products; None for the type of the weights.
        gradient_checkpointing: Whether to recompute layers in the backward pass.
    """

    model: nn.Module
    temperature: float
    microbatch_tokens: int
    share_prompt: bool
    compute: torch.dtype | None = None
    gradient_checkpointing: bool = False

    @cached_property
    def sharded(self) -> bool:
        """Whether the model's parameters are sharded over processes."""
        return is_sharded(self.model)

    @property
    def _shares(self) -> bool:
        return self.share_prompt and not self.sharded

    def score(self, rows: Rollouts, *, model: nn.Module | None = None, **options: Any) -> Scored:
        """Score rows in one microbatch; options of `score_completions`.

        With `model`, under a reference: another model, or the policy itself without its adapters.
        """
        with without_adapters(self.model) if model is self.model else nullcontext():
            return score_completions(
                self.model if model is None else model,
                rows,
                self.temperature,
                share_prompt=self._shares,
                compute=self.compute,
                one_pass=self.sharded,
                gradient_checkpointing=self.gradient_checkpointing,
                **options,
            )

    @torch.no_grad()
    def statistics(self, rollouts: Rollouts, *, divided: bool = True) -> TokenStats:
        """Compute TokenStats (N, T) of all rows under the current policy. All processes must call it.

        Unless `divided`, the rows are those of this process, not the same in all, so that each computes its own.
        """
        result = self.zeros(rollouts)
        fields = [getattr(result, name) for name in STAT_NAMES]
        self._gather(rollouts, fields, lambda part, _: vars(self.score(part, stats=True).stats).values(), divided)
        return result

    @torch.no_grad()
    def log_probabilities(self, rollouts: Rollouts, *, model: nn.Module | None = None) -> Tensor:
        """Compute log-probabilities (N, T) [nats] of all rows; `model` as in `score`. All processes must call it."""
        result = self.zeros(rollouts).logp
        self._gather(rollouts, [result], lambda part, _: [self.score(part, model=model).logp])
        return result

    @torch.no_grad()
    def per_token(self, rollouts: Rollouts, function: PerToken, width: int = 0, **given: Tensor) -> Tensor:
        """Compute values of all rows' tokens under the policy, (N, T), or (N, T, `width`) if that is not 0; 0 outside the mask.

        `given` (N, T) are passed on to the function by name, (M,) of its tokens. All processes must call it.
        """
        result = self.zeros(rollouts).logp
        if width:
            result = result[..., None].repeat(1, 1, width)

        def values(part: Rollouts, rows: Tensor) -> list[Tensor]:
            """The function's values of a microbatch."""
            mask = part.completion_mask.bool()
            named = {name: value[rows][mask] for name, value in given.items()}
            scored = self.score(part, function=partial(function, **named))
            assert scored.values is not None
            return [scored.values]

        self._gather(rollouts, [result], values)
        return result

    def _gather(
        self,
        rollouts: Rollouts,
        results: list[Tensor],
        values: Callable[[Rollouts, Tensor], Iterable[Tensor]],
        divided: bool = True,
    ) -> None:
        """Fill `results` (N, …) with the values of each microbatch and its rows, on all processes if they are divided."""
        local_rows = torch.arange(len(rollouts))
        local_rows, batches = (
            self.split(rollouts, local_rows) if divided else (local_rows, self._microbatches(rollouts))
        )
        idle = self.idle_passes(batches)
        for rows in batches:
            for result, value in zip(results, values(rollouts.rows(rows), rows), strict=True):
                result[rows] = value.to(result.dtype)
        for _ in range(idle):
            rows = shortest(rollouts)
            values(rollouts.rows(rows), rows)
        if divided:
            distributed.exchange_rows(local_rows, results)

    def zeros(self, rollouts: Rollouts) -> TokenStats:
        """TokenStats (N, T) of zeros, with the rollouts' device and the dtype of the model's statistics."""
        mask = rollouts.completion_mask
        dtype = torch.float64 if next(self.model.parameters()).dtype == torch.float64 else torch.float32
        return TokenStats(**{name: torch.zeros(mask.shape, dtype=dtype, device=mask.device) for name in STAT_NAMES})

    def split(self, rollouts: Rollouts, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the part of `rows` (n,) of this process and its microbatches.

        Groups are not split, and processes have about the same number of tokens.
        """
        part = rollouts.rows(rows)
        labels, member = part.group.cpu().unique(return_inverse=True)
        tokens = (part.lengths + part.prompt_lengths).cpu()
        work = torch.zeros(len(labels), dtype=torch.long).scatter_add(0, member, tokens)
        chosen = torch.tensor(distributed.balance(work.tolist()), dtype=torch.long)
        local_rows = torch.isin(member, chosen).nonzero()[:, 0]
        if not len(local_rows):
            return rows[local_rows], []
        rows = rows[local_rows]
        return rows, [rows[batch] for batch in self._microbatches(part.rows(local_rows))]

    def _microbatches(self, part: Rollouts) -> list[Tensor]:
        group = part.group if self._shares else None
        budget = min(self.microbatch_tokens, activation_tokens(self.model, self.gradient_checkpointing))
        return microbatches(part.lengths, budget, prompt_lengths=part.prompt_lengths, group=group)

    def idle_passes(self, batches: list[Tensor]) -> int:
        """Number of additional passes of this process if other processes of a sharded model have more microbatches.

        Call it before the first pass, so that its collective does not interleave with those of the layers.
        """
        return max(distributed.gather(len(batches))) - len(batches) if self.sharded else 0


def shortest(rollouts: Rollouts) -> Tensor:
    """Index (1,) of the row with the fewest tokens."""
    return (rollouts.lengths + rollouts.prompt_lengths).argmin()[None].cpu()

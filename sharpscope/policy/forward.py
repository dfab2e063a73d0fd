"""Differentiable log-probabilities and statistics of given completions, in microbatches distributed over processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sharpscope import distributed
from sharpscope.policy.cache import cache_keyword, read_prompts, take_rows
from sharpscope.policy.head import Head, backbone, bare, computing, output_head, recompute_layers
from sharpscope.policy.rollouts import Completions, Rollouts
from sharpscope.policy.sharding import is_sharded
from sharpscope.policy.token_stats import STAT_NAMES, TokenStats, flat_logp, flat_stats, spread

PerToken = Callable[[Tensor, Head, Tensor, float], Tensor]
"""From hidden states (M, d), output layer, targets (M,) and temperature to values of the tokens, (M,) or (M, k)."""

# Overhead of a forward and backward pass, in tokens; less padding than this is cheaper than another bucket.
BUCKET_TOKENS = {"cpu": 64, "cuda": 4096}


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of rows.

    Attributes:
        logp: (n, T) [nats], 0 outside the mask; differentiable with `with_grad`.
        stats: Statistics of the same tokens, or None.
        values: (n, T) or (n, T, k) what the given function returned, 0 outside the mask; None without one.
    """

    logp: Tensor
    stats: TokenStats | None
    values: Tensor | None = None


def score_completions(
    model: nn.Module,
    rows: Completions,
    temperature: float,
    *,
    share_prompt: bool,
    with_grad: bool = False,
    stats: bool = False,
    compute: torch.dtype | None = None,
    gradient_checkpointing: bool = False,
    one_pass: bool = False,
    function: PerToken | None = None,
) -> Scored:
    """Compute log-probabilities of completion tokens (mask 1) under softmax(z/T), before top-p and top-k.

    Rows run in buckets of similar length, and only tokens of the mask reach the output layer.

    Args:
        model: The policy or a reference model.
        rows: n rows; with `share_prompt`, rows of a `group` must have the same prompt.
        temperature: T > 0.
        share_prompt: Whether to run each group's prompt once; completions attend to it through a differentiable cache.
        with_grad: Whether `logp` and the function's values are differentiable.
        stats: Whether to also return `TokenStats` from the same logits, without gradient.
        compute: Type of the layers' matrix products (autocast); norms, the output layer and later operations use the type
            of the weights, at least float32. None: the type of the weights.
        gradient_checkpointing: Whether to recompute layers in the backward pass.
        one_pass: Whether to run all rows in one forward pass, as all processes must where weights are sharded.
        function: If given, also return its values of the masked tokens.

    Raises:
        ValueError: The temperature is not positive, rows of a group have different prompts, or both `one_pass` and
            `share_prompt` are set.
    """
    if not temperature > 0:
        raise ValueError(f"temperature {temperature}: must be positive")
    if one_pass and share_prompt:
        raise ValueError("one_pass: not available with share_prompt")
    head = output_head(model)
    mask = rows.completion_mask.bool()
    with torch.set_grad_enabled(with_grad):
        # Hidden states of each bucket's masked tokens, row by row, later sorted into the order of `rows`.
        hidden_parts, index_parts = [], []
        index = torch.arange(mask.numel(), device=mask.device).view(mask.shape)  # (n, T)
        states = (
            _shared_hidden(model, rows) if share_prompt else _plain_hidden(model, rows, one_pass)
        )
        recomputing = (
            recompute_layers(model) if gradient_checkpointing and with_grad else nullcontext()
        )
        with computing(model, compute), recomputing:
            for bucket, hidden in states:  # (b,), (b, T_b, d)
                keep = mask[bucket, : hidden.shape[1]]
                hidden_parts.append(hidden[keep])
                index_parts.append(index[bucket, : hidden.shape[1]][keep])
        hidden = torch.cat(hidden_parts)
        order = torch.cat(index_parts)  # (M, d), (M,)
        hidden = hidden[order.argsort()].to(torch.promote_types(head.weight.dtype, torch.float32))
        targets = rows.completion_ids[mask]
        if with_grad:
            logp, values = flat_logp(hidden, head, targets, temperature, stats=stats)
        else:
            values = flat_stats(hidden, head, targets, temperature)
            logp = values["logp"]
        token_stats = (
            TokenStats(**{name: spread(value, mask) for name, value in values.items()})
            if stats
            else None
        )
        given = (
            None if function is None else spread(function(hidden, head, targets, temperature), mask)
        )
        return Scored(spread(logp, mask), token_stats, given)


def _plain_hidden(
    model: nn.Module,
    rows: Completions,
    one_pass: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield buckets (rows (b,), hidden (b, T_b, d)), where hidden[:, t] predicts completion token t; prompts are not shared."""
    P = rows.prompt_width
    prompt = rows.prompt_lengths
    length = rows.lengths
    whole = [torch.arange(len(rows), device=length.device)]
    for bucket in (
        whole if one_pass else length_buckets((prompt + length).cpu().numpy(), length.device)
    ):
        # Without left padding, causal attention needs no mask.
        p = prompt[bucket, None]
        n = length[bucket, None]
        width = int((p + n).max()) - 1  # without the last token
        ids = _align_left(rows.input_ids[bucket], p[:, 0], P, width)
        out = backbone(model)(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        hidden = out.last_hidden_state  # (b, width, d)
        step = torch.arange(int(n.max()), device=p.device)[None]
        index = (p - 1 + step).clamp_max(width - 1)  # (b, T_b)
        yield bucket, hidden.gather(1, index[:, :, None].expand(-1, -1, hidden.shape[2]))


def _align_left(ids: Tensor, lengths: Tensor, prompt_width: int, width: int) -> Tensor:
    """Remove the left padding of `ids` (b, L) with prompts of `lengths` (b,) in `prompt_width` columns; keep `width`."""
    column = torch.arange(width, device=ids.device)[None] + (prompt_width - lengths)[:, None]
    return ids.gather(1, column.clamp_max(ids.shape[1] - 1))  # (b, width)


def _shared_hidden(model: nn.Module, rows: Completions) -> Iterator[tuple[Tensor, Tensor]]:
    """As `_plain_hidden`, but run the prompts of all groups once first."""
    body = backbone(model)
    P = rows.prompt_width
    _, row_prompt = rows.group.unique(return_inverse=True)  # (n,) -> 0..B-1
    first = torch.full((int(row_prompt.max()) + 1,), len(rows), device=row_prompt.device)
    # (B,)
    first = first.scatter_reduce(
        0,
        row_prompt,
        torch.arange(len(rows), device=row_prompt.device),
        "amin",
    )
    skip = P - int(rows.prompt_lengths.max())
    ids = rows.input_ids[:, skip:P]
    attention = rows.attention_mask[:, skip:P]
    if not torch.equal(ids * attention, (ids * attention)[first[row_prompt]]):
        raise ValueError("share_prompt: rows of one group have different prompts")
    lengths = rows.prompt_lengths[first]
    # (B, d)
    last, cache = read_prompts(
        body,
        _align_left(ids[first], lengths, ids.shape[1], ids.shape[1]),
        lengths,
    )
    for bucket in length_buckets(rows.lengths.cpu().numpy(), ids.device):
        start = take_rows(last, row_prompt[bucket])[:, None]  # (b, 1, d)
        width = int(rows.lengths[bucket].max()) - 1
        if width <= 0:
            yield bucket, start
            continue
        prompt_mask = attention[bucket]
        position = prompt_mask.sum(1, keepdim=True) + torch.arange(width, device=ids.device)
        mask = torch.cat([prompt_mask, prompt_mask.new_ones(len(bucket), width)], 1)  # (b, P+width)
        # (b, width, d)
        hidden = body(
            input_ids=rows.completion_ids[bucket, :width],
            attention_mask=mask,
            position_ids=position,
            use_cache=True,
            **{cache_keyword(body): cache.continuation(row_prompt[bucket])},
        ).last_hidden_state
        yield bucket, torch.cat([start, hidden], 1)


def length_buckets(lengths: np.ndarray, device: torch.device) -> list[Tensor]:
    """Split rows of `lengths` (n,) [tokens] into buckets that minimize the padded tokens plus a fixed cost per bucket.

    Returns index tensors on `device`, whose type determines the cost, that contain each row once, longest rows first.
    """
    cost = BUCKET_TOKENS.get(device.type, BUCKET_TOKENS["cuda"])
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order].astype(np.float64)
    best = np.zeros(len(order) + 1)  # best[j]: minimum cost of the first j rows
    cut = np.zeros(len(order) + 1, dtype=np.int64)
    for j in range(1, len(order) + 1):
        # The last bucket is rows i..j-1, with the width of row i.
        total = best[:j] + cost + descending[:j] * (j - np.arange(j))
        cut[j] = total.argmin()
        best[j] = total[cut[j]]
    bounds = [len(order)]
    while bounds[-1] > 0:
        bounds.append(int(cut[bounds[-1]]))
    bounds.reverse()
    return [torch.from_numpy(order[a:b].copy()).to(device) for a, b in pairwise(bounds)]


def microbatches(
    lengths: Tensor,
    token_budget: int,
    *,
    prompt_lengths: Tensor,
    group: Tensor | None = None,
) -> list[Tensor]:
    """Split rows into microbatches of at most `token_budget` tokens with prompts, rows of similar length together.

    Rows have `lengths` (N,) and `prompt_lengths` (N,); one that exceeds the budget is a microbatch by itself. With `group`
    (N,), prompts are shared: the rows of a group stay together and count their prompt once; a group that exceeds the budget
    is split, and each part counts the prompt. Returns index tensors on the CPU that contain each row once, each ascending.
    """
    unit = (
        torch.arange(len(lengths)) if group is None else group.cpu().unique(return_inverse=True)[1]
    )
    lengths = lengths.cpu()
    prompt_lengths = prompt_lengths.cpu()
    if group is not None:
        unit = _within_budget(unit, lengths, prompt_lengths, token_budget)
    count = int(unit.max()) + 1 if len(unit) else 0
    longest = torch.zeros(count, dtype=torch.long).scatter_reduce(0, unit, lengths, "amax")
    work = torch.zeros(count, dtype=torch.long).scatter_add(0, unit, lengths)
    work += torch.zeros(count, dtype=torch.long).scatter_reduce(0, unit, prompt_lengths, "amax")
    batches: list[list[int]] = []
    filled = token_budget
    for index in longest.argsort(descending=True, stable=True).tolist():
        if filled + int(work[index]) > token_budget or not batches:
            batches.append([])
            filled = 0
        batches[-1].append(index)
        filled += int(work[index])
    return [torch.isin(unit, torch.tensor(batch)).nonzero()[:, 0] for batch in batches]


def _within_budget(unit: Tensor, lengths: Tensor, prompt_lengths: Tensor, budget: int) -> Tensor:
    """Split groups (N,) that exceed `budget` into parts of rows of similar length."""
    parts = torch.zeros_like(unit)
    count = 0
    for label in range(int(unit.max()) + 1 if len(unit) else 0):
        rows = (unit == label).nonzero()[:, 0]
        filled = prompt = int(prompt_lengths[rows].max())
        for index, row in enumerate(
            rows[lengths[rows].argsort(descending=True, stable=True)].tolist()
        ):
            if index and filled + int(lengths[row]) > budget:
                count = count + 1
                filled = prompt
            parts[row] = count
            filled += int(lengths[row])
        count += 1
    return parts


# -- Rollouts in microbatches

# Maximum size of the activations of a forward and backward pass.
ACTIVATION_BYTES = {"cpu": 4 * 2**30, "cuda": 16 * 2**30}


def activation_tokens(model: nn.Module, gradient_checkpointing: bool) -> int:
    """Number of tokens whose activations take about `ACTIVATION_BYTES`, from the sizes of a transformer's layers."""
    config = bare(model).config.get_text_config()
    parameter = next(model.parameters())
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
        adapted: Any = self.model
        with adapted.disable_adapter() if model is self.model else nullcontext():
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
        self._gather(
            rollouts,
            fields,
            lambda part, _: vars(self.score(part, stats=True).stats).values(),
            divided,
        )
        return result

    @torch.no_grad()
    def log_probabilities(self, rollouts: Rollouts, *, model: nn.Module | None = None) -> Tensor:
        """Compute log-probabilities (N, T) [nats] of all rows; `model` as in `score`. All processes must call it."""
        result = self.zeros(rollouts).logp
        self._gather(rollouts, [result], lambda part, _: [self.score(part, model=model).logp])
        return result

    @torch.no_grad()
    def per_token(
        self,
        rollouts: Rollouts,
        function: PerToken,
        width: int = 0,
        **given: Tensor,
    ) -> Tensor:
        """Compute values of all rows' tokens under the policy, (N, T), or (N, T, `width`) if that is not 0; 0 outside the mask.

        `given` (N, T) are passed on to the function by name, (M,) of its tokens. All processes must call it.
        """
        result = self.zeros(rollouts).logp
        if width:
            result = result[..., None].repeat(1, 1, width)

        def values(part: Rollouts, rows: Tensor) -> list[Tensor]:
            """The function's values on some rows."""
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
            self.split(rollouts, local_rows)
            if divided
            else (local_rows, self._microbatches(rollouts))
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
        dtype = (
            torch.float64 if next(self.model.parameters()).dtype == torch.float64 else torch.float32
        )
        return TokenStats(
            **{
                name: torch.zeros(mask.shape, dtype=dtype, device=mask.device)
                for name in STAT_NAMES
            }
        )

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
        budget = min(
            self.microbatch_tokens, activation_tokens(self.model, self.gradient_checkpointing)
        )
        return microbatches(part.lengths, budget, prompt_lengths=part.prompt_lengths, group=group)

    def idle_passes(self, batches: list[Tensor]) -> int:
        """Number of additional passes of this process if other processes of a sharded model have more microbatches.

        Call it before the first pass, so that its collective does not interleave with those of the layers.
        """
        return max(distributed.gather(len(batches))) - len(batches) if self.sharded else 0


def shortest(rollouts: Rollouts) -> Tensor:
    """Index (1,) of the row with the fewest tokens."""
    return (rollouts.lengths + rollouts.prompt_lengths).argmin()[None].cpu()

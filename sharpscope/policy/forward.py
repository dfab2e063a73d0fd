"""Log-probabilities and statistics of completions that are already there: what training differentiates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from sharpscope.policy.cache import read_prompts, take_rows
from sharpscope.policy.chunked_logp import flat_logp
from sharpscope.policy.head import backbone, computing, output_head
from sharpscope.policy.recompute import recomputed
from sharpscope.policy.rollouts import Completions
from sharpscope.policy.token_stats import TokenStats, flat_stats, spread

# What starting one more forward and backward pass costs, in tokens of work: padding below this is not worth a bucket.
BUCKET_TOKENS = {"cpu": 64, "cuda": 4096}


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of rows.

    Attributes:
        logp: (n, T) [nats], 0 off the mask; differentiable if that was asked for.
        stats: statistics of the same tokens, or None.
    """

    logp: Tensor
    stats: TokenStats | None


def score_completions(
    model: nn.Module, rows: Completions, temperature: float, *, share_prompt: bool, with_grad: bool, stats: bool = False,
    compute: torch.dtype | None = None, recompute: bool = False, one_pass: bool = False,
) -> Scored:  # fmt: skip
    """Log-probabilities of the completions' tokens (mask 1) under softmax(z/T) of `model`, before top-p and top-k.

    Padding costs little: rows run in buckets of like length, and only tokens of the mask reach the output layer.

    Args:
        model: a causal LM, the policy or a reference model.
        rows: n rows; rows of one `group` must have the same prompt if it is shared.
        temperature: T > 0.
        share_prompt: run each group's prompt once and let its completions attend to it through a differentiable cache.
            The result equals the plain one to rounding.
        with_grad: keep the graph, so that `logp` can be differentiated.
        stats: also return `TokenStats`, from the same pass over the logits, without gradient.
        compute: type of the layers' matrix products (autocast); norms, the output layer and what follows keep the weights'
            own type, at least float32. None: the weights' type everywhere.
        recompute: keep only each layer's input for the backward pass and compute the layer again there (gradient
            checkpointing): less memory, a third more time, the same gradient.
        one_pass: run every row in a single forward pass of the model, padding and all. Where weights are sharded over
            processes, all of them must run the same number of passes. Not with `share_prompt`.

    Raises:
        ValueError: the temperature is not positive, rows of one group have different prompts, or `one_pass` with
            `share_prompt`.
    """
    if not temperature > 0:
        raise ValueError(f"temperature {temperature}: must be positive")
    if one_pass and share_prompt:
        raise ValueError("one_pass: shared prompts take a pass of their own")
    head, mask = output_head(model), rows.completion_mask.bool()
    with torch.set_grad_enabled(with_grad):
        # Each bucket's hidden states of its rows' masked tokens, row by row; put back into the order of `rows`.
        hidden_parts, place_parts = [], []
        place = torch.arange(mask.numel(), device=mask.device).view(mask.shape)  # (n, T)
        states = _shared_hidden(model, rows) if share_prompt else _plain_hidden(model, rows, one_pass)
        with computing(model, compute), recomputed(model) if recompute and with_grad else nullcontext():
            for bucket, hidden in states:  # (b,), (b, T_b, d)
                keep = mask[bucket, : hidden.shape[1]]
                hidden_parts.append(hidden[keep])
                place_parts.append(place[bucket, : hidden.shape[1]][keep])
        hidden, places = torch.cat(hidden_parts), torch.cat(place_parts)  # (M, d), (M,)
        hidden = hidden[places.argsort()].to(torch.promote_types(head.weight.dtype, torch.float32))
        targets = rows.completion_ids[mask]
        if with_grad:
            logp, found = flat_logp(hidden, head, targets, temperature, stats=stats)
        else:
            found = flat_stats(hidden, head, targets, temperature)
            logp = found["logp"]
        laid_out = TokenStats(**{name: spread(value, mask) for name, value in found.items()}) if stats else None
        return Scored(spread(logp, mask), laid_out)


def _plain_hidden(model: nn.Module, rows: Completions, one_pass: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """Buckets (rows (b,), hidden (b, T_b, d)), hidden[:, t] predicting completion token t; each row runs its prompt."""
    P, prompt, length = rows.prompt_width, rows.prompt_lengths, rows.lengths
    everything = [torch.arange(len(rows), device=length.device)]
    buckets = everything if one_pass else length_buckets((prompt + length).cpu().numpy(), rows.input_ids.device)
    for bucket in buckets:
        # Moved to the left edge, rows have padding on their right only, which causal attention needs no mask for.
        p, n = prompt[bucket, None], length[bucket, None]
        width = int((p + n).max()) - 1  # the last token predicts nothing
        ids = _to_left_edge(rows.input_ids[bucket], p[:, 0], P, width)
        out = backbone(model)(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        hidden = out.last_hidden_state  # (b, width, d)
        step = torch.arange(int(n.max()), device=p.device)[None]
        where = (p - 1 + step).clamp_max(width - 1)  # (b, T_b)
        yield bucket, hidden.gather(1, where[:, :, None].expand(-1, -1, hidden.shape[2]))


def _to_left_edge(ids: Tensor, lengths: Tensor, prompt_width: int, width: int) -> Tensor:
    """`ids` (b, L) without the left padding of prompts of `lengths` (b,) in `prompt_width` columns, cut to `width`."""
    column = torch.arange(width, device=ids.device)[None] + (prompt_width - lengths)[:, None]
    return ids.gather(1, column.clamp_max(ids.shape[1] - 1))  # (b, width)


def _shared_hidden(model: nn.Module, rows: Completions) -> Iterator[tuple[Tensor, Tensor]]:
    """As `_plain_hidden`, with the prompts of all groups run once before."""
    body, P = backbone(model), rows.prompt_width
    _, row_prompt = rows.group.unique(return_inverse=True)  # (n,) -> 0..B-1
    first = torch.full((int(row_prompt.max()) + 1,), len(rows), device=row_prompt.device)
    first = first.scatter_reduce(0, row_prompt, torch.arange(len(rows), device=row_prompt.device), "amin")  # (B,)
    skip = P - int(rows.prompt_lengths.max())
    ids, attention = rows.input_ids[:, skip:P], rows.attention_mask[:, skip:P]
    if not torch.equal(ids * attention, (ids * attention)[first[row_prompt]]):
        raise ValueError("share_prompt: rows of one group have different prompts")
    lengths = rows.prompt_lengths[first]
    last, cache = read_prompts(body, _to_left_edge(ids[first], lengths, ids.shape[1], ids.shape[1]), lengths)  # (B, d)
    for bucket in length_buckets(rows.lengths.cpu().numpy(), ids.device):
        opening = take_rows(last, row_prompt[bucket])[:, None]  # (b, 1, d)
        width = int(rows.lengths[bucket].max()) - 1
        if width <= 0:
            yield bucket, opening
            continue
        before = attention[bucket]
        position = before.sum(1, keepdim=True) + torch.arange(width, device=ids.device)
        mask = torch.cat([before, before.new_ones(len(bucket), width)], 1)  # (b, P+width)
        hidden = body(
            input_ids=rows.completion_ids[bucket, :width], attention_mask=mask, position_ids=position,
            past_key_values=cache.continuation(row_prompt[bucket]), use_cache=True,
        ).last_hidden_state  # (b, width, d)  # fmt: skip
        yield bucket, torch.cat([opening, hidden], 1)


def length_buckets(lengths: np.ndarray, device: torch.device) -> list[Tensor]:
    """Split rows into buckets of like length so that padded tokens + a fixed cost per bucket are fewest.

    Args:
        lengths: (n,) tokens per row.
        device: of the returned indices; its kind sets the cost of a bucket.

    Returns:
        Index tensors that together hold every row once, longest rows first.
    """
    cost = BUCKET_TOKENS.get(device.type, BUCKET_TOKENS["cuda"])
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order].astype(np.float64)
    best = np.zeros(len(order) + 1)  # best[j]: least cost of the first j rows
    cut = np.zeros(len(order) + 1, dtype=np.int64)
    for j in range(1, len(order) + 1):
        # The last bucket is rows i..j-1, as wide as row i.
        total = best[:j] + cost + descending[:j] * (j - np.arange(j))
        cut[j] = total.argmin()
        best[j] = total[cut[j]]
    bounds = [len(order)]
    while bounds[-1] > 0:
        bounds.append(int(cut[bounds[-1]]))
    bounds.reverse()
    return [torch.from_numpy(order[a:b].copy()).to(device) for a, b in pairwise(bounds)]


def microbatches(
    lengths: Tensor, token_budget: int, *, prompt_lengths: Tensor, group: Tensor | None = None
) -> list[Tensor]:
    """Split rows into microbatches of at most `token_budget` tokens of work each, rows of like length together.

    Args:
        lengths: (N,) completion tokens per row.
        token_budget: tokens per microbatch, prompts included; a row that alone exceeds it is a microbatch of its own.
        prompt_lengths: (N,) prompt tokens per row.
        group: (N,) if prompts are shared: the rows of a group then stay together, and their prompt counts once; a group
            that alone exceeds the budget is cut into parts that read the prompt each. None = rows are units.

    Returns:
        Long index tensors on the CPU that together hold every row once, each ascending.
    """
    unit = torch.arange(len(lengths)) if group is None else group.cpu().unique(return_inverse=True)[1]
    lengths, prompt_lengths = lengths.cpu(), prompt_lengths.cpu()
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
    """Units (N,) of which none exceeds `budget` unless it is a single row: larger groups are cut, rows of like length together."""
    parts = torch.zeros_like(unit)
    count = 0
    for label in range(int(unit.max()) + 1 if len(unit) else 0):
        rows = (unit == label).nonzero()[:, 0]
        filled = prompt = int(prompt_lengths[rows].max())
        for place, row in enumerate(rows[lengths[rows].argsort(descending=True, stable=True)].tolist()):
            if place and filled + int(lengths[row]) > budget:
                count, filled = count + 1, prompt
            parts[row] = count
            filled += int(lengths[row])
        count += 1
    return parts

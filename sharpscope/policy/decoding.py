"""Batched decoding of one turn with a key-value cache; finished rows are removed from the batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache as once

import torch
from torch import Tensor

from sharpscope.config.policy import SamplingSpec
from sharpscope.policy.cache import DecodeCache, PromptCache, stack
from sharpscope.policy.conversation import Turns
from sharpscope.policy.direct_decoding import DirectDecoder, why_not_direct
from sharpscope.policy.head import backbone
from sharpscope.policy.loading import Policy
from sharpscope.policy.sampling import draw
from sharpscope.policy.shared_decoding import SharedDecodeCache, can_share_decoding, shared_attention

# Finished rows are removed when they are this share of the batch, since removal copies the cache of the others.
REMOVE_SHARE = 0.125
# Positions of the cache after the prompt; doubles when exceeded. Few, since a page of memory costs more than to copy it later.
INITIAL_CAPACITY = 16
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Output:
    """Tensors on the CPU that decoding fills in place.

    Attributes:
        ids: (N, max_new_tokens) tokens.
        own: (N, max_new_tokens) bool, True for tokens that the policy sampled.
        logp: (N, max_new_tokens) log-probabilities before top-p and top-k [nats].
        sampler_logp: (N, max_new_tokens) log-probabilities after top-p and top-k [nats].
        length: (N,) positions in use, including the environment's text.
        truncated: (N,) bool, True for rows that reached the limit.
    """

    ids: Tensor
    own: Tensor
    logp: Tensor
    sampler_logp: Tensor
    length: Tensor
    truncated: Tensor

    @classmethod
    def blank(cls, count: int, width: int, pad_id: int) -> Output:
        """Create N = `count` empty rows, marked as truncated."""
        return cls(
            ids=torch.full((count, width), pad_id),
            own=torch.zeros(count, width, dtype=torch.bool),
            logp=torch.zeros(count, width),
            sampler_logp=torch.zeros(count, width),
            length=torch.zeros(count, dtype=torch.long),
            truncated=torch.ones(count, dtype=torch.bool),
        )


@dataclass(frozen=True)
class Start:
    """State of n rows at the start of a turn.

    Attributes:
        rows: (n,) long on the CPU, index of each completion.
        cache: Keys and values of B texts, padded on the left.
        lengths: (B,) length of each text [tokens].
        row_text: (n,) text of each row, ascending.
        hidden: (n, d) hidden states from which the first tokens are sampled.
    """

    rows: Tensor
    cache: PromptCache
    lengths: Tensor
    row_text: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class Ended:
    """Rows whose turn ended before the limit, with keys and values except for the turn's last token.

    Attributes:
        members: (m,) long on the CPU, indices into the turn's `Start.rows`.
        cache: Cache of m texts, padded on the left.
        lengths: (m,) length of each text in the cache [tokens].
    """

    members: Tensor
    cache: PromptCache
    lengths: Tensor


def decode_turn(
    policy: Policy, start: Start, uniforms: Tensor, spec: SamplingSpec, out: Output, turns: Turns | None = None
) -> Ended | None:
    """Decode one turn of all rows in a batch and append it to `out`.

    Args:
        policy: Model and tokenizer.
        start: The rows; rows of one text are adjacent.
        uniforms: (n, max_new_tokens) on the model's device, one per position of a completion.
        spec: Sampling parameters and maximum length.
        out: The completions so far.
        turns: Detects stop strings; None: only the end-of-text token and the limit end a turn, and no turn follows.

    Returns:
        With `turns`, the rows that can continue; None if there are none.
    """
    device, head = policy.device, policy.head
    rows, hidden, ends = start.rows.to(device), start.hidden, torch.tensor(policy.eos_ids, device=device)
    used = out.length[start.rows].to(device)  # (n,) positions before this turn
    cache_class = SharedDecodeCache if can_share_decoding(policy.model) else DecodeCache
    capacity = min(INITIAL_CAPACITY, spec.max_new_tokens)
    cache = cache_class(start.cache, start.lengths, start.row_text, capacity)
    member = torch.arange(len(rows), device=device)
    position, running = start.lengths[start.row_text], torch.ones_like(member, dtype=torch.bool)
    ended_at = torch.full_like(member, -1)  # (n,) step of a turn's last token, −1 if truncated
    record: list[tuple[Tensor, ...]] = []
    parts: list[Ended] = []

    def collect(finished: Tensor, step: int) -> None:
        """Add the batch rows `finished` to `parts` if their conversation can continue."""
        finished = finished[ended_at[member[finished]] >= 0] if turns is not None else finished[:0]
        if len(finished):
            at = ended_at[member[finished]]
            lengths = start.lengths[start.row_text[member[finished]]] + at
            parts.append(Ended(member[finished].cpu(), cache.texts(finished, step - at), lengths))

    with _forward(policy, cache, int(start.lengths.max()) + spec.max_new_tokens) as forward:
        for step in range(spec.max_new_tokens):
            column = used[member] + step
            u = uniforms[member, column.clamp_max(spec.max_new_tokens - 1)]
            token, logp, sampler_logp = draw(head.logits(hidden), u, spec)
            record.append((rows[member], running, column, token, logp, logp if sampler_logp is None else sampler_logp))
            stops = torch.isin(token, ends)
            if turns is not None:
                active = running.nonzero()[:, 0]
                stopped = turns.add(member[active].tolist(), token[active].tolist())
                stops = stops.index_put((active,), stops[active] | torch.tensor(stopped, device=device))
            ended_at[member[running & stops]] = step
            running = running & ~stops & (column + 1 < spec.max_new_tokens)
            done = int((~running).sum())
            if done == len(running):
                break
            if done > REMOVE_SHARE * len(running):
                collect((~running).nonzero()[:, 0], step)
                keep = running.nonzero()[:, 0]
                member, token, position, running = member[keep], token[keep], position[keep], running[keep]
                cache.keep(keep)
            hidden = forward(token, position)  # (n, d)
            position = position + 1
        collect(torch.arange(len(member), device=device), step)
    _write(record, out)
    out.truncated[start.rows] = (ended_at < 0).cpu()
    if not parts:
        return None
    order = torch.cat([part.members for part in parts]).argsort()
    cache_of_all = stack([part.cache for part in parts]).rows(order.to(device))
    lengths = torch.cat([part.lengths for part in parts])[order.to(device)]
    return Ended(torch.cat([part.members for part in parts])[order], cache_of_all, lengths)


@contextmanager
def _forward(
    policy: Policy, cache: SharedDecodeCache | DecodeCache, positions: int
) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
    """Give a function that appends tokens (n,) at positions (n,) to `cache` and returns hidden states (n, d).

    Args:
        policy: The policy.
        cache: The cache; rows can be removed from it between two calls.
        positions: Number of positions of the longest row.
    """
    if isinstance(cache, SharedDecodeCache):
        reason = why_not_direct(policy.model)
        if reason is None:
            decoder = DirectDecoder(policy.model, positions)
            with torch.inference_mode():
                yield lambda token, position: decoder(token, position, cache)
            return
    else:
        reason = "its attention cannot be replaced"
    _tell_general(policy.source, reason)
    body = backbone(policy.model)

    def forward(token: Tensor, position: Tensor) -> Tensor:
        """Hidden states (B, d) of one more token (B,) of each row, at `position` (B,)."""
        states: Tensor = body(
            input_ids=token[:, None],
            attention_mask=cache.mask(),
            position_ids=position[:, None],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        return states[:, 0]

    with shared_attention(policy.model, cache) if isinstance(cache, SharedDecodeCache) else nullcontext():
        yield forward


@once
def _tell_general(source: str, reason: str) -> None:
    """Log once per model that decoding is not direct."""
    log.info("%s: decoding steps run through transformers, not directly: %s", source, reason)


def _write(record: list[tuple[Tensor, ...]], out: Output) -> None:
    """Write the recorded decoding steps to `out`."""
    for rows, running, column, token, logp, sampler_logp in record:
        index = (rows[running].cpu(), column[running].cpu())
        out.ids[index] = token[running].cpu()
        out.own[index] = True
        out.logp[index] = logp[running].float().cpu()
        out.sampler_logp[index] = sampler_logp[running].float().cpu()
        out.length[index[0]] = index[1] + 1

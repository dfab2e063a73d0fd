"""Batched decoding of one turn with a key-value cache.

Rows of a group with the same tokens so far are one text of the batch: they have the same hidden states, from which each row
samples its own next token. A text is copied when its rows sample different tokens, and removed when all have finished.
"""

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

# Places of finished texts are removed when they are this share of the batch, since removal copies the cache of the others.
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
        row_text: (n,) text of each row.
        hidden: (B, d) hidden states from which the first tokens are sampled.
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
    hidden, ends = start.hidden, torch.tensor(policy.eos_ids, device=device)
    used = out.length[start.rows].to(device)  # (n,) positions before this turn
    cache_class = SharedDecodeCache if can_share_decoding(policy.model) else DecodeCache
    cache = cache_class(start.cache, start.lengths, len(used), min(INITIAL_CAPACITY, spec.max_new_tokens))
    # Of each row that has not finished: its index among `rows`, next position in its completion and text in the cache.
    member, column, text, position = torch.arange(len(used), device=device), used, start.row_text, start.lengths
    record: list[tuple[Tensor, ...]] = []
    parts: list[Ended] = []
    with _forward(policy, cache, int(start.lengths.max()) + spec.max_new_tokens) as forward:
        for step in range(spec.max_new_tokens):
            token, logp, sampler_logp = draw(head.logits(hidden), uniforms[member, column], spec, text)
            stops = torch.isin(token, ends)
            if turns is not None:
                stops |= torch.tensor(turns.add(member.tolist(), token.tolist()), device=device)
                if bool(stops.any()):
                    lengths = start.lengths[start.row_text[member[stops]]] + step
                    parts.append(Ended(member[stops].cpu(), cache.texts(text[stops]), lengths))
            record.append((member, column, stops, token, logp, logp if sampler_logp is None else sampler_logp))
            column = column + 1
            running = (~stops & (column < spec.max_new_tokens)).nonzero()[:, 0]
            if not len(running):
                break
            if len(running) < len(member):
                member, column, text, token = member[running], column[running], text[running], token[running]
            text, token, source = _branch(cache, text, token, len(hidden), head.weight.shape[0])
            position = position[source]  # (m,)
            hidden = forward(token, position)  # (m, d)
            position = position + 1
    _write(start.rows, record, out)
    if not parts:
        return None
    order = torch.cat([part.members for part in parts]).argsort()
    cache_of_all = stack([part.cache for part in parts]).rows(order.to(device))
    lengths = torch.cat([part.lengths for part in parts])[order.to(device)]
    return Ended(torch.cat([part.members for part in parts])[order], cache_of_all, lengths)


def _branch(
    cache: SharedDecodeCache | DecodeCache, text: Tensor, token: Tensor, count: int, words: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Make a place in `cache` for each different text that rows continue with their tokens.

    Args:
        cache: Cache of `count` texts.
        text: (n,) text of each row so far.
        token: (n,) next token of each row.
        count: Number of places in the cache.
        words: Size of the vocabulary.

    Returns:
        The place (n,) of each row's new text, and for each place (m,) its next token and the text so far that it had been
        a part of. Places that are not in use have token 0.
    """
    key, row_key = torch.unique(text * words + token, return_inverse=True)  # (k,) ascending, (n,)
    source, token = key // words, key % words
    if count - len(key) > REMOVE_SHARE * count:
        cache.keep(source, room=len(text))
        return row_key, token, source
    # One continuation of a text stays in its place, and copies for the others go to places that are not in use.
    branches = (source[1:] == source[:-1]).nonzero()[:, 0] + 1
    place, count = source, max(count, len(key))
    if len(branches):
        unused = torch.ones(count, dtype=torch.bool, device=source.device).index_fill(0, source, False).nonzero()[:, 0]
        place = source.index_copy(0, branches, unused[: len(branches)])
        cache.copy(source[branches], place[branches], count)
    tokens = token.new_zeros(count).index_copy(0, place, token)
    sources = torch.arange(count, device=source.device).index_copy(0, place, source)
    return place[row_key], tokens, sources


@contextmanager
def _forward(
    policy: Policy, cache: SharedDecodeCache | DecodeCache, positions: int
) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
    """Give a function that appends tokens (m,) at positions (m,) to `cache` and returns hidden states (m, d).

    Args:
        policy: The policy.
        cache: The cache; its texts can change between two calls.
        positions: Number of positions of the longest text.
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


def _write(rows: Tensor, record: list[tuple[Tensor, ...]], out: Output) -> None:
    """Write the recorded decoding steps of `rows` to `out`."""
    member, column, stops, token, logp, sampler_logp = (torch.cat(parts).cpu() for parts in zip(*record, strict=True))
    row = rows[member]
    index = (row, column)
    out.ids[index] = token
    out.own[index] = True
    out.logp[index] = logp.float()
    out.sampler_logp[index] = sampler_logp.float()
    out.length.scatter_reduce_(0, row, column + 1, "amax")
    out.truncated[rows] = True
    out.truncated[row[stops]] = False

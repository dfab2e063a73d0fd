"""One turn of many completions: key-value cached decoding, from which rows leave as they end."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from sharpscope.config.policy import SamplingSpec
from sharpscope.policy.cache import DecodeCache, PromptCache, stack
from sharpscope.policy.conversation import Turns
from sharpscope.policy.head import backbone
from sharpscope.policy.loading import Policy
from sharpscope.policy.sampling import draw
from sharpscope.policy.shared_decoding import SharedDecodeCache, can_share_decoding, shared_attention

# Rows that are done stay until they are this share of the batch: leaving copies the cache of those who go on.
LEAVE_SHARE = 0.125
FIRST_ROOM = 64  # positions behind the prompt that the cache starts with; it doubles when it is full


@dataclass(frozen=True)
class Output:
    """Tensors on the CPU that decoding fills in place: (N, max_new_tokens), or (N,) for length and truncated.

    `own` is where the policy chose the token; `length` counts positions in use, an environment's text included.
    """

    ids: Tensor
    own: Tensor
    logp: Tensor
    sampler_logp: Tensor
    length: Tensor
    truncated: Tensor

    @classmethod
    def blank(cls, count: int, width: int, pad_id: int) -> Output:
        """N = `count` empty rows, truncated until they end."""
        return cls(
            ids=torch.full((count, width), pad_id), own=torch.zeros(count, width, dtype=torch.bool),
            logp=torch.zeros(count, width), sampler_logp=torch.zeros(count, width),
            length=torch.zeros(count, dtype=torch.long), truncated=torch.ones(count, dtype=torch.bool),
        )  # fmt: skip


@dataclass(frozen=True)
class Start:
    """What n rows stand at when a turn begins.

    Attributes:
        rows: (n,) long on the CPU, which completions they are.
        cache: keys and values of B texts, padded on the left.
        lengths: (B,) tokens of each text.
        row_text: (n,) text of each row, ascending.
        hidden: (n, d) hidden states that the first tokens are drawn from.
    """

    rows: Tensor
    cache: PromptCache
    lengths: Tensor
    row_text: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class Ended:
    """Rows whose turn ended by itself, not by the limit: their keys and values but those of the turn's last token.

    Attributes:
        members: (m,) long on the CPU, places in the turn's `Start.rows`.
        cache: m texts, padded on the left.
        lengths: (m,) tokens that the cache holds of each.
    """

    members: Tensor
    cache: PromptCache
    lengths: Tensor


def decode_turn(
    policy: Policy, start: Start, uniforms: Tensor, spec: SamplingSpec, out: Output, turns: Turns | None = None
) -> Ended | None:
    """Decode one turn of all rows together and write it into `out`, behind what they hold already.

    Args:
        policy: model and tokenizer.
        start: the rows; those of one text adjacent.
        uniforms: (n, max_new_tokens) on the model's device, one for each position of a completion.
        spec: how tokens are drawn, and the limit of positions.
        out: what was written so far.
        turns: listens for texts that end a turn; None: only the end-of-text token and the limit do, and nothing follows.

    Returns:
        With `turns`, the rows that could go on; None if there are none.
    """
    device, body, head = policy.device, backbone(policy.model), policy.head
    rows, hidden, ends = start.rows.to(device), start.hidden, torch.tensor(policy.eos_ids, device=device)
    used = out.length[start.rows].to(device)  # (n,) positions before this turn
    room = min(FIRST_ROOM, spec.max_new_tokens)
    kind = SharedDecodeCache if can_share_decoding(policy.model) else DecodeCache
    cache = kind(start.cache, start.lengths, start.row_text, room)
    member = torch.arange(len(rows), device=device)
    position, going = start.lengths[start.row_text], torch.ones_like(member, dtype=torch.bool)
    ended_at = torch.full_like(member, -1)  # (n,) step of a turn's last token, −1 where the limit cut it
    record: list[tuple[Tensor, ...]] = []
    parts: list[Ended] = []

    def leave(gone: Tensor, step: int) -> None:
        """Keep what the rows in places `gone` of the batch know, if their conversation could go on."""
        gone = gone[ended_at[member[gone]] >= 0] if turns is not None else gone[:0]
        if len(gone):
            at = ended_at[member[gone]]
            lengths = start.lengths[start.row_text[member[gone]]] + at
            parts.append(Ended(member[gone].cpu(), cache.texts(gone, step - at), lengths))

    with shared_attention(policy.model, cache) if isinstance(cache, SharedDecodeCache) else nullcontext():
        for step in range(spec.max_new_tokens):
            column = used[member] + step
            u = uniforms[member, column.clamp_max(spec.max_new_tokens - 1)]
            token, logp, sampler_logp = draw(head.logits(hidden), u, spec)
            record.append((rows[member], going, column, token, logp, logp if sampler_logp is None else sampler_logp))
            stops = torch.isin(token, ends)
            if turns is not None:
                listening = going.nonzero()[:, 0]
                heard = turns.hear(member[listening].tolist(), token[listening].tolist())
                stops = stops.index_put((listening,), stops[listening] | torch.tensor(heard, device=device))
            ended_at[member[going & stops]] = step
            going = going & ~stops & (column + 1 < spec.max_new_tokens)
            done = int((~going).sum())
            if done == len(going):
                break
            if done > LEAVE_SHARE * len(going):
                leave((~going).nonzero()[:, 0], step)
                keep = going.nonzero()[:, 0]
                member, token, position, going = member[keep], token[keep], position[keep], going[keep]
                cache.keep(keep)
            hidden = body(
                input_ids=token[:, None],
                attention_mask=cache.mask(),
                position_ids=position[:, None],
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state[:, 0]  # (n, d)
            position = position + 1
        leave(torch.arange(len(member), device=device), step)
    _write(record, out)
    out.truncated[start.rows] = (ended_at < 0).cpu()
    if not parts:
        return None
    order = torch.cat([part.members for part in parts]).argsort()
    together = stack([part.cache for part in parts]).rows(order.to(device))
    lengths = torch.cat([part.lengths for part in parts])[order.to(device)]
    return Ended(torch.cat([part.members for part in parts])[order], together, lengths)


def _write(record: list[tuple[Tensor, ...]], out: Output) -> None:
    """Move what each decoding step recorded into `out`, in one transfer a column kind."""
    for rows, going, column, token, logp, sampler_logp in record:
        place = (rows[going].cpu(), column[going].cpu())
        out.ids[place] = token[going].cpu()
        out.own[place] = True
        out.logp[place] = logp[going].float().cpu()
        out.sampler_logp[place] = sampler_logp[going].float().cpu()
        out.length[place[0]] = place[1] + 1

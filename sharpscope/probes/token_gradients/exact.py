"""The method `exact`: batched backward passes of single tokens, each on the token's prefix.

One forward pass over a batch of rows serves several tokens of each row. `torch.func.vmap` batches their cotangents, and hooks on
the uses of parameters turn these into squared norms, so that no gradient is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sharpscope.probes.token_gradients.head import head_gradients
from sharpscope.probes.token_gradients.local import add_head
from sharpscope.probes.token_gradients.result import Collector, ScoreNorms, Sums
from sharpscope.probes.token_gradients.rows import Rows, safe_width, widen
from sharpscope.probes.token_gradients.structure import Structure, hidden_states, recording
from sharpscope.probes.token_gradients.uses import Use, exact_squares

SLOTS = 16  # tokens of a row that share one forward pass: more save forward passes, fewer waste less of the prefix
POSITIONS = {"cpu": 4096, "cuda": 65536}
"""Rows × slots × length of one forward pass: on a CPU cotangents should stay in cache."""


def exact_norms(model: nn.Module, structure: Structure, rows: Rows, temperature: float) -> ScoreNorms:
    """Norms of all chosen tokens, exact up to rounding. The model must be in eval mode.

    Raises:
        UserError: a parameter is used in a way that the hooks do not know.
    """
    structure.require_uses("exact")
    most = POSITIONS.get(rows.ids.device.type, POSITIONS["cuda"])
    collector = Collector(rows, structure.dtype)
    for chunk in rows.chunks():
        sums = Sums(chunk, structure.groups, collector.dtype)
        with torch.no_grad():
            states = hidden_states(model, chunk.ids)[chunk.predicts]  # (M, d)
        row, position = chunk.predicts.nonzero().unbind(1)
        words = chunk.ids[row] if structure.tied else None
        output, coupled = head_gradients(states, structure.head, chunk.targets, temperature, words=words)
        add_head(sums, structure, output)
        tokens = _Tokens(row, position, output.to_hidden, states, coupled)
        batches = _batches(row.tolist(), position.tolist(), most)
        for batch in batches:
            for name, squares, index in _squares(model, structure, chunk, tokens, batch.to(row.device)):
                sums.add(name, squares, index)
        collector.write(chunk, sums)
    return collector.result("exact")


class _Tokens(NamedTuple):
    """M chosen tokens."""

    row: Tensor  # (M,) row and position that predict each
    position: Tensor
    start: Tensor  # (M, d) cotangent and value of the hidden state there
    hidden: Tensor
    coupled: Tensor | None  # (M, L) ∂ log π/∂a at the row's words where embeddings are tied


def _batches(rows: list[int], positions: list[int], most: int) -> Iterator[Tensor]:
    """Batches (n, B) of token indices, −1 where empty: up to `SLOTS` tokens of each of B rows of similar length."""
    lists: list[list[int]] = []
    order = sorted(range(len(rows)), key=lambda i: (rows[i], -positions[i]))
    for place, index in enumerate(order):
        if not place or rows[index] != rows[order[place - 1]] or len(lists[-1]) == SLOTS:
            lists.append([])
        lists[-1].append(index)
    lists.sort(key=lambda one: (-positions[one[0]], -len(one)))
    while lists:
        slots, count, length = len(lists[0]), 1, positions[lists[0][0]] + 1
        while count < len(lists) and max(slots, len(lists[count])) * (count + 1) * length <= most:
            slots, count = max(slots, len(lists[count])), count + 1
        batch, lists = lists[:count], lists[count:]
        yield torch.tensor([[one[i] if i < len(one) else -1 for one in batch] for i in range(slots)])


def _squares(
    model: nn.Module, structure: Structure, chunk: Rows, tokens: _Tokens, batch: Tensor
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """A parameter, squared norms (m,), and the tokens (m,) of a batch that they belong to."""
    live = batch >= 0
    index = batch.clamp_min(0)  # (n, B)
    position = torch.where(live, tokens.position[index], 0)
    length = safe_width(model, int(position.max()) + 1)
    ids = widen(chunk.ids[tokens.row[index[0]], :length], length)  # (B, L)
    with recording(model, structure, (ids.shape[0], ids.shape[1]), "math") as recorder:
        hidden = hidden_states(model, ids)
    starts = tokens.start.new_zeros(*index.shape, *hidden.shape[1:])  # (n, B, L, d)
    at = position[..., None, None].expand(*index.shape, 1, hidden.shape[-1])
    starts.scatter_(2, at, (tokens.start[index] * live[..., None])[:, :, None])
    coupled = None
    if tokens.coupled is not None:
        coupled = nn.functional.pad(tokens.coupled, (0, max(0, length - tokens.coupled.shape[1])))[index, :length]

    def pull(start: Tensor, states: Tensor, words: Tensor | None) -> dict[str, Tensor]:
        """Squared norms (B,) by parameter of one token of each row: start (B, L, d), states (B, d), words (B, L)."""
        found: dict[str, Tensor] = {}

        def measure(use: Use, g: Tensor) -> None:
            for name, squares in exact_squares(use, g):
                found[name] = found[name] + squares if name in found else squares
            if structure.tied is not None and use.weight == structure.tied and words is not None:
                read = words if use.ignored is None else words.masked_fill(use.x == use.ignored, 0.0)
                along = (use.by_position(g)[:, :, 0].to(words) @ states.to(words)[..., None])[..., 0]  # (B, L)
                found[structure.tied] = found[structure.tied] + 2 * (read * along).sum(-1)

        recorder.pull(hidden, start, measure)
        return found

    dims = (0, 0, None if coupled is None else 0)
    squares = torch.func.vmap(pull, in_dims=dims)(starts.to(hidden), tokens.hidden[index], coupled)  # name -> (n, B)
    flat = live.flatten()
    for name, values in squares.items():
        yield name, values.flatten()[flat], index.flatten()[flat]

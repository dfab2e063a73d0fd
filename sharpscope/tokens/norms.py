"""The methods of score norms: the output layer alone (`head`), `local` and `exact`.

`local` takes one forward and one backward pass, in which the cotangents at position t are those of token t. `exact` takes batched
backward passes of single tokens: one forward pass over a batch of rows serves several tokens of each row, `torch.func.vmap` batches
their cotangents, and hooks on the uses of parameters turn these into squared norms, so that no gradient is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from sharpscope.policy import Head
from sharpscope.policy.cache import change_states
from sharpscope.policy.guard import attention_implementation
from sharpscope.tokens.rows import Place, Rows, safe_width, widen
from sharpscope.tokens.structure import (
    CUT,
    Structure,
    Use,
    exact_squares,
    hidden_states,
    local_squares,
    read_before,
    recording,
)

NormMethod = Literal["head", "local", "exact"]

LOGIT_BYTES = {"cpu": 16 * 2**20, "cuda": 512 * 2**20}
"""Logits held at once; a softmax, its gradient and two matrix products run over them while they are in reach."""
SEGMENT = 128
"""`local`: positions of a row that are computed at once, whose activations are kept."""
SLOTS = 16
"""`exact`: tokens of a row that share one forward pass: more save forward passes, fewer waste less of the prefix."""
POSITIONS = {"cpu": 4096, "cuda": 65536}
"""`exact`: rows × slots × length of one forward pass: on a CPU cotangents should stay in cache."""


@dataclass(frozen=True)
class ScoreNorms:
    """Score norms ‖∇_θ log π_t‖₂; all tensors are (N, S) and 0 where the mask is 0.

    Attributes:
        values: norms.
        squared: squared norms.
        method: method that computed the norms.
        groups: norms by kind of parameter (embedding, attention, mlp, norm, head, other) and by layer (layers.0, …), two
            partitions of the same sum of squares.
        checked: largest relative error found by the self-check on this model; None if not checked.
    """

    values: Tensor
    squared: Tensor
    method: NormMethod
    groups: Mapping[str, Tensor]
    checked: float | None = None


class Squares:
    """Sums of squared norms (N, S) of the chosen tokens of rows, in all and by group of parameters."""

    def __init__(self, rows: Rows, dtype: torch.dtype) -> None:
        self.total = torch.zeros(rows.shape, dtype=dtype, device=rows.ids.device)
        self.groups: dict[str, Tensor] = {}

    def add(self, groups: Sequence[str], squares: Tensor, place: Place) -> None:
        """Add the squared norms (m,) of a parameter in these groups to the tokens at `place`."""
        squares = squares.to(self.total)
        for group in groups:
            self.groups.setdefault(group, torch.zeros_like(self.total))
        for target in (self.total, *(self.groups[group] for group in groups)):
            target[place] += squares

    def norms(self, method: NormMethod) -> ScoreNorms:
        """The norms; squared norms of groups are clamped at 0, which only removes rounding."""
        return ScoreNorms(
            self.total.clamp_min(0).sqrt(),
            self.total,
            method,
            {name: self.groups[name].clamp_min(0).sqrt() for name in sorted(self.groups)},
        )


# -- The output layer in closed form


class HeadGradients(NamedTuple):
    """∇ log π at the output layer a = W h + b, z = cap·tanh(scale·a/cap), p = softmax(z/T), for M tokens."""

    to_hidden: Tensor  # (M, d) ∂ log π/∂h
    bias_squared: Tensor  # (M,) ‖∂ log π/∂a‖², the squared norm for the layer's bias
    # (M,) ‖∂ log π/∂W‖² = bias_squared·‖h‖², W in its use as output layer only
    weight_squared: Tensor
    # (M, L) ∂ log π/∂a at given words: couples a tied weight's gradient to the input embedding's.
    coupled: Tensor | None

    def add_to(self, sums: Squares, structure: Structure, place: Place) -> None:
        """Add the output layer's trainable parameters."""
        weight = structure.tied or structure.head_weight
        if weight is not None:
            sums.add(structure.groups[weight], self.weight_squared, place)
        if structure.head_bias is not None:
            sums.add(structure.groups[structure.head_bias], self.bias_squared, place)


@torch.no_grad()
def head_chunks(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: float,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Chunks of M tokens, hidden (M, d), targets (M,): which; ∂ ln p_y/∂a (C, V); ∂ ln p_y/∂h (C, d) in the weight's type."""
    budget = LOGIT_BYTES.get(hidden.device.type, LOGIT_BYTES["cuda"])
    size = max(1, budget // (head.weight.shape[0] * max(hidden.element_size(), 4)))
    for start in range(0, len(hidden), size):
        rows = slice(start, start + size)
        z = head.logits(hidden[rows])  # (C, V)
        y = targets[rows, None]  # (C, 1)
        slope = None if head.soft_cap is None else 1 - (z / head.soft_cap).square_()
        if temperature != 1.0:
            z = z.div_(temperature)
        p = torch.softmax(z, 1).scatter_(1, y, 0.0)
        rest = p.sum(1, keepdim=True)  # 1 − p_y with its relative precision when p_y is near 1
        pull = p.neg_().scatter_(1, y, rest).mul_(head.scale / temperature)
        if slope is not None:
            pull.mul_(slope)
        yield rows, pull, pull.to(head.weight.dtype) @ head.weight.detach()


@torch.no_grad()
def head_gradients(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: float,
    words: Tensor | None = None,
) -> HeadGradients:
    """∂ log π at the output layer for M tokens: hidden (M, d), targets (M,), words (M, L) of `coupled`."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    squared = hidden.new_empty(len(hidden), dtype=dtype)
    to_hidden = torch.empty_like(hidden)
    coupled = None if words is None else hidden.new_empty(words.shape, dtype=dtype)
    for rows, pull, back in head_chunks(hidden, head, targets, temperature):
        squared[rows] = torch.linalg.vecdot(pull, pull)
        to_hidden[rows] = back
        if coupled is not None and words is not None:
            coupled[rows] = pull.gather(1, words[rows])
    wide_hidden = hidden.to(dtype)
    weight_squared = squared * torch.linalg.vecdot(wide_hidden, wide_hidden)
    return HeadGradients(to_hidden, squared, weight_squared, coupled)


@torch.no_grad()
def head_norms(
    model: nn.Module,
    structure: Structure,
    rows: Rows,
    temperature: float,
) -> ScoreNorms:
    """‖∂ log π/∂(W, b)‖ of the output layer z = W h + b, also if W is frozen or tied to the embedding."""
    sums = Squares(rows, structure.dtype)
    for chunk in rows.chunks():
        states = hidden_states(model, chunk.ids)[chunk.predicts]  # (M, d)
        output = head_gradients(states, structure.head, chunk.targets, temperature)
        sums.add(("head",), output.weight_squared, chunk.place)
        if structure.head.bias is not None:
            sums.add(("head",), output.bias_squared, chunk.place)
    return sums.norms("head")


# -- Local norms


def local_norms(
    model: nn.Module,
    structure: Structure,
    rows: Rows,
    temperature: float,
) -> ScoreNorms:
    """Local norms of all chosen tokens. The model must be in eval mode."""
    structure.require_local()
    sums = Squares(rows, structure.dtype)
    for chunk in rows.chunks(share=structure.shares):  # no cotangent goes to what the rows share
        for part, cache in _segments(model, structure, chunk):
            add_local(model, structure, part, temperature, sums, cache)
    return sums.norms("local")


def add_local(
    model: nn.Module,
    structure: Structure,
    rows: Rows,
    temperature: float,
    sums: Squares,
    cache: DynamicCache | None = None,
) -> None:
    """Add the squared norms of a chunk's tokens, by a forward and a backward pass; `cache`: see `hidden_states`."""
    ids = widen(rows.ids, safe_width(model, rows.ids.shape[1]))  # (B, L)
    b, j = rows.predicts.nonzero(as_tuple=True)  # (M,) row and position that predict a chosen token
    place = rows.place
    with recording(model, structure, (ids.shape[0], ids.shape[1]), CUT) as recorder:
        hidden = hidden_states(model, ids, cache)
    states = hidden.detach()[b, j]
    words = ids[b, j][:, None] if structure.tied else None
    output = head_gradients(states, structure.head, rows.targets, temperature, words)
    output.add_to(sums, structure, place)
    start = torch.zeros_like(hidden)
    start[b, j] = output.to_hidden

    def measure(use: Use, g: Tensor) -> None:
        """Add the squares of a use's local norms."""
        for name, squares in local_squares(use, g):
            sums.add(structure.groups[name], squares[b, j], place)
        if use.weight is not None and use.weight == structure.tied and output.coupled is not None:
            ignored = use.x[b, j] == (-1 if use.ignored is None else use.ignored)
            pull = output.coupled[:, 0].masked_fill(ignored, 0.0)
            read = use.by_position(g)[b, j, 0]  # (M, d)
            cross = torch.linalg.vecdot(read.to(pull), states.to(pull))
            sums.add(structure.groups[use.weight], 2 * pull * cross, place)

    recorder.pull(hidden, start, measure)


def _segments(
    model: nn.Module,
    structure: Structure,
    chunk: Rows,
) -> Iterator[tuple[Rows, DynamicCache | None]]:
    """Parts of long rows, so that activations are of one part, and the cache that each continues; what it holds is constant."""
    with torch.no_grad():
        cache = read_before(model, chunk.before, len(chunk.ids))
    end = int(chunk.chosen.any(0).nonzero().max()) + 1
    if end <= SEGMENT + 1 or not structure.shares:
        yield chunk, cache
        return
    cache = cache or DynamicCache()
    shared = cache.get_seq_length()
    for start in range(0, end - 1, SEGMENT):
        # the token there is predicted here, and read by the next part
        stop = min(start + SEGMENT, end - 1)
        part = chunk.segment(start, stop + 1)
        if bool(part.chosen.any()):
            yield part, cache
        else:
            with torch.no_grad(), attention_implementation(model, CUT):
                hidden_states(model, part.ids, cache)
        change_states(cache, partial(_without_graph, stop=shared + stop))


def _without_graph(states: Tensor, stop: int) -> Tensor:
    """Keys or values (B, H, L, d_head) up to a position."""
    return states[:, :, :stop].detach()


# -- Exact norms


def exact_norms(
    model: nn.Module,
    structure: Structure,
    rows: Rows,
    temperature: float,
) -> ScoreNorms:
    """Norms of all chosen tokens, exact up to rounding. The model must be in eval mode."""
    structure.require_uses("exact")
    sums = Squares(rows, structure.dtype)
    for index, positions in _batches(rows):
        _add_exact(model, structure, rows, temperature, sums, index, positions)
    return sums.norms("exact")


def _batches(rows: Rows) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of B rows (B,) of similar length, and up to `SLOTS` positions (n, B) of each that predict a token, −1 where empty."""
    most = POSITIONS.get(rows.ids.device.type, POSITIONS["cuda"])
    lists: list[tuple[int, list[int]]] = []  # row and descending positions
    for row, predicts in enumerate(rows.predicts):
        descending = predicts.nonzero()[:, 0].flip(0).tolist()
        for start in range(0, len(descending), SLOTS):
            lists.append((row, descending[start : start + SLOTS]))
    lists.sort(key=lambda one: (-one[1][0], -len(one[1])))
    while lists:
        length = lists[0][1][0] + 1  # the longest of the batch, since lists are sorted
        slots = 0
        batch: list[tuple[int, list[int]]] = []
        for one in lists:
            more = max(slots, len(one[1]))
            if batch and more * (len(batch) + 1) * length > most:
                break
            slots = more
            batch.append(one)
        lists = lists[len(batch) :]
        positions = torch.full((slots, len(batch)), -1)
        for at, (_, found) in enumerate(batch):
            positions[: len(found), at] = torch.tensor(found)
        index = torch.tensor([row for row, _ in batch])
        yield index.to(rows.ids.device), positions.to(rows.ids.device)


def _add_exact(
    model: nn.Module,
    structure: Structure,
    rows: Rows,
    temperature: float,
    sums: Squares,
    index: Tensor,
    positions: Tensor,
) -> None:
    """Add the squared norms of the m tokens of a batch."""
    slot, b = (positions >= 0).nonzero(as_tuple=True)  # (m,)
    j = positions[slot, b]
    row = index[b]
    place = rows.source[row], rows.columns[row, j + 1]
    length = safe_width(model, int(positions.max()) + 1)
    ids = widen(rows.ids[index, :length], length)  # (B, L)
    with recording(model, structure, (ids.shape[0], ids.shape[1]), "math") as recorder:
        hidden = hidden_states(model, ids)
    states = hidden.detach()[b, j]
    words = ids[b] if structure.tied else None
    output = head_gradients(states, structure.head, rows.ids[row, j + 1], temperature, words)
    output.add_to(sums, structure, place)

    def by_slot(values: Tensor) -> Tensor:
        """(m, …) -> (n, B, …), 0 where a slot is empty."""
        empty = values.new_zeros(*positions.shape, *values.shape[1:])
        return empty.index_put((slot, b), values)

    starts = hidden.new_zeros(*positions.shape, *hidden.shape[1:])  # (n, B, L, d)
    starts[slot, b, j] = output.to_hidden.to(starts)

    def pull(start: Tensor, states: Tensor, words: Tensor | None) -> dict[str, Tensor]:
        """Squared norms (B,) by parameter of one token of each row: start (B, L, d), states (B, d), coupled words (B, L)."""
        found: dict[str, Tensor] = {}

        def measure(use: Use, g: Tensor) -> None:
            """Add the squares of a use's exact norms."""
            for name, squares in exact_squares(use, g):
                found[name] = found[name] + squares if name in found else squares
            if use.weight is not None and use.weight == structure.tied and words is not None:
                read = words
                if use.ignored is not None:
                    read = words.masked_fill(use.x == use.ignored, 0.0)
                by_position = use.by_position(g)[:, :, 0]  # (B, L, d)
                along = by_position.to(words) @ states.to(words)[..., None]  # (B, L, 1)
                found[use.weight] = found[use.weight] + 2 * (read * along[..., 0]).sum(-1)

        recorder.pull(hidden, start, measure)
        return found

    coupled = None if output.coupled is None else by_slot(output.coupled)
    by_token = torch.func.vmap(pull, in_dims=(0, 0, None if coupled is None else 0))
    squares = by_token(starts, by_slot(states), coupled)
    for name, values in squares.items():  # name -> (n, B)
        sums.add(structure.groups[name], values[slot, b], place)

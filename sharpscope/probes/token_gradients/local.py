"""The methods `head`, the output layer alone, and `local`.

In one forward and one backward pass of `local`, the cotangents at position t are those of token t.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from sharpscope.probes.guard import attention_implementation
from sharpscope.probes.token_gradients import attention as attn
from sharpscope.probes.token_gradients.head import HeadGradients, head_gradients
from sharpscope.probes.token_gradients.result import Collector, ScoreNorms, Sums
from sharpscope.probes.token_gradients.rows import Rows, safe_width, widen
from sharpscope.probes.token_gradients.structure import Structure, hidden_states, read_before, recording
from sharpscope.probes.token_gradients.uses import Use, local_squares

SEGMENT = 128
"""Positions of a row that are computed at once, whose activations are kept."""


@dataclass(frozen=True)
class LocalPass:
    """A chunk of rows between the forward and the backward pass of `local`."""

    hidden: Tensor  # (M, d) hidden states that predict its M chosen tokens
    where: Tensor  # (M, 2) row and position that predict them
    output: HeadGradients
    coupled: Tensor | None  # (M,) ∂ log π/∂a at the word read at the predicting position, if embeddings are tied
    sums: Sums  # holds the output layer's part

    def squares(self, structure: Structure, use: Use, g: Tensor) -> None:
        """Add the squared norms that follow from a use and its cotangent."""
        b, j = self.where.unbind(1)
        for name, squares in local_squares(use, g):
            self.sums.add(name, squares[b, j])
        if structure.tied is not None and use.weight == structure.tied and self.coupled is not None:
            pull = self.coupled.masked_fill(use.x[b, j] == (-1 if use.ignored is None else use.ignored), 0.0)
            cross = torch.linalg.vecdot(use.by_position(g)[b, j, 0].to(pull), self.hidden.to(pull))
            self.sums.add(structure.tied, 2 * pull * cross)


def start_of(
    structure: Structure, rows: Rows, ids: Tensor, predicts: Tensor, states: Tensor, temperature: float
) -> LocalPass:
    """The output layer's part of a chunk whose positions `predicts` (B, L) have the hidden states (M, d)."""
    words = ids[predicts][:, None] if structure.tied else None
    output, coupled = head_gradients(states, structure.head, rows.targets, temperature, words=words)
    sums = Sums(rows, structure.groups, output.pull_squared.dtype)
    add_head(sums, structure, output)
    return LocalPass(states, predicts.nonzero(), output, None if coupled is None else coupled[:, 0], sums)


def add_head(sums: Sums, structure: Structure, output: HeadGradients) -> None:
    """Add the output layer's trainable parameters."""
    weight = structure.tied or structure.head_weight
    if weight is not None:
        sums.add(weight, output.weight_squared)
    if structure.head_bias is not None:
        sums.add(structure.head_bias, output.pull_squared)


def _local_sums(
    model: nn.Module,
    structure: Structure,
    rows: Rows,
    temperature: float,
    before: DynamicCache | None,
    after: list[DynamicCache] | None,
) -> Sums:
    """Squared norms (M,) of a chunk's tokens, by a forward and a backward pass.

    The rows continue `before`, or their common prefix; `after`: see `hidden_states`.
    """
    if before is None:
        with torch.no_grad():
            before = read_before(model, rows.before)
    ids = widen(rows.ids, safe_width(model, rows.ids.shape[1]))  # (B, L)
    predicts = nn.functional.pad(rows.predicts, (0, ids.shape[1] - rows.ids.shape[1]))
    with recording(model, structure, (ids.shape[0], ids.shape[1]), attn.CUT) as recorder:
        hidden = hidden_states(model, ids, before, after)
    local = start_of(structure, rows, ids, predicts, hidden.detach()[predicts], temperature)
    start = torch.zeros_like(hidden)
    start[predicts] = local.output.to_hidden
    recorder.pull(hidden, start, lambda use, g: local.squares(structure, use, g))
    return local.sums


def local_norms(model: nn.Module, structure: Structure, rows: Rows, temperature: float) -> ScoreNorms:
    """Local norms of all chosen tokens. The model must be in eval mode."""
    structure.require_local()
    collector = Collector(rows, structure.dtype)
    for chunk in rows.chunks(share=structure.shares):  # no cotangent goes to what the rows share
        for part, before, after in _segments(model, structure, chunk):
            collector.write(part, _local_sums(model, structure, part, temperature, before, after))
    return collector.result("local")


def _segments(
    model: nn.Module, structure: Structure, chunk: Rows
) -> Iterator[tuple[Rows, DynamicCache | None, list[DynamicCache] | None]]:
    """Parts of long rows that continue from what was read before, whose keys and values are constants; activations are of one part.

    Yields:
        A part, the cache before it, and the list that gets the cache after it.
    """
    end = int(chunk.chosen.any(0).nonzero().max()) + 1
    if end <= SEGMENT + 1 or not structure.shares:
        yield chunk, None, None
        return
    with torch.no_grad():
        cache = read_before(model, chunk.before) or DynamicCache()
    shared = cache.get_seq_length()
    for start in range(0, end - 1, SEGMENT):
        stop = min(start + SEGMENT, end - 1)  # the token there is predicted here, and read by the next part
        part, after = chunk.segment(start, stop + 1), list[DynamicCache]()
        if bool(part.chosen.any()):
            yield part, cache, after
        else:
            with torch.no_grad(), attention_implementation(model, attn.FORWARD):
                hidden_states(model, part.ids, cache, after)
        cache = after[0]
        layers: Any = cache.layers
        for layer in layers:  # without the graph of the part
            layer.keys, layer.values = (x[:, :, : shared + stop].detach() for x in (layer.keys, layer.values))


@torch.no_grad()
def head_norms(model: nn.Module, structure: Structure, rows: Rows, temperature: float) -> ScoreNorms:
    """‖∂ log π/∂(W, b)‖ of the output layer z = W h + b, also if W is frozen or tied to the embedding.

    It equals ‖p − e_y‖·sqrt(‖h‖² + 1 if there is a bias)/T, with each logit's part multiplied by the slope of the soft cap.
    """
    collector = Collector(rows, structure.dtype)
    for chunk in rows.chunks():
        states = hidden_states(model, chunk.ids)[chunk.predicts]  # (M, d)
        output, _ = head_gradients(states, structure.head, chunk.targets, temperature)
        sums = Sums(chunk, {"output": ("head",)}, collector.dtype)
        sums.add("output", output.weight_squared)
        if structure.head.bias is not None:
            sums.add("output", output.pull_squared)
        collector.write(chunk, sums)
    return collector.result("head")

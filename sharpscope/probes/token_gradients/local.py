"""The tier `local`: one forward and one backward pass in which the cotangents at position t are those of token t."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sharpscope.probes.token_gradients import attention as attn
from sharpscope.probes.token_gradients.head import HeadGradients, head_gradients
from sharpscope.probes.token_gradients.result import Collector, Ledger, ScoreNorms
from sharpscope.probes.token_gradients.rows import Rows, safe_width, widen
from sharpscope.probes.token_gradients.structure import Structure, hidden_states, read_before, recording
from sharpscope.probes.token_gradients.uses import Use, local_squares


@dataclass(frozen=True)
class LocalPass:
    """A chunk of rows after the local backward pass.

    Attributes:
        rows: the chunk; `hidden`: (M, d) hidden states that predict its M chosen tokens.
        where: (M, 2) row and position that predict them.
        output: the output layer's part.
        coupled: (M,) ∂ log π/∂a at the word read at the predicting position; None unless embeddings are tied.
        uses, cotangents: of the backbone, those that some chosen token reaches.
    """

    rows: Rows
    hidden: Tensor
    where: Tensor
    output: HeadGradients
    coupled: Tensor | None
    uses: list[Use]
    cotangents: list[Tensor]
    order: list[int]


def local_passes(
    model: nn.Module, structure: Structure, rows: Rows, temperature: float, *, share: bool = False
) -> Iterator[LocalPass]:
    """Walk over all rows in chunks.

    Args:
        share: read what rows have in common before their first chosen token once: no cotangent goes there.
    """
    for chunk in rows.chunks(share=share and structure.shares):
        with torch.no_grad():
            before = read_before(model, chunk.before)
        ids = widen(chunk.ids, safe_width(model, chunk.ids.shape[1]))  # (B, L)
        predicts = nn.functional.pad(chunk.predicts, (0, ids.shape[1] - chunk.ids.shape[1]))
        recorder = structure.recorder((ids.shape[0], ids.shape[1]))
        with torch.enable_grad(), recording(model, structure, recorder, attn.CUT):
            hidden = hidden_states(model, ids, before)
        if structure.learn(recorder):
            structure.require_local()
        states = hidden.detach()[predicts]  # (M, d)
        words = ids[predicts][:, None] if structure.tied else None
        output, coupled = head_gradients(states, structure.head, chunk.targets, temperature, words=words)
        where = predicts.nonzero()
        uses: list[tuple[int, Use, Tensor]] = []
        if hidden.requires_grad:
            start = torch.zeros_like(hidden)
            start[predicts] = output.to_hidden
            gradients = torch.autograd.grad(hidden, [use.out for use in recorder.uses], start, allow_unused=True)
            uses = [
                (i, use, g) for i, (use, g) in enumerate(zip(recorder.uses, gradients, strict=True)) if g is not None
            ]
        yield LocalPass(
            chunk,
            states,
            where,
            output,
            None if coupled is None else coupled[:, 0],
            [use for _, use, _ in uses],
            [g for _, _, g in uses],
            [i for i, _, _ in uses],
        )


def add_head(ledger: Ledger, structure: Structure, output: HeadGradients) -> None:
    """The output layer's own trainable parameters."""
    weight = structure.tied or structure.head_weight
    if weight is not None:
        ledger.add(weight, output.weight_squared)
    if structure.head_bias is not None:
        ledger.add(structure.head_bias, output.pull_squared)


def tally(structure: Structure, local: LocalPass) -> Ledger:
    """Squared local norms (M,) of the tokens of a chunk, by group."""
    ledger = Ledger(structure.groups, torch.zeros_like(local.output.logp))
    add_head(ledger, structure, local.output)
    b, j = local.where.unbind(1)
    for use, g in zip(local.uses, local.cotangents, strict=True):
        for name, squares in local_squares(use, g):
            ledger.add(name, squares[b, j])
        if use.kind == "embedding" and use.weight == structure.tied and local.coupled is not None:
            assert use.x is not None
            pull = local.coupled.masked_fill(use.x[b, j] == (-1 if use.ignored is None else use.ignored), 0.0)
            cross = torch.linalg.vecdot(use.canonical(g)[b, j, 0].to(pull), local.hidden.to(pull))
            ledger.add(use.names[0], 2 * pull * cross)
    return ledger


def local_norms(model: nn.Module, structure: Structure, rows: Rows, temperature: float) -> ScoreNorms:
    """Local norms of all chosen tokens. The model must be in eval mode."""
    structure.require_local()
    collector = Collector(rows.shape, torch.promote_types(structure.head.weight.dtype, torch.float32), rows.ids.device)
    for local in local_passes(model, structure, rows, temperature, share=True):
        collector.write(local.rows, tally(structure, local))
    return collector.result("local", None)

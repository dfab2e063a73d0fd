"""The tiers `head`, the output layer alone, and `local`.

In one forward and one backward pass of `local`, the cotangents at position t are those of token t.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from sharpscope.probes.token_gradients import attention as attn
from sharpscope.probes.token_gradients.head import HeadGradients, head_gradients
from sharpscope.probes.token_gradients.result import Collector, Ledger, ScoreNorms
from sharpscope.probes.token_gradients.rows import Rows, safe_width, widen
from sharpscope.probes.token_gradients.structure import Structure, hidden_states, read_before, recording
from sharpscope.probes.token_gradients.uses import Use, Wrap, local_squares


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


def local_passes(model: nn.Module, structure: Structure, rows: Rows, temperature: float) -> Iterator[LocalPass]:
    """Walk over all rows in chunks."""
    for forward in _forwards(model, structure, rows, temperature):
        found: list[tuple[int, Use, Tensor]] = []
        if forward.hidden.requires_grad:
            outs = [use.out for use in forward.uses]
            gradients = torch.autograd.grad(forward.hidden, outs, forward.start(), allow_unused=True)
            found = [
                (i, use, g) for i, (use, g) in enumerate(zip(forward.uses, gradients, strict=True)) if g is not None
            ]
        order, uses, cotangents = (list(column) for column in zip(*found, strict=True)) if found else ([], [], [])
        yield replace(forward.local, uses=uses, cotangents=cotangents, order=order)


@dataclass(frozen=True)
class _Forward:
    """A chunk of rows before the local backward pass.

    Attributes:
        local: what is known of the pass, without uses.
        hidden: (B, L, d) hidden states with their graph.
        predicts: (B, L) bool, positions that predict the chosen tokens.
        uses: of the backbone.
    """

    local: LocalPass
    hidden: Tensor
    predicts: Tensor
    uses: list[Use]

    def start(self) -> Tensor:
        """Cotangent (B, L, d) of the hidden states."""
        start = torch.zeros_like(self.hidden)
        start[self.predicts] = self.local.output.to_hidden
        return start


def _forwards(
    model: nn.Module,
    structure: Structure,
    rows: Rows,
    temperature: float,
    *,
    share: bool = False,
    wrap: Wrap | None = None,
) -> Iterator[_Forward]:
    """Run the rows in chunks.

    Args:
        share: read what rows have in common before their first chosen token once: no cotangent goes there.
        wrap: replaces the output of a use.
    """
    for chunk in rows.chunks(share=share and structure.shares):
        with torch.no_grad():
            before = read_before(model, chunk.before)
        ids = widen(chunk.ids, safe_width(model, chunk.ids.shape[1]))  # (B, L)
        predicts = nn.functional.pad(chunk.predicts, (0, ids.shape[1] - chunk.ids.shape[1]))
        recorder = structure.recorder((ids.shape[0], ids.shape[1]), wrap=wrap)
        with torch.enable_grad(), recording(model, structure, recorder, attn.CUT):
            hidden = hidden_states(model, ids, before)
        if structure.learn(recorder):
            structure.require_local()
        states = hidden.detach()[predicts]  # (M, d)
        words = ids[predicts][:, None] if structure.tied else None
        output, coupled = head_gradients(states, structure.head, chunk.targets, temperature, words=words)
        known = None if coupled is None else coupled[:, 0]
        local = LocalPass(chunk, states, predicts.nonzero(), output, known, [], [], [])
        yield _Forward(local, hidden, predicts, recorder.uses)


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
    for use, g in zip(local.uses, local.cotangents, strict=True):
        for name, squares in _squares(structure, local, use, g):
            ledger.add(name, squares)
    return ledger


def _squares(structure: Structure, local: LocalPass, use: Use, g: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Squared norms (M,) by parameter from a use and its cotangent."""
    b, j = local.where.unbind(1)
    for name, squares in local_squares(use, g):
        yield name, squares[b, j]
    if use.kind == "embedding" and use.weight == structure.tied and local.coupled is not None:
        assert use.x is not None
        pull = local.coupled.masked_fill(use.x[b, j] == (-1 if use.ignored is None else use.ignored), 0.0)
        cross = torch.linalg.vecdot(use.canonical(g)[b, j, 0].to(pull), local.hidden.to(pull))
        yield use.names[0], 2 * pull * cross


def local_norms(model: nn.Module, structure: Structure, rows: Rows, temperature: float) -> ScoreNorms:
    """Local norms of all chosen tokens. The model must be in eval mode."""
    structure.require_local()
    collector = Collector(rows.shape, torch.promote_types(structure.head.weight.dtype, torch.float32), rows.ids.device)
    taps = _Taps(structure)
    for forward in _forwards(model, structure, rows, temperature, share=True, wrap=taps.wrap):
        ledger = Ledger(structure.groups, torch.zeros_like(forward.local.output.logp))
        add_head(ledger, structure, forward.local.output)
        forward.uses.clear()
        for name, squares in taps.squares(forward):
            ledger.add(name, squares)
        collector.write(forward.local.rows, ledger)
    return collector.result("local", None)


class _Taps:
    """Takes the squares of each use when the backward pass reaches it, and drops the use and its cotangent then.

    All cotangents together would take half of what the activations take. Outputs are not kept either: the graph keeps those that
    it needs.
    """

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self._clear()

    def _clear(self) -> None:
        self._uses: dict[int, Use] = {}
        self._found: dict[int, list[tuple[str, Tensor]]] = {}
        self._nodes: set[Node] = set()
        self._first: list[Tensor] = []  # outputs that depend on no other use: a backward pass to them reaches all uses
        self._local: LocalPass | None = None

    def wrap(self, use: Use) -> Tensor:
        """Watch the output of a use, which is returned."""
        out, index = use.out, len(self._uses)
        if not self._depends(out.grad_fn):
            self._first.append(out)
        if out.grad_fn is not None:
            self._nodes.add(out.grad_fn)
        out.register_hook(partial(self._take, index=index))
        use.out = torch.empty_like(out, device="meta")  # its shape is still needed
        self._uses[index] = use
        return out

    def _depends(self, node: Node | None) -> bool:
        """Whether a node depends on a use."""
        seen: set[Node] = set()
        queue = [] if node is None else [node]
        while queue:
            earlier = {one for one, _ in queue.pop().next_functions if one is not None} - seen
            if not self._nodes.isdisjoint(earlier):
                return True
            seen |= earlier
            queue += earlier
        return False

    def _take(self, g: Tensor, index: int) -> None:
        assert self._local is not None
        self._found[index] = list(_squares(self._structure, self._local, self._uses.pop(index), g))

    def squares(self, forward: _Forward) -> list[tuple[str, Tensor]]:
        """`_squares` of all uses of the forward pass, in their order."""
        self._local = forward.local
        if forward.hidden.requires_grad:
            torch.autograd.grad(forward.hidden, self._first, forward.start(), allow_unused=True)
        found = [one for _, squares in sorted(self._found.items()) for one in squares]
        self._clear()
        return found


@torch.no_grad()
def head_norms(model: nn.Module, structure: Structure, rows: Rows, temperature: float) -> ScoreNorms:
    """‖∂ log π/∂(W, b)‖ of the output layer z = W h + b, also if W is frozen or tied to the embedding.

    It equals ‖p − e_y‖·sqrt(‖h‖² + 1 if there is a bias)/T, with each logit's part multiplied by the slope of the soft cap.
    """
    collector = Collector(rows.shape, torch.promote_types(structure.head.weight.dtype, torch.float32), rows.ids.device)
    for chunk in rows.chunks():
        states = hidden_states(model, chunk.ids)[chunk.predicts]  # (M, d)
        output, _ = head_gradients(states, structure.head, chunk.targets, temperature)
        ledger = Ledger({"output": ("head",)}, torch.zeros_like(output.logp))
        ledger.add("output", output.weight_squared)
        if structure.head.bias is not None:
            ledger.add("output", output.pull_squared)
        collector.write(chunk, ledger)
    return collector.result("head", torch.zeros_like(collector.squared))

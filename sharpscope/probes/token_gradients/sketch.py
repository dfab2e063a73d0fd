"""The tier `sketch`: random directional derivatives of log-probabilities, with the local gradients as control variate.

The gradient g of a token is its local gradient l, whose norm is known, plus a remainder r from other positions:
‖g‖² = ‖l‖² + ‖r‖² + 2⟨r, l⟩. For v with independent entries of mean 0 and variance 1, ⟨r, v⟩² + 2⟨r, v⟩⟨l, v⟩ is unbiased for the
last two terms. Two parts are taken out of v to lower its variance:

- Parameters that are used after the last attention only have no remainder, so v is 0 there.
- With tied embeddings, l holds the output layer's gradient, which is most of it and which is p ⊗ h for p = ∂ log π/∂a. Its part
  2⟨r, p ⊗ h⟩ involves the input embedding alone. It is estimated by 2⟨r, w⟩⟨p ⊗ h, w′⟩ along a direction w = R S of the embedding,
  w′ = R S⁻¹, with random signs R. S makes w small where hidden states are large: they lie near a few directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from sharpscope.errors import UserError
from sharpscope.probes.token_gradients.experts import recorded_experts
from sharpscope.probes.token_gradients.forward_mode import pushed_each, pushed_hidden
from sharpscope.probes.token_gradients.head import head_gradients
from sharpscope.probes.token_gradients.local import LocalPass, local_passes, tally
from sharpscope.probes.token_gradients.result import Collector, ScoreNorms
from sharpscope.probes.token_gradients.rows import Rows, safe_width, widen
from sharpscope.probes.token_gradients.structure import Structure, hidden_states
from sharpscope.probes.token_gradients.tangents import Own
from sharpscope.probes.token_gradients.uses import Recorder, Use

AT_ONCE = 4  # directions pushed forward in one pass, which share its values
COUPLED = 4  # directions of ‖r‖² + 2⟨r, l⟩ for each one of the tied embeddings' part, which varies less
SAMPLE = 4  # rows whose hidden states say where the output layer's gradient is large
FLOOR = 0.02  # share of the hidden states' energy that is taken as even

Direction = Mapping[str, Tensor]


def sketch_norms(
    model: nn.Module, structure: Structure, rows: Rows, temperature: float, directions: int, seed: int
) -> ScoreNorms:
    """Unbiased estimates of squared norms with standard errors. The model must be in eval mode.

    Args:
        directions: K ≥ 2, shared by all tokens, whose errors are therefore correlated.
        seed: of the directions' own generator.

    Raises:
        UserError: fewer than 2 directions, a model that the local tier cannot handle, or derivatives too large for
            its dtype.
    """
    if directions < 2:
        raise UserError(f"directions, {directions}: at least 2 are needed for a standard error")
    structure.require_local()
    dtype = torch.promote_types(structure.head.weight.dtype, torch.float32)
    collector = Collector(rows.shape, dtype, rows.ids.device)
    errors = torch.zeros_like(collector.squared)
    scaling = scaling_of(model, structure, rows)
    for local in local_passes(model, structure, rows, temperature):
        ledger = tally(structure, local)
        # Every chunk draws the same directions, so the result does not depend on how rows are cut into chunks.
        generator = torch.Generator(device=rows.ids.device).manual_seed(seed)
        parts = _estimates(model, structure, local, temperature, scaling, generator, directions)
        if structure.computes_in == torch.float16 and not all(bool(part.isfinite().all()) for part in parts):
            raise UserError(
                "tier, sketch: the model's derivatives overflow float16; load it in bfloat16 or float32, or use "
                "tier='exact'"
            )
        ledger.total += sum(part.mean(0) for part in parts)
        ledger.groups.clear()
        collector.write(local.rows, ledger)
        variance = torch.stack([part.var(0) / len(part) for part in parts]).sum(0)
        local.rows.write(errors, variance.sqrt())
    return collector.result("sketch", errors)


def random_signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """Random signs, the distribution with the smallest variance of the estimate."""
    drawn = torch.randint(0, 2, like.shape, generator=generator, device=like.device, dtype=torch.int8)
    return drawn.to(like.dtype).mul_(2).sub_(1)


def draw_direction(structure: Structure, generator: torch.Generator) -> dict[str, Tensor]:
    """Random signs for the backbone's trainable parameters, without those whose remainder is 0."""
    outside = structure.whole | {structure.head_weight, structure.head_bias}
    return {name: random_signs(p, generator) for name, p in structure.named.items() if name not in outside}


@dataclass(frozen=True)
class Scaling:
    """S = Σ_i s_i m_i m_iᵀ on rows of the embedding.

    Attributes:
        basis: (d, d) orthonormal columns m_i.
        sizes: (d,) s_i.
    """

    basis: Tensor
    sizes: Tensor

    def times(self, x: Tensor, power: int) -> Tensor:
        """X S^power, x (…, d)."""
        return (x.to(self.basis) @ self.basis) * self.sizes**power @ self.basis.T


@torch.no_grad()
def scaling_of(model: nn.Module, structure: Structure, rows: Rows) -> Scaling | None:
    """S for rows of a model with tied embeddings that are trained, None for other models.

    The variance is least if S⁴ is the energy of hidden states over that of remainders, which is taken as even. It is measured on
    a few rows; the estimate is unbiased with any S.
    """
    chosen = rows.chosen.any(1).nonzero()[:, 0]
    if structure.tied is None or structure.tied in structure.whole or not len(chosen):
        return None
    some = rows.take(chosen[:: -(-len(chosen) // SAMPLE)])
    ids = widen(some.ids, safe_width(model, some.ids.shape[1]))
    hidden = hidden_states(model, ids)[:, : some.ids.shape[1]][some.predicts]
    hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    energy, basis = torch.linalg.eigh(hidden.T @ hidden)
    energy = energy.clamp_min(0) / energy.sum() + FLOOR / len(energy)
    return Scaling(basis, energy**0.25)


@dataclass(frozen=True)
class _Coupling:
    """The output layer's gradient p ⊗ h of M tokens at the words that they could read, which tied embeddings share.

    Attributes:
        pull: (M, L) p at the word of each position of the row; 0 after the token and where the word stood before.
        hidden: (M, d).
        row: (M,); ids: (B, L).
    """

    pull: Tensor
    hidden: Tensor
    row: Tensor
    ids: Tensor

    @staticmethod
    def of(structure: Structure, local: LocalPass, temperature: float) -> _Coupling | None:
        """None where the input embedding is not tied to the output layer, or has no gradient."""
        use = next((u for u in local.uses if u.kind == "embedding" and u.weight == structure.tied), None)
        if structure.tied is None or use is None or use.x is None:
            return None
        ids, (row, position) = use.x, local.where.unbind(1)
        _, pull = head_gradients(local.hidden, structure.head, local.rows.targets, temperature, words=ids[row])
        assert pull is not None
        ordered, order = ids.sort(dim=1, stable=True)
        new = F.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)
        first = torch.zeros_like(new).scatter_(1, order, new)
        if use.ignored is not None:
            first &= ids != use.ignored
        read = torch.arange(ids.shape[1], device=ids.device) <= position[:, None]
        return _Coupling(pull * (first[row] & read), local.hidden.to(pull), row, ids)

    def along(self, direction: Tensor) -> Tensor:
        """⟨p ⊗ h, v⟩ (M,) along v (V, d), over the words of the row."""
        read = direction[self.ids].to(self.hidden)  # (B, L, d)
        out = self.hidden.new_zeros(len(self.row))
        for row in self.row.unique().tolist():
            here = self.row == row
            out[here] = torch.linalg.vecdot(self.pull[here], self.hidden[here] @ read[row].T)
        return out


def _estimates(
    model: nn.Module,
    structure: Structure,
    local: LocalPass,
    temperature: float,
    scaling: Scaling | None,
    generator: torch.Generator,
    directions: int,
) -> list[Tensor]:
    """Unbiased estimates whose sum is ‖g‖² − ‖l‖² of the chunk's tokens: (K, M) and, of the tied part, (K′, M)."""
    gained = []
    for first in range(0, directions, AT_ONCE):
        drawn: list[Direction] = []
        drawn += [draw_direction(structure, generator) for _ in range(min(AT_ONCE, directions - first))]
        gained += [full.square() - own.square() for full, own in _derivatives(model, structure, local, drawn)]
    coupling = _Coupling.of(structure, local, temperature)
    if coupling is None or scaling is None or structure.tied is None:
        return [torch.stack(gained)]
    coupled = []
    weight, count = structure.named[structure.tied], coupled_directions(directions)
    for first in range(0, count, AT_ONCE):
        signs = [random_signs(weight, generator) for _ in range(min(AT_ONCE, count - first))]
        scaled: list[Direction] = [{structure.tied: scaling.times(one, 1)} for one in signs]
        for one, (full, own) in zip(signs, _derivatives(model, structure, local, scaled), strict=True):
            coupled.append(2 * (full - own) * coupling.along(scaling.times(one, -1)))
    return [torch.stack(gained), torch.stack(coupled)]


def coupled_directions(directions: int) -> int:
    """Directions of the tied embeddings' part for K `directions`; 2 are needed for its standard error."""
    return max(2, -(-directions // COUPLED))


def _derivatives(
    model: nn.Module, structure: Structure, local: LocalPass, directions: list[Direction]
) -> list[tuple[Tensor, Tensor]]:
    """⟨g, v⟩ and ⟨l, v⟩ (M,) over the backbone, for each direction."""
    ids = widen(local.rows.ids, safe_width(model, local.rows.ids.shape[1]))
    b, j = local.where.unbind(1)
    like = local.output.logp
    moving = {name for direction in directions for name in direction}
    known: dict[str, tuple[Use, Tensor]] = {}
    for use, cotangent in zip(local.uses, local.cotangents, strict=True):
        known |= {name: (use, cotangent) for name in use.names if name in moving}
    own = Own(known, [like.new_zeros(ids.shape[0], ids.shape[1]) for _ in directions])
    pushed = pushed_each(model, structure, ids, directions, own=own)
    if pushed is not None:
        moved, sums = pushed[1], own.sums
    else:
        moved, sums = [], []
        for direction in directions:
            one, total = _pushed_one(model, structure, local, ids, direction)
            moved.append(one)
            sums.append(total)
    start = local.output.to_hidden.to(like)
    return [
        (torch.linalg.vecdot(start, one[b, j].to(like)), total[b, j]) for one, total in zip(moved, sums, strict=True)
    ]


def _pushed_one(
    model: nn.Module, structure: Structure, local: LocalPass, ids: Tensor, direction: Direction
) -> tuple[Tensor, Tensor]:
    """What a direction moves the hidden states by (B, L, d), and ⟨l, v⟩ (B, L), by PyTorch's forward mode."""
    watchers: list[_LocalDerivative] = []

    @contextmanager
    def watch(duals: dict[str, Tensor]) -> Iterator[None]:
        """Context that follows the local derivative of the dual parameters."""
        watchers.append(_LocalDerivative(duals, local, (ids.shape[0], ids.shape[1])))
        with recorded_experts(model, watchers[0]), watchers[0]:
            yield

    whole = [direction.get(name, torch.zeros_like(p)) for name, p in structure.named.items()]
    return pushed_hidden(model, structure, ids, whole, watch=watch)[1], watchers[0].derivative


class _LocalDerivative(Recorder):
    """Sums ⟨l_t, v⟩ over the uses in the backbone, (B, L), during a forward-mode pass along v.

    The local gradient is a product of cotangents, known from the local pass, and inputs, so its derivative along v
    needs no forward-mode pass of its own.
    """

    def __init__(self, duals: dict[str, Tensor], local: LocalPass, size: tuple[int, int]) -> None:
        super().__init__(duals, size, wrap=self._add)
        self._known = dict(zip(local.order, local.cotangents, strict=True))
        self.derivative = local.output.logp.new_zeros(size)

    def _add(self, use: Use) -> Tensor:
        cotangent = self._known.get(len(self.uses) - 1)
        if cotangent is not None:
            each = _rate(use).to(self.derivative) * use.canonical(cotangent)
            if use.index is None:
                self.derivative += each.sum((-1, -2))
            else:
                self.derivative.view(-1).index_add_(0, use.index, each.sum(-1))
        return use.out


def _rate(use: Use) -> Tensor:
    """Tangent of a use's output along v through its own parameters; broadcasts to (B, L, heads, d), gathered (m, d)."""
    weight: Any = None if use.weight is None else forward_ad.unpack_dual(use.weight_value).tangent
    bias: Any = None if use.bias is None else forward_ad.unpack_dual(use.bias_value).tangent
    x: Any = None if use.x is None else forward_ad.unpack_dual(use.x).primal
    if use.kind == "embedding":
        moved = F.embedding(x, weight)
        if use.ignored is not None:
            moved = moved.masked_fill((x == use.ignored)[..., None], 0.0)
        return moved[..., None, :]
    if use.kind == "gain":
        parts = [part for part in (None if weight is None else x * weight, bias) if part is not None]
        return sum(parts[1:], parts[0])  # a bias alone is (d,)
    parts = []
    if weight is not None:
        parts.append(x @ weight if use.transposed else F.linear(x, weight))
    if bias is not None:
        parts.append(bias.expand(*x.shape[:-1], -1))
    moved = sum(parts[1:], parts[0])
    return moved if use.layout == "gathered" else moved[..., None, :]

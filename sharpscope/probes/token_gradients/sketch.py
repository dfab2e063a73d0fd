"""The method `sketch`: random directional derivatives of log-probabilities, with the local gradients as control variate.

The gradient g of a token is its local gradient l, whose norm is known, plus a remainder r from other positions:
‖g‖² = ‖l‖² + ‖r‖² + 2⟨r, l⟩. For v with independent entries of mean 0 and variance 1, ⟨r, v⟩² + 2⟨r, v⟩⟨l, v⟩ is unbiased for the
last two terms. Two parts are taken out of v to lower its variance:

- Parameters that are used after the last attention only have no remainder, so v is 0 there.
- With tied embeddings, l holds the output layer's gradient, which is most of it and which is p ⊗ h for p = ∂ log π/∂a. Its part
  2⟨r, p ⊗ h⟩ involves the input embedding alone. It is estimated by 2⟨r, w⟩⟨p ⊗ h, w′⟩ along a direction w = R S of the embedding,
  w′ = R S⁻¹, with random signs R. S makes w small where hidden states are large: they lie near a few directions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharpscope.errors import UserError
from sharpscope.probes.token_gradients.forward_mode import KEPT_BYTES, Keeping, pushed_hidden
from sharpscope.probes.token_gradients.head import head_gradients
from sharpscope.probes.token_gradients.local import LocalPass, local_pass
from sharpscope.probes.token_gradients.result import Collector, ScoreNorms
from sharpscope.probes.token_gradients.rows import Rows, safe_width, widen
from sharpscope.probes.token_gradients.structure import Structure, hidden_states
from sharpscope.probes.token_gradients.uses import Use, rate

COUPLED = 4  # directions of ‖r‖² + 2⟨r, l⟩ for each one of the tied embeddings' part, which varies less
SAMPLE = 4  # rows whose hidden states say where the output layer's gradient is large
FLOOR = 0.02  # share of the hidden states' energy that is taken as even


def sketch_norms(
    model: nn.Module, structure: Structure, rows: Rows, temperature: float, directions: int, seed: int
) -> ScoreNorms:
    """Unbiased estimates of squared norms with standard errors. The model must be in eval mode.

    Args:
        model: its structure is `structure`.
        structure: see above.
        rows: tokens.
        temperature: softmax temperature.
        directions: K ≥ 2, shared by all tokens, whose errors are therefore correlated.
        seed: of the directions' own generator.

    Raises:
        UserError: fewer than 2 directions, or a model that the local method cannot handle.
    """
    if directions < 2:
        raise UserError(f"directions, {directions}: at least 2 are needed for a standard error")
    structure.require_local()
    collector = Collector(rows, structure.dtype)
    errors = collector.blank()
    scaling = _scaling(model, structure, rows)
    for chunk in rows.chunks():
        found: list[tuple[Use, Tensor]] = []
        with Keeping(KEPT_BYTES.get(chunk.ids.device.type, KEPT_BYTES["cuda"])) as kept:
            local = local_pass(
                model,
                structure,
                chunk,
                temperature,
                lambda local, use, g, found=found: found.append((use, use.by_position(g))),  # type: ignore[misc]
            )
        for use, g in found:
            local.squares(structure, use, g)
        # Every chunk draws the same directions, so the result does not depend on how rows are cut into chunks.
        generator = torch.Generator(device=rows.ids.device).manual_seed(seed)
        experts = any(use.index is not None for use, _ in found)  # they may run in another order in forward mode
        estimates = _Estimates(model, structure, local, found, [] if experts else kept.values, generator)
        parts = [estimates.remainder(directions)]
        if scaling is not None:
            parts += estimates.coupling(max(2, -(-directions // COUPLED)), temperature, *scaling)
        if not all(bool(part.isfinite().all()) for part in parts):
            raise UserError(
                "method, sketch: the model's derivatives overflow; load it in float32, or use method='exact'"
            )
        local.sums.total += sum(part.mean(0) for part in parts)
        local.sums.groups.clear()
        collector.write(chunk, local.sums)
        variance = torch.stack([part.var(0) / len(part) for part in parts]).sum(0)
        chunk.write(errors, variance.sqrt())
    return collector.result("sketch", errors)


@torch.no_grad()
def _scaling(model: nn.Module, structure: Structure, rows: Rows) -> tuple[Tensor, Tensor] | None:
    """S as orthonormal columns (d, d) and sizes (d,), for a model whose tied embeddings are trained; None for others.

    The variance is least if S⁴ is the energy of hidden states over that of remainders, which is taken as even. It is measured on
    a few rows; the estimate is unbiased with any S.
    """
    chosen = rows.chosen.any(1).nonzero()[:, 0]
    if structure.tied is None or structure.tied in structure.whole or not len(chosen):
        return None
    some = rows.take(chosen[:: -(-len(chosen) // SAMPLE)])
    ids = widen(some.ids, safe_width(model, some.ids.shape[1]))
    hidden = hidden_states(model, ids)[:, : some.ids.shape[1]][some.predicts]
    hidden = hidden.to(structure.dtype)
    energy, basis = torch.linalg.eigh(hidden.T @ hidden)
    energy = energy.clamp_min(0) / energy.sum() + FLOOR / len(energy)
    return basis, energy**0.25


class _Estimates:
    """Unbiased estimates of parts of ‖g‖² − ‖l‖² of the M tokens of a chunk."""

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        local: LocalPass,
        found: list[tuple[Use, Tensor]],
        kept: list[Tensor],
        generator: torch.Generator,
    ) -> None:
        self._model, self._structure, self._local, self._kept = model, structure, local, kept
        self._found, self._generator = found, generator

    def remainder(self, count: int) -> Tensor:
        """‖r‖² + 2⟨r, l⟩ (count, M), with l without the output layer."""
        structure, estimates = self._structure, []
        outside = structure.whole | {structure.head_weight, structure.head_bias}
        for _ in range(count):
            signs = {name: self._signs(p) for name, p in structure.named.items() if name not in outside}
            full, local = self._derivatives(signs)
            estimates.append(full.square() - local.square())
        return torch.stack(estimates)

    def coupling(self, count: int, temperature: float, basis: Tensor, sizes: Tensor) -> list[Tensor]:
        """2⟨r, p ⊗ h⟩ (count, M) with tied embeddings; nothing where no word was read."""
        structure, local, tied = self._structure, self._local, self._structure.tied
        use = next((use for use, _ in self._found if use.kind == "embedding" and use.weight == tied), None)
        if use is None or tied is None:
            return []
        ids, (row, position) = use.x, local.where.unbind(1)
        _, pull = head_gradients(local.hidden, structure.head, local.rows.targets, temperature, words=ids[row])
        assert pull is not None
        # (M, L) p at the word of each position of the row; 0 after the token and where the word stood before.
        ordered, order = ids.sort(dim=1, stable=True)
        new = F.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)
        first = torch.zeros_like(new).scatter_(1, order, new)
        first = first if use.ignored is None else first & (ids != use.ignored)
        pull = pull * (first[row] & (torch.arange(ids.shape[1], device=ids.device) <= position[:, None]))
        hidden, estimates = local.hidden.to(pull), []

        def scaled(signs: Tensor, power: int) -> Tensor:
            return (signs.to(basis) @ basis) * sizes**power @ basis.T

        for _ in range(count):
            signs = self._signs(structure.named[tied])
            full, mine = self._derivatives({tied: scaled(signs, 1)})
            read = scaled(signs, -1)[ids].to(hidden)  # (B, L, d)
            along = torch.cat(
                [torch.linalg.vecdot(pull[row == b], hidden[row == b] @ read[b].T) for b in range(len(ids))]
            )
            estimates.append(2 * (full - mine) * along)
        return [torch.stack(estimates)]

    def _signs(self, like: Tensor) -> Tensor:
        """Random signs, the distribution with the smallest variance of the estimate."""
        drawn = torch.randint(0, 2, like.shape, generator=self._generator, device=like.device, dtype=torch.int8)
        return drawn.to(like.dtype).mul_(2).sub_(1)

    @torch.no_grad()
    def _derivatives(self, direction: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """⟨g, v⟩ and ⟨l, v⟩ (M,) over the backbone."""
        local = self._local
        _, moved = pushed_hidden(self._model, self._structure, local.ids, direction, kept=self._kept)
        b, j = local.where.unbind(1)
        like = local.output.logp
        total = like.new_zeros(local.ids.shape)
        for use, g in self._found:
            part = rate(use, direction)
            if part is None:
                continue
            if use.index is None:
                total += (part * g).sum((-1, -2))
            else:
                total.view(-1).index_add_(0, use.index, (part * g).sum(-1).to(total))
        full = torch.linalg.vecdot(local.output.to_hidden.to(like), moved[b, j].to(like))
        return full, total[b, j]

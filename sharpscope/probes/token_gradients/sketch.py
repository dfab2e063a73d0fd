"""The method `sketch`: random directional derivatives of log-probabilities, with the local gradients as control variate.

The gradient g of a token is its local gradient l, whose norm is known, plus a remainder r from other positions:
‖g‖² = ‖l‖² + ‖r‖² + 2⟨r, l⟩. For v with independent entries of mean 0 and variance 1, ⟨r, v⟩² + 2⟨r, v⟩⟨l, v⟩ is unbiased for the
last two terms. Parameters that are used after the last attention only have no remainder, so v is 0 there, which lowers the
variance.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sharpscope.errors import UserError
from sharpscope.probes.token_gradients.forward_mode import pushed_hidden
from sharpscope.probes.token_gradients.head import head_chunks
from sharpscope.probes.token_gradients.local import LocalPass, local_pass
from sharpscope.probes.token_gradients.result import Collector, ScoreNorms
from sharpscope.probes.token_gradients.rows import Rows
from sharpscope.probes.token_gradients.structure import Structure
from sharpscope.probes.token_gradients.uses import Use, rate


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
    outside = structure.whole | {structure.head_weight, structure.head_bias}
    for chunk in rows.chunks():
        found: list[tuple[Use, Tensor]] = []
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
        samples = []
        for _ in range(directions):
            drawn = {name: _signs(p, generator) for name, p in structure.named.items() if name not in outside}
            full, part = _derivatives(model, structure, local, found, drawn, temperature)
            samples.append(full.square() - part.square())
        rest = torch.stack(samples)  # (K, M)
        if not bool(rest.isfinite().all()):
            raise UserError(
                "method, sketch: the model's derivatives overflow; load it in float32, or use method='exact'"
            )
        local.sums.total += rest.mean(0)
        local.sums.groups.clear()
        collector.write(chunk, local.sums)
        chunk.write(errors, (rest.var(0) / directions).sqrt())
    return collector.result("sketch", errors)


def _signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """Random signs, the distribution with the smallest variance of the estimate."""
    drawn = torch.randint(0, 2, like.shape, generator=generator, device=like.device, dtype=torch.int8)
    return drawn.to(like.dtype).mul_(2).sub_(1)


@torch.no_grad()
def _derivatives(
    model: nn.Module,
    structure: Structure,
    local: LocalPass,
    found: list[tuple[Use, Tensor]],
    direction: Mapping[str, Tensor],
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """⟨g, v⟩ and ⟨l, v⟩ (M,), without an output layer whose weights are not tied."""
    _, moved = pushed_hidden(model, structure, local.ids, direction)
    b, j = local.where.unbind(1)
    like = local.output.logp
    total = like.new_zeros(local.ids.shape)
    for use, g in found:
        part = rate(use, direction)
        if part is not None:
            total += (part * g).sum((-1, -2))
    output = torch.zeros_like(like)
    if structure.tied is not None and structure.tied in direction:
        for chunk in head_chunks(local.hidden, structure.head, local.rows.targets, temperature):
            along = chunk.pull.to(local.hidden) @ direction[structure.tied]  # (C, d)
            output[chunk.rows] = torch.linalg.vecdot(along, local.hidden[chunk.rows]).to(like)
    full = torch.linalg.vecdot(local.output.to_hidden.to(like), moved[b, j].to(like))
    return full + output, total[b, j] + output

"""The tier `sketch`: random directional derivatives of log-probabilities, with the local gradients as control variate.

For v with independent entries of mean 0 and variance 1, E⟨g, v⟩² = ‖g‖². The local gradient l of the token is close to g and
its norm is known, so the mean of ⟨g, v⟩² − ⟨l, v⟩² + ‖l‖² over K directions is unbiased for ‖g‖² with a smaller variance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from sharpscope.errors import UserError
from sharpscope.probes.token_gradients.experts import recorded_experts
from sharpscope.probes.token_gradients.forward_mode import pushed_hidden, pushed_logp
from sharpscope.probes.token_gradients.local import LocalPass, local_passes, tally
from sharpscope.probes.token_gradients.result import Collector, ScoreNorms
from sharpscope.probes.token_gradients.rows import Rows, safe_width, widen
from sharpscope.probes.token_gradients.structure import Structure
from sharpscope.probes.token_gradients.uses import Recorder, Use


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
    for local in local_passes(model, structure, rows, temperature):
        ledger = tally(structure, local)
        # Every chunk draws the same directions, so the result does not depend on how rows are cut into chunks.
        generator = torch.Generator(device=rows.ids.device).manual_seed(seed)
        gained = torch.stack(
            [
                _gain(model, structure, local, temperature, draw_direction(structure, generator))
                for _ in range(directions)
            ]
        )  # (K, M)
        if structure.computes_in == torch.float16 and not bool(gained.isfinite().all()):
            raise UserError(
                "tier, sketch: the model's derivatives overflow float16; load it in bfloat16 or float32, or use "
                "tier='exact'"
            )
        ledger.total += gained.mean(0)
        ledger.groups.clear()
        collector.write(local.rows, ledger)
        local.rows.write(errors, gained.std(0) / math.sqrt(directions))
    return collector.result("sketch", errors)


def draw_direction(structure: Structure, generator: torch.Generator) -> list[Tensor]:
    """Random signs like the trainable parameters, the distribution with the smallest variance of the estimate."""
    return [
        torch.randint(0, 2, p.shape, generator=generator, device=p.device, dtype=torch.int8).to(p.dtype).mul_(2).sub_(1)
        for p in structure.named.values()
    ]


def _gain(
    model: nn.Module, structure: Structure, local_pass: LocalPass, temperature: float, direction: list[Tensor]
) -> Tensor:
    """⟨g, v⟩² − ⟨l, v⟩² (M,) of the chunk's tokens along one direction."""
    chunk = local_pass.rows
    ids = widen(chunk.ids, safe_width(model, chunk.ids.shape[1]))
    b, j = local_pass.where.unbind(1)
    by_name = dict(zip(structure.named, direction, strict=True))
    weight = by_name.get(structure.tied or structure.head_weight or "")
    bias = by_name.get(structure.head_bias or "")
    watchers: list[_LocalDerivative] = []

    @contextmanager
    def watch(duals: dict[str, Tensor]) -> Iterator[None]:
        watchers.append(_LocalDerivative(duals, local_pass, (ids.shape[0], ids.shape[1])))
        with recorded_experts(model, watchers[0]), watchers[0]:
            yield

    value, moved = pushed_hidden(model, structure, ids, direction, watch=watch)
    states, still = value[b, j], torch.zeros_like(local_pass.hidden)
    own = pushed_logp(states, still, structure.head, chunk.targets, temperature, weight, bias)
    full = own + torch.linalg.vecdot(local_pass.output.to_hidden.to(own), moved[b, j].to(own))
    local = own + watchers[0].derivative[b, j].to(own)
    return full.square() - local.square()


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

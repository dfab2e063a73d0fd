"""Log-probabilities of tokens and their second derivatives in closed form, in blocks of the vocabulary.

With u = W h + b, z = F(u) (scale, soft cap, temperature) and ℓ = z_y − logsumexp z for each of M tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sharpscope.policy import Head

BLOCK_ARRAYS = 5  # (M, block) arrays alive at once, for the block size


@dataclass(frozen=True)
class Squash:
    """z = F(u): cap·tanh(scale·u/cap)/temperature, or scale·u/temperature without a cap."""

    scale: float
    cap: float | None
    temperature: float

    def apply(self, u: Tensor) -> tuple[Tensor, Tensor | float, Tensor | None]:
        """F(u), F'(u), F''(u); the second derivative is None where it vanishes."""
        slope = self.scale / self.temperature
        if self.cap is None:
            return u * slope, slope, None
        t = torch.tanh(u * (self.scale / self.cap))
        first = (1 - t * t) * slope
        return t * (self.cap / self.temperature), first, first * t * (-2 * self.scale / self.cap)


def squash(head: Head, temperature: float) -> Squash:
    """F of a head at a sampling temperature."""
    return Squash(head.scale, head.soft_cap, temperature)


def blocks(vocabulary: int, tokens: int, itemsize: int, budget_mb: float) -> list[slice]:
    """Slices of the vocabulary such that `BLOCK_ARRAYS` arrays (tokens, block) fit in the budget [MiB]."""
    width = max(8, int(budget_mb * 2**20 / (BLOCK_ARRAYS * itemsize * max(tokens, 1))))
    return [slice(start, min(start + width, vocabulary)) for start in range(0, vocabulary, width)]


class SelectedLogp(torch.autograd.Function):
    """ℓ (M,) = log softmax(F(W h + b))_y for h (M, d), W (V, d), b (V,) or None, y (M,); differentiable once."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, form: Squash, budget_mb: float
    ) -> Tensor:
        """ℓ (M,), one pass over the vocabulary's blocks."""
        cuts = blocks(len(weight), len(hidden), hidden.element_size(), budget_mb)
        lse, picked = _log_normalizer(hidden, weight, bias, target, form, cuts)
        ctx.save_for_backward(hidden, weight, bias, target, lse)
        ctx.form, ctx.cuts = form, cuts
        return picked - lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        """Recompute the logits in blocks."""
        hidden, weight, bias, target, lse = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        to_hidden = torch.zeros_like(hidden) if need_hidden else None
        to_weight = torch.zeros_like(weight) if need_weight else None
        to_bias = torch.zeros_like(bias) if need_bias else None
        for cut in ctx.cuts:
            z, slope, _ = ctx.form.apply(_affine(hidden, weight[cut], bias, cut))
            p = z.sub_(lse[:, None]).exp_()
            delta = _minus_probability(p, target, cut).mul_(cotangent[:, None]).mul_(slope)  # (M, block)
            if to_hidden is not None:
                to_hidden.addmm_(delta, weight[cut])
            if to_weight is not None:
                to_weight[cut] = delta.T @ hidden
            if to_bias is not None:
                to_bias[cut] = delta.sum(0)
        return to_hidden, to_weight, to_bias, None, None, None


def _affine(hidden: Tensor, weight: Tensor, bias: Tensor | None, cut: slice) -> Tensor:
    return hidden @ weight.T if bias is None else torch.addmm(bias[cut], hidden, weight.T)


def _minus_probability(p: Tensor, target: Tensor, cut: slice) -> Tensor:
    """e_y − p on one block, in place of p."""
    p.neg_()
    inside = ((target >= cut.start) & (target < cut.stop)).nonzero()[:, 0]
    p[inside, target[inside] - cut.start] += 1
    return p


def _log_normalizer(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, form: Squash, cuts: list[slice]
) -> tuple[Tensor, Tensor]:
    """Logsumexp z (M,) and z_y (M,), one pass over the blocks."""
    lse = torch.full_like(hidden[:, 0], -torch.inf)
    picked = torch.zeros_like(lse)
    for cut in cuts:
        z, _, _ = form.apply(_affine(hidden, weight[cut], bias, cut))
        lse = torch.logaddexp(lse, z.logsumexp(1))
        inside = ((target >= cut.start) & (target < cut.stop)).nonzero()[:, 0]
        picked[inside] = z[inside, target[inside] - cut.start]
    return lse, picked


@dataclass(frozen=True)
class HeadPoint:
    """The output layer, its inputs and a direction; None for a direction of 0.

    Attributes:
        hidden, hidden_dot: (M, d) input h and tangent ḣ.
        weight, weight_dot: (V, d) W and Ẇ.
        bias, bias_dot: (V,) b and ḃ.
        target: (M,) y.
    """

    hidden: Tensor
    hidden_dot: Tensor
    weight: Tensor
    weight_dot: Tensor | None
    bias: Tensor | None
    bias_dot: Tensor | None
    target: Tensor
    form: Squash


class HeadProduct:
    """Second-order pass through the head: `tangent` gives ℓ and ℓ̇, then `cotangents` the cotangents of h and ḣ.

    Each pass recomputes z and its tangent, 3 matrix products; if the vocabulary is one block, they are kept from the first pass.
    """

    def __init__(self, point: HeadPoint, budget_mb: float) -> None:
        self.point = point
        self.cuts = blocks(len(point.weight), len(point.hidden), point.hidden.element_size(), budget_mb)
        self._kept: tuple[Tensor, Tensor, Tensor | float, Tensor | None] | None = None
        self._lse = self._mean = torch.zeros(0)

    def _block(self, cut: slice) -> tuple[Tensor, Tensor, Tensor | float, Tensor | None]:
        """z, u̇, F', F'' on one block, all (M, block)."""
        if self._kept is not None:
            return self._kept
        at = self.point
        z, slope, bend = at.form.apply(_affine(at.hidden, at.weight[cut], at.bias, cut))
        u_dot = at.hidden_dot @ at.weight[cut].T
        if at.weight_dot is not None:
            u_dot.addmm_(at.hidden, at.weight_dot[cut].T)
        if at.bias_dot is not None:
            u_dot += at.bias_dot[cut]
        if len(self.cuts) == 1:
            self._kept = (z, u_dot, slope, bend)
        return z, u_dot, slope, bend

    def tangent(self) -> tuple[Tensor, Tensor]:
        """ℓ (M,) and its derivative ℓ̇ (M,) along the direction: ℓ̇ = ż_y − Σ_k p_k ż_k."""
        at = self.point
        top = torch.full_like(at.hidden[:, 0], -torch.inf)  # running maximum of z
        mass, moment = torch.zeros_like(top), torch.zeros_like(top)  # Σ e^(z − top), Σ e^(z − top) ż
        picked, picked_dot = torch.zeros_like(top), torch.zeros_like(top)
        for cut in self.cuts:
            z, u_dot, slope, _ = self._block(cut)
            z_dot = u_dot * slope
            new = torch.maximum(top, z.amax(1))
            weight = (z - new[:, None]).exp_()
            shrink = (top - new).exp()
            mass = mass * shrink + weight.sum(1)
            moment = moment * shrink + weight.mul_(z_dot).sum(1)
            top = new
            inside = ((at.target >= cut.start) & (at.target < cut.stop)).nonzero()[:, 0]
            column = at.target[inside] - cut.start
            picked[inside], picked_dot[inside] = z[inside, column], z_dot[inside, column]
        self._lse, self._mean = top + mass.log(), moment / mass
        return picked - self._lse, picked_dot - self._mean

    def cotangents(
        self, first: Tensor, second: Tensor, weight_out: Tensor | None, bias_out: Tensor | None, *, gauss_newton: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Cotangents of h and ḣ; the products for the head's parameters are added to `weight_out` and `bias_out`.

        With c = ∂φ/∂ℓ and ċ its derivative along the direction: δz = c(e_y − p), δ̇z = ċ(e_y − p) − c p∘(ż − Σ p ż).

        Args:
            first: c (M,).
            second: ċ (M,).
            weight_out: (V, d) buffer, or None where W is not among the parameters.
            bias_out: (V,) buffer or None.
            gauss_newton: leave out every second derivative of the logits.

        Returns:
            (M, d) cotangent of h, and (M, d) cotangent of ḣ (None for Gauss-Newton).
        """
        at = self.point
        to_hidden = torch.zeros_like(at.hidden)
        to_dot = None if gauss_newton else torch.zeros_like(at.hidden)
        for cut in self.cuts:
            z, u_dot, slope, bend = self._block(cut)
            p = (z - self._lse[:, None]).exp_()
            spread = (u_dot * slope).sub_(self._mean[:, None]).mul_(p).mul_(first[:, None])
            unit = _minus_probability(p, at.target, cut)
            delta_dot = (unit * second[:, None]).sub_(spread).mul_(slope)
            delta = unit.mul_(first[:, None])
            if bend is not None and not gauss_newton:
                delta_dot += bend * u_dot * delta
            delta.mul_(slope)
            to_hidden.addmm_(delta_dot, at.weight[cut])
            if weight_out is not None:
                weight_out[cut].addmm_(delta_dot.T, at.hidden)
            if bias_out is not None:
                bias_out[cut] += delta_dot.sum(0)
            if to_dot is not None:
                to_dot.addmm_(delta, at.weight[cut])
                if at.weight_dot is not None:
                    to_hidden.addmm_(delta, at.weight_dot[cut])
                if weight_out is not None:
                    weight_out[cut].addmm_(delta.T, at.hidden_dot)
        return to_hidden, to_dot

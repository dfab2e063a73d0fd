"""Clips of the importance ratio: each is a class with its settings, its surrogate, what it needs, and whether a gradient flows.

Importing this module does not import torch: surrogates get it as `xp`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sharpscope.settings.base import Part

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RatioTerms:
    """What a surrogate is a function of, each (n, T)."""

    ratio: Tensor  # x: the ratio r, or token weight × r
    log_ratio: Tensor  # ln r of each token, 0 outside the mask [nats]
    logp: Tensor  # ln π of the present policy, 0 outside the mask [nats]
    advantage: Tensor
    mask: Tensor  # loss tokens
    correction: Tensor  # factor of the sampler correction, 1 without one


class RatioClip(Part):
    """What bounds the step of a token, or makes it smooth."""

    needs_ratio: ClassVar[Sequence[str]] = ("token", "sequence", "holder")
    """Kinds of importance ratio that it is defined for."""
    gradient_flows: ClassVar[bool] = True
    """Whether the surrogate's gradient is the derivative of its value: no factor of the ratio is held constant."""
    takes_weight: ClassVar[bool] = False
    """Whether x may be token weight × ratio (`weight_on=ratio`)."""
    takes_proximal: ClassVar[bool] = False
    """Whether the ratio may be to an averaged policy (`proximal`)."""
    couples_tokens: ClassVar[bool] = False
    """Whether a token's surrogate depends on other tokens of its completion although the ratio does not."""
    has_correction: ClassVar[bool] = False
    """Whether the sampler correction is in the surrogate, token by token, and is no factor of its own."""

    def surrogate(self, at: RatioTerms, xp: ModuleType) -> tuple[Tensor, Tensor]:
        """S(x, A), and where a bound acts: −1 the lower, 1 the upper, else 0 (int32); both (n, T)."""
        raise NotImplementedError


class PpoClip(RatioClip):
    """Objective min(r·A, clip(r, 1 − low, 1 + high)·A)."""

    takes_weight: ClassVar[bool] = True
    takes_proximal: ClassVar[bool] = True

    kind: Literal["ppo"] = "ppo"
    low: float = Field(0.2, gt=0, le=1, description="ε below 1; published 0.2.")
    high: float = Field(0.2, gt=0, description="ε above 1; GRPO 0.2, DAPO 0.28.")

    def surrogate(self, at: RatioTerms, xp: ModuleType) -> tuple[Tensor, Tensor]:
        """A bound acts where it takes the gradient away."""
        clipped = at.ratio.clamp(1 - self.low, 1 + self.high)
        bounded = xp.minimum(at.ratio * at.advantage, clipped * at.advantage)
        return bounded, self.without_gradient(at.ratio.detach(), at.advantage)

    def without_gradient(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """Tokens whose surrogate is constant, int32: 1 where x > 1 + high and A > 0, −1 where x < 1 − low and A < 0.

        `ratio` is weight × ratio for `weight_on=ratio`: at ratio 1 every weight above 1 + high takes a positive token's gradient
        away (TR-GRPO's trap).
        """
        above = (ratio > 1 + self.high) & (advantage > 0)
        below = (ratio < 1 - self.low) & (advantage < 0)
        return above.int() - below.int()


class CispoClip(RatioClip):
    """Objective sg[clip(r, 1 − low, 1 + high)]·A·ln π: the clipped ratio is constant, so every token has a gradient."""

    gradient_flows: ClassVar[bool] = False
    takes_weight: ClassVar[bool] = True
    takes_proximal: ClassVar[bool] = True

    kind: Literal["cispo"] = "cispo"
    low: float = Field(
        1.0,
        gt=0,
        le=1,
        description="ε below 1; 1: no lower bound, as in MiniMax-M1.",
    )
    high: float = Field(4.0, gt=0)
    """ε above 1; MiniMax-M1 (arXiv 2506.13585) gives no number, ScaleRL (arXiv 2510.13786) bounds r by 5."""

    def surrogate(self, at: RatioTerms, xp: ModuleType) -> tuple[Tensor, Tensor]:
        """A bound acts where it binds and A ≠ 0."""
        ratio = at.ratio.detach()
        low = ratio < 1 - self.low
        high = ratio > 1 + self.high
        factor = ratio.clamp(1 - self.low, 1 + self.high)
        acts = xp.where(at.advantage == 0, 0, high.int() - low.int())
        return factor * at.advantage * at.logp, acts


class DualClip(RatioClip):
    """PPO's clip with a bound on ratios of negative tokens: for A < 0, max(min(r·A, clip(r)·A), bound·A) (arXiv 1912.09729).

    TRL's two-sided clip (`delta`, arXiv 2505.07291) is the same with delta = bound.
    """

    takes_proximal: ClassVar[bool] = True

    kind: Literal["dual"] = "dual"
    low: float = Field(0.2, gt=0, le=1, description="ε below 1; published 0.2.")
    high: float = Field(0.2, gt=0, description="ε above 1; published 0.2.")
    bound: float = Field(3.0, gt=1)
    """Largest ratio of a token with A < 0 that has a gradient + high; published 3."""

    @model_validator(mode="after")
    def _above(self) -> Self:
        if self.bound <= 1 + self.high:
            raise ValueError(
                f"dual clip bound = {self.bound} must be above 1 + high = {1 + self.high:g}"
            )
        return self

    def surrogate(self, at: RatioTerms, xp: ModuleType) -> tuple[Tensor, Tensor]:
        """A bound acts as in PPO, and where x > bound and A < 0."""
        objective, acts = PpoClip(low=self.low, high=self.high).surrogate(at, xp)
        beyond = (at.ratio.detach() > self.bound) & (at.advantage < 0)
        bounded = xp.where(beyond, self.bound * at.advantage, objective)
        return bounded, xp.where(beyond, 1, acts)


class GmpoClip(RatioClip):
    """Objective exp(mean_t x_t)·A, x_t = min(ln r_t, high) for A > 0 and max(ln r_t, −low) for A < 0 (GMPO, arXiv 2507.20673)."""

    needs_ratio: ClassVar[Sequence[str]] = ("sequence",)

    kind: Literal["gmpo"] = "gmpo"
    low: float = Field(0.4, gt=0, description="Bound of −ln r [nats]; published 0.4.")
    high: float = Field(0.4, gt=0, description="Bound of ln r [nats]; published 0.4.")

    def surrogate(self, at: RatioTerms, xp: ModuleType) -> tuple[Tensor, Tensor]:
        """A bounded token has no gradient of its own and still counts in the mean of its completion."""
        x = at.log_ratio
        positive = at.advantage > 0
        bounded = xp.where(positive, x.clamp(max=self.high), x.clamp(min=-self.low))
        above = positive & (x > self.high)
        below = (at.advantage < 0) & (x < -self.low)
        mean = mean_log_ratio(bounded, at.mask, xp)  # (n, 1)
        return mean.exp().expand_as(x) * at.advantage, above.int() - below.int()


class DppoMask(RatioClip):
    """Objective sg[min(r, bound)]·M·A·ln π; M = 0 where π has moved too far from π_old in A's direction (DPPO, arXiv 2602.04879).

    For A > 0: r > 1 and D > high; for A < 0: r < 1 and D > low. With p = π(y) and q = π_old(y), D = |p − q| (`tv`) or
    q·ln(q/p) + (1 − q)·ln((1 − q)/(1 − p)) (`kl`).
    """

    needs_ratio: ClassVar[Sequence[str]] = ("token",)
    gradient_flows: ClassVar[bool] = False

    kind: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = "tv"
    """D, on the sampled token: tv: difference of probabilities; kl: binary KL(π_old‖π) [nats]."""
    low: float = Field(
        0.15,
        gt=0,
        description="Largest D where A < 0; published 0.15 for tv, 0.05 for kl.",
    )
    high: float = Field(
        0.15,
        gt=0,
        description="Largest D where A > 0; published 0.15 for tv, 0.05 for kl.",
    )
    bound: float = Field(
        20.0,
        ge=1,
        description="Largest factor r; 20 as in the implementations of verl and TRL.",
    )

    def surrogate(self, at: RatioTerms, xp: ModuleType) -> tuple[Tensor, Tensor]:
        """A bound acts on the tokens that are masked: 1 where the probability rose too far (A > 0), −1 where it fell too far."""
        ratio, logp = at.ratio.detach(), at.logp.detach()
        distance = self._distance(ratio, logp, xp)
        above = (at.advantage > 0) & (ratio > 1) & (distance > self.high)
        below = (at.advantage < 0) & (ratio < 1) & (distance > self.low)
        objective = ratio.clamp(max=self.bound) * at.advantage * at.logp
        return xp.where(above | below, 0.0, objective), above.int() - below.int()

    def _distance(self, ratio: Tensor, logp: Tensor, xp: ModuleType) -> Tensor:
        """D of each token."""
        now = logp.exp()
        old = now / ratio
        if self.divergence == "tv":
            return (now - old).abs()
        tiny = xp.finfo(logp.dtype).tiny
        log_ratio = ratio.log()
        rest_now = -xp.expm1(logp)  # 1 − p
        rest_old = (-xp.expm1(logp - log_ratio)).clamp(min=0)
        log_rest = rest_old.clamp(min=tiny).log() - rest_now.clamp(min=tiny).log()
        return rest_old * log_rest - old * log_ratio


class SapoClip(RatioClip):
    """A smooth weight instead of a clip: objective (4/τ)·sigmoid(τ·(r − 1))·A, τ = 1 where A > 0, else 1.05 (SAPO, arXiv 2511.20347)."""

    kind: Literal["sapo"] = "sapo"

    def surrogate(self, at: RatioTerms, xp: ModuleType) -> tuple[Tensor, Tensor]:
        """No bound acts."""
        tau = _choose(at.advantage > 0, 1.0, 1.05, at.ratio, xp)
        objective = xp.sigmoid(tau * (at.ratio - 1)) * (4 / tau) * at.advantage
        return objective, _nowhere(at, xp)


class VespoClip(RatioClip):
    """Objective φ(W)·A·ln π, φ(W) = sg[W^k·exp(λ·(1 − W))], W = Π_t r_t, each r_t times its sampler correction (VESPO, arXiv 2602.10693).

    k = 2 and λ = 3 where A ≥ 0, else k = 3 and λ = 2. As in TRL, ln r_t is bounded by ±20, the logarithms of the corrections and of W
    by [ln 1e-8, 20].
    """

    needs_ratio: ClassVar[Sequence[str]] = ("token",)
    gradient_flows: ClassVar[bool] = False
    has_correction: ClassVar[bool] = True

    kind: Literal["vespo"] = "vespo"

    def surrogate(self, at: RatioTerms, xp: ModuleType) -> tuple[Tensor, Tensor]:
        """No bound acts."""
        least = math.log(1e-8)
        log_ratio = at.log_ratio.detach()
        terms = log_ratio.clamp(-20.0, 20.0) + at.correction.log().clamp(least, 20.0)
        log_product = (
            xp.where(at.mask, terms, 0.0).sum(-1, keepdim=True).clamp(least, 20.0)
        )  # (n, 1)
        k = _choose(at.advantage >= 0, 2.0, 3.0, log_ratio, xp)  # (n, T)
        rate = _choose(at.advantage >= 0, 3.0, 2.0, log_ratio, xp)
        factor = (rate + k * log_product - rate * log_product.exp()).exp()
        return factor * at.advantage * at.logp, _nowhere(at, xp)


class FiberClip(RatioClip):
    """Objective exp(b_i + f_t)·A, a gate for the completion and one for the token (FiberPO, arXiv 2603.08239).

    With x_t = ln r_t, a⁺ = mean_t max(x_t, 0) and a⁻ = mean_t max(−x_t, 0) over the n tokens of the completion:
    b_i = g(a⁺, high) − g(a⁻, low), g(a, C) = a up to C, (n + 1)·C − n·a up to (1 + 1/n)·C, 0 beyond; f_t = clip(x_t − l·a^l, ±token)
    + clip(l·a^(−l), ±token) with the token's sign l = sign x_t. At ratio 1 it is r·A. No gradient flows through l.
    """

    needs_ratio: ClassVar[Sequence[str]] = ("token",)
    couples_tokens: ClassVar[bool] = True

    kind: Literal["fiber"] = "fiber"
    low: float = Field(
        0.09,
        gt=0,
        description="Budget C⁻ of a⁻ [nats]; ours, below `high` as advised.",
    )
    high: float = Field(0.11, gt=0, description="Budget C⁺ of a⁺ [nats]; ours.")
    token: float = Field(
        0.02,
        gt=0,
        description="Bound ε of a token's residual [nats]; ours, far below the budgets.",
    )

    def surrogate(self, at: RatioTerms, xp: ModuleType) -> tuple[Tensor, Tensor]:
        """A bound acts where the token's own gate is shut and A ≠ 0."""
        count = at.mask.sum(-1, keepdim=True).clamp(min=1)  # (n, 1)
        x = xp.where(at.mask, at.log_ratio, 0.0)
        up = x.clamp(min=0).sum(-1, keepdim=True) / count  # a⁺ (n, 1)
        down = (-x).clamp(min=0).sum(-1, keepdim=True) / count  # a⁻
        base = _rolled_back(up, self.high, count, xp) - _rolled_back(down, self.low, count, xp)
        rising = x.detach() >= 0
        residual = xp.where(rising, x - up, x + down)
        other = xp.where(rising, down, -up)
        gated = residual.clamp(-self.token, self.token) + other.clamp(-self.token, self.token)
        far = residual.detach().abs() > self.token
        acts = xp.where(far & (at.advantage != 0), residual.detach().sign(), 0.0)
        return (base + gated).exp() * at.advantage, acts.int()


class DelightGate(RatioClip):
    """Objective sg[sigmoid(−A·ln π/eta)]·A·ln π: surprising tokens count where A > 0 (Delightful policy gradient, arXiv 2603.14608).

    π is the present policy; there is no ratio and no clip. Where A·ln π = 0 the gate is 1/2.
    """

    needs_ratio: ClassVar[Sequence[str]] = ("token",)
    gradient_flows: ClassVar[bool] = False

    kind: Literal["delight"] = "delight"
    eta: float = Field(
        1.0,
        gt=0,
        description="Temperature of the gate [advantage × nats]; published 1.",
    )

    def surrogate(self, at: RatioTerms, xp: ModuleType) -> tuple[Tensor, Tensor]:
        """No bound acts."""
        gate = xp.sigmoid(-at.advantage * at.logp.detach() / self.eta)
        return gate * at.advantage * at.logp, _nowhere(at, xp)


Clip = Annotated[
    PpoClip
    | CispoClip
    | DualClip
    | GmpoClip
    | DppoMask
    | SapoClip
    | VespoClip
    | DelightGate
    | FiberClip,
    Field(discriminator="kind"),
]


def mean_log_ratio(log_ratio: Tensor, mask: Tensor, xp: ModuleType) -> Tensor:
    """Mean of ln r_t (n, T) over each completion's loss tokens, (n, 1); 0 without tokens."""
    count = mask.sum(-1, keepdim=True).clamp(min=1)
    return xp.where(mask, log_ratio, 0.0).sum(-1, keepdim=True) / count


def _rolled_back(value: Tensor, budget: float, count: Tensor, xp: ModuleType) -> Tensor:
    """g(a, C) (n, 1): a up to C, back to 0 with slope −n, then 0."""
    back = (count + 1) * budget - count * value
    return xp.where(value <= budget, value, back.clamp(min=0.0))


def _choose(
    condition: Tensor,
    yes: float,
    no: float,
    like: Tensor,
    xp: ModuleType,
) -> Tensor:
    """`yes` where the condition holds, else `no`, in the dtype of `like`; `where` with two numbers gives float32."""
    return xp.where(condition, xp.full_like(like, yes), xp.full_like(like, no))


def _nowhere(at: RatioTerms, xp: ModuleType) -> Tensor:
    """No bound acts on any token."""
    return xp.zeros_like(at.mask, dtype=xp.int32)

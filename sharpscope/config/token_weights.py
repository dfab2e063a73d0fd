"""The token weights with their constants, bounds, formulas and calibration, and the controls around one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from sharpscope.config.base import NonNegative, Positive, Real, Schedule, Share
from sharpscope.config.sigmoid import COUNTED, Counted, EntropyWeight, SigmoidWeight
from sharpscope.config.weighting import (
    Weighting,
    find_token_weight,
    number,
    top_tokens,
)
from sharpscope.errors import UserError

if TYPE_CHECKING:
    from torch import Generator, Tensor


# -- weightings --------------------------------------------------------------------------------------------------------


class UniformWeight(Weighting):
    """w = 1: plain GRPO."""

    kind: Literal["uniform"] = "uniform"

    @property
    def pointwise(self) -> bool:
        """True."""
        return True

    def weights(self, step: Any, xp: Any, generator: Generator | None) -> Tensor:
        """Ones."""
        return xp.ones_like(step.logp)


class LinearWeight(Weighting):
    """w = alpha·π + 1 − alpha: advantage reweighting (AR, arXiv 2505.12929). alpha 0 is GRPO."""

    kind: Literal["linear"] = "linear"
    alpha: Share = Field(0.2, description="Share of the weight that follows π; published 0.2, with Lopti 0.3.")

    @property
    def bounded(self) -> bool:
        """True."""
        return True

    @property
    def bounds(self) -> tuple[float, float]:
        """[1 − alpha, 1]."""
        return 1.0 - number(self.alpha), 1.0

    statistic: ClassVar[str | None] = "prob"

    def at_statistic(self, u: Any, xp: Any) -> Any:
        """alpha·π + 1 − alpha."""
        return number(self.alpha) * u + (1 - number(self.alpha))


class PowerWeight(Weighting):
    """w = clip(π^gamma, L, U); gamma > 0 favors likely tokens, < 0 unlikely ones. The form is ours."""

    kind: Literal["power"] = "power"
    gamma: Real = Field(1.0, description="Exponent of π.")
    L: NonNegative = Field(0.0, description="Smallest weight.")
    U: Positive = Field(1.0, description="Largest weight, > L.")

    statistic: ClassVar[str | None] = "logp"

    def at_statistic(self, u: Any, xp: Any) -> Any:
        """clip(π^gamma, L, U)."""
        return xp.exp(number(self.gamma) * u).clip(number(self.L), number(self.U))


class CovarianceGaussianWeight(Weighting):
    """w = exp(−(c − mean c)²/(2 std(c)²)), c_t = (ln π_t − mean ln π)(A_t − mean A) (covariance-aware GRPO, arXiv 2605.11538).

    The means in c_t run over all loss tokens of the step. The kernel is published; the tokens over which c is normalized are
    not, so there are two readings (`over`). w = 1 where std(c) = 0 (population std).
    """

    kind: Literal["covariance_gaussian"] = "covariance_gaussian"
    over: Literal["step", "completion"] = Field(
        "step",
        description="Tokens of the mean and std of c: all loss tokens of the step, or those of the token's completion "
        "(with one advantage for each completion: exp(−z²/2), z the standardized ln π of the completion).",
    )

    def weights(self, step: Any, xp: Any, generator: Generator | None) -> Tensor:
        """See the class."""
        mask, covariance = step.mask.bool(), step.covariance
        if self.over == "completion":
            count = mask.sum(1, keepdim=True).clamp(min=1)  # (N, 1)
            mean = covariance.sum(1, keepdim=True) / count  # c is 0 outside the mask
            std = (xp.where(mask, covariance - mean, 0.0).square().sum(1, keepdim=True) / count).sqrt()
            varies = std > 1e-12 * covariance.abs().amax(
                1, keepdim=True
            )  # equal values differ from their mean by rounding
        else:
            inside = covariance[mask]
            mean, std = inside.mean(), inside.std(correction=0)
            varies = std > 0
        scaled = (covariance - mean) / xp.where(varies, std, 1.0)
        weight: Tensor = xp.where(varies, xp.exp(-(scaled**2) / 2), 1.0)
        return weight.to(step.logp.dtype)


class PolarityWeight(Weighting):
    """w = 1 + alpha·phase·sign(ΔH_t), ΔH_t = −A_t·polarity_t, phase = clip((H* − H̄)/H*, −1, 1) (arXiv 2605.11775).

    H̄ is the mean entropy of the step's loss tokens, H* `target`. Below the target, tokens that raise the entropy weigh
    more; above it, those that lower it. The paper has the entropy as phase signal; this formula is ours.
    """

    kind: Literal["polarity"] = "polarity"
    alpha: Annotated[float, Field(ge=0, lt=1)] | Schedule = Field(0.5, description="Strength; ours.")
    target: Positive | None = Field(None, description="H* [nats]; empty: the mean entropy of the first step.")

    @property
    def needs_calibration(self) -> bool:
        """Whether the target is empty."""
        return self.target is None

    def calibrated(self, step: Any, xp: Any) -> Self:
        """The target is the step's mean entropy.

        Raises:
            UserError: it is 0.
        """
        if self.target is not None:
            return self
        target = float(step.entropy[step.mask.bool()].double().mean())
        if not target > 0:
            raise UserError(f"method.weight.target: the first step's mean entropy is {target:.4g} nats; set the target")
        return self.replace(target=target)

    def weights(self, step: Any, xp: Any, generator: Generator | None) -> Tensor:
        """See the class."""
        alpha, target = number(self.alpha), number(self.target)
        entropy = float(step.entropy[step.mask.bool()].double().mean())
        phase = max(-1.0, min(1.0, (target - entropy) / target))
        return 1 + alpha * phase * xp.sign(-step.token_advantage * step.polarity)


class StareWeight(Weighting):
    """w = W on the most surprising tokens with A > 0, M on those with A < 0, else 1 (STARE, arXiv 2606.19236).

    Surprise is −ln π. Of the step's n loss tokens with A > 0 (A < 0) these are the ⌈share·n⌉ with the largest, at least one,
    with ties. All weights are 1 in a step whose mean entropy is not below `target`. With `step` > 0, W and M move by it
    before each step, apart while the entropy is below the target and back while it is above, W within [1, 1.5] and M within [0.5, 1].
    """

    kind: Literal["stare"] = "stare"
    share: float = Field(0.1, gt=0, le=1, description="Share of the tokens of one sign; published 0.1.")
    W: float = Field(1.1, ge=1, le=1.5, description="Weight where A > 0; published 1.1 (14 B and 32 B models: 1.05).")
    M: float = Field(
        1.0, ge=0.5, le=1, description="Weight where A < 0; 1 in variant O1, 0.9 in C2 (large models: 0.95)."
    )
    target: float = Field(0.3, gt=0, description="Mean entropy below which weights act [nats]; published 0.3.")
    step: float = Field(
        0.0, ge=0, lt=0.5, description="Change of W and M per step; 0: fixed, published adaptive form 0.01."
    )

    @property
    def bounded(self) -> bool:
        """True."""
        return True

    @property
    def bounds(self) -> tuple[float, float]:
        """[M, W]."""
        return self.M, self.W

    def moved(self, entropy: float) -> Self:
        """W and M of a step with this mean entropy [nats], after those of the step before."""
        if self.step == 0 or entropy == self.target:
            return self
        sign = math.copysign(self.step, self.target - entropy)
        return self.replace(W=min(max(self.W + sign, 1.0), 1.5), M=min(max(self.M - sign, 0.5), 1.0))

    def weights(self, step: Any, xp: Any, generator: Generator | None) -> Tensor:
        """See the class."""
        mask, weight = step.mask.bool(), xp.ones_like(step.logp)
        if float(step.entropy[mask].double().mean()) >= self.target:
            return weight
        for sign, value in ((1, self.W), (-1, self.M)):
            side = mask & (sign * step.token_advantage > 0)
            chosen = top_tokens(-step.logp, side, count=math.ceil(self.share * int(side.sum()) - 1e-9))
            weight = xp.where(chosen, value, weight)
        return weight


class PepoWeight(Weighting):
    """w_t = T·e_t/Σ_k e_k over the completion where A > 0, else 1; e_t = exp(H_t)/Σ_{|k − t| ≤ window/2} exp(H_k).

    PEPO (arXiv 2609.39402) weights the tokens of rollouts with positive reward; for rewards of 0 and 1 these are those with A > 0.
    T and positions count loss tokens of the completion; at both ends the window has those that there are. The mean over a
    completion is 1, and a shift of all its entropies changes nothing.
    """

    kind: Literal["pepo"] = "pepo"
    window: int = Field(101, ge=1, description="Width of the window [tokens]; published 101.")

    def weights(self, step: Any, xp: Any, generator: Generator | None) -> Tensor:
        """See the class."""
        mask, half = step.mask.bool(), self.window // 2
        order = (~mask).to(xp.int8).argsort(dim=-1, stable=True)  # (N, T) loss tokens first, in order
        inside = mask.gather(-1, order)
        entropy = xp.where(inside, step.entropy.gather(-1, order).double(), -xp.inf)
        entropy = entropy - xp.where(mask.any(-1, keepdim=True), entropy.amax(-1, keepdim=True), 0.0)
        e = entropy.exp()  # 0 outside
        near = xp.nn.functional.pad(e, (half, half)).unfold(-1, 2 * half + 1, 1).sum(-1)  # (N, T)
        e = xp.where(inside, e / xp.where(inside, near, 1.0), 0.0)
        scaled = e * inside.sum(-1, keepdim=True) / xp.where(mask.any(-1, keepdim=True), e.sum(-1, keepdim=True), 1.0)
        weight = xp.ones_like(scaled).scatter(-1, order, scaled)
        return xp.where(step.token_advantage > 0, weight, 1.0)


class EntropyAdvantageWeight(Weighting):
    """A ← A + strength·min(alpha·H, |A|/kappa), as a weight: w = 1 + strength·sign(A)·min(alpha·H/|A|, 1/kappa); 1 where A = 0."""

    kind: Literal["entropy_advantage"] = "entropy_advantage"
    strength: Share = Field(1.0, description="Factor of the term; a schedule lets it fade (arXiv 2605.25381).")
    alpha: float = Field(
        0.4, ge=0, description="Advantage per nat; 0.4 in the authors' runs (default of their code: 1)."
    )
    kappa: float = Field(2.0, ge=1, description="The term is at most |A|/kappa; 2 in the authors' runs (default: 1).")

    def weights(self, step: Any, xp: Any, generator: Generator | None) -> Tensor:
        """See the class."""
        size = step.token_advantage.abs()
        term = xp.minimum(self.alpha * step.entropy / xp.where(size > 0, size, 1.0), xp.full_like(size, 1 / self.kappa))
        return 1 + number(self.strength) * step.token_advantage.sign() * term


class CustomWeight(Weighting):
    """A weight of the user's own: a name given to `register_token_weight`, or an import path `package.module:function`."""

    kind: Literal["custom"] = "custom"
    function: str = Field(description="Registered name, or `package.module:function`.")
    arguments: dict[str, float | int | str | bool] = Field(
        default_factory=dict, description="Keyword arguments passed on to the function."
    )

    @model_validator(mode="after")
    def _exists(self) -> Self:
        find_token_weight(self.function)  # a wrong name must stop a run before anything is written
        return self

    @property
    def bounded(self) -> bool:
        """Whether the function is registered with bounds."""
        return self.bounds is not None

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Bounds that the function is registered with."""
        return find_token_weight(self.function).bounds

    @property
    def pointwise(self) -> bool:
        """Whether the function is registered as pointwise."""
        return find_token_weight(self.function).pointwise

    @property
    def title(self) -> str:
        """Name in messages."""
        return f"custom weighting {self.function!r}"

    def weights(self, step: Any, xp: Any, generator: Generator | None) -> Tensor:
        """What the function returns.

        Raises:
            UserError: it raises, or returns another type, shape, dtype or range than declared.
        """
        registered, shape = find_token_weight(self.function), tuple(step.mask.shape)
        try:
            weight = registered.function(step, **self.arguments)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"method.weight: {self.title} raised {type(error).__name__}: {error}") from error
        problem = ""
        if not isinstance(weight, xp.Tensor):
            problem = f"{type(weight).__name__}; return a tensor of shape {shape}"
        elif tuple(weight.shape) != shape:
            problem = f"shape {tuple(weight.shape)}; it must be (N, T) = {shape}"
        elif not weight.is_floating_point():
            problem = f"{weight.dtype}; return floating-point weights"
        if problem:
            raise UserError(f"method.weight: {self.title} returned {problem}")
        inside = weight[step.mask.bool()]
        if registered.bounds is not None and bool(xp.isfinite(inside).all()):
            low, high = registered.bounds
            if bool((inside < low - 1e-6).any()) or bool((inside > high + 1e-6).any()):
                least, most = float(inside.min()), float(inside.max())
                declared = f"declares weights in [{low}, {high}] but returned [{least:.4g}, {most:.4g}]"
                raise UserError(f"method.weight: {self.title} {declared}")
        return weight.to(device=step.logp.device, dtype=step.logp.dtype)


# -- controls ----------------------------------------------------------------------------------------------------------


class Control(Weighting):
    """Base of the controls, which change the weights of another weighting, `of`."""

    @property
    def inner(self) -> Weighting:
        """The weighting that the control changes."""
        weighting: Weighting = self.of  # type: ignore[attr-defined]  # a field of every control
        return weighting

    @property
    def needs_calibration(self) -> bool:
        """See `Weighting`."""
        return self.inner.needs_calibration

    @property
    def needs_gradient(self) -> bool:
        """See `Weighting`."""
        return self.inner.needs_gradient

    def with_preset(self, old: str, new: str) -> Self:
        """See `Weighting`."""
        return self.model_copy(update={"of": self.inner.with_preset(old, new)})

    def moved(self, entropy: float) -> Self:
        """See `Weighting`."""
        inner = self.inner.moved(entropy)
        return self if inner is self.inner else self.model_copy(update={"of": inner})

    def calibrated(self, step: Any, xp: Any) -> Self:
        """The control around the calibrated weighting."""
        return self.model_copy(update={"of": self.inner.calibrated(step, xp)})


class _SameBounds(Control):
    """A control whose weights have the bounds of the inner ones, unless they are rescaled to match the gradient."""

    @property
    def bounded(self) -> bool:
        """See `Weighting`."""
        return self.inner.bounded and self.matched != "gradient"  # type: ignore[attr-defined]  # a field of both

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Bounds of the inner weighting, where they hold here."""
        return self.inner.bounds if self.bounded else None


class ReverseWeight(_SameBounds):
    """w ← L + U − w, for weightings with bounds: the ablation that the paper reports as worse."""

    kind: Literal["reverse"] = "reverse"
    matched: Literal["none", "gradient"] = Field(
        "none", description="gradient: multiply the weights so that their mean over the gradient is that of `of`."
    )
    of: TokenWeight = Field(description="The weighting that is reversed; it must have bounds.")

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if not self.of.bounded:
            raise ValueError(f"reverse needs a weighting with bounds; {self.of.kind!r} has none")
        return self

    @property
    def statistic(self) -> str | None:  # type: ignore[override]  # depends on fields here
        """That of `of`, unless the weights are matched."""
        return self.of.statistic if self.matched == "none" else None

    @property
    def pointwise(self) -> bool:
        """See `Weighting`."""
        return self.of.pointwise and self.matched == "none"

    def at_statistic(self, u: Any, xp: Any) -> Any:
        """L + U − w."""
        bounds = self.bounds
        if bounds is None:
            return super().at_statistic(u, xp)
        return bounds[0] + bounds[1] - self.of.at_statistic(u, xp)

    def weights(self, step: Any, xp: Any, generator: Generator | None) -> Tensor:
        """L + U − w, matched if asked for."""
        bounds = self.of.bounds
        assert bounds is not None  # validated
        weight = self.of.evaluate(step, xp, generator)
        flipped = bounds[0] + bounds[1] - weight
        return flipped if self.matched == "none" else _matched(flipped, weight, step)


class ShuffledWeight(_SameBounds):
    """The same weights on other tokens of the same completion: their distribution stays, their alignment is lost.

    With `matched=gradient` each token's weight is drawn with replacement, so that the weights have over the gradient the
    distribution of the given ones. A permutation does not: where few tokens carry most of the gradient, it gives them the
    weights of the many others.
    """

    kind: Literal["shuffled"] = "shuffled"
    matched: Counted = Field(
        "tokens",
        description="tokens: permute the weights over the completion's loss tokens; gradient: draw each token's weight from "
        "them with probability proportional to the gradient that they carry, then multiply all so that the mean over the "
        "gradient is that of `of`.",
    )
    of: TokenWeight = Field(description="The weighting whose weights are moved.")

    def weights(self, step: Any, xp: Any, generator: Generator | None) -> Tensor:
        """The moved weights.

        Raises:
            ValueError: no generator is given.
        """
        if generator is None:
            raise ValueError("shuffled weights need a generator")
        weight, mask = self.of.evaluate(step, xp, generator), step.mask.bool()
        key = xp.rand(mask.shape, generator=generator, device=generator.device, dtype=xp.float64).to(weight.device)
        if self.matched == "tokens":
            random_order = xp.where(mask, key, 2.0).argsort(dim=-1, stable=True)  # (N, T) loss tokens first, shuffled
            in_order = (~mask).to(xp.int8).argsort(dim=-1, stable=True)  # (N, T) loss tokens first, in order
            return xp.empty_like(weight).scatter_(-1, in_order, weight.gather(-1, random_order))
        return _matched(drawn(weight, mask, step.mass, key, xp), weight, step)


def drawn(weight: Tensor, mask: Tensor, mass: Tensor, key: Tensor, xp: Any) -> Tensor:
    """Each loss token's weight (N, T) drawn, with replacement, from those of its completion with probability ∝ `mass`.

    `key` (N, T) is uniform in [0, 1). A completion where `mass` is 0 draws from all its loss tokens alike.
    """
    share = xp.where(mask, mass.double(), 0.0)
    share = xp.where((share.sum(-1, keepdim=True) > 0), share, mask.double())  # (N, T)
    below = share.cumsum(-1)
    # right: a token of mass 0 is never drawn. The product may round up to the total, hence the clamp to the last of mass.
    index = xp.searchsorted(below, key * below[:, -1:], right=True)
    last = xp.searchsorted(below, below[:, -1:].contiguous())  # (N, 1)
    return weight.gather(-1, xp.minimum(index, last))


class ConstantWeight(Control):
    """Every weight is the step's mean: with the mean over the gradient, only the effect on the learning rate is left."""

    kind: Literal["constant"] = "constant"
    matched: Counted = Field("tokens", description=f"What the mean counts. {COUNTED}.")
    of: TokenWeight = Field(description="The weighting whose mean is taken.")

    def weights(self, step: Any, xp: Any, generator: Generator | None) -> Tensor:
        """The mean weight."""
        weight = self.of.evaluate(step, xp, generator)
        return _mean(weight, step, self.matched).to(weight.dtype).expand_as(weight)


class MeanOneWeight(Control):
    """w ← w/mean w over the step's loss tokens: no effect on the learning rate, with the mean over the gradient."""

    kind: Literal["mean_one"] = "mean_one"
    matched: Counted = Field("tokens", description=f"What the mean counts. {COUNTED}.")
    of: TokenWeight = Field(description="The weighting that is rescaled.")

    def weights(self, step: Any, xp: Any, generator: Generator | None) -> Tensor:
        """The rescaled weights.

        Raises:
            UserError: all weights are 0.
        """
        weight = self.of.evaluate(step, xp, generator)
        mean = _mean(weight, step, self.matched).to(weight.dtype)
        if not bool(mean > 0):
            raise UserError("method.weight: mean_one around weights that are all 0; choose another weighting")
        return weight / mean


def _matched(weight: Tensor, like: Tensor, step: Any) -> Tensor:
    """Weights (N, T) multiplied so that their mean over the gradient is that of `like` (N, T)."""
    mean = _mean(weight, step, "gradient")
    if not bool(mean > 0):
        raise UserError("method.weight: matched = gradient around weights that are all 0; choose another weighting")
    return weight * (_mean(like, step, "gradient") / mean).to(weight.dtype)


def _mean(weight: Tensor, step: Any, counted: Counted) -> Tensor:
    """Mean over the step's loss tokens, a float64 scalar; over the gradient each counts by `step.mass`.

    Where no token carries a gradient, weights change nothing but a weighted KL term, and the tokens count alike.
    """
    mask = step.mask.bool()
    inside = weight[mask].double()
    if counted == "gradient":
        mass = step.mass[mask].double()
        if bool((mass > 0).any()):
            return (mass * inside).sum() / mass.sum()
    return inside.mean()


TokenWeight = Annotated[
    UniformWeight
    | SigmoidWeight
    | EntropyWeight
    | LinearWeight
    | PowerWeight
    | CovarianceGaussianWeight
    | PolarityWeight
    | StareWeight
    | PepoWeight
    | EntropyAdvantageWeight
    | CustomWeight
    | ReverseWeight
    | ShuffledWeight
    | ConstantWeight
    | MeanOneWeight,
    Field(discriminator="kind"),
]
for _control in (ReverseWeight, ShuffledWeight, ConstantWeight, MeanOneWeight):
    _control.model_rebuild()


def token_weight_kinds() -> dict[str, type[Weighting]]:
    """Every weighting's `kind` and its model, in the order of definition."""
    members = get_args(get_args(TokenWeight)[0])
    return {str(member.model_fields["kind"].default): member for member in members}

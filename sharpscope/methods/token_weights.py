"""The token weights with their constants, bounds, formulas and calibration, and the controls around one.

Importing this module does not import torch: formulas get it as `xp`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from sharpscope.errors import NonFiniteError, UserError
from sharpscope.settings.base import NonNegative, Part, Positive, Schedule, Share
from sharpscope.settings.reading import function_path, import_function, what_raised

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from sharpscope.methods.plan import StepTensors

#: Constants published for GRPO-SG (arXiv 2511.00066): w = clip(alpha·[sigmoid(u/tau) − mu], L, U).
PAPER_SIGMOID: dict[str, float] = {
    "alpha": 2.0,
    "tau": 9.0,
    "mu": 0.25,
    "L": 1.0,
    "U": 1.4,
    "u0": 0.0,
}


# -- functions of the user's own ---------------------------------------------------------------------------------------

WeightFunction = Callable[..., "Tensor"]


def weight_bounds(low: float, high: float) -> Callable[[WeightFunction], WeightFunction]:
    """Decorator of a function of token weights (`module:function`) that declares low ≤ w ≤ high; checked.

    The control `reverse` and the saturation need the bounds.

    Raises:
        UserError: the bounds are not 0 ≤ low < high.

    Examples:
        >>> import torch
        >>> import sharpscope
        >>> @sharpscope.weight_bounds(0.0, 1.0)
        ... def one_minus_p(step):
        ...     return 1 - step.logp.exp()
        >>> from types import SimpleNamespace
        >>> one_minus_p(SimpleNamespace(logp=torch.tensor([[0.5, 0.25]]).log()))
        tensor([[0.5000, 0.7500]])
    """
    if not 0 <= low < high:
        raise UserError(f"weight_bounds({low}, {high}): must satisfy 0 <= low < high")

    def decorate(function: WeightFunction) -> WeightFunction:
        """The function with its bounds."""
        function.weight_bounds = (low, high)  # type: ignore[attr-defined]  # read by `CustomWeight.bounds`
        return function

    return decorate


# -- base --------------------------------------------------------------------------------------------------------------


class Weighting(Part):
    """Base of the token weights. A subclass has a `kind` and `weights`."""

    @property
    def bounds(self) -> tuple[float, float] | None:
        """[L, U] that contains every weight, or None. Schedules must be resolved (`at`)."""
        return None

    @property
    def bounded(self) -> bool:
        """Whether the weight has `bounds`."""
        return self.at(0.0).bounds is not None

    @property
    def inner(self) -> Weighting:
        """Itself; of a control, the weighting that it changes."""
        return self

    @property
    def needs_calibration(self) -> bool:
        """Whether a constant is empty that a preset or the first step fills in."""
        return self.inner is not self and self.inner.needs_calibration

    @property
    def needs_gradient(self) -> bool:
        """Whether the calibration needs a step in which some token carries a gradient."""
        return self.inner is not self and self.inner.needs_gradient

    def changed(self, change: Callable[[Any], Any]) -> Any:
        """What `change` makes of this weighting, in a control of the innermost one; itself if it stays the same."""
        return change(self)

    def with_preset(self, old: str, new: str) -> Self:
        """The same weighting, also inside controls, with preset `new` where it has preset `old`."""
        return self.changed(lambda w: w.replace(preset=new) if dict(w).get("preset") == old else w)

    def moved(self, entropy: float) -> Self:
        """The weighting of a step with this mean entropy [nats], after that of the step before; itself if it stays the same."""
        return self

    def calibrated(self, step: StepTensors, xp: ModuleType) -> Self:
        """The weighting with every constant filled in from a step (`StepTensors`); given constants are kept."""
        return self

    def weights(self, step: StepTensors, xp: ModuleType, generator: Generator | None) -> Tensor:
        """Weights (N, T) of a step (`StepTensors`), anything outside the loss tokens; schedules must be resolved."""
        raise NotImplementedError

    def evaluate(
        self,
        step: StepTensors,
        xp: ModuleType,
        generator: Generator | None = None,
    ) -> Tensor:
        """`weights`, checked, in the dtype of `step.logp`; 0 outside the loss tokens."""
        mask = step.mask.bool()
        weight = self.weights(step, xp, generator) if bool(mask.any()) else xp.zeros_like(step.logp)
        inside = weight[mask]
        if not bool(xp.isfinite(inside).all()):
            raise NonFiniteError(
                f"method.weight: {self.title} gives weights that are not finite; check its constants"
            )
        if bool((inside < 0).any()):
            found = f"negative weights ({float(inside.min()):.4g})"
            raise UserError(f"method.weight: {self.title} gives {found}; weights must be ≥ 0")
        return xp.where(mask, weight, 0.0).to(step.logp.dtype)

    @property
    def title(self) -> str:
        """Name in messages."""
        return f"weighting {getattr(self, 'function', getattr(self, 'kind', ''))!r}"


def percentile(value: Tensor, mask: Tensor, q: float, mass: Tensor | None = None) -> float:
    """The `q`-th percentile (0..100) of `value` (N, T) over the mask, computed in float64.

    Without `mass` values are interpolated linearly. With `mass` (N, T) ≥ 0 it is the smallest value whose tokens, with
    those below it, have at least q % of the mass.
    """
    if mass is None:
        import numpy as np

        return float(np.percentile(value[mask].detach().double().cpu().numpy(), q))
    values, order = value[mask].detach().double().sort()
    below = mass[mask].detach().double()[order].cumsum(0)
    index = int((below < below[-1] * (q / 100)).sum())
    return float(values[min(index, len(values) - 1)])


def number(value: object) -> float:
    """A constant that is filled in and no schedule, as a float."""
    if not isinstance(value, int | float):
        raise ValueError(f"a constant is still {value!r}: call calibrate() and .at(progress) first")
    return float(value)


def top_tokens(value: Tensor, mask: Tensor, *, count: int) -> Tensor:
    """(N, T) bool: the `count` loss tokens with the largest value, and all that tie with the last of them."""
    inside = value[mask]
    if inside.numel() == 0:
        return mask
    count = min(max(count, 1), inside.numel())
    return mask & (value >= inside.topk(count).values.min())


Counted = Literal["tokens", "gradient"]
COUNTED = "tokens: every loss token counts once; gradient: by the gradient it carries, |A|·(its coefficient in the mean)·‖p − e_y‖"


# -- weightings --------------------------------------------------------------------------------------------------------


class UniformWeight(Weighting):
    """w = 1: plain GRPO."""

    kind: Literal["uniform"] = "uniform"

    def weights(self, step: StepTensors, xp: ModuleType, generator: Generator | None) -> Tensor:
        """Ones."""
        return xp.ones_like(step.logp)


class LinearWeight(Weighting):
    """w = alpha·π + 1 − alpha: advantage reweighting (AR, arXiv 2505.12929). alpha 0 is GRPO."""

    kind: Literal["linear"] = "linear"
    alpha: Share = Field(
        0.2, description="Share of the weight that follows π; published 0.2, with Lopti 0.3."
    )

    @property
    def bounds(self) -> tuple[float, float]:
        """[1 − alpha, 1]."""
        return 1.0 - number(self.alpha), 1.0

    def weights(self, step: StepTensors, xp: ModuleType, generator: Generator | None) -> Tensor:
        """Linear in π, from 1 − alpha to 1."""
        return number(self.alpha) * xp.exp(step.logp) + (1 - number(self.alpha))


class PowerWeight(Weighting):
    """w = π^gamma. The form is ours."""

    kind: Literal["power"] = "power"
    gamma: NonNegative = Field(1.0, description="Exponent of π.")

    @property
    def bounds(self) -> tuple[float, float]:
        """[0, 1]."""
        return 0.0, 1.0

    def weights(self, step: StepTensors, xp: ModuleType, generator: Generator | None) -> Tensor:
        """The power of π, computed from ln π."""
        return xp.exp(number(self.gamma) * step.logp)


class CovarianceGaussianWeight(Weighting):
    """w = exp(−(c − m)²/(2σ²)), c_t = (ln π_t − mean ln π)(A_t − mean A) (covariance-aware GRPO, arXiv 2605.11538).

    Published: m = 0, σ the std of c over the step, and w̃_t = w_t·N_g/Σ_g w over the N_g loss tokens of the token's group,
    so that their mean is 1. The means in c_t run over all loss tokens of the step. σ divides by the number of tokens (the
    source does not say); w = 1 where σ = 0.
    """

    kind: Literal["covariance_gaussian"] = "covariance_gaussian"
    over: Literal["group", "step", "completion"] = "group"
    """group: as published; step and completion: m and σ are mean and std of c over all loss tokens of the step, or over
    those of the token's completion, and the weights are not divided by their mean."""

    def weights(self, step: StepTensors, xp: ModuleType, generator: Generator | None) -> Tensor:
        """The kernel of each token's covariance, in the form that `over` names."""
        mask = step.mask.bool()
        covariance = step.covariance  # 0 outside the mask
        if self.over != "completion":
            exponent = self._exponent(covariance, mask)
        else:
            rows = zip(covariance, mask, strict=True)
            exponent = xp.stack([self._exponent(*row) for row in rows])
        if self.over == "group":
            exponent = xp.where(mask, exponent, -xp.inf)
            weight = xp.empty_like(exponent)
            for label in step.group.unique():
                member = (step.group == label).to(mask.device)
                # a softmax does not underflow where all of a group's tokens are extreme
                of_group = exponent[member].flatten().softmax(0) * mask[member].sum()
                weight[member] = of_group.view(-1, mask.shape[1])
        else:
            weight = exponent.exp()
        return weight.to(step.logp.dtype)

    def _exponent(self, covariance: Tensor, mask: Tensor) -> Tensor:
        """−(c − m)²/(2σ²) with m and σ over the mask; 0 where c does not vary."""
        inside = covariance[mask]
        std = (inside - inside.mean()).square().mean().sqrt()
        if not bool(std > 1e-12 * covariance.abs().max()):  # equal values differ by rounding
            return covariance * 0.0
        middle = 0.0 if self.over == "group" else inside.mean()
        return -(((covariance - middle) / std) ** 2) / 2


class PolarityWeight(Weighting):
    """w = 1 + alpha·phase·sign(ΔH_t), ΔH_t = −A_t·polarity_t, phase = clip((H* − H̄)/H*, −1, 1) (arXiv 2605.11775).

    H̄ is the mean entropy of the step's loss tokens, H* `target`. Below the target, tokens that raise the entropy weigh
    more; above it, those that lower it. The paper has the entropy as phase signal; this formula is ours.
    """

    kind: Literal["polarity"] = "polarity"
    alpha: Annotated[float, Field(ge=0, lt=1)] | Schedule = Field(
        0.5, description="Strength; ours."
    )
    target: Positive | None = Field(
        None, description="H* [nats]; empty: the mean entropy of the first step."
    )

    @property
    def needs_calibration(self) -> bool:
        """Whether the target is empty."""
        return self.target is None

    def calibrated(self, step: StepTensors, xp: ModuleType) -> Self:
        """The target is the step's mean entropy."""
        if self.target is not None:
            return self
        target = float(step.entropy[step.mask.bool()].double().mean())
        if not target > 0:
            raise UserError(
                f"method.weight.target: the first step's mean entropy is {target:.4g} nats; set the target"
            )
        return self.replace(target=target)

    def weights(self, step: StepTensors, xp: ModuleType, generator: Generator | None) -> Tensor:
        """1 ± alpha·phase by the sign of the token's entropy change."""
        alpha = number(self.alpha)
        target = number(self.target)
        entropy = float(step.entropy[step.mask.bool()].double().mean())
        phase = max(-1.0, min(1.0, (target - entropy) / target))
        return 1 + alpha * phase * xp.sign(-step.token_advantage * step.polarity)


class StareWeight(Weighting):
    """w = W on the most surprising tokens with A > 0, M on those with A < 0, else 1 (STARE, arXiv 2606.19236).

    Surprise is −ln π. Of the step's n loss tokens with A > 0 (A < 0) these are the ⌈0.1·n⌉ with the largest, at least one,
    with ties. All weights are 1 in a step whose mean entropy is not below `target`. With `step` > 0, W and M move by it
    before each step, apart while the entropy is below the target and back while it is above, W within [1, 1.5] and M within [0.5, 1].
    """

    kind: Literal["stare"] = "stare"
    share: ClassVar[float] = 0.1
    W: float = Field(
        1.1,
        ge=1,
        le=1.5,
        description="Weight where A > 0; published 1.1 (14 B and 32 B models: 1.05).",
    )
    M: float = Field(1.0, ge=0.5, le=1)
    """Weight where A < 0; 1 in variant O1, 0.9 in C2 (large models: 0.95)."""
    target: float = Field(
        0.3,
        gt=0,
        description="Mean entropy below which weights act [nats]; published 0.3.",
    )
    step: float = Field(0.0, ge=0, lt=0.5)
    """Change of W and M per step; 0: fixed, published adaptive form 0.01."""

    @property
    def bounds(self) -> tuple[float, float]:
        """[M, W]."""
        return self.M, self.W

    def moved(self, entropy: float) -> Self:
        """W and M of a step with this mean entropy [nats], after those of the step before."""
        if self.step == 0 or entropy == self.target:
            return self
        sign = math.copysign(self.step, self.target - entropy)
        return self.replace(
            W=min(max(self.W + sign, 1.0), 1.5), M=min(max(self.M - sign, 0.5), 1.0)
        )

    def weights(self, step: StepTensors, xp: ModuleType, generator: Generator | None) -> Tensor:
        """W and M on the most surprising tokens, 1 on the others and while the entropy is high."""
        mask = step.mask.bool()
        weight = xp.ones_like(step.logp)
        if float(step.entropy[mask].double().mean()) >= self.target:
            return weight
        for sign, value in ((1, self.W), (-1, self.M)):
            side = mask & (sign * step.token_advantage > 0)
            chosen = top_tokens(
                -step.logp,
                side,
                count=math.ceil(self.share * int(side.sum()) - 1e-9),
            )
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

    def weights(self, step: StepTensors, xp: ModuleType, generator: Generator | None) -> Tensor:
        """The windowed softmax of the entropies, with mean 1 over a completion, where A > 0."""
        half = self.window // 2
        weight = xp.ones_like(step.logp, dtype=xp.float64)
        for row, mask, entropy in zip(weight, step.mask.bool(), step.entropy, strict=True):
            if not bool(mask.any()):
                continue
            inside = entropy[mask].double()
            e = (inside - inside.max()).exp()
            near = xp.nn.functional.pad(e, (half, half)).unfold(0, 2 * half + 1, 1).sum(-1)
            row[mask] = e / near / (e / near).mean()
        return xp.where(step.token_advantage > 0, weight, 1.0)


class EntropyAdvantageWeight(Weighting):
    """A ← A + strength·min(0.4·H, |A|/2), as a weight: w = 1 + strength·sign(A)·min(0.4·H/|A|, 1/2); 1 where A = 0.

    0.4 and 2 are those of the authors' runs (default of their code: 1 and 1).
    """

    kind: Literal["entropy_advantage"] = "entropy_advantage"
    strength: Share = Field(
        1.0, description="Factor of the term; a schedule lets it fade (arXiv 2605.25381)."
    )

    def weights(self, step: StepTensors, xp: ModuleType, generator: Generator | None) -> Tensor:
        """What the entropy term adds to A, as a factor of A."""
        size = step.token_advantage.abs()
        term = (0.4 * step.entropy / xp.where(size > 0, size, 1.0)).clip(max=0.5)
        return 1 + number(self.strength) * step.token_advantage.sign() * term


class EffectWeight(Weighting):
    """w_t = (1 − strength·tanh(E_t/s))/c: tokens whose part of the update raises an outcome weigh less. The form is ours.

    E_t is the first-order effect of the token on the outcome if all completions of the step make one update with weights of 1,
    through clipping and the optimizer (`sharpscope.effects`), s the root mean square of E over the step's loss tokens, and c
    such that the weights' mean over the gradient is 1. All weights are 1 in the optimizer's first step. An update takes four (kl) to
    eight times the processor time of plain GRPO's.
    """

    kind: Literal["effect"] = "effect"
    outcome: Literal["sharpness", "kl"] = "sharpness"
    """sharpness: rise of the tokens' mean −ln π at `radius` after the update (SAM); kl: KL(π_old‖π) after it."""
    strength: float = Field(0.5, ge=-1, le=1)
    """Strength; below 0, tokens that raise the outcome weigh more."""
    radius: float = Field(0.05, gt=0, description="SAM's radius [parameters' L2 norm].")

    def weights(self, step: StepTensors, xp: ModuleType, generator: Generator | None) -> Tensor:
        """The weights of the step's effects, which `StepTensors` must have."""
        if step.effect is None:
            raise UserError(
                "method.weight.kind = effect: needs the effects of each step, which only this package's training computes"
            )
        mask = step.mask.bool()
        effect = step.effect.double()
        size = effect[mask].square().mean().sqrt()
        scaled = xp.where(mask, effect, 0.0) / xp.where(size > 0, size, 1.0)
        weight = 1 - self.strength * xp.tanh(scaled)
        return (weight / _mean(weight, step, "gradient")).to(step.logp.dtype)


class CustomWeight(Weighting):
    """A weight of the user's own, a function at the import path `package.module:function`."""

    kind: Literal["custom"] = "custom"
    function: Annotated[str, AfterValidator(function_path)] = Field(
        description="`package.module:function`, or `file.py:function`.", pattern=".:."
    )
    arguments: dict[str, float | int | str | bool] = Field(default_factory=dict)
    """Keyword arguments passed on to the function."""

    @model_validator(mode="after")
    def _exists(self) -> Self:
        self._imported()  # a wrong name must stop a run before anything is written
        return self

    def _imported(self) -> WeightFunction:
        return import_function(self.function, "weight function")

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Bounds that the function declares (`weight_bounds`)."""
        return getattr(self._imported(), "weight_bounds", None)

    def weights(self, step: StepTensors, xp: ModuleType, generator: Generator | None) -> Tensor:
        """What the function returns."""
        function = self._imported()
        try:
            weight = function(step, **self.arguments)
        except UserError:
            raise
        except Exception as error:  # whatever the user's function raises
            code = getattr(inspect.unwrap(function), "__code__", None)
            problem = what_raised(error, code.co_filename if code else None)
            raise UserError(f"method.weight: {self.title} failed with {problem}") from error
        shape = tuple(step.mask.shape)
        given = tuple(getattr(weight, "shape", ()))
        if not isinstance(weight, xp.Tensor) or given != shape or not weight.is_floating_point():
            found = (
                f"{type(weight).__name__} of shape {given} and type {getattr(weight, 'dtype', '?')}"
            )
            raise UserError(
                f"method.weight: {self.title} returned {found}; it must be a float tensor (N, T) = {shape}"
            )
        inside = weight[step.mask.bool()]
        (low, high) = self.bounds or (-math.inf, math.inf)
        if bool(((inside < low - 1e-6) | (inside > high + 1e-6)).any()):
            found = f"[{float(inside.min()):.4g}, {float(inside.max()):.4g}]"
            raise UserError(
                f"method.weight: {self.title} declares weights in {[low, high]} but returned {found}"
            )
        return weight.to(device=step.logp.device, dtype=step.logp.dtype)


# -- sigmoids ----------------------------------------------------------------------------------------------------------


def _logit(share: float, name: str, bound: float) -> float:
    if not 0 < share < 1:
        why = f"is out of the sigmoid's reach, {name}/alpha + mu = {share:.4g} must be in (0, 1)"
        raise UserError(
            f"method.weight.{name}: {bound} {why}; set tau and u0, or change {name}, alpha or mu"
        )
    return math.log(share) - math.log1p(-share)


def fitted_gain(low: float, high: float) -> tuple[float, float]:
    """Alpha and mu with which the sigmoid's values 0.75 and 0.95, as published for [1, 1.4], land on `low` and `high`.

    alpha = (U − L)/0.2 and mu = 0.75 − L/alpha: 2 and 0.25 for the published bounds.
    """
    alpha = PAPER_SIGMOID["alpha"] * (high - low) / (PAPER_SIGMOID["U"] - PAPER_SIGMOID["L"])
    return alpha, PAPER_SIGMOID["L"] / PAPER_SIGMOID["alpha"] + PAPER_SIGMOID["mu"] - low / alpha


class SigmoidWeight(Weighting):
    """w = clip(alpha·[sigmoid((u − u0)/tau) − mu], L, U), GRPO-SG's shape (arXiv 2511.00066).

    u is the sampled token's undivided logit: with the published constants and any function of its probability alone, w would be
    constant. A constant left empty is the preset's. Preset `paper`: alpha 2, tau 9, mu 0.25, L 1, U 1.4, u0 0. Preset `calibrated`:
    L and U as published, tau and u0 such that the 10th and the 90th percentile of u in the first step land on L and U
    (tau = (u90 − u10)/1.846, u0 = u10 − 1.099·tau). With other bounds, empty alpha and mu follow them (`fitted_gain`).
    """

    kind: Literal["sigmoid"] = "sigmoid"
    preset: Literal["auto", "paper", "calibrated"] = "auto"
    """auto: calibrated on an embedded policy, else paper."""
    percentiles: Counted = Field(
        "tokens", description=f"What the calibration's percentiles count. {COUNTED}."
    )
    alpha: float | None = Field(
        None,
        gt=0,
        description="Gain; published 2.0. Empty: (U − L)/0.2, unless mu is given.",
    )
    tau: float | None = Field(
        None,
        gt=0,
        description="Width of the sigmoid, unit of u; published 9.0.",
    )
    mu: float | None = Field(None, le=1)
    """Subtracted from the sigmoid; published 0.25. Empty: 0.75 − L/alpha, unless alpha is given."""
    L: float | None = Field(None, ge=0, description="Smallest weight; published 1.0.")
    U: float | None = Field(None, gt=0, description="Largest weight, > L; published 1.4.")
    u0: float | None = Field(None, description="Location of the sigmoid, unit of u; published 0.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        low, high = self.bounds
        if low >= high:
            raise ValueError(f"L = {low} must be below U = {high}")
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        """[L, U]."""
        known = PAPER_SIGMOID | self.model_dump(include={"L", "U"}, exclude_none=True)
        return known["L"], known["U"]

    @property
    def needs_calibration(self) -> bool:
        """Whether one of the six constants is empty."""
        return any(getattr(self, name) is None for name in PAPER_SIGMOID)

    @property
    def needs_gradient(self) -> bool:
        """Whether tau or u0 come from percentiles over the gradient."""
        return self.percentiles == "gradient" and not {"tau", "u0"} <= set(self.constants())

    def constants(self) -> dict[str, float]:
        """The given constants, else the preset's; calibrated tau and u0 are missing."""
        known = dict(PAPER_SIGMOID)
        if self.preset != "paper":
            del known["tau"], known["u0"]
        if self.alpha is None and self.mu is None:
            known["alpha"], known["mu"] = fitted_gain(*self.bounds)
        return known | {
            name: value for name in PAPER_SIGMOID if (value := getattr(self, name)) is not None
        }

    def statistic(self, step: StepTensors) -> Tensor:
        """u (N, T), the logit."""  # noqa: D403 - a symbol
        return step.logit

    def weights(self, step: StepTensors, xp: ModuleType, generator: Generator | None) -> Tensor:
        """The clipped sigmoid of the statistic."""
        known = self.constants()
        alpha, tau, mu, low, high, u0 = (number(known.get(name)) for name in PAPER_SIGMOID)
        return (alpha * (xp.sigmoid((self.statistic(step) - u0) / tau) - mu)).clip(low, high)

    def calibrated(self, step: StepTensors, xp: ModuleType) -> Self:
        """Tau and u0 such that the 10th and 90th percentile of u land on L and U; preset `auto` becomes `calibrated`.

        With a = logit(L/alpha + mu) and b = logit(U/alpha + mu): tau = (u90 − u10)/(b − a), u0 = u10 − a·tau.
        """
        known = self.constants()
        mask = step.mask.bool()
        u = self.statistic(step)
        weight = self.with_preset("auto", "calibrated")
        if {"tau", "u0"} <= set(known):
            return weight.replace(**known)
        mass = step.mass if self.percentiles == "gradient" else None
        if not bool(mask.any() if mass is None else (mass[mask] > 0).any()):
            why = "no token of the first step counts"
            raise UserError(
                f"method.weight.percentiles = {self.percentiles}: {why}; set tau and u0"
            )
        u10 = percentile(u, mask, 10, mass)
        u90 = percentile(u, mask, 90, mass)
        a, b = (
            _logit(known[name] / known["alpha"] + known["mu"], name, known[name])
            for name in ("L", "U")
        )
        if "tau" not in known and not (math.isfinite(u90 - u10) and u90 > u10):
            both = f"the first step's 10th and 90th percentile are {u10:.6g} and {u90:.6g}, nothing to calibrate on"
            raise UserError(
                f"method.weight: {both}; set tau and u0, or raise rollout.prompts_per_step"
            )
        tau = known.get("tau", (u90 - u10) / (b - a))
        return weight.replace(**{"tau": tau, "u0": u10 - a * tau} | known)


class EntropyWeight(SigmoidWeight):
    """The calibrated sigmoid of u = −H [nats], H the entropy at the position, instead of the sampled token's logit.

    The control that separates the token's probability from the certainty of the policy at that position. The form is ours.
    """

    kind: Literal["entropy"] = "entropy"  # type: ignore[assignment]
    preset: ClassVar[str] = "calibrated"  # type: ignore[misc]

    def statistic(self, step: StepTensors) -> Tensor:
        """−H: low entropy has the largest weight."""
        return -step.entropy


# -- controls ----------------------------------------------------------------------------------------------------------


class Control(Weighting):
    """Base of the controls, which change the weights of another weighting."""

    of: TokenWeight = Field(description="The weighting that is changed.")

    @property
    def inner(self) -> Weighting:
        """The innermost weighting."""
        return self.of.inner

    def changed(self, change: Callable[[Any], Any]) -> Any:
        """The control around the changed weighting."""
        inner = self.of.changed(change)
        return self if inner is self.of else self.replace(of=inner)


class ReverseWeight(Control):
    """w ← L + U − w, for weightings with bounds: the ablation that the paper reports as worse."""

    kind: Literal["reverse"] = "reverse"

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if not self.of.bounded:
            raise ValueError(f"reverse needs a weighting with bounds; {self.of.kind!r} has none")
        return self

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Those of `of`."""
        return self.of.bounds

    def weights(self, step: StepTensors, xp: ModuleType, generator: Generator | None) -> Tensor:
        """L + U − w."""
        assert self.bounds is not None  # validated
        return sum(self.bounds) - self.of.evaluate(step, xp, generator)


class ShuffledWeight(Control):
    """The same weights on other tokens of the same completion: their distribution stays, their alignment is lost.

    With `matched=gradient` each token's weight is drawn with replacement, so that the weights have over the gradient the
    distribution of the given ones. A permutation does not: where few tokens carry most of the gradient, it gives them the
    weights of the many others.
    """

    kind: Literal["shuffled"] = "shuffled"
    matched: Counted = "tokens"
    """tokens: permute the weights over the completion's loss tokens; gradient: draw each token's weight from them
    with probability proportional to the gradient that they carry, then multiply all so that the mean over the
    gradient is that of `of`."""

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Those of `of`, unless the weights are multiplied."""
        return None if self.matched == "gradient" else self.of.bounds

    def weights(self, step: StepTensors, xp: ModuleType, generator: Generator | None) -> Tensor:
        """The weights of `of`, permuted or drawn within each completion."""
        if generator is None:
            raise ValueError("shuffled weights need a generator")
        weight = self.of.evaluate(step, xp, generator)
        mask = step.mask.bool()
        key = xp.rand(
            mask.shape,
            generator=generator,
            device=generator.device,
            dtype=xp.float64,
        ).to(weight.device)
        if self.matched == "tokens":
            # (N, T) loss tokens first, shuffled
            random_order = xp.where(mask, key, 2.0).argsort(dim=-1, stable=True)
            # (N, T) loss tokens first, in order
            in_order = (~mask).to(xp.int8).argsort(dim=-1, stable=True)
            return xp.empty_like(weight).scatter_(-1, in_order, weight.gather(-1, random_order))
        moved = drawn(weight, mask, step.mass, key, xp)
        mean = _mean(moved, step, "gradient")
        if not bool(mean > 0):
            raise UserError(
                "method.weight: matched = gradient around weights that are all 0; choose another weighting"
            )
        return moved * (_mean(weight, step, "gradient") / mean).to(weight.dtype)


def drawn(
    weight: Tensor,
    mask: Tensor,
    mass: Tensor,
    key: Tensor,
    xp: ModuleType,
) -> Tensor:
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

    def weights(self, step: StepTensors, xp: ModuleType, generator: Generator | None) -> Tensor:
        """The mean weight of the step, everywhere."""
        weight = self.of.evaluate(step, xp, generator)
        return _mean(weight, step, self.matched).to(weight.dtype).expand_as(weight)


class MeanOneWeight(Control):
    """w ← w/mean w over the step's loss tokens: no effect on the learning rate, with the mean over the gradient."""

    kind: Literal["mean_one"] = "mean_one"
    matched: Counted = Field("tokens", description=f"What the mean counts. {COUNTED}.")

    def weights(self, step: StepTensors, xp: ModuleType, generator: Generator | None) -> Tensor:
        """The weights of `of` over their mean."""
        weight = self.of.evaluate(step, xp, generator)
        mean = _mean(weight, step, self.matched).to(weight.dtype)
        if not bool(mean > 0):
            raise UserError(
                "method.weight: mean_one around weights that are all 0; choose another weighting"
            )
        return weight / mean


def _mean(weight: Tensor, step: StepTensors, counted: Counted) -> Tensor:
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
    | EffectWeight
    | CustomWeight
    | ReverseWeight
    | ShuffledWeight
    | ConstantWeight
    | MeanOneWeight,
    Field(discriminator="kind"),
]
for _control in (Control, ReverseWeight, ShuffledWeight, ConstantWeight, MeanOneWeight):
    _control.model_rebuild()

"""Token weights as data: every weighting, the controls around one, and schedules of constants.

A weight that depends on one statistic of a token is evaluated here for NumPy arrays and torch tensors alike (`xp` is the
array namespace); the others are in `sharpscope.objective.token_weights`.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Protocol, Self, get_args

from pydantic import Field, model_validator

from sharpscope.config.base import Spec
from sharpscope.config.custom_weights import find_token_weight


class Schedule(Spec):
    """A constant that changes over training: a function of progress (0 at the first step, 1 at the last)."""

    kind: Literal["linear", "cosine", "constant"] = Field(
        default="linear",
        description="linear: start + (end − start)·progress; cosine: half a cosine from start to end; constant: start.",
    )
    start: float = Field(
        allow_inf_nan=False, description="Value at progress 0, in the unit of the field it stands for."
    )
    end: float | None = Field(
        default=None, allow_inf_nan=False, description="Value at progress 1; not given for `constant`."
    )

    @model_validator(mode="after")
    def _has_end(self) -> Self:
        if (self.end is None) != (self.kind == "constant"):
            raise ValueError(
                f"schedule kind {self.kind!r} needs " + ("no `end`" if self.end is not None else "an `end`")
            )
        return self

    def value(self, progress: float) -> float:
        """The constant at `progress` in [0, 1]."""
        if self.end is None:
            return self.start
        share = progress if self.kind == "linear" else (1 - math.cos(math.pi * progress)) / 2
        return self.start + (self.end - self.start) * share


class Part(Spec):
    """A part of a method; fields that accept a `Schedule` become numbers by `at(progress)`."""

    def at(self, progress: float) -> Self:
        """The same part with every schedule, also in nested parts, replaced by its value at `progress` in [0, 1]."""
        changed: dict[str, Any] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Schedule):
                changed[name] = value.value(progress)
            elif isinstance(value, Part) and (resolved := value.at(progress)) is not value:
                changed[name] = resolved
        if not changed:
            return self
        return type(self).model_validate({n: getattr(self, n) for n in type(self).model_fields} | changed)


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)] | Schedule
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)] | Schedule
Real = Annotated[float, Field(allow_inf_nan=False)] | Schedule
Share = Annotated[float, Field(ge=0, le=1)] | Schedule
Offset = Annotated[float, Field(le=1, allow_inf_nan=False)] | Schedule

#: Constants published for GRPO-SG (arXiv 2511.00066): w = clip(alpha·[sigmoid(u/tau) − mu], L, U).
PAPER_SIGMOID: dict[str, float] = {"alpha": 2.0, "tau": 9.0, "mu": 0.25, "L": 1.0, "U": 1.4, "u0": 0.0}

Counted = Literal["tokens", "gradient"]
COUNTED = "tokens: every loss token counts once; gradient: by the gradient it carries, |A|·(its coefficient in the mean)·‖p − e_y‖"


class Statistics(Protocol):
    """Statistics of sampled tokens that pointwise weights read; arrays of one shape."""

    @property
    def logp(self) -> Any:
        """Ln π of the token [nats]."""

    @property
    def logit(self) -> Any:
        """Its logit z, before division by the temperature."""

    @property
    def entropy(self) -> Any:
        """Entropy of the distribution that the token was sampled from [nats]."""


SMALLEST_COMPLEMENT = 2.0**-24
"""Smallest 1 − π that log-odds resolve: the resolution of float32 log-probabilities."""


class Weighting(Part):
    """Base of the token weights."""

    @property
    def statistic(self) -> str | None:
        """The one statistic that the weight is a function of: logit, log_odds, logp, prob or entropy; else None."""
        return None

    @property
    def pointwise(self) -> bool:
        """Whether a token's weight depends on the statistics of that token only, without batch statistics or randomness."""
        return self.statistic is not None

    @property
    def bounded(self) -> bool:
        """Whether the weight has `bounds`."""
        return "L" in type(self).model_fields

    @property
    def bounds(self) -> tuple[float, float] | None:
        """[L, U] that contains every weight, or None. Schedules must be resolved (`at`)."""
        if not self.bounded:
            return None
        low, high = (_number(self._published(name)) for name in ("L", "U"))
        return low, high

    @property
    def needs_calibration(self) -> bool:
        """Whether a constant is empty that a preset or the first step fills in."""
        return False

    @property
    def needs_gradient(self) -> bool:
        """Whether the calibration needs a step in which some token carries a gradient."""
        return False

    def with_preset(self, old: str, new: str) -> Self:
        """The same weighting, also inside controls, with preset `new` where it has preset `old`."""
        return self

    def at_statistic(self, u: Any, xp: Any) -> Any:
        """Weights at values `u` of the statistic, in its shape.

        Args:
            u: array.
            xp: `torch`, or a namespace with exp, log, expm1 and sigmoid for the arrays given.

        Raises:
            ValueError: the weight is not a function of one statistic, or a constant is not a number yet.
        """
        raise ValueError(f"{type(self).__name__} is not a function of one statistic of a token")

    def _published(self, name: str) -> Any:
        value = getattr(self, name)
        return PAPER_SIGMOID[name] if value is None else value

    @model_validator(mode="after")
    def _bounds_ordered(self) -> Self:
        if "L" in type(self).model_fields:
            low, high = self._published("L"), self._published("U")
            if isinstance(low, float) and isinstance(high, float) and low >= high:
                raise ValueError(f"L = {low} must be below U = {high}")
        return self


def statistic_values(weight: Weighting, tokens: Statistics, xp: Any) -> Any:
    """The statistic that `weight` is a function of, in the tokens' shape.

    Raises:
        ValueError: it is not a function of one statistic.
    """
    match weight.statistic:
        case None:
            raise ValueError(f"{type(weight).__name__} is not a function of one statistic of a token")
        case "log_odds":
            return tokens.logp - xp.log((-xp.expm1(tokens.logp)).clip(min=SMALLEST_COMPLEMENT))
        case "prob":
            return xp.exp(tokens.logp)
        case name:
            return getattr(tokens, name)


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise ValueError(f"a constant is still {value!r}: call calibrate() and .at(progress) first")
    return float(value)


def fitted_gain(low: float, high: float) -> tuple[float, float]:
    """Alpha and mu with which the sigmoid's values 0.75 and 0.95, as published for [1, 1.4], land on `low` and `high`.

    alpha = (U − L)/0.2 and mu = 0.75 − L/alpha: 2 and 0.25 for the published bounds.
    """
    alpha = PAPER_SIGMOID["alpha"] * (high - low) / (PAPER_SIGMOID["U"] - PAPER_SIGMOID["L"])
    return alpha, PAPER_SIGMOID["L"] / PAPER_SIGMOID["alpha"] + PAPER_SIGMOID["mu"] - low / alpha


def _sigmoid(constants: dict[str, Any], u: Any, xp: Any) -> Any:
    alpha, tau, mu, low, high, u0 = (_number(constants.get(name)) for name in ("alpha", "tau", "mu", "L", "U", "u0"))
    return (alpha * (xp.sigmoid((u - u0) / tau) - mu)).clip(low, high)


class UniformWeight(Weighting):
    """w = 1: plain GRPO."""

    kind: Literal["uniform"] = "uniform"

    @property
    def pointwise(self) -> bool:
        """See `Weighting`."""
        return True


class SigmoidWeight(Weighting):
    """w = clip(alpha·[sigmoid((u − u0)/tau) − mu], L, U), GRPO-SG's shape (arXiv 2511.00066).

    A constant left empty is the preset's; one that is given overrides it. Preset `paper`: alpha 2, tau 9, mu 0.25, L 1,
    U 1.4, u0 0. Preset `calibrated`: L and U as published, tau and u0 such that the 10th and the 90th percentile of u in
    the first step land on L and U (tau = (u90 − u10)/1.846, u0 = u10 − 1.099·tau). With other bounds, alpha and mu that
    are left empty follow them (`fitted_gain`), so that the percentiles still land on L and U.
    """

    kind: Literal["sigmoid"] = "sigmoid"
    preset: Literal["auto", "paper", "calibrated"] = Field(
        default="auto",
        description="auto: calibrated, or paper where the policy is not an embedded one (the configuration decides).",
    )
    percentiles: Counted = Field(default="tokens", description=f"What the calibration's percentiles count. {COUNTED}.")
    input: Literal["logit", "log_odds", "logp", "prob"] = Field(
        default="logit",
        description="u, of the sampled token: logit (undivided, no shift invariance), log_odds ln π/(1 − π) [nats], "
        "logp ln π [nats], prob π. The published constants only do something with the logit (our reading).",
    )
    alpha: Positive | None = Field(
        default=None, description="Gain, > 0; published 2.0. Empty: (U − L)/0.2, unless mu is given."
    )
    tau: Positive | None = Field(default=None, description="Width of the sigmoid, > 0, unit of u; published 9.0.")
    mu: Offset | None = Field(
        default=None,
        description="Offset subtracted from the sigmoid, ≤ 1; published 0.25. Empty: 0.75 − L/alpha, unless alpha is given.",
    )
    L: NonNegative | None = Field(default=None, description="Smallest weight, ≥ 0; published 1.0.")
    U: Positive | None = Field(default=None, description="Largest weight, > L; published 1.4.")
    u0: Real | None = Field(default=None, description="Location of the sigmoid, unit of u; published 0.")

    @model_validator(mode="after")
    def _bounds_have_a_gain(self) -> Self:
        if self.alpha is None and self.mu is None and (isinstance(self.L, Schedule) or isinstance(self.U, Schedule)):
            raise ValueError("a schedule of L or U needs alpha or mu, which follow fixed bounds only; set alpha")
        return self

    def constants(self) -> dict[str, float | Schedule]:
        """alpha, tau, mu, L, U, u0 as far as they are known before a calibration: given ones, else the preset's."""
        known: dict[str, float | Schedule] = dict(PAPER_SIGMOID)
        if self.preset != "paper":
            del known["tau"], known["u0"]
        known |= {name: value for name in PAPER_SIGMOID if (value := getattr(self, name)) is not None}
        if self.alpha is None and self.mu is None:
            known["alpha"], known["mu"] = fitted_gain(_number(known["L"]), _number(known["U"]))
        return known

    @property
    def statistic(self) -> str:
        """See `Weighting`."""
        return self.input

    @property
    def needs_calibration(self) -> bool:
        """See `Weighting`."""
        return any(getattr(self, name) is None for name in PAPER_SIGMOID)

    @property
    def needs_gradient(self) -> bool:
        """See `Weighting`."""
        return self.percentiles == "gradient" and not {"tau", "u0"} <= set(self.constants())

    def with_preset(self, old: str, new: str) -> Self:
        """See `Weighting`."""
        return type(self).model_validate(dict(self) | {"preset": new}) if self.preset == old else self

    def at_statistic(self, u: Any, xp: Any) -> Any:
        """clip(alpha·[sigmoid((u − u0)/tau) − mu], L, U)."""
        return _sigmoid(self.constants(), u, xp)


class EntropyWeight(Weighting):
    """The sigmoid of the entropy H at the position instead of the sampled token: u = −H (`low`) or H (`high`) [nats].

    The control that separates the token's probability from the certainty of the policy at that position. The form is ours; tau and u0
    are calibrated on the first step as in `SigmoidWeight` unless given.
    """

    kind: Literal["entropy"] = "entropy"
    direction: Literal["low", "high"] = Field(default="low", description="Which entropy is weighted most.")
    percentiles: Counted = Field(default="tokens", description=f"What the calibration's percentiles count. {COUNTED}.")
    alpha: Positive = Field(default=2.0, description="Gain, > 0.")
    mu: Offset = Field(default=0.25, description="Offset subtracted from the sigmoid, ≤ 1.")
    L: NonNegative = Field(default=1.0, description="Smallest weight, ≥ 0.")
    U: Positive = Field(default=1.4, description="Largest weight, > L.")
    tau: Positive | None = Field(
        default=None, description="Width of the sigmoid, > 0, nats; empty: calibrated on the first step."
    )
    u0: Real | None = Field(
        default=None, description="Location of the sigmoid, nats; empty: calibrated on the first step."
    )

    def constants(self) -> dict[str, float | Schedule]:
        """alpha, mu, L, U, and tau and u0 if they are given."""
        given = {name: getattr(self, name) for name in PAPER_SIGMOID}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def statistic(self) -> str:
        """See `Weighting`."""
        return "entropy"

    @property
    def needs_calibration(self) -> bool:
        """See `Weighting`."""
        return self.tau is None or self.u0 is None

    @property
    def needs_gradient(self) -> bool:
        """See `Weighting`."""
        return self.percentiles == "gradient" and self.needs_calibration

    def signed(self, u: Any) -> Any:
        """−u where low entropy has the largest weight, else u."""
        return -u if self.direction == "low" else u

    def at_statistic(self, u: Any, xp: Any) -> Any:
        """clip(alpha·[sigmoid((±u − u0)/tau) − mu], L, U)."""
        return _sigmoid(self.constants(), self.signed(u), xp)


class LinearWeight(Weighting):
    """w = alpha·π + 1 − alpha: advantage reweighting (AR, arXiv 2505.12929). alpha 0 is GRPO."""

    kind: Literal["linear"] = "linear"
    alpha: Share = Field(
        default=0.2, description="Share of the weight that follows π, in [0, 1]; published 0.2, with Lopti 0.3."
    )

    @property
    def bounded(self) -> bool:
        """True."""
        return True

    @property
    def bounds(self) -> tuple[float, float]:
        """[1 − alpha, 1]."""
        return 1.0 - _number(self.alpha), 1.0

    @property
    def statistic(self) -> str:
        """See `Weighting`."""
        return "prob"

    def at_statistic(self, u: Any, xp: Any) -> Any:
        """alpha·π + 1 − alpha."""
        return _number(self.alpha) * u + (1 - _number(self.alpha))


class PowerWeight(Weighting):
    """w = clip(π^gamma, L, U).

    The form is ours; gamma > 0 favors likely tokens, < 0 unlikely ones, 0 is GRPO (if L ≤ 1 ≤ U).
    """

    kind: Literal["power"] = "power"
    gamma: Real = Field(default=1.0, description="Exponent of π, any real number.")
    L: NonNegative = Field(default=0.0, description="Smallest weight, ≥ 0.")
    U: Positive = Field(default=1.0, description="Largest weight, > L.")

    @property
    def statistic(self) -> str:
        """See `Weighting`."""
        return "logp"

    def at_statistic(self, u: Any, xp: Any) -> Any:
        """clip(π^gamma, L, U)."""
        return xp.exp(_number(self.gamma) * u).clip(_number(self.L), _number(self.U))


class CovarianceGaussianWeight(Weighting):
    """w = exp(−(c − mean c)²/(2 std(c)²)), c_t = (ln π_t − mean ln π)(A_t − mean A).

    Covariance-aware GRPO (arXiv 2605.11538).

    The means in c_t run over all loss tokens of the step. The kernel on the per-token covariance is published; the tokens
    over which it is normalized are not, so there are two readings (`over`). w = 1 where std(c) = 0 (population std).
    """

    kind: Literal["covariance_gaussian"] = "covariance_gaussian"
    over: Literal["step", "completion"] = Field(
        default="step",
        description="Tokens of the mean and std of c. step: all loss tokens of the step; completion: those of the token's "
        "completion. With one advantage for each completion the latter is exp(−z²/2), z the standardized ln π of the "
        "completion: the advantage cancels.",
    )


class PolarityWeight(Weighting):
    """w = 1 + alpha·phase·sign(ΔH_t) with ΔH_t = −A_t·polarity_t and phase = clip((H* − H̄)/H*, −1, 1).

    Polarity-aware policy optimization (arXiv 2605.11775) reweights advantages by polarity with the entropy trajectory
    as the phase signal; this formula is ours. H̄ is the mean entropy of the step's loss tokens, H* `target`. Below the
    target, tokens that raise the entropy weigh more; above it, those that lower it; no branch is dropped (alpha < 1).
    """

    kind: Literal["polarity"] = "polarity"
    alpha: Annotated[float, Field(ge=0, lt=1)] | Schedule = Field(default=0.5, description="Strength, in [0, 1); ours.")
    target: Positive | None = Field(
        default=None, description="H*, > 0, nats; empty: the mean entropy of the first step (filled in by calibration)."
    )

    @property
    def needs_calibration(self) -> bool:
        """See `Weighting`."""
        return self.target is None


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
        default="none",
        description="gradient: multiply the reversed weights so that their mean over the gradient is that of `of`.",
    )
    of: TokenWeight = Field(description="The weighting that is reversed; it must have bounds.")

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if not self.of.bounded:
            raise ValueError(f"reverse needs a weighting with bounds; {self.of.kind!r} has none")
        return self

    @property
    def statistic(self) -> str | None:
        """See `Weighting`."""
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


class ShuffledWeight(_SameBounds):
    """The same weights on other tokens of the same completion: their distribution stays, their alignment is lost."""

    kind: Literal["shuffled"] = "shuffled"
    matched: Counted = Field(
        default="tokens",
        description="tokens: permute the weights over the completion's loss tokens; gradient: draw each token's weight from "
        "them with probability proportional to the gradient that they carry, then multiply all so that the mean over the "
        "gradient is that of `of`.",
    )
    of: TokenWeight = Field(description="The weighting whose weights are moved.")


class ConstantWeight(Control):
    """Every weight is the step's mean: with the mean over the gradient, only the effect on the learning rate is left."""

    kind: Literal["constant"] = "constant"
    matched: Counted = Field(default="tokens", description=f"What the mean counts. {COUNTED}.")
    of: TokenWeight = Field(description="The weighting whose mean is taken.")


class MeanOneWeight(Control):
    """w ← w/mean w over the step's loss tokens: no effect on the learning rate, with the mean over the gradient."""

    kind: Literal["mean_one"] = "mean_one"
    matched: Counted = Field(default="tokens", description=f"What the mean counts. {COUNTED}.")
    of: TokenWeight = Field(description="The weighting that is rescaled.")


TokenWeight = Annotated[
    UniformWeight
    | SigmoidWeight
    | EntropyWeight
    | LinearWeight
    | PowerWeight
    | CovarianceGaussianWeight
    | PolarityWeight
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

"""Token weights as data: every shaping, every control around one, and how a constant is annealed. No torch here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from sharpscope.config.base import Spec
from sharpscope.config.custom_weights import find_shaping

if TYPE_CHECKING:
    from sharpscope.config.method import Method


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

#: Constants published for GRPO-SG (arXiv 2511.00066): w = clip(alpha·[sigmoid(u/tau) − mu], L, U).
PAPER_SIGMOID: dict[str, float] = {"alpha": 2.0, "tau": 9.0, "mu": 0.25, "L": 1.0, "U": 1.4, "u0": 0.0}


def _ordered(low: Any, high: Any) -> None:
    if isinstance(low, float) and isinstance(high, float) and low >= high:
        raise ValueError(f"L = {low} must be below U = {high}")


class UniformShaping(Part):
    """w = 1: plain GRPO."""

    kind: Literal["uniform"] = "uniform"


class SigmoidShaping(Part):
    """w = clip(alpha·[sigmoid((u − u0)/tau) − mu], L, U), GRPO-SG's shape (arXiv 2511.00066).

    A constant left empty is the preset's; one that is given overrides it. Preset `paper`: alpha 2, tau 9, mu 0.25, L 1,
    U 1.4, u0 0. Preset `calibrated`: alpha, mu, L, U as published, tau and u0 such that the 10th and the 90th
    percentile of u in the first step land on L and U (with the published constants tau = (u90 − u10)/1.846, u0 = u10 −
    1.099·tau).
    """

    kind: Literal["sigmoid"] = "sigmoid"
    preset: Literal["auto", "paper", "calibrated"] = Field(
        default="auto",
        description="auto: calibrated, or paper where the policy is not an embedded one (the configuration decides).",
    )
    input: Literal["logit", "log_odds", "logp", "prob"] = Field(
        default="logit",
        description="u, of the sampled token: logit (undivided, no shift invariance), log_odds ln π/(1 − π) [nats], "
        "logp ln π [nats], prob π. The published constants only do something with the logit (our reading).",
    )
    alpha: Positive | None = Field(default=None, description="Gain, > 0; published 2.0.")
    tau: Positive | None = Field(default=None, description="Width of the sigmoid, > 0, unit of u; published 9.0.")
    mu: Share | None = Field(default=None, description="Offset subtracted from the sigmoid, in [0, 1]; published 0.25.")
    L: NonNegative | None = Field(default=None, description="Smallest weight, ≥ 0; published 1.0.")
    U: Positive | None = Field(default=None, description="Largest weight, > L; published 1.4.")
    u0: Real | None = Field(default=None, description="Location of the sigmoid, unit of u; published 0.")

    @model_validator(mode="after")
    def _bounds_ordered(self) -> Self:
        _ordered(PAPER_SIGMOID["L"] if self.L is None else self.L, PAPER_SIGMOID["U"] if self.U is None else self.U)
        return self

    def constants(self) -> dict[str, float | Schedule]:
        """alpha, tau, mu, L, U, u0 as far as they are known before a calibration: given ones, else the preset's."""
        known: dict[str, float | Schedule] = dict(PAPER_SIGMOID)
        if self.preset != "paper":
            del known["tau"], known["u0"]
        given = {name: getattr(self, name) for name in PAPER_SIGMOID}
        return known | {name: value for name, value in given.items() if value is not None}


class EntropyShaping(Part):
    """The same curve on the entropy H of the position instead of the sampled token: u = −H (`low`) or H (`high`), in
    nats.

    The control for "is it the token's probability, or just how sure the policy is there?". The form is ours; tau and u0
    are calibrated on the first step as in `SigmoidShaping` unless given.
    """

    kind: Literal["entropy"] = "entropy"
    direction: Literal["low", "high"] = Field(default="low", description="Which entropy is weighted most.")
    alpha: Positive = Field(default=2.0, description="Gain, > 0.")
    mu: Share = Field(default=0.25, description="Offset subtracted from the sigmoid, in [0, 1].")
    L: NonNegative = Field(default=1.0, description="Smallest weight, ≥ 0.")
    U: Positive = Field(default=1.4, description="Largest weight, > L.")
    tau: Positive | None = Field(
        default=None, description="Width of the sigmoid, > 0, nats; empty: calibrated on the first step."
    )
    u0: Real | None = Field(
        default=None, description="Location of the sigmoid, nats; empty: calibrated on the first step."
    )

    @model_validator(mode="after")
    def _bounds_ordered(self) -> Self:
        _ordered(self.L, self.U)
        return self

    def constants(self) -> dict[str, float | Schedule]:
        """alpha, mu, L, U, and tau and u0 if they are given."""
        given = {name: getattr(self, name) for name in PAPER_SIGMOID}
        return {name: value for name, value in given.items() if value is not None}


class LinearShaping(Part):
    """w = alpha·π + 1 − alpha: advantage reweighting (AR, arXiv 2505.12929). alpha 0 is GRPO."""

    kind: Literal["linear"] = "linear"
    alpha: Share = Field(
        default=0.2, description="Share of the weight that follows π, in [0, 1]; published 0.2, with Lopti 0.3."
    )


class PowerShaping(Part):
    """w = clip(π^gamma, L, U). Form ours; gamma > 0 favours likely tokens, < 0 unlikely ones, 0 is GRPO (if L ≤ 1 ≤
    U).
    """

    kind: Literal["power"] = "power"
    gamma: Real = Field(default=1.0, description="Exponent of π, any real number.")
    L: NonNegative = Field(default=0.0, description="Smallest weight, ≥ 0.")
    U: Positive = Field(default=1.0, description="Largest weight, > L.")

    @model_validator(mode="after")
    def _bounds_ordered(self) -> Self:
        _ordered(self.L, self.U)
        return self


class CovarianceGaussianShaping(Part):
    """w = exp(−(c − mean c)²/(2 std(c)²)), c_t = (ln π_t − mean ln π)(A_t − mean A); covariance-aware GRPO (arXiv
    2605.11538).

    Means and the population std run over all loss tokens of the step. The kernel on the per-token covariance is
    published, this normalisation is our reading. w = 1 where std(c) = 0.
    """

    kind: Literal["covariance_gaussian"] = "covariance_gaussian"


class PolarityShaping(Part):
    """w = 1 + alpha·phase·sign(ΔH_t), the predicted entropy change ΔH_t = −A_t·polarity_t; phase = clip((H* − H̄)/H*,
    −1, 1).

    Polarity-aware policy optimisation (arXiv 2605.11775) reweights advantages by polarity with the entropy trajectory
    as the phase signal; this formula is ours. H̄ is the mean entropy of the step's loss tokens, H* `target`. Below the
    target, tokens that raise the entropy weigh more; above it, those that lower it; no branch is dropped (alpha < 1).
    """

    kind: Literal["polarity"] = "polarity"
    alpha: Annotated[float, Field(ge=0, lt=1)] | Schedule = Field(default=0.5, description="Strength, in [0, 1); ours.")
    target: Positive | None = Field(
        default=None, description="H*, > 0, nats; empty: the mean entropy of the first step (filled in by calibration)."
    )


class CustomShaping(Part):
    """A weight of the user's own: a name given to `register_shaping`, or an import path `package.module:function`."""

    kind: Literal["custom"] = "custom"
    function: str = Field(description="Registered name, or `package.module:function`.")
    arguments: dict[str, float | int | str | bool] = Field(
        default_factory=dict, description="Keyword arguments passed on to the function."
    )

    @model_validator(mode="after")
    def _exists(self) -> Self:
        find_shaping(self.function)  # a wrong name must stop a run before anything is written
        return self


class ReverseShaping(Part):
    """w ← L + U − w, for shapings with bounds: the ablation that the paper reports as worse."""

    kind: Literal["reverse"] = "reverse"
    of: Shaping = Field(description="The shaping that is reversed; it must have bounds.")

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if not is_bounded(self.of):
            raise ValueError(f"reverse needs a shaping with bounds; {self.of.kind!r} has none")
        return self


class ShuffledShaping(Part):
    """The same weights, permuted over the loss tokens of each completion: keeps the distribution, destroys the
    alignment.
    """

    kind: Literal["shuffled"] = "shuffled"
    of: Shaping = Field(description="The shaping whose weights are permuted.")


class ConstantShaping(Part):
    """Every weight is the step's mean: what is left of a shaping as a learning-rate multiplier."""

    kind: Literal["constant"] = "constant"
    of: Shaping = Field(description="The shaping whose mean is taken.")


class MeanOneShaping(Part):
    """w ← w/mean w over the step's loss tokens: what is left of a shaping without the learning-rate multiplier."""

    kind: Literal["mean_one"] = "mean_one"
    of: Shaping = Field(description="The shaping that is rescaled.")


Shaping = Annotated[
    UniformShaping | SigmoidShaping | EntropyShaping | LinearShaping | PowerShaping | CovarianceGaussianShaping |
    PolarityShaping | CustomShaping | ReverseShaping | ShuffledShaping | ConstantShaping | MeanOneShaping,
    Field(discriminator="kind"),
]  # fmt: skip
Wrapper = ReverseShaping | ShuffledShaping | ConstantShaping | MeanOneShaping
for _wrapper in (ReverseShaping, ShuffledShaping, ConstantShaping, MeanOneShaping):
    _wrapper.model_rebuild()


def shaping_kinds() -> dict[str, type[Part]]:
    """Every shaping's `kind` and its model, in the order of definition."""
    members = get_args(get_args(Shaping)[0])
    return {str(member.model_fields["kind"].default): member for member in members}


def is_bounded(shaping: Part) -> bool:
    """Whether the shaping clips its weights to an interval [L, U] that it can name."""
    if isinstance(shaping, CustomShaping):
        return find_shaping(shaping.function).bounds is not None
    if isinstance(shaping, ReverseShaping | ShuffledShaping):
        return is_bounded(shaping.of)
    return isinstance(shaping, SigmoidShaping | EntropyShaping | LinearShaping | PowerShaping)


def weight_bounds(shaping: Part) -> tuple[float, float] | None:
    """[L, U] of a shaping whose schedules are resolved (`at`), or None for one without bounds."""
    if isinstance(shaping, CustomShaping):
        return find_shaping(shaping.function).bounds
    if isinstance(shaping, ReverseShaping | ShuffledShaping):
        return weight_bounds(shaping.of)
    if isinstance(shaping, LinearShaping):
        return (1.0 - _number(shaping.alpha), 1.0)
    if isinstance(shaping, SigmoidShaping):
        low = PAPER_SIGMOID["L"] if shaping.L is None else _number(shaping.L)
        return (low, PAPER_SIGMOID["U"] if shaping.U is None else _number(shaping.U))
    if isinstance(shaping, EntropyShaping | PowerShaping):
        return (_number(shaping.L), _number(shaping.U))
    return None


def _number(value: float | Schedule) -> float:
    if isinstance(value, Schedule):
        raise ValueError("resolve the schedule first: call .at(progress)")
    return value


def needs_calibration(method: Method) -> bool:
    """Whether `calibrate` has constants of the method's weight to fill in: from the preset, or from the first step."""
    return _unfilled(method.weight)


def _unfilled(shaping: Part) -> bool:
    if isinstance(shaping, Wrapper):
        return _unfilled(shaping.of)
    if isinstance(shaping, SigmoidShaping | EntropyShaping):
        return any(getattr(shaping, name) is None for name in PAPER_SIGMOID)
    return isinstance(shaping, PolarityShaping) and shaping.target is None


def is_pointwise(shaping: Part) -> bool:
    """Whether a token's weight depends on that token's own statistics only: no batch statistics, no randomness."""
    if isinstance(shaping, CustomShaping):
        return find_shaping(shaping.function).pointwise
    if isinstance(shaping, ReverseShaping):
        return is_pointwise(shaping.of)
    return isinstance(shaping, UniformShaping | SigmoidShaping | EntropyShaping | LinearShaping | PowerShaping)

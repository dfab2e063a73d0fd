"""Sigmoid token weights of the token's logit or probability (GRPO-SG) or of the entropy, and their calibration on a step."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sharpscope.config.base import NonNegative, Positive, Real, Schedule
from sharpscope.config.weighting import PAPER_SIGMOID, Weighting, number, percentile, statistic_values
from sharpscope.errors import UserError

Offset = Annotated[float, Field(le=1)] | Schedule
Counted = Literal["tokens", "gradient"]
COUNTED = "tokens: every loss token counts once; gradient: by the gradient it carries, |A|·(its coefficient in the mean)·‖p − e_y‖"


class _Sigmoid(Weighting):
    """w = clip(alpha·[sigmoid((±u − u0)/tau) − mu], L, U), with tau and u0 from the first step where they are empty."""

    @property
    def needs_calibration(self) -> bool:
        """Whether one of the six constants is empty."""
        return any(getattr(self, name) is None for name in PAPER_SIGMOID)

    @property
    def needs_gradient(self) -> bool:
        """Whether tau or u0 come from percentiles over the gradient."""
        return self.percentiles == "gradient" and not {"tau", "u0"} <= set(self.constants())  # type: ignore[attr-defined]

    def constants(self) -> dict[str, float | Schedule]:
        """alpha, tau, mu, L, U, u0 as far as they are known before a calibration."""
        return {name: value for name in PAPER_SIGMOID if (value := getattr(self, name)) is not None}

    def signed(self, u: Any) -> Any:
        """The statistic with the sign in which it raises the weight."""
        return u

    def at_statistic(self, u: Any, xp: Any) -> Any:
        """clip(alpha·[sigmoid((±u − u0)/tau) − mu], L, U)."""
        known = self.constants()
        alpha, tau, mu, low, high, u0 = (number(known.get(name)) for name in ("alpha", "tau", "mu", "L", "U", "u0"))
        return (alpha * (xp.sigmoid((self.signed(u) - u0) / tau) - mu)).clip(low, high)

    def calibrated(self, step: Any, xp: Any) -> Self:
        """Tau and u0 such that the 10th and 90th percentile of ±u land on L and U.

        With a = logit(L/alpha + mu) and b = logit(U/alpha + mu): tau = (u90 − u10)/(b − a), u0 = u10 − a·tau.

        Raises:
            UserError: u90 equals u10, the bounds lie outside the sigmoid's reach, or no token carries a gradient.
        """
        known = self.constants()
        if not {"tau", "u0"} <= set(known):
            known = self._location(known, step, xp) | known
        return self.replace(**known)

    def _location(self, known: dict[str, Any], step: Any, xp: Any) -> dict[str, float | Schedule]:
        mask = step.mask.bool()
        if not bool(mask.any()):
            raise UserError("method.weight: the first step has no loss tokens to calibrate on; set tau and u0")
        u = self.signed(statistic_values(self, step, xp))
        mass = step.mass if self.percentiles == "gradient" else None  # type: ignore[attr-defined]
        if mass is not None and not bool((mass[mask] > 0).any()):
            raise UserError(
                "method.weight.percentiles = gradient: no token of the first step carries a gradient; set tau and u0, or "
                "percentiles to tokens"
            )
        u10, u90 = percentile(u, mask, 10, mass), percentile(u, mask, 90, mass)
        now = {
            name: value.value(step.progress) if isinstance(value, Schedule) else value for name, value in known.items()
        }
        a, b = (_logit(now[name] / now["alpha"] + now["mu"], name, now[name]) for name in ("L", "U"))
        tau = now.get("tau")
        if tau is None:
            if not (math.isfinite(u90 - u10) and u90 > u10):
                raise UserError(
                    f"method.weight: the first step's 10th and 90th percentile over {self.percentiles} are {u10:.6g} and "  # type: ignore[attr-defined]
                    f"{u90:.6g}, nothing to calibrate on; set tau and u0, or raise rollout.prompts_per_step"
                )
            tau = (u90 - u10) / (b - a)
        return {"tau": tau, "u0": u10 - a * tau}


def _logit(share: float, name: str, bound: float) -> float:
    if not 0 < share < 1:
        raise UserError(
            f"method.weight.{name}: {bound} is out of the sigmoid's reach, {name}/alpha + mu = {share:.4g} must be in "
            f"(0, 1); set tau and u0, or change {name}, alpha or mu"
        )
    return math.log(share) - math.log1p(-share)


def fitted_gain(low: float, high: float) -> tuple[float, float]:
    """Alpha and mu with which the sigmoid's values 0.75 and 0.95, as published for [1, 1.4], land on `low` and `high`.

    alpha = (U − L)/0.2 and mu = 0.75 − L/alpha: 2 and 0.25 for the published bounds.
    """
    alpha = PAPER_SIGMOID["alpha"] * (high - low) / (PAPER_SIGMOID["U"] - PAPER_SIGMOID["L"])
    return alpha, PAPER_SIGMOID["L"] / PAPER_SIGMOID["alpha"] + PAPER_SIGMOID["mu"] - low / alpha


class SigmoidWeight(_Sigmoid):
    """w = clip(alpha·[sigmoid((u − u0)/tau) − mu], L, U), GRPO-SG's shape (arXiv 2511.00066).

    A constant left empty is the preset's. Preset `paper`: alpha 2, tau 9, mu 0.25, L 1, U 1.4, u0 0. Preset `calibrated`:
    L and U as published, tau and u0 such that the 10th and the 90th percentile of u in the first step land on L and U
    (tau = (u90 − u10)/1.846, u0 = u10 − 1.099·tau). With other bounds, empty alpha and mu follow them (`fitted_gain`).
    """

    kind: Literal["sigmoid"] = "sigmoid"
    preset: Literal["auto", "paper", "calibrated"] = Field(
        "auto", description="auto: calibrated on an embedded policy, else paper."
    )
    percentiles: Counted = Field("tokens", description=f"What the calibration's percentiles count. {COUNTED}.")
    input: Literal["logit", "log_odds", "logp", "prob"] = Field(
        "logit",
        description="u, of the sampled token: logit (undivided, no shift invariance), log_odds ln π/(1 − π) [nats], "
        "logp ln π [nats], prob π. The published constants only do something with the logit (our reading).",
    )
    alpha: Positive | None = Field(None, description="Gain; published 2.0. Empty: (U − L)/0.2, unless mu is given.")
    tau: Positive | None = Field(None, description="Width of the sigmoid, unit of u; published 9.0.")
    mu: Offset | None = Field(
        None, description="Subtracted from the sigmoid; published 0.25. Empty: 0.75 − L/alpha, unless alpha is given."
    )
    L: NonNegative | None = Field(None, description="Smallest weight; published 1.0.")
    U: Positive | None = Field(None, description="Largest weight, > L; published 1.4.")
    u0: Real | None = Field(None, description="Location of the sigmoid, unit of u; published 0.")

    @model_validator(mode="after")
    def _bounds_have_a_gain(self) -> Self:
        if self.alpha is None and self.mu is None and (isinstance(self.L, Schedule) or isinstance(self.U, Schedule)):
            raise ValueError("a schedule of L or U needs alpha or mu, which follow fixed bounds only; set alpha")
        return self

    def constants(self) -> dict[str, float | Schedule]:
        """The given constants, else the preset's; calibrated tau and u0 are missing."""
        known: dict[str, float | Schedule] = dict(PAPER_SIGMOID)
        if self.preset != "paper":
            del known["tau"], known["u0"]
        known |= super().constants()
        if self.alpha is None and self.mu is None:
            known["alpha"], known["mu"] = fitted_gain(number(known["L"]), number(known["U"]))
        return known

    @property
    def statistic(self) -> str:  # type: ignore[override]  # depends on a field here
        """`input`."""
        return self.input

    def with_preset(self, old: str, new: str) -> Self:
        """See `Weighting`."""
        return self.replace(preset=new) if self.preset == old else self

    def calibrated(self, step: Any, xp: Any) -> Self:
        """See `_Sigmoid`; preset `auto` becomes `calibrated`."""
        return super(SigmoidWeight, self.with_preset("auto", "calibrated")).calibrated(step, xp)


class EntropyWeight(_Sigmoid):
    """The sigmoid of the entropy H at the position instead of the sampled token: u = −H (`low`) or H (`high`) [nats].

    The control that separates the token's probability from the certainty of the policy at that position. The form is ours.
    """

    kind: Literal["entropy"] = "entropy"
    direction: Literal["low", "high"] = Field("low", description="Which entropy is weighted most.")
    percentiles: Counted = Field("tokens", description=f"What the calibration's percentiles count. {COUNTED}.")
    alpha: Positive = Field(2.0, description="Gain.")
    mu: Offset = Field(0.25, description="Subtracted from the sigmoid.")
    L: NonNegative = Field(1.0, description="Smallest weight.")
    U: Positive = Field(1.4, description="Largest weight, > L.")
    tau: Positive | None = Field(None, description="Width of the sigmoid [nats]; empty: from the first step.")
    u0: Real | None = Field(None, description="Location of the sigmoid [nats]; empty: from the first step.")

    statistic: ClassVar[str | None] = "entropy"

    def signed(self, u: Any) -> Any:
        """−u where low entropy has the largest weight, else u."""
        return -u if self.direction == "low" else u

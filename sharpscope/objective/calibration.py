"""Fill in the empty constants of a weighting: with the published values, or with values measured on the first step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from sharpscope.config.token_weights import (
    Control,
    EntropyWeight,
    PolarityWeight,
    Schedule,
    SigmoidWeight,
    TokenWeight,
    statistic_values,
)
from sharpscope.errors import UserError
from sharpscope.objective.statistics import masked_mean, percentile, weighted_percentile
from sharpscope.objective.values import StepTensors


def calibrate(weighting: TokenWeight, step: StepTensors) -> TokenWeight:
    """The weighting with every constant filled in, as run.json stores it; constants that are given are kept.

    sigmoid, preset `paper`: the published numbers; alpha and mu follow other bounds. sigmoid, preset `calibrated` (or
    `auto`, which becomes it), and entropy: with u10, u90 the 10th and 90th percentile of u, a = logit(L/alpha + mu) and
    b = logit(U/alpha + mu), tau = (u90 − u10)/(b − a) and u0 = u10 − a·tau, so that u10 and u90 land on L and U
    (published constants: b − a = 1.846, a = 1.099). The percentiles are over the step's loss tokens; with
    `percentiles=gradient` a token counts by `step.gradient_mass`. polarity: target = mean entropy. Other weightings have
    nothing to fill in. Schedules are read at `step.progress`. Idempotent.

    Raises:
        UserError: u90 equals u10, the bounds lie outside the sigmoid's reach, no token carries a gradient, or a polarity
            target would be 0.
        ValueError: percentiles over the gradient are asked for, and `step.gradient_mass` is None.
    """
    if isinstance(weighting, Control):
        return weighting.model_copy(update={"of": calibrate(weighting.of, step)})
    if isinstance(weighting, PolarityWeight) and weighting.target is None:
        target = masked_mean(step.entropy, step.mask.bool())
        if not target > 0:
            raise UserError(
                f"method.weight.target: the first step's mean entropy is {target:.4g} nats; set the target (> 0)"
            )
        return _filled(weighting, {"target": target})
    if isinstance(weighting, SigmoidWeight):
        weighting = _filled(weighting, {"preset": "paper" if weighting.preset == "paper" else "calibrated"})
    if isinstance(weighting, SigmoidWeight | EntropyWeight):
        known = weighting.constants()
        if not {"tau", "u0"} <= set(known):
            known = _location(weighting, known, step) | known
        return _filled(weighting, known)
    return weighting


def _location(
    weighting: SigmoidWeight | EntropyWeight, known: dict[str, float | Schedule], step: StepTensors
) -> dict[str, float | Schedule]:
    """Tau and u0 from the step's percentiles; a tau that is given is kept for u0."""
    mask = step.mask.bool()
    if not bool(mask.any()):
        raise UserError("method.weight: the first step has no loss tokens to calibrate on; set tau and u0")
    u = statistic_values(weighting, step, torch)
    if isinstance(weighting, EntropyWeight):
        u = weighting.signed(u)
    if weighting.percentiles == "gradient":
        mass = step.mass
        if not bool(mask.any() and (mass[mask] > 0).any()):
            raise UserError(
                "method.weight.percentiles = gradient: no token of the first step carries a gradient; set tau and u0, or "
                "percentiles to tokens"
            )
        u10, u90 = weighted_percentile(u, mask, mass, 10), weighted_percentile(u, mask, mass, 90)
    else:
        u10, u90 = percentile(u, mask, 10), percentile(u, mask, 90)
    now = {name: value.value(step.progress) if isinstance(value, Schedule) else value for name, value in known.items()}
    a = _logit(now["L"] / now["alpha"] + now["mu"], "L", now["L"])
    b = _logit(now["U"] / now["alpha"] + now["mu"], "U", now["U"])
    if "tau" in now:
        tau = now["tau"]
    elif math.isfinite(u90 - u10) and u90 > u10:
        tau = (u90 - u10) / (b - a)
    else:
        over, more = "", ""
        if weighting.percentiles == "gradient":
            over, more = " over the gradient", "raise rollout.prompts_per_step, set percentiles to tokens, or "
        raise UserError(
            f"method.weight: the first step's 10th and 90th percentile{over} are {u10:.6g} and {u90:.6g}, nothing to "
            f"calibrate on; {more}set tau and u0"
        )
    return {"tau": tau, "u0": u10 - a * tau}


def _logit(share: float, name: str, bound: float) -> float:
    if not 0 < share < 1:
        raise UserError(
            f"method.weight.{name}: {bound} is out of the sigmoid's reach, {name}/alpha + mu = {share:.4g} must be in "
            "(0, 1); "
            f"set tau and u0, or change {name}, alpha or mu"
        )
    return math.log(share) - math.log1p(-share)


def _filled(weighting: Any, values: Mapping[str, Any]) -> Any:
    return type(weighting).model_validate(
        {n: getattr(weighting, n) for n in type(weighting).model_fields} | dict(values)
    )

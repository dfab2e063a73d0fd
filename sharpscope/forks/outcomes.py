"""Outcomes of an update on completions that the starting policy drew, and the scale that matches a divergence.

Fixed completions y_i of the starting policy π₀ serve every arm. With w_i = Π_t π(y_it)/π₀(y_it), the expected failure of π is
estimated by Σ_i w_i·F_i / Σ_i w_i (self-normalized importance weighting), F_i = 1 − success of y_i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sharpscope.objective import k3
from sharpscope.policy import Rollouts, TokenStats
from sharpscope.probes import Objective, limited_surface, rollout_batch, sharpness
from sharpscope.probes.perturbation import find_radius

if TYPE_CHECKING:
    from sharpscope.forks.start import Start


@dataclass(frozen=True)
class Reading:
    """An outcome at some weights.

    Attributes:
        value: of the outcome.
        std_error: of the change since the starting weights, over prompts; NaN if not estimated.
        effective_share: effective sample size as a share of the samples; NaN without importance weights.
    """

    value: float
    std_error: float = math.nan
    effective_share: float = math.nan


def outcome_rows(
    common: Mapping[str, Any],
    readings: Mapping[str, Reading],
    start: Mapping[str, Reading],
    valid: Callable[[str, Reading], bool],
) -> list[dict[str, Any]]:
    """Rows of the table `forks`, one for each outcome; `valid` is asked of those that are finite."""

    def null(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return [
        {
            **common,
            "outcome": name,
            "value": null(reading.value),
            "start": null(start[name].value) if name in start else None,
            "std_error": null(reading.std_error),
            "effective_share": null(reading.effective_share),
            "valid": math.isfinite(reading.value) and valid(name, reading),
        }
        for name, reading in readings.items()
    ]


@dataclass(frozen=True)
class FixedRollouts:
    """Completions of the starting policy with their success and its statistics of their tokens.

    Attributes:
        rollouts: N rows; `group` is the prompt.
        success: (N,) in [0, 1].
        start: statistics (N, T) under the starting policy.
    """

    rollouts: Rollouts
    success: Tensor
    start: TokenStats

    @property
    def mask(self) -> Tensor:
        """(N, T) bool, tokens that the policy chose."""
        return self.rollouts.completion_mask.bool()

    def failure(self, logp: Tensor) -> Reading:
        """Expected failure of the policy with log-probabilities `logp` (N, T), and the standard error of its change."""
        failed = 1 - self.success.double().to(logp.device)
        weight, share = self.weights(logp)
        value, before = float((weight * failed).sum()), float(failed.mean())
        # Linearization of both ratios: row i contributes w_i(F_i − F) − (F_i − mean F)/N.
        part = weight * (failed - value) - (failed - before) / len(failed)
        _, prompt = self.rollouts.group.to(part.device).unique(return_inverse=True)
        prompts = int(prompt.max()) + 1
        by_prompt = torch.zeros(prompts, dtype=torch.float64, device=part.device).index_add_(0, prompt, part)
        error = math.sqrt(float(by_prompt.square().sum()) * prompts / (prompts - 1)) if prompts > 1 else math.nan
        return Reading(value, error, share)

    def weights(self, logp: Tensor) -> tuple[Tensor, float]:
        """Normalized importance weights (N,), which sum to 1, and their effective sample size as a share of N."""
        change = torch.where(self.mask, logp.double() - self.start.logp.double(), 0.0).sum(1)  # (N,)
        weight = torch.softmax(change, 0)
        share = float(1 / (weight.square().sum() * len(weight)))
        return weight, share if math.isfinite(share) else 0.0

    def kl(self, logp: Tensor) -> float:
        """KL(π₀ ‖ π) [nats / token]: the mean over tokens drawn from π₀ of π/π₀ − 1 − ln(π/π₀), an unbiased estimate."""
        each = k3(self.start.logp.double(), logp.double())
        return float(each[self.mask].mean())

    def entropy(self, stats: TokenStats) -> float:
        """Mean entropy at the fixed tokens [nats]."""
        return float(stats.entropy.double()[self.mask].mean())


def matching_scale(
    divergence: Callable[[float], float], target: float, start: float, tolerance: float = 1e-3, evaluations: int = 12
) -> tuple[float, bool]:
    """The scale s > 0 with divergence(s) = target, and whether the tolerance was reached.

    A divergence grows as s² near 0, so the first step assumes this power; later steps interpolate ln divergence linearly in
    ln s, within the bracket found so far. The last call of `divergence` is at the returned scale.

    Args:
        divergence: of the displacement times s.
        target: wanted value, > 0.
        start: first scale tried, > 0.
        tolerance: relative, of the divergence.
        evaluations: most calls of `divergence`.
    """
    low: tuple[float, float] | None = None  # (scale, divergence) below the target
    high: tuple[float, float] | None = None
    scale, slope = start, 2.0
    previous: tuple[float, float] | None = None
    for _ in range(evaluations):
        reached = divergence(scale)
        if math.isfinite(reached) and abs(reached - target) <= tolerance * target:
            return scale, True
        if not math.isfinite(reached) or reached > target:
            high = (scale, reached)
        else:
            low = (scale, reached)
        if not math.isfinite(reached) or reached <= 0:
            proposal = scale / 2 if high == (scale, reached) else scale * 4
        else:
            if previous is not None and previous[1] > 0 and math.isfinite(previous[1]) and previous[0] != scale:
                local = math.log(reached / previous[1]) / math.log(scale / previous[0])
                slope = local if 0.25 <= local <= 16 else slope
            proposal = scale * (target / reached) ** (1 / slope)
        if low is not None and high is not None and not low[0] < proposal < high[0]:
            proposal = math.sqrt(low[0] * high[0])
        previous, scale = (scale, reached), proposal
        if not (0 < scale < math.inf):
            break
    return previous[0] if previous else start, False


def inner(one: Sequence[Tensor], two: Sequence[Tensor]) -> float:
    """Inner product of two vectors given as lists of tensors, in float64."""
    return float(sum(float((a.double() * b.double()).sum()) for a, b in zip(one, two, strict=True)))


def failure_objective(fixed: FixedRollouts, temperature: float) -> Objective:
    """The expected failure, importance-weighted from the policy that drew the completions."""
    rows = rollout_batch(replace(fixed.rollouts, behavior_logp=fixed.start.logp), reward=fixed.success.double())
    return Objective("expected_failure", rows, temperature, stale=True)


def fork_radius(origin: Start) -> float:
    """The radius at which a fork measures SAM sharpness: that of the spec or the run, else found on the first batch.

    The weights must be the starting ones.
    """
    known = origin.spec.rho or origin.run_radius
    if known is not None:
        return known
    with limited_surface(
        origin.policy.model,
        failure_objective(origin.fixed("train", 0), origin.config.rollout.temperature),
        origin.config.probes,
    ) as surface:
        return find_radius(surface).rho


def sam_reading(origin: Start, fixed: FixedRollouts, present: TokenStats) -> Reading:
    """SAM sharpness of the expected failure, importance-weighted from the starting policy's completions.

    Args:
        origin: the state.
        fixed: completions of the starting policy on training prompts.
        present: their statistics under the present policy.
    """
    if origin.rho is None:
        raise ValueError("sharpness is measured at a radius, which a fork has only with the outcome sharpness")
    objective = failure_objective(fixed, origin.config.rollout.temperature)
    with limited_surface(origin.policy.model, objective, origin.config.probes) as surface:
        found = sharpness(surface, None, origin.rho, "sam", at=surface.gradient())
    return Reading(found.value, effective_share=fixed.weights(present.logp)[1])

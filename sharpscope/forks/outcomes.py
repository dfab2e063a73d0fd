"""Outcomes of an update on completions that the starting policy drew, and the scale that matches a divergence.

Fixed completions y_i of the starting policy π₀ serve every arm. With w_i = Π_t π(y_it)/π₀(y_it), the expected failure of π is
estimated by Σ_i w_i·F_i / Σ_i w_i (self-normalized importance weighting), F_i = 1 − success of y_i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sharpscope.objective import k3
from sharpscope.policy import Rollouts, TokenStats
from sharpscope.policy.scoring import Scorer
from sharpscope.probes import Objective, critical_sharpness, limited_surface, rollout_batch, sharpness
from sharpscope.probes.perturbation import find_radius

if TYPE_CHECKING:
    from sharpscope.forks.start import ArmUpdate, Start


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

    def failure_coefficients(self) -> Tensor:
        """C (N, T) such that Σ c·∇log π is the gradient of `failure` at the starting weights: (F_i − mean F)/N."""
        failed = 1 - self.success.double()
        each = (failed - failed.mean()) / len(failed)
        return torch.where(self.mask, each.to(self.mask.device)[:, None], 0.0)


def coefficient_gradient(scorer: Scorer, rollouts: Rollouts, coefficients: Tensor) -> list[Tensor | None]:
    """Σ c_it·∇log π_it for each trainable parameter, in microbatches; `.grad` is left empty.

    Args:
        scorer: of the policy.
        rollouts: N rows.
        coefficients: (N, T).
    """
    parameters = [p for p in scorer.model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.grad = None
    _, batches = scorer.split(rollouts, torch.arange(len(rollouts)))
    for rows in batches:
        logp = scorer.score(rollouts.rows(rows), with_grad=True).logp
        (logp * coefficients[rows.to(coefficients.device)].to(logp)).sum().backward()
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients


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


def sharpness_readings(
    origin: Start, fixed: FixedRollouts, present: TokenStats, update: ArmUpdate | None
) -> dict[str, Reading]:
    """SAM sharpness and gradient norm of the expected failure, and critical sharpness of the correct completions' nll.

    The expected failure is importance-weighted from the starting policy's completions. The critical sharpness is that along
    the arm's own change of the weights, in 1 / learning rate of its first step; it is not defined before the update.

    Args:
        origin: the state.
        fixed: completions of the starting policy on training prompts.
        present: their statistics under the present policy.
        update: of the arm; None at the starting weights.
    """
    if origin.rho is None:
        raise ValueError("sharpness is measured at a radius, which a fork has only with the outcome sharpness")
    _, share = fixed.weights(present.logp)
    objective = failure_objective(fixed, origin.config.rollout.temperature)
    with limited_surface(origin.policy.model, objective, origin.config.probes) as surface:
        at = surface.gradient()
        found = sharpness(surface, None, origin.rho, "sam", at=at)
    readings = {
        "sam_sharpness": Reading(found.value, effective_share=share),
        "gradient_norm": Reading(float(at[1].double().norm()), effective_share=share),
    }
    if update is not None:
        readings["critical_sharpness"] = Reading(_critical(origin, fixed, update))
    return readings


def _critical(origin: Start, fixed: FixedRollouts, update: ArmUpdate) -> float:
    """Critical sharpness of the nll of the correct completions along an arm's change of the weights; NaN if undefined."""
    correct = (fixed.success == 1).nonzero()[:, 0]
    if not len(correct):
        return math.nan
    rows, lr = fixed.rollouts.rows(correct), origin.lr
    mask = rows.completion_mask.bool()
    tokens = int(mask.sum())

    def loss() -> torch.Tensor:
        return -origin.scorer.statistics(rows).logp.double()[mask].sum() / tokens

    parameters = origin.snapshot.parameters
    direction = [part.to(p.device) / -lr for part, p in zip(update.displacement, parameters, strict=True)]
    return critical_sharpness(loss, parameters, direction, guess=lr).value

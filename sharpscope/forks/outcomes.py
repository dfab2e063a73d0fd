"""Outcomes of an update on completions that the starting policy drew, and the scale that matches a divergence.

Fixed completions y_i of the starting policy π₀ serve every arm. With w_i = Π_t π(y_it)/π₀(y_it), the expected failure of π is
estimated by Σ_i w_i·F_i / Σ_i w_i (self-normalized importance weighting), F_i = 1 − success of y_i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sharpscope.config import RolloutSpec, RunConfig
from sharpscope.errors import UserError
from sharpscope.objective import k3
from sharpscope.policy import Policy, Rollouts, TokenStats
from sharpscope.policy.generation import draw_scored
from sharpscope.policy.scoring import Scorer
from sharpscope.probes import Drawn, Objective, rollout_batch
from sharpscope.seeds import derive
from sharpscope.tasks import Example, Task
from sharpscope.traces import MAX_SATURATION, read_run_info
from sharpscope.training import DataOrder

EFFECTIVE_SHARE = 0.5
"""Smallest valid effective sample size of importance weights, as a share of the samples."""


@dataclass(frozen=True)
class Reading:
    """An outcome at some weights."""

    value: float
    std_error: float = math.nan  # of the change since the starting weights, over prompts; NaN if not estimated
    effective_share: float = math.nan  # effective sample size / samples; NaN without importance weights


def outcome_rows(
    common: Mapping[str, Any], readings: Mapping[str, Reading], start: Mapping[str, Reading], sound: bool
) -> list[dict[str, Any]]:
    """Rows of the table `forks`, one for each outcome of an update.

    An outcome is valid if the update is `sound`, the outcome finite, its effective sample size large enough, and, for a
    sharpness, its saturation small enough.
    """
    saturated = "saturation" in readings and readings["saturation"].value > MAX_SATURATION
    rows = []
    for name, reading in readings.items():
        numbers = {key: value if math.isfinite(value) else None for key, value in vars(reading).items()}
        before = start[name].value if name in start else math.nan
        numbers["start"] = before if math.isfinite(before) else None
        few = reading.effective_share < EFFECTIVE_SHARE  # not where it is NaN
        valid = sound and math.isfinite(reading.value) and not few and not (saturated and name == "sam_sharpness")
        rows.append({**common, "outcome": name, **numbers, "valid": valid})
    return rows


@dataclass(frozen=True)
class FixedRollouts:
    """Completions of the starting policy with their success and its statistics of their tokens."""

    rollouts: Rollouts  # N rows; `group` is the prompt
    success: Tensor  # (N,) in [0, 1]
    start: TokenStats  # (N, T) under the starting policy

    @classmethod
    def scored(cls, drawn: Drawn, scorer: Scorer) -> FixedRollouts:
        """Completions that the present policy drew."""
        return cls(drawn.rollouts, drawn.correct, scorer.statistics(drawn.rollouts))

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

    def failure_objective(self, temperature: float) -> Objective:
        """The expected failure, importance-weighted from the policy that drew the completions."""
        given = replace(self.rollouts, behavior_logp=self.start.logp)
        rows = rollout_batch(given, reward=self.success.double())
        return Objective("expected_failure", rows, temperature, stale=True)


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
    low, high, slope = 0.0, math.inf, 2.0
    scale, before, last = start, math.nan, math.nan  # `before`: the scale before, with the result `last`
    for _ in range(evaluations):
        reached = divergence(scale)
        if abs(reached - target) <= tolerance * target:
            return scale, True
        low, high = (scale, high) if reached < target else (low, scale)  # also where it is not finite
        if 0 < reached < math.inf:
            if 0 < last < math.inf and scale != before:
                local = math.log(reached / last) / math.log(scale / before)
                slope = local if 0.25 <= local <= 16 else slope
            proposal = scale * (target / reached) ** (1 / slope)
        else:
            proposal = scale * 4 if reached <= 0 else scale / 2
        if low > 0 and high < math.inf and not low < proposal < high:
            proposal = math.sqrt(low * high)
        before, last, scale = scale, reached, proposal
        if not 0 < scale < math.inf:
            break
    return before, False


def heldout_order(config: RunConfig, task: Task) -> DataOrder:
    """The order in which forks take held-out prompts.

    Raises:
        UserError: the task has none.
    """
    examples = task.splits().get("heldout", [])
    if not examples:
        raise UserError(f"task.kind = '{config.task.kind}': has no split 'heldout' to measure outcomes on")
    return DataOrder(examples, derive(config.seed, "fork held-out"))


def greedy_success(policy: Policy, task: Task, examples: Sequence[Example], rollout: RolloutSpec) -> Tensor:
    """Whether the present policy's greedy answer to each prompt is right, (prompts,), as 0 and 1."""
    greedy = rollout.model_copy(update={"temperature": 0.0, "top_p": 1.0})
    _, rewards = draw_scored(policy, task, examples, 1, greedy, 0)
    return torch.tensor([float(reward.correct) for reward in rewards], dtype=torch.float64)


def run_radius(config: RunConfig, run: Path | str | None) -> float | None:
    """The radius of a run's perturbations, if it is fixed or has been found."""
    if config.probes.rho != "auto":
        return float(config.probes.rho)
    rho = None if run is None else (read_run_info(Path(run)).get("probe_radius") or {}).get("rho")
    return None if rho is None or math.isnan(rho) else float(rho)

"""Health rules: each reports a problem of a step as an event, and may leave the step's updates out or stop the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from sharpscope import distributed
from sharpscope.config import method_rotation_bound, reference_method, same_at_one_update
from sharpscope.config.training import HealthSpec, Rule
from sharpscope.errors import CheckError, UserError
from sharpscope.objective import Method, gradient_mass, summarize_weights
from sharpscope.policy import TokenStats
from sharpscope.recording.rows import clipped_weight_share
from sharpscope.recording.step import RolloutBatch, loss_mask
from sharpscope.traces.rules import IMPOSSIBLE, impossible, mismatch

CGROUP = Path("/sys/fs/cgroup")
PREVENTS = ("skip_step", "stop")
"""Actions that skip a step's updates."""


@dataclass(frozen=True)
class Event:
    """A row of the events table: something that a user should know."""

    step: int
    rule: str
    severity: str  # info | warning | error
    value: float
    threshold: float
    action: str
    message: str

    def row(self) -> dict[str, Any]:
        """The event as one row of the events table."""
        return dict(vars(self))


def refusal(step: int, what: str, problem: UserError) -> Event:
    """The event that says why `what` is not measured for the rest of a run."""
    error, limit = (problem.error, problem.tolerance) if isinstance(problem, CheckError) else (math.nan, math.nan)
    return Event(step, "self_check", "warning", error, limit, "left out", f"{what} is left out from here on: {problem}")


def rotation_event(step: int, row: Mapping[str, Any], method: Method, progress: float) -> Event | None:
    """How far the method turns the gradient and the optimizer's step, and how far it can, from a row of the steps table.

    None where the rotation was not measured, and for a method that is its own reference.
    """
    reference, turned = reference_method(method), row["gradient_rotation"]
    if turned is None or reference == method.model_copy(update={"name": reference.name}):
        return None
    text, bound = f"the gradient is turned by {turned:.2g}°", method_rotation_bound(method.at(progress))
    if bound:
        bounds = method.weight.at(progress).bounds
        span = "their range" if bounds is None else "[{:g}, {:g}]".format(*bounds)
        text += f", {turned / bound:.0%} of the most that weights in {span} can do to orthogonal token gradients, {bound:.1f}°"
    if row["update_rotation"] is not None:
        text += f"; the optimizer's step by {row['update_rotation']:.2g}°"
    if row["noise_rotation"] is not None:
        text += f"; the noise of one batch turns the gradient by about {row['noise_rotation']:.0f}°"
    return Event(step, "rotation", "info", turned, bound or math.nan, "none", text)


def _fires(rule: Rule, value: float, below: bool = False) -> bool:
    if rule.action == "off" or math.isnan(value):
        return False
    return value < rule.threshold if below else value > rule.threshold


def memory_share(device: torch.device) -> float:
    """Share of memory in use: of the model's GPU, or of the machine or this process's container, whichever is fuller."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return 1 - free / total
    return max(float(psutil.virtual_memory().percent) / 100, container_share(CGROUP))


def container_share(folder: Path) -> float:
    """Share of a control group's memory limit in use without reclaimable page cache; 0 without a limit."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return (used - int(counts.get("inactive_file", 0))) / int(limit) if limit != "max" else 0.0
    except (OSError, ValueError):
        return 0.0


def check_method(method: Method, updates: int) -> list[Event]:
    """An event if steps of `updates` optimizer updates give the method the gradient of a simpler one."""
    same = same_at_one_update(method) if updates == 1 else None
    if same is None:
        return []
    but = ", but for tokens that the clip around the average policy stops" if method.needs_proximal else ""
    message = (
        f"with one update per step every ratio is 1, so that {method.name} has the gradient of {same}{but}; set "
        "update.mini_batches or update.inner_epochs above 1 to see its own"
    )
    return [Event(0, "same_gradient", "warning", 1.0, 1.0, "warn", message)]


def check_rollouts(spec: HealthSpec, step: int, *, zero_variance_share: float, truncated_share: float) -> list[Event]:
    """Rules on the rewards and lengths of a step's rollouts."""
    events = []
    rule = spec.no_variance
    # A share equal to the threshold counts: the default, 1, means that no group has a gradient.
    if rule.action != "off" and zero_variance_share >= rule.threshold:
        events.append(
            _event(
                step,
                "no_variance",
                rule,
                zero_variance_share,
                "every completion of these groups got the same reward, so they carry no gradient; raise the temperature or "
                "the group size, or choose puzzles of another difficulty",
            )
        )
    if _fires(spec.truncation, truncated_share):
        events.append(
            _event(
                step,
                "truncation",
                spec.truncation,
                truncated_share,
                "completions are cut at rollout.max_new_tokens and cannot be right; raise it",
            )
        )
    return events


def check_policy(
    spec: HealthSpec,
    step: int,
    *,
    entropy_mean: float,
    saturation: float,
    clipped_weights: float,
    logp_mismatch: float,
    memory: float,
) -> list[Event]:
    """Rules on the policy, the token weights, the sampler and the machine at one step; NaN fires none."""
    events = []
    if _fires(spec.entropy_collapse, entropy_mean, below=True):
        events.append(
            _event(
                step,
                "entropy_collapse",
                spec.entropy_collapse,
                entropy_mean,
                "the policy is nearly deterministic [nats], so rollouts of a group no longer differ; lower optimizer.lr or add KL",
            )
        )
    if _fires(spec.weight_saturation, saturation):
        events.append(
            _event(
                step,
                "weight_saturation",
                spec.weight_saturation,
                saturation,
                "this share of the gradient has token weights on one bound: the method is plain GRPO up to the gradient's "
                "scale; calibrate over the gradient (method.weight.percentiles=gradient) or set other constants",
            )
        )
    if _fires(spec.clipped_weights, clipped_weights):
        events.append(
            _event(
                step,
                "clipped_weights",
                spec.clipped_weights,
                clipped_weights,
                "this share of the tokens has no gradient even at ratio 1: A > 0 and weight > 1 + method.clip.high, or A < 0 "
                "and weight < 1 - method.clip.low; set method.weight_on=surrogate, or widen the clip",
            )
        )
    if _fires(spec.logp_mismatch, logp_mismatch):
        events.append(
            _event(
                step,
                "logp_mismatch",
                spec.logp_mismatch,
                logp_mismatch,
                "sampler and trainer disagree on the log-probabilities [nats]; check dtypes and the rollout backend",
            )
        )
    if _fires(spec.memory, memory):
        events.append(
            _event(
                step,
                "memory",
                spec.memory,
                memory,
                "memory is nearly full; lower update.microbatch_tokens or rollout.decode_batch",
            )
        )
    return events


def check_sampler(spec: HealthSpec, step: int, logp: np.ndarray, sampler: np.ndarray) -> list[Event]:
    """Rules on the sampler's log-probabilities (n,) against the trainer's [nats]; tokens where either is NaN are left out."""
    known = np.isfinite(logp) & ~np.isnan(sampler)
    if not known.any():
        return []
    events = []
    share, why = impossible(logp[known], sampler[known])
    if _fires(spec.sampler_logp, share):
        events.append(_event(step, "sampler_logp", spec.sampler_logp, share, f"{why}: {IMPOSSIBLE}"))
    outside = float(mismatch(logp[known], sampler[known])["outside"].mean())
    if _fires(spec.sampler_ratio, outside):
        events.append(
            _event(
                step,
                "sampler_ratio",
                spec.sampler_ratio,
                outside,
                "this share of the ratios of trainer to sampler is outside [0.9, 1.1]; check dtypes, the rollout backend and "
                "its temperature, or set method.correction",
            )
        )
    return events


def check_finite(spec: HealthSpec, step: int, problems: Sequence[tuple[str, float]], broken: bool) -> list[Event]:
    """An event for each of `problems`, pairs of what is not finite and its value.

    `broken`: the model's own weights are not finite. No action can repair that, so the run stops.
    """
    advice = "lower optimizer.lr, or look at this step's rollouts and tokens"
    action = "stop" if broken else spec.non_finite
    return [
        Event(step, "non_finite", "error", value, math.nan, action, f"{what}; {advice}") for what, value in problems
    ]


class StepHealth:
    """The health rules of one step: those on its rollouts at once, those on the policy before the first update.

    Attributes:
        events: of the rules that fired so far.
    """

    def __init__(
        self, spec: HealthSpec, step: int, batch: RolloutBatch, method: Method, progress: float, device: torch.device
    ) -> None:
        self.spec, self.step, self.batch, self.method, self.progress = spec, step, batch, method, progress
        self.device = device
        reward, truncated = batch.rollouts.reward, float(batch.rollouts.truncated.double().mean())
        self.events = check_rollouts(spec, step, zero_variance_share=batch.idle_share, truncated_share=truncated)
        bad = reward[~torch.isfinite(reward)]
        if len(bad):
            self.events += check_finite(spec, step, [("a reward is not finite", float(bad[0]))], False)

    def allows_updates(self, stats: TokenStats, weight: Tensor) -> bool:
        """Check π_old's statistics and the token weights (N, T); False if an event leaves the step's updates out.

        A reward that is not finite leaves its group out only. Every process must call it.
        """
        rollouts = self.batch.rollouts
        mask = rollouts.completion_mask.bool().cpu()
        gap = (stats.logp.cpu() - rollouts.behavior_logp.cpu())[mask].abs()
        entropy = stats.entropy.cpu()[mask]
        learned = loss_mask(rollouts, self.method).bool().cpu()
        mass = gradient_mass(self.method, learned, self.batch.advantage.cpu(), stats.logit_grad_norm.cpu())
        weights = summarize_weights(self.method.weight, weight.cpu(), learned, progress=self.progress, mass=mass)
        self.events += check_sampler(
            self.spec, self.step, stats.logp.cpu()[mask].numpy(), rollouts.behavior_logp.cpu()[mask].numpy()
        )
        self.events += check_policy(
            self.spec,
            self.step,
            entropy_mean=float(entropy.double().mean()) if entropy.numel() else math.nan,
            saturation=max(weights.saturation_low or 0.0, weights.saturation_high or 0.0),
            clipped_weights=clipped_weight_share(self.method, weight.cpu(), self.batch.advantage.cpu(), learned),
            logp_mismatch=float(gap.mean()) if gap.numel() else math.nan,
            memory=memory_share(self.device),
        )
        allowed = not any(
            event.action in PREVENTS and (event.rule, event.action) != ("non_finite", "skip_step")
            for event in self.events
        )
        return distributed.broadcast(allowed)  # memory differs between processes


def _event(step: int, name: str, rule: Rule, value: float, message: str) -> Event:
    severity = "error" if rule.action == "stop" else "warning"
    return Event(step, name, severity, float(value), rule.threshold, rule.action, message)

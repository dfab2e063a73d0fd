"""Health rules of a training: one table, and one function from the values of a step to events. Imports no torch.

The training loop, the recorders and the importers use them. Thresholds were set on healthy runs: 105 of data/reference, 73 of the
second study (docs/explanations/robustness.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal, Protocol

WINDOW = 10
"""Steps over which shares of groups and of updates are averaged."""
EARLY = 5
"""First steps of a run, whose median entropy is that to which later steps are compared."""


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    Attributes:
        name: of the rule, its setting `health.<name>` and its events.
        quantity: that it judges, see `relative_quantities`.
        threshold: it applies at or above this (`below`: at or below).
        meaning: what it means; the value is shown before it.
        advice: what to change; names in braces are settings as the trainer calls them (FIELDS) or values of the run.
        below: whether small values are the problem.
        known: when the quantity is known: before a step's updates, after them, or at an evaluation.
    """

    name: str
    quantity: str
    threshold: float
    unit: str
    meaning: str
    advice: str
    below: bool = False
    known: Literal["before", "after", "evaluation"] = "before"


RULES: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(
            "dead_groups",
            "idle_groups",
            0.5,
            f"share of groups, mean of {WINDOW} steps",
            "the completions of these groups got equal rewards, so they carry no gradient",
            "raise {temperature} or {group_size}, or choose prompts of another difficulty",
        ),
        Rule(
            "truncation",
            "truncated",
            0.5,
            "share of completions",
            "completions are cut at {max_new_tokens} and cannot be right",
            "raise {max_new_tokens}",
        ),
        Rule(
            "entropy_collapse",
            "relative_entropy",
            0.1,
            f"entropy / its median in the first {EARLY} steps",
            "the policy is nearly deterministic, so that completions of a group no longer differ",
            "lower {lr}, or add a KL or entropy term",
            below=True,
        ),
        Rule(
            "near_uniform",
            "near_uniform",
            0.2,
            "share of tokens with entropy above 0.9·ln V",
            "these tokens are drawn from almost the whole vocabulary: the policy produces noise at the sampling temperature",
            "compare greedy accuracy; lower {lr} or {temperature}",
        ),
        Rule(
            "policy_destroyed",
            "kl_step",
            0.5,
            "KL(π_old‖π) of the step, nats / token",
            "this step's updates changed the policy beyond recognition",
            "lower {lr}{lr_value}; the last checkpoint before is {checkpoint}",
            known="after",
        ),
        Rule(
            "drift",
            "drift",
            0.1,
            "change of entropy after a step without a gradient, nats",
            "the policy moves by the optimizer's momentum alone: no completion earns a reward",
            "lower {lr}{lr_value}; the last checkpoint before is {checkpoint}",
        ),
        Rule(
            "gradient_clipping",
            "clipped_updates",
            0.5,
            f"share of updates, mean of {WINDOW} steps",
            "the gradient's norm is clipped in these updates, so {max_grad_norm} sets their size, not the method",
            "compare methods at equal update norms; raise {max_grad_norm} with a lower {lr}",
            known="after",
        ),
        Rule(
            "temperature_gap",
            "temperature_gap",
            0.2,
            "|accuracy at T = 0 − at T = 1|",
            "accuracy depends on the temperature more than a method can change it",
            "compare methods by greedy accuracy",
            known="evaluation",
        ),
        Rule(
            "weight_saturation",
            "saturation",
            0.95,
            "share of the gradient |c|/w·‖p − e_y‖",
            "this share of the gradient has token weights on one bound: the method is plain GRPO up to the gradient's scale",
            "calibrate over the gradient (method.weight.percentiles=gradient) or set other constants",
        ),
        Rule(
            "clipped_weights",
            "clipped_weights",
            0.1,
            "share of loss tokens",
            "these tokens have no gradient even at ratio 1: A > 0 and weight > 1 + method.clip.high, or A < 0 and weight < 1 − "
            "method.clip.low",
            "set method.weight_on=surrogate, or widen the clip",
        ),
        Rule(
            "logp_mismatch",
            "logp_mismatch",
            0.05,
            "mean |ln π of the trainer − ln π of the sampler|, nats",
            "sampler and trainer disagree on the log-probabilities",
            "check dtypes and the rollout backend",
        ),
        Rule(
            "sampler_ratio",
            "sampler_outside",
            0.15,
            "share of ratios π/μ of trainer to sampler outside [0.9, 1.1]",
            "sampler and trainer disagree on many tokens; bfloat16 alone makes 0.08",
            "check dtypes, the rollout backend and its temperature, or correct the ratio ({correction})",
        ),
        Rule(
            "sampler_logp",
            "sampler_impossible",
            1e-6,
            "share of loss tokens",
            "the sampler's log-probabilities of these tokens cannot be right (above 0, exactly 0, or all equal), and ratios made of "
            "them are not",
            "check what the server returns: log-probabilities of the drawn tokens, not 0 or a placeholder",
        ),
        Rule(
            "memory",
            "memory",
            0.92,
            "share of the memory in use",
            "memory is nearly full",
            "lower {microbatch}",
        ),
    )
}

FIELDS: Mapping[str, Mapping[str, str]] = {
    "sharpscope": {
        "lr": "optimizer.lr",
        "max_new_tokens": "rollout.max_new_tokens",
        "temperature": "rollout.temperature",
        "group_size": "rollout.group_size",
        "max_grad_norm": "optimizer.max_grad_norm",
        "microbatch": "update.microbatch_tokens",
        "correction": "method.correction",
    },
    "trl": {
        "lr": "learning_rate",
        "max_new_tokens": "max_completion_length",
        "temperature": "temperature",
        "group_size": "num_generations",
        "max_grad_norm": "max_grad_norm",
        "microbatch": "per_device_train_batch_size",
        "correction": "vllm_importance_sampling_correction",
    },
    "verl": {
        "lr": "actor_rollout_ref.actor.optim.lr",
        "max_new_tokens": "data.max_response_length",
        "temperature": "actor_rollout_ref.rollout.temperature",
        "group_size": "actor_rollout_ref.rollout.n",
        "max_grad_norm": "actor_rollout_ref.actor.grad_clip",
        "microbatch": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        "correction": "algorithm.rollout_correction",
    },
}
"""What trainers call the settings that advice names."""


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


class Limit(Protocol):
    """A rule's threshold and what follows, as `health.<rule>` sets them."""

    @property
    def threshold(self) -> float:
        """See `Rule.threshold`."""

    @property
    def action(self) -> str:
        """`off`, `warn`, `skip_step` or `stop`."""


def judge(
    step: int,
    values: Mapping[str, float | None],
    limits: Mapping[str, Limit],
    trainer: str = "sharpscope",
    lr: float | None = None,
    checkpoint: str | None = None,
) -> list[Event]:
    """Events of the rules that apply to the values of a step.

    Args:
        step: of the values.
        values: by quantity; a rule whose quantity is missing, None or NaN does not apply.
        limits: threshold and action by rule.
        trainer: whose names of the settings are used, a key of FIELDS.
        lr: learning rate of the step.
        checkpoint: the newest one, by name.
    """
    names = {
        **FIELDS[trainer],
        "lr_value": "" if lr is None else f" = {lr:g}",
        "checkpoint": checkpoint or "not there: start again",
    }
    events = []
    for rule in RULES.values():
        limit, value = limits[rule.name], values.get(rule.quantity)
        if limit.action == "off" or value is None or math.isnan(value):
            continue
        if value <= limit.threshold if rule.below else value >= limit.threshold:
            severity = "error" if limit.action == "stop" else "warning"
            text = f"{rule.unit}: {rule.meaning}; {rule.advice}".format_map(names)
            events.append(Event(step, rule.name, severity, float(value), limit.threshold, limit.action, text))
    return events


def relative_quantities(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The quantities of the last of `rows` that depend on the steps before it; without those that are not known.

    Args:
        rows: of the steps table up to the present step, with `entropy_mean`, `grad_norm`, `grad_clipped` and `idle_groups` (the
            share of groups without an advantage) where known. The first EARLY and the last WINDOW rows of a run suffice.
    """
    values: dict[str, float] = {}
    entropy = [float(row["entropy_mean"]) for row in rows if row.get("entropy_mean") is not None]
    if len(entropy) > EARLY and (early := median(entropy[:EARLY])) > 0:
        values["relative_entropy"] = entropy[-1] / early
    if len(entropy) > 1 and rows[-2].get("grad_norm") == 0:
        values["drift"] = abs(entropy[-1] - entropy[-2])
    for name, column in (("idle_groups", "idle_groups"), ("clipped_updates", "grad_clipped")):
        known = [float(row[column]) for row in rows[-WINDOW:] if row.get(column) is not None]
        if known:
            values[name] = fmean(known)
    return values

"""Configuration of the training loop: optimizer, updates, evaluation, recording, checkpoints and health rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from sharpscope.config.base import Spec

DEFAULT_INTERVALS = {"token_gradients_every": 10, "rotation_every": 10, "heldout_influence_every": 50}
"""Intervals of `RecordingSpec` where none is set [steps]."""


class OptimizerSpec(Spec):
    """AdamW (decoupled weight decay; arXiv 1711.05101) with warm-up, a schedule and global-norm clipping."""

    lr: float = Field(1e-4, gt=0, le=1, description="Peak learning rate [per update].")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first-moment average.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay of the second-moment average.")
    eps: float = Field(1e-8, gt=0, description="Added to the square root of the second moment.")
    weight_decay: float = Field(
        0.0, ge=0, description="Decoupled weight decay of matrices (not of norm gains and biases)."
    )
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up, from lr/warmup_steps; fewer than steps.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="Learning rate after warm-up: constant, or linear or cosine decay to zero at the last step.",
    )
    max_grad_norm: float | None = Field(
        1.0, gt=0, description="Maximum global L2 norm of an update's gradient; null: no clipping."
    )


class UpdateSpec(Spec):
    """How the rollouts of a step are divided into optimizer updates."""

    mini_batches: int = Field(
        2,
        ge=1,
        description="Updates per inner epoch; groups are assigned to them in a seeded order. With 1 (and one inner epoch) every "
        "ratio is 1, so that clips do nothing and several methods equal GRPO.",
    )
    inner_epochs: int = Field(1, ge=1, description="Passes over the completions of a step.")
    microbatch_tokens: int = Field(
        16384,
        ge=64,
        description="Maximum size of a forward and backward pass, with each prompt counted once; larger groups are split, a longer "
        "completion runs alone [tokens].",
    )
    gradient_checkpointing: bool = Field(
        False,
        description="Recompute each layer in the backward pass: less memory, a third more time, the same gradient.",
    )
    share_prompt: bool = Field(
        True, description="Compute a prompt once for all completions of its group; gradients are equal up to rounding."
    )


class EvaluationSpec(Spec):
    """When and on which prompts the policy is evaluated."""

    every: int = Field(
        25,
        ge=0,
        description="Interval between evaluations, also before the first and after the last step; 0: never [steps].",
    )
    prompts: int = Field(100, ge=1, description="Prompts per level, from the start of the split's fixed order.")
    temperatures: tuple[float, ...] = Field((0.0, 1.0), description="Sampling temperatures; 0 is greedy.")
    samples: int = Field(1, ge=1, description="Completions per prompt at temperatures above 0 (k of pass@k and avg@k).")
    splits: tuple[str, ...] = Field(
        ("heldout", "unseen"), description="Splits to evaluate; splits that the task does not have are skipped."
    )

    @field_validator("temperatures")
    @classmethod
    def _temperatures(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not value or any(t < 0 for t in value):
            raise ValueError("must be one or more temperatures, each 0 (greedy) or positive")
        return value


class RecordingSpec(Spec):
    """What is written to the traces and at which interval."""

    budget: float | None = Field(
        0.075,
        gt=0,
        lt=1,
        description="Share of the run's time, without evaluation, that recording may take. It decides when measures without an interval "
        "(null) are made: at multiples of their default intervals, first sharpness, then shares in half of the rest, then "
        "the others in equal parts of it. The first and last step and spikes are always measured, and time is kept for one "
        "spike a run. The decisions depend on the clock; null: no limit, at the default intervals.",
    )
    rollouts_every: int = Field(1, ge=0, description="Interval of the rollouts table; 0: never [steps].")
    tokens_every: int = Field(1, ge=0, description="Interval of the tokens table; 0: never [steps].")
    flush_every: int = Field(1, ge=1, description="Interval between flushes; a crash loses at most this much [steps].")
    token_gradients_every: int | None = Field(
        None,
        ge=0,
        description="Interval of score norms (local tier) and attribution, also at the first and the last step; 0: never; null: 10, or "
        "its multiples within the budget [steps].",
    )
    group_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of an update's groups, drawn at random, whose tokens get score norms, attribution and influence, except at "
        "spikes; column inclusion_probability has the probability. null: 0.25 within a budget, 1 if token_gradients_every is set.",
    )
    spike_z: float | None = Field(
        4.0,
        gt=0,
        description="Also record score norms and attribution if the log gradient norm exceeds its median by this many robust standard "
        "deviations (1.4826·MAD over the last 50 steps); null: never. Only the first inner epoch is recorded.",
    )
    exact_top: int = Field(
        16, ge=0, description="Number of tokens with the largest local norm to compute in the exact tier [tokens]."
    )
    exact_random: int = Field(16, ge=0, description="Number of random tokens to compute in the exact tier [tokens].")
    update_attribution: bool = Field(
        False,
        description="Whether to attribute the squared update norm to tokens, momentum and weight decay, at the same steps (the cost of "
        "attribution again). Not with method.sharpness, which uses the gradient at another point.",
    )
    rotation_every: int | None = Field(
        None,
        ge=0,
        description="Interval of the rotation of gradients and updates against the reference objective, also at step 1; every update of "
        "such a step costs another forward and backward pass; 0: never; null: 10, or its multiples within the budget [steps].",
    )
    derivative: Literal["forward", "central"] = Field(
        "forward",
        description="Derivatives of attribution, influence and alignment: forward mode (exact up to rounding) or central difference (about "
        "4/5 of the cost, error about 1e-4 of the shares' absolute sum in float32); update attribution always uses forward mode.",
    )
    probe_entropy_every: int = Field(
        0,
        ge=0,
        description="Interval of the policy's entropy at fixed tokens, the stored solutions of the probe set's training prompts, also "
        "before training (a forward pass each); 0: never [steps].",
    )
    heldout_influence_every: int | None = Field(
        None,
        ge=0,
        description="Interval of held-out influence, along a gradient on the probe set; 0: never; null: 50, or its multiples within the "
        "budget [steps].",
    )
    heldout_functional: Literal["expected_failure", "nll"] = Field(
        "expected_failure",
        description="Held-out loss for influence: expected failure on seeded rollouts of the current policy, or nll of the "
        "probe set's stored verified solutions.",
    )
    heldout_samples: int = Field(8, ge=1, description="Completions per prompt of the held-out probe set.")


class CheckpointSpec(Spec):
    """When checkpoints are saved and which are kept."""

    every: int = Field(
        50, ge=0, description="Interval between checkpoints, also at the end of the run; 0: only at the end [steps]."
    )
    keep_last: int = Field(2, ge=1, description="Number of newest checkpoints to keep.")
    keep_every: int = Field(
        0, ge=0, description="Also keep every checkpoint whose step is a multiple of this; 0: none."
    )
    keep_best: int = Field(
        0,
        ge=0,
        description="Also keep this many checkpoints with the highest accuracy at their step, on the first of evaluation.splits at the "
        "first of evaluation.temperatures (mean over levels, weighted by prompts); 0: none. Requires checkpoint.every to be "
        "a multiple of evaluation.every.",
    )


class Rule(Spec):
    """A health rule: its threshold and the action when it is exceeded."""

    threshold: float = Field(description="Threshold of the rule; each rule states its unit and direction.")
    action: Literal["off", "warn", "skip_step", "stop"] = Field(
        description="warn: print a warning; skip_step: also skip this step's updates (its tokens are recorded); "
        "stop: also end the run, with a checkpoint. Each time is recorded as an event."
    )

    @field_validator("action", mode="before")
    @classmethod
    def _bare_off(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads a bare `off` as false


class HealthSpec(Spec):
    """Rules that detect failing runs; each time a rule applies, it adds a row to the events table."""

    @model_validator(mode="before")
    @classmethod
    def _complete_rules(cls, data: Any) -> Any:
        """Fill the missing fields of a rule with its defaults."""
        if not isinstance(data, Mapping):
            return data
        rules = {name: info.default for name, info in cls.model_fields.items() if isinstance(info.default, Rule)}
        return {
            name: {**rules[name].model_dump(), **value} if name in rules and isinstance(value, Mapping) else value
            for name, value in data.items()
        }

    non_finite: Literal["skip_step", "stop"] = Field(
        "stop",
        description="Action on a non-finite loss, gradient, reward or token weight: skip the update (for a reward: its group), or also "
        "stop the run. Non-finite model weights always stop the run.",
    )
    no_variance: Rule = Field(
        Rule(threshold=1.0, action="warn"),
        description="Applies at or above this share of groups whose rewards are all equal.",
    )
    truncation: Rule = Field(
        Rule(threshold=0.5, action="warn"),
        description="Applies above this share of completions truncated at max_new_tokens.",
    )
    entropy_collapse: Rule = Field(
        Rule(threshold=0.01, action="warn"), description="Applies below this mean token entropy [nats]."
    )
    weight_saturation: Rule = Field(
        Rule(threshold=0.95, action="warn"),
        description="Applies above this share of the gradient |c|/w·‖p − e_y‖ at weights on one bound.",
    )
    clipped_weights: Rule = Field(
        Rule(threshold=0.1, action="warn"),
        description="With method.weight_on=ratio and method.clip.kind=ppo: applies above this share of loss tokens whose weight alone "
        "exceeds the clip (A > 0 and w > 1 + high, or A < 0 and w < 1 − low), so that they have no gradient at ratio 1.",
    )
    logp_mismatch: Rule = Field(
        Rule(threshold=0.05, action="warn"),
        description="Applies above this mean |ln π of the trainer − ln π of the sampler| over loss tokens before the first update [nats].",
    )
    sampler_ratio: Rule = Field(
        Rule(threshold=0.02, action="warn"),
        description="Applies above this share of loss tokens whose ratio π/μ of trainer to sampler is outside [0.9, 1.1] before the "
        "first update; a mean hides a few such tokens.",
    )
    sampler_logp: Rule = Field(
        Rule(threshold=0.0, action="warn"),
        description="Applies above this share of loss tokens whose sampler log-probability cannot be right: above 0, exactly 0 where "
        "the trainer's is below -0.1, or one value for all tokens.",
    )
    memory: Rule = Field(
        Rule(threshold=0.92, action="warn"),
        description="Applies above this share of the machine's (or GPU's) memory in use.",
    )

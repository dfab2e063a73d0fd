"""Configuration of the training loop: optimizer, updates, evaluation, recording, checkpoints, health rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from sharpscope.config.base import Spec


class OptimizerSpec(Spec):
    """AdamW (decoupled weight decay; arXiv 1711.05101) with warm-up, a schedule and global-norm clipping."""

    lr: float = Field(1e-4, gt=0, le=1, description="Peak learning rate [per update].")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the gradient's moving average.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay of the squared gradient's moving average.")
    eps: float = Field(1e-8, gt=0, description="Added to the square root of the second moment.")
    weight_decay: float = Field(
        0.0, ge=0, description="Decoupled decay; on matrices only (norm gains and biases: none)."
    )
    warmup_steps: int = Field(
        0, ge=0, description="Steps over which the learning rate rises linearly from lr/warmup; fewer than steps."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="After warm-up: constant, or a linear or cosine decay that is zero at the last step, which then changes nothing.",
    )
    max_grad_norm: float | None = Field(
        1.0, gt=0, description="Global L2 norm to which an update's gradient is clipped; null: no clipping."
    )


class UpdateSpec(Spec):
    """How the rollouts of one step are turned into optimizer updates."""

    mini_batches: int = Field(
        1, ge=1, description="Updates per inner epoch; groups are dealt to them in a seeded order."
    )
    inner_epochs: int = Field(1, ge=1, description="Times each completion is used in a step.")
    microbatch_tokens: int = Field(
        16384,
        ge=64,
        description="Tokens (prompts once, completions) of one forward and backward pass; a group that exceeds it is cut, a longer "
        "completion runs alone [tokens].",
    )
    gradient_checkpointing: bool = Field(
        False,
        description="Compute each layer again in the backward pass: less memory, a third more time, the same gradient.",
    )
    share_prompt: bool = Field(
        True, description="Run a prompt once for all completions of its group; the gradients are the same to rounding."
    )


class EvaluationSpec(Spec):
    """When and on what the policy is evaluated."""

    every: int = Field(
        25, ge=0, description="Evaluate every this many steps, and before the first and after the last; 0: never."
    )
    prompts: int = Field(100, ge=1, description="Puzzles of each level, the first of the fixed held-out order.")
    temperatures: tuple[float, ...] = Field((0.0, 1.0), description="Sampling temperatures; 0 is greedy.")
    samples: int = Field(1, ge=1, description="Completions per puzzle at temperatures above 0 (k of pass@k and avg@k).")
    splits: tuple[str, ...] = Field(
        ("heldout", "unseen"), description="Splits to evaluate, those of them that the task has."
    )

    @field_validator("temperatures")
    @classmethod
    def _temperatures(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not value or any(t < 0 for t in value):
            raise ValueError("at least one temperature, each 0 (greedy) or positive")
        return value


class RecordingSpec(Spec):
    """What is written to the traces, and how often."""

    rollouts_every: int = Field(1, ge=0, description="Write the rollouts table every this many steps; 0: never.")
    tokens_every: int = Field(1, ge=0, description="Write the tokens table every this many steps; 0: never.")
    flush_every: int = Field(1, ge=1, description="Steps between flushes; what a crash can lose [steps].")
    token_gradients_every: int = Field(
        10, ge=0, description="Steps between recordings of score norms (local tier) and attribution; 0: never."
    )
    spike_z: float | None = Field(
        4.0,
        gt=0,
        description="Record score norms and attribution also where the log gradient norm is this many robust standard "
        "deviations (1.4826·MAD of the last 50 steps) above its median; null: never. Of several epochs only the first is recorded.",
    )
    exact_top: int = Field(16, ge=0, description="Tokens with the largest local norm that get the exact tier [tokens].")
    exact_random: int = Field(16, ge=0, description="Tokens drawn at random that get the exact tier [tokens].")
    update_attribution: bool = Field(
        False,
        description="Also split the squared update norm over tokens, momentum and decay, at the same steps (costs as much again "
        "as attribution). Not with method.sharpness: its step is that of another gradient.",
    )
    derivative: Literal["forward", "central"] = Field(
        "forward",
        description="Attribution, influence and alignment in forward mode (exact to rounding), or by central difference (about two "
        "thirds of the cost, wrong by about 1e-4 of the shares' absolute sum in float32); update attribution is always in forward mode.",
    )
    heldout_influence_every: int = Field(
        50,
        ge=0,
        description="Steps between recordings of held-out influence, along a gradient on the probe set; 0: never.",
    )
    heldout_functional: Literal["expected_failure", "nll"] = Field(
        "expected_failure",
        description="Held-out loss of influence: expected failure on seeded rollouts of the current policy, or nll of the "
        "probe set's stored verified solutions.",
    )
    heldout_samples: int = Field(8, ge=1, description="Completions drawn for each prompt of the held-out probe set.")


class CheckpointSpec(Spec):
    """When the policy and the optimizer are saved, and which checkpoints are kept."""

    every: int = Field(50, ge=0, description="Save every this many steps and when the run ends; 0: only when it ends.")
    keep_last: int = Field(2, ge=1, description="The newest checkpoints that are kept.")
    keep_every: int = Field(
        0, ge=0, description="Keep, besides, every checkpoint whose step is a multiple of this; 0: none."
    )
    keep_best: int = Field(
        0,
        ge=0,
        description="Keep, besides, this many checkpoints with the highest accuracy, at their own step, on evaluation.splits' first "
        "split at evaluation.temperatures' first temperature (all levels, by number of puzzles); 0: none. Needs "
        "checkpoint.every to be a multiple of evaluation.every.",
    )


class Rule(Spec):
    """A health rule: what happens when its threshold is crossed."""

    threshold: float = Field(description="The value beyond which the rule fires; see the rule for its unit.")
    action: Literal["off", "warn", "skip_step", "stop"] = Field(
        description="warn: say so; skip_step: also leave this step's updates out (its tokens are recorded, weights and optimizer stay); "
        "stop: also end the run, with a checkpoint. Every firing is an event."
    )


class HealthSpec(Spec):
    """Rules that speak before a run goes silently wrong; each firing is a row of the events table."""

    @model_validator(mode="before")
    @classmethod
    def _complete_rules(cls, data: Any) -> Any:
        """A rule given in part keeps the rest of its default."""
        if not isinstance(data, Mapping):
            return data
        rules = {name: info.default for name, info in cls.model_fields.items() if isinstance(info.default, Rule)}
        return {
            name: {**rules[name].model_dump(), **value} if name in rules and isinstance(value, Mapping) else value
            for name, value in data.items()
        }

    non_finite: Literal["skip_step", "stop"] = Field(
        "stop",
        description="A loss, gradient, reward or token weight that is not finite: leave the update out (of a reward: its group), or "
        "stop the run too. Model weights that are not finite always stop it.",
    )
    no_variance: Rule = Field(
        Rule(threshold=1.0, action="warn"), description="Share of groups whose rewards are all equal, at or above."
    )
    truncation: Rule = Field(
        Rule(threshold=0.5, action="warn"), description="Share of completions cut at max_new_tokens, above."
    )
    entropy_collapse: Rule = Field(Rule(threshold=0.01, action="warn"), description="Mean token entropy, below [nats].")
    weight_saturation: Rule = Field(
        Rule(threshold=0.95, action="warn"), description="Share of token weights on one bound, above."
    )
    clipped_weights: Rule = Field(
        Rule(threshold=0.1, action="warn"),
        description="With method.weight_on=ratio and method.clip.kind=ppo: share of loss tokens without a gradient even at "
        "ratio 1, because the weight alone is beyond the clip (A > 0 and w > 1 + high, or A < 0 and w < 1 − low), above.",
    )
    logp_mismatch: Rule = Field(
        Rule(threshold=0.05, action="warn"),
        description="Mean |ln π of the trainer − ln π of the sampler| over loss tokens before the first update, above [nats].",
    )
    memory: Rule = Field(
        Rule(threshold=0.92, action="warn"), description="Share of the machine's (or the GPU's) memory in use, above."
    )

"""Configuration of the training loop: optimizer, updates, evaluation, recording, checkpoints and health rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from sharpscope.config.base import Spec
from sharpscope.rules.table import RULES


class OptimizerSpec(Spec):
    """AdamW (decoupled weight decay; arXiv 1711.05101) with warm-up, a schedule and global-norm clipping."""

    lr: float = Field(1e-4, gt=0, le=1)
    """Peak learning rate [per update]; not given: 1e-4 for embedded policies, else 1e-6."""
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first-moment average.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay of the second-moment average.")
    eps: float = Field(1e-8, gt=0, description="Added to the square root of the second moment.")
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices (not of norm gains and biases)."""
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up, from lr/warmup_steps; fewer than steps.")
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or linear or cosine decay to zero at the last step."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Maximum global L2 norm of an update's gradient; null: no clipping."""


class UpdateSpec(Spec):
    """How the rollouts of a step are divided into optimizer updates."""

    mini_batches: int = Field(2, ge=1)
    """Updates per inner epoch; groups are assigned to them in a seeded order. With 1 (and one inner epoch) every
    ratio is 1, so that clips do nothing and several methods equal GRPO."""
    inner_epochs: int = Field(1, ge=1, description="Passes over the completions of a step.")
    microbatch_tokens: int = Field(16384, ge=64)
    """Maximum size of a forward and backward pass, with each prompt counted once; larger groups are split, a longer
    completion runs alone; lowered where the model's activations would exceed about 4 GB (16 GB on a GPU) [tokens]."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, a third more time, the same gradient."""


class EvaluationSpec(Spec):
    """When and on which prompts the policy is evaluated."""

    every: int = Field(25, ge=0)
    """Interval between evaluations, also before the first and after the last step; 0: never [steps]."""
    prompts: int = Field(100, ge=1, description="Prompts per level, from the start of the split's fixed order.")
    temperatures: tuple[Annotated[float, Field(ge=0)], ...] = Field((0.0, 1.0), min_length=1)
    """Sampling temperatures; 0 is greedy."""
    samples: int = Field(4, ge=1, description="Completions per prompt at temperatures above 0 (k of pass@k and avg@k).")
    splits: tuple[str, ...] = ("heldout", "unseen")
    """Splits to evaluate; splits that the task does not have are skipped."""


class RecordingSpec(Spec):
    """What is written to the traces and at which interval; measurements change nothing that training sees."""

    rollouts_every: int = Field(1, ge=0, description="Interval of the rollouts table; 0: never [steps].")
    tokens_every: int = Field(1, ge=0, description="Interval of the tokens table; 0: never [steps].")
    token_rows: int = Field(200_000, ge=1)
    """Rows of the tokens table in a step from which only a random sample of its groups with about as many tokens is
    written and measured; a step with a spike is written whole. Column row_probability has the probability."""
    token_gradients_every: int = Field(50, ge=0)
    """Interval of score norms (local method) and attribution, also at the first step; 0: never [steps]."""
    group_share: float = Field(0.25, gt=0, le=1)
    """Share of an update's groups with a gradient, drawn at random, whose tokens get score norms, attribution and
    influence, except at spikes; 1: all groups. Column inclusion_probability has the probability."""
    spike_z: float | None = Field(4.0, gt=0)
    """Also record score norms and attribution of all groups with a gradient if the log gradient norm exceeds its median by this many
    robust standard deviations (1.4826·MAD over the last 50 steps), at up to 8 steps of a run; null: never. Only the
    first inner epoch is recorded."""
    exact_tokens: int = Field(1, ge=0)
    """Number of tokens with the largest local norm, and of random others, whose exact norm is computed as well."""
    rotation_every: int = Field(50, ge=0)
    """Interval of the rotation of gradients and updates against the reference objective, also at step 1; every update
    of such a step costs another forward and backward pass; 0: never [steps]."""
    probe_entropy_every: int = Field(0, ge=0)
    """Interval of the policy's entropy at fixed tokens, the stored solutions of the probe set's training prompts,
    also before training (a forward pass each); 0: never [steps]."""
    heldout_influence_every: int = Field(0, ge=0)
    """Interval of held-out influence, along the gradient of the expected failure on rollouts of the probe set's
    held-out prompts; 0: never [steps]."""


class CheckpointSpec(Spec):
    """When checkpoints are saved and which are kept."""

    every: int = Field(50, ge=0)
    """Interval between checkpoints, also at the end of the run; 0: only at the end [steps]."""
    keep_last: int = Field(1, ge=1, description="Number of newest checkpoints to keep.")


JUDGED = {name: rule for name, rule in RULES.items() if rule.known != "log"}
"""Rules that are judged during a run."""


class Limit(Spec):
    """Threshold of a health rule and what follows when it applies."""

    threshold: float = Field(
        description="Value from which the rule applies; default: "
        + ", ".join(f"{name} {'≤' if rule.below else '≥'} {rule.threshold:g}" for name, rule in JUDGED.items())
        + ".",
    )
    action: Literal["off", "warn", "skip_step", "stop"] = "warn"
    """warn: report it; skip_step: also leave this step's updates out (its tokens are recorded); stop: also end the
    run, with a checkpoint."""


class HealthSpec(Spec):
    """Rules that detect failing runs (`sharpscope.rules`); each time a rule applies, it adds a row to the events table."""

    model_config = ConfigDict(extra="allow")
    similar_fields = dict.fromkeys(JUDGED, Limit)
    __pydantic_extra__: dict[str, Limit]

    non_finite: Literal["skip_step", "stop"] = "stop"
    """Action on a non-finite loss, gradient, reward or token weight: skip the update (for a reward: its group), or
    also stop the run. Non-finite model weights always stop the run."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        """Add the rules and thresholds that are not given."""
        if not isinstance(data, Mapping):
            return data
        limits: dict[str, Any] = {name: data.get(name, {}) for name in JUDGED}
        for name, limit in limits.items():
            if isinstance(limit, Mapping | Limit):
                limits[name] = {"threshold": JUDGED[name].threshold} | dict(limit)
        return dict(data) | limits

    @model_validator(mode="after")
    def _skips_in_time(self) -> HealthSpec:
        for name, limit in self.limits.items():
            if limit.action == "skip_step" and RULES[name].known != "before":
                raise ValueError(f"{name}.action = skip_step: is known after the updates only; set it to warn or stop")
        return self

    @property
    def limits(self) -> dict[str, Limit]:
        """Threshold and action by rule."""
        return self.__pydantic_extra__

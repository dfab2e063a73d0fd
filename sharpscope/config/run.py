"""The configuration of a run: its fields, and how it is built from YAML, options and `--set a.b=c`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from sharpscope.config.base import Spec, known_settings, validate
from sharpscope.config.method import Method
from sharpscope.config.methods import expand_method, method_label, named_method, with_token_weights
from sharpscope.config.policy import EMBEDDED_NAMES, EMBEDDED_PREFIX, PolicySpec, RolloutSpec
from sharpscope.config.probes import ProbesSpec
from sharpscope.config.reading import merge, merge_all, nested, parse_override, read_yaml
from sharpscope.config.tasks import KnightsKnavesSpec, TaskSpec
from sharpscope.config.training import (
    CheckpointSpec,
    EvaluationSpec,
    HealthSpec,
    OptimizerSpec,
    RecordingSpec,
    UpdateSpec,
)
from sharpscope.errors import UserError

CONFIG_FILE = "config.yaml"
"""Name of the configuration in a run's folder."""


class RunConfig(Spec):
    """Configuration of a run. Every field has a default; the default policy is an embedded one."""

    out: Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")] | None = None
    """Folder of the run; null: runs/<label>-<task>-s<seed>."""
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of training; the task's data has a separate seed.")
    steps: int = Field(100, ge=1, le=1_000_000)
    """Number of steps; each samples rollouts and updates the policy."""
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of torch; null: 1 for up to 20 MiB of weights, else OMP_NUM_THREADS or all physical cores."""
    task: TaskSpec = Field(default_factory=KnightsKnavesSpec, description="Prompts and their scoring.")
    policy: PolicySpec = Field(default_factory=PolicySpec, description="The model to train.")
    rollout: RolloutSpec = Field(default_factory=RolloutSpec, description="How completions are sampled.")
    method: Method = Field(default_factory=lambda: named_method("grpo"), description="The objective.")
    optimizer: OptimizerSpec = Field(default_factory=OptimizerSpec, description="AdamW and its schedule.")
    update: UpdateSpec = Field(default_factory=UpdateSpec, description="Mini-batches, inner epochs, microbatches.")
    evaluation: EvaluationSpec = Field(default_factory=EvaluationSpec)
    """When and on which prompts to evaluate."""
    recording: RecordingSpec = Field(default_factory=RecordingSpec, description="What is written to the traces.")
    probes: ProbesSpec = Field(default_factory=ProbesSpec)
    """Curvature and perturbation probes during training."""
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec, description="When checkpoints are saved.")
    health: HealthSpec = Field(default_factory=HealthSpec, description="Rules that detect failing runs.")

    @model_validator(mode="before")
    @classmethod
    def _learning_rate(cls, data: Any) -> Any:
        """The learning rate, where it is not given, depends on the policy."""
        optimizer = data.get("optimizer", {}) if isinstance(data, Mapping) else None
        if not isinstance(optimizer, Mapping) or optimizer.get("lr") is not None:
            return data
        policy = data.get("policy")
        model = policy.get("model") if isinstance(policy, Mapping) else getattr(policy, "model", None)
        lr = default_lr(EMBEDDED_PREFIX if model is None else str(model))
        return {**data, "optimizer": {**optimizer, "lr": lr}}

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        batches, prompts = self.update.mini_batches, self.rollout.prompts_per_step
        if batches > prompts:
            why = f"must be at most rollout.prompts_per_step = {prompts}, since groups are not split"
            raise ValueError(f"update.mini_batches = {batches} {why}; set update.mini_batches to 1 or more prompts")
        warmup = self.optimizer.warmup_steps
        if warmup >= self.steps:
            raise ValueError(f"optimizer.warmup_steps = {warmup} must be less than steps = {self.steps}")
        if self.policy.lora is not None and getattr(self.method.tokens, "kind", "") == "curvature":
            raise ValueError(
                "method.tokens.kind = curvature: needs the output layer's gradient; set policy.lora to null"
            )
        return self

    @property
    def run_dir(self) -> Path:
        """Path of the run's folder."""
        return Path("runs", f"{folder_name(self)}-s{self.seed}") if self.out is None else Path(self.out)

    @property
    def default_preset(self) -> Literal["paper", "calibrated"]:
        """The preset that `auto` selects: calibrated for the embedded policies, paper for any other model."""
        return "calibrated" if self.policy.model.startswith(EMBEDDED_PREFIX) else "paper"

    @property
    def resolved_method(self) -> Method:
        """The method, with preset `auto` of its token weights replaced."""
        return self.method.with_preset("auto", self.default_preset)


def default_lr(model: str) -> float:
    """The learning rate where none is given: 1e-4 for embedded policies, 1e-6 (as in TRL and verl) for other models."""
    return 1e-4 if model.startswith(EMBEDDED_PREFIX) else 1e-6


def folder_name(config: RunConfig) -> str:
    """`<label>-<task>` of a run as part of a folder's name."""
    label, task = (re.sub(r"[^A-Za-z0-9._+=-]+", "-", text) for text in (method_label(config.method), config.task.kind))
    return f"{label[:80].strip('-')}-{task}"


def build_config(
    file: Path | None = None,
    overrides: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    token_weights: str | None = None,
) -> RunConfig:
    """Build and validate a configuration from the defaults, a YAML file, values and overrides, in this order.

    Values are by field path, such as `{"optimizer.lr": 1e-4}`, overrides of the form `field.subfield=value`. `token_weights`
    are those of the method (`with_token_weights`).

    Raises:
        UserError: A field is unknown or invalid; the message names the field, the value and the fix.
    """
    return make_config(config_data(file, overrides, values), token_weights)


def read_recorded(folder: Path, values: Mapping[str, Any] | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a recorded run, also of version 0.2, with `out` set to its folder.

    Raises:
        UserError: the folder has no configuration, or a value is invalid.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        if (folder / "run.json").is_file():
            raise UserError(f"{folder}: was recorded from another trainer, so there is no configuration to go on from")
        problem = f"has no {CONFIG_FILE}" if folder.is_dir() else "does not exist"
        raise UserError(f"{folder}: {problem}; give the folder of a run")
    layers = [recorded_settings(read_yaml(file)), {"out": str(folder)}]
    layers += [nested(path, value) for path, value in (values or {}).items()]
    return make_config(merge_all([*layers, *map(parse_override, overrides)]))


def recorded_settings(data: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a recorded run that this version has; one with a `name` is of 0.2, which measured in another way."""
    if "name" in data:
        data = {part: value for part, value in data.items() if part not in ("recording", "probes", "health")}
    return known_settings(RunConfig, data)


def config_data(
    file: Path | None = None, overrides: Sequence[str] = (), values: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The settings of `build_config` as nested values, not validated."""
    layers = [] if file is None else [read_yaml(file)]
    layers += [nested(path, value) for path, value in (values or {}).items()]
    return merge_all([*layers, *map(parse_override, overrides)])


def make_config(data: Mapping[str, Any], token_weights: str | None = None) -> RunConfig:
    """Validate nested values as a configuration.

    Raises:
        UserError: A field is unknown or invalid.
    """
    if data.get("method") is not None:
        data = {**data, "method": expand_method(data["method"])}
    config: RunConfig = validate(RunConfig, _default_policy(data))
    method = config.method if token_weights is None else with_token_weights(config.method, token_weights)
    return config.model_copy(update={"method": _as_auto(method, config)})


def _as_auto(method: Method, config: RunConfig) -> Method:
    """A preset equal to the default becomes `auto`, so that equal methods have the same label."""
    return method.with_preset(config.default_preset, "auto")


def _default_policy(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Select the embedded policy of the task, if it has one and no model is set."""
    task, policy = data.get("task"), data.get("policy", {})
    kind = task.get("kind") if isinstance(task, Mapping) else None
    if not isinstance(kind, str) or kind not in EMBEDDED_NAMES or not isinstance(policy, Mapping) or "model" in policy:
        return data
    return merge(data, {"policy": {"model": f"{EMBEDDED_PREFIX}{kind}"}})

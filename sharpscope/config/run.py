"""The whole configuration of a run: parts composed, read from YAML, overridden by `--set a.b=c`, saved resolved."""

from __future__ import annotations

import re
import reprlib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from sharpscope.config.base import Spec
from sharpscope.config.method import Method
from sharpscope.config.named_methods import method_label, named_method
from sharpscope.config.policy import PolicySpec, RolloutSpec
from sharpscope.config.probes import ProbesSpec
from sharpscope.config.safe_yaml import YAML_ERRORS, YAML_LIMIT, load_yaml
from sharpscope.config.shaping_option import shaping_layer
from sharpscope.config.tasks import KnightsKnavesSpec, TaskSpec
from sharpscope.config.training import (
    CheckpointSpec,
    EvaluationSpec,
    HealthSpec,
    OptimizerSpec,
    RecordingSpec,
    UpdateSpec,
)
from sharpscope.config.warm_start import WARM_STARTS
from sharpscope.errors import UserError, nearest

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,127}")


class RunConfig(Spec):
    """One run. Every field has a default; `sharpscope run` without a file trains the embedded policy."""

    name: str | None = Field(None, description="Name of the run's folder; null: <method>-<task>-s<seed>.")
    out: str = Field("runs", description="Folder in which the run's folder is made.")
    seed: int = Field(
        0, ge=0, lt=2**31, description="Seed of everything random in training; the task's data has its own."
    )
    steps: int = Field(100, ge=1, le=1_000_000, description="Rounds of rollouts and learning [steps].")
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="CPU threads of torch; null: one for at most 20 MiB of weights, else all physical cores this process may use.",
    )
    task: TaskSpec = Field(default_factory=KnightsKnavesSpec, description="What is asked and how it is scored.")
    policy: PolicySpec = Field(default_factory=PolicySpec, description="The model.")
    rollout: RolloutSpec = Field(default_factory=RolloutSpec, description="How completions are drawn.")
    method: Method = Field(default_factory=lambda: named_method("grpo"), description="The objective, as data.")
    optimizer: OptimizerSpec = Field(default_factory=OptimizerSpec, description="AdamW and its schedule.")
    update: UpdateSpec = Field(default_factory=UpdateSpec, description="Mini-batches, inner epochs, microbatches.")
    evaluation: EvaluationSpec = Field(default_factory=EvaluationSpec, description="When and on what to evaluate.")
    recording: RecordingSpec = Field(default_factory=RecordingSpec, description="What is written to the traces.")
    probes: ProbesSpec = Field(
        default_factory=ProbesSpec, description="Curvature and perturbation probes while training."
    )
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec, description="When weights are saved.")
    health: HealthSpec = Field(default_factory=HealthSpec, description="Rules that speak before a run goes wrong.")

    @field_validator("name")
    @classmethod
    def _name(cls, value: str | None) -> str | None:
        if value is not None and not RUN_NAME.fullmatch(value):
            raise ValueError(
                "a folder name of letters, digits and . _ + = -, not starting with a dot, at most 128 characters"
            )
        return value

    @field_validator("out")
    @classmethod
    def _out(cls, value: str) -> str:
        if not value or "\0" in value:
            raise ValueError("a folder's path, not empty and without NUL characters")
        return value

    @model_validator(mode="after")
    def _enough_groups(self) -> RunConfig:
        if self.update.mini_batches > self.rollout.prompts_per_step:
            raise ValueError(
                f"update.mini_batches = {self.update.mini_batches} must be at most rollout.prompts_per_step = "
                f"{self.rollout.prompts_per_step}: a group stays whole"
            )
        return self

    @model_validator(mode="after")
    def _best_is_known(self) -> RunConfig:
        every, of = self.checkpoint.every, self.evaluation.every
        if self.checkpoint.keep_best and (not of or not every or every % of):
            raise ValueError(
                f"checkpoint.keep_best = {self.checkpoint.keep_best}: the best is known only where a checkpoint is evaluated; make "
                f"checkpoint.every = {every} a multiple of evaluation.every = {of}, both above 0"
            )
        return self

    @model_validator(mode="after")
    def _warms_up(self) -> RunConfig:
        warmup = self.optimizer.warmup_steps
        if warmup >= self.steps:
            raise ValueError(
                f"optimizer.warmup_steps = {warmup} must be below steps = {self.steps}: the run would end while the learning "
                "rate rises; lower it, or raise steps"
            )
        return self

    @model_validator(mode="after")
    def _step_is_the_gradients(self) -> RunConfig:
        kind = self.method.sharpness.kind
        if self.recording.update_attribution and kind != "none":
            raise ValueError(
                f"recording.update_attribution = true: with method.sharpness.kind = {kind} the step is not that of the gradient "
                "whose tokens are recorded; set recording.update_attribution to false"
            )
        return self

    @property
    def run_name(self) -> str:
        """The run's folder name."""
        if self.name is not None:
            return self.name
        label = re.sub(r"[^A-Za-z0-9._+=-]+", "-", method_label(self.method))[:80].strip("-")
        task = re.sub(r"[^A-Za-z0-9._+=-]+", "-", self.task.kind)
        return f"{label}-{task}-s{self.seed}"

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return Path(self.out) / self.run_name


def build_config(
    file: Path | None = None,
    overrides: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    shaping: str | None = None,
) -> RunConfig:
    """A validated configuration from defaults, then the YAML `file`, then `values`, then `key.path=value` overrides.

    `shaping` (a preset, or `module:function`) goes into the innermost weight of the method that these name.

    Raises UserError with one line that names the field, the value and the fix.
    """
    layers = [] if file is None else [read_yaml(file)]
    layers += [_nested(path, value) for path, value in (values or {}).items()]
    given = len(layers)
    layers += [parse_override(override) for override in overrides]
    if shaping is not None:
        # After the method's name, which would start the method afresh; before the overrides of single constants.
        named = [place for place, layer in enumerate(layers, 1) if _names_method(layer)]
        method = _expand_method({"method": {}, **_laid(layers)})["method"]
        layers.insert(max([given, *named]), shaping_layer(shaping, method))
    data = _own_policy(_fill_kinds(RunConfig, _expand_method(_laid(layers))))
    check_keys(RunConfig, data)
    return resolve_method(validate(RunConfig, data))


def _laid(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for layer in layers:
        data = merge(data, layer)
    return data


def _names_method(layer: Mapping[str, Any]) -> bool:
    method = layer.get("method")
    return isinstance(method, str) or (isinstance(method, Mapping) and "name" in method)


def _own_policy(data: dict[str, Any]) -> dict[str, Any]:
    """A task that an embedded policy was made for is played with that one, unless a model is named."""
    task, policy = data.get("task"), data.get("policy", {})
    kind = task.get("kind") if isinstance(task, Mapping) else None
    if not isinstance(kind, str) or kind not in WARM_STARTS or not isinstance(policy, Mapping) or "model" in policy:
        return data
    return {**data, "policy": {**policy, "model": f"embedded:{kind}"}}


def default_preset(config: RunConfig) -> Literal["paper", "calibrated"]:
    """What the shaping preset `auto` means: calibrated for the embedded policies, paper for any other model."""
    return "calibrated" if config.policy.model.startswith("embedded:") else "paper"


def resolve_method(config: RunConfig) -> RunConfig:
    """The configuration with a preset that is the default anyway written as `auto`, so that equal methods have one label."""
    weight = _default_as_auto(config.method.weight, default_preset(config))
    return config.model_copy(update={"method": config.method.model_copy(update={"weight": weight})})


def _default_as_auto(shaping: Any, default: str) -> Any:
    inner = getattr(shaping, "of", None)
    if inner is not None:
        return shaping.model_copy(update={"of": _default_as_auto(inner, default)})
    return shaping.model_copy(update={"preset": "auto"}) if getattr(shaping, "preset", None) == default else shaping


def explain_fields(config: RunConfig) -> list[str]:
    """One line a field: path, present value, allowed values, meaning."""
    return list(_explain(config, ""))


def _explain(part: BaseModel, prefix: str) -> typing.Iterator[str]:
    for name, info in type(part).model_fields.items():
        value = getattr(part, name)
        if isinstance(value, BaseModel):
            yield from _explain(value, f"{prefix}{name}.")
            continue
        limits = ", ".join(str(limit) for limit in info.metadata)
        kind = (
            str(info.annotation).replace("typing.", "")
            if not isinstance(info.annotation, type)
            else info.annotation.__name__
        )
        yield f"{prefix}{name} = {value!r}  [{kind}{'; ' + limits if limits else ''}]  {info.description or ''}"


def _fill_kinds(model: type[BaseModel], data: Mapping[str, Any]) -> dict[str, Any]:
    """A part given without its `kind` has the default's, so that `--set task.people=4` needs no `--set task.kind=…`."""
    filled = dict(data)
    for name, info in model.model_fields.items():
        value = filled.get(name)
        if not isinstance(value, Mapping):
            continue
        default = info.get_default(call_default_factory=True)
        if "kind" not in value and isinstance(default, BaseModel) and "kind" in type(default).model_fields:
            value = {"kind": default.kind, **value}  # type: ignore[attr-defined]
        part = part_model(info.annotation, value)
        filled[name] = value if part is None else _fill_kinds(part, value)
    return filled


def validate(model: type[typing.Any], data: Mapping[str, Any]) -> typing.Any:
    """`model.model_validate`, with pydantic's findings turned into one UserError line."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = []
        for finding in error.errors()[:3]:
            place = ".".join(str(part) for part in _plain_location(finding["loc"], data)) or "config"
            value = "" if isinstance(finding["input"], Mapping) else f" = {_short(finding['input'])}"
            message = finding["msg"].removeprefix("Value error, ")
            lines.append(f"{place}{value}: {message[0].lower() + message[1:]}")
        more = f" (and {error.error_count() - 3} more)" if error.error_count() > 3 else ""
        raise UserError("; ".join(lines) + more) from None


def read_yaml(file: Path) -> dict[str, Any]:
    """A YAML mapping, read with `yaml.safe_load`."""
    try:
        with file.open("rb") as stream:
            content = stream.read(YAML_LIMIT + 1)
        if len(content) > YAML_LIMIT:
            raise UserError(f"config file '{file}': is larger than {YAML_LIMIT:,} bytes, so it is no configuration")
        data = load_yaml(content.decode("utf-8"))
    except FileNotFoundError:
        raise UserError(f"config file '{file}' does not exist; give the path of a YAML file, or leave it out") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config file '{file}' cannot be read: {error}") from None
    except YAML_ERRORS as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where is not None else ""
        raise UserError(
            f"config file '{file}'{line}: not valid YAML ({getattr(error, 'problem', None) or error})"
        ) from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UserError(f"config file '{file}': must be a mapping of field names to values, not {type(data).__name__}")
    return data


def parse_override(text: str) -> dict[str, Any]:
    """`a.b=c` as `{"a": {"b": c}}`, the value read as YAML."""
    path, sign, raw = text.partition("=")
    if not sign or not path.strip():
        raise UserError(f"--set {text}: must look like field.subfield=value")
    try:
        value = load_yaml(raw)
    except YAML_ERRORS:
        raise UserError(f"--set {text}: the value is not valid YAML; put text in quotes") from None
    if isinstance(value, str):
        # YAML 1.1 reads 1e-4 as text; a person means the number.
        value = float(value) if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value) else value
    return _nested(path.strip(), value)


def merge(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """`extra` laid over `base`, deeply; a part that changes its `kind` (or a method its `name`) starts afresh.

    A part that had none keeps its settings when it gets one: those that do not fit are a mistake, which `check_keys` names.
    """
    result = dict(base)
    for key, given in extra.items():
        old = result.get(key)
        value = {"name": given} if key == "method" and isinstance(given, str) else given
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            changed = any(tag in value and tag in old and value[tag] != old[tag] for tag in ("kind", "name"))
            result[key] = dict(value) if changed else merge(old, value)
        else:
            result[key] = value
    return result


def check_keys(model: type[BaseModel], data: Mapping[str, Any], place: str = "") -> None:
    """UserError for the first key that `model` (or a part of it) does not have, with the nearest valid name."""
    fields = model.model_fields
    for key, value in data.items():
        here = f"{place}.{key}" if place else str(key)
        if key not in fields:
            raise UserError(f"{here}: unknown field{nearest(str(key), fields)}")
        if isinstance(value, Mapping):
            part = part_model(fields[key].annotation, value)
            if part is not None:
                check_keys(part, value, here)
            elif "kind" in value and (kinds := _kinds(fields[key].annotation)):
                raise UserError(
                    f"{here}.kind = {_short(value['kind'])}: unknown{nearest(str(value['kind']), map(str, kinds))}"
                )


def part_model(annotation: Any, value: Mapping[str, Any]) -> type[BaseModel] | None:
    """The model of a union's member that `value` means: by `kind`, or the only one."""
    kinds, members = _kinds(annotation), list(_models(annotation))
    kind = value.get("kind")
    if isinstance(kind, str) and kind in kinds:
        return kinds[kind]
    return members[0] if len(members) == 1 else None


def _kinds(annotation: Any) -> dict[Any, type[BaseModel]]:
    return {kind: part for part in _models(annotation) if "kind" in part.model_fields for kind in _literals(part)}


def to_yaml(config: BaseModel) -> str:
    """The resolved configuration as YAML that `build_config` reads back to the same value."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _expand_method(data: Mapping[str, Any]) -> dict[str, Any]:
    """`method: {name: grpo-sg, weight: {...}}` laid over the named method, so that an ablation names only what it changes."""
    given = data.get("method")
    if given is None:
        return dict(data)
    if isinstance(given, str):
        given = {"name": given}
    if not isinstance(given, Mapping):
        raise UserError(f"method = {_short(given)}: must be a method's name or a mapping with a name")
    base = named_method(str(given.get("name", "grpo"))).model_dump(mode="json")
    return {**data, "method": merge(base, given)}


def _nested(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return typing.cast("dict[str, Any]", value)


def _models(annotation: Any) -> typing.Iterator[type[BaseModel]]:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        yield from _models(typing.get_args(annotation)[0])
    elif origin in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from _models(member)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation


def _literals(model: type[BaseModel]) -> tuple[Any, ...]:
    return typing.get_args(model.model_fields["kind"].annotation)


def _plain_location(location: tuple[int | str, ...], data: Any) -> list[int | str]:
    """Pydantic's location without the names of union members, which no user wrote."""
    plain: list[int | str] = []
    for index, part in enumerate(location):
        if isinstance(data, Mapping) and part not in data and index + 1 < len(location):
            continue
        plain.append(part)
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, Sequence) and isinstance(part, int) and part < len(data):
            data = data[part]
    return plain


def _short(value: Any) -> str:
    text = reprlib.repr(value)  # never walks a large value
    return text if len(text) <= 60 else text[:57] + "..."

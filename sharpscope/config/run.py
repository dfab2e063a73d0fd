"""The configuration of a run: build it from YAML, options and `--set a.b=c`, validate it, write it as YAML."""

from __future__ import annotations

import json
import re
import reprlib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from sharpscope.config.base import Spec
from sharpscope.config.method import Method
from sharpscope.config.named_methods import method_label, named_method
from sharpscope.config.policy import EMBEDDED_NAMES, PolicySpec, RolloutSpec
from sharpscope.config.probes import ProbesSpec
from sharpscope.config.safe_yaml import YAML_ERRORS, YAML_LIMIT, load_yaml
from sharpscope.config.tasks import KnightsKnavesSpec, TaskSpec
from sharpscope.config.token_weights import token_weight_kinds
from sharpscope.config.training import (
    CheckpointSpec,
    EvaluationSpec,
    HealthSpec,
    OptimizerSpec,
    RecordingSpec,
    UpdateSpec,
)
from sharpscope.errors import UserError, nearest

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,127}")


class RunConfig(Spec):
    """Configuration of a run. Every field has a default; the default policy is an embedded one."""

    name: str | None = Field(None, description="Name of the run's folder; null: <method>-<task>-s<seed>.")
    out: str = Field("runs", description="Parent folder of the run's folder.")
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of training; the task's data has a separate seed.")
    steps: int = Field(
        100, ge=1, le=1_000_000, description="Number of steps; each samples rollouts and updates the policy."
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="CPU threads of torch; null: 1 for up to 20 MiB of weights, else all physical cores available to the process.",
    )
    task: TaskSpec = Field(default_factory=KnightsKnavesSpec, description="Prompts and their scoring.")
    policy: PolicySpec = Field(default_factory=PolicySpec, description="The model to train.")
    rollout: RolloutSpec = Field(default_factory=RolloutSpec, description="How completions are sampled.")
    method: Method = Field(default_factory=lambda: named_method("grpo"), description="The objective.")
    optimizer: OptimizerSpec = Field(default_factory=OptimizerSpec, description="AdamW and its schedule.")
    update: UpdateSpec = Field(default_factory=UpdateSpec, description="Mini-batches, inner epochs, microbatches.")
    evaluation: EvaluationSpec = Field(
        default_factory=EvaluationSpec, description="When and on which prompts to evaluate."
    )
    recording: RecordingSpec = Field(default_factory=RecordingSpec, description="What is written to the traces.")
    probes: ProbesSpec = Field(
        default_factory=ProbesSpec, description="Curvature and perturbation probes during training."
    )
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec, description="When checkpoints are saved.")
    health: HealthSpec = Field(default_factory=HealthSpec, description="Rules that detect failing runs.")

    @field_validator("name")
    @classmethod
    def _name(cls, value: str | None) -> str | None:
        if value is not None and not RUN_NAME.fullmatch(value):
            raise ValueError("must be at most 128 letters, digits and . _ + = -, starting with a letter or a digit")
        return value

    @field_validator("out")
    @classmethod
    def _out(cls, value: str) -> str:
        if not value or "\0" in value:
            raise ValueError("must be a folder's path, not empty and without NUL characters")
        return value

    @model_validator(mode="after")
    def _enough_groups(self) -> RunConfig:
        if self.update.mini_batches > self.rollout.prompts_per_step:
            raise ValueError(
                f"update.mini_batches = {self.update.mini_batches} must be at most rollout.prompts_per_step = "
                f"{self.rollout.prompts_per_step}, since groups are not split; set update.mini_batches to 1 or more prompts"
            )
        return self

    @model_validator(mode="after")
    def _best_is_evaluated(self) -> RunConfig:
        every, of = self.checkpoint.every, self.evaluation.every
        if self.checkpoint.keep_best and (not of or not every or every % of):
            raise ValueError(
                f"checkpoint.keep_best = {self.checkpoint.keep_best}: needs an evaluation of every checkpoint; make "
                f"checkpoint.every = {every} a multiple of evaluation.every = {of}, both above 0"
            )
        return self

    @model_validator(mode="after")
    def _warms_up(self) -> RunConfig:
        warmup = self.optimizer.warmup_steps
        if warmup >= self.steps:
            raise ValueError(f"optimizer.warmup_steps = {warmup} must be less than steps = {self.steps}")
        return self

    @model_validator(mode="after")
    def _attribution_without_sharpness(self) -> RunConfig:
        kind = self.method.sharpness.kind
        if self.recording.update_attribution and kind != "none":
            raise ValueError(
                f"recording.update_attribution = true: not available with method.sharpness.kind = {kind}, whose update uses the "
                "gradient at another point; set recording.update_attribution to false"
            )
        return self

    @property
    def run_name(self) -> str:
        """Name of the run's folder."""
        if self.name is not None:
            return self.name
        label = re.sub(r"[^A-Za-z0-9._+=-]+", "-", method_label(self.method))[:80].strip("-")
        task = re.sub(r"[^A-Za-z0-9._+=-]+", "-", self.task.kind)
        return f"{label}-{task}-s{self.seed}"

    @property
    def run_dir(self) -> Path:
        """Path of the run's folder."""
        return Path(self.out) / self.run_name


def build_config(
    file: Path | None = None,
    overrides: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    shaping: str | None = None,
) -> RunConfig:
    """Build and validate a configuration from the defaults, a YAML file, values and overrides, in this order.

    Args:
        file: YAML file.
        values: Field paths and values, such as `{"optimizer.lr": 1e-4}`.
        overrides: Strings of the form `field.subfield=value`.
        shaping: Token weights of the method: `paper`, `calibrated` or `module:function`. A control keeps its kind and
            applies to them.

    Raises:
        UserError: A field is unknown or invalid; the message names the field, the value and the fix.
    """
    layers = [] if file is None else [read_yaml(file)]
    layers += [_nested(path, value) for path, value in (values or {}).items()]
    before_overrides = len(layers)
    layers += [parse_override(override) for override in overrides]
    if shaping is not None:
        # After the last layer that names the method (it resets the method), before overrides of single constants.
        naming = [index for index, layer in enumerate(layers, 1) if _names_method(layer)]
        method = expand_method({"method": {}, **_merge_all(layers)})["method"]
        layers.insert(max([before_overrides, *naming]), _weight_layer(shaping, method))
    data = _default_policy(_fill_kinds(RunConfig, expand_method(_merge_all(layers))))
    check_keys(RunConfig, data)
    return resolve_method(validate(RunConfig, data))


def _merge_all(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for layer in layers:
        data = merge(data, layer)
    return data


def _names_method(layer: Mapping[str, Any]) -> bool:
    method = layer.get("method")
    return isinstance(method, str) or (isinstance(method, Mapping) and "name" in method)


def _weight_layer(text: str, method: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that give a complete `method` the token weights `text` (`--token-weights`).

    A wrapper (shuffled, reverse, constant, mean_one) keeps its kind; the innermost weight changes.
    """
    if ":" in text:
        value = {"kind": "custom", "function": text}
    elif text in ("paper", "calibrated"):
        value = {"preset": text}
    else:
        raise UserError(f"--token-weights {text}: must be paper, calibrated, or module:function")
    weight, depth = method.get("weight"), 0
    while isinstance(weight, Mapping) and _is_wrapper(weight):
        weight, depth = weight.get("of"), depth + 1
    kind = weight.get("kind") if isinstance(weight, Mapping) else None
    name = method.get("name")
    if kind == "entropy":
        raise UserError(
            f"--token-weights {text}: not available for method {name}, whose weights depend on the entropy; "
            "remove --token-weights, or choose another control such as -shuffled"
        )
    if "preset" in value and kind not in (None, "sigmoid"):
        raise UserError(
            f"--token-weights {text}: applies to sigmoid weights, and those of method {name} are {kind}; "
            "choose a method such as grpo-sg, or remove --token-weights"
        )
    layer: dict[str, Any] = value
    for _ in range(depth):
        layer = {"of": layer}
    return {"method": {"weight": layer}}


def _is_wrapper(weight: Mapping[str, Any]) -> bool:
    kind = weight.get("kind")
    model = token_weight_kinds().get(kind) if isinstance(kind, str) else None
    return model is not None and "of" in model.model_fields


def _default_policy(data: dict[str, Any]) -> dict[str, Any]:
    """Select the embedded policy of the task, if it has one and no model is set."""
    task, policy = data.get("task"), data.get("policy", {})
    kind = task.get("kind") if isinstance(task, Mapping) else None
    if not isinstance(kind, str) or kind not in EMBEDDED_NAMES or not isinstance(policy, Mapping) or "model" in policy:
        return data
    return {**data, "policy": {**policy, "model": f"embedded:{kind}"}}


def default_preset(config: RunConfig) -> Literal["paper", "calibrated"]:
    """The preset that `auto` selects: calibrated for the embedded policies, paper for any other model."""
    return "calibrated" if config.policy.model.startswith("embedded:") else "paper"


def resolve_method(config: RunConfig) -> RunConfig:
    """Replace a preset equal to the default by `auto`, so that equal methods have the same label."""
    return config.model_copy(update={"method": config.method.with_preset(default_preset(config), "auto")})


def explain_fields(config: RunConfig) -> list[str]:
    """One line per field: path, current value, allowed values and description; parts with a description have a line, too."""
    return explain_part(config, "")


def explain_part(part: BaseModel, prefix: str) -> list[str]:
    """`explain_fields` of any configuration model; `prefix` comes before each path."""
    return list(_explain(part, prefix, ()))


def _explain(part: BaseModel, prefix: str, kinds: typing.Collection[Any]) -> typing.Iterator[str]:
    for name, info in type(part).model_fields.items():
        value, path = getattr(part, name), f"{prefix}{name}"
        if isinstance(value, BaseModel):
            if info.description:
                yield f"{path}: {info.description}"
            yield from _explain(value, f"{path}.", kinds_of(info.annotation))
            continue
        shown = json.dumps(value, ensure_ascii=False, default=lambda part: part.model_dump())  # also valid YAML
        allowed, description = type_text(info.annotation, info.metadata), info.description
        if name == "kind" and kinds:
            allowed, description = type_text(Literal[tuple(kinds)]), "Fields below are those of the current kind."
        yield f"{path} = {shown}  [{allowed}]  {description or ''}"


def type_text(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type and its limits for users, such as `int, >= 2, <= 7 | null`."""
    arguments = typing.get_args(annotation)
    match typing.get_origin(annotation):
        case typing.Annotated:
            return type_text(arguments[0], (*arguments[1:], *metadata))
        case typing.Literal:
            text = " | ".join(json.dumps(value) for value in arguments)
        case typing.Union | types.UnionType:
            text = " | ".join(type_text(member) for member in arguments)
        case builtin if builtin in (tuple, list):
            member = type_text(arguments[0])
            text = f"list of {f'({member})' if ' ' in member else member}"
        case builtin if builtin in (dict, Mapping):
            text = "mapping"
        case _:
            text = "null" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))
    return ", ".join([text, *_limits(metadata)])


def _limits(metadata: Sequence[Any]) -> typing.Iterator[str]:
    """The numeric and length limits among the metadata of a type; validators are functions and are left out."""
    for limit in metadata:
        yield from _limits(getattr(limit, "metadata", ()))
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"), ("min_length", "length >=")):
            bound = getattr(limit, name, None)
            if bound is not None:
                yield f"{sign} {bound}"


def _fill_kinds(model: type[BaseModel], data: Mapping[str, Any]) -> dict[str, Any]:
    """Add the default `kind` to parts without one, so that `--set task.people=4` needs no `--set task.kind=…`."""
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
    """Validate `data` with `model.model_validate`.

    Raises:
        UserError: The data is invalid; one line with up to three of pydantic's errors.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = []
        for details in error.errors()[:3]:
            path = ".".join(str(part) for part in _field_path(details["loc"], data)) or "config"
            value = "" if isinstance(details["input"], Mapping) else f" = {_short(details['input'])}"
            message = details["msg"].removeprefix("Value error, ")
            lines.append(f"{path}{value}: {message[0].lower() + message[1:]}")
        more = f" (and {error.error_count() - 3} more)" if error.error_count() > 3 else ""
        raise UserError("; ".join(lines) + more) from None


def read_yaml(file: Path) -> dict[str, Any]:
    """Read a YAML mapping with a safe loader.

    Raises:
        UserError: The file is missing, unreadable, too large, or not a YAML mapping.
    """
    try:
        with file.open("rb") as stream:
            content = stream.read(YAML_LIMIT + 1)
        if len(content) > YAML_LIMIT:
            raise UserError(f"config file '{file}': is larger than {YAML_LIMIT:,} bytes; give a configuration file")
        data = load_yaml(content.decode("utf-8"))
    except FileNotFoundError:
        raise UserError(f"config file '{file}' does not exist; give the path of a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config file '{file}' cannot be read: {error}") from None
    except YAML_ERRORS as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise UserError(
            f"config file '{file}'{line}: not valid YAML ({getattr(error, 'problem', None) or error})"
        ) from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UserError(f"config file '{file}': must be a mapping of field names to values, not {type(data).__name__}")
    return data


def parse_override(text: str) -> dict[str, Any]:
    """Parse `a.b=c` into `{"a": {"b": c}}`, with the value read as YAML.

    Raises:
        UserError: The text has another form, or the value is not valid YAML.
    """
    path, sign, raw = text.partition("=")
    if not sign or not path.strip():
        raise UserError(f"--set {text}: must have the form field.subfield=value")
    try:
        value = load_yaml(raw)
    except YAML_ERRORS:
        raise UserError(f"--set {text}: the value is not valid YAML; put text in quotes") from None
    if isinstance(value, str):
        # YAML 1.1 reads 1e-4 as a string.
        value = float(value) if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value) else value
    return _nested(path.strip(), value)


def parse_overrides(texts: Iterable[str]) -> dict[str, Any]:
    """Parse several overrides (see `parse_override`) and merge them in order."""
    return _merge_all([parse_override(text) for text in texts])


def merge(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `extra` into `base` recursively; a part whose `kind` (or a method whose `name`) changes is replaced.

    A part without a `kind` keeps its settings when it gets one; `check_keys` rejects settings that do not apply.
    """
    result = dict(base)
    for key, new in extra.items():
        old = result.get(key)
        value = {"name": new} if key == "method" and isinstance(new, str) else new
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            changed = any(tag in value and tag in old and value[tag] != old[tag] for tag in ("kind", "name"))
            result[key] = dict(value) if changed else merge(old, value)
        else:
            result[key] = value
    return result


def check_keys(model: type[BaseModel], data: Mapping[str, Any], prefix: str = "") -> None:
    """Check that `model` and its parts have all keys of `data`.

    Raises:
        UserError: A key is unknown; the message suggests the nearest valid name.
    """
    fields = model.model_fields
    for key, value in data.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if key not in fields:
            raise UserError(f"{path}: unknown field{nearest(str(key), fields)}")
        if isinstance(value, Mapping):
            part = part_model(fields[key].annotation, value)
            if part is not None:
                check_keys(part, value, path)
            elif "kind" in value and (kinds := kinds_of(fields[key].annotation)):
                raise UserError(
                    f"{path}.kind = {_short(value['kind'])}: unknown{nearest(str(value['kind']), map(str, kinds))}"
                )


def part_model(annotation: Any, value: Mapping[str, Any]) -> type[BaseModel] | None:
    """The model in a union that `value` selects by its `kind`, or the only model."""
    kinds, members = kinds_of(annotation), list(_models(annotation))
    kind = value.get("kind")
    if isinstance(kind, str) and kind in kinds:
        return kinds[kind]
    return members[0] if len(members) == 1 else None


def kinds_of(annotation: Any) -> dict[Any, type[BaseModel]]:
    """The models of a union by `kind`; empty for other types."""
    return {kind: part for part in _models(annotation) if "kind" in part.model_fields for kind in _literals(part)}


def to_yaml(config: BaseModel) -> str:
    """Return the configuration as YAML; `build_config` reads it back to the same value."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def expand_method(data: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `method: {name: grpo-sg, weight: {...}}` into the named method, so that an ablation lists only its changes."""
    given = data.get("method")
    if given is None:
        return dict(data)
    if isinstance(given, str):
        given = {"name": given}
    if not isinstance(given, Mapping):
        raise UserError(f"method = {_short(given)}: must be a method's name or a mapping with a name")
    base = named_method(str(given.get("name", "grpo"))).model_dump(mode="json")
    if isinstance(given.get("weight"), Mapping):
        given = {**given, "weight": _counting_tokens(given["weight"])}
    return {**data, "method": merge(base, given)}


def _counting_tokens(weight: Mapping[str, Any]) -> dict[str, Any]:
    """A weight as version 0.1 wrote it, with all fields but those of 0.2: then it means their class defaults.

    Without this, the named method would fill in its own: `grpo-sg` has counted tokens by their gradient since 0.2.
    """
    data = dict(weight)
    kind = data.get("kind")
    model = token_weight_kinds().get(kind) if isinstance(kind, str) else None
    if isinstance(data.get("of"), Mapping):
        data["of"] = _counting_tokens(data["of"])
    if model is not None:
        missing = set(model.model_fields) - set(data)
        if missing and missing <= {"percentiles", "matched"}:
            data |= {name: model.model_fields[name].default for name in missing}
    return data


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


def _field_path(location: tuple[int | str, ...], data: Any) -> list[int | str]:
    """Pydantic's error location without the names of union members."""
    path: list[int | str] = []
    for index, part in enumerate(location):
        if isinstance(data, Mapping) and part not in data and index + 1 < len(location):
            continue
        path.append(part)
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, Sequence) and isinstance(part, int) and part < len(data):
            data = data[part]
    return path


def _short(value: Any) -> str:
    text = reprlib.repr(value)  # bounded for large values
    return text if len(text) <= 60 else text[:57] + "..."

"""Base class of the configuration models, and functions that validate and describe any of them.

Mistakes raise `UserError` in this package: one line with the field, the value and the fix.
"""

from __future__ import annotations

import json
import reprlib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sharpscope.errors import UserError, nearest

M = typing.TypeVar("M", bound=BaseModel)

MOST = 2**31
"""Bound on the whole numbers of a configuration."""


class Spec(BaseModel):
    """Base of every configuration model: frozen, rejects unknown keys and non-finite numbers, validates defaults."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
    similar_fields: ClassVar[Mapping[str, type[BaseModel]]] = {}
    """Further fields by name, which are described once in lists of settings."""

    @model_validator(mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, data: object) -> object:
        """Pydantic would take true as the number 1."""
        for name, value in data.items() if isinstance(data, Mapping) else ():
            if name not in cls.model_fields:
                continue
            types_ = set(plain_types(cls.model_fields[name].annotation))
            inside = _numbers_inside(cls.model_fields[name].annotation)
            members = list(value) if isinstance(value, list | tuple) else []
            if isinstance(value, Mapping):
                members = list(value.values())
            wrong = isinstance(value, bool) and types_ & {int, float} and not types_ & {bool, Any}
            if wrong or (inside and any(isinstance(member, bool) for member in members)):
                raise ValueError(f"{name} = {value}: must be a number, not true or false")
        return data

    @model_validator(mode="after")
    def _no_boundless_number(self) -> Self:
        """Sizes and counts fit in 32 bits; a larger one would end in an error far from here."""
        for name, value in self:
            if isinstance(value, int) and abs(value) >= MOST and name != "seed":
                raise ValueError(f"{name} = {value:.3g}: must be below {MOST:,}")
        return self


def _numbers_inside(annotation: object) -> bool:
    """Whether a container's members are numbers, so that true is none of them."""
    for kind in (annotation, *typing.get_args(annotation)):
        parts = typing.get_args(kind) if typing.get_origin(kind) in CONTAINERS else ()
        members = {each for part in parts if part is not ... for each in plain_types(part)}
        if members & {int, float} and not members & {bool, Any}:
            return True
    return False


CONTAINERS = (list, tuple, dict, Sequence, Mapping)
CONSTANTS: dict[str, object] = {
    "L": 0.0,
    "U": 1.0,
    "beta1": 0.9,
    "coef": 1.0,
    "exclude": [],
    "input": "logit",
    "kind": "linear",
    "penalty": 0.04,
    "probability": 0.002,
    "quantile": 0.75,
    "radius": 0.05,
    "share": 0.1,
    "sign": "positive",
    "target_modules": "all-linear",
    "threshold": 0.5,
    "top_k": 0,
    "truncated": "keep",
}
"""Settings of earlier versions that change a training and are constants now, with these values."""


class Schedule(Spec):
    """A constant that changes over training: start + (end − start)·progress/until (progress 0: first step, 1: last)."""

    start: float = Field(description="Value at progress 0, in the unit of the field.")
    end: float = Field(description="Value at progress `until` and after it.")
    until: float = Field(1.0, gt=0, le=1)
    """Progress at which `end` is reached; 0.8: after 80 % of the steps."""

    def value(self, progress: float) -> float:
        """The constant at `progress` in [0, 1]."""
        return self.start + (self.end - self.start) * min(progress / self.until, 1.0)


class Part(Spec):
    """A part of a method; fields that accept a `Schedule` become numbers by `at(progress)`."""

    def at(self, progress: float) -> Self:
        """The same part with every schedule, also in nested parts, replaced by its value at `progress` in [0, 1]."""
        changed: dict[str, object] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Schedule):
                changed[name] = value.value(progress)
            elif isinstance(value, Part) and (resolved := value.at(progress)) is not value:
                changed[name] = resolved
        return self.replace(**changed) if changed else self

    def replace(self, **changes: object) -> Self:
        """The same part with other values, validated."""
        return type(self).model_validate(
            {name: getattr(self, name) for name in type(self).model_fields} | changes
        )


Positive = Annotated[float, Field(gt=0)] | Schedule
NonNegative = Annotated[float, Field(ge=0)] | Schedule
Real = float | Schedule
Share = Annotated[float, Field(ge=0, le=1)] | Schedule


def plain_types(annotation: object) -> typing.Iterator[object]:
    """Yield the members of a union, without the `Annotated` around them."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        yield from plain_types(arguments[0])
    elif origin in (typing.Union, types.UnionType):
        for member in arguments:
            yield from plain_types(member)
    else:
        yield annotation


def _models(annotation: object) -> list[type[BaseModel]]:
    """The models in a union."""
    return [
        member
        for member in plain_types(annotation)
        if isinstance(member, type) and issubclass(member, BaseModel)
    ]


def kinds_of(annotation: object) -> dict[str, type[BaseModel]]:
    """The models of a union by `kind`; empty for other types."""
    models = [model for model in _models(annotation) if "kind" in model.model_fields]
    return {
        kind: model
        for model in models
        for kind in typing.get_args(model.model_fields["kind"].annotation)
    }


def part_model(annotation: object, value: Mapping[str, object]) -> type[BaseModel] | None:
    """The model in a union that `value` selects by its `kind`, or the only model."""
    kinds = kinds_of(annotation)
    members = _models(annotation)
    kind = value.get("kind")
    if isinstance(kind, str) and kind in kinds:
        return kinds[kind]
    if len(members) != 1:
        return None
    field = members[0].model_fields.get("kind")
    has_default = kind is None and field is not None and not field.is_required()
    return members[0] if len(kinds) < 2 or has_default else None


def annotations_of(model: type[BaseModel]) -> dict[str, object]:
    """The type of every field."""
    similar: Mapping[str, object] = getattr(model, "similar_fields", {})
    return {name: info.annotation for name, info in model.model_fields.items()} | dict(similar)


def check_keys(model: type[BaseModel], data: Mapping[str, object], prefix: str = "") -> None:
    """Check that `model` and its parts have all keys and kinds of `data`."""
    fields = annotations_of(model)
    for key, value in data.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if key not in fields:
            raise UserError(f"{path}: unknown field{nearest(str(key), fields)}")
        if not isinstance(value, Mapping):
            continue
        part = part_model(fields[key], value)
        kinds = kinds_of(fields[key])
        if part is not None:
            check_keys(part, value, path)
        elif kinds:
            named = f" = {short(value['kind'])}: unknown" if "kind" in value else ": missing"
            null = f", or set {path} to null" if type(None) in plain_types(fields[key]) else ""
            raise UserError(f"{path}.kind{named}{nearest(str(value.get('kind', '')), kinds)}{null}")


def known_settings(model: type[BaseModel], data: Mapping[str, object]) -> dict[str, object]:
    """Recorded settings without those that `model` and its parts no longer have."""
    fields = annotations_of(model)
    known: dict[str, object] = {}
    for name, value in data.items():
        if name in fields:
            part = part_model(fields[name], value) if isinstance(value, Mapping) else None
            known[name] = (
                known_settings(part, value)
                if part is not None and isinstance(value, Mapping)
                else value
            )
        elif value != CONSTANTS.get(name, value):
            raise UserError(
                f"{name} = {short(value)}: recorded by an earlier version; now it is {CONSTANTS[name]} always"
            )
    return known


def validate(model: type[M], data: Mapping[str, object], prefix: str = "") -> M:
    """The model of `data`, whose place in a configuration is `prefix`."""
    check_keys(model, data, prefix)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines: dict[str, str] = {}
        for details in error.errors():
            path = (
                ".".join(map(str, [*filter(None, [prefix]), *_field_path(details["loc"], data)]))
                or "config"
            )
            value = "" if isinstance(details["input"], Mapping) else f" = {short(details['input'])}"
            message = details["msg"].removeprefix("Value error, ")
            if message[1:2].islower():  # a sentence; not a symbol such as L
                message = message[0].lower() + message[1:]
            lines.setdefault(path, f"{path}{value}: {message}")
        raise UserError("; ".join(list(lines.values())[:3])) from None


def _field_path(location: tuple[int | str, ...], data: object) -> list[int | str]:
    """Pydantic's error location without the names of union members."""
    path: list[int | str] = []
    for index, part in enumerate(location):
        if isinstance(data, Mapping) and (part in data or index + 1 == len(location)):
            path = [*path, part]
            data = data.get(part)
        elif isinstance(data, list | tuple) and isinstance(part, int):
            path = [*path, part]
            data = data[part]
    return path


def short(value: object) -> str:
    """`repr` of a value in at most 60 characters."""
    text = reprlib.repr(value)  # bounded for large values
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class SettingInfo:
    """A field of a configuration: its path, the kind of part that has it (empty: any), default, values and description."""

    path: str
    kind: str
    default: str
    values: str
    description: str


def settings_of(
    model: type[BaseModel],
    prefix: str = "",
    kind: str = "",
    parents: tuple[type[BaseModel], ...] = (),
) -> typing.Iterator[SettingInfo]:
    """Every field of a model and of its parts, for each kind that a part may have; parts of `parents` are left out."""
    for name, info in model.model_fields.items():
        if name == "kind" and kind:
            continue
        path = f"{prefix}{name}"
        types_ = set(plain_types(info.annotation))
        default = "" if info.is_required() else info.get_default(call_default_factory=True)
        kinds = {} if types_ & {int, float} else kinds_of(info.annotation)
        parts = list(kinds.items()) or [
            ("", part) for part in _models(info.annotation) if not types_ & {int, float}
        ]
        if isinstance(default, BaseModel):
            shown = str(getattr(default, "kind", ""))
        else:
            # also valid YAML
            shown = "required" if info.is_required() else json.dumps(default, ensure_ascii=False)
        values = " | ".join([*kinds, *(["null"] if type(None) in types_ else [])]) if parts else ""
        text = " ".join((info.description or "").split())
        if values or not parts:  # else a section, which has no value of its own
            yield SettingInfo(
                path,
                kind,
                shown,
                values if parts else type_text(info.annotation, info.metadata),
                text,
            )
        for each, part in parts:
            # a weighting of a weighting, questions of another task: listed once
            if part not in parents:
                yield from settings_of(
                    part,
                    f"{path}.",
                    each or kind,
                    (*parents, model, *kinds.values()),
                )
    for part in set(getattr(model, "similar_fields", {}).values()):
        for row in settings_of(part, f"{prefix}<name>.", kind, (*parents, model)):
            yield replace(row, default=row.default.replace("required", ""))


def type_text(annotation: object, metadata: Sequence[object] = ()) -> str:
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
            text = (
                "null"
                if annotation is type(None)
                else getattr(annotation, "__name__", str(annotation))
            )
            text = "a schedule {start, end, until}" if annotation is Schedule else text
    return ", ".join([text, *_limits(metadata)])


def _limits(metadata: Sequence[object]) -> typing.Iterator[str]:
    """Numeric and length limits among the metadata of a type."""
    for limit in metadata:
        yield from _limits(getattr(limit, "metadata", ()))
        for name, sign in (
            ("ge", ">="),
            ("gt", ">"),
            ("le", "<="),
            ("lt", "<"),
            ("min_length", "length >="),
        ):
            bound = getattr(limit, name, None)
            if bound is not None:
                yield f"{sign} {bound}"

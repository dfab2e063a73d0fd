"""Base class of the configuration models."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Spec(BaseModel):
    """Base of every configuration model: frozen, rejects unknown keys and non-finite numbers, validates defaults."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _reject_bool_for_number(cls, data: Any) -> Any:
        """YAML reads `yes` as true, which pydantic would accept as the number 1."""
        if isinstance(data, Mapping):
            for name, info in cls.model_fields.items():
                if isinstance(data.get(name), bool) and _takes_numbers_only(info.annotation):
                    raise ValueError(f"{name} = {data[name]}: must be a number, not true or false")
        return data


def _takes_numbers_only(annotation: Any) -> bool:
    """Whether an annotation allows a number but no bool."""
    parts = set(plain_types(annotation))
    return bool(parts & {int, float}) and not parts & {bool, Any}


def plain_types(annotation: Any) -> typing.Iterator[Any]:
    """Yield the types in an annotation; a `Literal` is yielded unchanged."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        yield from plain_types(arguments[0])
    elif arguments and typing.get_origin(annotation) is not typing.Literal:
        for argument in arguments:
            yield from plain_types(argument)
    else:
        yield annotation

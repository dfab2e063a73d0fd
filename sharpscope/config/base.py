"""Base of every configuration part: frozen, closed to unknown keys, defaults validated."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Spec(BaseModel):
    """A part of the configuration; each room defines its own, `sharpscope.config` composes them."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _truth_is_no_number(cls, data: Any) -> Any:
        """YAML reads `yes` as true, and true would pass for the number 1: refuse it where no truth value is meant."""
        if isinstance(data, Mapping):
            for name, info in cls.model_fields.items():
                if isinstance(data.get(name), bool) and _takes_numbers_only(info.annotation):
                    raise ValueError(f"{name} = {data[name]}: a number is meant, not true or false")
        return data


def _takes_numbers_only(annotation: Any) -> bool:
    """Whether an annotation admits a number and no truth value."""
    parts = set(plain_types(annotation))
    return bool(parts & {int, float}) and not parts & {bool, Any}


def plain_types(annotation: Any) -> typing.Iterator[Any]:
    """The types that an annotation is made of; a Literal counts as itself."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        yield from plain_types(arguments[0])
    elif arguments and typing.get_origin(annotation) is not typing.Literal:
        for argument in arguments:
            yield from plain_types(argument)
    else:
        yield annotation

"""Configurations that are wrong by construction: in a value's kind or range, in a key, or in their YAML."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from hypothesis import strategies as st
from pydantic import BaseModel

from sharpscope.config import build_config
from sharpscope.config.base import plain_types

_STARTS: tuple[dict[str, Any], ...] = (
    {},
    {"task": {"kind": "math"}},
    {"task": {"kind": "dataset"}},
    {"method": {"name": "grpo-sg"}},
)


@dataclass(frozen=True)
class Bad:
    """A file's content, what is wrong with it, and what the message must name."""

    content: bytes
    what: str
    names: str


def leaves(model: BaseModel, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, pydantic's description) of every single field of a configuration."""
    for name, info in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, (*prefix, name))
        else:
            yield (*prefix, name), info


def configs() -> st.SearchStrategy[Bad]:
    """Any malformed configuration."""
    return st.one_of(wrong_values(), wrong_values(), wrong_values(), wrong_keys(), wrong_shapes(), wrong_yaml())


@st.composite
def wrong_values(draw: Any) -> Bad:
    """One field with a value of a kind or out of the range that it does not take."""
    start = draw(st.sampled_from(_STARTS))
    fields = [(path, info) for path, info in leaves(build_config(values=start)) if _wrong(info)]
    path, info = draw(st.sampled_from(fields))
    value = draw(st.sampled_from(_wrong(info)))
    data = _with(start, path, value)
    return Bad(
        yaml.safe_dump(data).encode(),
        f"{'.'.join(path)} = {value!r}",
        "method" if path[-2:] == ("method", "name") else path[-1],
    )


@st.composite
def wrong_keys(draw: Any) -> Bad:
    """A key that no part of the configuration has."""
    names = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), min_size=1, max_size=20)
    key = "x" + draw(names)
    sections = [name for name, value in build_config() if isinstance(value, BaseModel)]
    section = draw(st.sampled_from([None, *sections]))
    data = {key: 1} if section is None else {section: {key: 1}}
    content = yaml.safe_dump(data, allow_unicode=True).encode()
    return Bad(content, f"unknown key {key!r} in {section}", "unknown field" if section is None else section)


@st.composite
def wrong_shapes(draw: Any) -> Bad:
    """Something else where a section or the whole must be a mapping."""
    scalar = st.one_of(st.integers(), st.text(min_size=1, max_size=10).map(lambda text: "x" + text), st.just([1, 2]))
    value = draw(scalar)
    section = draw(
        st.sampled_from([None, "optimizer", "rollout", "update", "evaluation", "recording", "policy", "health"])
    )
    if section is None:
        return Bad(yaml.safe_dump(value).encode(), "the whole is no mapping", "config.yaml")
    return Bad(yaml.safe_dump({section: value}).encode(), f"{section} = {value!r}", section)


@st.composite
def wrong_yaml(draw: Any) -> Bad:
    """Text that is no YAML, or YAML that must not be read."""
    good = yaml.safe_dump(build_config().model_dump(mode="json"))
    cut = draw(st.integers(0, good.count("\n")))
    head = "\n".join(good.split("\n")[:cut]) + "\n"
    depth = draw(st.integers(400, 5000))
    width = draw(st.integers(6, 12))
    bomb = "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]\n" for n in range(1, 14))
    tail: bytes = draw(
        st.sampled_from(
            (
                b"key: [1, 2\n",
                b"steps: {\n",
                b"\t- x: 1\n",
                b'name: "open\n',
                b"steps: &a [*a]\n",
                b"a: *nowhere\n",
                b"steps: !!python/object/apply:os.system ['true']\n",
                b"steps: !!python/name:os.system\n",
                b"steps: 3\nsteps: 4\n",
                b"\xff\xfe\x00broken",
                b"steps: \x00\n",
                b"when: 2026-13-45\n",
                b"? [a]\n: b\n",
                b"%YAML 9.9\n---\nx: [\n",
                b"steps: 1\n---\nsteps: 2\n",
                b"steps: !!binary '?'\n",
                b"steps: !!int 'x'\n",
                bomb.encode(),
                b"steps: " + b"[" * depth + b"\n",
            )
        )
    )
    content = tail if draw(st.booleans()) else head.encode() + tail
    return Bad(content, f"YAML {tail[:40]!r}", "")


def _wrong(info: Any) -> list[Any]:
    """Values that a field does not take; empty where its annotation is not understood."""
    kinds = set(plain_types(info.annotation))
    none = [] if type(None) in kinds else [None]
    kinds -= {type(None)}
    if kinds and kinds <= {int, float}:
        odd: list[Any] = ["text", [[]], {"a": 1}, math.nan, math.inf, True, *none]
        return odd + ([0.5] if kinds == {int} else []) + list(_out_of_range(info.metadata))
    if kinds == {bool}:
        return ["maybe", 7, [True], {"a": 1}, *none]
    if kinds == {str}:
        return [5, [1], {"a": 1}, True, *none]
    if typing.get_origin(info.annotation) is typing.Literal:
        return ["no-such-choice", 5, ["x"], {"a": 1}, *none]
    return []


def _out_of_range(limits: list[Any]) -> Iterator[float]:
    for limit in limits:
        for name, step in (("ge", -1), ("gt", 0), ("le", 1), ("lt", 0)):
            bound = getattr(limit, name, None)
            if bound is not None:
                yield bound + step


def _with(start: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    data: dict[str, Any] = {key: dict(part) for key, part in start.items()}
    place = data
    for part in path[:-1]:
        place = place.setdefault(part, {})
    place[path[-1]] = value
    return data

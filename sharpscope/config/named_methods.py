"""Look up, describe and label the named methods (`catalogue`) and their controls."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from sharpscope.config.catalogue import NOTES, MethodNote
from sharpscope.config.method import Method
from sharpscope.config.token_weights import (
    ConstantWeight,
    EntropyWeight,
    MeanOneWeight,
    ReverseWeight,
    ShuffledWeight,
    UniformWeight,
    Weighting,
)
from sharpscope.errors import UserError, nearest

SUFFIXES: dict[str, str] = {
    "shuffled": "each token's weight is drawn from its completion's by the gradient they carry (matched: tokens permutes)",
    "reverse": "w ← L + U − w",
    "constant": "every weight is the step's mean, weighted by the gradient",
    "mean-one": "weights divided by the step's mean, weighted by the gradient",
    "entropy": "the weight depends on the position's entropy instead of the token's probability",
}
"""Suffixes of the controls: `<method>-<suffix>` replaces the method's weight."""


def method_names() -> list[str]:
    """Names of the methods, without the controls."""
    return list(NOTES)


def control_names() -> list[str]:
    """Names of the controls: every weighted method with every suffix that applies to it."""
    return [
        f"{name}-{suffix}"
        for name, note in NOTES.items()
        for suffix in SUFFIXES
        if _applies(note.method.weight, suffix)
    ]


def _applies(weight: Weighting, suffix: str) -> bool:
    return not isinstance(weight, UniformWeight) and (suffix != "reverse" or weight.bounded)


def named_method(name: str) -> Method:
    """Return the method called `name`; `<method>-<control>` is the method with a weight of `SUFFIXES`.

    Raises:
        UserError: The method is unknown, or the control does not apply to it.
    """
    if name in NOTES:
        return NOTES[name].method
    for suffix in SUFFIXES:
        base = name.removesuffix(f"-{suffix}")
        if base != name and (base in NOTES or any(base.endswith(f"-{s}") for s in SUFFIXES)):
            method = named_method(base)
            if not _applies(method.weight, suffix):
                why = "are all 1" if isinstance(method.weight, UniformWeight) else "have no bounds"
                raise UserError(
                    f"method = {name!r}: control {suffix!r} does not apply to {base!r}, whose weights {why}"
                )
            return method.model_copy(update={"name": name, "weight": _wrapped(method.weight, suffix)})
    raise UserError(f"method = {name!r}: unknown{nearest(name, [*method_names(), *control_names()])}")


def _wrapped(weight: Any, suffix: str) -> Weighting:
    match suffix:
        case "shuffled":
            return ShuffledWeight(of=weight, matched="gradient")
        case "reverse":
            return ReverseWeight(of=weight)
        case "constant":
            return ConstantWeight(of=weight, matched="gradient")
        case "mean-one":
            return MeanOneWeight(of=weight, matched="gradient")
    return EntropyWeight(percentiles="gradient")


def describe(name: str) -> MethodNote:
    """Return the description of a named method or a control.

    Raises:
        UserError: The method is unknown, or the control does not apply to it.
    """
    method = named_method(name)
    if name in NOTES:
        return NOTES[name]
    suffix = next(s for s in SUFFIXES if name.endswith(f"-{s}"))
    base = describe(name.removesuffix(f"-{suffix}"))
    return MethodNote(
        method=method,
        title=f"{base.title}, control: {suffix}",
        equation=base.equation + f"; control: {SUFFIXES[suffix]}",
        constants=base.constants,
        source=f"control of this project around {base.method.name} ({base.source})",
        differs=f"As {base.method.name}, but {SUFFIXES[suffix]}.",
        ours=base.ours,
    )


def method_label(method: Method) -> str:
    """Return the method's name followed by the fields that differ from the named method: `grpo-sg+weight.tau=4`.

    Pass the configured method: a calibrated one differs by its resolved constants.
    """
    try:
        base: Mapping[str, Any] = named_method(method.name).model_dump(mode="json")
    except UserError:
        return method.name
    return "+".join([method.name, *_changes(method.model_dump(mode="json"), base, "")])


def control_label(label: str, suffix: str) -> str:
    """Label of a control around a labeled method: `grpo-sg+weight.U=4`, `reverse` → `grpo-sg-reverse+weight.of.U=4`."""
    name, *changes = label.split("+")
    inside = "weight." if suffix == "entropy" else "weight.of."  # the entropy control has no inner weight
    inner = (re.sub(r"^weight\.", inside, change) for change in changes)
    return "+".join([f"{name}-{suffix}", *inner])


def _changes(value: Mapping[str, Any], base: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, new in value.items():
        old = base.get(key)
        if new == old:
            continue
        path = f"{prefix}{key}"
        if isinstance(new, Mapping) and isinstance(old, Mapping) and new.get("kind") == old.get("kind"):
            yield from _changes(new, old, f"{path}.")
        elif isinstance(new, Mapping) and "kind" in new:
            yield f"{path}={_kinds(new)}"
        elif isinstance(new, float):
            yield f"{path}={new:g}"
        else:
            yield f"{path}={new}"


def _kinds(value: Mapping[str, Any]) -> str:
    inner = value.get("of")
    if isinstance(inner, Mapping):
        return f"{value['kind']}({_kinds(inner)})"
    return f"custom({value['function']})" if value["kind"] == "custom" else str(value["kind"])

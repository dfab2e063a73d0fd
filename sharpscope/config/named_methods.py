"""The named methods: GRPO, GRPO-SG and its neighbours, each a `Method` with its equation, constants and source. No
torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sharpscope.config.catalogue import NOTES, MethodNote
from sharpscope.config.method import Method
from sharpscope.config.token_weights import (
    ConstantShaping,
    EntropyShaping,
    MeanOneShaping,
    Part,
    ReverseShaping,
    ShuffledShaping,
    UniformShaping,
    is_bounded,
)
from sharpscope.errors import UserError, nearest

#: Short names of the controls: `<method>-<suffix>` wraps the method's weight.
SUFFIXES: dict[str, str] = {
    "shuffled": "the same weights, permuted over the loss tokens of each completion",
    "reverse": "w ← L + U − w",
    "constant": "every weight is the step's mean",
    "mean-one": "weights divided by the step's mean",
    "entropy": "the weight follows the position's entropy instead of the token's probability",
}


def method_names() -> list[str]:
    """The named methods, without the controls."""
    return list(NOTES)


def control_names() -> list[str]:
    """Short names of the controls: every weighted method with every suffix that fits it."""
    return [
        f"{name}-{suffix}" for name, note in NOTES.items() for suffix in SUFFIXES if _fits(note.method.weight, suffix)
    ]


def _fits(weight: Part, suffix: str) -> bool:
    return not isinstance(weight, UniformShaping) and (suffix != "reverse" or is_bounded(weight))


def named_method(name: str) -> Method:
    """The method called `name`; `<method>-<control>` (see `SUFFIXES`) is the method with its weight wrapped.

    Raises:
        UserError: no such method, or the control does not fit it.
    """
    if name in NOTES:
        return NOTES[name].method
    for suffix in SUFFIXES:
        base = name.removesuffix(f"-{suffix}")
        if base != name and (base in NOTES or any(base.endswith(f"-{s}") for s in SUFFIXES)):
            method = named_method(base)
            if not _fits(method.weight, suffix):
                why = "are all 1" if isinstance(method.weight, UniformShaping) else "have no bounds"
                raise UserError(f"method = {name!r}: control {suffix!r} does not fit {base!r}, whose weights {why}")
            return method.model_copy(update={"name": name, "weight": _wrapped(method.weight, suffix)})
    raise UserError(f"method = {name!r}: unknown{nearest(name, [*method_names(), *control_names()])}")


def _wrapped(weight: Any, suffix: str) -> Part:
    match suffix:
        case "shuffled":
            return ShuffledShaping(of=weight)
        case "reverse":
            return ReverseShaping(of=weight)
        case "constant":
            return ConstantShaping(of=weight)
        case "mean-one":
            return MeanOneShaping(of=weight)
    return EntropyShaping()


def describe(name: str) -> MethodNote:
    """Equation, constants, source, what differs from GRPO and what choices are ours, of a named method or a control of
    one.
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
    """The method's name, followed by what differs from the method of that name: `grpo-sg+weight.tau=4`.

    Meant for the configured method: one that is calibrated differs by its resolved constants.
    """
    try:
        base: Mapping[str, Any] = named_method(method.name).model_dump(mode="json")
    except UserError:
        return method.name
    return "+".join([method.name, *_changes(method.model_dump(mode="json"), base, "")])


def _changes(value: Mapping[str, Any], base: Mapping[str, Any], place: str) -> Iterator[str]:
    for key, new in value.items():
        old = base.get(key)
        if new == old:
            continue
        here = f"{place}{key}"
        if isinstance(new, Mapping) and isinstance(old, Mapping) and new.get("kind") == old.get("kind"):
            yield from _changes(new, old, f"{here}.")
        elif isinstance(new, Mapping) and "kind" in new:
            yield f"{here}={_kinds(new)}"
        elif isinstance(new, float):
            yield f"{here}={new:g}"
        else:
            yield f"{here}={new}"


def _kinds(value: Mapping[str, Any]) -> str:
    inner = value.get("of")
    if isinstance(inner, Mapping):
        return f"{value['kind']}({_kinds(inner)})"
    return f"custom({value['function']})" if value["kind"] == "custom" else str(value["kind"])

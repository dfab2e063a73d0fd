"""The named methods with their equations and sources, their controls and labels, and what a method is compared with."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from sharpscope.errors import UserError, nearest
from sharpscope.methods.method import Method
from sharpscope.methods.token_weights import (
    ConstantWeight,
    CustomWeight,
    EntropyWeight,
    MeanOneWeight,
    ReverseWeight,
    ShuffledWeight,
    TokenWeight,
    UniformWeight,
    Weighting,
)
from sharpscope.packaged import package_yaml
from sharpscope.settings.base import Part, short, validate
from sharpscope.settings.reading import function_path, merge, method_layer


@dataclass(frozen=True)
class MethodNote:
    """A method and its description: full name, source, loss, difference from GRPO, and choices that the source leaves open."""

    method: Method
    title: str
    source: str
    loss: str
    differs: str
    choices: str = ""
    at_one_update: str | None = None


def method_note(
    name: str,
    settings: Mapping[str, object] | None = None,
    **texts: str,
) -> MethodNote:
    """A named method from its entry in methods.yaml: `settings` where it differs from GRPO, and texts."""
    return MethodNote(Method.model_validate({"name": name} | dict(settings or {})), **texts)


@cache
def methods() -> dict[str, MethodNote]:
    """The named methods (methods.yaml)."""
    entries = package_yaml("sharpscope.methods", "methods.yaml")
    return {name: method_note(name, **entry) for name, entry in entries.items()}


SUFFIXES: dict[str, tuple[str, Callable[[TokenWeight], Weighting]]] = {
    "shuffled": (
        "each token's weight is drawn from its completion's by the gradient they carry (matched: tokens permutes)",
        lambda weight: ShuffledWeight(of=weight, matched="gradient"),
    ),
    "reverse": ("w ← L + U − w", lambda weight: ReverseWeight(of=weight)),
    "constant": (
        "every weight is the step's mean, weighted by the gradient",
        lambda weight: ConstantWeight(of=weight, matched="gradient"),
    ),
    "mean-one": (
        "weights divided by the step's mean, weighted by the gradient",
        lambda weight: MeanOneWeight(of=weight, matched="gradient"),
    ),
    "entropy": (
        "the weight depends on the position's entropy instead of the token's probability",
        lambda weight: EntropyWeight(percentiles="gradient"),
    ),
}
"""Suffixes of the controls: `<method>-<suffix>` replaces the method's weight. What it says, and the new weight."""


def method_names() -> list[str]:
    """Names of the methods, without the controls."""
    return list(methods())


def control_names() -> list[str]:
    """Names of the controls: every weighted method with every suffix that applies to it."""
    return [
        f"{name}-{suffix}"
        for name, note in methods().items()
        for suffix in SUFFIXES
        if _applies(note.method, suffix)
    ]


def _applies(method: Method, suffix: str) -> bool:
    return method.weighted and (suffix != "reverse" or method.weight.bounded)


def named_method(name: str) -> Method:
    """The method called `name`.

    It is one of `method_names`; `module:function` or `file.py:function`, plain GRPO with the user's own token weights; or
    either with the suffix of a control (`SUFFIXES`).

    Raises:
        UserError: The method is unknown, or the control does not apply to it.
    """
    if name in methods():
        return methods()[name].method
    base, suffix = _base_and_suffix(name)
    if suffix:
        method = named_method(base)
        if not _applies(method, suffix):
            why = "have no bounds" if method.weighted else "are all 1"
            raise UserError(
                f"method = {name!r}: control {suffix!r} does not apply to {base!r}, whose weights {why}"
            )
        return method.model_copy(
            update={"name": f"{method.name}-{suffix}", "weight": SUFFIXES[suffix][1](method.weight)}
        )
    if ":" in name:
        path = function_path(name)
        return Method(name=path, weight=CustomWeight(function=path))
    close = nearest(name, [*method_names(), *control_names()])
    hint = (
        close
        if "did you mean" in close
        else "; `sharpscope methods` lists them; own weights: module:function"
    )
    raise UserError(f"method = {name!r}: unknown{hint}")


def _base_and_suffix(name: str) -> tuple[str, str]:
    """`grpo-sg` and `mean-one` of `grpo-sg-mean-one`; the suffix is empty for what is no control."""
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(f"-{suffix}")), "")
    return name.removesuffix(f"-{suffix}"), suffix


def describe(name: str) -> MethodNote:
    """Return the description of a named method (methods.yaml), a control or the user's own weights (`module:function`)."""
    if name in methods():
        return methods()[name]
    method = named_method(name)
    (base_name, suffix) = _base_and_suffix(name)
    if not suffix:
        differs = "The function's weights multiply the clipped surrogate."
        return MethodNote(
            method,
            "GRPO with token weights of the user's own",
            name,
            "GRPO with w_t·min(…)",
            differs,
        )
    base = describe(base_name)
    return MethodNote(
        method=method,
        title=f"{base.title}, control: {suffix}",
        source=f"control of this project around {base.method.name} ({base.source})",
        loss=f"{base.loss}; control: {SUFFIXES[suffix][0]}",
        differs=f"As {base.method.name}, but {SUFFIXES[suffix][0]}.",
        choices=base.choices,
    )


def constants(method: Method) -> str:
    """The numbers in the parts of a method that differ from GRPO's, as `clip.low 0.2, clip.high 0.28`."""
    found: dict[str, object] = {}
    for part in Method.model_fields:
        value = getattr(method, part)
        if value != getattr(named_method("grpo"), part):
            found |= (
                {f"{part}.{name}": number for name, number in value}
                if isinstance(value, Part)
                else {part: value}
            )
    return ", ".join(
        f"{name} {n:g}" for name, n in found.items() if isinstance(n, float | int) and n is not True
    )


# -- methods as text ---------------------------------------------------------------------------------------------------


def expand_method(given: object) -> dict[str, object]:
    """All settings of a method given as text (`method_layer`) or as a mapping of its changes, with a `name`."""
    given = method_layer(given) if isinstance(given, str) else given
    if not isinstance(given, Mapping):
        raise UserError(
            f"method = {short(given)}: must be a method's name or a mapping with a name"
        )
    base = named_method(str(given.get("name", "grpo"))).model_dump(mode="json")
    return merge(base, {**given, "name": base["name"]})


def parse_method(text: str) -> Method:
    """The method written as `[label=]name[+field=value…]`, such as `flat=mine:flat_top` or `grpo-sg+weight.U=4` (`named_method`)."""
    return validate(Method, expand_method(text), "method")


def parse_methods(texts: Sequence[str]) -> dict[str, Method]:
    """Several methods (`parse_method`) by label, without one by `method_label`: the name that a run of them has."""
    found: dict[str, Method] = {}
    for text in texts:
        try:
            method = parse_method(text)
        except UserError as error:
            raise UserError(f"--methods {text}: {error}") from None
        label = method_label(method)
        if label in found:
            raise UserError(f"--methods {label}: given twice; give one a label: label=method")
        found[label] = method
    if not found:
        raise UserError("--methods: names nothing; `sharpscope methods` lists the methods")
    return found


# -- labels ------------------------------------------------------------------------------------------------------------


def method_label(method: Method) -> str:
    """Return the method's label, else its name followed by the fields that were changed: `grpo-sg+weight.tau=4`.

    Pass the configured method: a calibrated one differs by its resolved constants.
    """
    if method.label is not None:
        return method.label
    try:
        base = named_method(method.name).model_dump(mode="json")
    except UserError:
        return method.name
    return "+".join([method.name, *_changes(method.model_dump(mode="json"), base, "")])


def control_label(label: str, suffix: str) -> str:
    """Label of a control around a labeled method: `grpo-sg+weight.U=4`, `reverse` → `grpo-sg-reverse+weight.of.U=4`."""
    name, *changes = label.split("+")
    # the entropy control has no inner weight
    inside = "weight." if suffix == "entropy" else "weight.of."
    inner = (re.sub(r"^weight\.", inside, change) for change in changes)
    return "+".join([f"{name}-{suffix}", *inner])


def _changes(value: Mapping[str, object], base: Mapping[str, object], prefix: str) -> Iterator[str]:
    for key, new in value.items():
        old = base.get(key)
        if new == old:
            continue
        path = f"{prefix}{key}"
        if (
            isinstance(new, Mapping)
            and isinstance(old, Mapping)
            and new.get("kind") == old.get("kind")
        ):
            yield from _changes(new, old, f"{path}.")
        elif isinstance(new, Mapping) and "kind" in new:
            yield f"{path}={_kinds(new)}"
        elif isinstance(new, float):
            yield f"{path}={new:g}"
        else:
            yield f"{path}={'none' if new is None else new}"


def _kinds(value: Mapping[str, object]) -> str:
    inner = value.get("of")
    if isinstance(inner, Mapping):
        return f"{value['kind']}({_kinds(inner)})"
    return str(value["function"] if value["kind"] == "custom" else value["kind"])


# -- reference -------------------------------------------------------------------------------------------------------


def reference_method(method: Method) -> Method:
    """The objective that a method's gradient is compared with.

    It is the method with all weights 1 and without masks, sampler correction, penalty, entropy bonus, separate passes,
    sharpness control and clip by module; advantages, ratio, clip, aggregation and KL coefficient stay. Where that changes nothing, the
    method differs from GRPO by its advantages, ratio, clip or aggregation: then it is plain GRPO with the method's KL
    term.
    """
    kl = method.kl.model_copy(update={"weighted": False})
    removed: dict[str, object] = dict.fromkeys(
        (
            "tokens",
            "correction",
            "penalty",
            "proximal",
            "entropy",
            "passes",
            "sharpness",
            "module_clip",
            "label",
        )
    )
    removed |= {"weight": UniformWeight(), "weight_on": "surrogate", "kl": kl}
    unweighted = method.model_copy(update=removed)
    if unweighted != method.unlabeled:
        return unweighted
    return named_method("grpo").model_copy(update={"kl": kl})


def is_reference(method: Method) -> bool:
    """Whether a method is its own reference, so that it turns no gradient."""
    reference = reference_method(method)
    return reference == method.model_copy(update={"name": reference.name})


def same_at_one_update(method: Method) -> str | None:
    """Name of a simpler method that has the same gradient where a step makes a single update (methods.yaml); None without one.

    There π is π_old, so every ratio is 1: no clip acts, a sequence's ratio has the gradient of its tokens' mean ln π, and
    KL-Cov's divergence has none.
    """
    note = methods().get(method.name)
    known = note is not None and note.method == method.unlabeled.model_copy(
        update={"kl": note.method.kl}
    )
    return note.at_one_update if note is not None and known else None


def rotation_bound(low: float, high: float) -> float:
    """Largest rotation of a gradient by token weights in [low, high], low > 0, if token gradients are orthogonal [degrees].

    The angle between Σ g_t and Σ w_t·g_t is at most arctan((U − L)/(2·√(L·U))), since its cosine is at least
    2·√(L·U)/(L + U) (Cassels' inequality). It is reached where all weights are L or U and the tokens at L carry U/(L + U)
    of Σ ‖g_t‖². Gradients of correlated tokens can turn further.
    """
    return math.degrees(math.atan((high - low) / (2 * math.sqrt(low * high))))


def method_rotation_bound(method: Method) -> float | None:
    """`rotation_bound` of a method whose weights alone turn the gradient from its reference's [degrees].

    None for methods with masks, passes or other terms, with weights inside the clip, and where the weights have no bounds
    or a lower bound of 0. Schedules must be resolved (`at`).
    """
    unweighted = method.model_copy(update={"weight": UniformWeight(), "label": None})
    low, high = method.weight.bounds or (0.0, math.inf)
    if low <= 0 or math.isinf(high) or reference_method(method) != unweighted:
        return None
    return rotation_bound(low, high)

"""The named methods with their equations and sources, their controls and labels, and what a method is compared with."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import ValidationError

from sharpscope.config import method as parts
from sharpscope.config.base import Part, check_keys, short, validate
from sharpscope.config.method import Method
from sharpscope.config.reading import merge, method_layer, method_parts
from sharpscope.config.token_weights import (
    ConstantWeight,
    Control,
    CustomWeight,
    EntropyWeight,
    MeanOneWeight,
    PolarityWeight,
    ReverseWeight,
    ShuffledWeight,
    SigmoidWeight,
    UniformWeight,
    Weighting,
)
from sharpscope.errors import UserError, nearest
from sharpscope.packaged import package_yaml


@dataclass(frozen=True)
class MethodNote:
    """A method and its description: full name, source, loss, difference from GRPO, and choices that the source leaves open."""

    method: Method
    title: str
    source: str
    loss: str
    differs: str
    choices: str = ""


def method_note(name: str, settings: Mapping[str, Any] | None = None, **texts: str) -> MethodNote:
    """A named method from its entry in methods.yaml: `settings` where it differs from GRPO, and texts."""
    return MethodNote(Method.model_validate({"name": name} | dict(settings or {})), **texts)


@cache
def methods() -> dict[str, MethodNote]:
    """The named methods (methods.yaml)."""
    entries = package_yaml("sharpscope.config", "methods.yaml")
    return {name: method_note(name, **entry) for name, entry in entries.items()}


SUFFIXES: dict[str, tuple[str, Callable[[Any], Weighting]]] = {
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
        f"{name}-{suffix}" for name, note in methods().items() for suffix in SUFFIXES if _applies(note.method, suffix)
    ]


def _applies(method: Method, suffix: str) -> bool:
    return method.weighted and (suffix != "reverse" or method.weight.bounded)


def named_method(name: str) -> Method:
    """The method called `name`.

    It is one of `method_names`; `module:function`, plain GRPO with the user's own token weights; or either with the suffix of
    a control (`SUFFIXES`).

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
            raise UserError(f"method = {name!r}: control {suffix!r} does not apply to {base!r}, whose weights {why}")
        return method.model_copy(update={"name": name, "weight": SUFFIXES[suffix][1](method.weight)})
    if ":" in name:
        return Method(name=name, weight=CustomWeight(function=name))
    close = nearest(name, [*method_names(), *control_names()])
    hint = close if "did you mean" in close else "; `sharpscope methods` lists them; own weights: module:function"
    raise UserError(f"method = {name!r}: unknown{hint}")


def _base_and_suffix(name: str) -> tuple[str, str]:
    """`grpo-sg` and `mean-one` of `grpo-sg-mean-one`; the suffix is empty for what is no control."""
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(f"-{suffix}")), "")
    return name.removesuffix(f"-{suffix}"), suffix


def describe(name: str) -> MethodNote:
    """Return the description of a named method (methods.yaml), a control or the user's own weights (`module:function`)."""
    if name in methods():
        return methods()[name]
    method, (base_name, suffix) = named_method(name), _base_and_suffix(name)
    if not suffix:
        differs = "The function's weights multiply the clipped surrogate."
        return MethodNote(method, "GRPO with token weights of the user's own", name, "GRPO with w_t·min(…)", differs)
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
    found: dict[str, Any] = {}
    for part in Method.model_fields:
        value = getattr(method, part)
        if value != getattr(named_method("grpo"), part):
            found |= {f"{part}.{name}": number for name, number in value} if isinstance(value, Part) else {part: value}
    return ", ".join(f"{name} {n:g}" for name, n in found.items() if isinstance(n, float | int) and n is not True)


# -- methods as text ---------------------------------------------------------------------------------------------------


def expand_method(given: Any) -> dict[str, Any]:
    """All settings of a method given as text (`method_layer`) or as a mapping of its changes, with a `name`."""
    given = method_layer(given) if isinstance(given, str) else given
    if not isinstance(given, Mapping):
        raise UserError(f"method = {short(given)}: must be a method's name or a mapping with a name")
    return merge(named_method(str(given.get("name", "grpo"))).model_dump(mode="json"), given)


def parse_method(text: str) -> Method:
    """The method written as `[label=]name[+field=value…]`, such as `flat=mine:flat_top` or `grpo-sg+weight.U=4` (`named_method`)."""
    method: Method = validate(Method, check_keys(Method, expand_method(text), "method"))
    return method


def parse_methods(texts: Sequence[str], token_weights: str | None = None) -> dict[str, Method]:
    """Several methods (`parse_method`) by label (`arm_name`); `token_weights` go to the only method, or to those that have some."""
    found: dict[str, Method] = {}
    for text in texts:
        try:
            method = parse_method(text)
        except UserError as error:
            raise UserError(f"--methods {text}: {error}") from None
        if token_weights is not None and (len(texts) == 1 or method.weighted):
            method = with_token_weights(method, token_weights)
        if arm_name(text) in found:
            raise UserError(f"--methods {arm_name(text)}: given twice; give one a label: label=method")
        found[arm_name(text)] = method
    if not found:
        raise UserError("--methods: names nothing; `sharpscope methods` lists the methods")
    if token_weights is not None and not any(method.weighted for method in found.values()):
        raise UserError(f"--token-weights {token_weights}: no method has token weights; add grpo-sg to --methods")
    return found


def arm_name(text: str) -> str:
    """The label in `[label=]name[+field=value…]`, else the whole text."""
    return method_parts(text)[0] or text.strip()


def with_token_weights(method: Method, text: str) -> Method:
    """The method with other token weights (`--token-weights`); inside a control, the innermost weight changes.

    `text` is `paper` or `calibrated` (presets of the sigmoid), or `module:function`.
    """
    option = f"--token-weights {text}"

    def change(weight: Any) -> Weighting:
        """The new weights in place of one weighting."""
        if isinstance(weight, EntropyWeight):
            raise UserError(f"{option}: not for method {method.name}, whose weights depend on the entropy; remove it")
        if ":" in text:
            return CustomWeight(function=text)
        if text not in ("paper", "calibrated"):
            raise UserError(f"{option}: must be paper, calibrated, or module:function")
        if not isinstance(weight, SigmoidWeight):
            of = f"those of method {method.name} are {weight.kind}"
            raise UserError(f"{option}: applies to sigmoid weights, and {of}; choose a method such as grpo-sg")
        return weight.replace(preset=text)

    try:
        return method.model_copy(update={"weight": method.weight.changed(change)})
    except ValidationError as error:
        raise UserError(f"{option}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None


# -- labels ------------------------------------------------------------------------------------------------------------


def method_label(method: Method) -> str:
    """Return the method's label, else its name followed by the fields that were changed: `grpo-sg+weight.tau=4`.

    Pass the configured method: a calibrated one differs by its resolved constants.
    """
    if method.label is not None:
        return method.label
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
            yield f"{path}={'none' if new is None else new}"


def _kinds(value: Mapping[str, Any]) -> str:
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
    removed: dict[str, Any] = dict.fromkeys(
        ("tokens", "correction", "penalty", "entropy", "passes", "sharpness", "module_clip", "label")
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
    """Name of a simpler method that has the same gradient where a step makes a single update; None if there is none.

    There π is π_old, so every ratio is 1: no clip acts, a sequence's ratio has the gradient of its tokens' mean ln π, and
    KL-Cov's divergence has none. What is left of the method is compared with the named methods, with its own KL term.
    """
    method = method.unlabeled
    plain = _at_ratio_one(method)
    if plain == method or method.passes is not None:
        return None
    for name, note in methods().items():
        other = note.method
        if _at_ratio_one(other) == other and other.model_copy(update={"name": method.name, "kl": method.kl}) == plain:
            return name
    return None


def _at_ratio_one(method: Method) -> Method:
    """The method with GRPO's ratio, clip and penalty where its own have the same gradient at ratio 1."""
    in_ratio = method.weight_on == "ratio" and method.weighted  # weights move the clipped ratio away from 1
    corrected = isinstance(method.clip, parts.VespoGate) and method.correction is not None
    gated = isinstance(method.clip, parts.DelightGate) or getattr(method.ratio, "to", "old") == "sampler"
    # A sequence's ratio gives each of its tokens the mean of all their terms, which differ by weight, mask and advantage.
    by_token = isinstance(method.advantage, parts.TokenBaselineAdvantage | parts.WhitenedAdvantage)
    differ = method.weighted or method.tokens is not None or by_token
    if in_ratio or corrected or gated or (differ and not isinstance(method.ratio, parts.TokenRatio)):
        return method
    changed: dict[str, Any] = {"ratio": parts.TokenRatio(), "clip": parts.PpoClip(), "weight_on": "surrogate"}
    if not isinstance(method.penalty, parts.LpRegPenalty):  # its divergence is from another policy than π_old
        changed["penalty"] = None
    return method.model_copy(update=changed)


def rotation_bound(low: float, high: float) -> float:
    """Largest rotation of a gradient by token weights in [low, high], if token gradients are orthogonal [degrees].

    The angle between Σ g_t and Σ w_t·g_t is at most arctan((U − L)/(2·√(L·U))), since its cosine is at least
    2·√(L·U)/(L + U) (Cassels' inequality). It is reached where all weights are L or U and the tokens at L carry U/(L + U)
    of Σ ‖g_t‖². Gradients of correlated tokens can turn further. It is 90 if L = 0 < U or U is infinite, 0 if L = U.
    """
    if not 0 <= low <= high or math.isinf(low):
        raise ValueError(f"weights in [{low}, {high}]: needs 0 ≤ L ≤ U, L finite")
    if low == high:
        return 0.0
    if math.isinf(high) or low == 0:
        return 90.0
    return math.degrees(math.atan((high - low) / (2 * math.sqrt(low * high))))


def method_rotation_bound(method: Method) -> float | None:
    """`rotation_bound` of a method whose weights alone turn the gradient from its reference's [degrees].

    None for methods without weights, with masks, passes or other terms, with weights inside the clip, and where the weights have
    no bound. Schedules must be resolved (`at`).
    """
    unweighted = method.model_copy(update={"weight": UniformWeight(), "label": None})
    if not method.weighted or reference_method(method) != unweighted:
        return None
    return weight_rotation_bound(method.weight)


def weight_rotation_bound(weight: Weighting) -> float | None:
    """`rotation_bound` of a weighting's range [degrees]; None if its weights have no positive lower or no upper bound.

    Schedules must be resolved (`at`).
    """
    match weight:
        case UniformWeight() | ConstantWeight():
            return 0.0
        case MeanOneWeight():
            return weight_rotation_bound(weight.of)  # the common factor cancels
        case PolarityWeight():
            alpha = float(weight.alpha)  # type: ignore[arg-type]  # schedules are resolved
            return rotation_bound(1 - alpha, 1 + alpha)
        case Control() if not weight.bounded:
            return weight_rotation_bound(weight.of)
    bounds = weight.bounds
    if bounds is None or bounds[0] <= 0 or math.isinf(bounds[1]):
        return None
    return rotation_bound(*bounds)

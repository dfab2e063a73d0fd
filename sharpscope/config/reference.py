"""What a method's gradient is compared with, and how far bounded token weights can turn a gradient."""

from __future__ import annotations

import math
from typing import Any

from sharpscope.config.method import (
    DelightGate,
    LpRegPenalty,
    Method,
    PpoClip,
    TokenBaselineAdvantage,
    TokenRatio,
    VespoGate,
    WhitenedAdvantage,
)
from sharpscope.config.methods import methods, named_method
from sharpscope.config.token_weights import (
    ConstantWeight,
    Control,
    MeanOneWeight,
    PolarityWeight,
    UniformWeight,
)
from sharpscope.config.weighting import Weighting


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
    removed |= {"weight": UniformWeight(), "weight_on": "surrogate", "truncated": "keep", "kl": kl}
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
    uniform, by_token = isinstance(method.weight, UniformWeight), isinstance(method.ratio, TokenRatio)
    in_ratio = method.weight_on == "ratio" and not uniform  # weights move the clipped ratio away from 1
    corrected = isinstance(method.clip, VespoGate) and method.correction is not None
    # A sequence's ratio gives each of its tokens the mean of all their terms, which differ by weight, mask and advantage.
    alike = uniform and method.tokens is None
    alike = alike and not isinstance(method.advantage, TokenBaselineAdvantage | WhitenedAdvantage)
    gated = isinstance(method.clip, DelightGate) or getattr(method.ratio, "to", "old") == "sampler"
    if in_ratio or corrected or gated or not (alike or by_token):
        return method
    changed: dict[str, Any] = {"ratio": TokenRatio(), "clip": PpoClip(), "weight_on": "surrogate"}
    if not isinstance(method.penalty, LpRegPenalty):  # its divergence is from another policy than π_old
        changed["penalty"] = None
    return method.model_copy(update=changed)


def rotation_bound(low: float, high: float) -> float:
    """Largest rotation of a gradient by token weights in [low, high], if token gradients are orthogonal [degrees].

    The angle between Σ g_t and Σ w_t·g_t is at most arctan((U − L)/(2·√(L·U))), since its cosine is at least
    2·√(L·U)/(L + U) (Cassels' inequality). It is reached where all weights are L or U and the tokens at L carry U/(L + U)
    of Σ ‖g_t‖². Gradients of correlated tokens can turn further. It is 90 if L = 0 < U or U is infinite, 0 if L = U.

    Raises:
        ValueError: not 0 ≤ L ≤ U.
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
    if isinstance(method.weight, UniformWeight) or reference_method(method) != unweighted:
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

"""Clipping of an update's gradient: by the norms of module types, and by the global norm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from sharpscope.config.method import ModuleClip
from sharpscope.recording.norms import clip_factor, norms


@dataclass(frozen=True)
class Clipping:
    """What clipping does to a gradient."""

    factors: list[float]  # what each parameter's gradient is multiplied by
    share: float  # norm after clipping divided by the norm before; 1 for a gradient of 0
    averages: dict[str, float]  # moving average of each module type's norm after this gradient


def module_types(model: nn.Module) -> dict[int, str]:
    """Module type of each trainable parameter by its identity: the last part of its module's name, without an adapter's parts.

    `model.layers.3.mlp.down_proj.weight` and `….down_proj.lora_A.default.weight` are of type `down_proj`.
    """
    made = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".lora_")[0].split(".")
        if len(parts) > 1 and parts[-1] in ("weight", "bias"):
            parts.pop()
        if parameter.requires_grad:
            made[id(parameter)] = parts[-1]
    return made


def clipping(
    pairs: Sequence[tuple[Tensor, Tensor | None]],
    norm: float,
    limit: float | None,
    spec: ModuleClip | None,
    types: Mapping[int, str],
    averages: Mapping[str, float],
) -> Clipping:
    """The clip of a gradient, given as pairs with its parameters, whose global norm is `norm`.

    First the clip by module `spec`, its schedules resolved, by the `averages` of the norms so far, then that of the global norm
    to `limit`; None: no clip. `types` are those of `module_types`. Of a sharded model every process calls this.
    """
    if spec is None or not (norm > 0 and math.isfinite(norm)):
        factor = clip_factor(norm, limit)
        return Clipping([factor] * len(pairs), factor, dict(averages))
    found = norms(pairs, types).layers
    by_type = {kind: spec.scaled(size, averages.get(kind)) for kind, size in found.items()}
    scaled = math.sqrt(sum((by_type[kind][0] * size) ** 2 for kind, size in found.items()))
    if all(scale == 1.0 for scale, _ in by_type.values()):
        scaled = norm  # without the rounding of the sum
    factor = clip_factor(scaled, limit)
    factors = [factor * by_type[types[id(parameter)]][0] for parameter, _ in pairs]
    return Clipping(factors, factor * scaled / norm, {kind: average for kind, (_, average) in by_type.items()})

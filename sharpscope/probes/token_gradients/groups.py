"""Parameter groups of the per-group norms: by layer and by kind."""

from __future__ import annotations

import re

from torch import nn

from sharpscope.probes.parameter_groups import parameter_groups

_LAYER = re.compile(r"\.(?:layers|h|blocks|block)\.(\d+)\.")


def group_names(model: nn.Module, named: dict[str, nn.Parameter]) -> dict[str, tuple[str, ...]]:
    """Parameter -> its groups: a kind (`parameter_groups`), and `layers.<i>` where it stands in a decoder layer.

    A weight that is input embedding and output layer at once belongs to `embedding` with all its uses. The norms of
    queries and keys are `norm`.
    """
    kinds = {id(p): kind for kind, members in parameter_groups(model, list(named.values())).items() for p in members}
    groups: dict[str, tuple[str, ...]] = {}
    for name, parameter in named.items():
        layer = _LAYER.search(f".{name}")
        kind = kinds[id(parameter)]
        groups[name] = (kind,) if layer is None else (kind, f"layers.{layer.group(1)}")
    return groups

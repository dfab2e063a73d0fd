"""Groups of parameters: by kind and by layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from torch import Tensor, nn

_LAYER = re.compile(r"\.(?:layers|h|blocks|block)\.(\d+)\.")


def parameter_groups(model: nn.Module, parameters: Sequence[Tensor] | None = None) -> dict[str, list[Tensor]]:
    """Trainable parameters by kind: `embedding`, `attention`, `mlp`, `norm`, `head`, `other`; empty groups are left out.

    A tied embedding and output layer is in `embedding`.
    """
    wanted = {id(p) for p in (model.parameters() if parameters is None else parameters) if p.requires_grad}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    fixed: dict[int, str] = {id(p): "head" for p in (head.parameters() if head is not None else ())}
    fixed |= {id(p): "embedding" for p in embedding.parameters()}
    groups: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in wanted:
            groups.setdefault(fixed.get(id(parameter)) or _kind(name), []).append(parameter)
    return groups


def group_names(model: nn.Module, named: dict[str, nn.Parameter]) -> dict[str, tuple[str, ...]]:
    """The groups of each parameter: its kind (see `parameter_groups`) and `layers.<i>` if it is in a decoder layer.

    Norms of queries and keys are in `norm`.
    """
    kinds = {id(p): kind for kind, members in parameter_groups(model, list(named.values())).items() for p in members}
    groups: dict[str, tuple[str, ...]] = {}
    for name, parameter in named.items():
        layer = _LAYER.search(f".{name}")
        kind = kinds[id(parameter)]
        groups[name] = (kind,) if layer is None else (kind, f"layers.{layer.group(1)}")
    return groups


def _kind(name: str) -> str:
    words = name.lower()
    rules: list[tuple[str, Callable[[str], bool]]] = [
        ("norm", lambda w: any(key in w for key in ("norm", "ln_", ".ln"))),
        ("attention", lambda w: "attn" in w or "attention" in w),
        ("mlp", lambda w: any(key in w for key in ("mlp", "expert", "feed_forward", "ffn"))),
        ("embedding", lambda w: any(key in w for key in ("embed", "wpe", "wte"))),
    ]
    return next((group for group, holds in rules if holds(words)), "other")

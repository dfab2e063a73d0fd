"""Groups of parameters: by kind and by layer."""

from __future__ import annotations

import re

from torch import nn

_LAYER = re.compile(r"\.(?:layers|h|blocks|block)\.(\d+)\.")
_WORDS = {
    "norm": ("norm", "ln_", ".ln"),
    "attention": ("attn", "attention"),
    "mlp": ("mlp", "expert", "feed_forward", "ffn"),
    "embedding": ("embed", "wpe", "wte"),
}


def group_names(model: nn.Module, named: dict[str, nn.Parameter]) -> dict[str, tuple[str, ...]]:
    """The groups of each parameter: its kind, and `layers.<i>` if it is in a decoder layer.

    Kinds are `embedding` (with a tied output layer), `attention`, `mlp`, `norm` (also of queries and keys), `head`, `other`.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    fixed = {id(p): "head" for p in (head.parameters() if head is not None else ())}
    fixed |= {id(p): "embedding" for p in embedding.parameters()}
    names = {id(p): name.lower() for name, p in model.named_parameters()}
    groups: dict[str, tuple[str, ...]] = {}
    for name, parameter in named.items():
        words = names[id(parameter)]
        by_name = (kind for kind, parts in _WORDS.items() if any(part in words for part in parts))
        kind = fixed.get(id(parameter)) or next(by_name, "other")
        layer = _LAYER.search(f".{name}")
        groups[name] = (kind,) if layer is None else (kind, f"layers.{layer.group(1)}")
    return groups

"""YAML from strangers: plain values only, no key twice, nothing that grows without bound when it is read."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

YAML_LIMIT = 4_000_000
"""Largest configuration file [bytes]."""
YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError, OverflowError, TypeError, AttributeError, KeyError)
"""What reading broken YAML may raise; PyYAML's constructors let Python's own errors through."""
_NODES = 200_000


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader that refuses a key given twice, of which it would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value.__hash__ is not None and (key.tag, key.value) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            if key.value.__hash__ is not None:
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> Any:
    """The plain value that YAML text means.

    Raises:
        yaml.YAMLError: not YAML, a tag that is no plain value, a key given twice, or aliases that would unfold to more than
            200,000 values or to themselves. Other YAML_ERRORS for values that Python refuses.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _count(node, {}, ())
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _count(node: yaml.Node, known: dict[int, int], above: tuple[int, ...]) -> int:
    """Values that a node unfolds to, aliases counted each time."""
    if id(node) in above:
        raise yaml.constructor.ConstructorError(None, None, "an alias that holds itself", node.start_mark)
    if id(node) not in known:
        inside = (*above, id(node))
        total = 1
        if isinstance(node, yaml.SequenceNode):
            total += sum(_count(child, known, inside) for child in node.value)
        elif isinstance(node, yaml.MappingNode):
            total += sum(_count(part, known, inside) for pair in node.value for part in pair)
        if total > _NODES:
            raise yaml.constructor.ConstructorError(
                None, None, f"aliases unfold to over {_NODES:,} values", node.start_mark
            )
        known[id(node)] = total
    return known[id(node)]

"""Load untrusted YAML: plain values, no duplicate keys, bounded alias expansion."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

YAML_LIMIT = 4_000_000
"""Maximum size of a configuration file [bytes]."""
YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError, OverflowError, TypeError, AttributeError, KeyError)
"""Exceptions that invalid YAML can raise; PyYAML's constructors also raise Python's built-in ones."""
_NODES = 200_000


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which also rejects duplicate keys instead of using the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """As in PyYAML; a key given twice raises."""
        keys = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value.__hash__ is not None and (key.tag, key.value) in keys:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
            if key.value.__hash__ is not None:
                keys.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> Any:
    """Parse YAML text into plain values.

    Raises:
        yaml.YAMLError: Invalid YAML, a tag of another type, a duplicate key, or aliases that expand to more than 200,000
            values or contain themselves. Values that Python cannot represent raise other YAML_ERRORS.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _expanded_size(node, {}, ())
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _expanded_size(node: yaml.Node, sizes: dict[int, int], ancestors: tuple[int, ...]) -> int:
    """Number of values in a node, with aliases counted at each use."""
    if id(node) in ancestors:
        raise yaml.constructor.ConstructorError(None, None, "an alias contains itself", node.start_mark)
    if id(node) not in sizes:
        path = (*ancestors, id(node))
        total = 1
        if isinstance(node, yaml.SequenceNode):
            total += sum(_expanded_size(child, sizes, path) for child in node.value)
        elif isinstance(node, yaml.MappingNode):
            total += sum(_expanded_size(part, sizes, path) for pair in node.value for part in pair)
        if total > _NODES:
            raise yaml.constructor.ConstructorError(
                None, None, f"aliases expand to more than {_NODES:,} values", node.start_mark
            )
        sizes[id(node)] = total
    return sizes[id(node)]

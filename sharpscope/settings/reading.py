"""Read configurations: YAML files (untrusted, so bounded), `--set path=value`, how layers are merged, and the user's functions."""

from __future__ import annotations

import importlib
import io
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from ruamel.yaml import YAML, YAMLError
from ruamel.yaml.nodes import CollectionNode, MappingNode, Node

from sharpscope.errors import UserError, nearest
from sharpscope.untrusted import UnreadableError, read_text

YAML_ERRORS = (
    YAMLError,
    ValueError,
    RecursionError,
    OverflowError,
    TypeError,
    AttributeError,
    KeyError,
)
"""Exceptions that invalid YAML can raise; constructors of values also raise Python's built-in ones."""

MOST_VALUES = 200_000
LARGEST = 4_000_000
"""Largest configuration file [bytes]."""


def _yaml() -> YAML:
    """YAML 1.2 of plain values, whose reader refuses a key that is given twice; one is used once."""
    made = YAML(typ="safe", pure=True)
    made.default_flow_style = False
    made.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    return made


def load_yaml(text: str) -> object:
    """Parse YAML text into plain values; what is not valid or too much with aliases expanded raises one of `YAML_ERRORS`."""
    node = _yaml().compose(text)
    if node is not None and _expanded_size(node, {}) > MOST_VALUES:
        raise YAMLError(f"more than {MOST_VALUES:,} values")
    return _yaml().load(text)


def _expanded_size(node: Node, known: dict[int, int]) -> int:
    """Number of values in a node, with aliases counted at each use; one that contains itself is a RecursionError."""
    if id(node) not in known:
        children = node.value if isinstance(node, CollectionNode) else []
        flat = chain.from_iterable(children) if isinstance(node, MappingNode) else children
        known[id(node)] = 1 + sum(_expanded_size(child, known) for child in flat)
    return known[id(node)]


def read_yaml(file: Path) -> dict[str, object]:
    """Read a YAML mapping with a safe loader."""
    try:
        data = load_yaml(read_text(file, LARGEST))
    except FileNotFoundError:
        raise UserError(
            f"config file '{file}' does not exist; give the path of a YAML file"
        ) from None
    except (OSError, UnreadableError) as error:
        why = (
            "is a folder; --resume continues a run" if file.is_dir() else f"cannot be read: {error}"
        )
        raise UserError(f"config file '{file}' {why}") from None
    except YAML_ERRORS as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split()).replace('"', "'")
        raise UserError(f"config file '{file}'{line}: not valid YAML ({problem})") from None
    if not isinstance(data, dict | None):
        raise UserError(
            f"config file '{file}': must be a mapping of field names to values, not {type(data).__name__}"
        )
    return data or {}


def to_yaml(config: BaseModel) -> str:
    """Return the configuration as YAML; `build_config` reads it back to the same value."""
    written = io.StringIO()
    _yaml().dump(config.model_dump(mode="json"), written)
    return written.getvalue()


def nested(path: str, value: object) -> dict[str, object]:
    """`a.b` and a value as `{"a": {"b": value}}`."""
    first, *rest = path.split(".")
    for part in reversed(rest):
        value = {part: value}
    return {first: value}


def parse_override(text: str) -> dict[str, object]:
    """Parse `a.b=c` into `{"a": {"b": c}}`, with the value read as YAML."""
    path, sign, raw = text.partition("=")
    if not sign or not path.strip():
        raise UserError(f"--set {text}: must have the form field.subfield=value")
    try:
        value = load_yaml(raw)
    except YAML_ERRORS:
        raise UserError(f"--set {text}: the value is not valid YAML; put text in quotes") from None
    return nested(path.strip(), value)


def parse_overrides(texts: Iterable[str]) -> dict[str, object]:
    """Parse several overrides (see `parse_override`) and merge them in order."""
    return merge_all(map(parse_override, texts))


def merge_all(layers: Iterable[Mapping[str, object]]) -> dict[str, object]:
    """Merge layers in order (see `merge`)."""
    return reduce(merge, layers, {})


def merge(base: Mapping[str, object], extra: Mapping[str, object]) -> dict[str, object]:
    """Merge `extra` into `base` recursively; a part whose `kind` (or a method whose `name`) changes is replaced.

    A part without a `kind` keeps its settings when it gets one; `check_keys` rejects settings that do not apply.
    """
    result = dict(base)
    for key, new in extra.items():
        old = result.get(key)
        value = method_layer(new) if key == "method" and isinstance(new, str) else new
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            changed = any(
                tag in value and tag in old and value[tag] != old[tag] for tag in ("kind", "name")
            )
            result[key] = dict(value) if changed else merge(old, value)
        else:
            result[key] = value
    return result


_CHANGE = re.compile(r"\+(?=[A-Za-z_][A-Za-z0-9_.]*=)")


def method_parts(text: str) -> tuple[str | None, str, list[str]]:
    """Label, name and changes of a method written as `[label=]name[+field=value…]`."""
    head, *changes = _CHANGE.split(text.strip())
    label, sign, name = head.rpartition("=")
    if not name or (sign and not label):
        raise UserError(f"method {text!r}: must have the form [label=]name[+field=value…]")
    return label or None, name, changes


def method_layer(text: str) -> dict[str, object]:
    """The settings of a method written as `[label=]name[+field=value…]`."""
    label, name, changes = method_parts(text)
    return merge({"name": name} | ({"label": label} if label else {}), parse_overrides(changes))


def function_path(path: str) -> str:
    """`package.module:function` of that, or of a file in the working directory: `mine.py:function`, `package/mine.py:function`."""
    name, _, attribute = path.partition(":")
    if name.endswith(".py"):
        name = name.removesuffix(".py").removeprefix("./").replace("/", ".")
    return f"{name}:{attribute}"


def import_function(path: str, field: str) -> Callable[..., Any]:
    """The function at a path (`function_path`). The module is looked for as Python does, then in the working directory."""
    name, _, attribute = function_path(path).partition(":")
    before = list(sys.path)
    # an installed console script does not look where it is started
    sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(name)
    except Exception as error:  # whatever a user's module raises while it is imported
        problem = what_raised(error)
        raise UserError(f"{field} = {path!r}: importing {name!r} failed with {problem}") from error
    finally:
        sys.path[:] = before
    function = getattr(module, attribute, None)
    if not callable(function):
        hint = nearest(attribute, vars(module))
        raise UserError(f"{field} = {path!r}: module {name!r} has no function {attribute!r}{hint}")
    return function


def what_raised(error: BaseException, file: str | None = None) -> str:
    """An exception of the user's code on one line, with the last place in `file` (None: any but Python's own import) that led to it."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    places = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if (frame.filename == file if file else not _ours(frame.filename))
    ]
    return f"{text} ({places[-1].filename}, line {places[-1].lineno})" if places else text


def _ours(file: str) -> bool:
    """Whether a file is this module or belongs to Python's import system."""
    return file == __file__ or file.startswith("<frozen") or "importlib" in file

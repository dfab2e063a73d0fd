"""No test asserts only inside a loop that may be empty."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loops import some

FOLDER = Path(__file__).parent
LITERALS = (ast.Tuple, ast.List, ast.Dict, ast.Set)
WRAPPERS = ("zip", "enumerate", "sorted", "itertools.product", "product")


def never_empty(iterable: ast.expr) -> bool:
    """Whether an iterable has values by how it is written: a literal, a range, a constant of a module, or `some`."""
    if isinstance(iterable, LITERALS):
        return True
    if isinstance(iterable, ast.Name):
        return iterable.id.isupper()
    if isinstance(iterable, ast.Attribute):
        return iterable.attr.isupper()
    if not isinstance(iterable, ast.Call):
        return False
    name = ast.unparse(iterable.func)
    if name in WRAPPERS:
        return any(never_empty(part) for part in iterable.args)
    if name.endswith((".items", ".values")):
        assert isinstance(iterable.func, ast.Attribute)
        return never_empty(iterable.func.value)
    return name in ("some", "range")


def asserts(node: ast.AST, *, inside: bool = False) -> Iterator[tuple[int, bool]]:
    """Line of each assertion in a function, and whether it is in a loop that may be empty."""
    for child in ast.iter_child_nodes(node):
        risky = inside
        if isinstance(child, ast.For):
            risky = inside or not never_empty(child.iter)
        checks = isinstance(child, ast.Assert)
        if isinstance(child, ast.Call):
            # a helper that asserts, an assertion of numpy or torch, or `pytest.raises`
            words = ast.unparse(child.func).lower()
            checks = any(word in words for word in ("assert", "check", "raises", "expect", "same"))
        if checks:
            yield child.lineno, risky  # type: ignore[attr-defined]
        yield from asserts(child, inside=risky)


def vacuous(tree: ast.Module) -> list[str]:
    """Tests whose every assertion is in a loop that may be empty."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            places = list(asserts(node))
            if places and all(risky for _, risky in places):
                found.append(node.name)
    return found


@pytest.mark.parametrize("path", some(sorted(FOLDER.rglob("test_*.py"))), ids=lambda p: p.stem)
def test_no_test_asserts_only_inside_a_loop_that_may_be_empty(path):
    assert vacuous(ast.parse(path.read_text("utf-8"))) == []


def test_the_check_itself_finds_an_empty_loop():
    risky = "def test_a():\n    for row in frame.itertuples():\n        assert row.x == 1\n"
    assert vacuous(ast.parse(risky)) == ["test_a"]
    for safe in (
        "some(frame.itertuples())",
        "(1, 2)",
        "NAMES.items()",
        "zip((1,), x, strict=True)",
    ):
        assert vacuous(ast.parse(risky.replace("frame.itertuples()", safe))) == []
    with_another = risky.replace("assert row", "assert len(frame)\n        assert row")
    assert vacuous(ast.parse(with_another)) == ["test_a"]
    assert vacuous(ast.parse(risky.replace("    for", "    assert len(frame)\n    for"))) == []

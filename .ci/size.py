"""How large and how dense the package is: nodes of the syntax tree, nodes a line, circles of imports, uses of `Any`.

`python .ci/size.py` prints a table by package and fails where a limit is passed. Lines are not limited: nodes are, since packing
code into fewer lines does not make it shorter to read. A commit that raises a limit says for which feature.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sharpscope"
LIMITS = {
    "nodes": 412_500,
    "nodes a line": 7.2,
    "nodes a line of one module": 9.9,
    "circles": 0,
    "Any": 167,
}
"""Largest values that are allowed."""


def trees() -> dict[str, tuple[str, ast.Module]]:
    """Dotted name of each module -> its text and syntax tree."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        found[name] = text, ast.parse(text)
    return found


def typing_only(tree: ast.Module) -> set[ast.AST]:
    """Nodes within `if TYPE_CHECKING:`."""
    guarded: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            guarded.update(ast.walk(node))
    return guarded


def imports(name: str, tree: ast.Module, modules: set[str]) -> set[str]:
    """Modules of the package that the module `name` imports, at its top or within functions."""
    skipped, found = typing_only(tree), set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                deeper = f"{node.module}.{alias.name}"
                found.add(deeper if deeper in modules else node.module)
    return {other for other in found if other in modules and other != name}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            component = []
            while not component or component[-1] != name:
                component.append(stack.pop())
            if len(component) > 1:
                found.append(sorted(component))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def main() -> int:
    """Print the table and the values beside their limits; 1 if one is passed."""
    modules = trees()
    rows: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    densest, annotations = (0.0, ""), 0
    for name, (text, tree) in modules.items():
        nodes, lines = sum(1 for _ in ast.walk(tree)), text.count("\n")
        package = name.split(".")[1] if "." in name else "sharpscope"
        for at, value in enumerate((nodes, lines, len(text.encode()))):
            rows[package][at] += value
        if lines > 20:  # a module of imports alone has no density to speak of
            densest = max(densest, (nodes / lines, name))
        annotations += sum(
            isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree)
        )
    graph = {name: imports(name, tree, set(modules)) for name, (_, tree) in modules.items()}
    found = circles(graph)
    print(f"{'package':14} {'nodes':>8} {'lines':>7} {'nodes/line':>10} {'bytes/line':>10}")
    for package, (nodes, lines, size) in sorted(rows.items()):
        print(f"{package:14} {nodes:8,} {lines:7,} {nodes / lines:10.1f} {size / lines:10.1f}")
    total = [sum(column) for column in zip(*rows.values(), strict=True)]
    values = {
        "nodes": total[0],
        "nodes a line": total[0] / total[1],
        "nodes a line of one module": densest[0],
        "circles": len(found),
        "Any": annotations,
    }
    passed = False
    for name, value in values.items():
        over = value > LIMITS[name]
        passed |= over
        note = f" ({densest[1]})" if name.endswith("module") else ""
        print(f"{name}: {value:,.7g}{note}, limit {LIMITS[name]:,}{' PASSED' if over else ''}")
    for component in found:
        print("circle:", ", ".join(component))
    return int(passed)


if __name__ == "__main__":
    sys.exit(main())

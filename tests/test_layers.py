"""The packages keep to their layers: heavy libraries and private names stay where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "sharpscope"


def test_imports_without_torch():
    """One process imports them in turn and names the first after which torch is there."""
    modules = ("config", "traces", "cli", "sweeps", "analysis.output", "analysis.reduction")
    code = (
        "import importlib, sys\n"
        f"for module in {modules}:\n"
        "    importlib.import_module('sharpscope.' + module)\n"
        "    if {'torch', 'transformers'} & set(sys.modules): sys.exit(module)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_package_imports_private_names_of_another():
    found = []
    for path in PACKAGE.rglob("*.py"):
        own = ".".join(("sharpscope", *path.relative_to(PACKAGE).with_suffix("").parts[:1]))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("sharpscope."):
                continue
            module = str(node.module)
            names = [*module.split("."), *(alias.name for alias in node.names)]
            private = [name for name in names if name.startswith("_") and not name.startswith("__")]
            if private and module != own and not module.startswith(f"{own}."):
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {module}: {', '.join(private)}")
    assert found == []

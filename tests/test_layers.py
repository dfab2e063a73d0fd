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


PUBLIC_MODULES = {
    "config": {"method", "policy", "probes", "tasks", "token_weights", "training", "warm_start"},
    "traces": {"files", "sampler_rule"},
    "tasks": {"dataset", "tool_world"},
    "policy": {"adapters", "cache", "embedded", "scoring", "sharding"},
    "recording": {"environment", "from_checkpoint", "run_folder"},
    "analysis": {"forks", "outlook", "power", "terms"},
    "training": {"checkpoint", "optimizer", "rollouts", "saving", "setup"},
}
"""Modules that other packages import as such; of all others they import the names that the package exports."""


def _exported(package: Path) -> set[str]:
    """`__all__` of a package and the names of its subpackages."""
    tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    lists = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
    ]
    names = {item.value for value in lists for item in getattr(value, "elts", ()) if isinstance(item, ast.Constant)}
    return names | {path.parent.name for path in package.glob("*/__init__.py")}


def test_packages_import_public_names_of_others():
    problems = []
    for path in PACKAGE.rglob("*.py"):
        own = path.relative_to(PACKAGE).parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = (getattr(node, "module", None) or "").split(".")
            if not isinstance(node, ast.ImportFrom) or len(parts) < 2 or parts[0] != "sharpscope" or parts[1] == own:
                continue
            folder, where = PACKAGE.joinpath(*parts[1:]), f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.module}"
            if folder.is_dir():
                allowed = _exported(folder) | PUBLIC_MODULES.get(parts[1], set())
                problems += [f"{where}: {a.name} is not exported" for a in node.names if a.name not in allowed]
            elif (PACKAGE / parts[1]).is_dir() and parts[-1] not in PUBLIC_MODULES.get(parts[1], set()):
                problems.append(f"{where} is not public; import from the package")
    assert problems == []

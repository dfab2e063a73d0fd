"""Every notebook under docs/tutorials runs from top to bottom on the example traces."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from sharpscope.cli import app

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


SHORT = ("does_my_weighting_act", "how_sharp_is_my_checkpoint")
"""Run with the first layer of the policy alone; nightly with all of it."""
CASES = [pytest.param(path, path.stem in SHORT, id=path.stem) for path in NOTEBOOKS]
CASES += [
    pytest.param(path, False, id=f"{path.stem}-whole", marks=pytest.mark.slow)
    for path in NOTEBOOKS
    if path.stem in SHORT
]


@pytest.mark.parametrize(("notebook", "short"), CASES)
def test_a_notebook_runs(notebook: Path, short: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In this process, which has imported torch: starting a kernel takes longer than most of them."""
    shutil.copytree(ROOT / "data" / "example", tmp_path / "data" / "example")
    (tmp_path / "data" / "reference").symlink_to(ROOT / "data" / "reference")  # large, and only read
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", functools.partial(here, subprocess.run))
    if short:
        load = AutoModelForCausalLM.from_pretrained

        def cut(*args: Any, **options: Any) -> Any:
            found = load(*args, **options)
            model = found[0] if isinstance(found, tuple) else found
            del model.model.layers[1:]
            model.config.num_hidden_layers = 1
            return found

        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", cut)
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            run_cell("".join(cell["source"]), names)


def here(elsewhere: Any, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """What `sharpscope …` prints, without a process of its own."""
    if command[0] != "sharpscope":
        return elsewhere(command, **options)
    with contextlib.chdir(options["cwd"]):
        done = CliRunner().invoke(app, command[1:], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return subprocess.CompletedProcess(command, done.exit_code, done.stdout)


def run_cell(source: str, names: dict[str, Any]) -> None:
    """Run a cell and, as a notebook does, make the HTML or the text of what its last line gives."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        getattr(value, "_repr_html_", value.__repr__)()


def test_there_is_a_notebook():
    assert NOTEBOOKS

"""Every notebook under docs/tutorials runs from top to bottom on the example traces."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path):
    """In a copy, so that its output does not change the checkout."""
    copy = tmp_path / "docs" / "tutorials" / notebook.name
    copy.parent.mkdir(parents=True)
    shutil.copy(notebook, copy)
    shutil.copytree(ROOT / "data" / "example", tmp_path / "data" / "example")
    (tmp_path / "data" / "reference").symlink_to(ROOT / "data" / "reference")  # large, and only read
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--nbmake",
            "--rootdir",
            str(tmp_path),
            "-p",
            "no:cacheprovider",
            "-q",
            str(copy),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_there_is_a_notebook():
    assert NOTEBOOKS

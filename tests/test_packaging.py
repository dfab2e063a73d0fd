"""A wheel holds what the commands need: installed into an empty folder, it runs the main job."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's content, as a non-editable install would have it; dependencies come from this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    (wheel,) = folder.glob("sharpscope-*.whl")
    site = folder / "site"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    assert "sharpscope/py.typed" in names
    files = [path for path in (ROOT / "sharpscope").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.relative_to(ROOT).as_posix() for path in files} <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "figures/"))]
    return site


@pytest.mark.slow  # .ci/run installs a wheel, trains and writes a report with it in an empty folder
def test_the_wheel_trains_in_an_empty_folder(installed: Path, tmp_path: Path):
    small = ["rollout.prompts_per_step=2", "rollout.group_size=2", "evaluation.prompts=2", "threads=1"]
    sets = [part for value in small for part in ("--set", value)]
    code = "import sys, sharpscope; assert sys.argv[1] in sharpscope.__file__, sharpscope.__file__; sys.argv = ['sharpscope'] + sys.argv[2:]; from sharpscope.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, str(installed), "run", "--method", "grpo-sg", "--steps", "1", "--quiet", *sets],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "grpo-sg-knights_knaves-s0" / "run.json").exists()


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

"""The uninterrupted run that interrupted ones are compared with, made once, and the command line in this process."""

from __future__ import annotations

import contextlib
import io
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from sharpscope.cli import main
from sharpscope.training import train
from tests.faults.setting import SETTINGS, tiny_config, tiny_policy


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(the initial policy's folder, an uninterrupted run)."""
    folder = tmp_path_factory.mktemp("whole")
    policy = tiny_policy(folder / "policy")
    config = tiny_config(policy, folder / "run", next(iter(SETTINGS.values())))
    assert train(config).status == "finished"
    return policy, folder / "run"


@dataclass(frozen=True)
class Called:
    """What a command did."""

    code: int | None
    out: str
    err: str


def call(arguments: list[str], folder: Path) -> Called:
    """Run the command line in this process and in `folder`."""
    out, err, before = io.StringIO(), io.StringIO(), Path.cwd()
    code: int | None = 0
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(arguments)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    finally:
        os.chdir(before)
    return Called(code, out.getvalue(), err.getvalue())


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder and what it holds; folders as empty."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}

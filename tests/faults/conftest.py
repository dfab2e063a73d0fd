"""The uninterrupted run that interrupted ones are compared with, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from sharpscope.training import train
from tests.faults.setting import tiny_config, tiny_policy


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(the initial policy's folder, an uninterrupted run)."""
    folder = tmp_path_factory.mktemp("whole")
    policy = tiny_policy(folder / "policy")
    assert train(tiny_config(policy, folder / "run")).status == "finished"
    return policy, folder / "run"

"""The uninterrupted run that interrupted ones are compared with, made once."""

from __future__ import annotations

import pytest

from tests.faults.killing import whole_runs


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory):
    """(the initial policy's folder, an uninterrupted run of the cheaper setting)."""
    return whole_runs(tmp_path_factory.mktemp("whole"), settings=1)

"""A run to export."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.traces.synthetic import Shape, write_run


@pytest.fixture(scope="package")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_run(tmp_path_factory.mktemp("logged") / "one", shape=Shape(steps=5)))

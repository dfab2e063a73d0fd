"""A small sweep in a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.conftest import TOY


@pytest.fixture
def sweep_file(tiny_policy: Path, tmp_path: Path):
    def make(**changes) -> Path:
        base: dict = {}
        for path, value in {**TOY, "policy.model": str(tiny_policy), "steps": 2, "evaluation.every": 0}.items():
            *parents, last = path.split(".")
            part = base
            for parent in parents:
                part = part.setdefault(parent, {})
            part[last] = value
        data = {
            "purpose": "a test",
            "out": str(tmp_path / "runs"),
            "base": base,
            "methods": ["grpo", "ar"],
            "seeds": [0],
        }
        file = tmp_path / "sweep.yaml"
        file.write_text(yaml.safe_dump(data | changes))
        return file

    return make

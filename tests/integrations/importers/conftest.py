"""A folder of prime-rl's exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integrations.importers.records import packed, write_lines


@pytest.fixture
def export(tmp_path: Path) -> tuple[Path, dict[int, list[dict[str, Any]]]]:
    """Three steps of two ranks, the last of them not complete; and the records by step."""
    rng = np.random.default_rng(0)
    records = {step: [packed(rng, step, rank=rank) for rank in (0, 1)] for step in (0, 1, 2)}
    for step, own in records.items():
        folder = tmp_path / "outputs" / "token_exports" / f"step_{step}"
        for record in own:
            write_lines(folder / f"rank_{record['rank']}.jsonl", [record])
        if step < 2:
            (folder / "STABLE").touch()
    return tmp_path / "outputs", records

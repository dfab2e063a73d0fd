"""verl's rollout files as a trace."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import sharpscope
from sharpscope.errors import UserError
from sharpscope.integrations.importers import Labels, import_verl
from tests.integrations.importers.records import LABELS, write_lines


def test_verl(tmp_path: Path):
    def line(step: int, prompt: str, index: int, score: float, **more: Any) -> dict[str, Any]:
        return {"input": prompt, "output": f"a{index}", "gts": "1", "score": score, "step": step} | more

    keyed = [line(1, f"q{p}", i, float(p == i), uid=f"u{p}_{i}_0") for i in range(2) for p in range(2)]
    write_lines(tmp_path / "rollouts" / "1.jsonl", keyed)
    by_text = [line(2, "same", i, i / 4, acc=float(i > 1), format=0.5) for i in range(3)]
    write_lines(tmp_path / "rollouts" / "2.jsonl", by_text)
    (tmp_path / "rollouts" / "notes.jsonl").write_text("not a step")
    assert import_verl(tmp_path / "rollouts", tmp_path / "run", LABELS) == {"steps": 2, "rollouts": 7, "tokens": 0}
    run = sharpscope.load_run(tmp_path / "run")
    first, second = (run.rollouts[run.rollouts["step"] == step] for step in (1, 2))
    assert first["group"].tolist() == [0, 0, 1, 1] and first["prompt"].tolist() == ["q0", "q0", "q1", "q1"]
    assert first["completion"].tolist() == ["a0", "a1", "a0", "a1"] and first["reward"].tolist() == [1, 0, 0, 1]
    assert first["correct"].isna().all() and second["correct"].tolist() == [False, False, True]
    assert json.loads(second["reward_parts"].iloc[0]) == {"acc": 0.0, "format": 0.5}
    assert run.steps["reward_mean"].tolist() == [0.5, 0.25] and run.steps["zero_std_groups"].tolist() == [0, 0]
    assert math.isnan(run.steps["accuracy"][0]) and run.steps["accuracy"][1] == pytest.approx(1 / 3)
    assert run.steps["tokens"].isna().all() and run.tokens().empty


def test_an_empty_file_is_named(tmp_path: Path):
    write_lines(tmp_path / "v" / "1.jsonl", [{"input": "q", "output": "a", "score": 1.0}])
    (tmp_path / "v" / "2.jsonl").write_text("")
    with pytest.raises(UserError, match="step 2 has no completion"):
        import_verl(tmp_path / "v", tmp_path / "run", Labels())
    assert not (tmp_path / "run").exists()

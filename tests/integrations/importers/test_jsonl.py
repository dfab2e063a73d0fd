"""Tables of tokens as JSON lines."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

import sharpscope
from sharpscope.errors import UserError
from sharpscope.integrations.importers import Labels, import_jsonl
from tests.integrations.importers.records import LABELS, NAMES, ROWS, write_lines


def test_jsonl_with_a_sequence_on_each_line(tmp_path: Path):
    file = write_lines(tmp_path / "t.jsonl", ROWS)
    assert import_jsonl(file, tmp_path / "run", LABELS, NAMES) == {"steps": 2, "rollouts": 3, "tokens": 6}
    run = sharpscope.load_run(tmp_path / "run")
    tokens = run.tokens()
    assert tokens["token_id"].tolist() == [5, 7, 8, 9, 8, 9] and tokens["position"].tolist() == [0, 2, 0, 1, 0, 1]
    np.testing.assert_allclose(tokens["logp"], [-0.1, -0.3, -1, -2, -1.5, -2.5], rtol=1e-6)
    assert tokens["advantage"].tolist() == [0.5, 0.5, 0.25, -0.25, 1, 1]
    assert run.rollouts["advantage"].tolist() == [0.5, 0.0, 1.0] and run.rollouts["group"].tolist() == [0, 1, 0]
    assert json.loads(run.rollouts["token_ids"][0]) == [2, 3, 5, 6, 7]
    assert run.steps["completion_length_mean"].tolist() == [2, 2]


def test_jsonl_with_a_token_on_each_line(tmp_path: Path):
    rows = [
        {"step": row["s"], "rollout": index, "token_id": token, "logp": lp, "mask": keep}
        for index, row in enumerate(ROWS)
        for token, lp, keep in zip(row["ids"], row["lp"], row["m"], strict=True)
    ]
    rows[2] |= {"reward": 0.5, "entropy": 1.5}  # known of the last token only
    import_jsonl(write_lines(tmp_path / "t.jsonl", rows), tmp_path / "run", LABELS)
    run = sharpscope.load_run(tmp_path / "run")
    tokens = run.tokens()
    assert tokens["token_id"].tolist() == [5, 7, 8, 9, 8, 9] and tokens["position"].tolist() == [0, 2, 0, 1, 0, 1]
    np.testing.assert_equal(tokens["entropy"].to_numpy()[:3], [math.nan, 1.5, math.nan])
    np.testing.assert_equal(run.rollouts["reward"].to_numpy(), [0.5, math.nan, math.nan])
    assert tokens["rollout"].tolist() == [0, 0, 1, 1, 0, 0] and tokens["advantage"].isna().all()


def test_the_samplers_log_probabilities_are_checked(tmp_path: Path):
    """By the rules of a training, at their defaults: impossible values, and too many ratios far from 1."""
    logp = np.linspace(-3, -0.5, 20)
    some = np.where(np.arange(20) < 2, logp + 0.2, logp)  # 10 % of the ratios are outside [0.9, 1.1]
    lines = [
        {"step": step, "token_id": [5] * 20, "logp": logp.tolist(), "behavior_logp": sampler.tolist()}
        for step, sampler in enumerate((logp, some, np.zeros(20)), 1)
    ]
    import_jsonl(write_lines(tmp_path / "t.jsonl", lines), tmp_path / "run", LABELS)
    events = sharpscope.load_run(tmp_path / "run").events
    found = list(zip(events["step"], events["rule"], events["value"], strict=True))
    assert found == [(2, "sampler_ratio", 0.1), (3, "sampler_logp", 1.0), (3, "sampler_ratio", 1.0)]


def test_probabilities_are_no_log_probabilities(tmp_path: Path):
    write_lines(
        tmp_path / "t.jsonl", [{"token_id": [3, 4], "logp": [-0.1, 0.0]}, {"token_id": [3, 4], "logp": [0.0, 0.4]}]
    )
    with pytest.raises(UserError, match=r"line 2: logp = 0\.4 is above 0.*not probabilities"):
        import_jsonl(tmp_path / "t.jsonl", tmp_path / "run", Labels())
    assert not (tmp_path / "run").exists()

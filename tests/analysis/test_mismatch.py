"""The sampler against the trainer: every number of the table, and where a person sees it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

import sharpscope
from sharpscope.analysis.token_values import mismatch_by_step, mismatch_sums, sampler_section
from sharpscope.integrations.completions import Labels
from sharpscope.integrations.importers import import_files


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """Three steps of sequences of 40 tokens whose rare tokens the sampler gets wrong."""
    folder, rng = tmp_path_factory.mktemp("mismatch"), np.random.default_rng(0)
    rows = []
    for step in (1, 2, 3):
        for _ in range(4):
            sampler = -rng.exponential(1.5, 40)
            noise = rng.normal(0, np.where(sampler < math.log(0.1), 0.3, 0.01))
            logp = np.minimum(sampler + noise, 0.0).tolist()
            rows.append({"step": step, "token_id": [5] * 40, "logp": logp, "behavior_logp": sampler.tolist()})
    file = folder / "t.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    import_files("jsonl", file, folder / "run", Labels())
    return folder / "run", rows


def test_the_numbers_are_a_loop_over_the_tokens(imported):
    path, rows = imported
    run, expected = sharpscope.load_run(path), {1: [], 2: [], 3: []}
    for row in rows:
        for p, q in zip(np.float32(row["logp"]).tolist(), np.float32(row["behavior_logp"]).tolist(), strict=True):
            r = math.exp(p - q)
            expected[row["step"]].append((float(not 0.9 <= r <= 1.1), q - p, (p - q) ** 2 / 2, r - 1 - (p - q)))
    sums = mismatch_sums(run)
    for step, values in expected.items():
        np.testing.assert_allclose(sums.loc[step, ["outside", "k1", "k2", "k3"]], np.sum(values, axis=0), rtol=1e-6)
        assert sums.loc[step, "tokens"] == len(values)
        assert mismatch_by_step(run)[step] == pytest.approx(np.mean(values, axis=0)[3])
    (row,) = sampler_section(sharpscope.load_runs([path])).content.to_dict("records")
    means = np.mean([one for values in expected.values() for one in values], axis=0)
    assert (row["run"], row["tokens"]) == ("run", "480") and row["k1 [nats]"] == pytest.approx(means[1])
    assert row["ratios outside [0.9, 1.1]"] == f"{100 * means[0]:.2f} %"

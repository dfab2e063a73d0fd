"""The sampler against the trainer: every number of the table, and where a person sees it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

import sharpscope
from sharpscope.analysis import load_several
from sharpscope.analysis.mismatch import mismatch_table, sampler_section
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
            rows.append(
                {
                    "step": step,
                    "token_id": [5] * 40,
                    "logp": np.minimum(sampler + noise, 0.0).tolist(),
                    "behavior_logp": sampler.tolist(),
                }
            )
    file = folder / "t.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    import_files("jsonl", file, folder / "run", Labels())
    return folder / "run", rows


def test_the_table_is_a_loop_over_the_tokens(imported):
    path, rows = imported
    result = mismatch_table(sharpscope.load_run(path)).set_index(["part", "range"])
    assert list(result.loc["position"].index) == ["0 to 15", "16 to 63"]
    expected: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for row in rows:
        for position, (p, q) in enumerate(
            zip(np.float32(row["logp"]).tolist(), np.float32(row["behavior_logp"]).tolist(), strict=True)
        ):
            r, mu = math.exp(p - q), math.exp(q)
            values = (float(not 0.9 <= r <= 1.1), q - p, (p - q) ** 2 / 2, r - 1 - (p - q))
            edges = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99)
            low = max(edge for edge in edges if edge <= mu)
            high = min((edge for edge in edges if edge > mu), default=None)
            name = f"from {low:g}" if high is None else f"{low:g} to {high:g}"
            for key in (
                ("all", "all"),
                ("step", str(row["step"])),
                ("position", "0 to 15" if position < 16 else "16 to 63"),
                ("probability", name),
            ):
                expected.setdefault(key, []).append(values)
    assert set(result.index) == set(expected)
    for key, values in expected.items():
        assert result.loc[key, "tokens"] == len(values)
        for name, value in zip(("outside", "k1", "k2", "k3"), np.mean(values, axis=0), strict=True):
            assert result.loc[key, name] == pytest.approx(value, rel=1e-6, abs=1e-9), (key, name)
    rare, common = (
        result.loc[("probability", "0.01 to 0.1"), "outside"],
        result.loc[("probability", "0.5 to 0.9"), "outside"],
    )
    assert rare > 0.5 and common == 0


def test_show_and_the_page_say_it(imported):
    path, _ = imported
    whole = mismatch_table(sharpscope.load_run(path)).iloc[0]
    (row,) = sampler_section(load_several([path])).content.to_dict("records")
    assert (row["run"], row["tokens"]) == ("run", "480") and "probability 0" in row["most at"]
    assert row["ratios outside [0.9, 1.1]"] == f"{100 * whole['outside']:.2f} %" and row["k1 [nats]"] == whole["k1"]

"""Split-half reliability against simulated measures of known reliability, and its table of runs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import sharpscope
from sharpscope.analysis.reliability import reliability_table, split_half
from sharpscope.analysis.study import studies
from tests.traces.synthetic import write_run


@pytest.mark.parametrize("noise", [0.5, 3.0, 12.0])
def test_split_half_is_the_correlation_of_independent_halves(noise):
    """Runs with true values N(0, 1) and prompts with noise: the correlation of means over n/2 prompts is 1/(1 + 2 noise²/n)."""
    rng = np.random.default_rng(0)
    runs, prompts = 400, 32
    values = rng.normal(size=(runs, 1)) + noise * rng.normal(size=(runs, prompts))
    found = split_half(values, splits=40)
    pearson = 1 / (1 + noise**2 / (prompts / 2))
    spearman = 6 / math.pi * math.asin(pearson / 2)  # of a normal pair
    assert found.half == pytest.approx(spearman, abs=0.03)
    assert found.full == pytest.approx(2 * found.half / (1 + found.half)) and (found.runs, found.prompts) == (400, 32)
    # Spearman and Brown at the prompts needed give the target back.
    n = found.prompts_for(0.9) / found.prompts
    assert n * found.full / (1 + (n - 1) * found.full) == pytest.approx(0.9)


def test_nothing_is_said_where_it_cannot_be():
    assert math.isnan(split_half(np.ones((2, 8))).half) and math.isnan(split_half(np.ones((5, 8))).half)
    assert math.isnan(split_half(np.random.default_rng(0).normal(size=(5, 3))).half)
    assert math.isnan(split_half(np.full((5, 8), np.nan)).full)
    assert split_half(-np.eye(6)).prompts_for(0.9) > 0


def test_the_table_reads_the_last_values_by_prompt_of_every_run(tmp_path: Path):
    from sharpscope.traces import TraceWriter

    rng = np.random.default_rng(2)
    truth = rng.lognormal(size=5)
    expected = []
    for seed in range(5):
        folder = write_run(tmp_path / f"s{seed}", method="grpo", seed=seed)
        values = truth[seed] + 0.1 * rng.normal(size=12)
        expected.append(values)
        place = {
            "probe_set": "t/train@a",
            "functional": "nll",
            "parameters": "all",
            "quantity": "sam",
            "rho": 0.5,
            "seed": 3,
        }
        with TraceWriter(folder) as writer:
            for step, shift in ((900, 7.0), (901, 0.0)):
                writer.append(
                    "probe_prompts", {**place, "step": step, "prompt": np.arange(12), "value": values + shift}
                )
                writer.append(
                    "probes",
                    {
                        **place,
                        "step": step,
                        "probe": "perturbation",
                        "value": values.mean() + shift,
                        "std_error": None,
                        "samples": 1,
                        "converged": None,
                        "residual": None,
                        "seconds": 0.25,
                        "prompts": 12,
                        "prompt_std_error": 0.1 * values.mean(),
                    },
                )
    study = studies(sharpscope.load_runs(tmp_path))[0]
    (row,) = reliability_table(study).to_dict("records")
    oracle = split_half(np.stack(expected))
    assert (row["half"], row["reliability"]) == (oracle.half, oracle.full) and row["half"] > 0.9
    assert (row["runs"], row["prompts"], row["seconds"], row["quantity"]) == (5, 12, 0.25, "sam")
    assert row["relative_std_error"] == pytest.approx(0.1)


def test_runs_without_values_by_prompt_have_an_empty_table(tmp_path: Path):
    write_run(tmp_path / "s0", method="grpo", seed=0)
    assert reliability_table(studies(sharpscope.load_runs(tmp_path))[0]).empty
    kept = sharpscope.load_runs(Path(__file__).resolve().parents[3] / "data" / "reference")[0]
    assert isinstance(kept.probe_prompts, pd.DataFrame) and kept.probe_prompts.empty  # schema version 1

"""The parts of a pair's variance are found in drawn studies, and the options they lead to hold by value."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from sharpscope.analysis.claims import study_of
from sharpscope.analysis.claims.base import mean_estimate
from sharpscope.analysis.claims.planning import MEASURED, Pairs
from sharpscope.analysis.claims.registry import judge, options_of, pairs_needed
from sharpscope.analysis.report import difference_table
from sharpscope.analysis.statistics import NO_COLLAPSE
from tests.analysis.claims.planted import frame_run, study


def drawn(
    rng: np.random.Generator, n: int, seed: float, questions: float, checkpoint: float
) -> Pairs:
    """n pairs with planted standard deviations of their parts."""
    between, shared = rng.normal(0, seed, n), rng.normal(0, questions, n)
    late = between[:, None] + shared[:, None] + rng.normal(0, checkpoint, (n, 4))
    base = rng.normal(0.5, 0.1, n)
    values = np.stack([base, base + late[:, -1]], 1)
    return pairs_of_values(values, errors=[questions, 0.0] * n, late=late.tolist())


def pairs_of_values(values: np.ndarray, **known) -> Pairs:
    return Pairs(values=values, measured="questions", cost="1 s", seconds=0.0, **known)


def test_parts_of_the_variance_are_those_that_were_planted() -> None:
    rng = np.random.default_rng(0)
    made = [drawn(rng, 8, 0.02, 0.03, 0.04) for _ in range(1000)]
    planted = 0.02**2 + 0.03**2 + 0.04**2
    assert np.mean([one.variance for one in made]) == pytest.approx(planted, rel=0.04)
    many = drawn(rng, 4000, 0.02, 0.03, 0.04)
    assert many.by_prompts == pytest.approx(0.03**2)
    assert many.by_checkpoint == pytest.approx(0.04**2, rel=0.04)
    assert list(many.options().values()) == [many.by_checkpoint, many.by_prompts]


def test_the_standard_deviation_of_an_option_is_that_of_studies_with_more() -> None:
    """Four times as many questions, and means of four checkpoints, drawn anew."""
    rng = np.random.default_rng(1)
    one = drawn(rng, 6000, 0.02, 0.03, 0.04)
    fewer = drawn(rng, 6000, 0.02, 0.03 / 2, 0.04)
    assert one.deviation(one.by_prompts) == pytest.approx(math.sqrt(fewer.variance), rel=0.03)
    means = np.mean(drawn(rng, 6000, 0.02, 0.03, 0.04).late, axis=1)
    assert one.deviation(one.by_checkpoint) == pytest.approx(means.std(), rel=0.03)


def test_parts_are_at_most_the_variance_and_unknown_ones_are_no_option() -> None:
    rng = np.random.default_rng(2)
    large = drawn(rng, 5, 0.001, 0.5, 0.0)
    quiet = np.stack([np.full(5, 0.5), 0.5 + 1e-3 * rng.normal(size=5)], 1)
    pairs = pairs_of_values(quiet, errors=[0.5] * 10, late=[])
    assert pairs.options() == {"4 times the questions": pairs.variance}
    assert pairs.deviation(pairs.variance) == pytest.approx(math.sqrt(pairs.variance) / 2)
    assert list(large.options()) == ["4 times the questions"]
    assert pairs_of_values(quiet, errors=[math.nan] * 10, late=[]).options() == {}


def test_rows_have_the_pairs_that_each_option_needs_and_its_cost() -> None:
    rng = np.random.default_rng(3)
    runs = []
    for seed in range(8):
        for method in ("grpo", "grpo-sg"):
            value = 0.5 + rng.normal(0, 0.03)
            columns = {"generation_s": 2.0, "training_s": 1.0, "recording_s": 0.5}
            runs.append(frame_run(method, seed, heldout=value, answers=300, columns=columns))
    laid_out = study_of(study(*runs))
    verdicts, _ = judge(laid_out, ["C7"])
    rows = [row for row in options_of(verdicts, laid_out) if row["claim"].startswith("C7")]
    (verdict,) = [v for one in verdicts for v in one.versions if v.name.startswith("C7")][:1]
    table = {row["more of"]: row for row in rows}
    values = verdict.finding.parts[""]
    deviation = float(values["difference"].std(ddof=1))
    level, margin = verdict.terms.level, verdict.claim.margin_of_parts(verdict.terms)
    alone = table["pairs (seeds) alone"]
    assert alone["pairs for 80 %"] == f"{pairs_needed(deviation, margin, level):,}"
    # 40 steps of 3.5 s in each of two runs
    assert alone["cost of a pair"] == "280 s"
    error = np.mean(
        [
            b * (1 - b) / 300 + t * (1 - t) / 300
            for b, t in zip(values["baseline"], values["treatment"], strict=True)
        ]
    )
    asked = table["4 times the questions"]
    left = math.sqrt(deviation**2 - 0.75 * min(error, deviation**2))
    assert float(asked["SD then"]) == pytest.approx(100 * left, rel=5e-3)
    assert asked["pairs for 80 %"] == f"{pairs_needed(left, margin, level):,}"
    assert asked["cost of a pair"] == "+ 6 × 300 completions"
    both = np.corrcoef(values["baseline"], values["treatment"])[0, 1]
    assert (
        table["common random numbers: without"]["part of the variance"]
        == f"correlation {both:+.2f}"
    )
    assert set(MEASURED) == {"C4", "C7", "C10"}


def test_few_pairs_say_what_their_interval_assumes_and_name_the_worst_pair() -> None:
    few = pd.DataFrame({"seed": [3, 4, 5], "difference": [0.01, 0.02, -0.4]})
    found = mean_estimate("accuracy", few, "share", "points")
    assert found is not None and NO_COLLAPSE in found.line and "worst -40 (seed 5)" in found.line
    six = mean_estimate("accuracy", np.linspace(0, 0.05, 6), "share", "points")
    assert six is not None and NO_COLLAPSE not in six.line


def test_a_table_of_few_pairs_says_so_and_an_interval_without_width_shows_nothing() -> None:
    row = {
        "baseline": "grpo",
        "treatment": "grpo-sg",
        "quantity": "reward",
        "unit": "reward",
        "n": 3,
        "baseline_value": 0.4,
        "treatment_value": 0.5,
        "difference": 0.1,
        "low": 0.05,
        "high": 0.15,
        "worst": 0.08,
        "worst_pair": "seed 2",
        "note": "",
    }
    same = row | {"low": 0.1, "high": 0.1}
    one = same | {"n": 1}
    shown = difference_table(pd.DataFrame([row, same, one, row | {"n": 6}]))["shows"].tolist()
    assert shown == [
        f"a difference; {NO_COLLAPSE}",
        f"too few seeds to tell; {NO_COLLAPSE}",
        "too few seeds to tell",
        "a difference",
    ]

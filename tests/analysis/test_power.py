"""Power in closed form against counting and simulation, from runs, from one pair, and from answers alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sharpscope.analysis.claims import judge, study_of
from sharpscope.analysis.power import (
    RECOMMENDED,
    answers_deviation,
    answers_of_pair,
    deviation_interval,
    pairs_needed,
    powers_of,
    powers_of_answers,
    student_power,
)
from sharpscope.analysis.statistics import sign_flip_p
from sharpscope.config import ClaimsSpec
from tests.analysis.claims.frames import paired_study


def test_student_agrees_with_the_rule_itself_on_drawn_studies():
    """The verdicts' own sign flips on normal differences, with the mean at the margin and at 0."""
    rng, n, margin, level = np.random.default_rng(0), 12, 0.9, 0.05
    supported = refuted = 0
    for _ in range(300):
        noise = rng.normal(size=n)
        there = noise + margin
        supported += sign_flip_p(there) <= level and there.mean() > 0 and sign_flip_p(there, "less", margin) > level
        refuted += sign_flip_p(noise, "less", margin) <= level
    found = student_power(1.0, margin, n, level)
    assert supported / 300 == pytest.approx(found[0], abs=0.08) and refuted / 300 == pytest.approx(found[1], abs=0.06)
    assert student_power(1.0, 1.0, 1, level) == (0.0, 0.0) and student_power(0.0, 1.0, 5, level) == (1.0, 1.0)


def test_pairs_needed_is_the_smallest_that_reaches_the_target_and_never_below_what_is_advised():
    n = pairs_needed(1.0, 0.5, 0.05)
    assert min(student_power(1.0, 0.5, n, 0.05)) >= 0.8 > min(student_power(1.0, 0.5, n - 1, 0.05))
    assert pairs_needed(1.0, 50.0, 0.05) == RECOMMENDED
    assert pairs_needed(1.0, 0.5, 0.05, parts=3) > n and pairs_needed(1.0, 1e-4, 0.05) is None


def test_answers_alone_give_a_binomial_standard_deviation():
    assert answers_deviation(0.25, 2000) == pytest.approx(math.sqrt(2 * 0.25 * 0.75 / 2000))
    rows = [power.row() for power in powers_of_answers(0.25, 2000, ClaimsSpec())]
    assert [row["claim"] for row in rows] == ["C7", "C10", "C14"]
    assert (rows[0]["SD of a value"], rows[0]["margin"]) == ("at least 1.37 points", "2 points")


def test_an_interval_of_a_standard_deviation_covers():
    rng = np.random.default_rng(0)
    drawn = [deviation_interval(float(rng.normal(size=4).std(ddof=1)), 4) for _ in range(2000)]
    assert np.mean([low <= 1 <= high for low, high in drawn]) == pytest.approx(0.9, abs=0.02)


def laid_out(seeds, **options):
    return study_of(paired_study(seeds, 0.0, noise=0.02, rng=np.random.default_rng(0), **options))


def test_two_pairs_give_the_pairs_that_are_needed_with_their_uncertainty():
    study = laid_out(2)
    (power,) = powers_of(judge(study, ["C7"])[0])
    values = study.pairing()
    assert power.pilot == len(values.pairs) == 2
    low, high = deviation_interval(power.deviation, 2)
    assert high > 10 * power.deviation > power.deviation > low
    assert power.needed[1] is None or power.needed[1] > power.needed[0]
    row = power.row()
    assert row["SD of a value"].startswith(f"{100 * power.deviation:.3g} [") and row["n for 80 %"] == "8 to 18"


def test_one_pair_gives_the_part_of_the_answers():
    study = laid_out(1)
    assert powers_of(judge(study, ["C7"])[0]) == []
    deviation, where = answers_of_pair(study)
    accuracy = [run.eval.query("step == 40 and temperature == 0")["accuracy"].iloc[0] for run in study.runs.values()]
    assert where == "T = 0" and deviation == pytest.approx(math.sqrt(sum(p * (1 - p) / 400 for p in accuracy)))

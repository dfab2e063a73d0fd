"""What `power` predicts comes true on synthetic studies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.benchmarks import claims_power
from experiments.benchmarks.claims_power import CASES, Found, measure, near, page, table
from sharpscope.analysis.power import Design


def case_of(claim, version):
    (found,) = [case for case in CASES if (case.claim, case.rule.version) == (claim, version)]
    return found


def test_power_comes_true_on_forty_studies():
    """Pilot, recommended size, and studies with the effect at the margin and without one, through the rule of C13."""
    found = measure(case_of("C13", "same gradient"), studies=40, pilot=150)
    assert min(found.design.supported, found.design.refuted) >= 0.8
    assert found.holds, table([found])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule.key)
def test_power_comes_true_on_200_studies(case):
    """Right at least 80 % of the time, wrong at most 5 %, and within 5 points of the prediction."""
    found = measure(case)
    print(table([found]))
    assert found.holds


def test_predictions_that_do_not_come_true_are_named():
    good = Found("C7", "pairs", Design(12, {"answers": 1600.0}, 0.84, 0.92), 200, 168, 184, 4, 3)
    assert good.holds and near(168, 200, 0.84) and not near(100, 200, 0.84)
    for wrong in ({"supported": 120}, {"refuted": 120}, {"wrongly_supported": 25}, {"wrongly_refuted": 25}):
        assert not replace(good, **wrong).holds
    assert "Every count is consistent" in page([good]) and "C14" in page([good]).split("Not measured here: ")[1]
    text = page([good, replace(good, name="C4", supported=120)])
    assert "Not as predicted: C4." in text and "12 pairs, answers 1,600 | 84% | 84% [78%, 89%] | 92%" in text
    assert str(claims_power.PILOT) in text

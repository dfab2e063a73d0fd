"""Studies in which nothing is true: how often is a claim called supported? 200 a claim in the long version."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from experiments.studies.levels import DESIGNS, outcomes
from sharpscope.analysis.claims import CLAIMS, study_of
from sharpscope.analysis.claims.base import ClaimData, decide, directional
from sharpscope.config import ClaimsSpec
from tests.analysis.claims.frames import frame_run, study, tokens_frame
from tests.analysis.claims.planted import MAKERS, SEEDS

STUDIES = 200
LEVEL = 0.05


def not_above(hits: int, studies: int, level: float = LEVEL) -> bool:
    """One-sided binomial test of "the rate is at most `level`"."""
    return bool(scipy.stats.binomtest(hits, studies, level, alternative="greater").pvalue > 0.01)


@pytest.mark.parametrize("tails", ["normal", "heavy", "correlated"])
def test_paired_claims_keep_their_level(tails):
    """The rule of every paired claim, on differences of two methods that are alike."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(STUDIES):
        pairs = rng.standard_t(2, (10, 2)) if tails == "heavy" else rng.normal(size=(10, 2))
        pairs = pairs + (5 * rng.normal(size=(10, 1)) if tails == "correlated" else 0.0)  # the luck of a seed
        difference = 0.05 * (pairs[:, 1] - pairs[:, 0])
        finding = ClaimData(parts={"": pd.DataFrame({"seed": range(10), "difference": difference})})
        hits += decide(CLAIMS["C7"], finding, ClaimsSpec()).verdict == "supported"
    assert not_above(hits, STUDIES, LEVEL / 2)  # two-sided at 5 %: half of it on the claimed side


def test_an_effect_of_the_margin_is_refuted_no_more_often_than_half_the_level():
    rng = np.random.default_rng(1)
    hits = sum(
        directional(0.02 + 0.05 * rng.normal(size=10), "higher", 0.02).p_refuted <= LEVEL / 2 for _ in range(1000)
    )
    assert not_above(hits, 1000, LEVEL / 2)


def null_runs(claim, rng):
    """A study in which the claim's test has nothing to find, so that its p should be uniform."""
    seeds = SEEDS.get(claim, 8)
    if claim == "C2":  # the slope at the edge of what would still be called equal to 1
        frames = [tokens_frame(rng, 6, 120, slope=0.5, correlated=0.3) for _ in range(seeds)]
        return study(*(frame_run(seed=s, tokens=t) for s, t in enumerate(frames)))
    return MAKERS[claim]("none", rng, seeds, "normal")


def false_positives(claim, studies):
    hits = 0
    for index in range(studies):
        laid_out = study_of(null_runs(claim, np.random.default_rng([index, *claim.encode()])))
        laid_out.read_tokens(CLAIMS[claim].reducers)
        found = decide(CLAIMS[claim], CLAIMS[claim].measure(laid_out), ClaimsSpec())
        hits += found.verdict == "supported"
    return hits


@pytest.mark.slow
@pytest.mark.parametrize("claim", MAKERS)
def test_200_null_studies(claim):
    hits = false_positives(claim, STUDIES)
    print(f"{claim}: {hits} of {STUDIES} null studies supported")
    assert not_above(hits, STUDIES)


@pytest.mark.parametrize("design", DESIGNS)
def test_simulated_studies_of_the_primary_claims(design):
    """A small version of `experiments/studies/levels.py`, whose table is on the page of the claims."""
    found = outcomes(design, 60, 12)
    if "margin" in design:
        assert found["supported"] >= 48 and not_above(found["refuted"], 60)
    elif "collapse" not in design and "as in 0.2" not in design:  # without a collapse among the pairs nothing can tell
        assert not_above(found["supported"], 60, LEVEL / 2)
    if "as in 0.2" in design:
        assert found["supported"] > 30

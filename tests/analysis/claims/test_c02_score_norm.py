"""C2: the score norm grows as 1 − π."""

from __future__ import annotations

import numpy as np

from sharpscope.analysis.claims import c02_score_norm, study_of
from sharpscope.analysis.figures.style import lines
from sharpscope.analysis.terms import Terms
from tests.analysis.claims.frames import frame_run, study, tokens_frame
from tests.analysis.claims.verdicts import verdict
from tests.analysis.drawn import line


def test_larger_norm_of_the_hidden_state_is_no_effect_of_probability():
    rng = np.random.default_rng(0)
    runs = [frame_run(seed=s, tokens=tokens_frame(rng, 6, 200, slope=0.0, hidden_slope=1.0)) for s in range(2)]
    assert verdict(study(*runs), "C2").verdict == "refuted"


def test_the_rank_correlation_is_tested_at_the_declared_level():
    rng = np.random.default_rng(0)
    runs = study(*(frame_run(seed=s, tokens=tokens_frame(rng, 6, 200)) for s in range(2)))
    for level, met in ((0.05, True), (1e-6, False)):
        laid_out = study_of(runs, terms=Terms(level=level))
        laid_out.read_tokens(c02_score_norm.CLAIM.reducers)
        assert c02_score_norm.test(laid_out).conditions[0].met is met


def test_score_norms_follow_the_law_that_made_them(study):
    local, exact = c02_score_norm.figure(study, lines(study.labels)).figure.axes
    for axis, label, noise in ((local, "grpo", 0.15), (exact, "token, exact norm", 0.3)):
        x, y = line(axis, label)
        assert len(x) and np.median(np.abs(np.log(y / (5 * x)))) < noise  # the generator's constant is 5, its noise 0.3

"""C9: influence by decile of probability."""

from __future__ import annotations

import numpy as np

from sharpscope.analysis.claims import c09_influence
from sharpscope.analysis.figures.style import lines
from sharpscope.analysis.study import Study
from tests.analysis.claims.frames import frame_run, tokens_frame
from tests.analysis.claims.frames import study as runs_of
from tests.analysis.claims.verdicts import made, verdict


def test_influence_is_drawn_as_the_claim_reads_it():
    rng = np.random.default_rng(0)
    runs = {str(s): frame_run("grpo-sg", s, tokens=tokens_frame(rng, 3, 200, low_influence=-2.0)) for s in range(4)}
    study = Study(runs)
    study.read_tokens([c09_influence.REDUCER])
    up, down = c09_influence.figure(study, lines(study.labels)).figure.axes
    (setting,) = study.settings
    cells = c09_influence.cells_frame(study.results_of("C9", setting))
    for axis, sign in ((up, "positive"), (down, "negative")):
        per_seed = cells[cells["advantage"] == sign].groupby(["decile", "seed"])["influence"].mean().unstack()
        (points,) = [line for line in axis.lines if line.get_marker() == "o" and len(line.get_xdata())]
        np.testing.assert_allclose(points.get_ydata(), per_seed.mean(axis=1), rtol=1e-9)


def test_recorded_influence_is_judged_beside_and_changes_nothing():
    rng = np.random.default_rng(0)
    tokens = [tokens_frame(rng, 6, 200, low_influence=-2.0) for _ in range(3)]
    runs = made("C9", "wrong")
    with_tokens = runs_of(*(frame_run(seed=s, tokens=t) for s, t in enumerate(tokens)))
    found = verdict(with_tokens, "C9")
    assert (found.verdict, found.beside.verdict) == ("untestable", "supported") and "sharpscope fork" in found.reason
    with_tokens.by_name["grpo-0"].forks = next(iter(runs.by_name.values())).forks
    found = verdict(with_tokens, "C9")
    assert (found.verdict, found.beside.verdict) == ("refuted", "supported")

"""C10: controls, rivals and constants of the token weight."""

from __future__ import annotations

import numpy as np
import pytest

from sharpscope.analysis import claims
from sharpscope.analysis.claims.c10_alignment import constants_frame, constants_sensitivity
from tests.analysis.claims.frames import frame_run, study
from tests.analysis.claims.planted import alignment
from tests.analysis.claims.verdicts import NOT_SUPPORTED, verdict


def test_alignment_needs_every_rival():
    def rng():
        return np.random.default_rng(1)

    same = verdict(alignment("effect", rng(), 7, "normal", as_good="grpo-sg-constant"), "C10")
    assert same.verdict in NOT_SUPPORTED and "constant" in same.effect.name
    hot = verdict(alignment("effect", rng(), 7, "normal", as_good="grpo at 0.0003"), "C10")
    assert hot.verdict in NOT_SUPPORTED and "lr 0.0003" in hot.effect.name
    lacking = verdict(alignment("effect", rng(), 7, "normal", missing="grpo-sg-entropy"), "C10")
    assert lacking.verdict == "untestable" and "grpo-sg-entropy" in lacking.reason
    unswept = verdict(alignment("effect", rng(), 7, "normal", sweep=False), "C10")
    assert unswept.verdict == "inconclusive" and "learning rates" in unswept.reason


@pytest.mark.parametrize("tried", [False, True])
def test_a_learning_rate_of_few_seeds_is_shown_beside_and_decides_nothing(tried):
    """A grid made for another claim holds two seeds of plain GRPO at one more rate: C10 must not become untestable."""
    runs = list(alignment("effect", np.random.default_rng(1), 8, "normal").by_name.values())
    few = [frame_run("grpo", s, config={"optimizer": {"lr": 9e-4}}, heldout=0.9, tag="-few") for s in (0, 1)]
    found = verdict(study(*runs, *(few if tried else ())), "C10")
    assert found.verdict == "supported" and found.n == 8
    assert any("lr 0.0009 has 2 seeds" in note for note in found.notes) is tried
    assert any(other.name == "against grpo at lr 0.0009" for other in found.others) is tried
    # no other rate has enough: the few decide, and they are too few
    alone = [run for run in runs if "-hot" not in run.name]
    assert verdict(study(*alone, *few), "C10").verdict == "untestable"


def test_constants_are_read_from_labels():
    runs = [
        frame_run("grpo-sg", 0, heldout=0.5),
        frame_run("grpo-sg+weight.tau=4", 0, heldout=0.4),
        frame_run("grpo-sg+weight.tau=4+weight.mu=0.1", 0, heldout=0.1),
        frame_run("grpo", 0),
    ]
    frame = constants_frame(claims.study_of(study(*runs)))
    rows = set(frame[["constant", "setting", "accuracy", "default"]].itertuples(index=False, name=None))
    assert rows == {("tau", 9.0, 0.5, True), ("tau", 4.0, 0.4, False)}
    (axis,) = constants_sensitivity(frame).axes
    assert axis.lines[0].get_xdata() == pytest.approx([4, 9]) and axis.lines[0].get_ydata() == pytest.approx([0.4, 0.5])

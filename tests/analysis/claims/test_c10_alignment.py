"""C10: controls, rivals and constants of the token weight."""

from __future__ import annotations

import numpy as np
import pytest

from sharpscope.analysis import claims
from sharpscope.analysis.claims.c10_alignment import constants_frame, constants_sensitivity
from tests.analysis.claims.frames import frame_run, study
from tests.analysis.claims.planted import alignment
from tests.analysis.claims.verdicts import NOT_SUPPORTED, verdict


def test_alignment_needs_both_rivals():
    def rng():
        return np.random.default_rng(1)

    same = verdict(alignment("effect", rng(), 7, "normal", as_good="grpo-sg-shuffled"), "C10")
    assert same.verdict in NOT_SUPPORTED and "shuffled" in same.effect.name
    lacking = verdict(alignment("effect", rng(), 7, "normal", missing="grpo-sg-reverse"), "C10")
    assert lacking.verdict == "untestable" and "grpo-sg-reverse" in lacking.reason
    # the other controls are shown and decide nothing
    beside = verdict(alignment("effect", rng(), 7, "normal", as_good="grpo-sg-constant"), "C10")
    assert beside.verdict == "supported" and any("constant" in other.name for other in beside.others)


def with_doses(runs, **degrees):
    for run in runs.by_name.values():
        run.steps["update_rotation"] = degrees.get(run.method.replace("-", "_"), 0.0)
    return runs


def test_rivals_must_have_the_same_dose():
    runs = alignment("effect", np.random.default_rng(1), 7, "normal")
    doses = {"grpo_sg": 12.0, "grpo_sg_reverse": 14.0}
    result = verdict(with_doses(runs, grpo_sg_shuffled=3.0, **doses), "C10")
    assert result.verdict == "untestable" and "grpo-sg-shuffled by 3°" in result.reason
    assert verdict(with_doses(runs, grpo_sg_shuffled=10.0, **doses), "C10").verdict == "supported"
    # weights that change nothing are too small a dose, whatever that of the rivals
    inert = verdict(with_doses(runs, grpo_sg_reverse=0.0, grpo_sg_shuffled=0.0), "C10")
    assert inert.verdict == "untestable" and "turned the update by 0°; the rule needs 5°" in inert.reason


def test_of_several_variants_of_a_control_the_one_of_matched_dose_is_compared():
    runs = with_doses(alignment("effect", np.random.default_rng(1), 7, "normal"), grpo_sg=12.0, grpo_sg_reverse=12.0)
    stronger = [frame_run("grpo-sg-shuffled+weight.U=4", s, heldout=0.9) for s in range(7)]
    for run in stronger:
        run.steps["update_rotation"] = 11.0
    result = verdict(study(*runs.by_name.values(), *stronger), "C10")
    assert "weight.U=4" in result.effect.name and result.verdict == "refuted"


def test_a_treatment_with_changed_constants_has_controls_with_the_same_constants():
    methods = {"grpo": 0.5, "grpo-sg+weight.U=4": 0.9, "grpo-sg-reverse+weight.of.U=4": 0.5}
    runs = [frame_run(name, s, heldout=at + 0.01 * s) for name, at in methods.items() for s in range(7)]
    lacking = verdict(study(*runs), "C10", treatment="grpo-sg+weight.U=4")
    assert lacking.verdict == "untestable" and "no run of grpo-sg-shuffled+weight.of.U=4" in lacking.reason
    runs += [frame_run("grpo-sg-shuffled+weight.of.U=4", s, heldout=0.5 + 0.01 * s) for s in range(7)]
    assert verdict(study(*runs), "C10", treatment="grpo-sg+weight.U=4").verdict == "supported"


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

"""What misled version 0.2: saturated sharpness, effects of the temperature, rare collapse, a slope that is excluded."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.analysis.claims.frames import frame_run, study, tokens_frame
from tests.analysis.claims.planted import made, verdict


def probed(method, seed, rises, ceiling, steps=(0, 40), **options):
    probes = [
        {"step": step, "quantity": q, "rho": rho, "value": rise, "ceiling": ceiling}
        for q in ("sam", "asam")
        for rho, rise in rises.items()
        for step in steps
    ]
    return frame_run(method, seed, probes=probes, **options)


def test_equal_curvature_and_lower_accuracy_do_not_support_lower_sharpness():
    """The rise is a fixed share of the correct completions in both arms; the treatment has 10 % fewer of them."""
    rng = np.random.default_rng(0)
    runs = []
    for seed in range(12):
        for method, accuracy in (("grpo", 0.5), ("grpo-sg", 0.45)):
            share = 0.15 * np.exp(0.03 * rng.normal())
            runs.append(probed(method, seed, {0.05: share * accuracy}, accuracy))
    found = verdict(study(*runs), "C4")
    assert found.verdict in ("refuted", "inconclusive")
    raw = next(other for other in found.others if "SAM sharpness at matched step, the rise itself" in other.name)
    assert raw.value < -0.05 and raw.p_value < 0.05  # what version 0.2 called support


def test_a_saturated_radius_is_marked_and_enters_no_verdict():
    for ceiling, estimated in ((0.3, False), (None, True)):  # not recorded: the training accuracy, 0.6, stands for it
        rises = (("grpo", 0.295), ("grpo-sg", 0.25))
        found = verdict(study(*(probed(m, s, {0.5: v}, ceiling) for s in range(8) for m, v in rises)), "C4")
        assert found.verdict == "untestable" and "radius 0.5 is saturated" in found.reason
        assert "probes.rho" in found.reason and ("ceiling: training accuracy" in found.reason) is estimated


def test_the_radius_is_the_one_that_all_runs_share_and_is_named():
    """The treatment was probed at smaller radii alone, where any run is less sharp: that is no effect of the method."""
    runs = []
    for seed in range(8):
        for method, radii in (("grpo", (0.01, 0.05, 0.5)), ("grpo-sg", (0.01, 0.05))):
            runs.append(probed(method, seed, {rho: 2 * rho * (1 + 0.1 * seed) for rho in radii}, 0.9))
    found = verdict(study(*runs), "C4")
    assert found.verdict != "supported" and found.effect.value == 0 and found.n == 8
    assert any("radius 0.05, shared by all runs" in note for note in found.finding.notes)


def test_sharpness_is_compared_on_one_probe_set_for_each_pair():
    """Seeds may have questions of their own; the two runs of a pair must not."""

    def judged(name_of):
        runs = []
        for seed in range(8):
            for method, rise in (("grpo", 0.1), ("grpo-sg", 0.05)):
                run = probed(method, seed, {0.05: rise * (1 + 0.1 * seed)}, 0.9)
                run.probes["probe_set"] = name_of(method, seed)
                runs.append(run)
        return verdict(study(*runs), "C4")

    found = judged(lambda method, seed: f"train-{seed}")
    assert found.n == 8 and found.effect.value == pytest.approx(math.log(0.5))
    found = judged(lambda method, seed: f"train-{method if seed < 2 else seed}")
    assert found.n == 6 and any(
        "2 pairs were not probed, or not on one probe set" in note for note in found.finding.notes
    )
    assert judged(lambda method, seed: f"train-{method}").verdict == "untestable"


def accuracies(greedy, sampled, seeds=12, noise=0.005):
    """Pairs whose difference is `greedy` at temperature 0 and `sampled` at temperature 1."""
    rng = np.random.default_rng(0)
    runs = []
    for seed in range(seeds):
        for method, (cold, hot) in (("grpo", (0.0, 0.0)), ("grpo-sg", (greedy, sampled))):
            value = 0.5 + cold + noise * rng.normal()
            runs.append(frame_run(method, seed, heldout=value, shift=hot - cold + noise * rng.normal()))
    return study(*runs)


def test_arms_that_differ_in_temperature_alone_neither_support_nor_refute():
    for effect in (-0.04, 0.04):
        found = verdict(accuracies(0.0, effect), "C7")
        assert found.verdict == "inconclusive" and "depends on the temperature" in found.reason
    assert verdict(accuracies(0.0, 0.0), "C7").verdict == "refuted"
    assert verdict(accuracies(0.05, 0.05), "C7").verdict == "supported"
    opposite = verdict(accuracies(0.05, -0.005), "C7")
    assert opposite.verdict == "supported" and "signs differ" in "".join(opposite.finding.notes)


def test_runs_without_greedy_evaluation_are_untestable_and_name_the_setting():
    for claim in ("C7", "C10", "C14"):
        runs = made(claim, "effect")
        for run in runs.by_name.values():
            run.eval = run.eval[run.eval["temperature"] == 1.0]
        found = verdict(runs, claim)
        assert found.verdict == "untestable" and "evaluation.temperatures" in found.reason
        assert any("T = 1" in other.name and other.p_value < 0.05 for other in found.others)


def test_rare_collapse_is_not_reported_without_its_worst_pair():
    rng = np.random.default_rng(0)
    runs = []
    for seed in range(20):
        for method, effect in (("grpo", 0.0), ("grpo-sg", -0.27 if seed in (3, 11) else 0.03)):
            runs.append(frame_run(method, seed, heldout=0.5 + effect + 0.002 * rng.normal()))
    found = verdict(study(*runs), "C7")
    assert found.verdict != "supported"
    assert found.effect.worst[0] < -0.26 and "worst -27" in found.line() and "median +3" in found.line()


def test_a_slope_whose_interval_excludes_the_claimed_one_is_not_supported():
    rng = np.random.default_rng(0)
    runs = study(*(frame_run(seed=s, tokens=tokens_frame(rng, 8, 300, slope=1.3)) for s in range(3)))
    found = verdict(runs, "C2")
    assert found.effect.interval.low > 1 and found.verdict == "inconclusive"
    assert "interval holds 1" in found.reason

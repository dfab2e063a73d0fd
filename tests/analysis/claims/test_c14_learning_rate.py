"""C14: the treatment against the baseline at every learning rate."""

from __future__ import annotations

import numpy as np
import pytest

from tests.analysis.claims.frames import frame_run, study
from tests.analysis.claims.planted import learning_rate
from tests.analysis.claims.verdicts import NOT_SUPPORTED, made, verdict


def test_one_learning_rate_that_does_as_well_is_enough_against():
    result = verdict(made("C14", "effect", as_good=2e-4), "C14")
    assert result.verdict in NOT_SUPPORTED and "lr 0.0002" in result.effect.name


@pytest.mark.parametrize(("left_out", "side"), [("-5e-05", "below"), ("-0.0002", "above"), ("-0.0001", "equal to")])
def test_a_sweep_has_rates_on_both_sides(left_out, side):
    runs = [run for run in made("C14", "effect").by_name.values() if f"{left_out}-" not in run.name]
    result = verdict(study(*runs), "C14")
    assert result.verdict == "untestable" and f"{side} that of grpo-sg" in result.reason


def test_a_rate_of_few_seeds_is_shown_and_decides_nothing():
    runs = list(learning_rate("effect", np.random.default_rng(1), 8, "normal").by_name.values())
    few = [frame_run("grpo", s, config={"optimizer": {"lr": 9e-4}}, heldout=0.9, tag="-few") for s in (0, 1)]
    result = verdict(study(*runs, *few), "C14")
    assert result.verdict == "supported" and result.n == 8
    assert any("lr 0.0009 has 2 seeds" in note for note in result.notes)
    assert any(other.name == "against grpo at lr 0.0009" for other in result.others)


def test_the_effect_is_the_smallest_difference():
    runs = made("C14", "none").by_name.values()

    def accuracy(run):
        rows = run.eval.query("split == 'heldout' and temperature == 1 and step == 40")
        return rows["accuracy"].iloc[0]

    treated = {run.seed: accuracy(run) for run in runs if run.method == "grpo-sg"}
    by_rate = {}
    for run in runs:
        if run.method == "grpo":
            by_rate.setdefault(run.config["optimizer"]["lr"], []).append(treated[run.seed] - accuracy(run))
    means = {rate: np.mean(values) for rate, values in by_rate.items()}
    result = verdict(made("C14", "none"), "C14")
    assert result.effect.value == pytest.approx(min(means.values()))


@pytest.mark.parametrize("middle", [-0.002, -0.03], ids=["by chance", "in every pair"])
def test_effect_and_p_are_those_of_the_rate_that_decides(middle):
    """It beats the lowest rate by chance, and loses to the two others, to the highest one most."""
    rng = np.random.default_rng(0)
    runs = [frame_run("grpo-sg", seed, heldout=0.5) for seed in range(8)]
    for rate, lead in ((5e-5, 0.002), (1e-4, middle), (2e-4, -0.05)):
        noise = rng.permutation(np.linspace(-0.02, 0.02, 8))
        runs += [
            frame_run("grpo", s, config={"optimizer": {"lr": rate}}, heldout=0.5 - lead + noise[s], tag=f"-{rate:g}")
            for s in range(8)
        ]
    result = verdict(study(*runs), "C14")
    assert result.verdict == "refuted" and "lr 0.0002" in result.effect.name
    assert result.effect.value == pytest.approx(-0.05)
    assert result.p_value == result.effect.p_value == pytest.approx(2 / 2**8)


def test_a_treatment_without_a_recorded_rate_is_untestable():
    runs = learning_rate("effect", np.random.default_rng(0), 6, "normal")
    for run in runs.by_name.values():
        if run.method == "grpo-sg":
            del run.config["optimizer"]["lr"]
    result = verdict(runs, "C14")
    assert result.verdict == "untestable" and "optimizer.lr" in result.reason

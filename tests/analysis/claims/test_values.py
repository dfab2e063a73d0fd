"""Numbers of single claims against sums by hand, and what makes each of them untestable."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from sharpscope.analysis.claims import gradients, judge, sharpness, study_of
from sharpscope.analysis.claims.one_update import clusters, paired
from sharpscope.analysis.plots import paired_dots
from sharpscope.analysis.tokens import scan
from sharpscope.traces import TraceWriter, load_run, update_run_info
from tests.analysis.claims import planted
from tests.analysis.claims.planted import (
    NOT_SUPPORTED,
    fork_frame,
    frame_run,
    made,
    study,
    tokens_frame,
    verdict,
)
from tests.loops import some
from tests.traces.synthetic import new_run, rows, softmax_tokens


def test_every_violation_of_the_logit_bounds_is_counted(tmp_path):
    run = new_run(tmp_path / "a")
    update_run_info(run, vocabulary=30)
    frame = rows("tokens", 1, 500) | softmax_tokens(
        np.random.default_rng(0), 500, 30, sharpness=6.0
    )
    with TraceWriter(run) as writer:
        writer.append("tokens", frame)
        broken = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in frame.items()} | {
            "step": 2
        }
        likely = np.flatnonzero(frame["logp"] < -1e-3)
        broken["logit_grad_norm"][likely[:3]] *= 2.0
        broken["logit_grad_norm"][likely[3:5]] *= 0.4
        writer.append("tokens", broken)
        # float32's rounding on sharp distributions is no violation
        for step, scale in enumerate((0.1, 10.0, 30.0), 3):
            stats = softmax_tokens(np.random.default_rng(step), 500, 30, scale)
            writer.append("tokens", rows("tokens", step, 500) | stats)
    results = scan({"a": load_run(run)}, [gradients.BOUNDS])["C1"]
    counts = [sum(result.values[key] for result in results) for key in ("tokens", "above", "below")]
    assert counts == [2500, 3, 2]


def test_the_check_of_the_recording_holds_or_not():
    for factor, holds in ((1.0, True), (1.5, False)):
        frame = tokens_frame(np.random.default_rng(0), 4, 300)
        frame.loc[:2, "logit_grad_norm"] *= factor
        (found,) = judge(study_of(study(frame_run("grpo-sg", tokens=frame))), ["C1"])[1]
        assert found.holds is holds


# Tokens.


def test_larger_norm_of_the_hidden_state_is_no_effect_of_probability():
    rng = np.random.default_rng(0)
    runs = [
        frame_run(seed=s, tokens=tokens_frame(rng, 6, 200, slope=0.0, hidden_slope=1.0))
        for s in range(2)
    ]
    assert verdict(study(*runs), "C2").verdict == "refuted"


def test_dominance_says_where_its_margin_cannot_be_reached():
    """Nearly all tokens certain: the null's top hundredth holds everything, and no norm could hold more."""
    rng = np.random.default_rng(0)
    runs = []
    for seed in range(2):
        frame = tokens_frame(rng, 8, 200, concentration=1.5)
        rare = np.arange(len(frame)) % 200 == 0
        frame["logp"] = np.where(rare, np.log(0.5), np.log1p(-1e-6))
        runs.append(frame_run(seed=seed, tokens=frame))
    result = verdict(study(*runs), "C3")
    assert result.verdict == "untestable" and "no room for 5 points more" in result.reason


def test_recorded_influence_is_the_second_version_and_changes_nothing():
    rng = np.random.default_rng(0)
    frames = [tokens_frame(rng, 6, 200, low_influence=-2.0) for _ in range(3)]
    runs = study(*(frame_run(seed=s, tokens=t) for s, t in enumerate(frames)))
    runs.by_name["grpo-0"].forks = next(iter(made("C9", "wrong").by_name.values())).forks
    found = verdict(runs, "C9")
    assert (found.verdict, found.other.verdict) == ("refuted", "supported")


# The grid.


def test_a_gap_of_sampling_noise_is_untestable():
    runs = planted.grid("effect", np.random.default_rng(0), 2, "normal")
    for run in runs.by_name.values():
        run.eval["n"] = 60
    result = verdict(runs, "C6")
    assert (
        result.verdict == "untestable"
        and "reliability" in result.reason
        and "answers" in result.reason
    )


def test_the_granulated_coefficient_equals_its_definition():
    rng = np.random.default_rng(6)
    cells = list(itertools.product([0, 1, 2], [0, 1], [7, 8]))  # group size, weight decay, stratum
    table = pd.DataFrame(cells, columns=["group size", "weight decay", "seed"])
    table["asam"], table["gap"] = rng.normal(size=(2, len(cells)))

    def psi(axis, other):
        taus: dict[int, list[float]] = {7: [], 8: []}
        for (_, seed), part in table.groupby([other, "seed"]):
            both = itertools.combinations(part[["asam", "gap"]].to_numpy(), 2)
            taus[seed].append(np.mean([np.sign(one - two).prod() for one, two in both]))
        return pd.Series({seed: np.mean(values) for seed, values in taus.items()})

    found = sharpness.agreement(table, "asam", ["group size", "weight decay"], ["seed"]).set_index(
        "seed"
    )
    axes = ["group size", "weight decay"]
    by_axis = {axis: psi(axis, other) for axis, other in zip(axes, axes[::-1], strict=True)}
    for axis, expected in some(by_axis.items()):
        assert found[axis].to_dict() == pytest.approx(expected.to_dict())
    assert found["difference"].to_dict() == pytest.approx((sum(by_axis.values()) / 2).to_dict())
    # what a stratum does to both is no association
    moved = table.assign(
        asam=table["asam"] + 100 * table["seed"], gap=table["gap"] + 100 * table["seed"]
    )
    again = sharpness.agreement(moved, "asam", axes, ["seed"])["difference"]
    assert again.tolist() == pytest.approx(found["difference"].tolist())


def test_runs_that_have_nothing_to_be_compared_with_are_none_of_the_grid():
    """More seeds of one setting, other learning rates, and a second run of a setting change neither n nor any number."""
    runs = planted.grid("none", np.random.default_rng(5), 2, "normal")
    before = verdict(runs, "C6")
    plain = next(e for e in before.others if e.name == "plain Kendall τ over all runs")
    # what a test that does not hold the learning rate would report
    assert before.n == 6 and plain.value > 0.3
    more, values = [], {"heldout": 0.3, "train": 0.7, "sharpness": 9.0}
    for method, seed, lr in itertools.product(("grpo", "grpo-sg"), (5, 6), (1e-4, 8e-4)):
        config = {"rollout": {"group_size": 8, "prompts_per_step": 24}, "optimizer": {"lr": lr}}
        more.append(frame_run(method, seed, config=config, tag=f"-x{lr:g}", **values))
    first = next(iter(runs.by_name.values()))
    after = verdict(
        study(*runs.by_name.values(), *more, replace(first, name=f"{first.name}-again")), "C6"
    )
    assert (after.n, after.effect, after.evidence) == (6, before.effect, before.evidence)


# Accuracy.


@pytest.mark.parametrize("rival", ["grpo-sg-shuffled", "grpo-sg-reverse"])
def test_one_control_that_does_as_well_is_enough_against_alignment(rival):
    result = verdict(made("C10", "effect", as_good=rival), "C10")
    assert result.verdict in NOT_SUPPORTED and rival in result.effect.name
    lacking = verdict(made("C10", "effect", missing=rival), "C10")
    assert lacking.verdict == "untestable" and f"no run of {rival}" in lacking.reason


def test_controls_are_compared_at_a_matched_dose():
    runs = made("C10", "effect")
    for run in runs.by_name.values():
        run.steps["update_rotation"] = {"grpo-sg": 15.0, "grpo-sg-reverse": 30.0}.get(
            run.method, 15.0
        )
    result = verdict(runs, "C10")
    assert (
        result.verdict == "untestable"
        and "the dose is not matched" in result.reason
        and "30°" in result.reason
    )
    # the only variant that was run is the control
    for run in runs.by_name.values():
        if run.method == "grpo-sg-reverse":
            run.method, run.steps["update_rotation"] = "grpo-sg-reverse+weight.of.U=4", 16.0
    assert verdict(runs, "C10").verdict == "supported"


@pytest.mark.parametrize(
    ("left_out", "side"), [("-5e-05", "below"), ("-0.0002", "above"), ("-0.0001", "equal to")]
)
def test_a_sweep_has_rates_on_both_sides(left_out, side):
    runs = [run for run in made("C14", "effect").by_name.values() if f"{left_out}-" not in run.name]
    result = verdict(study(*runs), "C14")
    assert result.verdict == "untestable" and f"{side} that of grpo-sg" in result.reason


def test_effect_and_p_are_those_of_the_rate_that_decides():
    """It beats the lowest rate by chance, and loses to the two others, to the highest one most; two seeds of a rate do not count."""
    rng = np.random.default_rng(0)
    runs = [frame_run("grpo-sg", seed, heldout=0.5) for seed in range(8)]
    runs += [
        frame_run("grpo", s, config={"optimizer": {"lr": 9e-4}}, heldout=0.9, tag="-few")
        for s in (0, 1)
    ]
    for rate, lead in ((5e-5, 0.002), (1e-4, -0.03), (2e-4, -0.05)):
        noise = rng.permutation(np.linspace(-0.02, 0.02, 8))
        runs += [
            frame_run(
                "grpo",
                s,
                config={"optimizer": {"lr": rate}},
                heldout=0.5 - lead + noise[s],
                tag=f"-{rate:g}",
            )
            for s in range(8)
        ]
    result = verdict(study(*runs), "C14")
    assert result.verdict == "refuted" and "lr 0.0002" in result.effect.name
    assert result.effect.value == pytest.approx(-0.05)
    assert result.p_value == result.effect.p_value == pytest.approx(2 / 2**8)


# Gradient norms and entropy.


def test_roughness_and_spike_rate_are_those_of_plain_loops():
    norms = np.exp(np.random.default_rng(0).normal(0, 0.3, 70))
    norms[[20, 33]] = np.nan, 0.0
    norms[[25, 60]] = 40.0, 60.0
    good = [norm if norm > 0 else None for norm in norms]
    moves = [abs(math.log(b / a)) for a, b in itertools.pairwise(good) if a and b]
    assert gradients.roughness(norms) == pytest.approx(statistics.median(moves))
    assert gradients.roughness(7 * norms) == pytest.approx(gradients.roughness(norms))
    logs, hits = [math.log(norm) for norm in good if norm], []
    for t in range(10, len(logs)):
        past = logs[max(0, t - 50) : t]
        middle = statistics.median(past)
        scale = 1.4826 * statistics.median(abs(value - middle) for value in past)
        hits.append(logs[t] > middle + 4 * scale)
    assert gradients.spike_rate(norms) == pytest.approx(statistics.mean(hits)) and sum(hits) == 2
    assert gradients.roughness(norms[:19]) is None and gradients.spike_rate(norms[:19]) is None


def test_the_prediction_of_a_change_is_the_sum_over_the_steps_between():
    """Entropy measured at every third step alone: lr·updates·mean(c·polarity) of three steps against their change."""
    runs = planted.entropy("effect", np.random.default_rng(3), 7, "normal")
    run = runs.by_name["grpo-0"]
    run.probes = run.probes[run.probes["step"] % 3 == 0]
    laid_out = study_of(runs)
    judge(laid_out, ["C12"])
    frame = gradients.prediction_frame(laid_out)
    row = frame[(frame["run"] == "grpo-0") & (frame["step"] == 12)].iloc[0]
    chosen = run.token_frame[run.token_frame["step"].isin([10, 11, 12])]
    push = (chosen["loss_coef"] * chosen["polarity"]).groupby(chosen["step"]).mean().sum()
    entropies = run.probes.set_index("step")["value"]
    assert row["predicted"] == pytest.approx(1e-4 * push)
    assert row["measured"] == pytest.approx(entropies[12] - entropies[9])
    assert gradients.drift(run) == pytest.approx(math.log(entropies[60] / entropies[3]))


def test_partial_correlation_leaves_out_a_parabola():
    rng, step = np.random.default_rng(2), np.arange(3.0, 43.0)
    values = rng.normal(size=(2, 40)) + np.array([[1.0], [-2.0]]) * (0.1 * step + 0.01 * step**2)
    left = [v - np.polyval(np.polyfit(step, v, 2), step) for v in values]
    assert gradients.partial_correlation(*values, step) == pytest.approx(np.corrcoef(left)[0, 1])
    assert gradients.partial_correlation(values[0][:14], values[1][:14], step[:14]) is None


# One update.

ARMS = {
    "C4": ("sam_sharpness", {"grpo-sg": -0.1}, {"grpo-sg": 0.05}),
    "C7": ("heldout_failure", {"grpo-sg": 0.5}, {"grpo-sg": -0.5}),
    "C10": (
        "heldout_failure",
        {"grpo-sg": 0.5, "grpo-sg-reverse": 0.0, "grpo-sg-shuffled": 0.0},
        {"grpo-sg": 0.5, "grpo-sg-reverse": 0.0, "grpo-sg-shuffled": 0.9},
    ),
    "C12": ("entropy", {"cov-grpo": -0.5}, {"cov-grpo": 0.5}),
}
"""Claim → outcome, effects of the arms that support it, effects that refute it."""


def with_forks(effects, outcome, **options):
    run = frame_run(seed=0)
    run.forks = fork_frame(np.random.default_rng(0), effects, outcome, noise=0.02, **options)
    return study(run)


@pytest.mark.parametrize("claim", ARMS)
def test_planted_differences_between_arms_are_found(claim):
    outcome, there, absent = ARMS[claim]
    found = verdict(with_forks(there, outcome), claim)
    assert found.other.verdict == "supported"
    assert found.verdict == "untestable"  # one update never decides the claim between runs
    assert verdict(with_forks(absent, outcome), claim).other.verdict == "refuted"


def test_a_saturated_fork_enters_no_verdict():
    runs = with_forks({"grpo-sg": -0.1}, "sam_sharpness")
    forks = runs.by_name["grpo-0"].forks
    # the rise is 0.83 of what is possible
    forks.loc[forks["outcome"] == "train_failure", "value"] = 0.88
    found = verdict(runs, "C4").other
    assert found.verdict == "untestable" and "saturated" in found.reason


def test_values_are_the_differences_of_the_batches_and_a_batch_of_two_forks_is_one_cluster():
    runs = with_forks({"grpo-sg": 0.5}, "heldout_failure")
    run = runs.by_name["grpo-0"]
    forks = run.forks.query("outcome == 'heldout_failure'")
    change = (forks["value"] - forks["start"]).groupby([forks["arm"], forks["batch"]]).first()
    expected = ((change["grpo-sg"] - change["grpo"]) / abs(change["grpo"].mean())).mean()
    assert verdict(runs, "C7").other.effect.value == pytest.approx(expected)
    run.forks = pd.concat([run.forks, run.forks.assign(fork="b")], ignore_index=True)
    again = verdict(runs, "C7").other
    assert again.n == 12 and again.effect.value == pytest.approx(expected)
    # a batch whose row is not valid is left out
    run.forks.loc[(run.forks["arm"] == "grpo-sg") & (run.forks["batch"] == 3), "valid"] = False
    assert verdict(study(replace(run)), "C7").other.n == 11


def test_states_are_the_clusters_where_there_are_enough():
    runs = with_forks({"grpo-sg": 0.5}, "heldout_failure")
    # six states of two batches
    runs.by_name["grpo-0"].forks["step"] = runs.by_name["grpo-0"].forks["batch"] // 2
    frame = paired(study_of(runs, treatment=None), "grpo-sg", "grpo", "heldout_failure")
    found = clusters(frame, "change")
    assert len(found) == 6 and "batch" not in found
    assert found["difference"].iloc[0] == pytest.approx(
        frame.loc[frame["step"] == 0, "change"].mean()
    )


def test_a_claim_is_drawn_from_what_it_tested():
    found = verdict(made("C10", "effect"), "C10")
    axis = paired_dots(found).axes[0]
    dots = [line.get_xdata().tolist() for line in axis.lines if line.get_marker() == "."]
    assert dots == [(100 * part["difference"]).tolist() for part in found.finding.parts.values()]

"""Power of the claims' tests: the simulation, the split of the variance, and the designs it recommends."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sharpscope.analysis.claims import study_of, verdicts_of
from sharpscope.analysis.claims.base import Sample, Source
from sharpscope.analysis.power import (
    Costs,
    Model,
    approximate,
    costs_of,
    outline,
    power,
    power_of,
    power_text,
    simulate,
    write_power,
)
from sharpscope.analysis.statistics import sign_flip_p, sign_flip_tests
from sharpscope.errors import UserError
from tests.analysis.claims.frames import frame_run, paired_study, study
from tests.analysis.claims.planted import alignment, fork_frame, grid

LEVEL = 0.05


@pytest.mark.parametrize("n", [3, 9, 17])
def test_many_samples_are_tested_as_one_is(n):
    values = np.random.default_rng(n).normal(size=(7, n))
    both, below = sign_flip_tests(values, 0.4)
    assert both == pytest.approx([sign_flip_p(row) for row in values])
    assert below == pytest.approx([sign_flip_p(row, "less", shift=0.4) for row in values])


def test_simulated_power_of_six_clusters_is_that_of_six_equal_signs():
    """With six values a two-sided p below 5 % needs all of one sign: power Φ(δ/σ)^6."""
    from scipy.stats import norm

    supported, _ = simulate(np.array([[1.0]]), np.array([1.2]), 6, LEVEL, draws=4000)
    # those that also exclude the margin are refuted; with all values positive and a mean below it that needs luck
    assert supported == pytest.approx(norm.cdf(1.2) ** 6, abs=0.04)


def test_student_agrees_with_the_simulation_where_there_are_many_clusters():
    supported, refuted = simulate(np.array([[1.0]]), np.array([0.6]), 25, LEVEL)
    assert min(supported, refuted) == pytest.approx(approximate(1.0, 0.6, 25, LEVEL), abs=0.05)


def sample(values, *sources, direction="higher", margin=0.1, name="a"):
    return Sample(name, np.asarray(values), tuple(range(len(values))), direction, margin, sources)


def test_a_source_that_is_doubled_halves_its_part_of_the_variance():
    values = np.random.default_rng(0).normal(size=40)
    total = values.var(ddof=1)
    model = Model([sample(values, Source("answers", 400, 0.6 * total), Source("probe prompts", 12, 0.2 * total))])
    assert model.components(0) == pytest.approx({"cluster": 0.2, "answers": 0.6, "probe prompts": 0.2})
    assert model.at({"answers": 2.0})[0, 0] == pytest.approx(0.7 * total)
    assert model.at({"answers": 4.0, "probe prompts": 2.0})[0, 0] == pytest.approx((0.2 + 0.15 + 0.1) * total)


def test_sources_larger_than_the_whole_are_scaled_down():
    values = np.random.default_rng(0).normal(size=40)
    model = Model([sample(values, Source("answers", 400, 3 * values.var(ddof=1)))])
    assert model.components(0) == pytest.approx({"cluster": 0.0, "answers": 1.0})


def test_parts_keep_their_correlation():
    rng = np.random.default_rng(0)
    common = rng.normal(size=500)
    values = [common + rng.normal(size=500), common + rng.normal(size=500)]
    covariance = Model([sample(values[0]), sample(-values[1], direction="lower")]).covariance
    assert covariance == pytest.approx(np.cov(np.array(values)))


def verdict_of(runs, claim):
    laid_out = study_of(runs)
    (found,) = verdicts_of(laid_out, [claim])
    return found


def test_the_cheapest_design_buys_answers_where_these_are_the_spread():
    """Evaluation noise alone: more answers to fewer seeds cost less than more seeds."""
    rng = np.random.default_rng(0)
    runs = paired_study(12, 0.0, noise=0.03, rng=rng, unseen=0.3, train=0.7)
    found = power(verdict_of(runs, "C7"), Costs(1.0, 0.01, 0.0), LEVEL)
    assert found.components["answers"] > 0.5
    design = found.cheapest[0.8]
    assert design.sizes["answers"] > 400 and design.clusters < next(
        d.clusters for d in (*found.curve, found.cheapest[0.9]) if min(d.supported, d.refuted) >= 0.8
    )
    assert design.hours == pytest.approx(2 * design.clusters * (1 + 0.01 * design.sizes["answers"] / 400))


def test_without_costs_the_cheapest_design_is_the_smallest():
    """Where answers are all of the spread, twice as many do as well as twice the clusters; 16 times as many cost more."""
    rng = np.random.default_rng(0)
    verdict = verdict_of(paired_study(12, 0.0, noise=0.03, rng=rng, unseen=0.3, train=0.7), "C7")
    found = power(verdict, None, LEVEL)
    assert found.components["answers"] > 0.5 and found.now.hours is None
    design = found.cheapest[0.8]
    same = power(verdict, Costs(1.0, 1.0, 0.0), LEVEL).cheapest[0.8]
    assert (design.clusters, design.sizes) == (same.clusters, same.sizes)


def test_counterfactual_updates_cost_no_runs():
    run = frame_run(seed=0)
    run.forks = fork_frame(np.random.default_rng(0), {"grpo-sg": 0.05}, "heldout_failure", noise=0.1)
    found = verdict_of(study(run), "C7").beside
    assert power(found, Costs(1.0, 0.0, 0.0), LEVEL).now.hours is None


def test_clusters_of_the_grid_are_strata():
    found = power(verdict_of(grid("none", np.random.default_rng(5), 2, "normal"), "C6"), None, LEVEL)
    assert found.pilot == 6 and found.unit.startswith("strata") and found.curve[0].clusters == 6


def test_unknown_claims_are_refused():
    with pytest.raises(UserError, match="claim C99: no such claim"):
        power_of(study(), ["C99"])


def test_two_pairs_are_no_pilot():
    found, _ = power_of(paired_study(2, 0.0, unseen=0.3, train=0.7), ["C7"])
    assert "needs 3" in found.missing


def test_costs_are_the_recorded_hours():
    run = frame_run(seed=0)
    run.steps = run.steps.assign(generation_s=10.0, training_s=20.0, recording_s=6.0)
    run.probes = run.probes.assign(seconds=0.0)
    found = costs_of(study_of(study(run)))
    completions = 40 * 24 * 8
    assert found.training == pytest.approx(40 * 36 / 3600)
    assert found.answers == pytest.approx(len(run.eval) * 400 * (40 * 10 / completions) / 3600)


def test_the_outline_of_a_report_is_power_by_student():
    """A row and a panel for each claim with a variance; power at the pilot's size and the size for 80 % are those of Student's t."""
    from scipy.stats import nct, t

    verdict = verdict_of(paired_study(12, 0.0, noise=0.03, rng=np.random.default_rng(0), unseen=0.3, train=0.7), "C7")
    grid, picture = outline([verdict], LEVEL)
    ((name, here, ratio, supported, refuted, enough),) = grid.rows
    values = verdict.samples[0].values
    shift = 0.02 / values.std(ddof=1)
    assert (name, here, ratio) == ("C7 (between runs)", "12 pairs of runs with one seed", f"{1 / shift:.2g}")
    assert supported == f"{nct.sf(t.ppf(0.975, 11), 11, shift * 12**0.5):.0%}"
    assert refuted == f"{nct.sf(t.ppf(0.95, 11), 11, shift * 12**0.5):.0%}"
    n = int(enough.split()[0])
    assert (
        nct.sf(t.ppf(0.975, n - 1), n - 1, shift * n**0.5)
        >= 0.8
        > nct.sf(t.ppf(0.975, n - 2), n - 2, shift * (n - 1) ** 0.5)
    )
    (axis,) = picture.figure.axes
    assert axis.get_title() == "C7 (between runs)" and max(axis.lines[0].get_ydata()) <= 1
    assert outline([verdict_of(study(frame_run(seed=0)), "C7")], LEVEL) is None


def test_files_say_what_the_terminal_says(tmp_path):
    runs = alignment("none", np.random.default_rng(0), 8, "normal")
    found = power_of(runs, ["C10"])
    paths = write_power(found, tmp_path)
    assert {path.suffix for path in paths} == {".json", ".csv", ".png", ".svg"}
    read = json.loads(paths[0].read_text())
    between = next(entry for entry in read if entry["claim"] == "C10" and entry["version"] == "between runs")
    assert between["now"]["n"] == 8 and between["curve"][0]["n"] == 6
    # two rivals share the treatment's runs: three runs a seed, both must be beaten
    text = power_text(found)
    assert "C10 (between runs)" in text and "80% of both" in text and "one update" in text

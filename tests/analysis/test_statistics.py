"""Intervals and tests against SciPy and by hand, and paired differences of runs."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from scipy import stats

from sharpscope.analysis.measures import answer_noise, shared_sharpness
from sharpscope.analysis.pairs import compare_runs
from sharpscope.analysis.statistics import (
    ClusterSlope,
    accuracy_interval,
    cluster_moments,
    contrast_interval,
    mean_interval,
    series_mean,
    sign_flip_interval,
    sign_flip_p,
    smallest_sign_flip_p,
    to_halve,
    weighted_ranks,
)
from sharpscope.analysis.study import Study, studies
from tests.analysis.claims.planted import FrameRun, frame_run, paired_study


def test_bca_is_scipys_and_kinds_follow_the_number_of_clusters():
    values = np.random.default_rng(3).lognormal(size=20)
    ours = contrast_interval(values)
    theirs = scipy.stats.bootstrap(
        (np.sort(values),), np.mean, n_resamples=4999, rng=np.random.default_rng(0)
    )
    assert (ours.low, ours.high) == pytest.approx(tuple(theirs.confidence_interval), rel=1e-9)
    assert contrast_interval(values[::-1]) == ours
    kinds = [getattr(contrast_interval(values[:n]), "kind", None) for n in (5, 6, 14, 15)]
    assert kinds == [None, "sign-flip", "sign-flip", "bca"]
    flat = [contrast_interval(np.full(n, 0.25)) for n in (6, 20)]
    assert all((i.low, i.high) == (0.25, 0.25) for i in flat)


@pytest.mark.parametrize(("n", "stated"), [(10, (0.95, 0.95, 0.85)), (15, (0.92, 0.88, 0.85))])
def test_intervals_cover_as_the_module_states(n, stated):
    """Normal, heavy-tailed (t, 3 degrees) and skewed (lognormal) samples."""
    rng, trials = np.random.default_rng(n), 40
    draws = (
        lambda: rng.normal(size=n),
        lambda: rng.standard_t(3, n),
        lambda: rng.lognormal(size=n),
    )
    for draw, mean, said in zip(draws, (0.0, 0.0, np.exp(0.5)), stated, strict=True):
        found = sum((i := contrast_interval(draw())).low <= mean <= i.high for _ in range(trials))
        assert found >= scipy.stats.binom.ppf(0.001, trials, said)


@pytest.mark.parametrize("n", [2, 30])
def test_t_intervals_are_students(n):
    values = np.random.default_rng(n).normal(size=n)
    ends = scipy.stats.t.interval(0.95, n - 1, values.mean(), scipy.stats.sem(values))
    found = mean_interval(values)
    assert (found.low, found.high) == pytest.approx(ends) and found.kind == "t"
    assert mean_interval([2.0]) is None and mean_interval([1.0, np.nan, 2.0]) is None


@pytest.mark.parametrize(("hits", "prompts"), [(0, 1), (0, 7), (1, 30), (15, 40), (100, 100)])
def test_accuracy_interval_of_one_completion_each_is_wilsons(hits, prompts):
    right = np.arange(prompts) < hits
    error = right.std(ddof=1) / np.sqrt(prompts) if prompts > 1 else None
    result = accuracy_interval(right.mean(), error, prompts)
    ends = scipy.stats.binomtest(hits, prompts).proportion_ci(0.95, method="wilson")
    assert (result.low, result.high) == pytest.approx((ends.low, ends.high), abs=1e-12)
    if hits in (0, prompts):  # no accuracy is certain, also where each prompt has 16 completions
        assert accuracy_interval(right.mean(), error and 0.0, prompts, 16) == result


def test_accuracy_interval_counts_prompts_where_their_completions_agree_and_completions_where_they_do_not():
    """16 completions each: all equal within a prompt are worth 200 trials, independent ones 200·16."""
    for share, trials in ((np.repeat([0.0, 1.0], 100), 200), (np.full(200, 0.5), 3200)):
        result = accuracy_interval(0.5, share.std(ddof=1) / np.sqrt(200), 200, 16)
        ends = scipy.stats.binomtest(trials // 2, trials).proportion_ci(0.95, method="wilson")
        assert result.high - result.low == pytest.approx(ends.high - ends.low, rel=0.02)


@pytest.mark.parametrize("truth", [0.005, 0.5])
def test_accuracy_interval_covers_near_0_and_between(truth):
    """Prompts' own accuracies from a beta distribution, 4 completions each; mean ± 1.96 standard errors fails near 0."""
    rng, n, k, draws = np.random.default_rng(0), 60, 4, 400
    # correlation 0.6 within a prompt
    share = rng.binomial(k, rng.beta(truth / 1.5, (1 - truth) / 1.5, (draws, n))) / k
    means, errors = share.mean(axis=1), share.std(axis=1, ddof=1) / np.sqrt(n)
    result = [
        accuracy_interval(mean, error, n, k) for mean, error in zip(means, errors, strict=True)
    ]
    assert np.mean([interval.low <= truth <= interval.high for interval in result]) > 0.925
    if truth != 0.5:
        assert np.mean(abs(means - truth) <= 1.96 * errors) < 0.9


def evaluated(level: str, share: np.ndarray, k: int) -> dict[str, object]:
    n = len(share)
    row = {"split": "heldout", "step": 5, "temperature": 1.0, "level": level, "n": n, "k": k}
    return row | {"accuracy": share.mean(), "std_error": share.std(ddof=1) / np.sqrt(n)}


def test_the_noise_of_answers_is_that_of_asking_the_same_prompts_again():
    """Two levels whose prompts have probabilities of their own; only the answers are drawn again."""
    rng, k, found = np.random.default_rng(0), 4, []
    levels = {"2": rng.beta(1, 1, 200), "3": rng.beta(0.3, 1, 100)}
    for _ in range(100):
        rows = [evaluated(name, rng.binomial(k, q) / k, k) for name, q in levels.items()]
        found.append(answer_noise(SimpleNamespace(eval=pd.DataFrame(rows)), "heldout", 5))
    q = np.concatenate(list(levels.values()))
    assert np.mean(found) == pytest.approx((q * (1 - q)).sum() / len(q) ** 2 / k, rel=0.03)
    single = pd.DataFrame([evaluated("all", (np.arange(50) < 20).astype(float), 1)])
    # an upper bound
    assert answer_noise(SimpleNamespace(eval=single), "heldout", 5) == pytest.approx(0.4 * 0.6 / 50)
    assert answer_noise(SimpleNamespace(eval=single), "heldout", 6) is None


def test_the_error_of_a_series_is_the_scatter_of_its_mean():
    rng, x = np.random.default_rng(1), np.zeros((400, 300))
    for t in range(1, 300):
        x[:, t] = 0.6 * x[:, t - 1] + rng.normal(size=400)
    means, errors = np.transpose([series_mean(row[50:]) for row in x])
    assert np.sqrt((errors**2).mean()) == pytest.approx(means.std(), rel=0.12)
    assert (
        means[0] == x[0, 50:].mean()
        and np.isnan(series_mean(np.ones(3))[1])
        and series_mean(np.ones(9))[1] == 0
    )


def test_the_seeds_that_halve_an_interval():
    def width(n: int) -> float:
        return scipy.stats.t.ppf(0.975, n - 1) / np.sqrt(n)

    for n in (2, 3, 8, 30):
        assert width(to_halve(n)) <= width(n) / 2 < width(to_halve(n) - 1)


def test_cluster_slope_equals_least_squares_with_a_mean_for_each_cluster():
    rng = np.random.default_rng(4)
    clusters = []
    for _ in range(9):
        x, z, w = rng.normal(size=20), rng.normal(size=20), rng.uniform(0.5, 2, 20)
        clusters.append((0.7 * x - 0.4 * z + 3 * rng.normal() + rng.normal(size=20), x, z, w))
    slope = ClusterSlope(np.array([cluster_moments(y, x, [z], w) for y, x, z, w in clusters]))
    dummies = np.kron(np.eye(9), np.ones((20, 1)))
    y, x, z = (np.concatenate([c[i] for c in clusters]) for i in range(3))
    # weights sum to the number of rows in each cluster
    w = np.sqrt(np.concatenate([c[3] * 20 / c[3].sum() for c in clusters]))
    design = np.column_stack([x, z, dummies])
    expected = np.linalg.lstsq(design * w[:, None], y * w, rcond=None)[0][0]
    assert slope.value == pytest.approx(expected, rel=1e-9)
    interval = slope.interval()
    assert interval.kind == "sign-flip" and interval.low < expected < interval.high
    assert slope.p(interval.low - 1e-6) <= 0.05 < slope.p(interval.low + 1e-6)
    assert ClusterSlope(np.concatenate([slope.moments] * 2)).interval().kind == "bca"


def test_slope_test_keeps_its_level_and_its_interval_covers():
    """Each cluster has a slope of its own, so that its rows err together: without clustering every p would be far too small."""
    rng, studies = np.random.default_rng(7), []
    for _ in range(200):
        x = rng.normal(size=(10, 25))
        y = rng.normal(0, 0.5, (10, 1)) * x + rng.standard_t(3, (10, 25))
        studies.append(
            ClusterSlope(
                np.array(
                    [cluster_moments(*rows, [], np.ones(25)) for rows in zip(y, x, strict=True)]
                )
            )
        )
    rejected = sum(s.p(0.0) <= 0.05 for s in studies)
    assert scipy.stats.binomtest(rejected, 200, 0.05, alternative="greater").pvalue > 0.01
    held = sum(s.interval().low <= 0 <= s.interval().high for s in studies)
    assert held >= scipy.stats.binom.ppf(0.001, 200, 0.94)


def test_sign_flip_p_counts_every_pattern():
    values = np.random.default_rng(0).normal(0.4, 1, 7)
    sums = [np.dot(signs, values - 0.1) for signs in itertools.product([-1, 1], repeat=7)]
    seen = np.sum(values - 0.1)
    assert sign_flip_p(values, shift=0.1) == np.mean(np.abs(sums) >= abs(seen) - 1e-12)
    assert sign_flip_p(values, "greater", shift=0.1) == np.mean(np.array(sums) >= seen - 1e-12)
    assert sign_flip_p(values, "less", shift=0.1) == np.mean(np.array(sums) <= seen + 1e-12)
    for n, side in itertools.product((1, 6, 14, 30), ("two-sided", "greater")):
        assert sign_flip_p(np.arange(1.0, n + 1), side) == smallest_sign_flip_p(n, side)


def test_the_sign_flip_interval_holds_what_the_test_does_not_reject():
    values = np.random.default_rng(2).standard_t(3, 8)
    low, high = sign_flip_interval(values)
    inside = [sign_flip_p(values, shift=m) > 0.05 for m in np.linspace(low + 1e-6, high - 1e-6, 41)]
    outside = [sign_flip_p(values, shift=m) <= 0.05 for m in (low - 1e-6, high + 1e-6)]
    assert all(inside) and all(outside)
    assert sign_flip_interval(values[:5]) is None
    with pytest.raises(ValueError, match="finite"):
        sign_flip_p(np.array([1.0, np.nan]))


def test_ranks_by_hand_and_against_scipy():
    x = np.random.default_rng(5).normal(size=12)
    assert weighted_ranks(x, np.ones(12)) * 12 == pytest.approx(scipy.stats.rankdata(x) - 0.5)
    assert weighted_ranks(np.array([2.0, 1.0, 2.0]), np.array([1.0, 2.0, 1.0])) == pytest.approx(
        [0.75, 0.25, 0.75]
    )


HELDOUT = "held-out accuracy, greedy"
SHARPNESS = "SAM sharpness of expected_failure per unit of 1 − loss"


def row(frame: pd.DataFrame, quantity: str) -> pd.Series:
    (found,) = [rows for _, rows in frame[frame["quantity"] == quantity].iterrows()]
    return found


def probed(rises: dict[float, float], ceiling: float | None = 0.5, **options: object) -> FrameRun:
    probes = [
        {"step": 40, "quantity": "sam", "rho": rho, "value": rise, "ceiling": ceiling}
        for rho, rise in rises.items()
    ]
    return frame_run(probes=probes, **options)


def test_intervals_over_seeds_by_hand() -> None:
    for seeds in (3, 8):
        runs = paired_study(seeds, 0.05, noise=0.02).by_name
        found = row(compare_runs(runs), HELDOUT)
        greedy = {
            name: run.eval[(run.eval["temperature"] == 0) & (run.eval["step"] == 40)][
                "accuracy"
            ].iloc[0]
            for name, run in runs.items()
        }
        values = np.array(
            [greedy[f"grpo-sg-{seed}"] - greedy[f"grpo-{seed}"] for seed in range(seeds)]
        )
        ends = stats.t.interval(0.95, seeds - 1, values.mean(), stats.sem(values))
        assert (found["low"], found["high"]) == pytest.approx(ends)
        assert (
            found["n"] == seeds
            and found["paired_by"] == "seed"
            and found["median"] == np.median(values)
        )
        assert found["worst"] == pytest.approx(values.min())
        assert found["worst_pair"] == f"seed {values.argmin()}"
        assert found["p"] == sign_flip_p(values) if seeds == 8 else math.isnan(found["p"])


def test_one_pair_is_paired_by_step() -> None:
    columns = {"reward_mean": np.linspace(0, 1, 40)}
    first, second = (
        probed({0.05: 0.1}, method=method, columns=columns) for method in ("grpo", "gspo")
    )
    second.steps["reward_mean"] += 0.25
    frame = compare_runs([first, second])
    assert {HELDOUT, "reward", "entropy", "update norm", SHARPNESS} <= set(frame["quantity"])
    found = row(frame, "reward")
    assert (found["n"], found["paired_by"]) == (1, "step")
    # no noise between the steps
    assert found["difference"] == pytest.approx(0.25) == pytest.approx(found["high"])


def test_saturated_sharpness_is_marked_and_not_compared() -> None:
    pair = [probed({0.05: 0.1, 0.5: 0.49}), probed({0.05: 0.12, 0.5: 0.45}, method="gspo")]
    found = row(compare_runs(pair), SHARPNESS)
    assert found["difference"] == pytest.approx(0.04) and "radius 0.05" in found["note"]
    pair = [probed({0.5: 0.49}), probed({0.5: 0.45}, method="gspo")]
    found = row(compare_runs(pair), SHARPNESS)
    assert found["n"] == 0 and math.isnan(found["difference"]) and "saturated" in found["note"]
    assert found["baseline_value"] == pytest.approx(0.98)
    runs = [
        probed({0.5: (0.1, 0.49)[s]}, method=method, seed=s)
        for s in (0, 1)
        for method in ("grpo", "gspo")
    ]
    found = row(compare_runs(runs), SHARPNESS)
    # the mean of the pair that is compared
    assert (found["n"], found["baseline_value"]) == (
        1,
        pytest.approx(0.2),
    )


def test_sharpness_is_not_compared_across_numbers_of_prompts() -> None:
    def runs(*counts: float) -> list[FrameRun]:
        made = [probed({0.05: 0.1}, method=method) for method in ("grpo", "gspo", "cispo")]
        for run, count in zip(made, counts, strict=False):
            run.probes["prompts"] = count
        return made[: len(counts)]

    for one_set in (True, False):
        assert shared_sharpness(runs(24, 24, 24), one_set=one_set) is not None
        assert shared_sharpness(runs(24, 200), one_set=one_set) is None
        # one of an earlier version does not say its number
        assert shared_sharpness(runs(24, math.nan), one_set=one_set) is not None
        assert shared_sharpness(runs(24, math.nan, 200), one_set=one_set) is None
    found = row(compare_runs(runs(24, 200)), SHARPNESS)
    assert math.isnan(found["difference"]) and "number of prompts" in found["note"]


def test_ceiling_of_an_old_run_is_its_training_accuracy() -> None:
    pair = [
        probed({0.5: 0.1}, None, train=0.5),
        probed({0.5: 0.05}, None, train=0.25, method="gspo"),
    ]
    found = row(compare_runs(pair), SHARPNESS)
    assert found["difference"] == pytest.approx(0.0) and "training accuracy" in found["note"]


def test_clipping_is_read_from_updates_of_older_runs() -> None:
    updates = pd.DataFrame(
        {"step": [39, 39, 40, 40], "skipped": False, "clip_factor": [0.5, 1.0, 1.0, 1.0]}
    )
    runs = [frame_run(), frame_run("gspo")]
    runs[0].updates, runs[1].updates = updates.assign(clip_factor=1.0), updates
    assert row(compare_runs(runs), "updates with a clipped gradient")[
        "difference"
    ] == pytest.approx(0.25)


# -- Studies and settings


def laid_out(*runs: FrameRun) -> list[Study]:
    return studies(Study({run.name: run for run in runs}))


def test_seeds_are_one_setting_and_other_settings_are_told_apart() -> None:
    hot = {"optimizer": {"lr": 3e-4}}
    runs = [frame_run("grpo", seed) for seed in (0, 1)] + [
        frame_run("grpo-sg", seed) for seed in (0, 1)
    ]
    runs += [frame_run("grpo", seed, config=hot, tag="-hot") for seed in (0, 1)]
    (study,) = laid_out(*runs)
    assert study.labels == ["grpo (optimizer.lr=0.0001)", "grpo (optimizer.lr=0.0003)", "grpo-sg"]
    assert [list(s.runs) for s in study.settings] == [[0, 1]] * 3
    assert study.slug == "" and study.notes == ()
    # the setting with the most seeds has the method's name, and the others are told from it
    (study,) = laid_out(
        *runs,
        frame_run("grpo", 2),
        frame_run("grpo", 0, config={"rollout": {"group_size": 4}}, tag="-4"),
    )
    assert study.labels == [
        "grpo",
        "grpo (optimizer.lr=0.0003)",
        "grpo (rollout.group_size=4)",
        "grpo-sg",
    ]
    (note,) = study.notes
    assert (
        note.startswith("grpo alone stands for")
        and "optimizer.lr=0.0001, rollout.group_size=" in note
    )


def test_tasks_task_settings_and_policies_are_never_one_study() -> None:
    people = frame_run(config={"task": {"people": 5}}, tag="-people")
    other = frame_run(config={"policy": {"model": "other"}}, tag="-other")
    result = laid_out(frame_run(), replace(frame_run(tag="-math"), task="math"), people, other)
    assert len(result) == 4 and len({s.slug for s in result}) == 4
    names = [s.name for s in result]
    assert names[1] == "math" and "task.people=5" in names[2] and "policy.model=other" in names[3]


def test_finished_runs_come_before_others_and_a_seed_counts_once() -> None:
    stopped = replace(frame_run(seed=1), name="stopped", status="interrupted")
    (study,) = laid_out(
        replace(frame_run(), name="again"), replace(frame_run(), name="done"), stopped
    )
    assert list(study.settings[0].runs) == [0]
    assert any("stopped (interrupted, 40 steps) is left out" in note for note in study.notes)
    assert any("done repeats seed 0 of again" in note for note in study.notes)

"""Sources of variance that more measurement reduces: values against sums over prompts, and reasons where they are not known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from sharpscope.analysis.claims import measures
from tests.analysis.claims.frames import frame_run, prompt_frame, study
from tests.analysis.claims.verdicts import verdict


def probed(seed, values, method="grpo", probe_set="train-0"):
    """A run whose sharpness is the mean of `values`, one for each prompt."""
    run = frame_run(method, seed, probes=[{"step": 40, "quantity": "sam", "rho": 0.05, "value": values.mean()}])
    run.probes["probe_set"] = probe_set
    run.probe_prompts = prompt_frame(run.probes, len(values), values)
    return run


def pairs_of(rng, count, prompts, common):
    """Pairs on the same prompts, with what a prompt does to a pair, `common` to all pairs or not, and noise of each run."""
    made = []
    for seed in range(count):
        of_prompt = common + 0.3 * rng.normal(size=prompts)
        values = [2.0 + of_prompt + 0.2 * rng.normal(size=prompts) for _ in range(2)]
        made.append((probed(seed, values[0]), probed(seed, values[1] + 0.1 * common, "grpo-sg")))
    return made


def test_noise_of_probe_prompts_is_that_of_prompt_and_pair_together():
    """What the two runs of a pair have in common cancels in their ratio, and what all pairs have in common over the pairs."""
    rng = np.random.default_rng(0)
    pairs = pairs_of(rng, 5, 30, np.zeros(30) + rng.normal(size=30))
    table = np.array(
        [
            [
                (b := second.probe_prompts["value"].to_numpy())[i] / b.mean()
                - (a := first.probe_prompts["value"].to_numpy())[i] / a.mean()
                for i in range(30)
            ]
            for first, second in pairs
        ]
    )
    total = 0.0
    for p in range(5):
        for i in range(30):
            total += (table[p, i] - table[p].mean() - table[:, i].mean() + table.mean()) ** 2
    source = measures.probe_noise(pairs, "sam")
    assert source.name == "probe prompts" and source.size == 30
    assert source.variance == pytest.approx(total / (4 * 29) / 30)
    # with other prompts in each pair nothing is common to them
    for number, pair in enumerate(pairs):
        for run in pair:
            run.probes["probe_set"] = run.probe_prompts["probe_set"] = f"train-{number}"
    apart = measures.probe_noise([tuple(_copy(run) for run in pair) for pair in pairs], "sam")
    assert apart.variance == pytest.approx(table.var(axis=1, ddof=1).mean() / 30) and "upper bound" in apart.note
    assert apart.variance > source.variance


def _copy(run):
    copy = frame_run(run.method, run.seed)
    copy.probes, copy.probe_prompts = run.probes, run.probe_prompts
    return copy


def test_a_ratio_that_is_the_same_for_every_prompt_has_no_noise():
    values = np.random.default_rng(0).uniform(1, 3, 20)
    source = measures.probe_noise([(probed(0, values), probed(0, 0.9 * values, "grpo-sg"))], "sam")
    assert source.variance == pytest.approx(0.0, abs=1e-20)


def test_without_values_by_prompt_power_says_that_their_share_is_not_known():
    runs = [frame_run(method, seed, sharpness=1.0 + 0.1 * seed) for seed in range(8) for method in ("grpo", "grpo-sg")]
    why = measures.probe_noise([(runs[0], runs[1])], "sam")
    assert isinstance(why, str) and "probe_prompts" in why
    (sample,) = verdict(study(*runs), "C4").samples
    assert sample.sources == () and sample.note == why


def test_an_answer_of_unknown_spread_within_its_prompt_counts_at_most():
    run = frame_run(heldout=0.3)
    known = measures.answer_noise(run, "heldout", 40)
    assert known.note == measures.ONE_ANSWER and known.variance < 0.3 * 0.7 / 400
    run = frame_run(heldout=0.3, columns={"accuracy": 1.0})
    unknown = measures.answer_noise(run, "heldout", 40)
    assert unknown.note == measures.AT_MOST and unknown.variance == pytest.approx(0.3 * 0.7 / 400)
    assert measures.within_prompt_share(run) is None
    assert "not known" in measures.paired_noise([(run, frame_run("grpo-sg"))], "unseen")


def test_prompt_values_are_means_over_seeds_of_converged_rows():
    run = probed(0, np.array([1.0, 3.0]))
    run.probe_prompts = pd.concat([run.probe_prompts, run.probe_prompts.assign(seed=1, value=5.0)], ignore_index=True)
    assert measures.prompt_values(run, "sam")["value"].tolist() == [3.0, 4.0]
    assert not len(measures.prompt_values(run, "asam"))
    failed = _copy(run)
    failed.probes = failed.probes.assign(converged=False)
    assert not len(measures.prompt_values(failed, "sam"))

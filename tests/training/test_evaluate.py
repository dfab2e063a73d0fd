"""pass@k against enumeration, and the standard error with prompts as clusters."""

from __future__ import annotations

import importlib
import itertools

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import sharpscope
from sharpscope.policy import SamplingSpec, draw_completions, load_policy
from sharpscope.probes import ProbeSet
from sharpscope.recording.rows import pass_at_k
from sharpscope.seeds import derive
from sharpscope.tasks import make_task
from sharpscope.training import train
from sharpscope.training.checkpoint import checkpoints
from sharpscope.training.evaluate import evaluate

evaluation = importlib.import_module("sharpscope.training.evaluate")  # the package has a function of that name


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_mean_over_all_subsets(k):
    correct = np.array([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 0, 0]], dtype=bool)
    subsets = list(itertools.combinations(range(5), k))
    expected = np.mean([[row[list(subset)].any() for subset in subsets] for row in correct])
    assert pass_at_k(correct, k) == pytest.approx(expected)


def test_rows_against_counting_by_hand(toy_config):
    config = toy_config()
    policy, task = load_policy(config.policy), make_task(config.task)
    rows = evaluate(
        policy,
        task,
        step=7,
        splits=("heldout", "absent"),
        prompts=5,
        temperatures=(0.0, 1.0),
        samples=3,
        spec=config.rollout,
        seed=1,
    )
    assert [(r["split"], r["level"], r["temperature"], r["k"], r["n"]) for r in rows] == [
        ("heldout", "0", 0.0, 1, 5),
        ("heldout", "0", 1.0, 3, 5),
        ("heldout", "1", 0.0, 1, 5),
        ("heldout", "1", 1.0, 3, 5),
    ]
    sampled = rows[1]
    examples = [e for e in task.splits()["heldout"] if e.meta["level"] == 0]
    spec = SamplingSpec(max_new_tokens=config.rollout.max_new_tokens)
    drawn = draw_completions(policy, task, examples, 3, spec, derive(1, "evaluation:heldout/0/1.0"))
    rewards = [task.score(examples[i // 3], text) for i, text in enumerate(drawn.texts)]
    correct = np.array([r.correct for r in rewards]).reshape(5, 3)
    assert sampled["accuracy"] == pytest.approx(correct.mean())
    assert sampled["std_error"] == pytest.approx(correct.mean(axis=1).std(ddof=1) / np.sqrt(5))
    assert sampled["pass_at_k"] == pytest.approx(correct.any(axis=1).mean())
    assert sampled["reward_mean"] == pytest.approx(np.mean([r.total for r in rewards]))
    assert sampled["step"] == 7
    cut = drawn.truncated.numpy().reshape(5, 3)
    assert sampled["truncated"] == cut.mean()
    assert sampled["accuracy_completed"] == (correct[~cut].mean() if (~cut).any() else None)
    assert sampled["pass_std_error"] == pytest.approx(correct.any(axis=1).std(ddof=1) / np.sqrt(5))


SETTINGS = {"step": 0, "splits": ("heldout",), "prompts": 5, "temperatures": (0.0, 1.0), "samples": 4, "seed": 1}


@pytest.fixture
def world(toy_config):
    config = toy_config()
    return load_policy(config.policy), make_task(config.task), config.rollout


def test_further_columns_are_unbiased_with_prompts_as_clusters(world):
    policy, task, spec = world
    row = evaluate(policy, task, spec=spec, **SETTINGS, pass_at=(1, 2, 4))[1]
    examples = [e for e in task.splits()["heldout"] if e.meta["level"] == 0]
    drawn = draw_completions(
        policy, task, examples, 4, SamplingSpec(max_new_tokens=8), derive(1, "evaluation:heldout/0/1.0")
    )
    correct = np.array([task.score(examples[i // 4], text).correct for i, text in enumerate(drawn.texts)]).reshape(5, 4)
    for k in (1, 2, 4):
        subsets = list(itertools.combinations(range(4), k))
        values = np.array([np.mean([prompt[list(subset)].any() for subset in subsets]) for prompt in correct])
        assert row[f"pass_at_{k}"] == pytest.approx(values.mean())
        assert row[f"pass_at_{k}_std_error"] == pytest.approx(values.std(ddof=1) / np.sqrt(5))
    assert row["pass_at_1"] == pytest.approx(row["accuracy"])
    assert row["pass_at_1_std_error"] == pytest.approx(row["std_error"])
    assert 0 < row["accuracy"] < 1  # otherwise nothing was tested


@pytest.mark.parametrize("size", [1, 2, 4, 100])
def test_batches_change_no_draw(world, size, monkeypatch):
    policy, task, spec = world
    whole = evaluate(policy, task, spec=spec, **SETTINGS)
    monkeypatch.setattr(evaluation, "BATCH_COMPLETIONS", size)
    assert evaluate(policy, task, spec=spec, **SETTINGS) == whole


def test_the_heldout_loss_is_the_mean_nll_of_the_stored_solutions(toy_config):
    """Of each level of the held-out split, at every temperature, before training and after; against a loop over solutions."""
    config = toy_config(
        recording__heldout_influence_every=1,
        probes__prompts=2,
        probes__heldout_prompts=8,
        steps=1,
        rollout__max_new_tokens=120,
        rollout__temperature=0.9,
        update__microbatch_tokens=64,
        evaluation__splits=["heldout", "train"],
    )
    train(config)
    run = sharpscope.load_run(config.run_dir)
    items = [item for item in ProbeSet.load(config.run_dir / "probe_set.parquet").items if item.solution]
    assert items
    for step, folder in ((0, config.policy.model), (1, checkpoints(config.run_dir)[-1])):
        model = AutoModelForCausalLM.from_pretrained(folder)
        rows = run.eval[run.eval["step"] == step]
        assert len(rows)
        for row in rows.itertuples():
            total, count = 0.0, 0
            for item in items:
                if (item.split, str(item.example.meta["level"])) == (row.split, row.level):
                    ids = torch.tensor([[*item.prompt_ids, *item.solution]])
                    with torch.no_grad():
                        logp = torch.log_softmax(model(input_ids=ids).logits[0, :-1] / 0.9, dim=-1)
                    first = len(item.prompt_ids) - 1
                    total -= float(logp.gather(1, ids[0, 1:, None])[first:].sum())
                    count += len(item.solution)
            if count:
                assert row.heldout_loss == pytest.approx(total / count, rel=1e-5)
            else:
                assert np.isnan(row.heldout_loss)
    assert run.eval["heldout_loss"].notna().any()

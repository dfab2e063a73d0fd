"""pass@k against enumeration, and the standard error with prompts as clusters."""

from __future__ import annotations

import importlib
import itertools

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import sharpscope
from sharpscope.errors import UserError
from sharpscope.policy import SamplingSpec, draw_completions, load_policy
from sharpscope.probes import ProbeSet
from sharpscope.recording.rows import pass_at_k
from sharpscope.seeds import derive
from sharpscope.tasks import make_task
from sharpscope.training import train
from sharpscope.training.checkpoint import checkpoints
from sharpscope.training.evaluate import evaluate
from sharpscope.training.evaluate_model import evaluate_model
from sharpscope.training.evaluation_progress import EvaluationProgress

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


def test_pass_at_k_of_more_than_there_are_is_refused():
    with pytest.raises(ValueError, match="pass@3 needs from 1 to n = 2"):
        pass_at_k(np.zeros((1, 2), dtype=bool), 3)


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


class Spy:
    """Counts what is scored, and stops the evaluation after `limit` of it."""

    def __init__(self, task, limit=10**9):
        self.task, self.limit, self.scored = task, limit, 0
        self.name = task.name

    def splits(self):
        return self.task.splits()

    def score(self, example, completion):
        self.scored += 1
        if self.scored > self.limit:
            raise KeyboardInterrupt
        return self.task.score(example, completion)


@pytest.mark.parametrize("size", [1, 2, 4, 100])
def test_batches_change_no_draw(world, size, monkeypatch):
    policy, task, spec = world
    whole = evaluate(policy, task, spec=spec, **SETTINGS)
    monkeypatch.setattr(evaluation, "BATCH_COMPLETIONS", size)
    assert evaluate(policy, task, spec=spec, **SETTINGS) == whole


def test_an_evaluation_says_how_far_it_is(world, monkeypatch):
    policy, task, spec = world
    monkeypatch.setattr(evaluation, "BATCH_COMPLETIONS", 8)  # two puzzles of four completions
    said = []
    evaluate(policy, task, spec=spec, **SETTINGS | {"temperatures": (1.0,)}, on_progress=said.append)
    name = "heldout, level 0, temperature 1"
    assert said[:3] == [f"{name}: 5 prompts", f"{name}: 2 of 5 prompts done", f"{name}: 4 of 5 prompts done"]
    assert len(said) == 6


def test_an_interrupted_evaluation_goes_on_where_it_stopped(world, tmp_path, monkeypatch):
    policy, task, spec = world
    monkeypatch.setattr(evaluation, "BATCH_COMPLETIONS", 8)  # two puzzles of four completions
    whole = evaluate(policy, task, spec=spec, **SETTINGS)
    keep = tmp_path / "evaluations"

    def progress(**changes):
        return EvaluationProgress(keep, "toy", {"seed": 1} | changes)

    total = 2 * (5 + 20)
    spy = Spy(task, limit=5 + 8 + 3)
    with pytest.raises(KeyboardInterrupt):
        evaluate(policy, spy, spec=spec, **SETTINGS, progress=progress())
    assert len(progress()) == 2  # greedy puzzles of level 0, and the first two of level 0 at temperature 1
    with progress().path.open("a") as file:
        file.write('{"cell": "heldout/0/1.0", "first": 2, "corr')  # the power went
    spy = Spy(task)
    found = progress()
    assert evaluate(policy, spy, spec=spec, **SETTINGS, progress=found) == whole
    assert spy.scored == total - 5 - 8
    spy = Spy(task)
    again = progress()
    assert evaluate(policy, spy, spec=spec, **SETTINGS, progress=again) == whole
    assert spy.scored == 0
    assert len(progress(seed=2)) == 0  # other settings are another evaluation
    again.finish()
    assert not keep.exists()
    progress().finish()  # nothing there is nothing to remove


def test_the_command_goes_on_too_and_cleans_up(toy_config, tmp_path, monkeypatch):
    config = toy_config()
    changes = ["task.kind=custom", "task.factory=tests.toy_task:vowels", "rollout.max_new_tokens=8", "threads=1"]
    settings = dict(
        splits=("heldout",), samples=4, prompts=5, overrides=changes, keep=tmp_path / "evaluations", pass_at=(2,)
    )
    model = config.policy.model
    whole = evaluate_model(model, **settings)
    monkeypatch.setattr(evaluation, "BATCH_COMPLETIONS", 8)
    real, calls = evaluation.draw_scored, []

    def failing(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(evaluation, "draw_scored", failing)
    with pytest.raises(KeyboardInterrupt):
        evaluate_model(model, **settings)
    assert [file.suffix for file in (tmp_path / "evaluations").iterdir()] == [".jsonl"]
    said = []
    assert evaluate_model(model, **settings, on_progress=said.append) == whole
    assert said[0].startswith("going on with an interrupted evaluation: 2 batches are in ")
    assert not (tmp_path / "evaluations").exists()
    with pytest.raises(UserError, match="-k 5: pass@k needs from 1 to --samples = 4"):
        evaluate_model(model, **settings | {"pass_at": (5,)})


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


def test_without_a_probe_set_there_is_no_heldout_loss(toy_config):
    config = toy_config(steps=1)
    train(config)
    assert sharpscope.load_run(config.run_dir).eval["heldout_loss"].isna().all()

"""Whole runs: what is recorded, that it is reproducible, resumable and interruptible, and that mistakes cost nothing."""

from __future__ import annotations

import io
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from transformers import get_scheduler

import sharpscope
from sharpscope import memory
from sharpscope.config.run import OptimizerSpec
from sharpscope.errors import UserError
from sharpscope.policy import load_policy
from sharpscope.recording import run_folder
from sharpscope.recording.rows import rollout_columns
from sharpscope.tasks import Example, make_task
from sharpscope.training import Display, loop, train
from sharpscope.training import loop as shown
from sharpscope.training.learner import build_optimizer, learning_rate, load_start
from sharpscope.training.rollouts import DataOrder, draw_rollouts
from tests.faults.setting import assert_same, tables
from tests.models import tiny_model
from tests.oracles.objective import mass_percentile


def test_two_runs_of_one_config_are_equal_but_for_timing(toy_config):
    for name in ("a", "b"):
        assert train(toy_config(name=name)).status == "finished"
    out = toy_config().run_dir.parent
    assert_same(out / "a", out / "b")
    first = tables(out / "a")
    assert len(first["steps"]) == 3 and first["eval"]["step"].unique().tolist() == [0, 2, 3]


def test_the_tables_say_what_happened(toy_config):
    config = toy_config(method="grpo-sg", method__weight__preset="calibrated")
    outcome = train(config)
    run = sharpscope.load_run(outcome.run_dir)
    rollouts, tokens, steps = run.rollouts, run.tokens(), run.steps
    assert len(rollouts) == 3 * 16
    for step, group in rollouts.groupby("step"):
        row = steps[steps["step"] == step].iloc[0]
        assert row["reward_mean"] == pytest.approx(group["reward"].mean())
        assert row["reward_std"] == pytest.approx(group["reward"].std(), rel=1e-6)
        assert row["accuracy"] == pytest.approx(group["correct"].mean())
        assert row["tokens"] == group["length"].sum()
        assert row["completion_length_mean"] == pytest.approx(group["length"].mean())
        spread = group.groupby("group")["reward"].agg(lambda r: r.max() > r.min())
        assert row["zero_std_groups"] == (~spread).sum()
        for _, members in group.groupby("group"):
            std = members["reward"].std()
            expected = (
                (members["reward"] - members["reward"].mean()) / (std + 1e-4) if std > 0 else 0 * members["reward"]
            )
            np.testing.assert_allclose(members["advantage"], expected, atol=1e-5)
        for completion in group.itertuples():
            assert completion.reward == sum(completion.completion.count(v) for v in "aeiou")
    merged = tokens.merge(
        rollouts[["step", "rollout", "advantage", "length"]], on=["step", "rollout"], suffixes=("", "_row")
    )
    np.testing.assert_allclose(merged["advantage"], merged["advantage_row"], rtol=1e-6)
    # On policy, c_t = −w·A/(N·length); it says what the gradient of every token was multiplied with.
    expected = -merged["weight"] * merged["advantage"] / (16 * merged["length"])
    np.testing.assert_allclose(merged["loss_coef"], expected, rtol=1e-4, atol=1e-8)
    counts = tokens.groupby(["step", "rollout"]).size().to_numpy()
    assert np.array_equal(counts, rollouts.sort_values(["step", "rollout"])["length"].to_numpy())
    shaping = run.info["calibration"]
    curve = shaping["alpha"] * (1 / (1 + np.exp(-(tokens["logit"] - shaping["u0"]) / shaping["tau"])) - shaping["mu"])
    np.testing.assert_allclose(tokens["weight"], curve.clip(shaping["L"], shaping["U"]), rtol=1e-5)
    for step, part in tokens.groupby("step"):
        row = steps[steps["step"] == step].iloc[0]
        assert row["weight_mean"] == pytest.approx(part["weight"].mean(), rel=1e-6)
        assert row["entropy_mean"] == pytest.approx(part["entropy"].mean(), rel=1e-5)
    first = tokens[tokens["step"] == 1]
    # one update: a token's share of the gradient by its logits is |c|/w·‖p − e_y‖
    mass = first["loss_coef"].abs() / first["weight"] * first["logit_grad_norm"]
    low, high = (mass_percentile(first["logit"].tolist(), mass.tolist(), q) for q in (0.1, 0.9))
    assert shaping["tau"] == pytest.approx((high - low) / 1.846, rel=1e-3)
    assert shaping["u0"] == pytest.approx(low - 1.099 * shaping["tau"], abs=2e-3 * shaping["tau"])


def test_calibration_over_the_gradient_waits_for_one(toy_config, monkeypatch):
    """All rewards of the first step are equal, so that its weights would multiply 0: they are 1."""

    def equal_at_first(*arguments, **options):
        batch = draw_rollouts(*arguments, **options)
        step = arguments[6]
        return replace(batch, advantage=torch.zeros_like(batch.advantage)) if step == 1 else batch

    monkeypatch.setattr(loop, "draw_rollouts", equal_at_first)
    config = toy_config(method="grpo-sg", method__weight__preset="calibrated", evaluation__every=0)
    run = sharpscope.load_run(train(config).run_dir)
    tokens, constants = run.tokens(), run.info["calibration"]
    assert tokens["weight"][tokens["step"] == 1].unique().tolist() == [1.0]
    assert run.events["step"][run.events["rule"] == "calibration"].tolist() == [1]
    second = tokens[tokens["step"] == 2]
    mass = second["loss_coef"].abs() / second["weight"] * second["logit_grad_norm"]
    low, high = (mass_percentile(second["logit"].tolist(), mass.tolist(), q) for q in (0.1, 0.9))
    assert constants["tau"] == pytest.approx((high - low) / 1.846, rel=1e-3)
    assert constants["u0"] == pytest.approx(low - 1.099 * constants["tau"], abs=2e-3 * constants["tau"])


class StopAfter(Display):
    """Presses Ctrl-C when a step is done."""

    def __init__(self, step: int, times: int = 1) -> None:
        super().__init__()
        self.at, self.times = step, times

    def step(self, row) -> None:
        if row["step"] == self.at:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method": "grpo-sg", "method__weight__preset": "calibrated", "method__kl__coef": 0.01},
        {"method": "aggc", "update__mini_batches": 2},
    ],
)
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(toy_config, changes):
    whole = toy_config(name="whole", steps=5, **changes)
    train(whole)
    broken = toy_config(name="broken", steps=5, **changes)
    outcome = train(broken, StopAfter(3))
    assert (outcome.status, outcome.steps_done) == ("interrupted", 3)
    assert sharpscope.load_run(broken.run_dir).info["status"] == "interrupted"
    assert train(broken, resume=True).status == "finished"
    assert_same(whole.run_dir, broken.run_dir)


def test_two_interrupts_stop_at_once(toy_config):
    outcome = train(toy_config(), StopAfter(2, times=2))
    assert outcome.status == "interrupted" and "at once" in outcome.reason
    assert set(sharpscope.load_run(outcome.run_dir).steps["step"]) <= {1, 2}


def test_a_mistake_found_late_takes_only_what_the_start_wrote(toy_config, monkeypatch):
    config = toy_config(steps=1)

    def late(self, task, info):
        if beside is not None:
            beside.write_text("mine")
        raise UserError("a mistake found late")

    monkeypatch.setattr(loop.Observers, "start", late)
    for beside in (None, config.run_dir / "notes.txt"):
        with pytest.raises(UserError, match="found late"):
            train(config)
        assert not config.run_dir.exists() if beside is None else list(config.run_dir.iterdir()) == [beside]


def test_a_start_that_was_killed_is_started_again(toy_config, monkeypatch):
    config = toy_config(steps=1, evaluation__every=0)

    def killed(*_):
        raise KeyboardInterrupt

    for resume in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(run_folder, "create_run_info", killed)
            with pytest.raises(KeyboardInterrupt):
                train(config, resume=resume)
        assert (config.run_dir / "config.yaml").exists() and not (config.run_dir / "run.json").exists()
    assert train(config, resume=True).status == "finished"
    assert not list(config.run_dir.glob(".*"))


def test_mistakes_are_found_before_the_folder_is_made(toy_config):
    for changes, message in (
        ({"policy__model": "/no/such/folder"}, "no such folder"),
        ({"task__factory": "tests.toy_task:nothing"}, "no function"),
        ({"update__mini_batches": 5}, "mini_batches"),
        ({"rollout__max_new_tokens": 100_000}, "context"),
        (
            {"evaluation__splits": ["tset", "dev"]},
            r"evaluation.splits = \['tset', 'dev'\]: the task has train, heldout",
        ),
    ):
        with pytest.raises(UserError, match=message):
            train(toy_config(**changes))
    assert not toy_config().run_dir.exists()


def test_a_reward_that_is_not_finite_is_said_and_not_learnt(toy_config):
    config = toy_config(task__factory="tests.toy_task:sometimes_nan", health__non_finite="skip_step")
    assert train(config).status == "finished"
    run = sharpscope.load_run(config.run_dir)
    assert "non_finite" in set(run.events["rule"])
    spoilt = run.rollouts[run.rollouts["reward"].isna()]
    assert len(spoilt)
    keys = set(zip(spoilt["step"], spoilt["group"], strict=True))
    in_spoilt_group = [key in keys for key in zip(run.rollouts["step"], run.rollouts["group"], strict=True)]
    assert (run.rollouts.loc[in_spoilt_group, "advantage"] == 0).all()
    assert run.steps["grad_norm"].notna().all()


def test_a_penalty_on_length_is_no_signal_for_dynamic_sampling(toy_config):
    """Wrong answers of different lengths have different rewards after DAPO's penalty; their groups are drawn anew all the same."""
    config = toy_config(
        method="dapo",
        task__factory="tests.toy_task:always_wrong",
        method__sampling__overlong=1.0,
    )
    policy, task = load_policy(config.policy), make_task(config.task)
    order = DataOrder(task.splits()["train"], 0)
    drawn = draw_rollouts(policy, task, order, config.method, config.rollout, seed=0, step=1)
    assert drawn.redrawn_groups == 10 * 4 and drawn.zero_variance_share < 1.0
    penalty = -drawn.rollouts.lengths / 8  # the buffer is the whole limit
    torch.testing.assert_close(drawn.rollouts.reward, penalty)
    parts = rollout_columns(1, drawn)["reward_parts"]
    assert [set(part) for part in parts] == [{"vowels", "overlong"}] * 16
    np.testing.assert_allclose([sum(part.values()) for part in parts], drawn.rollouts.reward, rtol=1e-6)
    np.testing.assert_allclose([reward.total for reward in drawn.rewards], drawn.rollouts.reward, rtol=1e-6)


# -- What is printed where there is no terminal: enough to follow a run, a sweep or a report from its log file


def lines(slow: bool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(shown, "LINE_EVERY", 0.0 if slow else 1e9)
    file = io.StringIO()
    display = Display(Console(file=file, width=40))
    display.start("a run", 12, 0)
    for step in range(1, 13):
        display.step({"step": step, "reward_mean": 0.5, "accuracy": 0.25})
    display.stop()
    return file.getvalue().splitlines()


def test_slow_steps_are_printed_each_and_fast_ones_every_tenth(monkeypatch):
    fast, slow = lines(False, monkeypatch), lines(True, monkeypatch)
    assert [line.split(":")[0] for line in fast] == ["step 1 of 12", "step 10 of 12"]
    assert [line.split(":")[0] for line in slow] == [f"step {step} of 12" for step in range(1, 13)]
    assert all("reward +0.500" in line and "  left 0:00:" in line for line in fast + slow)


# -- AdamW's schedule against transformers', its groups, and the order of examples


def test_decay_spares_vectors():
    model = tiny_model("gpt2")
    groups = build_optimizer(model, OptimizerSpec(weight_decay=0.1)).param_groups
    assert {p.ndim >= 2 for p in groups[0]["params"]} == {True} and groups[0]["weight_decay"] == 0.1
    assert {p.ndim for p in groups[1]["params"]} == {1} and groups[1]["weight_decay"] == 0.0
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))


@pytest.mark.parametrize("warmup", [0, 1, 3, 11])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_learning_rate_is_transformers_schedule_and_ends_at_zero(schedule, warmup):
    steps, spec = 12, OptimizerSpec(lr=0.3, warmup_steps=warmup, schedule=schedule)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    # without warm-up the first step has the peak, which is a warm-up of one step
    scheduler = get_scheduler(schedule, optimizer, num_warmup_steps=max(warmup, 1), num_training_steps=steps)
    for step in range(1, steps + 1):
        optimizer.step()
        scheduler.step()
        assert learning_rate(spec, step, steps) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-15)
    assert learning_rate(spec, steps, steps) == 0.0
    assert learning_rate(OptimizerSpec(lr=0.1, schedule=schedule), 1, 1) == 0.1


def examples(count: int) -> list[Example]:
    return [Example(str(index), "", {"id": str(index)}) for index in range(count)]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.lists(st.integers(1, 7), max_size=8), st.integers(0, 5), st.integers(0, 9))
def test_epochs_are_permutations_and_the_cursor_is_the_only_state(count, takes, seed, cut):
    order = DataOrder(examples(count), seed)
    seen = [example.prompt for take in takes for example in order.take(take)]
    assert order.cursor == len(seen)
    for start in range(0, len(seen) - count + 1, count):
        assert sorted(seen[start : start + count], key=int) == [str(index) for index in range(count)]
    rest = DataOrder(examples(count), seed, cursor=min(cut, len(seen))).take(len(seen) - min(cut, len(seen)))
    assert [example.prompt for example in rest] == seen[cut:]


def test_what_training_needs_is_compared_with_free_memory_before_the_folder_is_made(toy_config, monkeypatch):
    """Weights, then as much for the gradient and for each of AdamW's moments."""
    config = toy_config(steps=1)
    policy = load_start(config, None)
    monkeypatch.setattr(memory, "free_memory", lambda device: 11.9 * policy.parameters)
    with pytest.raises(UserError, match="memory: a gradient with AdamW's two moments takes about"):
        train(config)
    assert not config.run_dir.exists()

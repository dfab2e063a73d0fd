"""Whole runs: reproducible, resumable, interruptible; checkpoints; mistakes cost nothing; as large models need them."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

import sharpscope
from sharpscope.config import build_config
from sharpscope.config.run import OptimizerSpec
from sharpscope.errors import NonFiniteError, UserError
from sharpscope.policy import PolicySpec, load_policy
from sharpscope.tasks import Example, make_task
from sharpscope.traces import update_run_info
from sharpscope.training import Display, evaluate_model, loop, train
from sharpscope.training.checkpoint import Progress, checkpoints, damage, save, step_of
from sharpscope.training.learner import build_optimizer, learning_rate
from sharpscope.training.rollouts import DataOrder, draw_rollouts
from tests.faults.conftest import assert_same, tables
from tests.models import ARCHITECTURES, tiny_model
from tests.oracles.objective import mass_percentile


def test_the_tables_say_what_happened(toy_config):
    run = sharpscope.load_run(
        train(toy_config(method="grpo-sg", method__weight__preset="calibrated")).run_dir
    )
    rollouts, tokens, steps = run.rollouts, run.tokens(), run.steps.set_index("step")
    assert len(rollouts) == 3 * 16 and run.eval["step"].unique().tolist() == [0, 2, 3]
    by_step = rollouts.groupby("step")
    for column, wanted in {
        "reward_mean": by_step["reward"].mean(),
        "reward_std": by_step["reward"].std(),
        "accuracy": by_step["correct"].mean(),
        "tokens": by_step["length"].sum(),
        "completion_length_mean": by_step["length"].mean(),
        "weight_mean": tokens.groupby("step")["weight"].mean(),
        "entropy_mean": tokens.groupby("step")["entropy"].mean(),
    }.items():
        np.testing.assert_allclose(steps[column], wanted, rtol=1e-5, err_msg=column)
    groups = rollouts.groupby(["step", "group"])["reward"]
    spread = groups.transform("std")
    assert (steps["zero_std_groups"] == (groups.std() == 0).groupby("step").sum()).all()
    advantage = ((rollouts["reward"] - groups.transform("mean")) / (spread + 1e-4)).where(
        spread > 0, 0.0
    )
    np.testing.assert_allclose(rollouts["advantage"], advantage, atol=1e-5)
    assert (
        rollouts["reward"] == rollouts["completion"].map(lambda text: sum(map(text.count, "aeiou")))
    ).all()
    merged = tokens.merge(rollouts, on=["step", "rollout"], suffixes=("", "_row"))
    np.testing.assert_allclose(merged["advantage"], merged["advantage_row"], rtol=1e-6)
    # On policy, c_t = −w·A/(N·length); it says what the gradient of every token was multiplied with.
    expected = -merged["weight"] * merged["advantage"] / (16 * merged["length"])
    np.testing.assert_allclose(merged["loss_coef"], expected, rtol=1e-4, atol=1e-8)
    counts = tokens.groupby(["step", "rollout"]).size().to_numpy()
    assert np.array_equal(counts, rollouts.sort_values(["step", "rollout"])["length"].to_numpy())
    fixed = run.info["calibration"]
    curve = fixed["alpha"] * (
        1 / (1 + np.exp(-(tokens["logit"] - fixed["u0"]) / fixed["tau"])) - fixed["mu"]
    )
    np.testing.assert_allclose(tokens["weight"], curve.clip(fixed["L"], fixed["U"]), rtol=1e-5)
    assert_calibrated(fixed, tokens[tokens["step"] == 1])


def assert_calibrated(constants, tokens) -> None:
    """The constants are those of the step's percentiles of the logit, tokens counted by the gradient that their logits carry."""
    mass = tokens["loss_coef"].abs() / tokens["weight"] * tokens["logit_grad_norm"]
    low, high = (mass_percentile(tokens["logit"].tolist(), mass.tolist(), q) for q in (0.1, 0.9))
    assert constants["tau"] == pytest.approx((high - low) / 1.846, rel=1e-3)
    assert constants["u0"] == pytest.approx(
        low - 1.099 * constants["tau"], abs=2e-3 * constants["tau"]
    )


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
    assert_calibrated(constants, tokens[tokens["step"] == 2])


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
        {"optimizer__kind": "pion", "optimizer__filter_steps": 2},
        {"optimizer__kind": "sgd", "optimizer__momentum": 0.5, "optimizer__lr": 0.1},
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
        assert (
            not config.run_dir.exists()
            if beside is None
            else list(config.run_dir.iterdir()) == [beside]
        )


def test_mistakes_are_found_before_the_folder_is_made(toy_config):
    for changes, message in (
        ({"policy__model": "/no/such/folder"}, "no such folder"),
        ({"task__factory": "tests.toy_task:nothing"}, "no function"),
        ({"update__mini_batches": 5}, "mini_batches"),
        ({"rollout__max_new_tokens": 100_000}, "context"),
        (
            {"evaluation__splits": ["tset", "dev"]},
            "split tset, dev: the task has train, heldout",
        ),
    ):
        with pytest.raises(UserError, match=message):
            train(toy_config(**changes))
    assert not toy_config().run_dir.exists()


def test_a_reward_that_is_not_finite_is_said_and_not_learnt(toy_config):
    config = toy_config(
        task__factory="tests.toy_task:sometimes_nan", health__non_finite="skip_step"
    )
    assert train(config).status == "finished"
    run = sharpscope.load_run(config.run_dir)
    assert "non_finite" in set(run.events["rule"])
    spoilt = run.rollouts[run.rollouts["reward"].isna()]
    assert len(spoilt)
    keys = set(zip(spoilt["step"], spoilt["group"], strict=True))
    in_spoilt_group = [
        key in keys for key in zip(run.rollouts["step"], run.rollouts["group"], strict=True)
    ]
    assert (run.rollouts.loc[in_spoilt_group, "advantage"] == 0).all()
    assert run.steps["grad_norm"].notna().all()


def test_a_penalty_on_length_is_no_signal_for_dynamic_sampling(toy_config):
    """Wrong answers of different lengths have different rewards after DAPO's penalty; their groups are drawn anew all the same."""
    config = toy_config(
        method="dapo", task__factory="tests.toy_task:always_wrong", method__sampling__overlong=1.0
    )
    policy, task = load_policy(config.policy), make_task(config.task)
    order = DataOrder(task.splits()["train"], 0)
    drawn = draw_rollouts(policy, task, order, config.method, config.rollout, seed=0, step=1)
    assert drawn.redrawn_groups == 10 * 4 and drawn.zero_variance_share < 1.0
    penalty = -drawn.rollouts.lengths / 8  # the buffer is the whole limit
    torch.testing.assert_close(drawn.rollouts.reward, penalty)
    np.testing.assert_allclose(
        [sum(reward.parts.values()) for reward in drawn.rewards], penalty, rtol=1e-6
    )


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
    scheduler = get_scheduler(
        schedule, optimizer, num_warmup_steps=max(warmup, 1), num_training_steps=steps
    )
    for step in range(1, steps + 1):
        optimizer.step()
        scheduler.step()
        assert learning_rate(spec, step, steps) == pytest.approx(
            scheduler.get_last_lr()[0], abs=1e-15
        )
    assert learning_rate(spec, steps, steps) == 0.0
    assert learning_rate(OptimizerSpec(lr=0.1, schedule=schedule), 1, 1) == 0.1


def examples(count: int) -> list[Example]:
    return [Example(str(index), "", {"id": str(index)}) for index in range(count)]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 12),
    st.lists(st.integers(1, 7), max_size=8),
    st.integers(0, 5),
    st.integers(0, 9),
)
def test_epochs_are_permutations_and_the_cursor_is_the_only_state(count, takes, seed, cut):
    order = DataOrder(examples(count), seed)
    seen = [example.prompt for take in takes for example in order.take(take)]
    assert order.cursor == len(seen)
    for start in range(0, len(seen) - count + 1, count):
        assert sorted(seen[start : start + count], key=int) == [
            str(index) for index in range(count)
        ]
    rest = DataOrder(examples(count), seed, cursor=min(cut, len(seen))).take(
        len(seen) - min(cut, len(seen))
    )
    assert [example.prompt for example in rest] == seen[cut:]


@pytest.fixture(scope="module")
def cut_off(tiny_policy, tmp_path_factory):
    """(an uninterrupted run, the same run cut off after step 5 with checkpoints at 2, 4 and 5)."""
    from tests.conftest import TOY

    out = tmp_path_factory.mktemp("cut_off")
    base = {
        **TOY,
        "policy.model": str(tiny_policy),
        "steps": 7,
        "evaluation.every": 0,
        "checkpoint.every": 2,
        "checkpoint.keep_last": 3,
        "method": "clip-cov",
        "method.entropy": 0.01,
        "method.weight": {"kind": "stare", "step": 0.05, "target": 100.0},
        "method.module_clip": 1.01,
        "method.proximal": {"kind": "average", "every": "update"},
    }
    whole, broken = (
        build_config(values=base | {"out": str(out / name)}) for name in ("whole", "broken")
    )
    train(whole)
    train(broken, StopAfter(5))
    saved = [[step_of(path) for path in checkpoints(config.run_dir)] for config in (whole, broken)]
    assert saved == [[4, 6, 7], [2, 4, 5]]
    run = sharpscope.load_run(whole.run_dir)
    largest = run.tokens(columns=["step", "weight"]).groupby("step")["weight"].max()
    assert largest.tolist() == pytest.approx([1.15, 1.2, 1.25, 1.3, 1.35, 1.4, 1.45])  # W moves
    assert (run.updates["clip_factor"] < 1).any()
    return whole, broken


def copy_of(config, tmp_path):
    shutil.copytree(config.run_dir, tmp_path / "copy")
    return config.model_copy(update={"out": str(tmp_path / "copy")})


@pytest.mark.parametrize("victim", ["optimizer.safetensors", "checksums.json"])
def test_a_damaged_checkpoint_is_named_and_without_it_the_one_before_goes_on(
    cut_off, tmp_path, victim
):
    whole, broken = cut_off[0], copy_of(cut_off[1], tmp_path)
    newest = checkpoints(broken.run_dir)[-1]
    content = bytearray((newest / victim).read_bytes())
    content[len(content) // 2] ^= 1
    (newest / victim).write_bytes(content)
    assert damage(newest) is not None and damage(checkpoints(broken.run_dir)[-2]) is None
    with pytest.raises(UserError, match=r"step-000005: is damaged .* remove it to go on"):
        train(broken, resume=True)
    shutil.rmtree(newest)
    assert train(broken, resume=True).status == "finished"
    assert sharpscope.load_run(broken.run_dir).info["notes"] == [
        "resumed after step 4, from step-000004"
    ]
    assert_same(whole.run_dir, broken.run_dir)


def test_what_was_recorded_is_kept_when_a_run_begins_again(cut_off, tmp_path):
    whole, broken = cut_off[0], copy_of(cut_off[1], tmp_path)
    shutil.rmtree(broken.run_dir / "checkpoints")
    traces = broken.run_dir / "traces"
    before = {path.relative_to(traces): path.read_bytes() for path in traces.rglob("part-*")}
    outcome = train(broken, resume=True)
    kept = broken.run_dir / ".traces.aborted-1"
    assert before == {
        path.relative_to(kept): path.read_bytes() for path in kept.rglob("*") if path.is_file()
    }
    (note,) = sharpscope.load_run(broken.run_dir).info["notes"]
    assert outcome.notes == (note,) and note.endswith(f"is kept in {kept}")
    assert_same(whole.run_dir, broken.run_dir)


@pytest.mark.parametrize("kind", ["finished", "without checkpoints"])
def test_a_run_with_nothing_to_go_on_to_is_left_as_it_is(cut_off, tmp_path, kind):
    whole = copy_of(cut_off[0], tmp_path)
    if kind != "finished":
        shutil.rmtree(whole.run_dir / "checkpoints")
    before = {path: path.read_bytes() for path in whole.run_dir.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"all of its steps are done \(steps = 7\)"):
        train(whole, resume=True)
    assert before == {
        path: path.read_bytes() for path in whole.run_dir.rglob("*") if path.is_file()
    }


def test_a_finished_run_goes_on_to_more_steps(cut_off, tmp_path):
    whole = copy_of(cut_off[0], tmp_path)
    before = tables(whole.run_dir)["steps"]
    assert train(whole.model_copy(update={"steps": 8}), resume=True).status == "finished"
    after = tables(whole.run_dir)["steps"]
    assert after["step"].tolist() == list(range(1, 9)) and after.iloc[:7].equals(before)


def test_another_reference_policy_is_noticed(toy_config, tiny_policy, tmp_path):
    policy = tmp_path / "policy"
    shutil.copytree(tiny_policy, policy)
    config = toy_config(
        policy__model=str(policy), method__kl__coef=0.01, steps=3, evaluation__every=0
    )
    train(config, StopAfter(2))
    tensors = load_file(policy / "model.safetensors")
    tensors[min(tensors)] += 1e-3
    save_file(tensors, policy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="other weights than when this run began"):
        train(config, resume=True)


def test_weights_that_are_not_finite_are_not_saved(toy_config):
    config = toy_config()
    policy = load_policy(config.policy)
    name, parameter = list(policy.model.named_parameters())[-1]
    with torch.no_grad():
        parameter.view(-1)[0] = torch.nan
    with pytest.raises(NonFiniteError, match=f"step 7: the weights '{name}' are not finite"):
        save(
            config,
            policy,
            build_optimizer(policy.model, config.optimizer),
            Progress(7, 0, [], [], {}),
        )
    assert not config.run_dir.exists()


def test_a_checkpoint_is_whole_or_absent_when_its_write_fails(toy_config, monkeypatch):
    from sharpscope.training import checkpoint

    config = toy_config(steps=2, evaluation__every=0, checkpoint__every=1)
    plain = checkpoint.save_file

    def full(tensors, path):
        if "step-000002" in str(path):
            raise OSError(28, "No space left on device")
        plain(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    outcome = train(config)
    assert outcome.status == "failed" and "No space left on device" in outcome.reason
    assert (
        f"sharpscope run --resume {config.run_dir}" in outcome.reason and "\n" not in outcome.reason
    )
    assert [path.name for path in (config.run_dir / "checkpoints").iterdir()] == ["step-000001"]
    assert len(sharpscope.load_run(config.run_dir).steps) == 2
    monkeypatch.undo()
    assert train(config, resume=True).status == "finished"


SHORT = {
    "steps": 2,
    "evaluation__every": 0,
    "recording__token_gradients_every": 1,
    "recording__exact_tokens": 2,
    "seed": 1,
}


def saved(architecture, tiny_policy, folder):
    """A tiny float32 model of an architecture on disk, with the byte-level tokenizer of the toy policy."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy)
    model = tiny_model(architecture, vocab=len(tokenizer), dtype=torch.float32)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_every_architecture_trains_from_disk_with_recording_on(
    architecture, tiny_policy, toy_config, tmp_path
):
    model = saved(architecture, tiny_policy, tmp_path / "model")
    run = sharpscope.load_run(train(toy_config(policy__model=model, **SHORT)).run_dir)
    assert run.info["status"] == "finished"
    tokens = run.tokens()
    assert (run.steps["grad_norm"] > 0).all() and (run.steps["update_norm"] > 0).all()
    refused = "moe" in architecture  # norms of trained experts
    assert (tokens["score_norm_local"].isna() if refused else tokens["score_norm_local"] > 0).all()
    shares = tokens.groupby("step")["attribution"].sum()
    np.testing.assert_allclose(shares, 1.0, atol=2e-3)
    exact = tokens.dropna(subset=["score_norm"])
    assert (
        len(exact) == (0 if refused else 8)
        and (exact["score_norm"] >= 0.99 * exact["head_grad_norm"].fillna(0)).all()
    )
    again = AutoModelForCausalLM.from_pretrained(checkpoints(run.path)[-1])
    assert any(
        not torch.equal(a, b)
        for a, b in zip(
            again.parameters(), load_policy(PolicySpec(model=model)).model.parameters(), strict=True
        )
    )


def test_bfloat16_trains_float32_weights_and_records(toy_config):
    config = toy_config(
        policy__dtype="bfloat16",
        steps=2,
        recording__token_gradients_every=1,
        evaluation__every=0,
        optimizer__lr=1e-5,
    )
    before = load_policy(config.policy).model.state_dict()
    run = sharpscope.load_run(train(config).run_dir)
    after = AutoModelForCausalLM.from_pretrained(checkpoints(run.path)[-1]).state_dict()
    moved = torch.cat([(after[name] - before[name]).flatten() for name in after])
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    # Two steps of AdamW move a weight by at most 2e-5: far below what bfloat16 weights of this size would keep.
    assert 0 < float(moved.abs().max()) < 3e-5 and float((moved != 0).double().mean()) > 0.5
    tokens = run.tokens()
    gap = (tokens["logp"] - tokens["behavior_logp"]).abs()
    assert gap.max() < 0.2  # sampler and trainer round differently, in bfloat16
    # Shares along the gradient that was computed in bfloat16, of log-probabilities in float32: one up to that rounding.
    assert tokens.groupby("step")["attribution"].sum().between(0.9, 1.1).all()


ADAPTED = {"policy__lora": {"r": 2, "alpha": 4.0}, "method__kl__coef": 0.05, "evaluation__every": 0}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_train_with_recording_and_resume_exactly(toy_config, dtype):
    changes = ADAPTED | {
        "recording__token_gradients_every": 1,
        "recording__exact_tokens": 2,
        "policy__dtype": dtype,
    }
    whole = toy_config(name="whole", steps=4, **changes, checkpoint__every=2)
    run = sharpscope.load_run(train(whole).run_dir)
    assert 0 < run.info["trainable_parameters"] < run.info["parameters"] / 2
    assert run.steps["kl"].iloc[0] == pytest.approx(0, abs=1e-6) and run.steps["kl"].iloc[-1] > 0
    tokens = run.tokens()
    assert tokens["score_norm_local"].gt(0).any()
    shares = tokens.groupby("step")["attribution"].sum()
    np.testing.assert_allclose(shares, 1, atol=0.002 if dtype == "float32" else 0.1)
    folder = checkpoints(run.path)[-1]
    assert (folder / "adapter_model.safetensors").exists() and not (
        folder / "model.safetensors"
    ).exists()
    shutil.rmtree(folder.with_name("step-000004"))
    update_run_info(whole.run_dir, status="interrupted")
    train(whole, resume=True)
    columns = ["logp", "loss_coef", "attribution"]
    again = sharpscope.load_run(run.path).tokens(columns=columns)
    pd.testing.assert_frame_equal(again, tokens[columns], check_exact=True)


def test_saved_adapters_load_with_transformers_and_peft_and_are_evaluated(toy_config, tiny_policy):
    run_dir = train(toy_config(steps=2, **ADAPTED)).run_dir
    folder = checkpoints(run_dir)[-1]
    assert json.loads((folder / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(tiny_policy)
    ids = torch.tensor([[5, 6, 7, 8]])
    ours = load_policy(PolicySpec(model=str(folder))).model(ids).logits
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits
    by_hand = (
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_policy), folder)
        .eval()(ids)
        .logits
    )
    plain = AutoModelForCausalLM.from_pretrained(tiny_policy).eval()(ids).logits
    assert torch.allclose(ours, theirs, atol=1e-5) and torch.allclose(ours, by_hand, atol=1e-5)
    assert not torch.allclose(ours, plain, atol=1e-4)
    rows = evaluate_model(str(run_dir), splits=("heldout",), temperatures=(0.0,), prompts=2)
    assert rows and rows[0]["step"] == 2

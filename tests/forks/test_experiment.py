"""Forks: exact restoration, the run's own steps, equal arms, and what a repeated or a wrong call does."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import sharpscope
from sharpscope.analysis import analyze
from sharpscope.cli import main
from sharpscope.config import ForkSpec, build_config
from sharpscope.distributed import Launch
from sharpscope.errors import UserError
from sharpscope.forks import experiment
from sharpscope.forks import start as start_module
from sharpscope.forks.experiment import Measure
from sharpscope.forks.start import Start
from sharpscope.traces import RunLock
from sharpscope.training.checkpoint import OPTIMIZER, checkpoint_dir
from tests.conftest import TOY
from tests.forks.conftest import SMALL, arm_method, rows_of, start_of


def call(arguments, code=0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == code


def state_of(start: Start) -> list[torch.Tensor]:
    """Everything that a snapshot must restore, as tensors."""
    found = [*start.policy.model.state_dict().values()]
    for parameter in start.snapshot.parameters:
        found += [torch.as_tensor(value) for value in start.optimizer.state.get(parameter, {}).values()]
    return copy.deepcopy(found)


def moved(start: Start) -> list[torch.Tensor]:
    """The change of the weights by an update."""
    start.update("own", 0)
    return start.snapshot.displacement()


def equal(one, two) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("step", [0, 3])
def test_restoring_is_bitwise(trained, step):
    start = start_of(trained, step)
    before, lr = state_of(start), [group["lr"] for group in start.optimizer.param_groups]
    expected = torch.rand(3)
    start.update("own", 0)
    start.policy.model.train()
    assert not equal(state_of(start), before)
    start.snapshot.restore()
    assert equal(state_of(start), before)
    assert [group["lr"] for group in start.optimizer.param_groups] == lr
    assert not start.policy.model.training and all(p.grad is None for p in start.policy.model.parameters())
    assert torch.equal(torch.rand(3), expected)


def test_an_optimizer_without_a_state_is_warmed_up_at_the_same_weights(trained):
    """AdamW's moments after two steps at a learning rate of 0 are the averages of their gradients; the weights do not move."""
    cold, warm = (start_of(trained, warm_up=steps) for steps in (0, 2))
    assert (cold.warmed, warm.warmed) == (0, 2) and not cold.optimizer.state
    for one, other in zip(cold.policy.model.parameters(), warm.policy.model.parameters(), strict=True):
        assert torch.equal(one, other)
    steps = {int(state["step"]) for state in warm.optimizer.state.values()}
    assert steps == {2 * trained.update.mini_batches}
    assert all(float(state["exp_avg_sq"].sum()) > 0 for state in warm.optimizer.state.values())
    assert {group["lr"] for group in warm.optimizer.param_groups} == {cold.lr}
    first = [torch.cat([p.flatten() for p in moved(one)]) for one in (cold, warm)]
    assert torch.nn.functional.cosine_similarity(*first, dim=0) < 0.999
    assert start_of(trained, 3).warmed == 0  # stored


def test_weights_are_calibrated_on_the_first_batch_with_a_gradient(trained, monkeypatch):
    arm = arm_method("grpo-sg+weight.preset=calibrated+weight.percentiles=gradient", trained)
    draw = Start.rollouts

    def second(start, method, batch, *args, **options):
        return draw(start, method, 1, *args, **options)

    def idle(start, method, batch, *args, **options):
        found = draw(start, method, batch, *args, **options)
        return replace(found, advantage=torch.zeros_like(found.advantage)) if batch == 0 else found

    def never(start, method, batch, *args, **options):
        return idle(start, method, 0, *args, **options)

    weights = []
    for patched in (second, idle, never):
        monkeypatch.setattr(Start, "rollouts", patched)
        weights.append(start_of(trained, sg=arm).methods["sg"].weight)
    assert weights[0].kind == "sigmoid" and weights[1] == weights[0] and weights[2].kind == "uniform"


def test_adapters_are_forked_and_nothing_else_moves(tiny_policy, tmp_path):
    pytest.importorskip("peft")
    config = build_config(
        values={**TOY, "policy.model": str(tiny_policy), "policy.lora": {"r": 2, "alpha": 4}, "method.kl.coef": 0.01}
    )
    start = start_of(config)
    before = state_of(start)
    frozen = [p.clone() for p in start.policy.model.parameters() if not p.requires_grad]
    change = moved(start)
    assert any(part.abs().max() > 0 for part in change)
    assert len(change) == sum(p.requires_grad for p in start.policy.model.parameters())
    assert equal(frozen, [p for p in start.policy.model.parameters() if not p.requires_grad])
    value = {(r["comparison"], r["outcome"]): r["value"] for r in rows_of(start)}
    assert value["step", "update_norm"] > 0 and value["kl", "kl"] > 0
    start.snapshot.restore()
    assert equal(state_of(start), before)


@pytest.mark.parametrize(("step", "updates"), [(0, 1), (2, 3)])
def test_one_arm_equals_the_run_to_the_last_bit(trained, step, updates):
    start = start_of(trained, step, warm_up=0)
    start.advance(updates - 1, lambda text: None)
    Measure(start, ForkSpec(**SMALL), None).fixed("heldout", 0)  # measuring must not change what the arm does
    start.update("own", 0)
    folder = checkpoint_dir(trained.run_dir, step + updates)
    saved, moments = load_file(folder / "model.safetensors"), load_file(folder / OPTIMIZER)
    named = dict(start.policy.model.named_parameters())
    assert all(torch.equal(named[name], value) for name, value in saved.items() if name in named)
    for key, value in moments.items():
        name, entry = key.rsplit("::", 1)
        assert torch.equal(torch.as_tensor(start.optimizer.state[named[name]][entry]), value), key


def test_equal_arms_differ_by_exactly_zero_and_their_order_does_not_matter(trained):
    spec = ForkSpec(prompts=2, samples=1, outcomes=("failure", "entropy", "sharpness"))
    arms = {"a": "grpo", "b": "ar", "c": "grpo"}

    def values(names):
        start = start_of(trained, 2, **{name: arm_method(arms[name], trained) for name in names})
        return {(row["arm"], row["comparison"], row["outcome"]): row["value"] for row in rows_of(start, spec, 1)}

    found = values("abc")
    names = {key[1:] for key in found}
    for key in names:
        assert found[("a", *key)] == found[("c", *key)]
        assert found[("a", *key)] != found[("b", *key)]
    assert values("acb") == found


def test_rows_that_cannot_be_believed_are_not_valid(trained, monkeypatch):
    """Far updates, a matched scale that was not found, a saturated sharpness."""
    start = start_of(trained, 2, **{name: arm_method(name, trained) for name in ("grpo", "ar")})
    spec = ForkSpec(**SMALL, outcomes=("failure", "entropy", "sharpness"))
    for share, saturation in ((1e-6, 1.0), (1.0, 0.0)):
        monkeypatch.setattr(experiment, "EFFECTIVE_SHARE", share)
        monkeypatch.setattr(experiment, "MAX_SATURATION", saturation)
        for row in rows_of(start, spec):
            doubtful = row["outcome"].endswith("_failure") or row["outcome"] == "sam_sharpness"
            assert row["valid"] == (share < 1 or not doubtful)
    monkeypatch.setattr(experiment, "matching_scale", lambda divergence, *_: (divergence(0.5) and 0.5, False))
    rows = [row for row in rows_of(start) if row["comparison"] == "kl" and row["arm"] == "ar"]
    assert not any(row["valid"] for row in rows)


def test_matched_comparisons_match(trained):
    arms = {name: arm_method(name, trained) for name in ("grpo", "ar", "lopti", "high-entropy")}
    rows = rows_of(start_of(trained, 2, **arms))
    value = {(r["arm"], r["comparison"], r["outcome"]): r["value"] for r in rows}
    for row in rows:
        assert row["scale"] == 1.0 or row["comparison"] != "step"
        if row["comparison"] == "kl":
            assert value[row["arm"], "kl", "kl"] == pytest.approx(value["grpo", "step", "kl"], rel=0.01)


def test_a_repeated_call_adds_what_is_missing_and_reads_the_same(trained):
    options = {"checkpoint": [2], "methods": ["grpo", "ar"], "prompts": 3}
    once = sharpscope.fork(trained.run_dir, batches=1, **options).forks
    more = sharpscope.fork(trained.run_dir, batches=2, **options).forks
    assert len(more) == 2 * len(once)
    kept = more.iloc[: len(once)].reset_index(drop=True)
    assert kept.equals(once)
    run = sharpscope.fork(trained.run_dir, batches=2, **options)
    assert len(run.forks) == len(more)
    ((name, settings),) = run.info["forks"].items()
    assert set(run.forks["fork"]) == {name} and settings["batches"] == 2
    assert list(settings["arms"]["2"]) == ["grpo", "ar"]
    other = sharpscope.fork(trained.run_dir, batches=1, **options | {"prompts": 4}).forks
    assert other["fork"].nunique() == 2


def test_a_model_without_a_run_gets_a_folder_of_its_own(tiny_policy, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "set_threads", lambda *_: 7)
    options = {"methods": ["grpo"], "prompts": 2, "batches": 1}
    small = ["rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=6"]
    options |= {"model": str(tiny_policy), "task": "tests.toy_task:vowels", "out": tmp_path / "forks"}
    run = sharpscope.fork(overrides=small, **options)
    assert run.status == "finished" and run.info["threads"] == 7
    assert len(run.steps) == 0 and set(run.forks["step"]) == {0}
    with pytest.raises(UserError, match="seed 0"):
        sharpscope.fork(overrides=[*small, "seed=1"], **options)


def test_the_command_keeps_what_a_stopped_fork_has_measured_and_the_report_has_a_section(
    trained, tmp_path, monkeypatch, capsys, quick
):
    options = ["fork", str(trained.run_dir), "--checkpoint", "2", "--methods", "grpo,<b>=ar", "--batches", "3"]
    options += ["--set", "fork.prompts=3", "--set", "optimizer.lr=0.001", "--outcomes", "failure"]
    call([*options, "--out", str(tmp_path / "whole")])
    shown = capsys.readouterr()
    assert "scaled to the KL of the reference's step" in shown.out and "batch 3 of 3" in shown.err
    whole = Measure.batch_rows

    def stopping(measure, name, batch):
        for number, row in enumerate(whole(measure, name, batch)):
            if (batch, number) == (1, 2):  # some rows of the batch are there
                raise KeyboardInterrupt
            yield row

    with monkeypatch.context() as patch:
        patch.setattr(Measure, "batch_rows", stopping)
        call([*options, "--out", str(tmp_path / "stopped")], code=130)
    assert "repeat the command" in capsys.readouterr().err
    assert set(sharpscope.load_run(tmp_path / "stopped").forks["batch"]) == {0}
    for _ in range(2):
        call([*options, "--out", str(tmp_path / "stopped")])
    assert "all 3 batches are there" in capsys.readouterr().err
    one, two = (sharpscope.load_run(tmp_path / name).forks.drop(columns="seconds") for name in ("whole", "stopped"))
    pd.testing.assert_frame_equal(one, two, check_exact=True)
    assert set(one["outcome"]) >= {"heldout_failure", "kl", "update_norm"}
    result = analyze(tmp_path / "whole", tmp_path / "report", figures=True)
    page = result.page.read_text()
    assert set(result.figures) == {"forks"} and "no steps" not in page
    assert ">Counterfactual updates</h2>" in page and "&lt;b&gt;" in page and "<b>" not in page
    assert len(re.findall("scaled to the KL[^<]*</h3>", page)) == 1
    assert {"grpo", "<b>"} == set(pd.read_csv(result.tables["forks"])["arm"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"methods": ["grpo", "grpo"]}, "two arms are called 'grpo'"),
        ({"methods": ["nope"]}, "nope"),
        ({"checkpoint": [77]}, "choose from 0, 1"),
        ({"checkpoint": [6], "overrides": ["optimizer.schedule=linear"]}, "learning rate is 0"),
        ({"batch": 3}, "batches"),
        ({"task": "math"}, "--task"),
        ({"model": "embedded:math"}, "a run's folder, or --model"),
    ],
)
def test_a_mistake_is_one_line(trained, change, words):
    with pytest.raises(UserError, match=words) as error:
        sharpscope.fork(trained.run_dir, **{"prompts": 2, "batches": 1, "checkpoint": [2]} | change)
    assert "\n" not in str(error.value)


def test_several_processes_and_a_run_that_is_written_are_refused(trained, monkeypatch):
    with RunLock(trained.run_dir), pytest.raises(UserError, match="process"):
        sharpscope.fork(trained.run_dir, checkpoint=[2], methods=["grpo"], prompts=2, batches=1)
    monkeypatch.setattr(start_module.distributed, "start", lambda device="auto": Launch(2))
    with pytest.raises(UserError, match="one process"):
        sharpscope.fork(trained.run_dir)

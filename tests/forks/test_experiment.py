"""Forks: exact restoration, the run's own steps, equal arms, and what a repeated or a wrong call does."""

from __future__ import annotations

import re

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import sharpscope
from sharpscope.analysis import analyze
from sharpscope.cli import main
from sharpscope.config import ForkSpec
from sharpscope.errors import UserError
from sharpscope.forks import experiment, outcomes
from sharpscope.forks.experiment import Measure
from sharpscope.training.checkpoint import OPTIMIZER, checkpoint_dir
from tests.forks.starts import SMALL, arm_method, rows_of, start_of


def call(arguments, code=0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == code


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


def test_rows_of_far_updates_or_without_their_scale_are_not_valid(trained, monkeypatch):
    start = start_of(trained, 2, **{name: arm_method(name, trained) for name in ("grpo", "ar")})
    for share, expected in ((1e-6, True), (1.0, False)):
        monkeypatch.setattr(outcomes, "EFFECTIVE_SHARE", share)
        for row in rows_of(start):
            assert row["valid"] == (expected or not row["outcome"].endswith("_failure"))
    monkeypatch.setattr(experiment, "matching_scale", lambda divergence, *_: (divergence(0.5) and 0.5, False))
    rows = [row for row in rows_of(start) if row["comparison"] == "kl" and row["arm"] == "ar"]
    assert not any(row["valid"] for row in rows)


def test_a_saturated_sharpness_is_not_valid_and_other_outcomes_are(trained, monkeypatch):
    start = start_of(trained, 2, grpo=arm_method("grpo", trained))
    spec = ForkSpec(**SMALL, outcomes=("entropy", "sharpness"))
    for limit in (1.0, 0.0):
        monkeypatch.setattr(outcomes, "MAX_SATURATION", limit)
        valid = {row["outcome"]: row["valid"] for row in rows_of(start, spec) if row["value"] > 0}
        assert valid["entropy"] and valid["sam_sharpness"] == (limit > 0)


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


def test_the_report_has_a_section_with_the_figure_the_tables_and_a_csv(trained, tmp_path, quick):
    folder = tmp_path / "forks"
    options = {"methods": ["grpo", "<b>=ar"], "prompts": 3, "batches": 2, "checkpoint": [0, 2]}
    sharpscope.fork(trained.run_dir, out=folder, **options)
    result = analyze(folder, tmp_path / "report", figures=True)
    page = result.page.read_text()
    assert set(result.figures) == {"forks"} and "no steps" not in page
    assert ">Counterfactual updates</h2>" in page and "&lt;b&gt;" in page and "<b>" not in page
    assert len(re.findall("scaled to the KL[^<]*</h3>", page)) == 1
    table = pd.read_csv(result.tables["forks"])
    assert {"step 0", "step 2", "all states"} == set(table["state"]) and {"grpo", "<b>"} == set(table["arm"])


def test_the_command_writes_shows_and_continues(trained, tmp_path, capsys):
    command = ["fork", str(trained.run_dir), "--checkpoint", "step-000002", "--methods", "grpo,ar"]
    command += ["--set", "fork.prompts=3", "--set", "optimizer.lr=0.001", "--outcomes", "failure"]
    command += ["--out", str(tmp_path / "forks")]
    call([*command, "--batches", "2"])
    shown = capsys.readouterr()
    assert "scaled to the KL of the reference's step" in shown.out and "batch 2 of 2" in shown.err
    call([*command, "--batches", "2"])
    assert "all 2 batches are there" in capsys.readouterr().err
    assert set(sharpscope.load_run(tmp_path / "forks").forks["outcome"]) >= {"heldout_failure", "kl", "update_norm"}
    call(["config", "fork"])
    assert "fork.prompts = 64" in capsys.readouterr().out


def test_what_a_stopped_fork_has_measured_is_kept(trained, tmp_path, monkeypatch, capsys):
    options = ["fork", str(trained.run_dir), "--checkpoint", "2", "--methods", "grpo,ar", "--batches", "3"]
    options += ["--set", "fork.prompts=3"]
    call([*options, "--out", str(tmp_path / "whole")])
    whole = Measure.batch_rows

    def stopping(measure, name, batch):
        for number, row in enumerate(whole(measure, name, batch)):
            if (batch, number) == (1, 2):  # some rows of the batch are there
                raise KeyboardInterrupt
            yield row

    monkeypatch.setattr(Measure, "batch_rows", stopping)
    call([*options, "--out", str(tmp_path / "stopped")], code=130)
    assert "repeat the command" in capsys.readouterr().err
    assert set(sharpscope.load_run(tmp_path / "stopped").forks["batch"]) == {0}
    monkeypatch.undo()
    call([*options, "--out", str(tmp_path / "stopped")])
    one, two = (sharpscope.load_run(tmp_path / name).forks.drop(columns="seconds") for name in ("whole", "stopped"))
    pd.testing.assert_frame_equal(one, two, check_exact=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"methods": ["grpo", "grpo"]}, "two arms are called 'grpo'"),
        ({"methods": ["nope"]}, "nope"),
        ({"methods": ["grpo+optimizer.lr=1"]}, "unknown field"),
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

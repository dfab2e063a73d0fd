"""Sweeps: every combination once, checked beforehand; finished runs stay, interrupted go on, failed wait for --retry."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import sharpscope
from sharpscope.cli import app
from sharpscope.errors import UserError
from sharpscope.sweeps import SweepOutcome, _add_run, execute, plan_sweep, read_sweep, to_do
from sharpscope.traces import RunLock, update_run_info
from tests.conftest import TOY


def test_every_combination_is_planned_once(sweep_file):
    file = sweep_file(
        seeds=[0, 1],
        settings=[{}, {"optimizer.weight_decay": 0.1}],
        grid={"optimizer.lr": [0.1, 0.01], "rollout.group_size": [2, 4]},
    )
    runs = plan_sweep(read_sweep(file))
    assert len(runs) == len({run.run_dir for run in runs}) == 2 * 2 * 2 * 4
    seen = {
        (
            r.config.method.name,
            r.config.seed,
            r.config.optimizer.lr,
            r.config.rollout.group_size,
            r.config.optimizer.weight_decay,
        )
        for r in runs
    }
    assert len(seen) == 32
    assert [run.config.method.name for run in runs[:2]] == ["grpo", "ar"]  # pairs come together


def test_parts_of_a_study(sweep_file):
    parts = {
        "main": {"seeds": [0, 1]},
        "rates": {
            "methods": ["grpo"],
            "grid": {"optimizer.lr": [0.1, 0.01]},
            "base": {"optimizer": {"weight_decay": 0.2}},
        },
    }
    data = yaml.safe_load(sweep_file().read_text())
    file = sweep_file()
    file.write_text(yaml.safe_dump({k: v for k, v in data.items() if k not in ("methods", "seeds")} | {"parts": parts}))
    spec = read_sweep(file)
    runs = plan_sweep(spec)
    assert [r.run_dir.name for r in runs] == [
        "grpo-s0",
        "grpo-sg-s0",
        "grpo-s1",
        "grpo-sg-s1",
        "grpo+lr=0.1-s0",
        "grpo+lr=0.01-s0",
    ]
    assert [r.config.optimizer.weight_decay for r in runs] == [runs[0].config.optimizer.weight_decay] * 4 + [0.2] * 2
    assert runs[0].config.optimizer.weight_decay != 0.2 and all(r.config.steps == 2 for r in runs)
    assert [r.run_dir.name for r in plan_sweep(spec, only=["rates"])] == ["grpo+lr=0.1-s0", "grpo+lr=0.01-s0"]
    with pytest.raises(UserError, match="no such part; did you mean 'rates'"):
        plan_sweep(spec, only=["rate"])
    file.write_text(yaml.safe_dump({k: v for k, v in data.items() if k != "methods"} | {"parts": parts}))
    with pytest.raises(UserError, match="seeds cannot be combined with parts"):
        read_sweep(file)
    clash = {"a": {"methods": ["grpo"]}, "b": {"methods": ["grpo"], "base": {"steps": 3}}}
    file.write_text(yaml.safe_dump({k: v for k, v in data.items() if k not in ("methods", "seeds")} | {"parts": clash}))
    with pytest.raises(UserError, match="share the folder"):
        plan_sweep(read_sweep(file), only=["a"])


def test_mistakes_are_found_before_anything_runs(sweep_file, tmp_path: Path):
    for changes, says in (
        ({"grid": {"optimizer.lrr": [1]}}, "did you mean 'lr'"),
        ({"methods": ["grpo", "grpo"]}, "has duplicate values"),
        ({"seedz": [1]}, "did you mean 'seeds'"),
        ({"grid": {"optimizer.lr": []}}, "no values"),
        ({"settings": [{}, {}]}, "share the folder"),
        ({"base": {"seed": 3}}, "base: seed = 3 does not belong here; list seeds under `seeds`"),
        ({"base": {"out": "elsewhere"}}, "base: out = 'elsewhere' does not belong here; set `out` of the sweep"),
        ({"base": {"name": "zz"}}, "name: removed in 0.3"),
        ({"settings": [{}, {"seed": 1}]}, "settings.*seed = 1 does not belong here"),
        ({"grid": {"seed": [1, 2]}}, "grid: seed = .*does not belong here"),
        ({"smoke": {"seed": 1}}, "smoke: seed = 1 does not belong here"),
        ({"methods": ["grpo", "grop"]}, "did you mean 'grpo'"),
    ):
        with pytest.raises(UserError, match=says):
            plan_sweep(read_sweep(sweep_file(**changes)))
    assert not (tmp_path / "runs").exists()


def test_a_part_sets_no_seed_in_its_base(sweep_file):
    file = sweep_file()
    file.write_text(yaml.safe_dump({"parts": {"main": {"base": {"seed": 3}}}}))
    with pytest.raises(UserError, match=r"parts\.main\.base: seed = 3 does not belong here"):
        read_sweep(file)


def test_a_smoke_lies_beside_the_real_folder(sweep_file, tmp_path: Path):
    for out in (f"{tmp_path}/runs", f"{tmp_path}/runs/"):
        runs = plan_sweep(read_sweep(sweep_file(out=out)), smoke=True)
        assert {run.run_dir.parent for run in runs} == {tmp_path / "runs-smoke"}


def test_a_run_of_other_settings_does_not_count_as_the_planned_one(sweep_file):
    (grpo, _) = plan_sweep(read_sweep(sweep_file()))
    grpo.run_dir.mkdir(parents=True)
    config = grpo.config.model_dump(mode="json")
    info = {"method": "grpo", "task": "toy", "seed": 0, "status": "finished", "steps_done": 2}
    config |= {"threads": 7, "a_setting_of_another_version": 1}
    (grpo.run_dir / "run.json").write_text(json.dumps(info | {"config": config}))
    assert plan_sweep(read_sweep(sweep_file()))[0].status == "finished"
    changed = sweep_file()
    data = yaml.safe_load(changed.read_text())
    data["base"]["steps"] = 3
    data["base"].setdefault("optimizer", {})["lr"] = 0.25
    changed.write_text(yaml.safe_dump(data))
    with pytest.raises(
        UserError, match=r"contains a run with other settings \(steps = 2, planned 3; optimizer\.lr = .*, planned 0\.25"
    ):
        plan_sweep(read_sweep(changed))


# -- Runs of a sweep: what is started, counted and reported


def test_a_failed_run_stops_no_other_finished_ones_stay_interrupted_go_on(sweep_file, tmp_path: Path):
    stops = {"rollout.max_new_tokens": 1, "health.truncation.action": "stop"}
    file = sweep_file(methods=["grpo"], settings=[{"policy.model": str(tmp_path / "absent")}, stops, {}])
    done = CliRunner().invoke(app, ["run", str(file), "--workers", "2"])
    assert done.exit_code == 1 and "0 interrupted, 2 failed" in done.output, done.output
    absent, stopped, good = plan_sweep(read_sweep(file))
    reasons = sorted(line for line in done.output.splitlines() if line.startswith("failed: "))[::-1]
    assert "no such folder" in reasons[0] and "fix this and repeat the command" in reasons[0]
    assert "truncation: " in reasons[1] and reasons[1].endswith("(to run it again, use --retry)")

    assert good.status == "finished"
    stamp = {path: path.stat().st_mtime_ns for path in good.run_dir.rglob("part-*")}
    again = execute([stopped, good], workers=1, threads=1)
    assert again.finished == [] and again.skipped == [good.run_dir.name]
    assert "truncation: " in again.errors.popitem()[1]  # a failed run waits, and its reason is still told
    assert to_do([absent, stopped, good], retry=False) == [absent]  # it has no run.json
    assert to_do([absent, stopped, good], retry=True) == [absent, stopped]
    assert stamp and stamp == {path: path.stat().st_mtime_ns for path in good.run_dir.rglob("part-*")}

    update_run_info(good.run_dir, status="interrupted")
    assert execute([good], workers=1, threads=1).finished == [good.run_dir.name]
    assert sharpscope.load_run(good.run_dir).info["status"] == "finished"


@pytest.mark.parametrize(
    ("status", "code", "text", "counted", "reason"),
    [
        (None, 2, "view: x\nerror: task.path: none.parquet\nand more", "failed", "task.path: none.parquet"),
        (None, 1, "a crash", "failed", "a crash"),
        (None, -9, "", "failed", "signal 9"),
        ("running", -9, "", "interrupted", "signal 9"),
        ("interrupted", 2, "error: another reference", "failed", "another reference"),
        ("interrupted", 130, "view: sharpscope show", "interrupted", None),
        ("failed", 1, "failed: 3 steps\nview: sharpscope show", "failed", "a rule said so"),
        (None, 0, "", "interrupted", None),  # the user stopped the sweep before its turn
    ],
)
def test_how_a_run_is_counted(sweep_file, status, code, text, counted, reason):
    (run,) = plan_sweep(read_sweep(sweep_file(methods=["grpo"])))
    if status:
        run.run_dir.mkdir(parents=True)
        info = {"status": status, "steps_done": 1, "end": "a rule said so" if status == "failed" else None}
        (run.run_dir / "run.json").write_text(json.dumps(info))
    outcome = SweepOutcome()
    _add_run(outcome, run, True, code, text)
    assert getattr(outcome, counted) == [run.run_dir.name]
    assert reason in outcome.errors[run.run_dir.name] if reason else not outcome.errors


def test_a_run_that_another_process_holds_is_named(sweep_file):
    file = sweep_file(methods=["grpo"])
    (run,) = plan_sweep(read_sweep(file))
    run.run_dir.mkdir(parents=True)
    info = {"status": "running", "steps_done": 1, "config": run.config.model_dump(mode="json")}
    (run.run_dir / "run.json").write_text(json.dumps(info))
    with RunLock(run.run_dir):
        done = CliRunner().invoke(app, ["run", str(file)], terminal_width=500)
    assert done.exit_code == 1
    assert "0 already finished, 0 interrupted, 0 failed, 1 run by others" in done.output
    assert f"is being written by process {os.getpid()} on " in done.output


def test_methods_and_seeds_make_a_sweep_that_is_resumed(tiny_policy: Path, tmp_path: Path, monkeypatch):
    """Own weights with a label beside GRPO, two seeds; repeating the command executes what is missing."""
    monkeypatch.chdir(tmp_path)
    small = {**TOY, "steps": 1, "evaluation.every": 0, "probes.preset": "off"}
    sets = [part for path, value in small.items() for part in ("--set", f"{path}={value}")]
    own = "own=tests.toy_shaping:by_probability"
    command = ["run", "--model", str(tiny_policy), "--methods", f"grpo,{own}", "--seeds", "0,1", "--out", "pair", *sets]
    listed = CliRunner().invoke(app, [*command, "--dry-run"], env={"COLUMNS": "200"})
    assert "4 runs, 4 to do" in listed.stdout, listed.output
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and "4 finished" in done.stdout, done.output
    runs = sharpscope.load_runs("pair")
    assert sorted(run.name for run in runs) == ["grpo-s0", "grpo-s1", "own-s0", "own-s1"]
    assert {run.info["method"] for run in runs} == {"grpo", "own"}  # the label, for tables and legends
    weights = sharpscope.load_run("pair/own-s0").tokens()["weight"]
    assert weights.between(0.5, 1.5).all() and weights.nunique() > 1
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0 and "0 finished, 4 already finished" in again.stdout

"""Sweeps: every combination once, checked beforehand; finished runs stay, interrupted go on, failed wait for --retry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import sharpscope
from sharpscope.cli import app
from sharpscope.errors import UserError
from sharpscope.sweeps import SweepOutcome, execute, plan_sweep, read_sweep
from sharpscope.sweeps.execute import _add_run, to_do
from sharpscope.traces import update_run_info
from tests.conftest import TOY


@pytest.fixture
def sweep_file(tiny_policy: Path, tmp_path: Path):
    def make(**changes) -> Path:
        base: dict = {}
        for path, value in {**TOY, "policy.model": str(tiny_policy), "steps": 2, "evaluation.every": 0}.items():
            *parents, last = path.split(".")
            part = base
            for parent in parents:
                part = part.setdefault(parent, {})
            part[last] = value
        data = {
            "purpose": "a test",
            "out": str(tmp_path / "runs"),
            "base": base,
            "methods": ["grpo", "ar"],
            "seeds": [0],
        }
        file = tmp_path / "sweep.yaml"
        file.write_text(yaml.safe_dump(data | changes))
        return file

    return make


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
        ({"base": {"name": "zz"}}, "base: name = 'zz' does not belong here; remove it"),
        ({"settings": [{}, {"seed": 1}]}, "settings.*seed = 1 does not belong here"),
        ({"grid": {"seed": [1, 2]}}, "grid: seed = .*does not belong here"),
        ({"smoke": {"name": "zz"}}, "smoke: name = 'zz' does not belong here"),
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


def test_finished_runs_stay_interrupted_go_on_failed_wait(sweep_file):
    runs = plan_sweep(read_sweep(sweep_file()))
    outcome = execute(runs, workers=2, threads=1)
    assert sorted(outcome.finished) == sorted(run.run_dir.name for run in runs) and not outcome.errors
    stamp = {path: path.stat().st_mtime_ns for run in runs for path in run.run_dir.rglob("part-*")}
    again = execute(runs, workers=1, threads=1)
    assert again.finished == [] and len(again.skipped) == 2
    assert stamp == {path: path.stat().st_mtime_ns for run in runs for path in run.run_dir.rglob("part-*")}
    update_run_info(runs[0].run_dir, status="failed")
    assert to_do(runs, retry=False)[0] == []
    assert to_do(runs, retry=True)[0] == [runs[0]]
    update_run_info(runs[0].run_dir, status="interrupted")
    assert execute(runs, workers=1, threads=1).finished == [runs[0].run_dir.name]
    assert sharpscope.load_run(runs[0].run_dir).info["status"] == "finished"


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


def test_a_run_that_fails_is_reported_and_does_not_stop_the_others(sweep_file, tmp_path: Path):
    runs = plan_sweep(
        read_sweep(sweep_file(settings=[{}, {"policy.model": str(tmp_path / "absent")}], methods=["grpo"]))
    )
    outcome = execute(runs, workers=1, threads=1)
    assert outcome.finished == [runs[0].run_dir.name]
    assert outcome.failed == [runs[1].run_dir.name] and not outcome.interrupted
    assert "no such folder" in outcome.errors[runs[1].run_dir.name]


def test_the_reason_of_every_failure_is_printed(sweep_file, tmp_path: Path):
    stops = {"rollout.max_new_tokens": 2, "health.truncation.action": "stop"}
    file = sweep_file(methods=["grpo"], settings=[{"policy.model": str(tmp_path / "absent")}, stops])
    done = CliRunner().invoke(app, ["sweep", str(file), "--workers", "2"])
    assert done.exit_code == 1 and "0 interrupted, 2 failed" in done.output, done.output
    mistake, stopped = sorted(line for line in done.output.splitlines() if line.startswith("failed: "))[::-1]
    assert "no such folder" in mistake and "fix this and repeat the command" in mistake
    assert "truncation: " in stopped and stopped.endswith("(to run it again, use --retry)")
    # the next call leaves the second one, and still says why
    assert "truncation: " in execute(plan_sweep(read_sweep(file))[1:], workers=1, threads=1).errors.popitem()[1]


@pytest.mark.parametrize(
    ("status", "code", "text", "counted", "reason"),
    [
        (None, 2, "view: x\nerror: task.path: none.parquet\nand more", "failed", "task.path: none.parquet"),
        (None, 1, "a crash", "failed", "a crash"),
        (None, -9, "", "failed", "signal 9"),
        ("running", -9, "", "interrupted", "signal 9"),
        ("interrupted", 2, "error: another reference", "failed", "another reference"),
        ("interrupted", 0, "view: sharpscope show", "interrupted", None),
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


def test_a_run_that_another_machine_holds_is_named(sweep_file):
    file = sweep_file(methods=["grpo"])
    (run,) = plan_sweep(read_sweep(file))
    run.run_dir.mkdir(parents=True)
    info = {"status": "running", "steps_done": 1, "config": run.config.model_dump(mode="json")}
    (run.run_dir / "run.json").write_text(json.dumps(info))
    owner = {"pid": 1, "host": "elsewhere", "since": "2026-01-01T00:00:00+00:00", "born": 0.0}
    (run.run_dir / "lock.json").write_text(json.dumps(owner))
    done = CliRunner().invoke(app, ["sweep", str(file)], terminal_width=500)
    assert done.exit_code == 1
    assert "0 already finished, 0 interrupted, 0 failed, 1 run by others" in done.output
    lock = run.run_dir / "lock.json"
    assert (
        f"is being written by process 1 on elsewhere since {owner['since']}; wait for it, or remove {lock}"
        in done.output
    )


@pytest.mark.parametrize("option", ["--threads", "--workers"])
def test_there_is_at_least_one_thread_and_one_worker(sweep_file, option):
    done = CliRunner().invoke(app, ["sweep", str(sweep_file()), option, "0", "--dry-run"])
    assert done.exit_code == 2 and option in done.output


def test_ray_gives_the_same_runs(sweep_file):
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    runs = plan_sweep(read_sweep(sweep_file()))
    outcome = execute(runs, workers=2, threads=1, ray="local")
    assert sorted(outcome.finished) == sorted(run.run_dir.name for run in runs), outcome.errors


def test_a_cluster_that_is_not_there_is_named(sweep_file):
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    runs = plan_sweep(read_sweep(sweep_file()))
    with pytest.raises(UserError, match="cannot be reached"):
        execute(runs, workers=1, threads=1, ray="127.0.0.1:1")

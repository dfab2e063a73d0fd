"""Sweeps: every combination once, checked beforehand; finished runs stay, interrupted go on, failed wait for --retry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import sharpscope
from sharpscope.errors import UserError
from sharpscope.sweeps import execute, plan_sweep, read_sweep
from sharpscope.sweeps.execute import to_do
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
        "grpo-s0", "grpo-sg-s0", "grpo-s1", "grpo-sg-s1", "grpo+lr=0.1-s0", "grpo+lr=0.01-s0",
    ]  # fmt: skip
    assert [r.config.optimizer.weight_decay for r in runs] == [runs[0].config.optimizer.weight_decay] * 4 + [0.2] * 2
    assert runs[0].config.optimizer.weight_decay != 0.2 and all(r.config.steps == 2 for r in runs)
    assert [r.run_dir.name for r in plan_sweep(spec, only=["rates"])] == ["grpo+lr=0.1-s0", "grpo+lr=0.01-s0"]
    with pytest.raises(UserError, match="no such part; did you mean 'rates'"):
        plan_sweep(spec, only=["rate"])
    file.write_text(yaml.safe_dump({k: v for k, v in data.items() if k != "methods"} | {"parts": parts}))
    with pytest.raises(UserError, match="seeds stands beside parts"):
        read_sweep(file)
    clash = {"a": {"methods": ["grpo"]}, "b": {"methods": ["grpo"], "base": {"steps": 3}}}
    file.write_text(yaml.safe_dump({k: v for k, v in data.items() if k not in ("methods", "seeds")} | {"parts": clash}))
    with pytest.raises(UserError, match="share the folder"):
        plan_sweep(read_sweep(file), only=["a"])


def test_mistakes_are_found_before_anything_runs(sweep_file, tmp_path: Path):
    for changes, says in (
        ({"grid": {"optimizer.lrr": [1]}}, "did you mean 'lr'"),
        ({"methods": ["grpo", "grpo"]}, "twice"),
        ({"seedz": [1]}, "did you mean 'seeds'"),
        ({"grid": {"optimizer.lr": []}}, "no values"),
        ({"settings": [{}, {}]}, "share the folder"),
    ):
        with pytest.raises(UserError, match=says):
            plan_sweep(read_sweep(sweep_file(**changes)))
    assert not (tmp_path / "runs").exists()


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
        UserError, match=r"holds a run of other settings: steps = 2 there, 3 planned; optimizer\.lr = .* there, 0\.25"
    ):
        plan_sweep(read_sweep(changed))


def test_a_run_that_fails_is_reported_and_does_not_stop_the_others(sweep_file, tmp_path: Path):
    runs = plan_sweep(
        read_sweep(sweep_file(settings=[{}, {"policy.model": str(tmp_path / "absent")}], methods=["grpo"]))
    )
    outcome = execute(runs, workers=1, threads=1)
    assert outcome.finished == [runs[0].run_dir.name]
    assert "no such folder" in outcome.errors[runs[1].run_dir.name]


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

"""Sweeps: every combination once, checked beforehand; finished runs stay, interrupted go on, failed wait for --retry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from sharpscope.errors import UserError
from sharpscope.sweeps import plan_sweep, read_sweep


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

"""Sweeps: every combination once, checked beforehand; finished and failed runs stay, interrupted ones go on."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import sharpscope
from sharpscope import sweeps
from sharpscope.cli import app
from sharpscope.errors import UserError
from sharpscope.settings.reading import merge_all, nested
from sharpscope.sweeps import PlannedRun, ending, execute, plan_sweep, read_sweep
from sharpscope.traces import SCHEMA_VERSION, RunLock, update_run_info
from tests.conftest import TOY


@pytest.fixture
def sweep_file(tiny_policy: Path, tmp_path: Path):
    def make(**changes) -> Path:
        values = {**TOY, "policy.model": str(tiny_policy), "steps": 2, "evaluation.every": 0}
        base = merge_all(nested(path, value) for path, value in values.items())
        data = {
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
    configs = [run.config for run in runs]
    adam = [
        (c.method.name, c.seed, c.rollout.group_size, c.optimizer.lr, c.optimizer.weight_decay)
        for c in configs
    ]
    assert len(set(adam)) == 32
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
    file.write_text(
        yaml.safe_dump(
            {k: v for k, v in data.items() if k not in ("methods", "seeds")} | {"parts": parts}
        )
    )
    spec = read_sweep(file)
    runs = plan_sweep(spec)
    names = "grpo-s0 grpo-sg-s0 grpo-s1 grpo-sg-s1 grpo+lr=0.1-s0 grpo+lr=0.01-s0"
    assert [r.run_dir.name for r in runs] == names.split()
    assert [r.config.optimizer.weight_decay for r in runs] == [
        runs[0].config.optimizer.weight_decay
    ] * 4 + [0.2] * 2
    assert runs[0].config.optimizer.weight_decay != 0.2 and all(r.config.steps == 2 for r in runs)
    assert [r.run_dir.name for r in plan_sweep(spec, only=["rates"])] == [
        "grpo+lr=0.1-s0",
        "grpo+lr=0.01-s0",
    ]
    with pytest.raises(UserError, match="no such part; did you mean 'rates'"):
        plan_sweep(spec, only=["rate"])
    clash = {"a": {"methods": ["grpo"]}, "b": {"methods": ["grpo"], "base": {"steps": 3}}}
    file.write_text(
        yaml.safe_dump(
            {k: v for k, v in data.items() if k not in ("methods", "seeds")} | {"parts": clash}
        )
    )
    with pytest.raises(UserError, match="share the folder"):
        plan_sweep(read_sweep(file), only=["a"])


def test_mistakes_are_found_before_anything_runs(sweep_file, tmp_path: Path):
    for changes, says in (
        ({"grid": {"optimizer.lrr": [1]}}, "did you mean 'lr'"),
        ({"seedz": [1]}, "did you mean 'seeds'"),
        ({"grid": {"optimizer.lr": []}}, "no values"),
        ({"settings": [{}, {}]}, "share the folder"),
        ({"base": {"seed": 3}}, "base: seed = 3 does not belong here; list seeds under `seeds`"),
        ({"methods": ["grpo", "grop"]}, "did you mean 'grpo'"),
    ):
        with pytest.raises(UserError, match=says):
            plan_sweep(read_sweep(sweep_file(**changes)))
    assert not (tmp_path / "runs").exists()


def test_a_run_of_other_settings_does_not_count_as_the_planned_one(sweep_file):
    (grpo, _) = plan_sweep(read_sweep(sweep_file()))
    grpo.run_dir.mkdir(parents=True)
    config = grpo.config.model_dump(mode="json")
    info = {"method": "grpo", "task": "toy", "seed": 0, "status": "finished", "steps_done": 2}
    info |= {"schema_version": SCHEMA_VERSION}
    config |= {"threads": 7, "a_setting_of_another_version": 1}
    (grpo.run_dir / "run.json").write_text(json.dumps(info | {"config": config}))
    assert plan_sweep(read_sweep(sweep_file()))[0].status == "finished"
    changed = sweep_file()
    data = yaml.safe_load(changed.read_text())
    data["base"]["steps"] = 3
    data["base"].setdefault("optimizer", {})["lr"] = 0.25
    changed.write_text(yaml.safe_dump(data))
    with pytest.raises(
        UserError,
        match=r"contains a run with other settings \(steps = 2, planned 3; optimizer\.lr = .*, planned 0\.25",
    ):
        plan_sweep(read_sweep(changed))


# -- Runs of a sweep: what is started, counted and reported


WORKER = """
import json, pathlib, signal, sys, time
folder, end = pathlib.Path(sys.argv[1]), sys.argv[2]
def write(status):
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(sys.argv[3])
    (folder / "run.json").write_text(json.dumps({"schema_version": 4, "status": status, "steps_done": 1, "end": "a rule", "config": config}))
def stop(*_):
    write("interrupted")
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
if end == "wait":
    folder.mkdir(parents=True)
    time.sleep(60)
if end == "error":
    sys.exit("error: no such folder")
write(end)
sys.exit(end == "failed")
"""
"""Ends as a worker would, without training."""


@pytest.fixture
def fake(sweep_file, monkeypatch):
    """Runs whose workers end in a given way."""

    def make(*ends: str) -> list[PlannedRun]:
        runs = plan_sweep(read_sweep(sweep_file(methods=["grpo"], seeds=list(range(len(ends))))))
        of = dict(zip(runs, ends, strict=True))

        def command(run, configs, threads) -> list[str]:
            config = json.dumps(run.config.model_dump(mode="json"))
            return [sys.executable, "-c", WORKER, str(run.run_dir), of[run], config]

        monkeypatch.setattr(sweeps, "_command", command)
        return runs

    return make


def test_a_failed_run_stops_no_other_and_waits_for_retry(fake):
    absent, stopped, good = runs = fake("error", "failed", "finished")
    ended = execute(runs, workers=2, threads=1)
    assert ended == {
        absent: ("failed", "no such folder"),
        stopped: ("failed", "a rule"),
        good: ("finished", ""),
    }
    again = execute([stopped, good], workers=1, threads=1)
    assert again == {stopped: ("failed", "a rule"), good: ("already finished", "")}
    update_run_info(good.run_dir, status="interrupted")
    assert execute([good], workers=1, threads=1) == {good: ("finished", "")}


def test_an_interrupt_ends_the_active_runs_and_starts_no_other(fake):
    first, second, third = runs = fake("wait", "wait", "finished")
    before = signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        while not (first.run_dir.exists() and second.run_dir.exists()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    ended = execute(runs, workers=2, threads=1)
    assert set(ended.values()) == {("interrupted", "")}
    assert first.status == second.status == "interrupted" and third.status == "planned"
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("status", "code", "text", "counted", "reason"),
    [
        (
            None,
            2,
            "view: x\nerror: task.path: none.parquet\nand more",
            "failed",
            "task.path: none.parquet",
        ),
        (None, -9, "", "failed", "exit code -9"),
        ("running", -9, "", "interrupted", "exit code -9"),
        ("interrupted", 130, "view: sharpscope show", "interrupted", None),
        ("failed", 1, "failed: 3 steps\nview: sharpscope show", "failed", "a rule said so"),
    ],
)
def test_how_a_run_is_counted(sweep_file, status, code, text, counted, reason):
    (run,) = plan_sweep(read_sweep(sweep_file(methods=["grpo"])))
    if status:
        run.run_dir.mkdir(parents=True)
        info = {
            "schema_version": SCHEMA_VERSION,
            "status": status,
            "steps_done": 1,
            "end": "a rule said so" if status == "failed" else None,
        }
        (run.run_dir / "run.json").write_text(json.dumps(info))
    found, why = ending(run, True, code, text)
    assert found == counted and (reason in why if reason else not why)


def test_a_run_that_another_process_holds_is_named(sweep_file):
    file = sweep_file(methods=["grpo"])
    (run,) = plan_sweep(read_sweep(file))
    run.run_dir.mkdir(parents=True)
    info = {
        "schema_version": SCHEMA_VERSION,
        "status": "running",
        "steps_done": 1,
        "config": run.config.model_dump(mode="json"),
    }
    (run.run_dir / "run.json").write_text(json.dumps(info))
    with RunLock(run.run_dir):
        done = CliRunner().invoke(app, ["run", str(file)], terminal_width=500)
    assert done.exit_code == 1
    assert "1 run by others" in done.output
    assert f"is being written by process {os.getpid()} on " in done.output


def test_methods_and_seeds_make_a_sweep_that_is_resumed(
    tiny_policy: Path, tmp_path: Path, monkeypatch
):
    """Own weights with a label; repeating the command resumes what was interrupted."""
    monkeypatch.chdir(tmp_path)
    small = {**TOY, "steps": 1, "evaluation.every": 0, "probes.preset": "off"}
    sets = [part for path, value in small.items() for part in ("--set", f"{path}={value}")]
    methods = ["--methods", "own=tests.toy_task:by_probability", "--seeds", "0"]
    command = ["run", "--model", str(tiny_policy), *methods, "--out", "pair", *sets]
    listed = CliRunner().invoke(app, [*command, "--dry-run"], env={"COLUMNS": "200"})
    assert "1 runs, 1 to do" in listed.stdout, listed.output
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and "1 finished" in done.stdout, done.output
    run = sharpscope.load_run("pair/own-s0")
    assert run.info["method"] == "own" and run.tokens()["weight"].between(0.5, 1.5).all()
    assert run.tokens()["weight"].nunique() > 1
    update_run_info(Path("pair/own-s0"), status="interrupted")
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0 and "1 finished" in again.stdout
    assert "1 already finished" in CliRunner().invoke(app, command).stdout

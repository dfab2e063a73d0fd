"""Sweeps on Ray: the runs are those of a sweep without it, and a run whose process is killed goes on from its checkpoint."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

import sharpscope.training
from sharpscope import ray_sweeps
from sharpscope.cli import app
from sharpscope.config import RunConfig, build_config
from sharpscope.errors import UserError
from sharpscope.ray_sweeps import RETRIES, execute_on_ray, options, train_here
from sharpscope.sweeps import PlannedRun, execute, plan_sweep, read_sweep
from sharpscope.traces import Run, held_text, load_run, timing_columns
from tests.conftest import TOY


def planned(policy: Path, out: Path, seeds: tuple[int, ...], **changes: Any) -> list[PlannedRun]:
    values = TOY | {"policy.model": str(policy), "evaluation.every": 0} | changes
    spec = {"out": str(out), "methods": ["grpo"], "seeds": seeds, "settings": [values]}
    return plan_sweep(read_sweep(spec))


def test_without_ray_and_without_a_sweep_it_says_what_to_do(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'sharpscope\[ray\]'"):
        execute_on_ray(planned(tiny_policy, tmp_path, (0,)), address="auto", threads=1, tell=print)
    for arguments, says in (
        (["--ray", "auto"], "--ray: go with a sweep"),
        (["--ray", "auto", "--seeds", "0,1", "--workers", "2"], "a Ray cluster has its own"),
    ):
        done = CliRunner().invoke(app, ["run", *arguments], terminal_width=200)
        assert isinstance(done.exception, UserError) and says in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_an_address_without_a_cluster_is_told_before_ray_waits(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Ray itself waits for over a minute there, and ends the process."""

    def init(**options: object) -> None:
        raise SystemExit(15)

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}", "127.0.0.1:port"):
        with pytest.raises(UserError, match=r"no cluster answers .*start one with `ray start"):
            execute_on_ray(
                planned(tiny_policy, tmp_path, (0,)), address=address, threads=1, tell=print
            )


def test_a_run_that_a_dead_process_seems_to_hold_is_looked_at_again(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    statuses = ["running", "running", "interrupted"]
    monkeypatch.setattr(PlannedRun, "status", property(lambda run: statuses[0]))
    monkeypatch.setattr(ray_sweeps.time, "sleep", lambda seconds: statuses.pop(0))
    resumed = []

    def train(config: RunConfig, resume: bool) -> SimpleNamespace:
        resumed.append(resume)
        return SimpleNamespace(status="finished")

    monkeypatch.setattr(sharpscope.training, "train", train)
    monkeypatch.chdir(tmp_path)  # as the task does, and undone
    (run,) = planned(tiny_policy, tmp_path, (0,))
    assert train_here(run.config.model_dump(mode="json"), str(tmp_path)) == (0, "")
    assert resumed == [True]


def test_a_task_takes_a_gpu_only_where_there_is_one():
    config, on_cpu = build_config(None), build_config(None, ["policy.device=cpu"])
    expected = {"num_cpus": 3, "max_retries": RETRIES}
    assert options(config, 3, {"CPU": 8, "GPU": 2}) == expected | {"num_gpus": 1}
    assert options(config, 3, {"CPU": 8}) == expected | {"num_gpus": 0}
    assert options(on_cpu, 3, {"CPU": 8, "GPU": 2}) == expected | {"num_gpus": 0}


def test_a_task_says_which_folder_its_node_lacks(tiny_policy: Path, tmp_path: Path):
    (run,) = planned(tiny_policy, tmp_path, (0,))
    code, text = train_here(run.config.model_dump(mode="json"), str(tmp_path / "absent"))
    assert code == 1 and f"has no folder {tmp_path / 'absent'}" in text


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of two nodes of one CPU, on loopback; 127.0.0.1 would be replaced by the machine's address."""
    pytest.importorskip("ray", reason="Ray is not installed (extra ray)")
    from ray.cluster_utils import Cluster

    # Ray gives its workers a niceness of 15, with which they wait long on a busy machine
    os.environ |= {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    node = {"num_cpus": 1, "object_store_memory": 80_000_000, "node_ip_address": "127.0.0.2"}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    cluster.add_node(**node)
    cluster.wait_for_nodes()
    yield cluster.address
    cluster.shutdown()


def numbers(run: Run) -> list[pd.DataFrame]:
    return [
        run.frame(table).drop(columns=timing_columns(table))
        for table in ("steps", "updates", "tokens")
    ]


def equal(runs: list[PlannedRun], others: list[PlannedRun]) -> None:
    """Assert that two sweeps have recorded the same numbers."""
    for run, other in zip(runs, others, strict=True):
        tables = zip(numbers(load_run(run.run_dir)), numbers(load_run(other.run_dir)), strict=True)
        for one, two in tables:
            assert len(one)
            pd.testing.assert_frame_equal(one, two, check_exact=True)


@pytest.mark.slow
def test_runs_on_two_nodes_are_those_of_a_sweep_here(
    address: str, tiny_policy: Path, tmp_path: Path
):
    here, there = (planned(tiny_policy, tmp_path / name, (0, 1, 2), steps=2) for name in ("a", "b"))
    said: list[str] = []
    found = execute_on_ray(there, address=address, threads=1, tell=said.append)
    assert set(found.values()) == {("finished", "")} and len(said) == 3
    again = execute_on_ray(there, address=address, threads=1, tell=print)
    assert set(again.values()) == {("already finished", "")}
    execute(here, workers=1, threads=1)
    equal(here, there)
    with pytest.raises(UserError, match="a run has 2 threads, and the largest node 1 CPUs"):
        execute_on_ray(there, address=address, threads=2, tell=print)


def writer(run: PlannedRun) -> int:
    """The process that writes a run, when it has saved a checkpoint."""
    while not list(run.run_dir.glob("checkpoints/step-*")):
        time.sleep(0.05)
    found = re.search(r"process (\d+)", held_text(run.run_dir))
    assert found is not None
    return int(found[1])


@pytest.mark.slow
def test_a_run_whose_worker_is_killed_goes_on(address: str, tiny_policy: Path, tmp_path: Path):
    changes = {"steps": 12, "checkpoint.every": 2}
    here, there = (planned(tiny_policy, tmp_path / name, (0,), **changes) for name in ("a", "b"))
    killed: list[int] = []

    def kill() -> None:
        killed.append(writer(there[0]))
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    found = execute_on_ray(there, address=address, threads=1, tell=print)
    killer.join()
    assert found[there[0]] == ("finished", "") and killed[0] != os.getpid()
    execute(here, workers=1, threads=1)
    equal(here, there)


@pytest.mark.slow
def test_an_interrupt_leaves_runs_that_the_next_call_resumes(
    address: str, tiny_policy: Path, tmp_path: Path
):
    runs = planned(tiny_policy, tmp_path / "a", (0, 1, 2), steps=12)

    def interrupt() -> None:
        while not runs[0].run_dir.joinpath("run.json").exists():
            time.sleep(0.05)
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    found = execute_on_ray(runs, address=address, threads=1, tell=print)
    assert found[runs[2]] == ("interrupted", "") and runs[2].status == "planned"
    assert runs[0].status in ("interrupted", "finished")
    ended = execute_on_ray(runs, address=address, threads=1, tell=print)
    assert {how for how, _ in ended.values()} <= {"finished", "already finished"}

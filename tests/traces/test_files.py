"""Crashes, full disks, flipped bytes, two writers: what was flushed is read, damage is named and never merged."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sharpscope.errors import UserError
from sharpscope.traces import (
    RunLock,
    TraceWriter,
    create_run_dir,
    load_run,
    run_path,
    update_run_info,
)
from sharpscope.traces import files as files_module
from tests.traces.rows import new_run, rows, two_parts

ROOT = Path(__file__).parents[2]


def test_a_full_disk_loses_nothing_that_was_flushed_and_the_rest_can_be_flushed_later(tmp_path, monkeypatch):
    run, _ = two_parts(tmp_path / "a")
    writer = TraceWriter(run)
    writer.append("tokens", rows("tokens", 3, 20))
    writer.append("steps", rows("steps", 3, 1))

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            writer.flush()
        with pytest.raises(OSError, match="No space left"):
            update_run_info(run, steps_done=7)
    assert set(load_run(run).tokens()["step"]) == {1, 2} and len(load_run(run).steps) == 0
    assert load_run(run).info["steps_done"] == 0
    assert not [p for p in run.rglob("*") if p.name.endswith(".tmp")]
    assert [p.parent.name for p in writer.flush()] == ["tokens", "steps"]
    assert set(load_run(run).tokens()["step"]) == {1, 2, 3} and not load_run(run).verify()


def test_data_is_on_the_disk_before_its_name_is(tmp_path, monkeypatch):
    run = new_run(tmp_path / "a")
    writer = TraceWriter(run)
    writer.append("steps", rows("steps", 1, 1))
    calls = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (calls.append(("fsync", Path(f"/proc/self/fd/{fd}").readlink().name)), fsync(fd))
    )
    monkeypatch.setattr(Path, "replace", lambda self, to: (calls.append(("rename", to.name)), replace(self, to)))
    (part,) = writer.flush()
    assert calls == [("fsync", ".part-000000.tmp"), ("rename", part.name), ("fsync", "steps")]


KILLED = """
import sys, time
from sharpscope.traces import TraceWriter, RunLock
from tests.traces.rows import rows
with RunLock(sys.argv[1]):
    writer = TraceWriter(sys.argv[1])
    for step in range(1, 10000):
        writer.append("tokens", rows("tokens", step, 2000))
        writer.append("steps", rows("steps", step, 1))
        writer.flush()
        print(step, flush=True)
"""


def _start(code, *arguments):
    return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_writer_killed_at_any_instant_leaves_whole_parts_and_a_stale_lock(tmp_path):
    run = new_run(tmp_path / "a")
    process = _start(KILLED, str(run))
    chooser = random.Random(1)
    try:
        for _ in range(3):
            process.stdout.readline()
        reading = load_run(run)  # while it is being written
        assert reading.status == "running" and len(reading.steps) >= 3
        time.sleep(chooser.uniform(0, 0.1))
    finally:
        process.kill()
        told = [int(line) for line in process.stdout.read().split()]
        process.wait()
    loaded = load_run(run)
    assert loaded.status == "died" and not loaded.verify()
    steps = loaded.steps["step"].tolist()
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= max(told, default=3)
    counts = loaded.tokens(columns=["step"])["step"].value_counts()
    assert (counts == 2000).all() and set(steps) <= set(counts.index)
    with RunLock(run) as lock:
        assert lock.stale is not None and lock.stale.pid == process.pid
        TraceWriter(run)
    assert not list(run.rglob("*.tmp"))


def test_a_run_folder_is_never_overwritten(tmp_path):
    create_run_dir(tmp_path / "a")
    (tmp_path / "a" / "config.yaml").touch()
    create_run_dir(tmp_path / "a")  # a run killed before its run.json left nothing that could be lost
    (tmp_path / "a" / "notes.txt").touch()
    with pytest.raises(UserError, match="is not empty"):
        create_run_dir(tmp_path / "a")
    new_run(tmp_path / "b")
    with pytest.raises(UserError, match="contains a run and is not overwritten"):
        create_run_dir(tmp_path / "b")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        create_run_dir(tmp_path / "file")
    with pytest.raises(UserError, match="cannot be written"):
        create_run_dir(tmp_path / "file" / "below")
    (tmp_path / "free").mkdir()
    assert create_run_dir(tmp_path / "free") == tmp_path / "free"


@pytest.mark.parametrize("name", ["config.yaml", "tokenizer/vocab.json", "draft.tmp", "traces/note"])
def test_a_folder_of_ones_own_is_no_start_that_was_killed(tmp_path, name):
    path = tmp_path / "mine" / name
    path.parent.mkdir(parents=True)
    path.write_text("# my own")
    with pytest.raises(UserError, match="is not empty"):
        create_run_dir(tmp_path / "mine")
    assert [p for p in (tmp_path / "mine").rglob("*") if p.is_file()] == [path] and path.read_text() == "# my own"


def test_the_mark_of_a_start_goes_when_the_run_is_there(tmp_path):
    run = new_run(tmp_path / "a")
    assert sorted(p.name for p in run.iterdir()) == ["run.json", "traces"]


def test_a_run_path_cannot_leave_its_folder(tmp_path):
    with pytest.raises(UserError, match="not a valid run name"):
        run_path(tmp_path, "../a")
    assert run_path(tmp_path, "grpo-sg_lr=1e-4.seed3") == tmp_path / "grpo-sg_lr=1e-4.seed3"


def test_run_json_is_old_or_new_when_the_write_fails(tmp_path, monkeypatch):
    run = new_run(tmp_path / "a")

    def fail(aside, final):
        raise KeyboardInterrupt

    monkeypatch.setattr(files_module, "publish", fail)
    with pytest.raises(KeyboardInterrupt):
        update_run_info(run, status="finished")
    assert load_run(run).info["status"] == "running" and not list(run.glob(".*.tmp"))

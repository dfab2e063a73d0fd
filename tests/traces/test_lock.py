"""A run folder has one writer."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from sharpscope.errors import UserError
from sharpscope.traces import (
    RunLock,
    load_run,
    lock_owner,
)
from tests.traces.rows import new_run

ROOT = Path(__file__).parents[2]


HELD = """
import sys
from sharpscope.traces import RunLock
with RunLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_second_writer_hears_who_the_first_is(tmp_path):
    run = new_run(tmp_path / "a")
    process = subprocess.Popen(
        [sys.executable, "-c", HELD, str(run)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=rf"being written by process {process.pid} on "):
            RunLock(run).acquire()
    finally:
        process.communicate("")
    assert lock_owner(run) is None
    with RunLock(run) as lock:
        assert lock.stale is None and lock_owner(run).alive
        with pytest.raises(UserError, match="being written"):
            RunLock(run).acquire()


def test_an_owner_on_another_machine_counts_as_alive(tmp_path):
    run = new_run(tmp_path / "a")
    owner = {"pid": 1, "host": "elsewhere", "since": "2026-01-01T00:00:00+00:00", "born": 0.0}
    (run / "lock.json").write_text(json.dumps(owner))
    with pytest.raises(UserError, match=r"process 1 on elsewhere since .*or remove .*lock\.json"):
        RunLock(run).acquire()
    assert lock_owner(run).alive is None


def test_a_reused_process_number_does_not_hold_the_lock(tmp_path):
    run = new_run(tmp_path / "a")
    owner = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": "x",
        "born": psutil.Process().create_time() - 100,
    }
    (run / "lock.json").write_text(json.dumps(owner))
    assert load_run(run).status == "died"
    with RunLock(run) as lock:
        assert lock.stale.pid == os.getpid()


def test_who_holds_a_lock_is_named_though_the_name_comes_a_moment_later(tmp_path):
    """Between taking the lock and writing who holds it there is a moment; whoever asks then asks again."""
    handle = os.open(tmp_path / "lock.json", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    me = psutil.Process()
    owner = {
        "pid": me.pid,
        "host": socket.gethostname(),
        "since": "2026-01-01T00:00:00+00:00",
        "born": me.create_time(),
    }
    later = threading.Timer(0.2, lambda: os.pwrite(handle, json.dumps(owner).encode(), 0))
    later.start()
    try:
        with pytest.raises(UserError, match=f"being written by process {me.pid} on "):
            RunLock(tmp_path).acquire()
    finally:
        later.join()
        os.close(handle)

"""Scalars arrive in each logger, and nothing is sent anywhere."""

from __future__ import annotations

import json
import socket
import sqlite3

import pytest

from sharpscope.errors import UserError
from sharpscope.integrations.loggers import export
from tests.integrations.loggers.test_export import expected
from tests.oracles.wandb_file import history


def test_tensorboard(run_dir, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sent = export([run_dir], "tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "one"), size_guidance={"scalars": 0})
    events.Reload()
    for name, values in expected(run_dir).items():
        got = {event.step: event.value for event in events.Scalars(name)}
        assert got == pytest.approx(values, rel=1e-6), name
    assert sent == {"one": sum(len(events.Scalars(tag)) for tag in events.Tags()["scalars"])}


def test_wandb_is_offline_whatever_the_environment_says(run_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # whoever listens there would be asked
    export([run_dir], "wandb", tmp_path, project="p")
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows = {row["_step"]: row for row in history(file)}
    for name, values in expected(run_dir).items():
        assert {step: rows[step][name] for step in values} == pytest.approx(values), name


def test_trackio_writes_its_database_into_the_folder(run_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:9/?write_token=x")  # not ours to follow
    monkeypatch.setenv("TRACKIO_SPACE_ID", "somebody/space")
    export([run_dir], "trackio", tmp_path, project="mine")
    (file,) = tmp_path.glob("mine*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
    assert {name for name, _, _ in rows} == {"one"}
    found: dict[int, dict[str, float]] = {}
    for _, step, metrics in rows:
        found.setdefault(step, {}).update(json.loads(metrics))
    for name, values in expected(run_dir).items():
        assert {step: found[step][name] for step in values} == pytest.approx(values), name


def test_a_logger_that_fails_says_why(run_dir, tmp_path):
    (tmp_path / "mine.db").mkdir()
    with pytest.raises(UserError, match="--to trackio: failed"):
        export([run_dir], "trackio", tmp_path, project="mine")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        export([run_dir], "wandb", tmp_path / "file")


def test_no_connection_is_made(run_dir, tmp_path, monkeypatch):
    """In this process: no address but this machine's is connected to."""
    real = socket.socket.connect

    def only_here(self, address):
        if isinstance(address, tuple):
            assert address[0] in ("127.0.0.1", "::1", "localhost"), address
        return real(self, address)

    monkeypatch.setattr(socket.socket, "connect", only_here)
    export([run_dir], "tensorboard", tmp_path)
    export([run_dir], "wandb", tmp_path)

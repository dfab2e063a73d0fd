"""What the loggers hold, read back from their files, is what the trace holds; nothing leaves the machine."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sharpscope.errors import UserError
from sharpscope.integrations import trackio
from sharpscope.integrations.loggers import export, scalars
from sharpscope.traces import RunLock, TraceWriter, load_run, update_run_info
from tests.loops import some
from tests.traces.synthetic import Shape, write_run

HEADER, BLOCK = 7, 32768
"""Of a LevelDB log, which an offline file of Weights & Biases is; its records are protobufs."""


def history(path: Path) -> list[dict[str, Any]]:
    """The logged rows, one a step, with `_step`."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            values = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            rows.append(values | {"_step": record.history.step.num})
    return rows


def _records(data: bytes) -> list[bytes]:
    """Records of one or several pieces: checksum (4 bytes), length (2), type (1 whole, 2 first, 3 middle, 4 last)."""
    found, place, whole = [], HEADER, b""
    while place + 7 <= len(data):
        left = BLOCK - place % BLOCK
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            found.append(whole)
            whole = b""
    return found


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_run(tmp_path_factory.mktemp("logged") / "one", shape=Shape(steps=5)))


def expected(run_dir: Path) -> dict[str, dict[int, float]]:
    """name -> step -> value, straight from the tables."""
    run, found = load_run(run_dir), {}
    for column in ("reward_mean", "grad_norm", "tokens", "generation_s"):
        found[f"steps/{column}"] = dict(
            zip(run.steps["step"], run.steps[column].astype(float), strict=True)
        )
    for row in run.updates.itertuples():
        found.setdefault(f"updates/{row.update}/ratio_max", {})[row.step] = row.ratio_max
    for row in run.eval.itertuples():
        name = f"eval/{row.split}/{row.level}/T{row.temperature:g}@{row.k}/accuracy"
        found.setdefault(name, {})[row.step] = row.accuracy
    for row in run.probes[run.probes["quantity"] == "largest"].itertuples():
        name = f"probes/{row.probe}/{row.probe_set}/{row.functional}/{row.parameters}/largest"
        found.setdefault(name, {})[row.step] = row.value
    return found


def test_scalars_are_the_tables(run_dir):
    found = scalars(load_run(run_dir))
    assert list(found) == sorted(found)
    for name, values in some(expected(run_dir).items()):
        assert {step: found[step][name] for step in values} == pytest.approx(values), name
    names = {name for values in found.values() for name in values}
    assert not any("/density" in name or name.endswith("/step") for name in names)
    assert all(np.isfinite(value) for values in found.values() for value in values.values())
    assert any("/rho0.05" in name for name in names) and any(
        name.endswith("/std_error") for name in names
    )


def test_following_a_run_gives_each_number_once(tmp_path):
    """Steps that appear while we read; the export ends when the run has."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    growing = tmp_path / "runs" / "growing"
    write_run(growing, shape=Shape(steps=1, eval_every=1, probe_every=1))
    update_run_info(growing, status="running")
    first = load_run(growing).arrow("steps").to_pylist()[0]

    def train() -> None:
        try:
            with TraceWriter(growing) as writer:
                for step in (2, 3, 4):
                    time.sleep(0.2)
                    writer.append("steps", first | {"step": step, "reward_mean": float(step)})
                    writer.flush()
        finally:
            update_run_info(growing, status="finished")

    with RunLock(growing):  # whose lock is held is running
        thread = threading.Thread(target=train)
        thread.start()
        export([growing], "tensorboard", tmp_path / "logs", follow=True, interval_s=0.05)
        thread.join()
    events = EventAccumulator(str(tmp_path / "logs" / "growing"), size_guidance={"scalars": 0})
    events.Reload()
    got = [(event.step, event.value) for event in events.Scalars("steps/reward_mean")]
    assert [step for step, _ in got] == [1, 2, 3, 4] and [value for _, value in got[1:]] == [
        2,
        3,
        4,
    ]


def test_mistakes(run_dir, tmp_path, monkeypatch):
    for to, online, message in (
        ("tensorbord", False, "did you mean 'tensorboard'"),
        ("tensorboard", True, "not supported"),
    ):
        with pytest.raises(UserError, match=message):
            export([run_dir], to, tmp_path, online=online)
    with pytest.raises(UserError, match="have one name"):
        export([run_dir, run_dir], "tensorboard", tmp_path / "twice")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'sharpscope\[wandb\]'"):
        export([run_dir], "wandb", tmp_path)


def test_tensorboard(run_dir, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sent = export([run_dir], "tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "one"), size_guidance={"scalars": 0})
    events.Reload()
    for name, values in some(expected(run_dir).items()):
        got = {event.step: event.value for event in events.Scalars(name)}
        assert got == pytest.approx(values, rel=1e-6), name
    assert sent == {"one": sum(len(events.Scalars(tag)) for tag in events.Tags()["scalars"])}


def test_wandb_is_offline_whatever_the_environment_says(run_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    # whoever listens there would be asked
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    export([run_dir], "wandb", tmp_path, project="p")
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows = {row["_step"]: row for row in history(file)}
    for name, values in some(expected(run_dir).items()):
        assert {step: rows[step][name] for step in values} == pytest.approx(values), name


@pytest.fixture
def trackio_here(tmp_path, monkeypatch):
    """A folder that Trackio writes to, although it reads its folder once, at import."""
    import trackio

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("trackio") and hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path)
    return trackio


def test_trackio_gets_curves_findings_tokens_and_the_page(tmp_path, trackio_here):
    other = Path(write_run(tmp_path / "runs" / "one", shape=Shape(steps=3)))
    paths = [other, Path(__file__).resolve().parents[2] / "data" / "example" / "sums"]
    sent = export(paths, "trackio", tmp_path, project="p")
    store = trackio_here.SQLiteStorage
    assert sorted(store.get_runs("p")) == ["one", "sums"]
    for path in paths:
        run = load_run(path)
        got = {
            (row["step"], name): row[name]
            for row in store.get_logs("p", path.name)
            for name in row
            if isinstance(row[name], float)
        }
        held = {
            (step, key): value for step, row in scalars(run).items() for key, value in row.items()
        }
        assert len(held) == sent[path.name] > 0
        assert {place: got[place] for place in held} == pytest.approx(held)
        told = {alert["title"] for alert in store.get_alerts("p", path.name)}
        assert told == {title for title, _, _ in trackio.alerts(run)} >= set(run.events["rule"])
        assert (tmp_path / f"{path.name}-report" / "report.html").stat().st_size > 10_000
    run = load_run(paths[1])
    traces = store.get_traces("p", run="sums", sort="step_asc")
    columns = ["attribution", "effect_kl"]
    measured = [s for s in run.token_steps if run.tokens(s)[columns].notna().any(axis=None)]
    assert [trace["step"] for trace in traces] == measured != []
    for trace in traces:
        (score, leading) = (trace["metadata"][k] for k in ("score", "leading_tokens"))
        tokens = run.tokens(trace["step"])
        # the first step has shares alone: AdamW's is the gradient's sign
        assert score == ("attribution" if trace["step"] == 1 else "effect_kl")
        assert abs(leading[0][score]) == pytest.approx(tokens[score].abs().max())


def test_trackio_sends_nothing_away(run_dir, tmp_path, trackio_here, monkeypatch):
    with pytest.raises(UserError, match="TRACKIO_DIR is"):
        export([run_dir], "trackio", tmp_path / "other")
    for variable in trackio.ELSEWHERE:
        with monkeypatch.context() as environment:
            environment.setenv(variable, "someone/space")
            with pytest.raises(UserError, match=variable):
                export([run_dir], "trackio", tmp_path)

"""Tables: what goes in comes out by value, column and step; what does not fit is refused; older schemas, broken files."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sharpscope.errors import UserError
from sharpscope.traces import (
    SCHEMA_VERSION,
    TABLES,
    SchemaError,
    TraceWriter,
    load_run,
    load_runs,
    rewind,
    update_run_info,
)
from sharpscope.traces.parts import write_part
from sharpscope.traces.schema import VERSION_KEY
from tests.traces.rows import damage_part, new_run, rows, token_rows


@pytest.mark.parametrize("table", TABLES)
def test_every_table_comes_back_value_by_value(tmp_path, table):
    run = new_run(tmp_path / "a")
    with TraceWriter(run) as writer:
        for step in (1, 2):
            writer.append(table, rows(table, step))
    frame = load_run(run).arrow(table).to_pandas()
    assert list(frame) == TABLES[table].names
    for step in (1, 2):
        part = frame[frame.step == step]
        for name, given in rows(table, step).items():
            if TABLES[table][name].type == "json":
                assert [json.loads(text) for text in part[name]] == given
            elif name != "step":
                assert part[name].tolist() == list(given), name


def test_null_is_not_recorded_and_nan_is_recorded(tmp_path):
    run = new_run(tmp_path / "a")
    masked = np.ma.MaskedArray([1.0, 2.0, 3.0, 4.0], mask=[True, False, False, False])
    values = {"entropy": None, "ratio": masked, "weight": [None, np.nan, 1.0, 2.0], "update": [None, 1, 1, 2]}
    with TraceWriter(run) as writer:
        writer.append("tokens", token_rows(**values))
    (path,) = (run / "traces" / "tokens").glob("part-*.parquet")
    table = pq.read_table(path)
    assert table["entropy"].null_count == 4
    assert table["ratio"].to_pylist() == [None, 2.0, 3.0, 4.0]
    assert table["weight"].null_count == 1 and np.isnan(table["weight"][1].as_py())
    assert table["update"].to_pylist() == [None, 1, 1, 2]


@pytest.mark.parametrize(
    ("table", "changes", "words"),
    [
        ("tokens", {"entropie": [0.0] * 4}, "tokens.entropie is not a column; did you mean 'entropy'?"),
        ("tokens", {"logp": [0.0] * 3}, "differ in length"),
        ("tokens", {"logp": [0.0, None, 0.0, 0.0]}, "tokens.logp may not be null"),
        ("tokens", {"token_id": [0.5] * 4}, "tokens.token_id is int32, got float64"),
        ("tokens", {"token_id": [2**40] * 4}, "tokens.token_id is int32, got values from 1099511627776"),
        ("tokens", {"logp": np.zeros((4, 1))}, "tokens.logp has shape"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_name(tmp_path, table, changes, words):
    run = new_run(tmp_path / "a")
    writer = TraceWriter(run)
    with pytest.raises(SchemaError) as error:
        writer.append(table, rows(table, 1) | changes)
    assert words in str(error.value)
    assert writer.flush() == []


def test_text_without_utf8_and_parts_that_are_not_finite_survive(tmp_path):
    run = new_run(tmp_path / "a")
    changes = {"completion": ["\ud800x", "[bold]", "\x1b[31m", "ok"], "reward_parts": [{"a": float("nan")}] * 4}
    with TraceWriter(run) as writer:
        writer.append("rollouts", rows("rollouts", 1) | changes)
    frame = load_run(run).rollouts
    assert frame["completion"].tolist() == ["?x", "[bold]", "\x1b[31m", "ok"]
    assert json.loads(frame["reward_parts"][0]) == {"a": None}


def test_a_token_row_costs_at_most_64_bytes(tmp_path):
    run = new_run(tmp_path / "a")
    count = 8000
    columns = token_rows(
        1, count, advantage=np.repeat(np.arange(count // 40) / 7, 40), position=np.tile(np.arange(40), count // 40)
    )
    probes = {c.name for c in TABLES["tokens"].columns if c.probe} - {"score_norm_local"}
    with TraceWriter(run) as writer:
        writer.append("tokens", {name: value for name, value in columns.items() if name not in probes})
    (path,) = (run / "traces/tokens").iterdir()
    assert path.stat().st_size / count <= 64


def test_steps_and_columns_are_chosen_without_reading_others(tmp_path):
    run = new_run(tmp_path / "a")
    with TraceWriter(run) as writer:
        for step in (1, 2):
            writer.append("tokens", token_rows(step))
        writer.flush()
        for step in (3, 4):
            writer.append("tokens", token_rows(step))
    for part in (run / "traces" / "tokens").iterdir():
        damage_part(part, "logp")  # of its last step
        damage_part(part, "entropy", group=0)
    loaded = load_run(run)
    assert loaded.token_steps == [1, 2, 3, 4] and loaded.rows("tokens") == 16
    frame = loaded.tokens(steps=[1], columns=["logp", "weight"])
    np.testing.assert_array_equal(frame["logp"], token_rows(1)["logp"])
    assert list(frame) == ["logp", "weight"] and not loaded.damaged
    assert [len(part) for part in loaded.iter_tokens(columns=["ratio"])] == [8, 8]
    assert len(loaded.tokens(steps=7)) == 0
    with pytest.raises(UserError, match="did you mean 'logp'"):
        loaded.tokens(columns=["lgp"])


def test_steps_without_a_required_column_are_not_read(tmp_path):
    run = new_run(tmp_path / "a")
    half = np.ma.masked_array(np.ones(4), mask=[True, True, False, False])
    with TraceWriter(run) as writer:
        for step, values in enumerate([None, half, np.full(4, np.nan)], 1):
            writer.append("tokens", token_rows(step, attribution=values))
    (part,) = (run / "traces" / "tokens").iterdir()
    damage_part(part, "logp", group=0)
    (frame,) = load_run(run).iter_tokens(columns=["step", "attribution", "logp"], required=["attribution"])
    assert frame["step"].tolist() == [2] * 4 + [3] * 4
    assert len(load_run(run).tokens(columns=["attribution"])) == 12


def test_a_run_that_is_rewound_while_it_is_read_keeps_its_rows(tmp_path):
    run = new_run(tmp_path / "a")
    with TraceWriter(run) as writer:
        for step in (1, 2, 3, 4):
            writer.append("tokens", token_rows(step))
            if step != 2:
                writer.flush()  # parts of steps 1, 2 and 3, 4
    live = load_run(run)
    frames = live.iter_tokens()
    seen = next(frames)["step"].tolist()
    rewind(run, 2)  # the part of steps 2 and 3 is written anew, that of step 4 goes
    assert seen + [step for frame in frames for step in frame["step"]] == [1] * 4 + [2] * 4
    assert live.tokens()["step"].tolist() == [1] * 4 + [2] * 4 and not live.damaged


def test_runs_are_found_below_a_folder_and_joined(tmp_path):
    for name, method, seed in (("a", "grpo", 0), ("sweep/b", "grpo-sg", 1)):
        run = new_run(tmp_path / name, method=method, seed=seed)
        with TraceWriter(run) as writer:
            writer.append("steps", rows("steps", 1, 1))
            writer.append("tokens", token_rows(1))
    new_run(tmp_path / "empty", seed=2)
    runs = load_runs(tmp_path)
    assert list(runs.by_name) == ["a", "empty", "sweep/b"] and runs[2].method == "grpo-sg" and runs["a"].seed == 0
    assert list(runs.steps)[:4] == ["run", "method", "seed", "step"]
    assert runs.steps[["run", "method", "seed"]].values.tolist() == [["a", "grpo", 0], ["sweep/b", "grpo-sg", 1]]
    assert len(runs.tokens(columns=["logp"])) == 8
    assert runs.table["status"].tolist() == ["died"] * 3
    assert list(load_runs([tmp_path / "a"]).by_name) == ["a"]
    assert list(load_runs(tmp_path / "a").by_name) == ["a"]


def test_a_column_that_an_older_schema_lacks_is_null(tmp_path):
    run = new_run(tmp_path / "a")
    old = pa.Table.from_pydict(
        {"step": [1, 1, 2], "index": [0, 1, 0], "logp": [-1.0, -2.0, -3.0]},
        pa.schema([("step", pa.int32()), ("index", pa.int32()), ("logp", pa.float32())], {VERSION_KEY: b"2"}),
    )
    (run / "traces" / "tokens").mkdir(parents=True, exist_ok=True)
    write_part(old, run / "traces" / "tokens" / "part-000001-0a1b2c3d.parquet")
    update_run_info(run, schema_version=2)
    with TraceWriter(run) as writer:  # a run that version 2 began and this version resumed
        writer.append("tokens", token_rows(step=3))
    read = load_run(run)
    assert read.tokens(columns=["logp"])["logp"].tolist()[:3] == [-1.0, -2.0, -3.0]
    mixed = read.tokens(columns=["entropy", "logp"], steps=[2, 3])
    assert mixed["entropy"].isna().tolist() == [True] + [False] * 4 and mixed["logp"].iloc[0] == -3.0
    assert [len(part) for part in read.iter_tokens(columns=["logp"], required=["entropy"])] == [4]
    assert read.damaged == {} and read.uses.empty


def test_other_schema_versions_and_broken_run_files_are_left_out_with_a_word(tmp_path):
    new_run(tmp_path / "good")
    update_run_info(new_run(tmp_path / "old"), schema_version=SCHEMA_VERSION + 1)
    (new_run(tmp_path / "broken") / "run.json").write_text('{"a": ')
    with pytest.warns(UserWarning, match="left out"):
        runs = load_runs(tmp_path)
    assert list(runs.by_name) == ["good"]
    assert f"schema version {SCHEMA_VERSION + 1}" in runs.skipped["old"] and "damaged" in runs.skipped["broken"]
    with pytest.raises(UserError, match="schema version"):
        load_run(tmp_path / "old")
    with pytest.raises(UserError, match=r"has no run\.json"):
        load_run(tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        load_runs(tmp_path / "nowhere")

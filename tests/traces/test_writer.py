"""What goes in comes out: by value, by column, by step; and what does not fit is refused with its name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sharpscope.errors import UserError
from sharpscope.traces import (
    SCHEMA_VERSION,
    TABLES,
    DamagedPartWarning,
    SchemaError,
    TraceWriter,
    create_run_info,
    load_run,
    load_runs,
    reader,
    rewind,
    schema_markdown,
    timing_columns,
    update_run_info,
)
from sharpscope.traces.schema import VERSION_KEY
from sharpscope.traces.writer import write_part
from tests.traces.rows import INFO, new_run, rows


def _tokens(step=1, count=4, **changes):
    return rows("tokens", step, count) | changes


@pytest.mark.parametrize("table", TABLES)
def test_every_table_comes_back_value_by_value(tmp_path, table):
    run = new_run(tmp_path / "a")
    with TraceWriter(run) as writer:
        for step in (1, 2):
            writer.append(table, rows(table, step))
    frame = load_run(run)._frame(table)
    assert list(frame) == TABLES[table].names
    for step in (1, 2):
        part = frame[frame.step == step]
        for name, given in rows(table, step).items():
            if TABLES[table][name].type == "json":
                assert [json.loads(text) for text in part[name]] == given
            elif name != "step":
                assert part[name].tolist() == list(given), name


def test_metadata_of_every_field_holds_unit_and_definition(tmp_path):
    run = new_run(tmp_path / "a")
    with TraceWriter(run) as writer:
        for table in TABLES:
            writer.append(table, rows(table, 1))
    for table in TABLES.values():
        (path,) = (run / "traces" / table.name).glob("part-*.parquet")
        schema = pq.read_schema(path)
        assert schema.metadata[b"sharpscope.schema_version"] == str(SCHEMA_VERSION).encode()
        for column in table.columns:
            metadata = schema.field(column.name).metadata
            assert metadata == {b"unit": column.unit.encode(), b"definition": column.definition.encode()}
            assert schema.field(column.name).nullable == column.nullable


def test_null_is_not_recorded_and_nan_is_recorded(tmp_path):
    run = new_run(tmp_path / "a")
    masked = np.ma.MaskedArray([1.0, 2.0, 3.0, 4.0], mask=[True, False, False, False])
    with TraceWriter(run) as writer:
        writer.append(
            "tokens", _tokens(entropy=None, ratio=masked, weight=[None, np.nan, 1.0, 2.0], update=[None, 1, 1, 2])
        )
    (path,) = (run / "traces" / "tokens").glob("part-*.parquet")
    table = pq.read_table(path)
    assert table["entropy"].null_count == 4
    assert table["ratio"].to_pylist() == [None, 2.0, 3.0, 4.0]
    assert table["weight"].null_count == 1 and np.isnan(table["weight"][1].as_py())
    assert table["update"].to_pylist() == [None, 1, 1, 2]


def test_probe_columns_may_be_left_out_and_are_there_as_nulls(tmp_path):
    run = new_run(tmp_path / "a")
    kept = {c.name for c in TABLES["tokens"].columns if not c.probe}
    with TraceWriter(run) as writer:
        writer.append("tokens", {name: value for name, value in _tokens().items() if name in kept})
    frame = load_run(run).tokens()
    assert list(frame) == TABLES["tokens"].names
    assert frame[[c.name for c in TABLES["tokens"].columns if c.probe]].isna().all().all()


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([0.5, 1, 2, 3]),
        torch.tensor([0.5, 1, 2, 3], dtype=torch.bfloat16),
        torch.tensor([0.5, 1, 2, 3], requires_grad=True),
        [0.5, 1, 2, 3],
        pd.Series([0.5, 1, 2, 3]),
        [torch.tensor(0.5), 1, np.float32(2), 3],
    ],
)
def test_arrays_tensors_series_and_lists_are_taken(tmp_path, value):
    run = new_run(tmp_path / "a")
    with TraceWriter(run) as writer:
        writer.append("tokens", _tokens(weight=value))
    assert load_run(run).tokens(columns=["weight"])["weight"].tolist() == [0.5, 1, 2, 3]


def test_scalars_fill_all_rows_and_alone_make_one(tmp_path):
    run = new_run(tmp_path / "a")
    event = {
        "step": 3,
        "rule": "r",
        "severity": "warning",
        "value": 1,
        "threshold": None,
        "action": "warn",
        "message": "m",
    }
    with TraceWriter(run) as writer:
        assert writer.append("events", event) == 1
        assert writer.append("tokens", _tokens(score_norm_method="exact", weight=torch.tensor(1.5))) == 4
    assert load_run(run).events.iloc[0]["message"] == "m"
    frame = load_run(run).tokens(columns=["score_norm_method", "weight"])
    assert frame["score_norm_method"].tolist() == ["exact"] * 4 and frame["weight"].tolist() == [1.5] * 4


@pytest.mark.parametrize(
    ("table", "changes", "words"),
    [
        ("tokens", {"entropie": [0.0] * 4}, "tokens.entropie is not a column; did you mean 'entropy'?"),
        ("tokens", {"logp": [0.0] * 3}, "differ in length"),
        ("tokens", {"logp": [0.0, None, 0.0, 0.0]}, "tokens.logp may not be null"),
        ("tokens", {"token_id": [0.5] * 4}, "tokens.token_id is int32, got float64"),
        ("tokens", {"token_id": [2**40] * 4}, "tokens.token_id is int32, got values from 1099511627776"),
        ("tokens", {"logp": ["a"] * 4}, "tokens.logp is float32"),
        ("tokens", {"logp": np.zeros((4, 1))}, "tokens.logp has shape"),
        ("rollouts", {"correct": [1, 0, 1, 0]}, "rollouts.correct is bool"),
        ("rollouts", {"prompt": [1] * 4}, "rollouts.prompt is string, got int"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_name(tmp_path, table, changes, words):
    run = new_run(tmp_path / "a")
    writer = TraceWriter(run)
    with pytest.raises(SchemaError) as error:
        writer.append(table, rows(table, 1) | changes)
    assert words in str(error.value)
    assert writer.flush() == []


def test_missing_column_and_unknown_table_are_named(tmp_path):
    writer = TraceWriter(new_run(tmp_path / "a"))
    short = _tokens()
    del short["logp"]
    with pytest.raises(SchemaError, match="missing logp"):
        writer.append("tokens", short)
    with pytest.raises(SchemaError, match="did you mean 'tokens'"):
        writer.append("token", _tokens())


def test_text_without_utf8_and_parts_that_are_not_finite_survive(tmp_path):
    run = new_run(tmp_path / "a")
    changes = {"completion": ["\ud800x", "[bold]", "\x1b[31m", "ok"], "reward_parts": [{"a": float("nan")}] * 4}
    with TraceWriter(run) as writer:
        writer.append("rollouts", rows("rollouts", 1) | changes)
    frame = load_run(run).rollouts
    assert frame["completion"].tolist() == ["?x", "[bold]", "\x1b[31m", "ok"]
    assert json.loads(frame["reward_parts"][0]) == {"a": None}


def test_steps_and_columns_are_chosen_without_reading_others(tmp_path, monkeypatch):
    run = new_run(tmp_path / "a")
    with TraceWriter(run) as writer:
        for step in (1, 2):
            writer.append("tokens", _tokens(step))
        writer.flush()
        for step in (3, 4):
            writer.append("tokens", _tokens(step))
    read = []
    original = pq.ParquetFile.read_row_groups

    def spy(self, groups, **options):
        read.append((tuple(groups), tuple(options["columns"])))
        return original(self, groups, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", spy)
    loaded = load_run(run)
    assert loaded.token_steps == [1, 2, 3, 4] and loaded.rows("tokens") == 16
    frame = loaded.tokens(steps=[2], columns=["logp", "weight"])
    np.testing.assert_array_equal(frame["logp"], _tokens(2)["logp"])
    assert list(frame) == ["logp", "weight"]
    assert read == [((1,), ("logp", "weight"))]
    assert [len(part) for part in loaded.iter_tokens(columns=["logp"])] == [8, 8]
    assert len(loaded.tokens(steps=7)) == 0
    with pytest.raises(UserError, match="did you mean 'logp'"):
        loaded.tokens(columns=["lgp"])


def test_steps_without_a_required_column_are_not_read(tmp_path, monkeypatch):
    run = new_run(tmp_path / "a")
    half = np.ma.masked_array(np.ones(4), mask=[True, True, False, False])
    with TraceWriter(run) as writer:
        for step, values in enumerate([None, half, np.full(4, np.nan)], 1):
            writer.append("tokens", _tokens(step, attribution=values))
    read = []
    original = pq.ParquetFile.read_row_groups

    def spy(self, groups, **options):
        read.append(list(groups))
        return original(self, groups, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", spy)
    (frame,) = load_run(run).iter_tokens(columns=["step", "attribution"], required=["attribution"])
    assert read == [[1, 2]] and frame["step"].tolist() == [2] * 4 + [3] * 4
    assert len(load_run(run).tokens(columns=["attribution"])) == 12


def test_numbering_goes_on_and_nothing_is_overwritten(tmp_path):
    run = new_run(tmp_path / "a")
    for step in (1, 2, 3):
        with TraceWriter(run) as writer:
            writer.append("steps", rows("steps", step, 1))
    assert [p.name[:11] for p in sorted((run / "traces/steps").iterdir())] == [
        "part-000000",
        "part-000001",
        "part-000002",
    ]
    assert load_run(run).steps["step"].tolist() == [1, 2, 3]


def test_a_run_that_is_being_written_shows_every_flush(tmp_path, monkeypatch):
    run = new_run(tmp_path / "a")
    opened, original = [], reader.open_part
    monkeypatch.setattr(reader, "open_part", lambda path: opened.append(path.name) or original(path))
    with TraceWriter(run) as writer:
        writer.append("tokens", _tokens(1))
        writer.flush()
        live = load_run(run)
        assert live.tokens()["step"].tolist() == [1] * 4
        writer.append("tokens", _tokens(2))
        writer.flush()
    assert live.tokens()["step"].tolist() == [1] * 4 + [2] * 4
    assert [frame["step"].iloc[0] for frame in live.iter_tokens()] == [1, 2]
    assert live.rows("tokens") == 8 and live.token_steps == [1, 2]
    assert len(opened) == len(set(opened)) == 2  # each footer is read once


def test_a_run_that_is_rewound_while_it_is_read_keeps_its_rows(tmp_path):
    run = new_run(tmp_path / "a")
    with TraceWriter(run) as writer:
        for step in (1, 2, 3, 4):
            writer.append("tokens", _tokens(step))
            if step != 2:
                writer.flush()  # parts of steps 1, 2 and 3, 4
    live = load_run(run)
    frames = live.iter_tokens()
    seen = next(frames)["step"].tolist()
    rewind(run, 2)  # the part of steps 2 and 3 is written anew, that of step 4 goes
    assert seen + [step for frame in frames for step in frame["step"]] == [1] * 4 + [2] * 4
    assert live.tokens()["step"].tolist() == [1] * 4 + [2] * 4 and not live.damaged


def test_a_part_that_cannot_be_found_twice_is_damage(tmp_path):
    run = new_run(tmp_path / "a")
    with TraceWriter(run) as writer:
        for step in (1, 2):
            writer.append("tokens", _tokens(step))
            writer.flush()
    live = load_run(run)
    assert len(live.tokens()) == 8
    first = min((run / "traces/tokens").iterdir())
    first.unlink()
    first.symlink_to(tmp_path / "nowhere")
    for reading in (live, load_run(run)):  # its footer was read before, and was not
        with pytest.warns(DamagedPartWarning, match="could not be opened, twice"):
            assert reading.tokens()["step"].tolist() == [2] * 4
        assert list(reading.damaged) == [first.relative_to(run).as_posix()]


def test_runs_are_found_below_a_folder_and_joined(tmp_path):
    for name, method, seed in (("a", "grpo", 0), ("sweep/b", "grpo-sg", 1)):
        run = new_run(tmp_path / name, method=method, seed=seed)
        with TraceWriter(run) as writer:
            writer.append("steps", rows("steps", 1, 1))
            writer.append("tokens", _tokens(1))
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
        pa.schema([("step", pa.int32()), ("index", pa.int32()), ("logp", pa.float32())], {VERSION_KEY: b"1"}),
    )
    (run / "traces" / "tokens").mkdir(parents=True, exist_ok=True)
    write_part(old, run / "traces" / "tokens", 1)
    update_run_info(run, schema_version=1)
    with TraceWriter(run) as writer:  # a run that version 1 began and this version resumed
        writer.append("tokens", _tokens(step=3))
    read = load_run(run)
    assert read.tokens(columns=["logp"])["logp"].tolist()[:3] == [-1.0, -2.0, -3.0]
    mixed = read.tokens(columns=["entropy", "logp"], steps=[2, 3])
    assert mixed["entropy"].isna().tolist() == [True] + [False] * 4 and mixed["logp"].iloc[0] == -3.0
    assert [len(part) for part in read.iter_tokens(columns=["logp"], required=["entropy"])] == [4]
    assert len(read.tokens(columns=["entropy"])) == 7
    assert read.damaged == {}


def test_columns_that_version_1_lacks_may_be_null():
    tuning = Path(__file__).parents[2] / "data" / "tuning"
    for table in TABLES.values():
        file = tuning / f"{table.name}.parquet"
        if file.exists():
            missing = [column for column in table.columns if column.name not in pq.read_schema(file).names]
            assert all(column.nullable for column in missing), table.name


def test_runs_of_version_1_have_no_updates():
    run = load_runs(Path(__file__).parents[2] / "data" / "reference")[0]
    assert run.updates.empty and list(run.updates) == TABLES["updates"].names
    assert run.steps[["generated_tokens", "redrawn_groups"]].isna().all().all() and len(run.steps) > 0
    assert run.tokens(columns=["sampler_logp", "correction"]).isna().all().all()


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


def test_html_escapes_what_files_say(tmp_path):
    run = new_run(tmp_path / "a", method="<script>alert(1)</script>")
    for html in (load_run(run)._repr_html_(), load_runs(tmp_path)._repr_html_()):
        assert "<script>" not in html and "&lt;script&gt;" in html


def test_run_info_is_whole_and_checked(tmp_path):
    run = new_run(tmp_path / "a")
    update_run_info(run, status="finished", steps_done=3)
    info = load_run(run).info
    assert info["status"] == "finished" and info["steps_done"] == 3 and info["schema_version"] == SCHEMA_VERSION
    assert load_run(run).config == INFO["config"]
    with pytest.raises(ValueError, match="status"):
        update_run_info(run, status="done")
    with pytest.raises(FileExistsError):
        create_run_info(run, INFO)
    with pytest.raises(ValueError, match="needs seed"):
        create_run_info(tmp_path, {k: v for k, v in INFO.items() if k != "seed"})


def test_schema_text_has_every_column():
    text = schema_markdown()
    for table in TABLES.values():
        for column in table.columns:
            assert f"| {column.name} | {column.type} | " in text
            assert column.unit and column.definition
    assert "## eval" not in schema_markdown(["steps"])
    assert timing_columns("steps") == ["generation_s", "training_s", "recording_s"]


def test_a_token_row_costs_at_most_64_bytes(tmp_path):
    run = new_run(tmp_path / "a")
    count = 8000
    columns = _tokens(
        1, count, advantage=np.repeat(np.arange(count // 40) / 7, 40), position=np.tile(np.arange(40), count // 40)
    )
    probes = {c.name for c in TABLES["tokens"].columns if c.probe} - {"score_norm_local"}
    with TraceWriter(run) as writer:
        writer.append("tokens", {name: value for name, value in columns.items() if name not in probes})
    (path,) = (run / "traces/tokens").iterdir()
    assert path.stat().st_size / count <= 64

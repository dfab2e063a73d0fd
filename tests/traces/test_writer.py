"""What goes in comes out: by value, by column, by step; and what does not fit is refused with its name."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from sharpscope.traces import TABLES, SchemaError, TraceWriter, load_run
from tests.traces.rows import new_run, rows, token_rows


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
    "value",
    [
        torch.tensor([0.5, 1, 2, 3], dtype=torch.bfloat16, requires_grad=True),
        pd.Series([0.5, 1, 2, 3]),
        [torch.tensor(0.5), 1, np.float32(2), 3],
    ],
)
def test_arrays_tensors_series_and_lists_are_taken(tmp_path, value):
    run = new_run(tmp_path / "a")
    with TraceWriter(run) as writer:
        writer.append("tokens", token_rows(weight=value))
    assert load_run(run).tokens(columns=["weight"])["weight"].tolist() == [0.5, 1, 2, 3]


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

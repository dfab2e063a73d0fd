"""Packed data: many runs in few files, nothing lost, readable like folders."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

import sharpscope
from sharpscope.cli import app
from sharpscope.errors import UserError
from sharpscope.traces import (
    TABLES,
    Reduction,
    load_run,
    load_runs,
    pack_runs,
    update_run_info,
    write_reductions,
)

EXAMPLE = Path(__file__).parents[1] / "data" / "pair"


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """The example's two runs, one of them below a folder and with reductions."""
    folder = tmp_path_factory.mktemp("packs")
    shutil.copytree(EXAMPLE / "grpo-s0", folder / "runs" / "grpo-s0")
    shutil.copytree(EXAMPLE / "grpo-sg-s0", folder / "runs" / "deep" / "grpo-sg-s0")
    write_reductions(folder / "runs" / "grpo-s0", [Reduction("a", 3, 7, {"x": [1.5, float("nan")]})])
    result = CliRunner().invoke(app, ["export", str(folder / "runs"), "--to", "packed", "--out", str(folder / "pack")])
    assert result.exit_code == 0, result.output
    return folder


def equal(first: pa.Table, second: pa.Table) -> bool:
    """Whether two tables hold the same, where NaN equals NaN and differs from null."""
    if first.schema != second.schema or len(first) != len(second):
        return False
    for one, other in zip(first.columns, second.columns, strict=True):
        if one.is_null().combine_chunks() != other.is_null().combine_chunks():
            return False
        ours, theirs = (column.drop_null().to_numpy() for column in (one, other))
        if not np.array_equal(ours, theirs, equal_nan=pa.types.is_floating(one.type)):
            return False
    return True


def same(first: sharpscope.traces.Run, second: sharpscope.traces.Run) -> bool:
    assert first.info == second.info
    assert first.config_text == second.config_text
    assert str(first.reductions) == str(second.reductions)
    return all(equal(first.arrow(table), second.arrow(table)) for table in TABLES)


def test_a_pack_gives_the_runs_that_went_in(packed):
    whole, pack = load_runs(packed / "runs"), load_runs(packed / "pack")
    # no rows, no file
    tables = {f"{table}.parquet" for table in TABLES if any(run.rows(table) for run in whole)}
    assert {"steps.parquet", "tokens.parquet"} <= tables and "forks.parquet" not in tables
    assert {path.name for path in (packed / "pack").iterdir()} == {"runs.parquet", "reductions.parquet", *tables}
    assert list(pack.by_name) == list(whole.by_name) == ["deep/grpo-sg-s0", "grpo-s0"]
    for name, run in whole.by_name.items():
        assert same(run, pack[name])
        assert same(run, load_run(packed / "pack" / name))
        assert pack[name].status == "finished"
        assert pack[name].token_steps == run.token_steps
        step = run.token_steps[1]
        ours, theirs = pack[name].tokens([step], ["logp", "entropy"]), run.tokens([step], ["logp", "entropy"])
        assert len(ours) and ours.equals(theirs)
    assert pack["grpo-s0"].reductions is not None and pack["deep/grpo-sg-s0"].reductions is None
    assert list(load_runs(packed).by_name)[:2] == ["pack/deep/grpo-sg-s0", "pack/grpo-s0"]


def test_commands_read_a_packed_run(packed):
    result = CliRunner().invoke(app, ["show", str(packed / "pack" / "grpo-s0")])
    assert result.exit_code == 0 and "grpo" in result.output


def test_mistakes_are_named(packed, tmp_path):
    (tmp_path / "empty").mkdir()
    for to in ("packed", "reduced"):
        command = ["export", str(tmp_path / "empty"), "--to", to, "--out", str(tmp_path / "out")]
        result = CliRunner().invoke(app, command)
        assert isinstance(result.exception, UserError) and "no run below" in str(result.exception)
        assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"has no run 'grpo-s1'; did you mean 'grpo-s0'"):
        sharpscope.load_run(packed / "pack" / "grpo-s1")
    runs = load_runs(packed / "runs").by_name
    with pytest.raises(UserError, match="is not empty"):
        pack_runs(runs, packed / "pack")
    with pytest.raises(UserError, match="none given"):
        pack_runs({}, tmp_path / "pack")
    shutil.copytree(EXAMPLE / "grpo-s0", tmp_path / "run")
    update_run_info(tmp_path / "run", status="failed")
    with pytest.raises(UserError, match="it is failed; give folders of finished runs"):
        pack_runs({"it": load_run(tmp_path / "run")}, tmp_path / "pack")


def test_damage_is_told(packed, tmp_path):
    shutil.copytree(packed / "pack", tmp_path / "pack")
    file = tmp_path / "pack" / "steps.parquet"
    content = bytearray(file.read_bytes())
    content[200:240] = bytes(40)
    file.write_bytes(content)
    run = load_run(tmp_path / "pack" / "deep" / "grpo-sg-s0")
    with pytest.warns(sharpscope.traces.DamagedPartWarning, match=r"steps.parquet is set aside"):
        assert run.steps.empty
    shutil.copytree(packed / "pack", tmp_path / "cut")
    (tmp_path / "cut" / "steps.parquet").write_bytes(content[:-20])
    with pytest.raises(UserError, match=r"cut: a file cannot be read \(truncated.*; restore it"):
        load_runs(tmp_path / "cut")

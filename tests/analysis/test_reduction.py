"""Reduced runs: claims and tables as from the whole, a uniform sample of tokens, nothing overwritten."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

from sharpscope.analysis.claims import REDUCERS, judge, study_of
from sharpscope.analysis.claims.registry import claims_json
from sharpscope.analysis.reduction import reduce_run, reduce_runs
from sharpscope.cli import app
from sharpscope.errors import UserError
from sharpscope.traces import Reduction, load_run, load_runs, write_reductions
from tests.traces.synthetic import Effects, Shape, new_run, write_study


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shape, methods = (
        Shape(steps=6, prompts=3, length=12, probe_every=3, eval_every=3),
        ("grpo", "grpo-sg"),
    )
    return write_study(
        tmp_path_factory.mktemp("whole"), dict.fromkeys(methods, Effects()), seeds=2, shape=shape
    )


@pytest.fixture(scope="module")
def reduced(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("reduced") / "reference"
    assert [
        len(found) for found in reduce_runs(load_runs(folder).by_name.items(), out, tokens=60)
    ] == [4, 0]
    return out


def test_every_verdict_and_every_sum_over_tokens_is_the_same_whichever_methods_are_compared(
    folder, reduced
):
    for pair in ({}, {"baseline": "grpo-sg", "treatment": "grpo"}):
        both = [study_of(load_runs(path), **pair) for path in (folder, reduced)]
        whole, small = (claims_json(judge(study)[0]) for study in both)
        assert whole == small
        for reducer in REDUCERS:
            first, second = (study.reduced[reducer.name] for study in both)
            assert len(first) == len(second) > 0, reducer.name
            for a, b in zip(first, second, strict=True):
                np.testing.assert_equal(vars(a), vars(b))


def test_the_sample_is_rows_of_the_table_half_of_them_with_norms(folder, reduced):
    whole, small = (load_run(path / "grpo-s0") for path in (folder, reduced))
    rows = small.tokens()
    assert len(rows) == 60 == small.reduced["sampled"] and small.reduced["tokens"] == whole.rows(
        "tokens"
    )
    assert rows["score_norm_local"].notna().sum() == 30
    keys = ["step", "rollout", "position"]
    assert not rows.duplicated(keys).any()
    merged = rows.merge(whole.tokens(), on=keys, suffixes=("", "_whole"))
    assert len(merged) == 60
    for name in ("token_id", "logp", "loss_coef", "score_norm_local"):
        np.testing.assert_array_equal(merged[name], merged[f"{name}_whole"])


def reduce(*arguments) -> str:
    result = CliRunner().invoke(
        app, ["export", *map(str, arguments), "--to", "reduced"], env={"COLUMNS": "200"}
    )
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_nothing_is_overwritten_and_names_that_clash_are_refused(folder, reduced, tmp_path):
    written, left_out = reduce_runs(load_runs(folder).by_name.items(), reduced)
    assert (
        not written and len(left_out) == 4 and all("is there already" in line for line in left_out)
    )
    with pytest.raises(UserError, match="reduction itself"):
        reduce_run(load_run(reduced / "grpo-s0"), tmp_path / "again")
    for name in ("ra", "rb"):
        shutil.copytree(folder / "grpo-s0", tmp_path / name / "grpo-s0")
    with pytest.raises(UserError, match="'grpo-s0' names both"):
        reduce(tmp_path / "ra", tmp_path / "rb", "--out", tmp_path / "ref")
    with pytest.raises(UserError, match="is no folder below --out"):
        reduce_runs([("../grpo-s0", load_run(folder / "grpo-s0"))], tmp_path / "ref")
    assert not (tmp_path / "ref").exists()
    assert "1 run reduced" in reduce(
        tmp_path / "ra", tmp_path / "ra" / "grpo-s0", "--out", tmp_path / "ref"
    )


@pytest.mark.filterwarnings("ignore::sharpscope.traces.DamagedPartWarning")
def test_a_damaged_run_gets_no_copy_that_looks_whole(folder, tmp_path):
    for name in ("grpo-s0", "grpo-s1"):
        shutil.copytree(folder / name, tmp_path / "some" / name)
    part = sorted((tmp_path / "some" / "grpo-s0" / "traces" / "eval").iterdir())[0]
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.raises(UserError, match="has 1 damaged parts, traces/"):
        reduce_run(load_run(tmp_path / "some" / "grpo-s0"), tmp_path / "one")
    output = reduce(tmp_path / "some", "--out", tmp_path / "out")
    assert "skipped: grpo-s0: " in output and "traces/eval/" in output
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["grpo-s1"] and not (
        tmp_path / "one"
    ).exists()


def test_values_survive_to_the_last_digit(tmp_path):
    values = {
        "m": np.array([[0.1, 1 / 3], [np.nan, -1e-300]]),
        "n": 3,
        "cells": [{"a": 0.1, "b": "c"}],
    }
    new_run(tmp_path / "a")
    write_reductions(
        tmp_path / "a", [Reduction("C2", 4, 9, values), Reduction("score column", -1, 9, None)]
    )
    first, second = load_run(tmp_path / "a").reductions
    np.testing.assert_array_equal(first.values["m"], values["m"])
    assert first.values["cells"] == values["cells"] and first.values["n"] == 3
    assert second == Reduction("score column", -1, 9, None) and (
        first.name,
        first.step,
        first.tokens,
    ) == ("C2", 4, 9)
    assert load_run(new_run(tmp_path / "none")).reductions is None

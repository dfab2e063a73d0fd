"""The token scan: whole steps, once, only the columns asked for; deciles and samples."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from sharpscope.analysis import tokens
from sharpscope.analysis.tokens import Reducer, decile_sums, sample_tokens, scan
from sharpscope.traces import TraceWriter, load_run
from tests.analysis.claims.frames import frame_run, tokens_frame
from tests.analysis.drawn import runs_of
from tests.oracles import analysis as oracle
from tests.traces.rows import new_run, rows


def test_tokens_are_read_once_in_whole_steps_and_only_the_columns_asked_for(monkeypatch):
    monkeypatch.setattr(tokens, "BATCH_ROWS", 500)
    run = frame_run(tokens=tokens_frame(np.random.default_rng(0), 5, 200))
    reducers = [
        Reducer("sum", ("logp",), lambda t, r: {"value": float(t["logp"].sum())}),
        Reducer("none", ("logp",), lambda t, r: None),
        Reducer("empty", ("attribution",), lambda t, r: {"value": 0.0}, needs="attribution"),
    ]
    results = scan({"a": run}, reducers)
    expected = run.token_frame.groupby("step")["logp"].sum()
    assert [r.values["value"] for r in results["sum"]] == pytest.approx(list(expected))
    assert [r.tokens for r in results["sum"]] == [200] * 5 and not results["none"] and not results["empty"]
    steps = [step for read, _ in run.reads for step in read]
    assert steps == [1, 2, 3, 4, 5] and len(run.reads) == 3
    assert {columns for _, columns in run.reads} == {("step", "attribution", "logp")}


def test_deciles_sum_what_the_tokens_hold(study):
    run = runs_of(study, "grpo-sg")[0]
    results = scan({"a": run}, [decile_sums("heldout_influence")])["deciles heldout_influence"]
    sums = pd.concat([pd.DataFrame(result.values) for result in results])
    tokens = run.tokens(columns=["step", "logp", "advantage", "heldout_influence"]).dropna().to_dict("records")
    want = oracle.decile_sums(tokens, "heldout_influence")
    got = sums.groupby(["decile", "sign"])["value"].sum()
    assert set(got.index) == set(want)
    for key, value in want.items():
        assert got[key] == pytest.approx(value, abs=1e-5)


def test_a_step_written_in_two_parts_has_one_set_of_deciles(tmp_path):
    run = new_run(tmp_path / "a")
    tokens = rows("tokens", 1, 400) | {"attribution": np.ones(400, dtype=np.float32)}
    for half in (slice(0, 200), slice(200, 400)):
        with TraceWriter(run) as writer:
            part = {k: v if v is None or np.ndim(v) == 0 else v[half] for k, v in tokens.items()}
            writer.append("tokens", part)
    (result,) = scan({"a": load_run(run)}, [decile_sums("attribution")])["deciles attribution"]
    sums = pd.DataFrame(result.values)
    assert sums.groupby("decile")["value"].sum().tolist() == [40.0] * 10


def test_attribution_of_an_update_sums_to_one(study):
    for result in study.results("deciles attribution", study.of("grpo")):
        np.testing.assert_allclose(pd.DataFrame(result.values).groupby("update")["value"].sum(), 1.0, rtol=1e-5)


def test_sampling_keeps_every_token_or_a_seeded_even_share(study):
    run = runs_of(study, "grpo")[0]
    assert len(sample_tokens(run, ["logp"])) == run.rows("tokens")
    small = sample_tokens(run, ["step"], limit=60)
    assert len(small) == 60 and small.equals(sample_tokens(run, ["step"], limit=60))
    assert set(small["step"]) == set(run.token_steps)

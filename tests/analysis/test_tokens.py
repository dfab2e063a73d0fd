"""The token scan: whole steps, once, only the columns asked for."""

from __future__ import annotations

import numpy as np
import pytest

from sharpscope.analysis import tokens
from sharpscope.analysis.tokens import Reducer, scan
from tests.analysis.claims.frames import frame_run, tokens_frame


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

"""What is read of tokens and layers: whole steps once, only the columns asked for, and the layer that grew."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from sharpscope.analysis import tokens
from sharpscope.analysis.headline import layer_growth
from sharpscope.analysis.tokens import Reducer, scan
from tests.analysis.claims.frames import frame_run, tokens_frame

GROUPS = ["0.attention", "0.mlp", "head"]


def test_growth_is_that_of_the_largest_update():
    norms = np.random.default_rng(0).uniform(0.5, 1.5, (6, 2, 3))  # (steps, updates, groups)
    norms[5, 1, 1] *= 40
    rows = [
        {"step": s + 1, "update": u, "grad_norm_by_layer": json.dumps(dict(zip(GROUPS, norms[s, u], strict=True)))}
        for s, u in np.ndindex(6, 2)
    ]
    found = layer_growth(SimpleNamespace(updates=pd.DataFrame(rows).assign(update_norm_by_layer=None)), 6)
    typical = np.median(norms[:5].reshape(10, 3), axis=0)
    table = found.groups.loc[GROUPS]
    np.testing.assert_allclose(table["growth"], norms[5, 1] / typical)
    np.testing.assert_allclose(table["share"], norms[5, 1] ** 2 / (norms[5, 1] ** 2).sum())
    assert found.named == "0.mlp" and f"{norms[5, 1, 1] / typical[1]:.3g} × its typical norm" in found.text


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

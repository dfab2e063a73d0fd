"""Spikes: the rule, and their tokens and prompts."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from sharpscope.analysis import render_spikes, show
from sharpscope.analysis.spikes import explain_spikes, find_spikes
from sharpscope.analysis.tokens import sample_text
from sharpscope.traces import load_run
from sharpscope.traces.rules import robust_z
from tests.analysis.html.runs import write_report_run


def test_a_planted_spike_is_found_by_the_rule():
    rng = np.random.default_rng(0)
    norms = np.exp(rng.normal(0, 0.1, 60))
    norms[40] = 10.0
    found = find_spikes(pd.DataFrame({"step": range(1, 61), "grad_norm": norms}))
    assert found["step"].tolist() == [41]
    logs = np.log(norms[:40])
    mad = 1.4826 * np.median(np.abs(logs - np.median(logs)))
    assert found["z"].iloc[0] == pytest.approx((math.log(10) - np.median(logs)) / mad)
    assert (
        math.isnan(robust_z([0.0] * 9, 1.0))
        and robust_z([0.0] * 10, 0.0) == 0.0
        and robust_z([0.0] * 10, 1.0) == math.inf
    )


@pytest.mark.parametrize(("share", "words"), [(0.25, "a random 25 % of each update's groups"), (1.0, "")])
def test_tokens_of_sampled_groups_are_said_to_be_of_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, words: str
):
    run = load_run(write_report_run(tmp_path / "a"))
    tokens_of = run.tokens

    def sampled(steps: Any = None, columns: Any = None) -> pd.DataFrame:
        frame = tokens_of(steps, columns)
        if "inclusion_probability" in frame:
            frame["inclusion_probability"] = np.float32(share)
        return frame

    monkeypatch.setattr(run, "tokens", sampled)
    spike = explain_spikes(run)[0]
    assert spike.sample == words
    console = Console(file=io.StringIO(), width=240, color_system=None)
    console.print(render_spikes([spike], lambda step: run.tokens(steps=[step]), str), show(run))
    text = " ".join(console.file.getvalue().split())  # titles of tables wrap
    if words:
        assert f"tokens of {words} by share of the squared norm" in text
        assert f"prompts of {words}" in text and f"probability ranges, estimated from {words}" in text
        assert f"One token of {words}, “" in text and f"; tokens of {words}; shares of its square" in text
    else:
        assert "tokens by share of the squared norm" in text and "random" not in text and "One token, “" in text
    # The shares by range are Horvitz-Thompson estimates; those by token are as recorded.
    recorded = run.tokens([spike.step], ["attribution"])["attribution"]
    assert spike.probabilities["share"].sum() == pytest.approx(float(recorded.sum()) / share)
    assert spike.tokens["attribution"].abs().max() == pytest.approx(float(recorded.abs().max()))


def test_different_shares_of_a_steps_updates_are_given_as_a_range():
    frame = pd.DataFrame({"inclusion_probability": np.array([0.125, 1.0, np.nan], dtype=np.float32)})
    assert sample_text(frame) == "a random 12.5 to 100 % of each update's groups"

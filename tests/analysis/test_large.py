"""Large runs are read in pieces: the numbers do not depend on their size; of a very large one steps are passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from experiments.benchmarks.large import write_large
from sharpscope.analysis import path_sections
from sharpscope.analysis import tokens as passes
from sharpscope.analysis.study import recorded_steps
from sharpscope.analysis.token_values import entropy_bins, left_out, mismatch_sums
from sharpscope.analysis.token_view import choose, token_view
from sharpscope.causes import recorded
from sharpscope.traces import Run, load_run, parts
from tests.loops import some

STEPS, ROWS = 6, 4_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps of 4,000 tokens in two files."""
    path = tmp_path_factory.mktemp("large") / "run"
    assert write_large(path, STEPS * ROWS, ROWS, part_steps=4) == STEPS * ROWS
    return path


def shown(folder: Path) -> list[Any]:
    """What `show` says of a run, as plain values."""
    return [
        (s.title, s.note, s.content.to_csv() if isinstance(s.content, pd.DataFrame) else s.content)
        for s in path_sections([folder])
        if not s.title.startswith("Cost")
    ]


def numbers(run: Run) -> list[pd.DataFrame]:
    return [entropy_bins(run), mismatch_sums(run), left_out(run)]


def test_no_number_depends_on_the_size_of_a_piece(folder: Path, monkeypatch: pytest.MonkeyPatch):
    whole = numbers(load_run(folder)), shown(folder), token_view({"a": load_run(folder)})
    sizes = [len(piece) for piece in load_run(folder).iter_tokens(columns=["step"])]
    monkeypatch.setattr(parts, "PIECE_ROWS", ROWS)
    run = load_run(folder)
    assert sizes == [4 * ROWS, 2 * ROWS]
    assert [len(piece) for piece in run.iter_tokens(columns=["step"])] == [ROWS] * STEPS
    for one, other in some(zip(whole[0], numbers(run), strict=True)):
        pd.testing.assert_frame_equal(one, other, check_exact=True)
    assert shown(folder) == whole[1] and token_view({"a": run}) == whole[2]


def test_steps_and_their_rows_are_those_of_the_whole_table(folder: Path):
    run, other = load_run(folder), load_run(folder)
    frame = other.tokens(columns=["step", "attribution", "effect_kl", "logp"])
    assert run.step_rows("tokens") == frame.groupby("step").size().to_dict()
    assert run.rows("rollouts") == len(other.rollouts) > 0
    for names in some([("attribution",), ("attribution", "effect_kl"), ("logp",)]):
        assert recorded_steps(run, *names) == sorted(frame.dropna(subset=names).step.unique())
    part = run.frame("rollouts", [2, 5], ["step", "completion"])
    wanted = other.rollouts[other.rollouts["step"].isin([2, 5])][["step", "completion"]]
    pd.testing.assert_frame_equal(part, wanted.reset_index(drop=True))


def test_of_a_very_large_run_steps_that_are_spread_over_it_are_passed_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    every = mismatch_sums(load_run(folder))
    assert passes.passed_steps(load_run(folder)) is None
    monkeypatch.setattr(passes, "MOST_ROWS", 3 * ROWS)
    run = load_run(folder)
    chosen = passes.passed_steps(run)
    assert chosen == [1, 3, 6]
    pd.testing.assert_frame_equal(mismatch_sums(run), every.loc[chosen], check_exact=True)
    frame = run.tokens(chosen, ["logp", "collision", "advantage"]).astype(float)
    above = frame["logp"].to_numpy() < np.log(frame["collision"].to_numpy())
    valley = (above & (frame["advantage"] > 0)).mean()
    assert entropy_bins(run)["tokens"]["valley, A > 0"] == pytest.approx(valley)
    notes = [note for title, note, _ in shown(folder) if title.startswith("Which tokens change")]
    assert notes[0].endswith("Of 3 of 6 steps, spread over the run.")


def test_causes_and_the_page_read_a_bounded_number_of_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = recorded.Recorded.of(load_run(folder))
    assert len(whole.tokens) == STEPS * ROWS and len(whole.rollouts) == STEPS * ROWS / 500
    monkeypatch.setitem(recorded.MOST_ROWS, "tokens", 3 * ROWS)
    some_of_it = recorded.Recorded.of(load_run(folder))
    assert sorted(some_of_it.tokens["step"].unique()) == [1, 2, 6]
    assert len(some_of_it.rollouts) == len(whole.rollouts)
    monkeypatch.setattr("sharpscope.analysis.token_view.MOST_ROWS", 3 * ROWS)
    steps = {step for step, _ in choose({"a": load_run(folder)})["a"].wanted}
    assert {1, 6} <= steps and len(steps) <= 4

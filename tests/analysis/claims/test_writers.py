"""What is written and drawn: JSON and Markdown, figures' data, tables; and reading on real files."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest

from sharpscope.analysis import claims
from sharpscope.analysis.text import escape_markdown
from sharpscope.analysis.tokens import steps_of
from sharpscope.traces import load_run, load_runs
from tests.analysis.claims.frames import frame_run, study
from tests.analysis.claims.planted import MAKERS, alignment, grid
from tests.traces.synthetic import Effects, Shape, write_study

KEYS = {"claim", "verdict", "effect", "interval", "p_value", "n", "rule", "confounders", "rows"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shape = Shape(steps=6, prompts=3, length=12, probe_every=3, eval_every=3)
    return write_study(
        tmp_path_factory.mktemp("claims") / "runs", {"grpo": Effects(), "grpo-sg": Effects()}, seeds=2, shape=shape
    )


def test_verdicts_of_recorded_runs_as_json_and_markdown(folder, tmp_path):
    runs = load_runs(folder)
    verdicts = claims.test_claims(runs)
    paths = claims.write_claims(verdicts, tmp_path / "out")
    assert [path.name for path in paths] == ["claims.json", "claims.md"]
    read = json.loads(paths[0].read_text(), parse_constant=lambda text: pytest.fail(f"{text} in JSON"))
    assert [entry["claim"] for entry in read] == list(claims.CLAIMS)
    assert all(set(entry) >= KEYS for entry in read)
    bounds = read[0]
    assert bounds["verdict"] == "supported" and bounds["n"] == sum(run.rows("tokens") for run in runs)
    assert {row["run"] for row in bounds["rows"]} == set(runs.by_name)
    assert all(row["columns"] and row["filter"] for entry in read for row in entry["rows"])
    assert all(entry["settles"] for entry in read if entry["verdict"] == "untestable")
    text = paths[1].read_text()
    assert "refutes nothing about large models" in text
    assert all(escape_markdown(v.rule.text) in text for v in verdicts)


def test_text_from_files_is_not_markup():
    runs = study(frame_run("<img src=x>|`", 0), frame_run("grpo", 0))
    (result,) = claims.test_claims(runs, ["C8"], treatment="<img src=x>|`")
    text = claims.claims_markdown([dataclasses.replace(result, title="a | b <script>")])
    assert not re.search(r"(?<!\\)<(img|script)", text) and "a \\| b" in text


def test_streamed_steps_equal_the_recorded_table(folder):
    run = load_run(folder / "grpo-s0")
    whole = run.tokens(columns=["step", "logp"])
    for step, columns in steps_of(run, ["logp"]):
        assert np.array_equal(columns["logp"], whole.loc[whole["step"] == step, "logp"].to_numpy())


def pictures(runs):
    laid_out = claims.study_of(runs)
    return list(claims.claim_pictures(claims.test_claims(runs), laid_out))


def test_every_picture_is_drawn_or_says_what_is_missing(folder):
    result = pictures(load_runs(folder))
    assert len(result) == 11 and {p.claim for p in result} == {*claims.CLAIMS} - {"C1", "C2", "C3", "C9"}
    assert all((p.figure is None) == bool(p.missing) for p in result)


def drawn(runs, name):
    return next(p for p in pictures(runs) if p.name == name).figure


def test_figures_draw_the_numbers():
    rng = np.random.default_rng(0)
    runs = alignment("effect", rng, 6, "normal")
    axis = drawn(runs, "shaping_ablation").axes[0]
    (result,) = claims.test_claims(runs, ["C10"])
    means = result.frames["comparisons"].groupby("rival", sort=False)["difference"].mean()
    (points,) = [line.get_xdata() for line in axis.lines if line.get_marker() == "o"]
    assert points == pytest.approx(list(means))
    axis = drawn(grid("effect", rng, 1, "normal"), "gap_against_sharpness").axes[0]
    shown = [x for line in axis.lines if line.get_linestyle() == "None" for x in line.get_xdata()]
    assert len(shown) == 12 and axis.get_xscale() == "log"
    hollow = {line.get_label().endswith("decay 1") for line in axis.lines if line.get_fillstyle() == "none"}
    assert hollow == {True}
    bounds = MAKERS["C5"]("effect", rng, 6, "normal")
    left, right = drawn(bounds, "bound_tightness").axes
    (tested,) = claims.test_claims(bounds, ["C5"])
    rows = tested.frames["bound"].query("rho == fixed_rho and tested")
    heights = {line.get_label(): line.get_ydata()[0] for line in left.lines}
    assert heights["training failure + sharpness"] == pytest.approx((rows["train"] + rows["sharpness"]).median())
    assert heights["held-out failure"] == pytest.approx(rows["heldout"].median())
    assert right.lines[0].get_ydata() == pytest.approx([0.8])
    for claim, name in (("C12", "entropy_prediction"), ("C13", "lucky_spikes")):
        assert drawn(MAKERS[claim]("effect", rng, 4, "normal"), name) is not None


def test_the_reward_drawn_is_that_of_the_setting_that_is_judged():
    runs = list(MAKERS["C11"]("effect", np.random.default_rng(0), 3, "normal").by_name.values())
    hot = {**runs[0].config, "optimizer": {**runs[0].config["optimizer"], "lr": 9e-4}}
    other = dataclasses.replace(runs[0], name="a-hot-run-sorts-first", config=hot)
    titles = [axis.get_title() for axis in drawn(study(other, *runs), "reward_fit").axes]
    assert titles == [min(run.name for run in runs)]

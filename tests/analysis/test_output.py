"""`analyze` on whatever it may find: always a clear word, never a crash or a wrong comparison."""

from __future__ import annotations

import csv
import math

import pandas as pd
import pytest

from sharpscope.analysis import analyze
from sharpscope.analysis.text import escape_markdown
from sharpscope.errors import UserError
from sharpscope.traces import SCHEMA_VERSION, RunLock, TraceWriter, update_run_info
from tests.traces.rows import new_run, rows
from tests.traces.synthetic import Shape, write_run

TINY = Shape(steps=3, prompts=2, group_size=2, length=4, eval_every=3, eval_prompts=10)


def write_tiny(path, **options):
    return write_run(path, **({"shape": TINY, "tokens": False, "probes": False} | options))


def test_a_study_gives_every_figure_table_and_a_report(study_folder, tmp_path, quick):
    heard = []
    result = analyze(study_folder, tmp_path / "out", on_progress=heard.append)
    assert set(result.figures) == {
        "reward",
        "gradient_norm",
        "entropy",
        "clipping",
        "accuracy",
        "accuracy_by_level_greedy",
        "accuracy_by_level_temperature_1",
        "heldout_reward",
        "weights",
        "weight_statistics",
        "logit_gradient",
        "score_norm",
        "lorenz",
        "attribution",
        "sharpness",
        "spectrum",
        "rho_curves",
        "lucky_spikes",
        "pairs_c7",
        "power",
    }
    assert [text.removesuffix(".png") for text in heard if text.endswith(".png")] == list(result.figures)
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"report.md", "report.html", "claims.json", "summary.csv", "runs.csv", "reward.png", "reward.svg"} <= files
    text = result.report.read_text()
    assert all(f"]({name}.png)" in text for name in result.figures)
    assert "grpo: 0 of 3,456 outside" in text  # C1, on every token of each method
    with result.tables["summary"].open() as file:
        assert len(list(csv.DictReader(file))) == len(result.summary)
    expected = (
        "weight_saturation",
        "held-out influence: not recorded",
        "rotation of the gradient: not recorded",
        "reliability of sharpness: not recorded",
    )
    assert [message for message in result.messages if not any(text in message for text in expected)] == []


def test_no_run_says_what_to_do_and_writes_nothing(tmp_path):
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match=r"no run below .*; make one with `sharpscope run"):
        analyze(tmp_path / "runs", tmp_path / "out")
    with pytest.raises(UserError, match="is not a folder"):
        analyze(tmp_path / "nowhere", tmp_path / "out")
    new_run(tmp_path / "runs/empty")
    with pytest.raises(UserError, match="has a finished step yet"):
        analyze(tmp_path / "runs", tmp_path / "out")
    update_run_info(tmp_path / "runs/empty", schema_version=SCHEMA_VERSION + 1)
    with pytest.raises(UserError, match=f"schema version {SCHEMA_VERSION + 1}"):
        analyze(tmp_path / "runs", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_the_users_mistake(tmp_path):
    write_tiny(tmp_path / "runs/a")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be created"):
        analyze(tmp_path / "runs", tmp_path / "file" / "out")


def test_one_run_without_tokens_and_probes_names_what_is_missing(tmp_path, quick):
    write_tiny(tmp_path / "runs/a")
    result = analyze(tmp_path / "runs/a", tmp_path / "out")
    assert {"reward", "accuracy"} <= set(result.figures) and "lorenz" not in result.figures
    missing = ["every method here has w = 1", "logit gradients", "score norm", "attribution", "no probe was run"]
    for word in missing:
        assert any(word in message for message in result.messages), word
    text = result.report.read_text()
    assert "Not shown:" in text and "says nothing about other seeds" in text
    assert result.summary["low"].isna().all()


def test_different_tasks_share_no_figure_and_no_table(tmp_path, quick):
    write_tiny(tmp_path / "runs/a")
    write_tiny(tmp_path / "runs/b", task="math")
    result = analyze(tmp_path / "runs", tmp_path / "out")
    assert {"1-knights-knaves_reward", "2-math_reward"} <= set(result.figures)
    assert set(result.summary["study"]) == {"knights_knaves", "math"}
    text = result.report.read_text()
    assert "These are not compared" in text and "](2-math_reward.png)" in text


def test_runs_that_cannot_be_read_are_named_and_left_out(tmp_path, quick):
    write_tiny(tmp_path / "runs/good")
    update_run_info(write_tiny(tmp_path / "runs/old", seed=1), schema_version=SCHEMA_VERSION + 1)
    damaged = write_tiny(tmp_path / "runs/damaged", seed=2)
    (part,) = (damaged / "traces/rollouts").glob("*.parquet")
    (other,) = (damaged / "traces/eval").glob("*.parquet")
    other.write_bytes(other.read_bytes()[:-100])
    result = analyze(tmp_path / "runs", tmp_path / "out")
    assert part.exists()
    assert any("old is left out" in m and "schema version" in m for m in result.messages)
    assert any(f"damaged: traces/eval/{other.name} is set aside" in m for m in result.messages)
    assert "schema version" in result.report.read_text() and "is set aside" in result.report.read_text()
    assert set(result.summary["runs"]) == {1, 2}


def test_rewards_that_are_not_numbers_are_said_and_never_averaged_away(tmp_path, quick):
    run = new_run(tmp_path / "runs/a")
    update_run_info(run, status="finished")
    with TraceWriter(run) as writer:
        for step, reward in enumerate([1.0, 2.0, math.nan], 1):
            writer.append("steps", rows("steps", step, 1) | {"reward_mean": reward})
    result = analyze(tmp_path / "runs", tmp_path / "out")
    assert any("reward is not a number in 1 of 3 steps (first: 3)" in m for m in result.messages)
    row = result.summary.set_index("metric").loc["reward, last third"]
    assert math.isnan(row["mean"]) and "not a number" in result.report.read_text()


def test_a_run_still_being_written_is_used_and_named(tmp_path, quick):
    run = write_tiny(tmp_path / "runs/a", status="running")
    with RunLock(run):
        result = analyze(tmp_path / "runs", tmp_path / "out")
    assert any("a is not finished (running, 3 steps)" in m for m in result.messages)
    assert "reward" in result.figures


def test_several_folders_of_equal_names_stay_apart(tmp_path, quick):
    write_tiny(tmp_path / "x/a", seed=0)
    write_tiny(tmp_path / "y/a", seed=1)
    result = analyze([tmp_path / "x", tmp_path / "y"], tmp_path / "out")
    assert set(result.summary["runs"]) == {2}
    assert len(pd.read_csv(result.tables["runs"])) == 2


def test_hostile_names_reach_neither_markdown_nor_file_names(tmp_path, quick):
    name = "<script>alert(1)</script>|$x$ ../../up [a](b)"
    write_tiny(tmp_path / "runs/a", method=name)
    write_tiny(tmp_path / "runs/b", task="../../<b>")
    result = analyze(tmp_path / "runs", tmp_path / "out")
    text = result.report.read_text()
    assert "<script>" not in text and "\\<script\\>" in text and "[a](b)" not in text
    assert all(path.parent == tmp_path / "out" for paths in result.figures.values() for path in paths)
    assert escape_markdown("a\nb\x1b[31m|") == "a b [31m\\|"


def test_a_report_is_the_same_when_made_again(tmp_path, quick):
    write_tiny(tmp_path / "runs/a")
    first, second = (analyze(tmp_path / "runs", tmp_path / folder) for folder in ("a", "b"))
    for name in ("report.md", "summary.csv", "runs.csv"):
        assert (first.out / name).read_bytes() == (second.out / name).read_bytes()

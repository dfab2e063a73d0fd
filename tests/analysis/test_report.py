"""What a report says of its own content: to which step a pair is compared, which spikes there are, why text is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sharpscope.analysis import analyze
from sharpscope.analysis.html.tokens import token_view
from sharpscope.analysis.reduction import reduce_run
from sharpscope.analysis.report import difference_grid, no_spikes, not_kept
from sharpscope.analysis.study import studies
from sharpscope.traces import load_run, load_runs
from tests.analysis.html.runs import SPIKE, STEPS, write_report_run


def test_every_pair_says_its_own_step_and_what_is_not_finished(tmp_path: Path):
    for seed in (0, 1):
        write_report_run(tmp_path / f"grpo-s{seed}", seed=seed, tokens=False)
    write_report_run(tmp_path / "grpo-sg-s0", "grpo-sg", tokens=False, status="failed", steps=5)
    write_report_run(tmp_path / "grpo-sg-s1", "grpo-sg", seed=1, tokens=False, status="interrupted")
    (study,) = studies(load_runs(tmp_path))
    grid = difference_grid(study)
    assert grid.columns[:4] == ("runs", "seed", "last step", "quantity")
    steps = {(row[0], row[2]) for row in grid.rows}
    assert steps == {("grpo-sg-s0 − grpo-s0", "5"), ("grpo-sg-s1 − grpo-s1", str(STEPS))}
    assert "At step" not in grid.note and grid.note.startswith("Each pair up to the last step that both have.")
    assert (
        "grpo-sg-s0 is not finished (failed)." in grid.note and "grpo-sg-s1 is not finished (interrupted)." in grid.note
    )


@pytest.fixture(scope="module")
def reduced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two reduced runs, one with a spike."""
    folder = tmp_path_factory.mktemp("reduced")
    for method in ("grpo", "grpo-sg"):
        whole = write_report_run(folder / "whole" / f"{method}-s0", method, spike=method == "grpo")
        reduce_run(load_run(whole), folder / "runs" / f"{method}-s0", tokens=40)
    return folder / "runs"


def test_the_page_of_reduced_runs_lists_the_spikes_that_report_md_lists(reduced: Path, tmp_path: Path, quick):
    made = analyze(reduced, tmp_path / "out")
    html, markdown = made.html.read_text(encoding="utf-8"), made.report.read_text(encoding="utf-8")
    (section,) = re.findall(r'<section id="spikes".*?</section>', html, re.DOTALL)
    assert f"<td>grpo-s0</td><td>{SPIKE}</td>" in section and f"| grpo-s0 | {SPIKE} |" in markdown
    assert '<a href="#spikes">' in html and "A token leads to its completion" not in section
    assert "No completion was recorded" not in html and "no completions were recorded" not in html
    said = "Completions of these runs were not kept by `export --to reduced`"
    (tokens,) = re.findall(r'<section id="tokens".*?</section>', html, re.DOTALL)
    assert said in section and said in tokens and said in markdown.replace("\\", "")


def test_reduced_runs_beside_whole_ones_are_told_apart(reduced: Path, tmp_path: Path):
    write_report_run(tmp_path / "whole-s1", seed=1)
    silent = write_report_run(tmp_path / "silent-s2", seed=2)
    for part in (silent / "traces" / "rollouts").iterdir():
        part.unlink()
    runs = {run.name: run for folder in (reduced, tmp_path) for run in load_runs(folder)}
    notes = token_view(runs)["notes"]
    assert "grpo-s0: its completions were not kept by `export --to reduced`." in notes
    assert "silent-s2: no completions were recorded (recording.rollouts_every)." in notes
    assert not_kept(load_runs(tmp_path)) == "" and no_spikes(load_runs(reduced)) == "No spike."
    assert no_spikes(load_runs(tmp_path)) == "No spike, and no attribution is recorded."


def test_a_page_without_spikes_says_so(tmp_path: Path, quick):
    write_report_run(tmp_path / "runs" / "grpo-s0", spike=False, tokens=False)
    made = analyze(tmp_path / "runs", tmp_path / "out")
    said = "No spike, and no attribution is recorded."
    assert said in made.html.read_text(encoding="utf-8") and said in made.report.read_text(encoding="utf-8")

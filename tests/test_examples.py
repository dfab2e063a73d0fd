"""The examples in the docstrings of the public functions run and print what they say."""

from __future__ import annotations

import ast
import contextlib
import doctest
import functools
import importlib
import importlib.util
import json
import math
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import sharpscope
import sharpscope.config
import sharpscope.tasks.custom
from sharpscope.cli import app
from tests.loops import some

ALIASES = {"__version__", "record"}


@pytest.mark.parametrize("name", sorted(set(sharpscope.__all__) - ALIASES))
def test_public_function_has_an_example_that_runs(name, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])
    (found,) = [
        test
        for test in doctest.DocTestFinder(recurse=False).find(getattr(sharpscope, name), name)
        if test.examples
    ]
    output: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(
        found, out=output.append
    )
    assert result.failed == 0, "".join(output)


ROOT = Path(__file__).resolve().parents[1]


def test_readme_is_short_and_its_terminal_picture_is_current():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 90
    spec = importlib.util.spec_from_file_location("screenshots", ROOT / "docs" / "screenshots.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = (ROOT / "docs" / "images" / "tokens.svg").read_text("utf-8")
    assert module.terminal() == made, (
        "the output has changed; run `python docs/screenshots.py` and look at the pictures"
    )
    assert 'url("http' not in made  # fonts of another host


def text_of(page: str) -> str:
    """A page's text on one line."""
    return " ".join((ROOT / page).read_text("utf-8").split())


def test_the_effects_of_the_readme_are_those_of_the_leaderboard():
    lines = (ROOT / "experiments/attribution/math.jsonl").read_text("utf-8").splitlines()
    plain = [row for row in map(json.loads, lines) if row["setting"] == "plain"]
    columns = ["kind", "outcome", "score", "rank", "slope"]
    ranks = pd.concat([pd.DataFrame(row["ranks"], columns=columns) for row in plain])
    ranks = ranks[ranks["kind"] != "single tokens"]
    means = ranks.groupby(["score", "outcome", "kind"])["rank"].mean()
    means = means.groupby(["score", "outcome"]).mean()
    names = {
        "**effect**, through clipping and AdamW": "effect",
        "gradient similarity, lr·c⟨∇log π, ∇Q⟩": "SGD",
        "share of ‖∇L‖²": "share",
        "random": "random",
    }
    readme = text_of("README.md")
    for shown, score in names.items():
        values = [means[score, q] for q in ("kl", "entropy", "heldout", "sharpness")]
        cells = [f"{value:.2f}".replace("-", "−") for value in values]
        bold = "**" if score == "effect" else ""
        assert f"| {shown} | " + " | ".join(f"{bold}{c}{bold}" for c in cells) + " |" in readme
    seeds = len({row["seed"] for row in plain})
    assert f"{len(plain)} updates of {seeds} seeds" in readme


def test_the_other_numbers_of_the_readme_are_those_of_the_pages_behind_them():
    readme, causes = text_of("README.md"), text_of("docs/causes.md")
    assert "33 trainings with a planted cause that have a log, and the 12 controls" in causes
    assert "33 short trainings with one planted bug each, and 12 healthy ones" in readme
    for ours, theirs in {
        "**sharpscope**, recorded | **33** | 0 |": "from a recorded run | 33 | 33 of 33 / 0 of 12 |",
        "from the log alone | 9, and 2 as one of two | 0 |": "from the log | 9, and 2 as one of two |",
        "| 0; 0; 0 | 10; 0; 0 |": "| rldoctor 0.2.0 | 0 | 29 of 33 / 10 of 12 |",
    }.items():
        assert ours in readme and theirs in causes
    for tool in ("rlwatch 0.5.1", "rlprobe 0.1.0"):
        assert re.search(rf"\| {tool} \| 0 \| \d of 33 / 0 of 12 \|", causes) and tool in readme
    page = (ROOT / "docs/explanations/what-methods-do.md").read_text("utf-8")
    cells = [line.split("|") for line in page.splitlines() if line.startswith("| ")]
    first = {row[1].strip(" `"): row[2].strip() for row in reversed(cells)}  # of the first table
    angle, low, high = re.match(r"([\d.]+) \(([\d.]+)–([\d.]+)\)", first["grpo-sg"]).groups()
    noise = first["noise of the batch"].split()[0]
    assert f"turns the gradient by {angle}° ({low} to {high}° over four batches)" in readme
    assert f"randomness of a batch turns it by {noise}°" in readme
    prices = text_of("docs/trainers/index.md")
    assert "32 completions of at most 64 tokens | 60 | 1.51 |" in prices
    assert (
        "a tiny model, recorded over not; of 20 steps of one of 10.7 M parameters | 1.5; 1.15 |"
        in readme
    )
    assert "1.15 × the time without the recorder" in text_of("docs/trainers/index.md")


def test_the_page_of_claims_lists_them_with_their_margins_and_sources():
    from sharpscope.analysis.claims.base import margin_text
    from sharpscope.analysis.claims.registry import CLAIMS

    page = (ROOT / "docs/explanations/claims.md").read_text("utf-8")
    names = {"treatment": "the treatment", "baseline": "the baseline"}
    rows = [
        f"| {c.name} | {c.title.format(**names)} | {margin_text(c.margin, c.scale)} | {c.source} |"
        for c in CLAIMS.values()
    ]
    assert "\n".join(rows) + "\n\n" in page


# -- The verdicts and p-values on the pages of the studies are those of the kept runs


@pytest.mark.parametrize(
    "study, runs", [("1", "reference"), ("2", "studies/2/runs"), ("3", "studies/3/runs")]
)
def test_the_kept_runs_give_the_published_verdicts(study: str, runs: str):
    folder = ROOT / "experiments" / "studies" / study
    arguments = [
        "study",
        "claims",
        str(ROOT / "data" / runs),
        "--study",
        str(folder / "study.yaml"),
        "--json",
    ]
    found = json.loads(CliRunner().invoke(app, arguments).stdout)["verdicts"]
    published = json.loads((folder / "results" / "claims.json").read_text())
    stored = {(row["claim"], row["version"]): row for row in published}
    # untestable, and judged no longer
    dropped = {("C5", ""), ("C11", "")} if study != "3" else set()
    assert {(row["claim"], row["version"]) for row in found} == set(stored) - dropped
    for after in some(found):
        before = stored[after["claim"], after["version"]]
        for one, other in ((after, before), (after["other"], before["other"])):
            if one is not None:
                assert numbers(one) == pytest.approx(numbers(other), rel=1e-6, nan_ok=True), one[
                    "claim"
                ]
                assert (one["verdict"], one["n"]) == (other["verdict"], other["n"]), one["claim"]


def numbers(verdict: dict[str, Any]) -> list[float]:
    """p-values, effect and interval; NaN where there is none."""
    effect = verdict["effect"] or {}
    ends = effect.get("interval") or {}
    values = (
        verdict["p_value"],
        verdict["p_refuted"],
        effect.get("value"),
        ends.get("low"),
        ends.get("high"),
    )
    return [math.nan if value is None else value for value in values]


# -- Every notebook under docs/tutorials runs from top to bottom on the example traces, and the numbers of its answer hold

NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


SHORT = ("does_my_weighting_act", "how_sharp_is_my_checkpoint")
"""Run with the first layer of the policy alone."""
FEWER = {"explore_traces": ("STEPS = 40\n", "STEPS = 3\n")}
"""A notebook that trains, and the line that makes its training short here; it keeps its first numbers for the full one."""


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In this process, which has imported torch: starting a kernel takes longer than most of them."""
    shutil.copytree(ROOT / "data" / "example", tmp_path / "data" / "example")
    (tmp_path / "data" / "studies").symlink_to(ROOT / "data" / "studies")  # large, and only read
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", functools.partial(here, subprocess.run))
    if notebook.stem in SHORT:
        load = AutoModelForCausalLM.from_pretrained

        def cut(*args: Any, **options: Any) -> Any:
            found = load(*args, **options)
            model = found[0] if isinstance(found, tuple) else found
            del model.model.layers[1:]
            model.config.num_hidden_layers = 1
            return found

        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", cut)
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    if notebook.stem in FEWER:
        assert FEWER[notebook.stem][0] in sources[0]
        sources[0] = sources[0].replace(*FEWER[notebook.stem])
    for source in some(sources):
        run_cell(source, names)


def here(elsewhere: Any, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """What `sharpscope …` prints, without a process of its own."""
    if command[0] != "sharpscope":
        return elsewhere(command, **options)
    with contextlib.chdir(options["cwd"]):
        done = CliRunner().invoke(app, command[1:], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return subprocess.CompletedProcess(command, done.exit_code, done.stdout)


def run_cell(source: str, names: dict[str, Any]) -> None:
    """Run a cell and, as a notebook does, make the HTML or the text of what its last line gives."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        getattr(value, "_repr_html_", getattr(value, "_repr_png_", value.__repr__))()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_shipped_with_its_output(notebook: Path):
    """`jupyter nbconvert --to notebook --execute --inplace docs/tutorials/NAME.ipynb` makes it."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert cells[0]["source"][0].startswith("# ") and cells[0]["source"][0].strip().endswith("?")
    assert len([cell for cell in code if cell["outputs"]]) > len(code) / 2 and "assert" in "".join(
        code[-1]["source"]
    )
    assert not [
        output for cell in code for output in cell["outputs"] if output["output_type"] == "error"
    ]

"""Shortened trainings of the bug zoo, from the training to the first lines of `show` and `diagnose`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from experiments.zoo import causes, controls, more  # noqa: F401 - they register the cases
from experiments.zoo.bases import Place
from experiments.zoo.judge import judged
from experiments.zoo.registry import CASES
from sharpscope.causes import verdict
from sharpscope.cli import app
from sharpscope.traces import load_run

QUICK = {"loop_template": 3, "loop_adv_flip": 4, "sft_no_end": 2, "loop_prompt_loss": 1}
"""Case -> steps after which its cause must be named."""
BEYOND = {"healthy_smollm2", "healthy_packing", "healthy_tools"}


def first(case, tmp_path, steps):
    CASES[case].run(Place(folder=tmp_path / f"{case}-0", seed=0, steps=steps))
    return verdict(load_run(tmp_path / f"{case}-0" / "run")).causes


def shown(*arguments):
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.may_stop
@pytest.mark.parametrize("case", QUICK)
def test_a_shortened_run_names_its_cause_in_show_and_diagnose(case, tmp_path):
    found = first(case, tmp_path, QUICK[case])
    run = tmp_path / f"{case}-0" / "run"
    assert found[0].name == CASES[case].truth
    start = " ".join(shown("show", run).split()[:40])
    assert start.startswith("Cause") and " ".join(found[0].sentence.split()[:8]) in start
    assert found[0].sentence in shown("diagnose", run).splitlines()[0]
    told = json.loads(shown("diagnose", run, "--json"))
    assert told["causes"][0]["sentence"] == found[0].sentence == told["finding"]


def test_a_short_healthy_run_names_no_cause(tmp_path):
    assert first("healthy_loop", tmp_path, 3) == []
    assert [run.named() for run in judged(tmp_path, [0])] == [[]]
    run = tmp_path / "healthy_loop-0" / "run"
    held = verdict(load_run(run)).count
    count = int(held.split()[0])
    assert count > 20 and held == f"{count} identities checked, {count} hold"
    line = shown("diagnose", run).splitlines()[0]
    said = f"No cause is seen in 3 steps: {held}. The curves need 5 steps or more."
    assert line == f"{run}: {said}"
    assert json.loads(shown("diagnose", run, "--json"))["finding"] == said


@pytest.mark.slow
@pytest.mark.may_stop
@pytest.mark.parametrize("case", [name for name in CASES if name not in BEYOND])
def test_every_case_of_the_zoo(case, tmp_path):
    found = first(case, tmp_path, None)
    assert [cause.name for cause in found[:1]] == [CASES[case].truth][
        : CASES[case].truth is not None
    ]

"""The worked examples of CONTRIBUTING.md and of the guide to token weights do what they say."""

from __future__ import annotations

import math
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import yaml

from sharpscope.analysis import measures
from sharpscope.analysis import study as study_of_runs
from sharpscope.analysis.claims import base, registry
from sharpscope.cli import main
from sharpscope.config.run import ProbesSpec
from sharpscope.methods import describe, named_method
from sharpscope.methods import named as methods
from sharpscope.methods.token_weights import Weighting
from sharpscope.surface import runner
from sharpscope.surface.estimate import Estimate
from tests.analysis.claims.planted import frame_run
from tests.analysis.claims.planted import study as planted
from tests.methods.data import as_batch, make_case, step_of, weights_of
from tests.methods.test_objective import compare
from tests.models import all_scored, small_model
from tests.oracles import objective as oracle

ROOT = Path(__file__).parents[1]


def blocks(page: str, heading: str) -> list[str]:
    """The code of a section of a page."""
    section = (
        (ROOT / page).read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    )
    return [
        textwrap.dedent(code) for code in re.findall(r"```\w+\n(.*?)```", section, flags=re.DOTALL)
    ]


def test_a_named_method_is_a_value_a_text_and_an_equation(monkeypatch, capsys):
    text, equation = blocks("CONTRIBUTING.md", "Add a method")
    note = methods.method_note("sqrt-grpo", **yaml.safe_load(text)["sqrt-grpo"])
    method = note.method
    monkeypatch.setitem(methods.methods(), method.name, note)
    assert describe("sqrt-grpo").differs == "Unlikely tokens weigh less."
    with pytest.raises(SystemExit):
        main(["methods", "sqrt-grpo"])
    assert "w = √π_old" in capsys.readouterr().out
    equations: dict[str, list] = {}
    exec(equation, {"ORACLES": equations, "oracle": oracle, "math": math})
    (loss,) = equations["sqrt-grpo"]
    case = make_case(method, 0)
    compare(named_method("sqrt-grpo"), case, loss(as_batch(case)), 0, 0)
    assert named_method("sqrt-grpo-shuffled").weight.of == method.weight


def test_a_weighting_is_one_class():
    code, check = blocks("CONTRIBUTING.md", "Add a token weight")
    names: dict[str, Any] = {"Weighting": Weighting, "Literal": Literal, "Any": Any}
    exec(code, names)
    exec(
        check,
        names | {"weights_of": weights_of, "step_of": step_of, "math": math, "pytest": pytest},
    )


@pytest.mark.parametrize(
    ("change", "expected"), [(0.7, "supported"), (1.0, "refuted"), (1.3, "refuted")]
)
def test_a_claim_is_one_object(monkeypatch, change, expected):
    """The claim of the page on planted lengths: shorter by 30 %, equal, and longer."""
    (code,) = blocks("CONTRIBUTING.md", "Add a claim")
    names = {**vars(base), **vars(measures), **vars(study_of_runs), "Run": Any}
    exec(f"from __future__ import annotations\n{code}", names)
    claim = names["C15"]
    monkeypatch.setitem(registry.CLAIMS, claim.name, claim)
    rng, runs = np.random.default_rng(0), []
    for seed in range(10):
        length = 100 * np.exp(rng.normal(0, 0.1))
        for method, factor in (("grpo", 1.0), ("grpo-sg", change)):
            noise = np.exp(rng.normal(0, 0.02))
            runs.append(
                frame_run(method, seed, columns={"completion_length_mean": length * factor * noise})
            )
    ((verdict,), _) = registry.judge(registry.study_of(planted(*runs)), ["C15"])
    assert verdict.verdict == expected


def test_a_probe_is_one_function(monkeypatch):
    function, check = blocks("CONTRIBUTING.md", "Add a probe")
    names: dict[str, Any] = {
        "Point": runner.Point,
        "Iterator": Iterator,
        "Estimate": Estimate,
        "math": math,
    }
    exec(function, names)
    monkeypatch.setitem(runner.PROBES, "weights", names["weight_norm"])
    model, spec = small_model().double(), ProbesSpec(rho=0.05)
    given = all_scored(torch.tensor([[1, 2, 3, 4]]))
    results = runner.run(model, [runner.ProbeBatch("x", (given,))], spec)
    rows = [row for result in results for row in result.estimates]
    assert {"loss", "gradient_norm", "sam"} <= {row.quantity for row in rows}
    exec(check, {"rows": rows, "model": model, "torch": torch, "pytest": pytest})


def test_own_weights_of_the_guide(tmp_path, monkeypatch, capsys):
    """The file of the guide, its test, and every command of the guide that needs no training."""
    file, commands, check = blocks("docs/guides/methods.md", "Your own token weights")
    (tmp_path / "mine.py").write_text(file)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    exec(check, {})
    assert named_method("mine:flat_top").weight.bounds == (0.5, 1.0)
    assert all("mine:flat_top" in line for line in commands.strip().splitlines())
    with pytest.raises(SystemExit) as ended:
        main(["methods", "flat=mine:flat_top"])
    assert ended.value.code == 0 and "mine:flat_top" in capsys.readouterr().out
    del sys.modules["mine"]

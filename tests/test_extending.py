"""The worked examples of CONTRIBUTING.md and of the guide to token weights do what they say."""

from __future__ import annotations

import math
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import yaml

from sharpscope.cli import main
from sharpscope.config import Method, describe, methods, named_method
from sharpscope.config.token_weights import PowerWeight
from sharpscope.config.weighting import Weighting
from tests.objective.data import as_batch, make_case, step_of, weights_of
from tests.objective.test_objective import compare
from tests.oracles import objective as oracle

ROOT = Path(__file__).parents[1]


def blocks(page: str, heading: str) -> list[str]:
    """The code of a section of a page."""
    section = (ROOT / page).read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [textwrap.dedent(code) for code in re.findall(r"```\w+\n(.*?)```", section, flags=re.DOTALL)]


def test_a_named_method_is_a_value_a_text_and_an_equation(monkeypatch, capsys):
    value, text, equation = blocks("CONTRIBUTING.md", "Add a method")
    method = eval(value.strip(), {"Method": Method, "PowerWeight": PowerWeight})
    monkeypatch.setitem(methods.METHODS, method.name, method)
    monkeypatch.setitem(methods._texts(), method.name, yaml.safe_load(text)[method.name])
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
    names: dict[str, Any] = {"Weighting": Weighting, "Literal": Literal, "ClassVar": ClassVar, "Any": Any}
    exec(code, names)
    exec(check, names | {"weights_of": weights_of, "step_of": step_of, "math": math, "pytest": pytest})
    assert names["RootWeight"]().pointwise


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
        main(["config", "--yaml", "--method", "flat=mine:flat_top"])
    assert ended.value.code == 0 and "label: flat\n" in capsys.readouterr().out
    del sys.modules["mine"]

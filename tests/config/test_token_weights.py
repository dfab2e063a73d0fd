"""Functions of the user's own as token weights, and schedules."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from sharpscope import weight_bounds
from sharpscope.config import Schedule
from sharpscope.config.token_weights import CustomWeight, LinearWeight, ReverseWeight, ShuffledWeight, SigmoidWeight
from sharpscope.errors import UserError
from sharpscope.objective import Method, StepTensors, named_method, token_weights
from tests.objective.data import step_of, weights_of


@weight_bounds(0.5, 1.0)
def gentle(step: StepTensors, power: float = 0.5) -> torch.Tensor:
    """0.5 + π^power/2."""
    return 0.5 + (power * step.logp).exp() / 2


def test_a_function_works_and_keeps_what_it_declares():
    weight = CustomWeight(function=f"{__name__}:gentle", arguments={"power": 1.0})
    assert weights_of(weight, step_of(logp=[0.0, math.log(0.5)])) == pytest.approx([1.0, 0.75])
    assert weight.bounds == (0.5, 1.0)
    assert weights_of(ReverseWeight(of=weight), step_of(logp=[0.0])) == pytest.approx([0.5])
    with pytest.raises(UserError, match="0 <= low < high"):
        weight_bounds(2.0, 1.0)
    logp = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    step = step_of(logp=[-1.0])
    assert not token_weights(weight, type(step)(**(vars(step) | {"logp": logp}))).requires_grad


def test_a_function_by_import_path_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_weights.py").write_text("def steep(step):\n    return step.logp.exp() ** 2\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    weight = CustomWeight(function="my_weights:steep")
    assert sys.path == before
    assert weights_of(weight, step_of(logp=[math.log(0.5)])) == pytest.approx([0.25])
    assert weight.bounds is None
    del sys.modules["my_weights"]


BAD = {
    "shape": (
        lambda step: step.logp[:, 0],
        r"of shape \(2,\) and type torch.float64; it must be a float tensor \(N, T\) = \(2, 1\)",
    ),
    "sign": (lambda step: step.logp, "negative weights"),
    "nan": (lambda step: step.logp * torch.nan, "not finite"),
    "integer": (lambda step: torch.ones(2, 1, dtype=torch.long), "torch.int64; it must be a float tensor"),
    "type": (lambda step: 1.0, "returned float of shape"),
    "raise": (lambda step: 1 / 0, "raised ZeroDivisionError"),
    "bounds": (lambda step: step.logp * 0 + 7.0, r"declares weights in \[0.0, 1.0\] but returned \[7, 7\]"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_function_that_is_wrong_is_named_with_the_reason(what: str, monkeypatch: pytest.MonkeyPatch):
    function, message = BAD[what]
    function = weight_bounds(0.0, 1.0)(function) if what == "bounds" else function
    monkeypatch.setattr(sys.modules[__name__], "bad", function, raising=False)
    with pytest.raises(UserError, match=message) as error:
        token_weights(CustomWeight(function=f"{__name__}:bad"), step_of(logp=[-1.0, -2.0]))
    assert "\n" not in str(error.value) and f"{__name__}:bad" in str(error.value)


def test_schedules_are_resolved_everywhere_and_checked_at_both_ends():
    assert named_method("grpo").at(0.5) is named_method("grpo")
    deep = Method(name="x", weight=ShuffledWeight(of=LinearWeight(alpha=Schedule(start=0.0, end=1.0))))
    assert deep.at(0.5).weight.of.alpha == 0.5
    for ends in ((0.0, 1.5), (-0.5, 1.0)):
        with pytest.raises(ValidationError):
            Method(name="x", weight=LinearWeight(alpha=Schedule(start=ends[0], end=ends[1])))
    with pytest.raises(ValidationError, match="below"):
        Method(name="x", weight=SigmoidWeight(alpha=2.0, L=Schedule(start=0.5, end=2.0)))

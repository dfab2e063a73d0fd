"""Weightings that users register or name by import path."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from sharpscope.config.custom_weights import find_token_weight
from sharpscope.config.token_weights import (
    CustomWeight,
    ReverseWeight,
)
from sharpscope.errors import UserError
from sharpscope.objective import (
    StepTensors,
    register_shaping,
    token_weights,
)
from tests.objective.data import step_of, weights_of


@register_shaping("test-gentle", pointwise=True, bounds=(0.5, 1.0))
def gentle(step: StepTensors, power: float = 0.5) -> torch.Tensor:
    """0.5 + π^power/2."""
    return 0.5 + (power * step.logp).exp() / 2


def test_a_registered_shaping_works_and_keeps_its_promises():
    weight = CustomWeight(function="test-gentle", arguments={"power": 1.0})
    assert weights_of(weight, step_of(logp=[0.0, math.log(0.5)])) == pytest.approx([1.0, 0.75])
    assert weight.pointwise
    assert weight.bounds == (0.5, 1.0)
    assert weights_of(ReverseWeight(of=weight), step_of(logp=[0.0])) == pytest.approx([0.5])
    by_path = CustomWeight(function=f"{__name__}:gentle")
    assert by_path.pointwise


def test_a_shaping_by_import_path_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_weights.py").write_text("def steep(step):\n    return step.logp.exp() ** 2\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    weight = CustomWeight(function="my_weights:steep")
    assert sys.path == before
    assert weights_of(weight, step_of(logp=[math.log(0.5)])) == pytest.approx([0.25])
    assert not weight.pointwise
    assert weight.bounds is None
    del sys.modules["my_weights"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("test-gentel", "did you mean 'test-gentle'"),
        ("no_such_module_here:f", "importing 'no_such_module_here' failed"),
        ("math:no_such_function", "has no function 'no_such_function'"),
        ("math:pi", "has no function 'pi'"),
    ],
)
def test_a_name_that_leads_nowhere_is_one_clear_line(name: str, message: str):
    with pytest.raises(UserError, match=message) as error:
        CustomWeight(function=name)
    assert "\n" not in str(error.value)


BAD = {
    "shape": (lambda step: step.logp[:, 0], r"shape \(2,\); it must be \(N, T\) = \(2, 1\)"),
    "sign": (lambda step: step.logp, "negative weights"),
    "nan": (lambda step: step.logp * torch.nan, "not finite"),
    "integer": (lambda step: torch.ones(2, 1, dtype=torch.long), "floating-point"),
    "type": (lambda step: 1.0, "returned float"),
    "raise": (lambda step: 1 / 0, "raised ZeroDivisionError"),
    "bounds": (lambda step: step.logp * 0 + 7.0, r"declares weights in \[0.0, 1.0\] but returned \[7, 7\]"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_shaping_that_is_off_says_how(what: str):
    function, message = BAD[what]
    register_shaping(f"test-bad-{what}", bounds=(0.0, 1.0) if what == "bounds" else None)(function)
    with pytest.raises(UserError, match=message) as error:
        token_weights(CustomWeight(function=f"test-bad-{what}"), step_of(logp=[-1.0, -2.0]))
    assert "\n" not in str(error.value)
    assert f"test-bad-{what}" in str(error.value)


def test_names_cannot_be_taken_twice_or_look_like_paths():
    with pytest.raises(UserError, match="already taken"):
        register_shaping("test-gentle")(lambda step: step.logp)
    with pytest.raises(UserError, match="colon"):
        register_shaping("a:b")
    with pytest.raises(UserError, match="0 <= L < U"):
        register_shaping("test-bounds", bounds=(2.0, 1.0))
    register_shaping("test-gentle", pointwise=True, bounds=(0.5, 1.0))(gentle)  # a module that is imported again
    assert find_token_weight("test-gentle").function is gentle


def test_a_custom_weight_never_carries_a_gradient():
    logp = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    step = step_of(logp=[-1.0])
    step = type(step)(**(vars(step) | {"logp": logp}))
    assert not token_weights(CustomWeight(function="test-gentle"), step).requires_grad

"""`--token-weights`: a control applies to user-defined weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sharpscope.config import build_config
from sharpscope.errors import UserError
from sharpscope.objective import named_method, token_weights
from tests.objective.data import make_case

OWN = "tests.toy_shaping:by_probability"


def weight_of(method: str, shaping: str, *overrides: str):
    return build_config(None, overrides, {"method": method}, shaping).method.weight


def weights(method: str, *overrides: str):
    """The step, the shaping's own weights and those of the method made of it."""
    step = make_case(named_method("grpo-sg"), garbage=False).step
    plain = token_weights(weight_of("grpo-sg", OWN), step)
    return step, plain, token_weights(weight_of(method, OWN, *overrides), step, torch.Generator().manual_seed(0))


def test_a_shuffled_control_has_ones_own_weights_in_another_order():
    step, plain, shuffled = weights("grpo-sg-shuffled", "method.weight.matched=tokens")
    assert not torch.equal(shuffled, plain)
    for row, (own, other) in enumerate(zip(plain, shuffled, strict=True)):
        assert torch.equal(own[step.mask[row]].sort().values, other[step.mask[row]].sort().values)


def test_the_other_controls_are_made_of_ones_own_weights():
    step, plain, reverse = weights("grpo-sg-reverse")
    mask = step.mask
    torch.testing.assert_close(reverse[mask], 2.0 - plain[mask])
    mean = (step.gradient_mass * plain)[mask].sum() / step.gradient_mass[mask].sum()
    _, _, constant = weights("grpo-sg-constant")
    torch.testing.assert_close(constant[mask], mean.expand(int(mask.sum())))
    _, _, mean_one = weights("grpo-sg-mean-one")
    torch.testing.assert_close(mean_one[mask], plain[mask] / mean)
    _, _, drawn = weights("grpo-sg-shuffled")
    torch.testing.assert_close((step.gradient_mass * drawn)[mask].sum() / step.gradient_mass[mask].sum(), mean)
    inner = weight_of("grpo-sg-shuffled-mean-one", OWN)
    assert (inner.kind, inner.of.kind, inner.of.of.function) == ("mean_one", "shuffled", OWN)


def test_a_control_of_ones_own_shaping_is_named_so():
    config = build_config(None, (), {"method": "grpo-sg-shuffled"}, OWN)
    assert config.run_name.startswith("grpo-sg-shuffled+weight.of=custom")


def test_a_preset_reaches_the_sigmoid_inside_a_control():
    assert weight_of("grpo-sg-shuffled", "paper").of.preset == "paper"
    assert weight_of("grpo-sg", "paper", "method.weight.tau=4").tau == 4.0
    assert weight_of("grpo-sg-constant", "paper", "method.weight.of.tau=4").of.tau == 4.0


@pytest.mark.parametrize("place", ["method=grpo-sg-shuffled", "method.name=grpo-sg-shuffled"])
def test_the_method_may_be_named_anywhere(place, tmp_path: Path):
    assert weight_of("grpo", OWN, place).of.function == OWN
    assert build_config(None, [place], None, OWN).method.weight.of.function == OWN
    file = tmp_path / "run.yaml"
    file.write_text("method: {name: grpo-sg, weight: {kind: shuffled, of: {kind: sigmoid, tau: 3.0}}}")
    assert build_config(file, (), None, OWN).method.weight.of.function == OWN
    assert build_config(None, (), None, OWN).method.weight.function == OWN


@pytest.mark.parametrize(
    ("method", "shaping", "says"),
    [
        ("grpo-sg-entropy", OWN, "method grpo-sg-entropy, whose weights depend on the entropy"),
        ("grpo-sg-entropy-shuffled", "paper", "whose weights depend on the entropy"),
        ("ar-shuffled", "paper", "those of method ar-shuffled are linear"),
        ("grpo", "paper", "those of method grpo are uniform"),
        ("grpo-sg-reverse", "math:sqrt", "reverse needs a weighting with bounds"),
        ("grpo-sg", "papr", "--token-weights papr: must be paper, calibrated"),
    ],
)
def test_a_shaping_that_does_not_fit_is_refused(method, shaping, says):
    with pytest.raises(UserError, match=says):
        weight_of(method, shaping)

"""What each method is compared with, and the largest rotation that bounded weights allow, against brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharpscope.config import (
    control_names,
    method_names,
    method_rotation_bound,
    named_method,
    reference_method,
    rotation_bound,
    weight_rotation_bound,
)
from sharpscope.config.method import Kl
from sharpscope.config.token_weights import SigmoidWeight


@pytest.mark.parametrize("name", [*method_names(), *control_names()])
def test_the_reference_has_weights_1_and_no_mask(name):
    method = named_method(name)
    reference = reference_method(method)
    removed = ("tokens", "passes", "sharpness", "penalty", "correction", "entropy")
    assert reference.weight.kind == "uniform" and all(getattr(reference, part) is None for part in removed)
    assert not reference.kl.weighted
    assert type(method).model_validate(reference.model_dump()) == reference
    if method.weight.kind != "uniform":  # the weights alone are compared
        kept = ("advantage", "ratio", "clip", "aggregate")
        assert all(getattr(reference, field) == getattr(method, field) for field in kept)


@pytest.mark.parametrize("name", ["gspo", "dapo", "dr-grpo", "cispo", "rloo", "holder", "sapo", "grpo"])
def test_methods_without_weights_are_compared_with_plain_grpo(name):
    kl = Kl(coef=0.02, estimator="k1")
    reference = reference_method(named_method(name).model_copy(update={"kl": kl}))
    assert reference == named_method("grpo").model_copy(update={"kl": kl})


def test_weights_are_compared_under_the_same_aggregation_and_extra_terms_are_left_out():
    method = named_method("ar").model_copy(update={"aggregate": "token_mean", "entropy": 0.1})
    reference = reference_method(method)
    assert reference.aggregate == "token_mean" and reference.entropy is None


def rotated(weight: np.ndarray, mass: np.ndarray) -> float:
    """Angle [degrees] between Σ g_t and Σ w_t·g_t for orthogonal g_t with squared norms `mass`."""
    cosine = (weight * mass).sum() / math.sqrt((weight**2 * mass).sum() * mass.sum())
    return math.degrees(math.acos(min(cosine, 1.0)))


@given(st.floats(0.01, 5.0), st.floats(1.0, 50.0), st.integers(0, 10_000))
def test_no_weights_turn_orthogonal_gradients_beyond_the_bound(low, factor, seed):
    high = low * factor
    generator = np.random.default_rng(seed)
    bound = rotation_bound(low, high)
    for _ in range(20):
        weight = generator.choice([low, high, generator.uniform(low, high)], size=6)
        assert rotated(weight, generator.exponential(size=6) ** 4) <= bound + 1e-5


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.4), (0.8, 1.0), (0.25, 4.0)])
def test_the_bound_is_reached_by_the_worst_of_all_weights(low, high):
    shares = np.linspace(0, 1, 20_001)  # of the squared gradient at L; the rest at U
    worst = max(rotated(np.array([low, high]), np.array([share, 1 - share])) for share in shares)
    assert worst == pytest.approx(rotation_bound(low, high), abs=1e-5)
    assert rotated(np.array([low, high]), np.array([high, low])) == pytest.approx(rotation_bound(low, high), abs=1e-9)


def test_bounds_of_the_methods():
    assert rotation_bound(1.0, 1.4) == pytest.approx(9.594, abs=1e-3)
    assert rotation_bound(0.0, 1.0) == rotation_bound(1.0, math.inf) == 90.0 and rotation_bound(2.0, 2.0) == 0.0
    for name, degrees in {
        "grpo": 0.0,
        "grpo-sg": 9.594,
        "grpo-sg-reverse": 9.594,
        "grpo-sg-shuffled": 9.594,
        "grpo-sg-mean-one": 9.594,
        "grpo-sg-constant": 0.0,
        "ar": 6.379,
        "papo": 30.0,
        "cov-grpo": None,
        "cov-grpo-shuffled": None,
    }.items():
        found = weight_rotation_bound(named_method(name).weight)
        assert found is None if degrees is None else found == pytest.approx(degrees, abs=1e-3)
        alone = method_rotation_bound(named_method(name))
        assert (
            alone is None if not degrees and name != "grpo-sg-constant" else alone == pytest.approx(degrees, abs=1e-3)
        )
    assert (
        method_rotation_bound(named_method("tr-grpo")) is None
        and method_rotation_bound(named_method("ar-lopti")) is None
    )
    assert weight_rotation_bound(SigmoidWeight(U=4.0)) == pytest.approx(rotation_bound(1.0, 4.0))
    for low, high in ((-0.1, 1.0), (2.0, 1.0), (math.inf, math.inf)):
        with pytest.raises(ValueError, match="L ≤ U"):
            rotation_bound(low, high)

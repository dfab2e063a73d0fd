"""Selections of tokens and passes by value."""

from __future__ import annotations

import math

import pytest
import torch

from sharpscope.config.selections import AdvantageTokens, ClipCovTokens, HighEntropyTokens, ProbabilityTokens
from sharpscope.objective import (
    Method,
    StepTensors,
    named_method,
    prepare,
)
from tests.objective.data import tokens_step


def kept(method: Method, step: StepTensors, seed: int = 0) -> list[bool]:
    return prepare(method, step, torch.Generator().manual_seed(seed)).keep.flatten().tolist()


def test_high_entropy_keeps_the_share_and_ties():
    step = tokens_step([0.1, 0.5, 0.9, 0.5, 0.2], [-1.0] * 5, [1.0] * 5)
    method = named_method("high-entropy")
    for share, expected in ((0.2, "00100"), (0.4, "01110"), (0.6, "01110"), (0.61, "01111"), (1.0, "11111")):
        chosen = method.model_copy(update={"tokens": HighEntropyTokens(share=share)})
        assert kept(chosen, step) == [c == "1" for c in expected], share


def test_probability_and_advantage_split_the_tokens_in_two():
    step = tokens_step([0.0] * 5, [math.log(p) for p in (0.1, 0.49, 0.5, 0.9, 0.2)], [1.0, -1.0, 1.0, -1.0, 0.0])
    method = named_method("grpo")
    for tokens, expected in (
        (ProbabilityTokens(), "11001"),
        (ProbabilityTokens(side="high"), "00110"),
        (ProbabilityTokens(threshold=0.15), "10000"),
        (AdvantageTokens(), "10100"),
        (AdvantageTokens(sign="negative"), "01010"),
    ):
        chosen = method.model_copy(update={"tokens": tokens})
        assert kept(chosen, step) == [c == "1" for c in expected], tokens


def test_clip_cov_draws_the_share_inside_the_band_and_says_when_that_is_less_than_one_token():
    # c = (ln π + 2)·(A − 0) = ±2: tokens 0 and 3 have +2, the others −2
    step = tokens_step([0.0] * 4, [0.0, 0.0, -4.0, -4.0], [1.0, -1.0, 1.0, -1.0])
    method = named_method("clip-cov")
    dropped = {tuple(kept(method, step, seed)).index(False) for seed in range(20)}
    assert dropped == {0, 3}
    assert sum(kept(method, step)) == 3
    assert "less than one token" in prepare(method, step, torch.Generator()).warnings[0]
    half = method.model_copy(update={"tokens": ClipCovTokens(share=0.75)})
    assert kept(half, step) == [False, True, True, False]  # three wanted, two in the band
    assert prepare(half, step, torch.Generator()).warnings == ()
    outside = method.model_copy(update={"tokens": ClipCovTokens(low=2.0, high=5.0)})
    assert all(kept(outside, step))
    with pytest.raises(ValueError, match="generator"):
        prepare(method, step)

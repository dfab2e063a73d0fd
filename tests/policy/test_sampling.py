"""Draws of tokens against their definition and their frequencies."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpscope.config.policy import SamplingSpec
from sharpscope.policy.sampling import completion_uniforms, draw
from tests.oracles.generation import choose, log_softmax
from tests.policy.test_generation import generator


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.integers(-80, 80), min_size=2, max_size=20, unique=True),  # tenths: no ties, whose order is free
    st.floats(0, 1, exclude_max=True),
    st.floats(0.05, 1),
    st.integers(0, 25),
    st.sampled_from([0.5, 1.0, 2.0]),
)
def test_draw_equals_its_definition(tenths, u, top_p, top_k, temperature):
    z = [value / 10 for value in tenths]
    spec = SamplingSpec(temperature=temperature, top_p=top_p, top_k=top_k)
    row = torch.tensor([z], dtype=torch.float64)
    token, behavior, sampler = draw(row, torch.tensor([u], dtype=torch.float64), spec)
    logp = log_softmax([value / temperature for value in z])
    kept_k = top_k if top_k < len(z) else 0
    # Where rounding decides (u or top_p within rounding of a cumulative sum) either neighbour is right.
    near = {
        choose(logp, min(max(u + d, 0), 1), greedy=False, top_p=p, top_k=kept_k)
        for d in (-1e-9, 0, 1e-9)
        for p in (top_p, min(1.0, top_p * (1 + 1e-9)), top_p * (1 - 1e-9))
    }
    assert int(token) in {j for j, _ in near}
    assert float(behavior) == pytest.approx(logp[int(token)], abs=1e-9)
    if top_p < 1 or kept_k:
        assert any(j == int(token) and float(sampler) == pytest.approx(value, abs=1e-6) for j, value in near)
    else:
        assert sampler is None


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.75, 0), (1.0, 3)])
def test_frequencies_follow_the_law(top_p, top_k):
    count, z = 20_000, torch.tensor([0.3, 2.0, -1.0, 1.2, 0.9])
    u = torch.rand(count, generator=generator(), dtype=torch.float64)
    token, behavior, sampler = draw(z.expand(count, 5), u, SamplingSpec(top_p=top_p, top_k=top_k))
    logp = behavior if sampler is None else sampler
    seen = torch.bincount(token, minlength=5)
    assert sum(math.exp(float(logp[token == j][0])) for j in range(5) if seen[j]) == pytest.approx(1, abs=1e-5)
    for j in range(5):
        if seen[j]:
            p = math.exp(float(logp[token == j][0]))
            assert abs(int(seen[j]) - count * p) < 5 * math.sqrt(count * p * (1 - p) + 1)


def test_streams_of_completions_are_unlike_and_uniform():
    prompts, completions = torch.arange(40).repeat_interleave(10), torch.arange(10).repeat(40)
    u = completion_uniforms(3, prompts, completions, 50)
    assert len({tuple(row) for row in u.tolist()}) == 400
    assert abs(float(u.mean()) - 0.5) < 5 * math.sqrt(1 / 12 / u.numel())
    correlation = torch.corrcoef(u)
    assert float((correlation - torch.eye(400, dtype=u.dtype)).abs().max()) < 0.75
    # (prompt 1, completion 2) and (prompt 2, completion 1) are different streams.
    swapped = completion_uniforms(3, torch.tensor([1, 2]), torch.tensor([2, 1]), 5)
    assert swapped[0].tolist() != swapped[1].tolist()

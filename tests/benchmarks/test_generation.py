"""The bench of generation: all sides generate the same tokens where nothing is left to chance; the page has the ratios."""

from __future__ import annotations

import pytest
import torch

from experiments.benchmarks import generation
from experiments.benchmarks.generation import Comparison, Generated
from sharpscope.config.policy import PolicySpec, SamplingSpec
from sharpscope.policy import decoding, load_policy


def test_all_sides_generate_the_same_tokens(tiny_policy):
    policy = load_policy(PolicySpec(model=str(tiny_policy)))
    prompts = [policy.tokenizer(text)["input_ids"] for text in ("say a", "count to ten", "b")]
    spec = SamplingSpec(top_k=1, max_new_tokens=20)  # the most likely token, whatever the random numbers
    state, direct = torch.random.get_rng_state(), decoding.why_not_direct
    counts = {
        side(policy, prompts, 2, spec, 0) for side in (generation._ours, generation._through_layers, generation._theirs)
    }
    assert len(counts) == 1 and 6 <= counts.pop() <= 120
    assert torch.equal(state, torch.random.get_rng_state()) and decoding.why_not_direct is direct


def test_tokens_after_the_end_do_not_count(tiny_policy):
    policy = load_policy(PolicySpec(model=str(tiny_policy)))
    object.__setattr__(policy, "eos_ids", tuple(range(len(policy.tokenizer))))
    assert generation._theirs(policy, [[5, 6], [7]], 3, SamplingSpec(max_new_tokens=4), 0) == 6


def test_the_page_has_ratios_of_tokens_per_second():
    sides = {
        "direct": [Generated(100, 1.0, 0.5), Generated(120, 2.0, 1.0)],
        "layers": [Generated(100, 2.0, 1.0), Generated(120, 3.0, 2.0)],
        "generate": [Generated(50, 4.0, 1.0), Generated(60, 4.0, 2.0)],
    }
    one = Comparison("embedded:x", 1000, 8, 5.0, 192, sides)
    assert one.ratios("direct", "wall") == pytest.approx([8.0, 4.0])
    settings = {"threads": 1, "torch": "t", "transformers": "h", "device": "cpu", "repeats": 2}
    page = generation.report([one], settings)
    assert "| `embedded:x` (1,000) | 8 | 5, 192 | 14, 7 | 80 | 45 | 14 | **6.0** (4.0–8.0) | 4.0 | 2.0 |" in page

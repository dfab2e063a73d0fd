"""A real language model, SmolLM2-135M-Instruct; `python -m experiments.smollm2.get FOLDER` makes it, SHARPSCOPE_SMOLLM2 names it."""

from __future__ import annotations

import os

import pytest
import torch

from experiments.smollm2.sums import sums
from sharpscope.policy import PolicySpec, SamplingSpec, generate, load_policy, render_prompts, score_completions
from sharpscope.policy.generation import left_pad
from sharpscope.tasks import Example

FOLDER = os.environ.get("SHARPSCOPE_SMOLLM2", "")


def test_sums_are_right_and_held_out_in_both_orders():
    splits = sums().splits()
    pairs = {name: {e.prompt.splitlines()[-1] for e in examples} for name, examples in splits.items()}
    assert {name: len(lines) for name, lines in pairs.items()} == {name: len(splits[name]) for name in splits}
    assert len(pairs["train"] | pairs["heldout"]) == 8100
    for line in pairs["heldout"]:
        a, _, b, _ = line.split()
        assert f"{b} + {a} =" not in pairs["train"]
    for example in splits["train"][:50]:
        a, _, b, _ = example.prompt.splitlines()[-1].split()
        assert int(a) + int(b) == int(example.answer)


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER, reason="SHARPSCOPE_SMOLLM2 names no folder with SmolLM2")
def test_generation_is_that_of_transformers_and_scored_alike():
    smollm2 = load_policy(PolicySpec(model=FOLDER, device="cpu"))
    prompts = render_prompts(
        [Example("What is 10 + 28? Answer with the number only.", ""), Example("Name a color.", "")], smollm2
    )
    ours = generate(smollm2, prompts, 2, SamplingSpec(temperature=0, max_new_tokens=12), torch.Generator())
    ids, attention = left_pad(prompts, smollm2.pad_id)
    theirs = smollm2.model.generate(ids, attention_mask=attention, do_sample=False, max_new_tokens=12)[
        :, ids.shape[1] :
    ]
    for row in range(4):
        n = int(ours.lengths[row])
        assert ours.completion_ids[row, :n].tolist() == theirs[row // 2, :n].tolist()
    again = score_completions(smollm2.model, ours, 1.0, share_prompt=True, with_grad=False).logp
    torch.testing.assert_close(again, ours.behavior_logp, atol=2e-4, rtol=1e-4)

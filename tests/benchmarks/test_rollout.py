"""The bench of conversations: both sides play the same ones where nothing is left to chance; the page says what it must."""

from __future__ import annotations

import pytest
import torch

from experiments.benchmarks import rollout
from sharpscope.config.policy import PolicySpec
from sharpscope.errors import UserError
from sharpscope.policy import SamplingSpec, load_policy
from sharpscope.tasks import Example, Reward

pytest.importorskip("bm25s", reason="needs the optional library bm25s")


class Vowels:
    """Replies to every vowel, three times."""

    name, stop = "vowels", tuple("aeiou")

    def splits(self):
        return {}

    def score(self, example, completion):
        return Reward(0.0, {}, False)

    def respond(self, example, completion):
        return "(so?)" if completion.count("(so?)") < 3 else None


def test_both_sides_play_the_same_conversations(tiny_policy):
    policy = load_policy(PolicySpec(model=str(tiny_policy)))
    examples = [Example(f"say {'a' * n} {n}:", str(n), {}) for n in range(1, 6)]
    spec = SamplingSpec(top_k=1, max_new_tokens=40)  # the likeliest token, whoever draws
    state = torch.random.get_rng_state()
    fast = rollout.together(policy, Vowels(), examples, 1, spec, 0)
    slow = rollout.one_at_a_time(policy, Vowels(), examples, spec, 0)
    assert (fast.own, fast.heard) == (slow.own, slow.heard)
    assert fast.heard > 0
    assert fast.own + fast.heard <= 40
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_page_says_what_was_measured(tiny_policy):
    found = rollout.compare_rollouts(
        prompts=2,
        group_size=2,
        slow=2,
        repeats=1,
        threads=1,
        overrides=[
            f"policy.model={tiny_policy}",
            "rollout.max_new_tokens=12",
            "task.things=40",
            "task.train_size=4",
            "task.heldout_size=2",
        ],
    )
    assert found["ratio"] == pytest.approx(found["one_at_a_time_ms"] / found["together_ms"])
    assert found["ratios"] == [pytest.approx(found["ratio"])]
    page = rollout.report(found)
    assert f"**{found['ratio']:.1f}** (required: at least 5)" in page
    with pytest.raises(UserError, match=r"--prompts 9: the task has only 4 training questions"):
        rollout.compare_rollouts(
            prompts=9,
            overrides=[f"policy.model={tiny_policy}", "task.things=40", "task.train_size=4", "task.heldout_size=2"],
            threads=1,
        )

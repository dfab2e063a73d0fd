"""pass@k against enumeration, and the standard error with prompts as clusters."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sharpscope.policy import SamplingSpec, load_policy
from sharpscope.tasks import make_task
from sharpscope.training.evaluate import evaluate, pass_at_k
from sharpscope.training.rounds import draw_completions
from sharpscope.training.seeds import derive


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_mean_over_all_subsets(k):
    correct = np.array([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 0, 0]], dtype=bool)
    subsets = list(itertools.combinations(range(5), k))
    expected = np.mean([[row[list(subset)].any() for subset in subsets] for row in correct])
    assert pass_at_k(correct, k) == pytest.approx(expected)


def test_rows_against_counting_by_hand(toy_config):
    config = toy_config()
    policy, task = load_policy(config.policy), make_task(config.task)
    rows = evaluate(
        policy,
        task,
        step=7,
        splits=("heldout", "absent"),
        prompts=5,
        temperatures=(0.0, 1.0),
        samples=3,
        spec=config.rollout,
        seed=1,
    )
    assert [(r["split"], r["level"], r["temperature"], r["k"], r["n"]) for r in rows] == [
        ("heldout", "0", 0.0, 1, 5), ("heldout", "0", 1.0, 3, 5), ("heldout", "1", 0.0, 1, 5), ("heldout", "1", 1.0, 3, 5),
    ]  # fmt: skip
    sampled = rows[1]
    examples = [e for e in task.splits()["heldout"] if e.meta["level"] == 0]
    spec = SamplingSpec(max_new_tokens=config.rollout.max_new_tokens)
    drawn = draw_completions(policy, task, examples, 3, spec, derive(1, "evaluation:heldout/0/1.0"))
    rewards = [task.score(examples[i // 3], text) for i, text in enumerate(drawn.texts)]
    correct = np.array([r.correct for r in rewards]).reshape(5, 3)
    assert sampled["accuracy"] == pytest.approx(correct.mean())
    assert sampled["std_error"] == pytest.approx(correct.mean(axis=1).std(ddof=1) / np.sqrt(5))
    assert sampled["pass_at_k"] == pytest.approx(correct.any(axis=1).mean())
    assert sampled["reward_mean"] == pytest.approx(np.mean([r.total for r in rewards]))
    assert sampled["step"] == 7

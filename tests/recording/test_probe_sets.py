"""Completions for probes: draws from softmax(z/T) of the policy itself, whatever the run samples with."""

from __future__ import annotations

import pytest
import torch

from sharpscope.policy import draw_completions, load_policy
from sharpscope.recording.probe_sets import Drawer
from sharpscope.tasks import make_task

SERVER = {"kind": "server", "url": "http://127.0.0.1:9/v1"}  # nothing listens there


def drawn(config):
    policy, task = load_policy(config.policy), make_task(config.task)
    return Drawer(config, policy, task)(task.splits()["train"][:3], 5, seed=7).rollouts


def same(one, other) -> bool:
    return torch.equal(one.input_ids, other.input_ids) and torch.equal(one.behavior_logp, other.behavior_logp)


@pytest.mark.parametrize(
    "sampling", [{"top_k": 1}, {"top_p": 0.2}, {"backend": SERVER}, {"top_p": 0.5, "top_k": 3, "backend": SERVER}]
)
def test_probes_draw_from_the_whole_distribution_of_the_policy_itself(toy_config, sampling):
    plain = drawn(toy_config(rollout__temperature=1.0))
    found = drawn(toy_config(**{f"rollout__{name}": value for name, value in sampling.items()}))
    assert same(found, plain) and found.sampler_logp is None
    assert (
        len({tuple(row) for row in plain.completion_ids[:5].tolist()}) > 1
    )  # top_k = 1 would draw one text five times


def test_without_truncation_and_server_probes_draw_as_the_run_would(toy_config):
    config = toy_config(rollout__temperature=0.7)
    policy, task = load_policy(config.policy), make_task(config.task)
    examples = task.splits()["train"][:3]
    assert same(drawn(config), draw_completions(policy, task, examples, 5, config.rollout, 7))
    assert not same(drawn(config), drawn(toy_config(rollout__temperature=1.0)))

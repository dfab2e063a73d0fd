"""Statistics in microbatches, against one plain forward pass of each row."""

from __future__ import annotations

import pytest
import torch

from sharpscope.policy import scoring
from sharpscope.policy.scoring import Scorer
from tests.policy.helpers import completions_by_hand, random_prompts, tiny_policy

COMPLETIONS = [[[3, 4, 5, 1], [6, 1]], [[7, 8, 9], [10, 11, 12, 13, 1]], [[2, 1], [14, 15, 16]]]


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("microbatch_tokens", [1, 12, 10_000])
def test_statistics_are_those_of_each_row_alone(share_prompt, microbatch_tokens):
    policy, temperature = tiny_policy(dtype=torch.float64), 0.7
    rollouts = completions_by_hand(random_prompts((3, 6, 4)), COMPLETIONS, left=2, right=1).with_reward(torch.zeros(6))
    found = Scorer(policy.model, temperature, microbatch_tokens, share_prompt).statistics(rollouts)
    expected = {"logp": torch.zeros(found.logp.shape).double(), "entropy": torch.zeros(found.logp.shape).double()}
    for row in range(len(rollouts)):
        ids = rollouts.input_ids[row][rollouts.attention_mask[row].bool()][None]
        first, length = int(rollouts.prompt_lengths[row]), int(rollouts.lengths[row])
        logp = torch.log_softmax(policy.model(input_ids=ids).logits[0].double() / temperature, dim=-1)
        for t in range(length):
            at = logp[first + t - 1]
            expected["logp"][row, t] = at[ids[0, first + t]]
            expected["entropy"][row, t] = -(at.exp() * at).sum()
    for name, values in expected.items():
        torch.testing.assert_close(getattr(found, name), values.detach(), rtol=1e-9, atol=1e-9)
    assert found.logp.dtype == torch.float64


def test_microbatches_are_smaller_where_activations_are_large(monkeypatch):
    policy = tiny_policy(dtype=torch.float32)
    rollouts = completions_by_hand(random_prompts((3, 6, 4)), COMPLETIONS).with_reward(torch.zeros(6))
    scorer = lambda: Scorer(policy.model, 1.0, 10_000, False)  # noqa: E731
    assert len(scorer().split(rollouts, torch.arange(6))[1]) == 1
    config = policy.model.config
    token = 4 * config.num_hidden_layers * (16 * config.hidden_size + 4 * config.intermediate_size)
    monkeypatch.setitem(scoring.ACTIVATION_BYTES, "cpu", 11 * token)
    assert scoring.activation_tokens(policy.model, False) == 11
    assert scoring.activation_tokens(policy.model, True) > 11
    parts = scorer().split(rollouts, torch.arange(6))[1]
    assert len(parts) > 1
    work = rollouts.lengths + rollouts.prompt_lengths
    assert all(int(work[part].sum()) <= 11 or len(part) == 1 for part in parts)

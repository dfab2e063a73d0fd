"""Token batches and objectives: padding, normalisation, clipping, rollouts as rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sharpscope.errors import UserError
from sharpscope.probes.objectives import OBJECTIVES, Objective, completion_batch, rollout_batch, token_batch
from tests.models import random_batch
from tests.oracles.curvature import functional_value


def made(name: str, **rest):
    batch = random_batch(rows=4)
    generator = torch.Generator().manual_seed(1)
    reward = torch.rand(4, generator=generator, dtype=torch.float64)
    advantage = torch.randn(4, generator=generator, dtype=torch.float64)
    anchor = -torch.rand(batch["mask"].shape, generator=generator, dtype=torch.float64)
    tokens = token_batch(
        batch["input_ids"],
        batch["attention_mask"],
        batch["mask"],
        anchor_logp=anchor,
        reward=reward,
        advantage=advantage,
    )
    return batch, reward, advantage, anchor, Objective(name, tokens, **rest)


def packed(values: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
    """Row by row: real positions first."""
    out = torch.zeros_like(values)
    for i in range(len(values)):
        real = values[i][attention[i].bool()]
        out[i, : len(real)] = real
    return out[:, : int(attention.sum(1).max())]


def test_padding_moves_to_the_end_and_nothing_else_changes():
    batch, reward, advantage, anchor, objective = made("nll")
    tokens = objective.batch
    attention = batch["attention_mask"]
    assert tokens.lengths.tolist() == attention.sum(1).tolist()
    inside = torch.arange(tokens.input_ids.shape[1]) < tokens.lengths[:, None]
    assert torch.equal(tokens.input_ids[inside], packed(batch["input_ids"], attention)[inside])
    assert torch.equal(tokens.scored, packed(batch["mask"], attention).bool())
    assert torch.equal(tokens.anchor_logp, packed(anchor * batch["mask"], attention))
    assert torch.equal(tokens.advantage, tokens.scored * advantage[:, None]) and torch.equal(tokens.reward, reward)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_shares_of_any_partition_sum_to_the_functional_written_token_by_token(name):
    batch, reward, advantage, anchor, objective = made(name)
    logp = -torch.rand(batch["mask"].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = float(functional_value(name, logp, batch["mask"], reward, advantage, anchor))
    rows = packed(logp, batch["attention_mask"])
    for partition in ([[0, 1, 2, 3]], [[0], [3, 1], [2]], [[3], [2], [1], [0]]):
        total = 0.0
        for index in partition:
            width = int(objective.batch.lengths[index].max())
            total += float(objective.row_shares(torch.tensor(index), rows[index, :width]).sum())
        assert total == pytest.approx(expected, abs=1e-12)


def test_the_clip_binds_and_can_be_left_out():
    ids = torch.tensor([[3, 4], [3, 5]])
    batch = token_batch(ids, torch.ones_like(ids), torch.tensor([[0, 1], [0, 1]]), advantage=torch.tensor([1.0, -1.0]))
    logp = torch.tensor([[0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)  # both ratios are e

    def value(**rest):
        return float(Objective("surrogate", batch, **rest).row_shares(torch.arange(2), logp).sum())

    e = float(torch.tensor(1.0, dtype=torch.float64).exp())
    assert value() == pytest.approx(-(1.2 - e) / 2)  # only the positive advantage is clipped
    assert value(clip_high=None, clip_low=None) == pytest.approx(0)
    assert value(clip_high=0.3) == pytest.approx(-(1.3 - e) / 2)


def test_anchoring_makes_every_ratio_one_unless_stale():
    _, _, advantage, _, objective = made("surrogate")
    logp = -torch.rand(objective.batch.scored.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    fresh = objective.anchored(logp)
    assert float(fresh.row_shares(torch.arange(4), logp).sum()) == pytest.approx(-float(advantage.mean()))
    stale = made("surrogate", stale=True)[-1]
    assert stale.anchored(logp) is stale


def test_some_rows_are_normalised_over_themselves():
    _, _, _, _, objective = made("nll")
    part = objective.rows(torch.tensor([2]))
    assert float(part.token_coefficient.sum()) == pytest.approx(1)
    assert len(part.batch) == 1 and part.batch.input_ids.shape[1] == int(objective.batch.lengths[2])


def test_rollouts_become_rows_with_their_loss_tokens():
    rollouts = SimpleNamespace(
        input_ids=torch.tensor([[0, 5, 6, 7, 8], [4, 5, 9, 0, 0]]),
        attention_mask=torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
        completion_mask=torch.tensor([[1, 0, 1], [1, 0, 0]]),  # the middle token came from a tool
        behavior_logp=torch.tensor([[-1.0, 0.0, -2.0], [-3.0, 0.0, 0.0]]),
        reward=torch.tensor([1.0, 0.0]),
    )
    batch = rollout_batch(rollouts, advantage=torch.tensor([[2.0, 9.0, 3.0], [4.0, 9.0, 9.0]]))
    assert batch.input_ids[0].tolist() == [5, 6, 7, 8] and batch.lengths.tolist() == [4, 3]
    assert batch.scored.tolist() == [[False, True, False, True], [False, False, True, False]]
    assert batch.anchor_logp.tolist() == [[0, -1, 0, -2], [0, 0, -3, 0]]
    assert batch.advantage.tolist() == [[0, 2, 0, 3], [0, 0, 4, 0]] and batch.reward.tolist() == [1, 0]


def test_mistakes_are_named():
    ids = torch.tensor([[3, 4]])
    ones = torch.ones_like(ids)
    with pytest.raises(UserError, match="no token is scored"):
        token_batch(ids, ones, torch.zeros_like(ids))
    with pytest.raises(UserError, match="no prefix"):
        token_batch(ids, ones, ones)
    good = token_batch(ids, ones, torch.tensor([[0, 1]]), reward=torch.tensor([2.0]))
    with pytest.raises(UserError, match="success in"):
        Objective("expected_failure", good)
    with pytest.raises(UserError, match="use one of"):
        Objective("loss", good)
    with pytest.raises(UserError, match="temperature"):
        Objective("nll", good, temperature=0)
    with pytest.raises(UserError, match="row 1: the completion is empty"):
        completion_batch([([1], [2]), ([1], [])])

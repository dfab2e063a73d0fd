"""The state that arms start from."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import sharpscope
from sharpscope.config import build_config
from sharpscope.distributed import Launch
from sharpscope.errors import UserError
from sharpscope.forks import start as starts
from sharpscope.forks.start import Start
from sharpscope.traces import RunLock
from tests.conftest import TOY
from tests.forks.starts import arm_method, rows_of, start_of


def state_of(start: Start) -> list[torch.Tensor]:
    """Everything that a snapshot must restore, as tensors."""
    found = [*start.policy.model.state_dict().values()]
    for parameter in start.snapshot.parameters:
        found += [torch.as_tensor(value) for value in start.optimizer.state.get(parameter, {}).values()]
    return copy.deepcopy(found)


def moved(start: Start) -> list[torch.Tensor]:
    """The change of the weights by an update."""
    start.update("own", 0)
    return start.snapshot.displacement()


def equal(one, two) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("step", [0, 3])
def test_restoring_is_bitwise(trained, step):
    start = start_of(trained, step)
    before, lr = state_of(start), [group["lr"] for group in start.optimizer.param_groups]
    expected = torch.rand(3)
    start.update("own", 0)
    start.policy.model.train()
    assert not equal(state_of(start), before)
    start.snapshot.restore()
    assert equal(state_of(start), before)
    assert [group["lr"] for group in start.optimizer.param_groups] == lr
    assert not start.policy.model.training and all(p.grad is None for p in start.policy.model.parameters())
    assert torch.equal(torch.rand(3), expected)


def test_an_optimizer_without_a_state_is_warmed_up_at_the_same_weights(trained):
    """AdamW's moments after two steps at a learning rate of 0 are the averages of their gradients; the weights do not move."""
    cold, warm = (start_of(trained, warm_up=steps) for steps in (0, 2))
    assert (cold.warmed, warm.warmed) == (0, 2) and not cold.optimizer.state
    for one, other in zip(cold.policy.model.parameters(), warm.policy.model.parameters(), strict=True):
        assert torch.equal(one, other)
    steps = {int(state["step"]) for state in warm.optimizer.state.values()}
    assert steps == {2 * trained.update.mini_batches}
    assert all(float(state["exp_avg_sq"].sum()) > 0 for state in warm.optimizer.state.values())
    assert {group["lr"] for group in warm.optimizer.param_groups} == {cold.lr}
    first = [torch.cat([p.flatten() for p in moved(one)]) for one in (cold, warm)]
    assert torch.nn.functional.cosine_similarity(*first, dim=0) < 0.999
    assert start_of(trained, 3).warmed == 0  # stored


def test_weights_are_calibrated_on_the_first_batch_with_a_gradient(trained, monkeypatch):
    arm = arm_method("grpo-sg+weight.preset=calibrated+weight.percentiles=gradient", trained)
    draw = Start.rollouts

    def second(start, method, batch, *args, **options):
        return draw(start, method, 1, *args, **options)

    def idle(start, method, batch, *args, **options):
        found = draw(start, method, batch, *args, **options)
        return replace(found, advantage=torch.zeros_like(found.advantage)) if batch == 0 else found

    def never(start, method, batch, *args, **options):
        return idle(start, method, 0, *args, **options)

    weights = []
    for patched in (second, idle, never):
        monkeypatch.setattr(Start, "rollouts", patched)
        weights.append(start_of(trained, sg=arm).methods["sg"].weight)
    assert weights[0].kind == "sigmoid" and weights[1] == weights[0] and weights[2].kind == "uniform"


def test_adapters_are_forked_and_nothing_else_moves(tiny_policy, tmp_path):
    pytest.importorskip("peft")
    config = build_config(
        values={**TOY, "policy.model": str(tiny_policy), "policy.lora": {"r": 2, "alpha": 4}, "method.kl.coef": 0.01}
    )
    start = start_of(config)
    before = state_of(start)
    frozen = [p.clone() for p in start.policy.model.parameters() if not p.requires_grad]
    change = moved(start)
    assert any(part.abs().max() > 0 for part in change)
    assert len(change) == sum(p.requires_grad for p in start.policy.model.parameters())
    assert equal(frozen, [p for p in start.policy.model.parameters() if not p.requires_grad])
    value = {(r["comparison"], r["outcome"]): r["value"] for r in rows_of(start)}
    assert value["step", "update_norm"] > 0 and value["kl", "kl"] > 0
    start.snapshot.restore()
    assert equal(state_of(start), before)


def test_several_processes_are_refused_by_name(trained, monkeypatch):
    monkeypatch.setattr(starts.distributed, "start", lambda device="auto": Launch(2))
    with pytest.raises(UserError, match="one process"):
        sharpscope.fork(trained.run_dir)


def test_a_run_that_is_written_is_refused(trained):
    with RunLock(trained.run_dir), pytest.raises(UserError, match="process"):
        sharpscope.fork(trained.run_dir, checkpoint=[2], methods=["grpo"], prompts=2, batches=1)

"""The recipes of docs/trainers/recipes.md on stubs that call the losses as the trainers do."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sharpscope
from sharpscope.integrations.importers import Options, import_files
from tests.integrations.test_loop import LENGTH, drawn, logps
from tests.integrations.trainers import small_model, tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "trainers" / "recipes.md"


def recipe(title: str) -> dict[str, Any]:
    """What the code block of this title defines."""
    (code,) = re.findall(rf'```python title="{title}"\n(.*?)```', PAGE.read_text("utf-8"), re.S)
    names: dict[str, Any] = {}
    exec(code, names)  # our own page
    return names


def clipped(logp: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    ratio = (logp - old).exp()
    return -(torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)) * mask).sum() / mask.sum()


class PolicyLoss(nn.Module):
    """As OpenRLHF's (models/loss.py)."""

    def forward(self, log_probs, old_log_probs, advantages, action_mask=None, rollout_log_probs=None):
        loss = clipped(log_probs, old_log_probs, advantages, action_mask)
        return loss, loss.detach(), loss.detach(), None


class Strategy:
    def optimizer_step(self, optimizer: Any, model: Any, scheduler: Any, name: str = "model") -> None:
        optimizer.step()
        optimizer.zero_grad()


class OpenRlhf:
    """As OpenRLHF's ActorPPOTrainer.training_step (trainer/ray/ppo_actor.py)."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.actor, self.actor_optim, self.tokenizer = SimpleNamespace(model=model), optimizer, tokenizer()
        self.actor_loss_fn, self.strategy = PolicyLoss(), Strategy()

    def training_step(self, experience: Any, kl_ctl: float, step: int) -> None:
        logp = logps(self.actor.model, experience.sequences, experience.attention_mask)[:, -LENGTH:]
        known = {"action_mask": experience.action_mask, "rollout_log_probs": experience.rollout_log_probs}
        loss, *_ = self.actor_loss_fn(logp, experience.action_log_probs, experience.advantages, **known)
        loss.backward()
        self.strategy.optimizer_step(self.actor_optim, self.actor, None, name="actor")


def openrlhf(model: Any, optimizer: Any, out: Path | None, patch: pytest.MonkeyPatch) -> None:
    trainer = OpenRlhf(model, optimizer)
    rec = recipe("openrlhf")["record_openrlhf"](trainer, out) if out else None
    for step in range(2):
        b = drawn(model, step)
        e = SimpleNamespace(sequences=b["ids"], attention_mask=b["attention"], action_mask=b["mask"][:, -LENGTH:])
        e.action_log_probs = e.rollout_log_probs = b["old"][:, -LENGTH:]
        e.advantages = b["advantages"][:, None].expand(-1, LENGTH)
        trainer.training_step(e, 0.0, step)
    if rec:
        rec.close()


def skyrl(model: Any, optimizer: Any, out: Path | None, patch: pytest.MonkeyPatch) -> None:
    """As SkyRL's registry of policy losses and the worker's calls (skyrl_train/utils/ppo_utils.py)."""
    losses: dict[str, Any] = {}

    class PolicyLossRegistry:
        register = staticmethod(losses.__setitem__)
        get = staticmethod(losses.__getitem__)

    def regular(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
        return clipped(log_probs, old_log_probs, advantages, loss_mask), {}

    losses["regular"] = regular
    names = "skyrl skyrl.backends skyrl.backends.skyrl_train skyrl.backends.skyrl_train.utils"
    for name in (*names.split(), "skyrl.backends.skyrl_train.utils.ppo_utils"):
        patch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["skyrl.backends.skyrl_train.utils.ppo_utils"].PolicyLossRegistry = PolicyLossRegistry
    rec = recipe("skyrl")["record_skyrl"](model, optimizer, tokenizer(), out) if out else None
    for step in range(2):
        b = drawn(model, step)
        logp = logps(model, b["ids"], b["attention"])[:, -LENGTH:]
        old, advantage = b["old"][:, -LENGTH:], b["advantages"][:, None].expand(-1, LENGTH)
        compute = losses["recorded" if rec else "regular"]
        loss, _ = compute(logp, old, advantage, config=None, loss_mask=b["mask"][:, -LENGTH:], rollout_logprobs=old)
        loss.backward()
        if rec:
            rec.step()
        optimizer.step()
        optimizer.zero_grad()
    if rec:
        rec.close()


def areal(model: Any, optimizer: Any, out: Path | None, patch: pytest.MonkeyPatch) -> None:
    """As AReaL's grpo_loss_fn (trainer/ppo/actor.py): sequences packed into one row, entry j of a value belongs to token j + 1."""
    actor: Any = ModuleType("areal.trainer.ppo.actor")

    def grpo_loss_fn(logprobs: Any, entropy: Any, input_data: Any, eps_clip: float, **_: Any) -> Any:
        return clipped(logprobs, input_data["prox_logp"], input_data["advantages"], input_data["loss_mask"])

    actor.grpo_loss_fn = grpo_loss_fn
    for name in ("areal", "areal.trainer", "areal.trainer.ppo"):
        patch.setitem(sys.modules, name, ModuleType(name))
    patch.setitem(sys.modules, "areal.trainer.ppo.actor", actor)
    sys.modules["areal.trainer.ppo"].actor = actor
    rec = recipe("areal")["record_areal"](model, optimizer, tokenizer(), out) if out else None
    for step in range(2):
        b = drawn(model, step)
        there = b["attention"].bool()
        rolled = torch.cat([logps(model, b["ids"], b["attention"]), torch.zeros(len(there), 1)], 1)
        mask = torch.cat([b["mask"][:, 1:], torch.zeros(len(there), 1)], 1)
        old = torch.cat([b["old"], torch.zeros(len(there), 1)], 1)
        data = {"input_ids": b["ids"][there], "loss_mask": mask[there], "logprobs": old[there], "prox_logp": old[there]}
        data["advantages"] = b["advantages"][:, None].expand_as(old)[there]
        data["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.long), there.sum(1).cumsum(0)])
        actor.grpo_loss_fn(rolled[there], None, data, eps_clip=0.2).backward()
        if rec:
            rec.step()
        optimizer.step()
        optimizer.zero_grad()
    if rec:
        rec.close()


@pytest.mark.parametrize("train", [openrlhf, skyrl, areal])
def test_a_recipe_records_the_loss_and_changes_nothing(train, tmp_path: Path, monkeypatch):
    plain, recorded, first = (small_model() for _ in range(3))
    train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), None, monkeypatch)
    train(recorded, torch.optim.AdamW(recorded.parameters(), lr=0.01), tmp_path / "run", monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), recorded.parameters(), strict=True))
    run = sharpscope.load_run(tmp_path / "run")
    assert run.status == "finished" and run.steps["step"].tolist() == [1, 2]
    b = drawn(first, 0)
    logp = logps(first, b["ids"], b["attention"]).detach().requires_grad_()
    clipped(logp, b["old"], b["advantages"][:, None], b["mask"][:, 1:]).backward()
    tokens = run.tokens(steps=[1])
    inside = b["mask"][:, 1:].bool()
    np.testing.assert_allclose(tokens["loss_coef"], logp.grad[inside], rtol=1e-4, atol=1e-8)
    assert tokens["token_id"].tolist() == b["ids"][:, 1:][inside].tolist()
    np.testing.assert_allclose(tokens["logp"], b["old"][inside], atol=1e-5)
    np.testing.assert_allclose(tokens["behavior_logp"], b["old"][inside], atol=1e-5)
    clipped(logps(first, b["ids"], b["attention"]), b["old"], b["advantages"][:, None], b["mask"][:, 1:]).backward()
    norm = sum(float(p.grad.double().square().sum()) for p in first.parameters()) ** 0.5
    assert run.updates["grad_norm"][0] == pytest.approx(norm, rel=1e-5)


def test_gradients_that_are_kept_elsewhere_are_not_zero(tmp_path: Path):
    """As with DeepSpeed: coefficients are known, norms are not."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rec = sharpscope.record(model, optimizer, tokenizer=tokenizer(), out=tmp_path / "run")
    b = drawn(model, 0)
    logp = logps(model, b["ids"], b["attention"])
    rec.tokens(logp, b["ids"], b["mask"], advantages=b["advantages"])
    (logp * b["mask"][:, 1:]).sum().backward()
    model.zero_grad()
    rec.step()
    optimizer.step()
    rec.close()
    run = sharpscope.load_run(tmp_path / "run")
    assert (
        np.isnan(run.steps["grad_norm"][0]) and set(run.events["rule"]) >= {"no_gradient"} and run.status == "finished"
    )
    assert (run.tokens()["loss_coef"] == 1).all() and "zero_gradient" not in set(run.events["rule"])


def test_tinkers_writer_makes_a_table(tmp_path: Path):
    def datum(ids: list[int], mask: list[int]) -> Any:
        inputs = {"target_tokens": ids[1:], "mask": mask, "logprobs": [-0.5 * m for m in mask]}
        inputs |= {"advantages": [2.0 * m for m in mask]}
        tensors = {name: torch.tensor(values) for name, values in inputs.items()}
        return SimpleNamespace(model_input=SimpleNamespace(to_ints=lambda: ids[:-1]), loss_fn_inputs=tensors)

    data = [datum([3, 4, 5, 6], [0, 1, 1]), datum([7, 8, 9, 5, 4], [0, 0, 1, 1])]
    logp = [[0.0, -0.6, -0.4], [0.0, 0.0, -0.5, -0.7]]
    recipe("tinker")["write"](tmp_path / "t.jsonl", 1, data, logp)
    import_files("jsonl", tmp_path / "t.jsonl", tmp_path / "run", Options())
    run = sharpscope.load_run(tmp_path / "run")
    assert [json.loads(ids) for ids in run.rollouts["token_ids"]] == [[3, 4, 5, 6], [7, 8, 9, 5, 4]]
    tokens = run.tokens()
    assert tokens["token_id"].tolist() == [5, 6, 5, 4] and run.rollouts["prompt_tokens"].tolist() == [2, 3]
    np.testing.assert_allclose(tokens["loss_coef"], -2 * np.exp(tokens["logp"] - tokens["behavior_logp"]), rtol=1e-6)

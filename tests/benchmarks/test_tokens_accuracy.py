"""The table of the local tier's distance, and the share of time that recording takes."""

from __future__ import annotations

import pytest
import torch

from experiments.benchmarks import tokens_accuracy as accuracy
from experiments.benchmarks.tokens_recording import RecordingCost, recording_cost
from tests.oracles.token_gradients import local_token_gradients, squared_norms, token_gradients


def test_the_text_is_said_twice_and_follows_its_chain():
    ids = accuracy.text(3, torch.Generator().manual_seed(0))
    assert ids.shape == (3, 2 * accuracy.HALF) and torch.equal(ids[:, : accuracy.HALF], ids[:, accuracy.HALF :])
    more = accuracy.text(400, torch.Generator().manual_seed(1))[:, : accuracy.HALF]
    followers = {int(w): len(more[:, 1:][more[:, :-1] == w].unique()) for w in more.unique()}
    assert max(followers.values()) <= 4


def test_distance_is_that_of_the_oracles():
    model = accuracy.small_model("qwen2")
    ids = accuracy.text(1, torch.Generator().manual_seed(2))[:, 14:34]
    mask = torch.zeros_like(ids)
    mask[:, 4:] = 1
    found = accuracy.distance("qwen2", "random", model, ids, mask)
    ones = torch.ones_like(ids)
    exact, local = (
        squared_norms(oracle(model, ids, mask, ones, 1.0), mask.shape).sqrt()[mask.bool()].double()
        for oracle in (token_gradients, local_token_gradients)
    )
    ratio = local / exact
    assert found.tokens == 16
    assert found.median == pytest.approx(float(ratio.median()), rel=1e-4)
    assert found.low == pytest.approx(float(ratio.quantile(0.05)), rel=1e-4)
    assert found.top == pytest.approx(float(ratio[exact >= exact.quantile(0.75)].median()), rel=1e-4)
    assert found.loss == pytest.approx(
        torch.tensor(accuracy.WORDS).log().item(), rel=0.1
    )  # random weights: near uniform
    ranks = torch.stack([values.argsort().argsort().double() for values in (exact, local)])
    assert found.rank == pytest.approx(float(torch.corrcoef(ranks)[0, 1]), abs=1e-6)


def test_fitting_lowers_the_loss_and_the_table_names_every_architecture(tmp_path, monkeypatch):
    ids = torch.randint(2, 100, (1, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    monkeypatch.setattr(accuracy, "policy_rows", lambda prompts: {"ids": ids, "mask": mask})
    found = accuracy.distances(updates=20, rows=2, kinds=["gpt2"])
    assert [(d.model, d.weights) for d in found] == [
        ("gpt2", "random"),
        ("gpt2", "trained"),
        ("embedded policy", "trained"),
    ]
    assert found[1].loss < found[0].loss - 0.1
    text = accuracy.write(found, tmp_path).read_text(encoding="utf-8")
    assert f"| gpt2 | trained | {found[1].loss:.2f} |" in text and "--accuracy" in text
    assert set(accuracy.SHAPES) == {"qwen2", "qwen3", "llama", "gpt2", "gpt_neox", "gemma2", "qwen2_moe"}


def test_recording_is_weighed_by_its_schedules():
    cost = RecordingCost(step=3.0, plain=0.1, gradients=2.1, influence=5.1)
    assert cost.recording == pytest.approx(0.1 + 2.0 / 10)
    assert cost.with_influence == pytest.approx(0.1 + 2.0 / 10 + 5.0 / 50)
    assert cost.share(cost.recording) == pytest.approx(0.3 / 3.3)


def test_recording_is_measured_on_training_steps():
    small = (
        "rollout.prompts_per_step=1",
        "rollout.group_size=2",
        "rollout.max_new_tokens=4",
        "recording.heldout_samples=1",
        "probes.heldout_prompts=2",
    )
    cost = recording_cost(1, 1, small)
    assert cost.step > 0 and 0 < cost.plain < cost.gradients and cost.plain < cost.influence

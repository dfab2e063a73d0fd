"""What AdamW did, split over tokens, momentum and decay: against the optimizer itself and a loop of autograd."""

from __future__ import annotations

import pytest
import torch

from sharpscope.errors import UserError
from sharpscope.probes import coming_update, update_attribution
from tests.models import random_batch, tiny_model
from tests.oracles.token_gradients import token_gradients


@pytest.mark.parametrize("clip", [1.0, 0.3])
def test_three_updates_of_adamw(clip):
    model = tiny_model("qwen2")
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), eps=1e-6)
    order = {id(p): i for i, p in enumerate(parameters)}
    for update in range(3):
        batch = random_batch(seed=update)
        coef = torch.randn(batch["mask"].shape, generator=torch.Generator().manual_seed(update), dtype=torch.float64)
        coef *= batch["mask"]
        gradients = token_gradients(model, batch["input_ids"], batch["mask"], batch["attention_mask"])
        other = [
            torch.randn(p.shape, generator=torch.Generator().manual_seed(order[id(p)]), dtype=torch.float64)
            for p in parameters
        ]
        for i, p in enumerate(parameters):  # the loss has another term: 0.01·⟨other, θ⟩
            p.grad = sum(coef[place] * g[i] for place, g in gradients.items()) + 0.01 * other[i]
        split = coming_update(optimizer, parameters, clip)
        found = update_attribution(model, batch["input_ids"], batch["mask"], coef, split, batch["attention_mask"])

        before = [p.detach().clone() for p in parameters]
        m = [optimizer.state[p]["exp_avg"].clone() if update else torch.zeros_like(p) for p in parameters]
        for p in parameters:
            p.grad *= clip
        optimizer.step()
        step = [p.detach() - b for p, b in zip(parameters, before, strict=True)]
        squared = sum(float(s.square().sum()) for s in step)
        assert split.squared_length == pytest.approx(squared, rel=1e-8)
        assert split.gradient + split.momentum + split.weight_decay == pytest.approx(1.0, abs=1e-12)

        # The parts by hand, from the optimizer's own state after the step.
        k = update + 1
        rates = [
            -1e-3 / (1 - 0.9**k) / ((optimizer.state[p]["exp_avg_sq"] / (1 - 0.99**k)).sqrt() + 1e-6)
            for p in parameters
        ]
        kept = sum(float((r * 0.9 * old * s).sum()) for r, old, s in zip(rates, m, step, strict=True)) / squared
        decay = (
            sum(float((-1e-3 * 0.1 * b * s).sum()) for b, s in zip(before, step, strict=True) if b.ndim >= 2) / squared
        )
        assert split.momentum == pytest.approx(kept, abs=1e-8)
        assert split.weight_decay == pytest.approx(decay, abs=1e-8)
        assert (split.momentum != 0) == (update > 0)
        for place, gradient in gradients.items():
            share = sum(
                float((r * 0.1 * clip * coef[place] * g * s).sum())
                for r, g, s in zip(rates, gradient, step, strict=True)
            )
            assert float(found[place]) == pytest.approx(share / squared, abs=1e-8)
        remainder = (
            sum(float((r * 0.1 * clip * 0.01 * o * s).sum()) for r, o, s in zip(rates, other, step, strict=True))
            / squared
        )
        assert split.gradient - float(found.sum()) == pytest.approx(remainder, abs=1e-8)
        assert float(found.sum()) + remainder + split.momentum + split.weight_decay == pytest.approx(1.0, abs=1e-8)


def test_parameters_without_a_gradient_stay_out():
    model = tiny_model("qwen2")
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.5)
    parameters[3].grad = torch.ones_like(parameters[3])
    before = [p.detach().clone() for p in parameters]
    split = coming_update(optimizer, parameters)
    optimizer.step()
    moved = [float((p.detach() - b).square().sum()) for p, b in zip(parameters, before, strict=True)]
    assert split.squared_length == pytest.approx(sum(moved), rel=1e-8)
    assert [bool(d.any()) for d in split.direction] == [value > 0 for value in moved]


def test_no_step_no_shares():
    model, batch = tiny_model("qwen2"), random_batch()
    split = coming_update(torch.optim.AdamW(model.parameters(), lr=1e-2), list(model.parameters()))
    assert split.squared_length == 0.0
    found = update_attribution(
        model, batch["input_ids"], batch["mask"], batch["mask"].double(), split, batch["attention_mask"]
    )
    assert torch.equal(found.isnan(), batch["mask"].bool())


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "SGD"),
        (lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1), "Adam"),
        (lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True), "amsgrad"),
        (lambda p: torch.optim.AdamW(p, lr=0.1, maximize=True), "maximize"),
    ],
)
def test_other_optimizers_are_refused(make, word):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    with pytest.raises(UserError, match=word):
        coming_update(make([parameter]), [parameter])

"""Effects that are recorded from a plain loop with micro-batches are the derivatives of the loop's own update."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sharpscope
from tests.integrations.test_loop import drawn, logps, surrogate
from tests.integrations.trainers import VOCABULARY, tokenizer
from tests.models import tiny_model

STEPS = 3
LIMIT = 0.1
"""Of the gradient's norm; it binds."""
SCALE = 1e-3
"""Of a token's part of the gradient, in the central difference."""


def adapted(model: Any) -> Any:
    """The model with LoRA adapters on its attention, not at their start, where one of the two factors has no gradient."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(model, config)


MODELS = {
    "whole": lambda: tiny_model(vocab=VOCABULARY),
    "lora": lambda: adapted(tiny_model(vocab=VOCABULARY)),
}


def trained(model: Any) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def loop(model: Any, out: Path) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
    """Three updates of two micro-batches; returns the weights and the optimizer's state before each."""
    optimizer = torch.optim.AdamW(trained(model), lr=0.01, weight_decay=0.1)
    rec = sharpscope.record(model, optimizer, out=out, steps=STEPS, every=1, tokenizer=tokenizer())
    before = []
    for step in range(STEPS):
        b = drawn(model, step)
        total = float(b["mask"][:, 1:].sum())
        before.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
        for rows in (slice(0, 6), slice(6, 16)):
            logp = logps(model, b["ids"][rows], b["attention"][rows])
            known = {name: b[name][rows] for name in ("advantages", "rewards", "groups")}
            old = b["old"][rows]
            rec.tokens(logp, b["ids"][rows], b["mask"][rows], old_logp=old, **known)
            surrogate(logp, b, rows, total).backward()
        rec.step()
        torch.nn.utils.clip_grad_norm_(trained(model), LIMIT)
        optimizer.step()
        optimizer.zero_grad()
    rec.close()
    return before


def distribution(model: Any, b: dict[str, Tensor]) -> Tensor:
    """(n, L - 1, V) ln π over the vocabulary, float64."""
    positions = (b["attention"].cumsum(1) - 1).clamp(min=0)
    given = {"input_ids": b["ids"], "attention_mask": b["attention"], "position_ids": positions}
    with torch.no_grad():
        return model(**given).logits[:, :-1].log_softmax(-1)


@pytest.mark.parametrize("kind", MODELS)
def test_effects_of_a_loop_are_the_derivatives_of_its_update(kind: str, tmp_path: Path):
    model = MODELS[kind]()
    before = loop(model, tmp_path / "run")
    run = sharpscope.load_run(tmp_path / "run")
    weights, state = before[-1]
    model.load_state_dict(weights)
    b = drawn(model, STEPS - 1)
    inside = b["mask"][:, 1:].bool()
    start = distribution(model, b)

    logp = logps(model, b["ids"], b["attention"])
    loss = surrogate(logp, b, slice(0, 16), float(inside.sum()))
    (coef,) = torch.autograd.grad(loss, logp, retain_graph=True)
    gradient = torch.autograd.grad(loss, trained(model), retain_graph=True)
    assert sum(float(g.square().sum()) for g in gradient) > LIMIT**2

    def outcomes(more: list[Tensor]) -> dict[str, float]:
        """KL of the step and entropy after an update whose gradient has `more`."""
        model.load_state_dict(weights)
        optimizer = torch.optim.AdamW(trained(model), lr=0.01, weight_decay=0.1)
        optimizer.load_state_dict(copy.deepcopy(state))
        for p, g, extra in zip(trained(model), gradient, more, strict=True):
            p.grad = g + extra
        torch.nn.utils.clip_grad_norm_(trained(model), LIMIT)
        optimizer.step()
        after = distribution(model, b)
        kl = (start.exp() * (start - after)).sum(-1)
        entropy = -(after.exp() * after).sum(-1)
        return {"kl": float(kl[inside].mean()), "entropy": float(entropy[inside].mean())}

    tokens = run.tokens(steps=[STEPS]).reset_index(drop=True)
    assert len(tokens) == int(inside.sum()) and tokens["effect_kl"].notna().all()
    places = inside.nonzero()
    largest = tokens["effect_kl"].abs().sort_values(ascending=False).index[:3]
    parts = [
        torch.autograd.grad(logp[tuple(places[i])], trained(model), retain_graph=True)
        for i in largest
    ]
    for i, part in zip(largest, parts, strict=True):
        own = [SCALE * coef[tuple(places[i])] * g for g in part]
        more, less = outcomes(own), outcomes([-g for g in own])
        for name in ("kl", "entropy"):
            expected = (more[name] - less[name]) / (2 * SCALE)
            np.testing.assert_allclose(tokens.loc[i, f"effect_{name}"], expected, rtol=1e-5)

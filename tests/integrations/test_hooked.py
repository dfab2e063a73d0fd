"""Trainers whose loss the recorder does not know: hooks give what single-token autograd in float64 gives, and nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import sharpscope
from sharpscope.errors import UserError
from sharpscope.integrations.hooked import token_coefficients
from tests.integrations.trainers import (
    PAIRS,
    PROMPTS,
    evens,
    plain_trainer,
    settings,
    sft_trainer,
    small_model,
    tokenizer,
)

pytest.importorskip("trl", reason="TRL is not installed (test extra)")

QUIET = {"max_grad_norm": 0.0, "max_steps": 2, "gradient_accumulation_steps": 1}


def pairs() -> Any:
    from datasets import Dataset

    names = ("prompt", "chosen", "rejected")
    return Dataset.from_list([dict(zip(names, row, strict=True)) for row in PAIRS * 2])


def made(kind: str, folder: Path, **arguments: Any) -> Any:
    """A tiny trainer of TRL by the name of its class."""
    import trl
    from datasets import Dataset
    from trl.experimental import cpo, orpo

    torch.manual_seed(0)
    modules = {"CPO": cpo, "ORPO": orpo}
    module: Any = modules.get(kind, trl)
    trainer, config = getattr(module, f"{kind}Trainer"), getattr(module, f"{kind}Config")
    own: dict[str, Any] = {"per_device_train_batch_size": 4}
    data: Any = pairs()
    extra: dict[str, Any] = {}
    if kind == "RLOO":
        data = Dataset.from_dict({"prompt": PROMPTS * 4})
        own |= {"num_generations": 2, "max_completion_length": 5, "temperature": 0.7, "beta": 0.0}
        extra = {"reward_funcs": [evens]}
    if kind == "KTO":
        rows = [(p, c, True) for p, c, _ in PAIRS] + [(p, r, False) for p, _, r in PAIRS]
        names = ("prompt", "completion", "label")
        data = Dataset.from_list([dict(zip(names, row, strict=True)) for row in rows])
    if kind == "KTO":
        extra = {"ref_model": small_model()}
    args = config(**settings(folder, **(QUIET | own | arguments)))
    return trainer(
        model=small_model(), args=args, train_dataset=data, processing_class=tokenizer(), **extra
    )


def weighted(folder: Path) -> Any:
    """A Trainer with a loss of its own: log-probabilities weighted by their row."""
    one = plain_trainer(folder, **QUIET)

    def loss(outputs: Any, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        logp = outputs.logits[:, :-1].log_softmax(-1)
        found = logp.gather(2, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
        weight = torch.arange(1.0, 1 + len(labels))[:, None] * (labels[:, 1:] >= 0)
        return -(found * weight).sum().square() / 100

    one.compute_loss_func = loss
    return one


MAKERS: dict[str, Callable[[Path], Any]] = {
    "RLOO": lambda folder: made("RLOO", folder),
    "KTO": lambda folder: made("KTO", folder),
    "CPO": lambda folder: made("CPO", folder, loss_type="sigmoid"),
    "SimPO": lambda folder: made("CPO", folder, loss_type="simpo", cpo_alpha=0.0),
    "ORPO": lambda folder: made("ORPO", folder),
    "own loss": weighted,
    "SFT, packing": lambda folder: sft_trainer(folder, packing=True, max_length=24, **QUIET),
    "SFT, padding-free": lambda folder: sft_trainer(
        folder, padding_free=True, max_length=None, **QUIET
    ),
}


def trained(one: Any) -> list[tuple[Any, list[torch.Tensor]]]:
    """Train; the model in float64 and its gradient before each update."""
    found: list[tuple[Any, list[torch.Tensor]]] = []
    model = one.model

    def see(*_: Any) -> None:
        grads = [
            torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()
        ]
        with torch.random.fork_rng():
            clean = small_model().double().eval()  # TRL replaces the forward pass of its own
        clean.load_state_dict(model.state_dict())
        found.append((clean, grads))

    original = one.create_optimizer

    def create(*args: Any, **kwargs: Any) -> Any:
        optimizer = original(*args, **kwargs)
        one.optimizer.register_step_pre_hook(see)
        return optimizer

    one.create_optimizer = create
    one.train()
    return found


def token_gradient(model: Any, row: Any, position: int, heat: float) -> list[torch.Tensor]:
    """∇ log π of one token of a recorded completion."""
    ids = torch.tensor(json.loads(row.token_ids))[None]
    at = int(row.prompt_tokens) + position
    logits = model(input_ids=ids[:, :at]).logits[0, -1] / heat
    logp = logits.log_softmax(-1)[ids[0, at]]
    return list(
        torch.autograd.grad(
            logp, list(model.parameters()), materialize_grads=True, allow_unused=True
        )
    )


@pytest.mark.parametrize("name", list(MAKERS))
def test_coefficients_and_shares_are_autograds(name: str, tmp_path: Path):
    plain = MAKERS[name](tmp_path / "plain")
    plain.train()
    one = MAKERS[name](tmp_path / "t")
    recorder = sharpscope.record(one, out=tmp_path / "run", every=1)
    updates = trained(one)
    for p, q in zip(plain.model.parameters(), one.model.parameters(), strict=True):
        assert torch.equal(p, q)
    run = sharpscope.load_run(tmp_path / "run")
    assert run.status == "finished" and len(run.steps) == len(updates) == 2
    tokens, rollouts = run.tokens(), run.rollouts.set_index(["step", "rollout"])
    for step, (model, grads) in enumerate(updates, 1):
        whole = [torch.zeros_like(g, dtype=torch.float64) for g in grads]
        norm = sum(float(g.double().square().sum()) for g in grads)
        part = tokens[tokens["step"] == step]
        assert len(part)
        for token in part.itertuples():
            row = rollouts.loc[(step, token.rollout)]
            each = token_gradient(model, row, token.position, recorder.temperature)
            inner = sum(float((a * b).sum()) for a, b in zip(each, grads, strict=True))
            assert token.attribution == pytest.approx(token.loss_coef * inner / norm, abs=2e-5)
            for total, gradient in zip(whole, each, strict=True):
                total += token.loss_coef * gradient
        gap = sum(float((a - b).square().sum()) for a, b in zip(whole, grads, strict=True))
        assert gap <= (1e-4) ** 2 * norm
    assert run.rollouts["advantage"].isna().all() and tokens["ratio"].isna().all()


def test_coefficients_from_logits_are_those_of_the_log_probabilities():
    """For certain and unlikely tokens, at any temperature; a loss of other tokens, and another temperature, are told apart."""
    for seed, heat in ((0, 1.0), (1, 0.6), (2, 1.7)):
        draw = torch.Generator().manual_seed(seed)
        logits = (8 * torch.randn(3, 5, 11, generator=draw)).requires_grad_()
        targets = torch.randint(0, 11, (3, 5), generator=draw)
        targets[0] = logits[0].argmax(-1)
        coef = torch.randn(3, 5, generator=draw)
        logp = (logits / heat).log_softmax(-1).gather(2, targets[..., None])[..., 0]
        (gradient,) = torch.autograd.grad((coef * logp).sum(), logits)
        found = token_coefficients(logits.detach(), gradient, targets, heat)
        torch.testing.assert_close(found.coef, coef, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.logp, logp.detach())
        assert found.unexplained < 1e-5
        other = token_coefficients(logits.detach(), gradient, targets, 1.1 * heat)
        assert other.unexplained > 1e-3 and other.heat == pytest.approx(heat, rel=1e-3)
        entropy = torch.special.entr((logits / heat).softmax(-1)).sum()
        (gradient,) = torch.autograd.grad(entropy, logits)
        assert token_coefficients(logits.detach(), gradient, targets, heat).unexplained > 0.1


def test_what_is_no_language_model_is_refused_in_a_sentence(tmp_path: Path):
    from transformers import Qwen2ForSequenceClassification, T5Config, T5ForConditionalGeneration

    small = {"d_model": 8, "d_ff": 8, "d_kv": 4, "num_layers": 1, "num_heads": 2, "vocab_size": 37}
    models = [
        T5ForConditionalGeneration(T5Config(**small)),
        Qwen2ForSequenceClassification(small_model().config),
    ]
    valued = small_model()
    valued.v_head = torch.nn.Linear(4, 1)
    for model in [*models, valued]:
        optimizer = torch.optim.SGD(model.parameters())
        with pytest.raises(UserError, match="only causal language models are recorded"):
            sharpscope.record(model, optimizer, tokenizer=tokenizer(), out=tmp_path / "run")


@pytest.mark.may_stop
def test_a_loss_of_whole_distributions_ends_the_recording_with_its_reason(tmp_path: Path):
    one = plain_trainer(tmp_path / "t", **QUIET)
    one.compute_loss_func = lambda outputs, labels, **_: (
        F.softmax(outputs.logits, -1).square().mean()
    )
    sharpscope.record(one, out=tmp_path / "run")
    with pytest.warns(
        UserWarning, match="no function of the log-probabilities of its tokens alone"
    ):
        one.train()
    assert sharpscope.load_run(tmp_path / "run").status == "interrupted"
    assert np.isfinite(one.state.log_history[-1]["train_loss"])


def distilled(folder: Path) -> Any:
    """GKD: the divergence of whole distributions from those of a teacher."""
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    words, teacher = tokenizer(), small_model()
    words.chat_template = "{% for one in messages %}{{ one['content'] }} {% endfor %}"
    torch.manual_seed(1)
    for parameter in teacher.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    rows = [
        [{"role": "user", "content": p}, {"role": "assistant", "content": c}] for p, c, _ in PAIRS
    ]
    return GKDTrainer(
        model=small_model(),
        teacher_model=teacher,
        args=GKDConfig(**settings(folder, lmbda=0.0, **QUIET)),
        train_dataset=Dataset.from_dict({"messages": rows * 2}),
        processing_class=words,
    )


@pytest.mark.may_stop
def test_distillation_trains_on_as_it_is_and_its_recording_ends_with_the_reason(tmp_path: Path):
    plain, one = (distilled(tmp_path / name) for name in ("plain", "t"))
    plain.train()
    sharpscope.record(one, out=tmp_path / "run")
    with pytest.warns(UserWarning, match="log-probabilities of its tokens alone"):
        one.train()
    for p, q in zip(plain.model.parameters(), one.model.parameters(), strict=True):
        assert torch.equal(p, q)
    pairs = zip(one.model.parameters(), small_model().parameters(), strict=True)
    assert any((p != q).any() for p, q in pairs)
    assert sharpscope.load_run(tmp_path / "run").status == "interrupted"

"""SGD, Muon and Pion: their steps by singular values, laws, and what is said about a step before and after it."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

import sharpscope
from sharpscope.config import build_config
from sharpscope.config.run import OptimizerSpec
from sharpscope.errors import UserError
from sharpscope.methods import named_method
from sharpscope.policy import load_policy
from sharpscope.recording.norms import layer_groups
from sharpscope.tokens.muon import newton_schulz
from sharpscope.tokens.optimizer_steps import Clip, ComingStep, coming_step
from sharpscope.training import train
from sharpscope.training.learner import build_optimizer

H = 0.003
KINDS = {
    "sgd": {"kind": "sgd"},
    "momentum": {"kind": "sgd", "momentum": 0.7},
    "muon": {"kind": "muon"},
    "pion": {"kind": "pion", "filter_steps": 3},
    "filter": {"kind": "pion"},
}


def by_singular_values(matrix: torch.Tensor, suppressing: int | None) -> torch.Tensor:
    """U f(s) Vᵀ with f iterated on each singular value; `suppressing` None: Muon's polynomial."""
    u, s, v = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    values = []
    for sigma in s.tolist():
        for k in range(5):
            if suppressing is None:
                a, b, c = 3.4445, -4.7750, 2.0315
            elif k < 5 - suppressing:
                a, b, c = 15 / 8, -10 / 8, 3 / 8
            else:
                a, b, c = 0.0, 5 / 2, -3 / 2
            sigma = a * sigma + b * sigma**3 + c * sigma**5
        values.append(sigma)
    return u @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ v


def by_hand(name: str, spec: OptimizerSpec, gradients, theta, *, matrix: bool, decays: bool):
    """Δ of the last of some steps on given gradients, from the weights before it."""
    decay = spec.weight_decay if decays else 0.0
    if name in ("sgd", "momentum"):
        buffer = torch.zeros_like(theta)
        for g in gradients:
            buffer = buffer * (spec.momentum or 0.0) + g + decay * theta
        return -spec.lr * buffer
    if matrix:
        mean = torch.zeros_like(theta)
        for g in gradients:
            mean = 0.95 * mean + 0.05 * g
        f = by_singular_values(mean, None if name == "muon" else spec.filter_steps)
        return -spec.lr * (0.2 * math.sqrt(max(theta.shape)) * f + decay * theta)
    m = v = torch.zeros_like(theta)
    for g in gradients:
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
    n = len(gradients)
    adam = (m / (1 - 0.9**n)) / ((v / (1 - 0.999**n)).sqrt() + spec.eps)
    return -spec.lr * (adam + decay * theta)


@pytest.fixture(scope="module")
def model(tiny_policy):
    return AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float64)


@pytest.mark.parametrize("name", KINDS)
def test_steps_by_hand_before_and_after_they_are_made(name: str, model):
    """Two steps of a language model with decay; weights stay as they are between them, so that decay is that of the start."""
    spec = OptimizerSpec(lr=0.01, weight_decay=0.1, **KINDS[name])
    optimizer = build_optimizer(model, spec)
    parameters = [p for p in model.parameters() if p.requires_grad]
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    start = [p.detach().clone() for p in parameters]
    g = torch.Generator().manual_seed(0)
    history: list[list[torch.Tensor]] = []
    for _ in range(2):
        gradients = [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in parameters]
        history.append(gradients)
        for p, gradient, kept in zip(parameters, gradients, start, strict=True):
            p.data.copy_(kept)
            p.grad = gradient.clone()
        coming = list(coming_step(optimizer, parameters, gradients))
        optimizer.step()
    seen = {True: 0, False: 0}
    for place, (p, kept) in enumerate(zip(parameters, start, strict=True)):
        made = p.detach() - kept
        matrix = p.ndim == 2 and "embed" not in names[place] and "lm_head" not in names[place]
        seen[matrix] += 1
        wanted = by_hand(
            name, spec, [one[place] for one in history], kept, matrix=matrix, decays=p.ndim >= 2
        )
        torch.testing.assert_close(made, wanted, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(coming[place], made, rtol=1e-9, atol=1e-13)
        p.data.copy_(kept)
        p.grad = None
    assert min(seen.values()) >= 3


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6)])
def test_laws_of_the_polynomials(shape):
    g = torch.Generator().manual_seed(1)
    matrix = torch.randn(shape, generator=g, dtype=torch.float64)
    values = torch.linalg.svdvals(newton_schulz(matrix))
    assert values.min() > 0.6 and values.max() < 1.25  # nearly orthogonal
    # Pion with no filter is Muon, bit for bit, and the length of the gradient does not matter
    assert torch.equal(newton_schulz(matrix, 0), newton_schulz(matrix))
    torch.testing.assert_close(newton_schulz(1e3 * matrix, 5), newton_schulz(matrix, 5))
    # one large singular value among small ones: it alone is kept
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    sizes = torch.full((min(shape),), 0.05, dtype=torch.float64)
    sizes[0] = 1.0
    kept = torch.linalg.svdvals(newton_schulz(u @ torch.diag(sizes) @ v, 5))
    assert kept[0] > 0.98 and kept[1] < 1e-6
    whitened = torch.linalg.svdvals(newton_schulz(u @ torch.diag(sizes) @ v))
    assert whitened[1] > 0.5


def test_sgd_keeps_the_length_of_a_gradient_and_pion_does_not(model):
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
    g = torch.Generator().manual_seed(2)
    gradients = [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in matrices]
    for kind, factor in (("sgd", 3.0), ("pion", 1.0)):
        optimizer = build_optimizer(model, OptimizerSpec(lr=0.1, kind=kind))
        once, thrice = (
            torch.cat([s.flatten() for s in coming_step(optimizer, matrices, gradients, scale)])
            for scale in (1.0, 3.0)
        )
        torch.testing.assert_close(thrice, factor * once, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["muon", "pion", "sgd"])
def test_the_step_is_differentiated_through_clipping(name: str, model):
    """⟨Jᵀq, d⟩ against central differences of ⟨q, Δ(g ± h·d)⟩."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = build_optimizer(model, OptimizerSpec(lr=0.1, **KINDS[name]))
    g = torch.Generator().manual_seed(3)

    def drawn() -> list[torch.Tensor]:
        return [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in parameters]

    for p, value in zip(parameters, drawn(), strict=True):
        p.grad = 0.1 * value
    kept = [p.detach().clone() for p in parameters]
    optimizer.step()
    for p, value in zip(parameters, kept, strict=True):
        p.data.copy_(value)
        p.grad = None
    gradient, q, d = drawn(), drawn(), drawn()
    clips = [Clip(limit=3.0)]

    def value(h: float) -> float:
        moved = [a + h * b for a, b in zip(gradient, d, strict=True)]
        steps = ComingStep(optimizer, parameters, moved, clips).steps()
        return float(sum((a * b).sum() for a, b in zip(q, steps, strict=True)))

    pulled = ComingStep(optimizer, parameters, gradient, clips).pull(q)
    found = float(sum((a * b).sum() for a, b in zip(pulled, d, strict=True)))
    assert found == pytest.approx((value(1e-4) - value(-1e-4)) / 2e-4, rel=1e-5)
    assert abs(found) > 1e-3


@pytest.mark.parametrize("name", ["muon", "filter", "sgd"])
def test_effects_go_through_these_optimizers(name: str, tiny_policy):
    """Effects of tokens on KL against the KL of updates in which a token counts a little more or less."""
    model = AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float64).eval()
    spec = OptimizerSpec(lr={"sgd": 0.5}.get(name, 1e-2), **KINDS[name])
    optimizer = build_optimizer(model, spec)
    ids = torch.randint(5, 60, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[:, :2] = 0
    coef = -mask.double() * torch.linspace(0.5, 1.5, 7, dtype=torch.float64)
    # moments, so that the next step is not the first
    (torch.log_softmax(model(ids).logits, -1)[:, :-1, 7].sum() * 0.1).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    def kl(scale: float, place: tuple[int, int]) -> float:
        changed = coef.clone()
        changed[place] *= scale
        return sharpscope.effects(model, ids, mask, changed, optimizer, "kl", check="off").after[
            "kl"
        ]

    found = sharpscope.effects(model, ids, mask, coef, optimizer, "kl", check="off")["kl"]
    for place in ((0, 3), (1, 6)):
        slope = (kl(1 + H, place) - kl(1 - H, place)) / (2 * H)
        assert float(found[place]) == pytest.approx(slope, rel=0.01)
    assert float(found.abs().max()) > 1e-7 and not found[:, :2].any()


def test_a_run_with_sgd_records_its_step(toy_config):
    config = toy_config(steps=1, optimizer__kind="sgd", optimizer__lr=0.3, evaluation__every=0)
    updates = sharpscope.load_run(train(config).run_dir).updates.iloc[0]
    clipped = updates["grad_norm"] * updates["clip_factor"]
    assert updates["update_norm"] == pytest.approx(0.3 * clipped, rel=1e-5) and clipped > 0


def test_what_an_optimizer_cannot_do_is_said(toy_config):
    with pytest.raises(UserError, match=r"optimizer\.filter_steps"):
        build_config(overrides=["optimizer.filter_steps=6"])
    config = toy_config(
        steps=1, method="capo", optimizer__kind="sgd", evaluation__every=0, probes__preset="off"
    )
    with pytest.raises(UserError, match="computed from AdamW's moments"):
        train(config)
    assert named_method("capo").tokens is not None
    policy = load_policy(toy_config().policy)
    muon = build_optimizer(policy.model, OptimizerSpec(kind="muon"))
    groups = layer_groups(policy.model)
    by_polynomial = [p for g in muon.param_groups if g["matrices"] for p in g["params"]]
    assert by_polynomial and not any("embed" in groups[id(p)] for p in by_polynomial)

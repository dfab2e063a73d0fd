"""The loss surface of causal language models against dense float64 Hessians of at most 3,000 parameters."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from sharpscope.errors import UserError
from sharpscope.probes import curvature
from sharpscope.probes.language_model import Objective, lm_surface, token_batch
from tests.models import random_batch, tiny_model
from tests.oracles.curvature import all_completions, dense_hessian, flat, functional_value, logp_of
from tests.probes.small_lm import OBJECTIVES, SMALL, TEMPERATURE, VOCAB, all_scored, objective, rewards, small_model


@functools.cache
def oracle(name: str):
    """Model, batch and the dense Hessian, gradient and value of an objective."""
    model, batch = small_model(), random_batch(vocab=VOCAB, rows=3, prompt=3, completion=4)
    parameters = list(model.parameters())
    theta = flat(parameters)
    reward = rewards()
    anchor = logp_of(model, theta, parameters, batch, TEMPERATURE).detach()

    def loss(at):
        return functional_value(name, logp_of(model, at, parameters, batch, TEMPERATURE), batch["mask"], reward, anchor)

    return model, batch, dense_hessian(loss, theta), torch.func.grad(loss)(theta), float(loss(theta))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_value_gradient_and_eigenvalues_are_those_of_the_dense_hessian(name):
    model, batch, dense, gradient, value = oracle(name)
    exact = np.linalg.eigvalsh(dense.numpy())
    with lm_surface(model, objective(name, batch), microbatch_tokens=8) as surface:
        assert surface.value() == pytest.approx(value, abs=1e-12)
        torch.testing.assert_close(surface.gradient()[1], gradient, rtol=1e-9, atol=1e-12)
        settings = {"top": 3, "tolerance": 1e-8, "max_products": 300, "trace_probes": 40}
        found = curvature(surface, None, 1, **settings)
    assert found.converged, found.why
    np.testing.assert_allclose(found.top, exact[::-1][:3], rtol=1e-6)
    assert found.smallest == pytest.approx(exact[0], rel=1e-6, abs=1e-9)
    for value, vector, residual in zip(found.top, found.vectors, found.residuals, strict=True):
        assert float((dense @ vector - value * vector).norm()) == pytest.approx(residual, abs=1e-8)
        assert float(vector.norm()) == pytest.approx(1)
    assert abs(found.trace - float(dense.trace())) <= 3.5 * found.trace_std_error + 1e-9


@pytest.mark.parametrize("name", OBJECTIVES)
def test_products_do_not_depend_on_microbatches_nor_on_the_graphs_kept(name):
    model, batch, dense, _, _ = oracle(name)
    vector = torch.randn(len(dense), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for tokens, memory in ((1, 1024.0), (10_000, 1024.0), (10, 1e-6), (10, 0.2)):
        with lm_surface(model, objective(name, batch), microbatch_tokens=tokens, memory_mb=memory) as surface:
            torch.testing.assert_close(surface.hessian() @ vector, dense @ vector, rtol=1e-9, atol=1e-11)


def test_curvature_by_prompt_is_the_quadratic_form_of_each_prompts_rows():
    model, batch, dense, _, _ = oracle("nll")
    vector = torch.randn(len(dense), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with lm_surface(model, objective("nll", batch)) as surface:
        found = surface.curvature_by_prompt(vector)
        prompts, weight = torch.tensor(surface.objective.batch.prompts), surface.objective.prompt_weight
        whole = float(vector @ dense @ vector)
        assert float(found.mean()) == pytest.approx(whole, rel=1e-9) and len(found) == len(weight) > 1
        for prompt, share in enumerate(weight):
            part = surface.over(surface.objective.rows((prompts == prompt).nonzero()[:, 0]))
            alone = float(vector @ (part.hessian() @ vector))
            expected = whole + len(weight) * float(share) * (alone - whole)
            assert float(found[prompt]) == pytest.approx(expected, rel=1e-8)


class Opaque(torch.autograd.Function):
    """tanh whose backward pass leaves the graph."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * (1 - ctx.saved_tensors[0].detach().tanh() ** 2) + 0 * cotangent.detach()

    @staticmethod
    def jvp(ctx, tangent):
        return tangent


def test_a_language_model_whose_products_are_wrong_is_refused_by_name(monkeypatch):
    settings = {"trace_probes": 0}
    ids = torch.randint(2, VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))
    model = small_model()
    with lm_surface(model, all_scored(ids)) as surface:
        assert curvature(surface, None, **settings).checked < 1e-4
    monkeypatch.setattr(model.model.layers[0].mlp.act_fn, "forward", Opaque.apply)
    with lm_surface(model, all_scored(ids), check="always") as surface:
        with pytest.raises(UserError, match=r"Qwen2ForCausalLM: .*finite difference.*differ by \d+%"):
            curvature(surface, None, **settings)
        assert curvature(surface, None, check="off", **settings).checked is None


def test_frozen_and_unused_parameters_of_a_language_model():
    """Frozen ones are no part of the Hessian, an unused one has zero rows; the tied output layer counts once."""
    model, batch, dense, _, _ = oracle("nll")
    frozen = [name for name, _ in model.named_parameters() if "k_proj" in name or "input_layernorm" in name]
    kept = torch.cat([torch.full((p.numel(),), name not in frozen) for name, p in model.named_parameters()])
    copied = small_model()  # the same seed, so the same weights
    for name, parameter in copied.named_parameters():
        parameter.requires_grad_(name not in frozen)
    copied.unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    exact = np.linalg.eigvalsh(dense[kept][:, kept].numpy())
    with lm_surface(copied, objective("nll", batch)) as surface:
        names = {id(p): name for name, p in copied.named_parameters()}
        order = [names[id(p)] for p in surface.parameters]
        assert "unused" in order and not set(order) & set(frozen)
        found = curvature(surface, None, tolerance=1e-8, trace_probes=0)
        unused = sum(p.numel() for p in surface.parameters[: order.index("unused")])
        assert float(found.vectors[0, unused : unused + 3].abs().max()) < 1e-7
    assert (found.largest, found.smallest) == pytest.approx((exact[-1], exact[0]), rel=1e-6)


def test_expected_failure_has_the_hessian_of_the_exact_expectation_over_all_completions():
    vocabulary, length = 4, 2
    model = tiny_model("qwen2", vocab=vocabulary, **SMALL)
    model.get_input_embeddings().padding_idx = None  # every token is a token here
    parameters, theta = list(model.parameters()), flat(list(model.parameters()))
    completions = all_completions(vocabulary, length)
    rows = len(completions)
    prompt = torch.tensor([2, 3]).expand(rows, 2)
    batch = {"input_ids": torch.cat([prompt, completions], 1), "attention_mask": torch.ones(rows, 4, dtype=torch.long)}
    batch["mask"] = torch.tensor([0, 0, 1, 1]).expand(rows, 4)
    success = torch.rand(rows, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def failure(at):
        """1 − Σ_y π(y) R(y), exactly."""
        return 1 - (logp_of(model, at, parameters, batch, 1.0)[:, 2:].sum(1).exp() * success).sum()

    probability = logp_of(model, theta, parameters, batch, 1.0)[:, 2:].sum(1).exp().detach()
    assert float(probability.sum()) == pytest.approx(1)
    dense = dense_hessian(failure, theta)
    # Every completion once, weighted by its probability: the mean over draws becomes the exact expectation.
    scale = 0.5 / float((probability * rows).max())
    tokens = token_batch(
        batch["input_ids"], batch["attention_mask"], batch["mask"], reward=success * probability * rows * scale
    )
    vector = torch.randn(len(theta), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with lm_surface(model, Objective("expected_failure", tokens)) as surface:
        torch.testing.assert_close((surface.hessian() @ vector) / scale, dense @ vector, rtol=1e-8, atol=1e-10)
        assert (1 - surface.value()) / scale == pytest.approx(1 - float(failure(theta)))

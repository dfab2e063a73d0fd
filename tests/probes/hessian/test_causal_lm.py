"""Curvature of causal-LM objectives against dense float64 Hessians of at most 3,000 parameters."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from sharpscope.errors import UserError
from sharpscope.probes.hessian import CurvatureSettings, curvature_of, dual, hutchpp, spectral_density
from sharpscope.probes.hessian.causal_lm import lm_surface
from sharpscope.probes.objectives import OBJECTIVES, Objective, staleness, token_batch
from sharpscope.probes.parameter_groups import parameter_groups
from tests.models import random_batch, tiny_model
from tests.oracles.curvature import all_completions, dense_hessian, flat, functional_value, ggn_matrix, logp_of
from tests.probes.small_lm import SMALL, TEMPERATURE, VOCAB, all_scored, objective, rewards, small_model


@functools.cache
def oracle(name: str):
    """Model, batch and the dense Hessian, gradient and value of an objective."""
    model, batch = small_model(), random_batch(vocab=VOCAB, rows=3, prompt=3, completion=4)
    parameters = list(model.parameters())
    theta = flat(parameters)
    reward, advantage = rewards()
    anchor = logp_of(model, theta, parameters, batch, TEMPERATURE).detach()

    def loss(at):
        return functional_value(
            name, logp_of(model, at, parameters, batch, TEMPERATURE), batch["mask"], reward, advantage, anchor
        )

    return model, batch, dense_hessian(loss, theta), torch.func.grad(loss)(theta), float(loss(theta))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_value_gradient_and_eigenvalues_are_those_of_the_dense_hessian(name):
    model, batch, dense, gradient, value = oracle(name)
    exact = np.linalg.eigvalsh(dense.numpy())
    with lm_surface(model, objective(name, batch), microbatch_tokens=8, head_mb=0.001) as surface:
        assert surface.value() == pytest.approx(value, abs=1e-12)
        torch.testing.assert_close(surface.gradient()[1], gradient, rtol=1e-9, atol=1e-12)
        settings = CurvatureSettings(top=3, tolerance=1e-8, max_products=300, trace_probes=40, density_samples=0)
        found = curvature_of(surface, settings, seed=1)
    assert found.converged, found.why
    np.testing.assert_allclose(found.top, exact[::-1][:3], rtol=1e-6)
    assert found.smallest == pytest.approx(exact[0], rel=1e-6, abs=1e-9)
    for value, vector, residual in zip(found.top, found.vectors, found.residuals, strict=True):
        assert float((dense @ vector - value * vector).norm()) == pytest.approx(residual, abs=1e-8)
        assert float(vector.norm()) == pytest.approx(1)
    assert abs(found.trace - float(dense.trace())) <= 3.5 * found.trace_std_error + 1e-9


@pytest.mark.parametrize("name", OBJECTIVES)
def test_products_do_not_depend_on_microbatches_nor_on_how_they_are_computed(name):
    model, batch, dense, _, _ = oracle(name)
    vector = torch.randn(len(dense), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for mode in ("graph", "stream"):
        for tokens in (1, 10, 10_000):
            with lm_surface(
                model, objective(name, batch), mode=mode, microbatch_tokens=tokens, head_mb=0.002
            ) as surface:
                torch.testing.assert_close(surface.hessian() @ vector, dense @ vector, rtol=1e-9, atol=1e-11)


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
    settings = CurvatureSettings(trace_probes=0, density_samples=0)
    ids = torch.randint(2, VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))
    model = small_model()
    with lm_surface(model, all_scored(ids), mode="stream") as surface:
        assert curvature_of(surface, settings).checked < 1e-4
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[0].mlp.act_fn, "forward", Opaque.apply)
        for mode in ("graph", "stream"):
            with (
                lm_surface(model, all_scored(ids), mode=mode) as surface,
                pytest.raises(UserError, match=r"Qwen2ForCausalLM: .*mode 'graph'.*finite difference.*differ by \d+%"),
            ):
                curvature_of(surface, settings)
    monkeypatch.setattr(dual, "_depends", lambda value: False)  # no input of a layer is followed
    with lm_surface(model, all_scored(ids), mode="stream") as surface:
        with pytest.raises(UserError, match=r"Qwen2ForCausalLM: .*'stream'.*differ by \d+%.*use mode='graph'"):
            curvature_of(surface, settings)
        assert curvature_of(surface, settings, check=False).checked is None
    with lm_surface(model, all_scored(ids), mode="graph") as surface:
        assert curvature_of(surface, settings).checked < 1e-4


def test_a_tangent_that_cannot_be_differentiated_is_refused_in_one_line(monkeypatch):
    model = small_model()
    monkeypatch.setattr(model.model.layers[0].mlp.act_fn, "forward", lambda x: x / x.norm(p=1, dim=-1, keepdim=True))
    ids = torch.randint(2, VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))
    vector = torch.ones(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    with lm_surface(model, all_scored(ids), mode="stream") as surface:
        hessian = surface.hessian()
        with pytest.raises(UserError, match=r"no backward pass through the forward-mode derivative .*mode='graph'"):
            hessian @ vector


def test_groups_are_diagonal_blocks():
    model, batch, dense, _, _ = oracle("nll")
    names = {id(p): name for name, p in model.named_parameters()}
    starts = dict(zip(names, np.cumsum([0, *[p.numel() for p in model.parameters()]]), strict=False))
    groups = parameter_groups(model)
    assert set(groups) == {"embedding", "attention", "mlp", "norm"}
    assert sum(p.numel() for group in groups.values() for p in group) == len(dense)
    with lm_surface(model, objective("nll", batch)) as surface:
        for tensors in groups.values():
            rows = torch.cat([torch.arange(p.numel()) + starts[id(p)] for p in tensors])
            exact = np.linalg.eigvalsh(dense[rows][:, rows].numpy())
            settings = CurvatureSettings(tolerance=1e-8, max_products=300, trace_probes=0, density_samples=0)
            found = curvature_of(surface.restricted(tensors), settings)
            assert (found.largest, found.smallest) == pytest.approx((exact[-1], exact[0]), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("mode", ["graph", "stream"])
def test_frozen_and_unused_parameters_of_a_language_model(mode):
    """Frozen ones are no part of the Hessian, an unused one has zero rows; the tied output layer counts once."""
    model, batch, dense, _, _ = oracle("nll")
    sizes = [p.numel() for p in model.parameters()]
    frozen = [name for name, _ in model.named_parameters() if "k_proj" in name or "input_layernorm" in name]
    kept = torch.cat(
        [
            torch.arange(end - size, end)
            for (name, _), size, end in zip(model.named_parameters(), sizes, np.cumsum(sizes), strict=True)
            if name not in frozen
        ]
    )
    copied = small_model()  # the same seed, so the same weights
    for name, parameter in copied.named_parameters():
        parameter.requires_grad_(name not in frozen)
    copied.unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    exact = np.linalg.eigvalsh(dense[kept][:, kept].numpy())
    with lm_surface(copied, objective("nll", batch), mode=mode, head_mb=0.001) as surface:
        names = {id(p): name for name, p in copied.named_parameters()}
        order = [names[id(p)] for p in surface.parameters]
        assert "unused" in order and not set(order) & set(frozen)
        found = curvature_of(surface, CurvatureSettings(tolerance=1e-8, trace_probes=0, density_samples=0))
        unused = sum(p.numel() for p in surface.parameters[: order.index("unused")])
        assert float(found.vectors[0, unused : unused + 3].abs().max()) < 1e-7
    assert (found.largest, found.smallest) == pytest.approx((exact[-1], exact[0]), rel=1e-6)


def test_gauss_newton_is_the_dense_one():
    model, batch, _, _, _ = oracle("nll")
    parameters = list(model.parameters())
    theta = flat(parameters)
    place = batch["mask"][:, 1:].bool()
    position = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)

    def logits(at):
        parts = dict(zip(map(id, parameters), at.split([p.numel() for p in parameters]), strict=True))
        swapped = {n: parts[id(p)].view(p.shape) for n, p in model.named_parameters()}
        inputs = {
            "input_ids": batch["input_ids"],
            "attention_mask": batch["attention_mask"],
            "position_ids": position,
            "use_cache": False,
        }
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch.func.functional_call(model, swapped, (), inputs).logits[:, :-1][place] / TEMPERATURE

    dense = ggn_matrix(logits, theta, batch["input_ids"][:, 1:][place])
    vector = torch.randn(len(theta), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for mode, tokens in (("auto", 10_000), ("stream", 10)):
        with lm_surface(model, objective("nll", batch), mode=mode, microbatch_tokens=tokens, head_mb=0.001) as surface:
            torch.testing.assert_close(surface.gauss_newton() @ vector, dense @ vector, rtol=1e-9, atol=1e-12)


def test_trace_covers_and_density_has_the_moments_of_a_language_models_hessian():
    _, _, dense, _, _ = oracle("nll")
    from sharpscope.probes.hessian import FunctionOperator

    operator = FunctionOperator(lambda v: dense @ v, len(dense), torch.float64, torch.device("cpu"))
    exact, inside, within = float(dense.trace()), 0, 0
    for seed in range(100):
        found = hutchpp(operator, probes=16, sketch=8, generator=torch.Generator().manual_seed(seed))
        low, high = found.interval(0.95)
        inside += low <= exact <= high
        within += abs(found.value - exact) <= found.std_error
    # 95 and (Student's t, 15 degrees of freedom) 67 are nominal; bounds are binomial at about 1 in 1000.
    assert 88 <= inside <= 100
    assert 52 <= within <= 82
    eigenvalues = np.linalg.eigvalsh(dense.numpy())
    density = spectral_density(operator, samples=len(dense), steps=4, generator=torch.Generator().manual_seed(0))
    moments, errors = density.moments(4)
    np.testing.assert_allclose(moments, [(eigenvalues**k).mean() for k in (1, 2, 3, 4)], rtol=0.01)
    few, few_errors = spectral_density(
        operator, samples=64, steps=4, generator=torch.Generator().manual_seed(0)
    ).moments(4)
    assert (np.abs(few - moments) <= 4 * few_errors).all()
    assert (few_errors > 0).all() and (errors > 0).all()


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


def test_the_padding_row_is_a_constant_in_both_ways_of_computing_products():
    model, batch = small_model(), random_batch(vocab=VOCAB)
    batch["input_ids"][:, 5] = 0  # the padding token in the middle of a text
    products = []
    for mode in ("graph", "stream"):
        with lm_surface(model, objective("nll", batch), mode=mode, head_mb=0.001) as surface:
            vector = torch.randn(sum(p.numel() for p in surface.parameters), generator=torch.Generator().manual_seed(1))
            products.append(surface.hessian() @ vector.double())
    torch.testing.assert_close(products[0], products[1], rtol=1e-9, atol=1e-11)


def test_stale_anchors_are_kept_and_weighed():
    model, batch = small_model(), random_batch(vocab=VOCAB)
    fresh = objective("expected_failure", batch)
    with lm_surface(model, fresh) as surface:
        now = surface.logp()
        assert staleness(surface.objective, now).share == pytest.approx(1)
        held = surface.objective
    shift = torch.tensor([[0.0], [1.0], [4.0]], dtype=torch.float64)
    counts = held.batch.scored.sum(1, keepdim=True)
    from dataclasses import replace

    old = replace(
        held,
        batch=replace(held.batch, anchor_logp=held.batch.anchor_logp - shift / counts * held.batch.scored),
        stale=True,
    )
    weight = shift[:, 0].exp()
    found = staleness(old, now)
    assert found.effective_samples == pytest.approx(float(weight.sum() ** 2 / weight.square().sum()))
    assert not found.valid and staleness(old, now, threshold=0.3).valid
    with lm_surface(model, old) as surface:
        reward = rewards()[0]
        assert surface.value() == pytest.approx(float((1 - reward * weight).mean()))


def test_lora_at_its_zero_initialisation():
    peft = pytest.importorskip("peft", reason="peft is not installed (extra `peft`)")
    model, batch = small_model(), random_batch(vocab=VOCAB)
    model = (
        peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
        .double()
        .eval()
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    theta = flat(parameters)
    zeros = int((theta == 0).sum())
    assert 0 < zeros < len(theta)

    drawn = rewards()

    def loss(at):
        logp = logp_of(model, at, parameters, batch, TEMPERATURE)
        return functional_value("nll", logp, batch["mask"], *drawn, logp)

    dense = dense_hessian(loss, theta)
    exact = np.linalg.eigvalsh(dense.numpy())
    for mode in ("graph", "stream"):
        with lm_surface(model, objective("nll", batch), mode=mode, head_mb=0.001) as surface:
            found = curvature_of(surface, CurvatureSettings(tolerance=1e-8, trace_probes=0, density_samples=0))
        assert (found.largest, found.smallest) == pytest.approx((exact[-1], exact[0]), rel=1e-6)
        assert found.smallest < -1e-6  # at B = 0 the Hessian is indefinite


def test_no_array_of_the_logits_size_is_ever_made():
    from torch.utils._python_dispatch import TorchDispatchMode

    vocabulary, tokens = 4096, 64
    model = tiny_model("qwen2", vocab=vocabulary, dtype=torch.float32, **SMALL)
    ids = torch.randint(2, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))
    scored = torch.ones_like(ids)
    scored[0, 0] = 0
    batch = token_batch(ids, torch.ones_like(ids), scored)

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor) and tensor.ndim == 2 and tensor.shape[0] in (tokens, tokens - 1):
                    self.size = max(self.size, tensor.numel())
            return out

    with lm_surface(model, Objective("nll", batch), mode="stream", head_mb=0.1) as surface:
        operator, vector = surface.hessian(), torch.randn(sum(p.numel() for p in surface.parameters))
        with Largest() as seen:
            product = operator @ vector
            surface.gradient()
        assert 0 < seen.size <= 0.05 * tokens * vocabulary
    with lm_surface(model, Objective("nll", batch), mode="graph") as surface:
        torch.testing.assert_close(
            product, surface.hessian() @ vector, rtol=1e-3, atol=1e-4 * float(product.abs().max())
        )

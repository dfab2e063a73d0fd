"""Every operator × restriction × algorithm against dense matrices that are written out, in float64."""

from __future__ import annotations

import functools
import math
import sys

import numpy as np
import pytest
import torch
from torch import nn

from sharpscope.errors import UserError
from sharpscope.policy.guard import group_names
from sharpscope.surface import lm_surface
from sharpscope.surface.algorithms import (
    Krylov,
    eigenpairs,
    hutchpp,
    quadratic_form,
    spectral_density,
)
from sharpscope.surface.language_model import select_parameters
from sharpscope.surface.operators import (
    FiniteDifference,
    Operator,
    Preconditioned,
    adam_scale,
    gauss_newton_product,
    threshold,
)
from sharpscope.surface.spectrum import curvature
from sharpscope.surface.surface import Surface
from tests.models import (
    SMALL,
    OpaqueCube,
    generator,
    net_and_dense,
    objective,
    operator,
    random_batch,
    rewards,
    tiny_model,
    with_spectrum,
)
from tests.oracles.token_gradients import dense_operator, flat, functional_value, logits_of

VOCABULARY, HEAT = 5, 0.8
OPERATORS = ("hessian", "finite_difference", "gauss_newton", "fisher", "empirical_fisher")
SELECTIONS = ("all", "attention", "0.mlp+embedding")
KINDS = {"attention": {"attention"}, "0.mlp+embedding": {"mlp", "embedding"}}
SHAPE = {**SMALL, "hidden_size": 4, "intermediate_size": 4, "num_attention_heads": 1}


@functools.cache
def setting():
    model = tiny_model("qwen2", vocab=VOCABULARY, **SHAPE)
    return model, random_batch(vocab=VOCABULARY, rows=3, prompt=2, completion=3)


@functools.cache
def oracle(name: str, loss_name: str) -> torch.Tensor:
    model, batch = setting()
    parameters = list(model.parameters())
    theta, reward = flat(parameters), rewards()

    def logits(at):
        return logits_of(model, at, parameters, batch)

    def logp(z):
        taken = torch.log_softmax(z[:, :-1] / HEAT, -1).gather(2, batch["input_ids"][:, 1:, None])
        return nn.functional.pad(taken[..., 0], (1, 0))

    anchor = logp(logits(theta)).detach()

    def loss(z):
        return functional_value(loss_name, logp(z), batch["mask"], reward, anchor)

    def terms(at):
        if loss_name == "nll":
            return -logp(logits(at))[batch["mask"].bool()]
        gap = ((logp(logits(at)) - anchor) * batch["mask"]).sum(1)
        return 1 - reward * gap.exp()

    weight = 1 / float(batch["mask"].sum()) if loss_name == "nll" else 1 / 3
    return dense_operator(name, logits, loss, theta, batch, HEAT, terms, weight)


def chosen(selection: str) -> torch.Tensor:
    """Which of the flat parameters (P,) a selection means."""
    model, _ = setting()
    named = dict(model.named_parameters())
    groups = group_names(model, named)
    kinds = KINDS.get(selection)
    return torch.cat(
        [
            torch.full((p.numel(),), kinds is None or groups[name][0] in kinds)
            for name, p in named.items()
        ]
    )


@functools.cache
def materialized(name: str, loss_name: str, selection: str) -> torch.Tensor:
    """The operator's products with the unit vectors, (P, P)."""
    model, batch = setting()
    given = objective(loss_name, batch)
    with lm_surface(model, given, check="off", parameters=selection) as surface:
        found = surface.operator(name)
        return torch.stack([found @ unit for unit in torch.eye(found.size, dtype=torch.float64)])


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("loss_name", ["nll", "expected_failure"])
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("preconditioned", [False, True])
def test_every_algorithm_on_every_operator_is_that_of_the_dense_matrix(
    preconditioned, name, loss_name, selection
):
    index = chosen(selection)
    exact = oracle(name, loss_name)[index][:, index]
    inside = operator(materialized(name, loss_name, selection))
    scale = 0.5 + torch.rand(len(exact), generator=generator(), dtype=torch.float64)
    given = Preconditioned(inside, scale) if preconditioned else inside
    exact = scale[:, None] * exact * scale if preconditioned else exact
    size, bound = len(exact), 1e-6 * float(torch.linalg.matrix_norm(exact, 2))
    values, vectors = np.linalg.eigh(exact.numpy())

    found = eigenpairs(
        given, 2, 1, tolerance=1e-10, max_products=500, capacity=size + 1, generator=generator()
    )
    assert not found.why
    np.testing.assert_allclose(found.values, values[[-1, -2, 0]], atol=bound)

    whole = Krylov(given, size, generator())
    for _ in range(size):
        whole.extend()
    assert hutchpp(given, whole, 2, generator())[0] == pytest.approx(values.sum(), abs=bound)

    direction = torch.randn(size, generator=generator(1), dtype=torch.float64)
    form = float(direction @ exact @ direction) / float(direction @ direction)
    assert quadratic_form(given, direction) == pytest.approx(form, abs=bound)

    density = spectral_density(given, probes=1, iterations=size, generator=generator(2))
    start = torch.randn(size, generator=generator(2), dtype=torch.float64).numpy()
    weights = (vectors.T @ (start / np.linalg.norm(start))) ** 2
    bumps = np.exp(-(((density.nodes[:, None] - values) / density.width) ** 2) / 2)
    expected = (bumps @ weights) / (density.width * math.sqrt(2 * math.pi))
    np.testing.assert_allclose(density.values, expected, atol=1e-6 * expected.max())
    first = float(weights @ values)
    assert float((density.weights * density.ritz).sum()) == pytest.approx(first, abs=bound)


@pytest.mark.parametrize("loss_name", ["nll", "expected_failure"])
def test_a_fisher_is_positive_and_for_nll_the_gauss_newton_matrix(loss_name):
    fisher = materialized("fisher", loss_name, "all")
    assert float(torch.linalg.eigvalsh(fisher)[0]) > -1e-12
    if loss_name == "nll":
        torch.testing.assert_close(fisher, materialized("gauss_newton", loss_name, "all"))


def test_differences_of_gradients_measure_their_own_error():
    net, _, dense = net_and_dense()
    for dtype, bound in ((torch.float64, 1e-7), (torch.float32, 3e-3)):
        parameters = [p for p in net.parameters() if p.requires_grad]
        x = torch.randn(7, 4, generator=generator(), dtype=torch.float64).to(dtype)
        net.to(dtype)
        surface = Surface(lambda x=x: net(x), parameters)
        product = surface.finite_difference()
        vector = torch.randn(len(dense), generator=generator(3), dtype=torch.float64)
        truth = dense @ vector
        error = float(((product @ vector.to(dtype)).double() - truth).norm() / truth.norm())
        assert error < bound and error < 3 * product.error + 1e-9
        assert product.error < 30 * bound


def test_a_function_without_second_derivatives_has_differences():
    x = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    found = curvature(lambda: OpaqueCube.apply(x).sum(), [x], operator="finite_difference")
    assert found.converged and found.largest == pytest.approx(12, rel=1e-6)
    rows = {row.quantity: row.value for row in found.estimates()}
    assert rows["finite_difference.largest"] == found.largest
    assert rows["finite_difference.product_error"] == found.product_error < 1e-6


def test_fused_attention_has_differences():
    model, batch = setting()
    with lm_surface(model, objective("nll", batch), check="off", fused=True) as surface:
        found = curvature(surface, None, operator="finite_difference", trace_probes=0, check="off")
    exact = np.linalg.eigvalsh(oracle("hessian", "nll").numpy())
    assert found.largest == pytest.approx(exact[-1], rel=1e-5)


def test_gauss_newton_of_a_closure_from_its_outputs():
    weight = torch.randn(3, 2, generator=generator(), dtype=torch.float64, requires_grad=True)
    x = torch.randn(5, 3, generator=generator(1), dtype=torch.float64)
    product = gauss_newton_product(x @ weight, lambda z: z.pow(4).sum(), [weight])
    found = torch.stack([product(unit) for unit in torch.eye(6, dtype=torch.float64)])
    exact = torch.func.hessian(lambda w: (x @ w).pow(4).sum())(weight.detach()).reshape(6, 6)
    torch.testing.assert_close(found, exact)  # the outputs are linear in the weights
    linear = gauss_newton_product(x @ weight, lambda z: z.sum(), [weight])
    assert float(linear(torch.ones(6, dtype=torch.float64)).norm()) == 0


def test_the_preconditioner_is_adams_and_the_threshold_is_where_it_becomes_unstable():
    """On a quadratic with frozen second moments AdamW with momentum diverges above the threshold and not below it."""
    theta = torch.nn.Parameter(torch.tensor([1.0, -0.5], dtype=torch.float64))
    optimizer = torch.optim.AdamW([theta], lr=0.1, betas=(0.9, 0.99), weight_decay=0.0)
    for _ in range(3):
        theta.grad = torch.tensor([2.0, -3.0], dtype=torch.float64)
        optimizer.step()
    v = (1 - 0.99**3) * torch.tensor([4.0, 9.0], dtype=torch.float64)
    p = (1 - 0.9**3) * ((v / (1 - 0.99**3)).sqrt() + 1e-8)
    torch.testing.assert_close(adam_scale(optimizer, [theta]), p.rsqrt())
    assert threshold(optimizer) == pytest.approx(3.8 / (0.1 * 0.1))

    def grows(value: float) -> bool:
        x, m = 1.0, 0.0
        for _ in range(3000):
            m = 0.9 * m + 0.1 * value * x
            x -= 0.1 * m
        return abs(x) > 1

    assert grows(1.02 * threshold(optimizer)) and not grows(0.98 * threshold(optimizer))
    with pytest.raises(UserError, match="no second moment yet"):
        adam_scale(torch.optim.AdamW([theta]), [theta])
    with pytest.raises(UserError, match="Adam and AdamW"):
        adam_scale(torch.optim.SGD([theta], lr=1.0), [theta])


def test_names_of_parameters():
    model, _ = setting()
    assert len(select_parameters(model, "all")) == len(list(model.parameters()))
    assert {p.shape[0] for p in select_parameters(model, "embedding")} == {VOCABULARY}
    with pytest.raises(UserError, match="parameters, 'atention'; did you mean 'attention'"):
        select_parameters(model, "atention")
    with pytest.raises(UserError, match=r"did you mean .0\.mlp."):
        select_parameters(model, "norm+7.mlp")


def test_the_density_of_many_probes_is_that_of_the_spectrum_within_its_band():
    values = np.r_[[9.0, -4.0], np.random.default_rng(0).normal(size=58)]
    inside, places = 0, 0
    for seed in range(20):
        found = spectral_density(
            operator(with_spectrum(values)), probes=16, width=0.5, generator=generator(seed)
        )
        bumps = np.exp(-(((found.nodes[:, None] - values) / 0.5) ** 2) / 2)
        exact = bumps.mean(1) / (0.5 * math.sqrt(2 * math.pi))
        near = exact > 0.02 * exact.max()
        half = 2.131 * found.std_error  # Student's t of 15 degrees of freedom
        inside += int((np.abs(found.values - exact) <= half)[near].sum())
        places += int(near.sum())
        assert np.trapezoid(found.values, found.nodes) == pytest.approx(1, abs=1e-3)
    assert 0.88 < inside / places < 0.99


def test_an_operator_counts_its_products():
    given = Operator([torch.zeros(3)], lambda v: 2 * v)
    scaled = Preconditioned(given, torch.ones(3))
    assert float((scaled @ torch.ones(3)).sum()) == 6 and scaled.products == given.products == 1
    assert isinstance(FiniteDifference([torch.ones(3)], lambda s: s), Operator)


@pytest.mark.parametrize("backend", ["curvlinops", "pyhessian"])
def test_other_libraries_agree_on_a_language_model(backend):
    if backend == "curvlinops":
        pytest.importorskip("curvlinops", reason="pip install curvlinops-for-pytorch")
    model, batch = setting()
    exact = np.linalg.eigvalsh(oracle("hessian", "nll").numpy())
    options = {"tolerance": 1e-6, "max_products": 2000, "trace_probes": 20, "check": "off"}
    padded = objective("nll", batch)
    with lm_surface(model, padded, check="off") as surface:
        found = curvature(surface, None, backend=backend, **options)
    assert found.largest == pytest.approx(exact[-1], rel=1e-3)
    assert abs(found.trace - exact.sum()) < 5 * found.trace_std_error
    with pytest.raises(UserError, match="eigenvalues and trace of the Hessian only"):
        curvature(surface, None, backend=backend, operator="fisher")


@pytest.mark.parametrize(
    ("backend", "distribution"),
    [("pyhessian", "pyhessian"), ("curvlinops", "curvlinops-for-pytorch")],
)
def test_a_backend_that_is_not_installed_is_named_with_its_fix(monkeypatch, backend, distribution):
    module = "pyhessian.hessian" if backend == "pyhessian" else backend
    monkeypatch.setitem(sys.modules, module, None)
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(UserError) as error:
        curvature(lambda: weight.square().sum(), [weight], backend=backend)
    assert str(error.value) == (
        f"backend, '{backend}': it is not installed; pip install {distribution}"
    )

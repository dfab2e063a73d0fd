"""A round of probes leaves no trace, whatever stops it; nothing that is not a number, or not converged, goes unsaid."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sharpscope.probes import ProbesSpec, gradient_norm, measure, probe_set_batches, run, runner, squared_gradient_norm
from sharpscope.probes.hessian import CurvatureSettings, FunctionOperator, curvature_of, eigenpairs, spectral_density
from sharpscope.probes.hessian import check as hessian_check
from sharpscope.probes.hessian.causal_lm import lm_surface
from sharpscope.probes.hessian.operators import GraphHessian
from sharpscope.probes.objectives import Objective, completion_batch, token_batch
from sharpscope.probes.perturbation import m_sharpness_of
from tests.models import random_batch, tiny_model
from tests.probes.test_guard import assert_same, disturbed, snapshot
from tests.probes.test_probe_set import built, draw

SPEC = ProbesSpec(
    preset="standard",
    max_products=12,
    trace_probes=2,
    density_steps=4,
    rhos=(0.05,),
    kinds=("sam", "average", "worst"),
    worst_steps=3,
    m=1,
    gauss_newton=True,
    groups=True,
    top=1,
    tolerance=0.9,
)


def objective(batch, name: str = "expected_failure") -> Objective:
    tokens = token_batch(batch["input_ids"], batch["attention_mask"], batch["mask"])
    return Objective(name, tokens)


def backends() -> tuple[bool, ...]:
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()


@pytest.mark.parametrize(
    ("stop", "nth"),
    [*((RuntimeError, nth) for nth in (1, 2, 5, 20, 40)), (KeyboardInterrupt, 2), (KeyboardInterrupt, 20)],
)
def test_everything_is_as_before_whatever_stops_a_round(stop, nth):
    """The model's last norm raises at its nth call: in the anchors, the graph, a product's set-up, at a moved place, …"""
    model, batch = disturbed("qwen2"), random_batch()
    inner, calls = model.model.norm.forward, 0

    def forward(x):
        nonlocal calls
        calls += 1
        if calls == nth:
            raise stop
        return inner(x)

    model.model.norm.forward = forward
    before, kernels = snapshot(model), backends()
    with pytest.raises(stop):
        measure(model, objective(batch), SPEC)
    assert calls == nth and backends() == kernels
    assert_same(before, snapshot(model))
    model.model.norm.forward = inner
    measure(model, objective(batch), SPEC)
    assert_same(before, snapshot(model))


def test_the_error_of_m_sharpness_is_over_prompts_where_groups_lie_within_them(monkeypatch):
    asked = []

    def spy(surfaces, rho, *, seed, prompts):
        asked.append((len(surfaces), prompts))
        return m_sharpness_of(surfaces, rho, seed=seed, prompts=prompts)

    monkeypatch.setattr(runner, "m_sharpness_of", spy)
    texts = [([5, 6], [7, 8]), ([5, 6], [9]), ([5, 6], [3, 3, 4]), ([5, 6], [8]), ([5], [6, 4]), ([5], [2])]
    batch = completion_batch(texts, reward=torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0]))
    assert batch.prompts == [0, 0, 0, 0, 1, 1]
    model = tiny_model("qwen2")
    for m, expected in ((1, (6, [0, 0, 0, 0, 1, 1])), (2, (3, [0, 0, 1])), (3, (2, None))):
        spec = SPEC.model_copy(update={"m": m, "kinds": ("sam",)})
        measure(model, Objective("expected_failure", batch), spec, curvature=False, slices=False)
        assert asked.pop() == expected and not asked


def test_a_model_that_is_not_finite_gives_reasons_for_every_missing_number():
    model, batch = tiny_model("qwen2", dtype=torch.float32), random_batch()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = math.nan
    found = measure(model, objective(batch, "nll"), SPEC)
    missing = [e for e in found.estimates if math.isnan(e.value) and not e.quantity.endswith("_ratio")]
    assert {e.quantity for e in missing} >= {"gradient_norm", "largest", "smallest", "trace", "sam", "average", "worst"}
    assert not any(e.converged for e in missing) and all(e.why for e in missing if e.probe != "slice")
    assert len(found.problems) >= len(missing)
    assert found.curvature is not None and not found.curvature.converged


def test_curvature_with_wrong_products_is_left_out_with_a_reason(monkeypatch):
    model, batch = tiny_model(), random_batch()
    monkeypatch.setattr(GraphHessian, "product", lambda operator, vector: 2 * vector)
    wrong = measure(model, objective(batch), SPEC)
    rows = {e.quantity: e for e in wrong.estimates if e.probe == "curvature"}
    assert list(rows) == ["largest"] and math.isnan(rows["largest"].value) and wrong.curvature is None
    assert "left out" in rows["largest"].why and "finite difference" in rows["largest"].why
    assert any("left out" in problem for problem in wrong.problems)
    assert "sam" in {e.quantity for e in wrong.estimates}
    trusting = measure(model, objective(batch), SPEC.model_copy(update={"check": "off"}))
    assert trusting.curvature is not None and trusting.curvature.checked is None


@pytest.mark.parametrize(("check", "times"), [("off", 0), ("first", 1), ("always", 3)])
def test_products_are_checked_as_often_as_asked(monkeypatch, check, times):
    calls = 0
    inner = hessian_check._check_language_model

    def counted(surface, streams):
        nonlocal calls
        calls += 1
        return inner(surface, streams)

    monkeypatch.setattr(hessian_check, "_check_language_model", counted)
    model, batch = tiny_model(), random_batch()
    spec = ProbesSpec(preset="cheap", check=check, max_products=4, trace_probes=0, density_samples=0)
    for _ in range(3):
        found = measure(model, objective(batch), spec, perturbation=False).curvature
        assert found is not None and (found.checked is None if check == "off" else found.checked < 0.01)
    assert calls == times
    if check == "first":
        model.lm_head.weight.requires_grad_(False)  # another set of parameters
        measure(model, objective(batch), spec, perturbation=False)
        assert calls == 2


def test_variants_share_one_gradient_and_one_graph(monkeypatch):
    """The plain and the preconditioned Hessian, SAM and slices: one gradient at θ and one graph for all of them.

    Other gradients are of parts of the rows.
    """
    from sharpscope.probes.hessian.causal_lm import LmSurface

    model, batch = tiny_model("qwen2", dtype=torch.float32), random_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss.backward()
    optimizer.step()
    counts = {"gradient_by_prompt": 0, "hessian": 0}
    for name in counts:
        inner = getattr(LmSurface, name)

        def counted(self, inner=inner, name=name):
            counts[name] += int(len(self.objective.batch) == len(batch["input_ids"]))
            return inner(self)

        monkeypatch.setattr(LmSurface, name, counted)
    spec = ProbesSpec(preset="standard", max_products=12, rhos=(0.05, 0.5), density_steps=4)
    found = measure(model, objective(batch, "nll"), spec, optimizer=optimizer)
    assert counts == {"gradient_by_prompt": 1, "hessian": 1}
    assert {"preconditioned_largest", "slice_gradient", "sam", "density"} <= {e.quantity for e in found.estimates}


def test_shared_or_not_the_preconditioned_eigenvalue_is_the_same():
    from sharpscope.probes.hessian import adamw_preconditioner

    model, batch = tiny_model("qwen2", dtype=torch.float32), random_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss.backward()
    optimizer.step()
    spec = ProbesSpec(preset="cheap", preconditioned=True, tolerance=1e-3, max_products=100)
    rows = measure(model, objective(batch, "nll"), spec, optimizer=optimizer).estimates
    shared = next(e for e in rows if e.quantity == "preconditioned_largest")
    with lm_surface(model, objective(batch, "nll")) as surface:
        diagonal = adamw_preconditioner(optimizer, surface.parameters)
        settings = CurvatureSettings(tolerance=1e-3, trace_probes=0, density_samples=0)
        alone = curvature_of(surface, settings, preconditioner=diagonal)
    assert shared.converged and alone.converged
    assert shared.value == pytest.approx(alone.largest, rel=1e-4)


def test_a_run_for_eigenpairs_is_a_sample_of_the_density():
    """A quadrature of m steps from the start v has Σ w·nodeᵏ = vᵀHᵏv for k < 2m, also when made longer."""
    matrix = torch.randn(40, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix = matrix + matrix.T
    operator = FunctionOperator(lambda v: matrix @ v, 40, torch.float64, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    space = eigenpairs(operator, tolerance=0.5, max_products=20, generator=generator).krylov
    size, start = space.size, space.basis[0].clone()
    before = operator.products
    found = spectral_density(operator, samples=2, steps=8, generator=generator, first=space)
    assert operator.products - before == found.products == (8 - size) + 8
    vector = start
    for power in range(1, 12):
        vector = matrix @ vector
        moment = (found.weights[0] * found.nodes[0] ** power).sum()
        assert moment == pytest.approx(float(start @ vector), rel=1e-8)
    np.testing.assert_allclose(found.weights.sum(1), 1)


def test_memory_limits_and_the_self_check_reach_every_probe(monkeypatch):
    """Also the gradient norm of the command, which had its own defaults."""
    asked = []

    def spied(*arguments, **options):
        asked.append({name: options[name] for name in ("microbatch_tokens", "head_mb", "check")})
        return lm_surface(*arguments, **options)

    monkeypatch.setattr(runner, "lm_surface", spied)
    monkeypatch.setattr(gradient_norm, "lm_surface", spied)
    limits = {"microbatch_tokens": 96, "head_mb": 1.5, "check": "off"}
    spec = ProbesSpec(preset="cheap", functionals=("nll", "surrogate"), gradient_samples=4, max_products=4, **limits)
    model = tiny_model("qwen2", dtype=torch.float32)
    batches = [*probe_set_batches(built(), spec, draw, temperature=0.5, seed=len)]
    assert [(len(batch.objectives), batch.seed, batch.slices) for batch in batches] == [
        (2, 5, True),
        (2, 7, False),
        (0, 11, True),
    ]
    results = [*run(model, batches, spec)]
    assert asked == [limits] * 5
    assert {row.quantity for row in results[-1].estimates} == {"squared_gradient_norm", "squared_gradient_norm_naive"}
    assert {row.probe_set for row in results[-1].estimates} == {batches[0].name}
    alone = squared_gradient_norm(model, batches[-1].drawn, temperature=0.5, seed=11, **limits)
    assert [row.value for row in alone] == [row.value for row in results[-1].estimates]


def test_one_prompt_has_no_gradient_norm():
    spec = ProbesSpec(preset="cheap", gradient_samples=4)
    assert [len(batch.objectives) for batch in probe_set_batches(built(train=1, heldout=0), spec, draw)] == [1]

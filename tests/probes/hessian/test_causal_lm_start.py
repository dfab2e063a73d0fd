"""Where Lanczos starts on a causal language model: vectors from the binary Gauss-Newton matrix, against loops over autograd."""

from __future__ import annotations

import itertools

import pytest
import torch

from sharpscope.probes.hessian import CurvatureSettings, curvature_of
from sharpscope.probes.hessian.causal_lm import lm_surface
from sharpscope.probes.objectives import OBJECTIVES, Objective, token_batch
from tests.models import random_batch, tiny_model
from tests.probes.small_lm import SMALL, VOCAB, objective, small_model


def curved(surface, generator) -> torch.Tensor:
    """(N, P) each row's Σ_t ξ_t √(|∂L/∂log π_t| π_t/(1 − π_t)) ∇log π_t, token by token through the whole model."""
    logp = surface.logp().requires_grad_()
    rows, width = logp.shape
    loss = surface.objective.share(torch.arange(rows), logp, width=width)
    (pull,) = torch.autograd.grad(loss, logp)
    found = []
    for i, length in enumerate(surface.objective.batch.lengths.tolist()):
        normal = torch.randn(1, length, generator=generator, dtype=torch.float64)[0]
        ids = surface.objective.batch.input_ids[i : i + 1, :length]
        z = surface.model(input_ids=ids).logits[0].double() / surface.objective.temperature
        total = torch.zeros(sum(p.numel() for p in surface.parameters), dtype=torch.float64)
        for t in surface.objective.batch.scored[i].nonzero()[:, 0].tolist():
            one = torch.log_softmax(z[t - 1], -1)[ids[0, t]]
            p = float(one.detach().exp())
            g = torch.autograd.grad(one, surface.parameters, retain_graph=True, allow_unused=True)
            flat = torch.cat(
                [
                    torch.zeros_like(q).flatten() if d is None else d.flatten()
                    for d, q in zip(g, surface.parameters, strict=True)
                ]
            )
            total += float(normal[t]) * float(pull[i, t].abs() * p / (1 - p)) ** 0.5 * flat
        found.append(total)
    return torch.stack(found)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_lanczos_starts_from_ritz_vectors_of_the_few_rows_with_the_most_curvature(name):
    model, batch = small_model(), random_batch(vocab=VOCAB, rows=9, prompt=3, completion=4)
    with lm_surface(model, objective(name, batch)) as surface:
        generator, lengths = torch.Generator().manual_seed(3), surface.objective.batch.lengths
        norms = curved(surface, generator).norm(dim=1)
        left, chosen = 0.25 * float(lengths.sum()), []
        for row in norms.argsort(descending=True).tolist():
            if int(lengths[row]) <= left:
                chosen.append(row)
                left -= int(lengths[row])
        assert 1 < len(chosen) < 5
        few = surface.over(surface.objective.rows(torch.tensor(sorted(chosen))))
        start = surface.start(torch.Generator().manual_seed(3))
        assert surface.start_products == pytest.approx(3 * float(lengths[chosen].sum()) / float(lengths.sum()))
        # The same draws: one number a token of all rows, one for each of the chosen rows, the noise.
        first = curved(few, generator).sum(0)
        noise = torch.randn(len(start), generator=generator, dtype=torch.float64)
        first = first / first.norm() + 0.05 * noise / noise.norm()
        hessian = few.hessian()
        second = hessian @ first
        basis = torch.linalg.qr(torch.stack([first, second, hessian @ second]).T).Q
        values, vectors = torch.linalg.eigh(basis.T @ torch.stack([hessian @ column for column in basis.T]).T)
    torch.testing.assert_close(((basis @ vectors).T @ start).abs(), values**2)
    torch.testing.assert_close(basis @ (basis.T @ start), start)


def test_where_no_row_is_short_enough_lanczos_starts_from_a_draw_of_all_rows():
    model, batch = small_model(), random_batch(vocab=VOCAB, rows=2, prompt=3, completion=4)
    with lm_surface(model, objective("surrogate", batch), microbatch_tokens=8) as surface:
        start = surface.start(torch.Generator().manual_seed(4))
        torch.testing.assert_close(start, curved(surface, torch.Generator().manual_seed(4)).sum(0))
        assert surface.start_products == 0


def test_with_two_words_the_draws_have_the_gauss_newton_matrix_as_their_covariance(monkeypatch):
    """Σ over the tokens' numbers, each 1 in turn and all others 0, of ⟨Σ u_i, v⟩² is vᵀGv: no sampling."""
    model, batch = tiny_model("qwen2", vocab=2, **SMALL), random_batch(vocab=VOCAB, rows=3, prompt=3, completion=4)
    batch["input_ids"] %= 2
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(6)  # probabilities from near 0 to near 1
    generator = torch.Generator().manual_seed(5)
    with lm_surface(model, objective("nll", batch)) as surface:
        logp = surface.logp()[surface.objective.batch.scored]
        assert float(logp.min()) < -2 and float(logp.max()) > -0.1
        product = surface.gauss_newton()
        vector = torch.randn(product.size, generator=generator, dtype=torch.float64)
        expected = float(vector @ (product @ vector))
        found = 0.0
        for row, length in enumerate(surface.objective.batch.lengths.tolist()):
            for place in range(length):
                calls = itertools.count()

                def one(shape, row=row, place=place, calls=calls, **rest):
                    numbers = torch.zeros(shape, dtype=torch.float64)
                    if next(calls) == row:
                        numbers[0, place] = 1.0
                    return numbers

                with monkeypatch.context() as patch:
                    patch.setattr(torch, "randn", one)
                    found += float(surface._curved(generator)[0] @ vector) ** 2
    assert found == pytest.approx(expected, rel=1e-5)


def test_lanczos_starts_at_random_where_every_gradient_is_zero():
    model, batch = small_model(), random_batch(vocab=VOCAB, rows=9, prompt=3, completion=4)
    tokens = token_batch(batch["input_ids"], batch["attention_mask"], batch["mask"], reward=torch.zeros(9))
    settings = CurvatureSettings(trace_probes=0, density_samples=0)
    with lm_surface(model, Objective("expected_failure", tokens)) as surface:
        assert float(surface.start(torch.Generator().manual_seed(0)).norm()) == 0
        found = curvature_of(surface, settings)
    assert found.converged and (found.largest, found.smallest, found.gradient_norm) == (0, 0, 0)

"""Where Lanczos starts on a causal language model: the sharpest tokens' part of the Gauss-Newton matrix, against loops over autograd."""

from __future__ import annotations

import pytest
import torch

from sharpscope.probes.hessian import CurvatureSettings, causal_lm, curvature_of
from sharpscope.probes.hessian.causal_lm import START_TOKENS, LmSurface, lm_surface
from sharpscope.probes.objectives import OBJECTIVES, Objective, token_batch
from tests.models import random_batch, tiny_model
from tests.probes.small_lm import SMALL, VOCAB, objective, small_model

NO_TRACE = CurvatureSettings(trace_probes=0, density_samples=0)


def weights(surface) -> torch.Tensor:
    """(N, S) √(|∂L/∂log π| π/(1 − π)) of the scored tokens, 0 elsewhere."""
    logp = surface.logp().requires_grad_()
    loss = surface.objective.share(torch.arange(len(logp)), logp, width=logp.shape[1])
    (pull,) = torch.autograd.grad(loss, logp)
    p = logp.detach().exp()
    return torch.where(surface.objective.batch.scored, (pull.abs() * p / (1 - p)).sqrt(), 0.0)


def token_gradients(surface) -> tuple[dict[tuple[int, int], torch.Tensor], torch.Tensor]:
    """∇log π (P,) of each scored token, through the whole model, and the norms (N, S) of Σ_s w_s ∂log π_s/∂x_t at the embeddings."""
    batch, weight = surface.objective.batch, weights(surface)
    found, norms = {}, torch.zeros_like(weight)
    for row, length in enumerate(batch.lengths.tolist()):
        ids, places = batch.input_ids[row : row + 1, :length], batch.scored[row].nonzero()[:, 0].tolist()
        embedded = surface.model.get_input_embeddings()(ids).detach().requires_grad_()
        for at in ({"input_ids": ids}, {"inputs_embeds": embedded}):
            z = surface.model(**at).logits[0].double() / surface.objective.temperature
            logp = {t: torch.log_softmax(z[t - 1], -1)[ids[0, t]] for t in places}
            if "input_ids" in at:
                for t, one in logp.items():
                    g = torch.autograd.grad(one, surface.parameters, retain_graph=True, allow_unused=True)
                    parts = [
                        torch.zeros_like(q) if d is None else d for d, q in zip(g, surface.parameters, strict=True)
                    ]
                    found[row, t] = torch.cat([part.flatten() for part in parts])
            else:
                (arriving,) = torch.autograd.grad(sum(float(weight[row, t]) * logp[t] for t in places), embedded)
                for t in places:
                    norms[row, t] = arriving[0, t - 1].norm()
    return found, norms


@pytest.mark.parametrize("microbatch_tokens", [8, 4096])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_lanczos_starts_from_the_first_eigenvector_of_the_sharpest_tokens(name, microbatch_tokens):
    model, batch = small_model(), random_batch(vocab=VOCAB, rows=9, prompt=3, completion=4)
    with lm_surface(model, objective(name, batch), microbatch_tokens=microbatch_tokens) as surface:
        start, weight = surface.start(), weights(surface)
        gradients, norms = token_gradients(surface)  # the only layer reads the embeddings
        chosen = sorted(gradients, key=lambda token: -float(norms[token]))[:START_TOKENS]
        assert surface.start_tokens == sorted(chosen) and len({row for row, _ in chosen}) > 2
    spanning = torch.stack([weight[token] * gradients[token] for token in chosen])
    values, vectors = torch.linalg.eigh(spanning.T @ spanning)
    assert float(values[-1]) > 1.05 * float(values[-2])
    torch.testing.assert_close(start.norm() ** 2, values[-1])
    torch.testing.assert_close((vectors[:, -1] @ start).abs(), start.norm())


def test_with_two_words_all_tokens_together_are_the_gauss_newton_matrix():
    """vᵀGv = Σ_t w_t² ⟨∇log π_t, v⟩²."""
    model, batch = tiny_model("qwen2", vocab=2, **SMALL), random_batch(vocab=VOCAB, rows=3, prompt=3, completion=4)
    batch["input_ids"] %= 2
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(6)  # probabilities from near 0 to near 1
    with lm_surface(model, objective("nll", batch)) as surface:
        logp = surface.logp()[surface.objective.batch.scored]
        assert float(logp.min()) < -2 and float(logp.max()) > -0.1
        product = surface.gauss_newton()
        vector = torch.randn(product.size, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        weight, _ = surface._sharp()
        gradients, _ = token_gradients(surface)
        found = sum(float(weight[token] * (g @ vector)) ** 2 for token, g in gradients.items())
        assert found == pytest.approx(float(vector @ (product @ vector)), rel=1e-5)


def test_lanczos_starts_at_random_where_every_gradient_is_zero():
    model, batch = small_model(), random_batch(vocab=VOCAB, rows=9, prompt=3, completion=4)
    tokens = token_batch(batch["input_ids"], batch["attention_mask"], batch["mask"], reward=torch.zeros(9))
    with lm_surface(model, Objective("expected_failure", tokens)) as surface:
        assert float(surface.start().norm()) == 0 and surface.start_tokens == []
        found = curvature_of(surface, NO_TRACE)
    assert found.converged and (found.largest, found.smallest, found.gradient_norm) == (0, 0, 0)


def test_lanczos_starts_at_random_if_layers_are_not_marked_or_gradients_overflow(monkeypatch):
    model, batch = small_model(), random_batch(vocab=VOCAB, rows=3, prompt=3, completion=4)
    with lm_surface(model, objective("nll", batch)) as surface:
        expected = curvature_of(surface, NO_TRACE).largest
        for owner, name, value in (
            (causal_lm, "marked_layers", lambda backbone: []),
            (LmSurface, "pull_back", lambda self, *_: [torch.full((surface.hessian().size,), torch.inf)]),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, value)
                start = surface.start()
                assert start.shape == (surface.hessian().size,) and float(start.norm()) == 0
                assert curvature_of(surface, NO_TRACE).largest == pytest.approx(expected, rel=1e-5)


def test_the_start_needs_no_gradient_of_the_layers_below():
    """As where only the output layer is trained."""
    model, batch = small_model(), random_batch(vocab=VOCAB, rows=3, prompt=3, completion=4)
    with lm_surface(model, objective("nll", batch)) as surface:
        head = surface.restricted([model.get_output_embeddings().weight])
        whole, _ = token_gradients(surface)
        own, _ = token_gradients(head)
        weight, start = weights(head), head.start()
        assert start.shape == next(iter(own.values())).shape != next(iter(whole.values())).shape
        spanning = torch.stack([weight[token] * own[token] for token in head.start_tokens])
    torch.testing.assert_close(start.norm() ** 2, torch.linalg.eigvalsh(spanning @ spanning.T)[-1])

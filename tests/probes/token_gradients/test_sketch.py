"""The sketch is the estimator that it says, and that estimator is unbiased and knows its error."""

from __future__ import annotations

import pytest
import torch

from sharpscope.probes import score_norms
from sharpscope.probes.guard import guarded
from sharpscope.probes.token_gradients.sketch import draw_direction
from sharpscope.probes.token_gradients.structure import structure_of
from tests.models import ARCHITECTURES, random_batch, tiny_model
from tests.oracles.token_gradients import local_token_gradients, squared_norms, token_gradients

T = 1.3


def flat(gradients):
    """(M, P) of all tokens' gradients."""
    return torch.stack([torch.cat([part.flatten() for part in gradient]) for gradient in gradients.values()])


def oracle(model, batch):
    """Full and local gradients (M, P) and the masked places."""
    arguments = (model, batch["input_ids"], batch["mask"], batch["attention_mask"], T)
    full = token_gradients(*arguments)
    return flat(full), flat(local_token_gradients(*arguments)), list(full)


def estimates(full, local, directions):
    """The estimator, from gradients formed whole: mean and standard error over `directions` (K, P), (M,) each."""
    gained = (directions @ full.T).square() - (directions @ local.T).square()  # (K, M)
    return gained.mean(0) + local.square().sum(1), gained.std(0) / len(directions) ** 0.5


@pytest.mark.parametrize(
    ("architecture", "tie"), [(a, tie) for a in sorted(set(ARCHITECTURES) - {"gemma2"}) for tie in (True, False)]
)
def test_the_sketch_is_its_formula(architecture, tie):
    model, batch = tiny_model(architecture, tie=tie), random_batch(rows=2)
    full, local, places = oracle(model, batch)
    found = score_norms(
        model, batch["input_ids"], batch["mask"], "sketch", batch["attention_mask"], T, directions=3, seed=7
    )
    generator = torch.Generator().manual_seed(7)
    structure = structure_of(model)
    drawn = torch.stack([torch.cat([v.flatten() for v in draw_direction(structure, generator)]) for _ in range(3)])
    mean, error = estimates(full, local, drawn)
    at = tuple(torch.tensor(places).T)
    scale = float(full.square().sum(1).max())
    torch.testing.assert_close(found.squared[at], mean, rtol=1e-6, atol=1e-8 * scale)
    torch.testing.assert_close(found.std_error[at], error, rtol=1e-5, atol=1e-8 * scale)
    assert torch.equal(found.values, found.squared.clamp_min(0).sqrt())
    assert not found.std_error[batch["mask"] == 0].any()


def test_norms_whose_bias_alone_is_trained():
    model, batch = tiny_model("gpt2"), random_batch(rows=2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("ln_" in name and name.endswith("bias"))
    full, local, places = oracle(model, batch)
    found = score_norms(
        model, batch["input_ids"], batch["mask"], "sketch", batch["attention_mask"], T, directions=3, seed=7
    )
    generator = torch.Generator().manual_seed(7)
    structure = structure_of(model)
    drawn = torch.stack([torch.cat([v.flatten() for v in draw_direction(structure, generator)]) for _ in range(3)])
    mean, _ = estimates(full, local, drawn)
    torch.testing.assert_close(found.squared[tuple(torch.tensor(places).T)], mean, rtol=1e-6, atol=1e-12)


def test_unbiased_over_200_seeds_and_its_standard_error_covers():
    model, batch = tiny_model("qwen2", num_hidden_layers=2), random_batch(rows=2)
    full, local, _ = oracle(model, batch)
    truth = full.square().sum(1)
    structure, seeds, K = structure_of(model), 200, 32
    means, covered = [], []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.stack([torch.cat([v.flatten() for v in draw_direction(structure, generator)]) for _ in range(K)])
        mean, error = estimates(full, local, drawn)
        means.append(mean)
        covered.append((mean - truth).abs() <= 2.04 * error)  # 97.5 % point of Student's t with 31 degrees
    mean = torch.stack(means)
    bias = (mean.mean(0) - truth) / (mean.std(0) / seeds**0.5)
    assert float(bias.abs().max()) < 3.5, "an estimate is off by more than chance allows"
    assert 0.90 < float(torch.stack(covered).double().mean()) < 0.985


def test_the_control_variate_lowers_the_variance():
    """Where other positions matter little the sketch is nearly exact at few directions."""
    model, batch = tiny_model("qwen2"), random_batch(rows=2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.05)
    full, local, _ = oracle(model, batch)
    generator, structure = torch.Generator().manual_seed(0), structure_of(model)
    drawn = torch.stack([torch.cat([v.flatten() for v in draw_direction(structure, generator)]) for _ in range(64)])
    _, with_local = estimates(full, local, drawn)
    _, without = estimates(full, torch.zeros_like(local), drawn)
    assert float((with_local / without).median()) < 0.2


def test_same_seed_same_result_whatever_the_rest_of_the_batch(monkeypatch):
    from sharpscope.probes.token_gradients import rows as rows_module

    model, batch = tiny_model("qwen2"), random_batch()
    arguments = (model, batch["input_ids"], batch["mask"], "sketch", batch["attention_mask"])
    first = score_norms(*arguments, directions=4, seed=3)
    assert not torch.equal(first.squared, score_norms(*arguments, directions=4, seed=4).squared)
    monkeypatch.setitem(rows_module.CHUNK_TOKENS, "cpu", 8)  # one row a chunk
    torch.testing.assert_close(
        score_norms(*arguments, directions=4, seed=3).squared, first.squared, rtol=1e-9, atol=1e-12
    )


def test_sum_of_squares_is_the_trace_of_curvlinops_empirical_fisher():
    """Σ_t ‖∇log π_t‖² is the trace of the empirical Fisher of the summed loss over flattened logits."""
    curvlinops = pytest.importorskip("curvlinops")
    model = tiny_model("qwen2", vocab=11, num_hidden_layers=1, intermediate_size=6)
    ids = torch.randint(2, 11, (2, 5), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("v_proj" in name or "gate_proj" in name or "input_layernorm" in name)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    class Flat(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(input_ids=x, use_cache=False).logits[:, :-1].flatten(0, 1)

    fisher = curvlinops.EFLinearOperator(
        Flat(),
        torch.nn.CrossEntropyLoss(reduction="sum"),
        parameters,
        [(ids, ids[:, 1:].flatten())],
        check_deterministic=False,
        batch_size_fn=lambda x: x.shape[0],
    )
    size = sum(parameter.numel() for parameter in parameters)
    with guarded(model, attention="math"):  # fused attention has no forward mode
        trace = float((fisher @ torch.eye(size, dtype=torch.float64)).trace())
    found = float(score_norms(model, ids, mask, "exact").squared.sum())
    assert found == pytest.approx(trace, rel=1e-8)
    oracle = float(squared_norms(token_gradients(model, ids, mask), mask.shape).sum())
    assert found == pytest.approx(oracle, rel=1e-8)

"""The sketch is the estimator that it says, and that estimator is unbiased and knows its error."""

from __future__ import annotations

import pytest
import torch

from sharpscope.probes import score_norms
from sharpscope.probes.guard import guarded
from sharpscope.probes.token_gradients.structure import structure_of
from tests.models import random_batch, tiny_model, without_experts
from tests.oracles.token_gradients import local_token_gradients, squared_norms, token_gradients

T = 1.3


def oracle(model, batch):
    """Full and local gradients of the masked tokens by parameter name."""
    arguments = (model, batch["input_ids"], batch["mask"], batch["attention_mask"], T)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    both = token_gradients(*arguments), local_token_gradients(*arguments)
    return [{place: dict(zip(names, g, strict=True)) for place, g in each.items()} for each in both]


def estimates(model, batch, parts, directions, seed):
    """The estimator, from gradients formed whole: mean and standard error (M,) each."""
    full, local = parts
    structure = structure_of(model)
    generator = torch.Generator().manual_seed(seed)
    whole = structure.whole | {structure.head_weight, structure.head_bias}

    def signs_like(p):
        return (torch.randint(0, 2, p.shape, generator=generator, dtype=torch.int8) * 2 - 1).to(p.dtype)

    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad and name not in whole}
    drawn = [{n: signs_like(p) for n, p in parameters.items()} for _ in range(directions)]
    means, errors = [], []
    for place, g in full.items():
        norm = sum(float(part.square().sum()) for part in local[place].values())
        rest = {name: g[name] - local[place][name] for name in g}
        along = torch.tensor([sum(float((rest[n] * v[n]).sum()) for n in v) for v in drawn])
        inner = torch.tensor([sum(float((local[place][n] * v[n]).sum()) for n in v) for v in drawn])
        samples = along.square() + 2 * along * inner
        means.append(norm + float(samples.mean()))
        errors.append(float(samples.var() / directions) ** 0.5)
    return torch.tensor(means, dtype=torch.float64), torch.tensor(errors, dtype=torch.float64)


def norms_of(full):
    return torch.tensor([sum(float(part.square().sum()) for part in g.values()) for g in full.values()])


@pytest.mark.parametrize(
    ("architecture", "tie"), [("qwen2", True), ("gpt2", True), ("gpt_neox", False), ("qwen2_moe", False)]
)
def test_the_sketch_is_its_formula(architecture, tie):
    model, batch = without_experts(tiny_model(architecture, tie=tie)), random_batch(rows=2)
    parts = oracle(model, batch)
    found = score_norms(
        model, batch["input_ids"], batch["mask"], "sketch", batch["attention_mask"], T, directions=9, seed=7
    )
    mean, error = estimates(model, batch, parts, 9, 7)
    at = tuple(torch.tensor(list(parts[0])).T)
    scale = float(norms_of(parts[0]).max())
    torch.testing.assert_close(found.squared[at], mean, rtol=1e-6, atol=1e-8 * scale)
    torch.testing.assert_close(found.std_error[at], error, rtol=1e-5, atol=1e-8 * scale)
    assert torch.equal(found.values, found.squared.clamp_min(0).sqrt())
    assert not found.std_error[batch["mask"] == 0].any()


def test_norms_whose_bias_alone_is_trained():
    model, batch = tiny_model("gpt2"), random_batch(rows=2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("ln_" in name and name.endswith("bias"))
    found = score_norms(
        model, batch["input_ids"], batch["mask"], "sketch", batch["attention_mask"], T, directions=3, seed=7
    )
    parts = oracle(model, batch)
    mean, _ = estimates(model, batch, parts, 3, 7)
    torch.testing.assert_close(found.squared[tuple(torch.tensor(list(parts[0])).T)], mean, rtol=1e-6, atol=1e-12)


def test_unbiased_and_its_standard_error_covers():
    model, batch = tiny_model("qwen2", num_hidden_layers=2), random_batch(rows=2)
    parts = oracle(model, batch)
    truth, seeds, K = norms_of(parts[0]), 48, 16
    at = tuple(torch.tensor(list(parts[0])).T)
    means, covered = [], []
    for seed in range(seeds):
        found = score_norms(
            model, batch["input_ids"], batch["mask"], "sketch", batch["attention_mask"], T, directions=K, seed=seed
        )
        means.append(found.squared[at])
        covered.append((means[-1] - truth).abs() <= 2.13 * found.std_error[at])  # 97.5 % of Student's t, 15 degrees
    mean = torch.stack(means)
    random = mean.std(0) > 1e-9 * truth  # a row's first chosen token has no other positions behind it: it is exact
    torch.testing.assert_close(mean[:, ~random], truth[~random].to(mean).expand(seeds, -1))
    bias = (mean.mean(0) - truth) / (mean.std(0) / seeds**0.5)
    assert float(bias[random].abs().max()) < 3.5, "an estimate is off by more than chance allows"
    assert 0.88 < float(torch.stack(covered)[:, random].double().mean()) < 0.99


def test_the_control_variate_lowers_the_variance():
    """Where other positions matter little the sketch is nearly exact at few directions."""
    model, batch = tiny_model("qwen2", tie=False), random_batch(rows=2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.05)
    found = score_norms(model, batch["input_ids"], batch["mask"], "sketch", batch["attention_mask"], T, directions=32)
    chosen = batch["mask"].bool()
    # Without it, the mean of ⟨g, v⟩² has a standard error of √(2/32) of ‖g‖².
    assert float((found.std_error / found.squared)[chosen].median()) < 0.2 * (2 / 32) ** 0.5


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

"""⟨g_A, g_B⟩ of two halves against exact enumeration of a tiny policy's completions."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import t as student

from sharpscope.errors import UserError
from sharpscope.probes import Drawn, squared_gradient_norm
from sharpscope.probes.gradient_norm import _coefficients, _halves, _product
from tests.models import tiny_model

VOCAB, TEMPERATURE = 13, 0.7
PROMPTS = [[2, 5, 7], [3, 4, 9], [8, 2, 11]]
SHAPE = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
REWARD = (torch.arange(VOCAB) % 3 == 0).double()


@pytest.fixture(scope="module")
def world():
    """Model, probabilities (prompts, V) of one-token completions, and the gradients (prompts, V, P) of their logarithms."""
    model = tiny_model("qwen2", vocab=VOCAB, **SHAPE)
    parameters = list(model.parameters())
    logp = torch.log_softmax(model(input_ids=torch.tensor(PROMPTS)).logits[:, -1] / TEMPERATURE, -1)
    table = [
        [torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, parameters, retain_graph=True)]) for value in row]
        for row in logp
    ]
    return model, logp.exp().detach(), torch.stack([torch.stack(row) for row in table])


def drawn(tokens: torch.Tensor) -> Drawn:
    """One-token completions (prompts, n) as rollouts."""
    n = tokens.shape[1]
    prompts = torch.tensor(PROMPTS)[: len(tokens)].repeat_interleave(n, 0)
    ids = torch.cat([prompts, tokens.reshape(-1, 1)], 1)
    ones = torch.ones_like(ids)
    rollouts = SimpleNamespace(
        input_ids=ids,
        attention_mask=ones,
        completion_ids=ids[:, -1:],
        completion_mask=ones[:, -1:],
        behavior_logp=torch.zeros(len(ids), 1),
        group=torch.arange(len(tokens)).repeat_interleave(n),
        reward=REWARD[ids[:, -1]],
    )
    return Drawn(rollouts, REWARD[ids[:, -1]])


def test_each_half_has_the_gradient_of_the_expected_failure_by_enumeration(world):
    """E g_A = ∇J, and nothing of a half depends on the other: so E⟨g_A, g_B⟩ = ‖∇J‖²."""
    _, probability, table = world
    exact = -(probability[..., None] * REWARD[None, :, None] * table).sum(1).mean(0)  # ∇(1 − E R) (P,)
    group = torch.arange(3).repeat_interleave(4)
    halves, scored = _halves(group), torch.ones(12, 1, dtype=torch.bool)
    expected = torch.zeros_like(exact)
    for prompt in range(3):
        for pair in itertools.product(range(VOCAB), repeat=2):  # the two completions of a prompt's first half
            success = torch.full((12,), 0.5, dtype=torch.float64)
            rows = halves[prompt, 0]
            success[rows] = REWARD[list(pair)]
            coefficient = _coefficients("expected_failure", success, scored, halves)[:, 0]
            weight = probability[prompt, list(pair)].prod()
            expected += weight * (coefficient[rows, None] * table[prompt, list(pair)]).sum(0)
    torch.testing.assert_close(expected, exact, rtol=1e-9, atol=1e-12)
    for name in ("expected_failure", "surrogate"):
        one, other = torch.rand(12, dtype=torch.float64), torch.rand(12, dtype=torch.float64)
        mixed = torch.where(torch.isin(torch.arange(12), halves[:, 0].reshape(-1)), one, other)
        a, b = (_coefficients(name, success, scored, halves) for success in (one, mixed))
        assert torch.equal(a[halves[:, 0].reshape(-1)], b[halves[:, 0].reshape(-1)])


@pytest.mark.parametrize("memory_mb", [2048.0, 1e-6])
def test_the_product_is_that_of_the_halves_gradients(world, memory_mb):
    model, _, table = world
    tokens = torch.randint(0, VOCAB, (3, 4), generator=torch.Generator().manual_seed(1))
    before = [p.detach().clone() for p in model.parameters()]
    found = {
        (e.functional, e.quantity): e
        for e in squared_gradient_norm(model, drawn(tokens), temperature=TEMPERATURE, memory_mb=memory_mb, seed=5)
    }
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    for name in ("expected_failure", "surrogate"):
        halves = []
        for columns in ([0, 1], [2, 3]):
            total = 0.0
            for prompt in range(3):
                reward = REWARD[tokens[prompt, columns]]
                for i, column in enumerate(columns):
                    if name == "surrogate":
                        spread = float(reward.std())
                        advantage = float(reward[i] - reward.mean()) / (spread + 1e-4) if spread else 0.0
                    else:
                        advantage = float(reward[i] - reward[1 - i])
                    total = total - advantage * table[prompt, tokens[prompt, column]] / 6
            halves.append(total)
        value, naive = found[name, "squared_gradient_norm"], found[name, "squared_gradient_norm_naive"]
        assert value.value == pytest.approx(float(halves[0] @ halves[1]), rel=1e-8)
        assert naive.value == pytest.approx(float(((halves[0] + halves[1]) / 2).square().sum()), rel=1e-8)
        assert (value.samples, value.seed, value.probe) == (12, 5, "gradient") and value.std_error > 0


def test_it_is_unbiased_and_its_error_is_not_understated(world):
    """1,500 draws of 8 completions for each of 3 prompts, taken as 12 prompts by repeating them."""
    _, probability, table = world
    exact = float((probability[..., None] * REWARD[None, :, None] * table).sum(1).mean(0).square().sum())
    generator = torch.Generator().manual_seed(0)
    prompts, n = torch.arange(3).repeat(4), 8
    group = torch.arange(12).repeat_interleave(n)
    halves, scored = _halves(group), torch.ones(12 * n, 1, dtype=torch.bool)
    gram = (table.reshape(-1, table.shape[2]) @ table.reshape(-1, table.shape[2]).T).numpy()
    lift = torch.from_numpy(np.linalg.cholesky(gram + 1e-12 * np.eye(len(gram))))  # rows with the same inner products
    lift = lift.view(3, VOCAB, -1)
    values, errors = [], []
    for _ in range(1500):
        tokens = torch.multinomial(probability[prompts], n, replacement=True, generator=generator)  # (12, n)
        coefficient = _coefficients("expected_failure", REWARD[tokens].reshape(-1), scored, halves)[:, 0]
        each = coefficient[:, None] * lift[prompts.repeat_interleave(n), tokens.reshape(-1)]
        a, b = (each[halves[:, half]].sum(1) for half in (0, 1))  # (12, P)
        value, error = _product(a, b)
        values.append(value)
        errors.append(error)
    values, errors = np.array(values), np.array(errors)
    assert abs(values.mean() - exact) < 4 * values.std() / np.sqrt(len(values))
    assert 1.0 <= (errors**2).mean() / values.var() < 2.5
    inside = np.abs(values - exact) <= student.ppf(0.975, 11) * errors
    assert inside.mean() > 0.85  # a product of two noisy vectors is skewed: below the nominal 0.95


def test_what_cannot_be_halved_is_named(world):
    model, _, _ = world
    for tokens in (torch.zeros(3, 3), torch.zeros(3, 2), torch.zeros(1, 4)):
        with pytest.raises(UserError, match="gradient_samples"):
            squared_gradient_norm(model, drawn(tokens.long()))

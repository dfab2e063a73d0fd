"""⟨g_A, g_B⟩ of two halves against exact enumeration of a tiny policy's completions."""

from __future__ import annotations

import copy
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import t as student

from sharpscope.config.training import OptimizerSpec
from sharpscope.errors import UserError
from sharpscope.probes import Drawn, coming_step, noise_rotation, rotation, squared_gradient_norm
from sharpscope.probes.gradient_norm import _coefficients, _halves, _product
from sharpscope.training.setup import build_optimizer
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


# -- Rotation, scale and noise angle of gradients, against explicit float64 vectors; AdamW's coming step against the step it makes

SHAPES = [(7, 3), (5,), (2, 2, 4), ()]


def parts(seed: int, dtype=torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def flat(tensors) -> np.ndarray:
    return np.concatenate([t.detach().double().numpy().ravel() for t in tensors])


def angle(a: np.ndarray, b: np.ndarray) -> float:
    return math.degrees(math.acos(np.clip(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)), -1, 1)))


@pytest.mark.parametrize("mix", [0.0, 0.1, 1.0, -3.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rotation_is_the_angle_between_the_flat_vectors(mix, dtype):
    a, other = parts(0, dtype), parts(1, dtype)
    b = [mix * x + y for x, y in zip(a, other, strict=True)]
    found = rotation(iter(a), iter(b))
    assert found.angle == pytest.approx(angle(flat(a), flat(b)), abs=1e-6)
    assert found.scale == pytest.approx(np.linalg.norm(flat(a)) / np.linalg.norm(flat(b)), rel=1e-12)


def test_angles_near_0_and_180_are_exact():
    a = parts(0)
    assert rotation(a, a).angle == 0.0 and rotation(a, [-x for x in a]).angle == 180.0
    assert rotation([1.4 * x for x in a], a) == rotation([1.4 * x for x in a], a)
    assert rotation([1.4 * x for x in a], a).angle < 1e-5
    assert rotation([1.4 * x for x in a], a).scale == pytest.approx(1.4)
    first, second = np.linalg.qr(np.stack([flat(a), flat(parts(1))], 1))[0].T  # orthonormal
    for small in (1e-6, 1e-3):  # [rad]
        turned = torch.from_numpy(math.cos(small) * first + math.sin(small) * second)
        assert math.radians(rotation([turned], [torch.from_numpy(first)]).angle) == pytest.approx(small, rel=1e-8)


def test_a_missing_gradient_counts_as_zeros():
    a, b = parts(0), parts(1)
    zeros = [torch.zeros_like(x) for x in a]
    assert rotation([a[0], None, a[2], None], b) == rotation([a[0], zeros[1], a[2], zeros[3]], b)
    assert rotation([*a[:3], None], [*b[:3], None]) == rotation(a[:3], b[:3])
    assert math.isnan(rotation(zeros, b).angle) and rotation(zeros, b).scale == 0.0
    assert math.isnan(rotation(a, zeros).scale)
    with pytest.raises(ValueError, match="zip"):
        rotation(a, b[:2])


def test_noise_rotation_is_the_formula_on_flat_vectors():
    a, b = parts(0), [0.4 * x + y for x, y in zip(parts(0), parts(1), strict=True)]
    x, y = flat(a), flat(b)
    squared_cosine = x @ y / (0.25 * (x + y) @ (x + y))
    assert noise_rotation(a, b) == pytest.approx(math.degrees(math.acos(math.sqrt(squared_cosine))), abs=1e-9)
    assert math.tan(math.radians(noise_rotation(a, b))) == pytest.approx(
        np.linalg.norm(x - y) / (2 * math.sqrt(x @ y)), rel=1e-9
    )
    assert noise_rotation(a, a) == pytest.approx(0.0, abs=1e-5)
    assert noise_rotation(a, [-0.5 * t for t in a]) == 90.0
    assert noise_rotation([t / 3 for t in a], [t * 2 / 3 for t in a], share=1 / 3) == pytest.approx(0.0, abs=1e-5)
    assert math.isnan(noise_rotation(a, [-t for t in a]))
    with pytest.raises(ValueError, match="share"):
        noise_rotation(a, b, share=1.0)


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_noise_rotation_estimates_the_angle_to_the_expected_gradient(share):
    """Batches of 40 prompts with a known expected gradient: the true angle is arctan of noise over signal."""
    generator = np.random.default_rng(0)
    size, prompts, sd = 400, 40, 0.5
    mean = generator.normal(size=size)
    mean /= np.linalg.norm(mean)
    true = math.degrees(math.atan(sd * math.sqrt(size / prompts)))  # 57.7 degrees
    count = round(share * prompts)
    found, actual, naive = [], [], []
    for _ in range(200):
        each = (mean + sd * generator.normal(size=(prompts, size))) / prompts
        first, second = each[:count].sum(0), each[count:].sum(0)
        found.append(noise_rotation([torch.from_numpy(first)], [torch.from_numpy(second)], share))
        actual.append(angle(first + second, mean))
        naive.append(angle(first, second))
    assert np.mean(actual) == pytest.approx(true, abs=0.5)
    assert np.mean(found) == pytest.approx(true, abs=1.0)
    assert np.mean(naive) > true + 10  # what the debiasing corrects


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_coming_step_is_the_step_and_changes_no_state(decay):
    model = tiny_model("qwen2", tie=False)
    optimizer = build_optimizer(model, OptimizerSpec(lr=0.01, weight_decay=decay))
    parameters = list(model.parameters())
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        gradients = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
        gradients[2] = None
        state = copy.deepcopy(optimizer.state_dict())
        coming = list(coming_step(optimizer, parameters, gradients, 0.5))
        again = optimizer.state_dict()
        assert state["param_groups"] == again["param_groups"] and state["state"].keys() == again["state"].keys()
        for key, values in state["state"].items():
            assert all(torch.equal(value, again["state"][key][name]) for name, value in values.items())
        before = [p.detach().clone() for p in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient * 0.5
        optimizer.step()
        assert coming[2] is None and torch.equal(parameters[2], before[2])
        for step, parameter, old in zip(coming, parameters, before, strict=True):
            if step is not None:
                torch.testing.assert_close(step, parameter.detach() - old, rtol=1e-9, atol=1e-15)

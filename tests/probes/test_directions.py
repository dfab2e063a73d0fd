"""Rotation, scale and noise angle of gradients against explicit float64 vectors; AdamW's coming step against the step it makes."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from sharpscope import distributed
from sharpscope.config.run import OptimizerSpec
from sharpscope.probes import coming_step, noise_rotation, rotation, update_slope
from sharpscope.probes.directions import inner
from sharpscope.recording.norms import total_norm
from sharpscope.training.learner import build_optimizer
from tests.models import tiny_model

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


@pytest.fixture
def four_processes(monkeypatch):
    """The first of four processes, as if the parts of the others were like its own."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    monkeypatch.setattr(distributed, "gather", lambda value: [value] * 4)
    yield init_device_mesh("cpu", (2, 2))
    dist.destroy_process_group()


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_part_of_a_sharded_gradient_counts_once(four_processes, replicas):
    """In four parts, or in two that two groups of processes hold (HSDP); with a tensor that is not sharded."""
    mesh, (x, y, plain, other) = four_processes, (torch.randn(6, dtype=torch.float64) for _ in range(4))
    placements = [Replicate() if replicas == 2 else Shard(0), Shard(0)]
    a, b = ([DTensor.from_local(part, mesh, placements), rest] for part, rest in ((x, plain), (y, other)))
    one, two = (torch.cat([part] * (4 // replicas) + [rest]) for part, rest in ((x, plain), (y, other)))
    expected = float(one @ two)
    assert inner(a, b) == pytest.approx(expected, rel=1e-12)
    assert rotation(a, b).angle == pytest.approx(angle(one.numpy(), two.numpy()), abs=1e-9)
    assert rotation(a, b).scale == pytest.approx(float(one.norm() / two.norm()), rel=1e-12)
    assert total_norm(a) == pytest.approx(float(one.norm()), rel=1e-12)
    weights = [torch.nn.Parameter(torch.ones_like(part)) for part in a]
    for weight, gradient in zip(weights, a, strict=True):
        weight.grad = gradient
    assert update_slope(weights, b, 0.5) == pytest.approx(2 * expected, rel=1e-12)


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

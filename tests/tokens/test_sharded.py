"""Norms and shares through a model whose weights are in shards: those of the whole model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from sharpscope.errors import CheckError, UserError
from sharpscope.policy.head import layers_of
from sharpscope.surface import CriticalSharpness, critical_sharpness, update_direction, update_slope
from sharpscope.tokens import attribute, logp_gradient, norms, score_norms, sharded, structure
from tests.models import random_batch, tiny_model


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(model: torch.nn.Module) -> torch.nn.Module:
    """As trainers do: each layer, and the rest with the whole model."""
    mesh = dist.init_device_mesh("cpu", (1,))
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize(
    ("architecture", "tie"), [("qwen2", True), ("qwen3", False), ("gpt2", True), ("gemma2", True)]
)
def test_norms_and_shares_are_those_of_the_whole_model(architecture: str, tie: bool, monkeypatch):
    """In several chunks, with a temperature, along the gradient that training holds in shards; all stays as it is."""
    monkeypatch.setattr(sharded, "CHUNK", 12)
    whole, batch = tiny_model(architecture, tie=tie), random_batch()
    given, there = (batch["input_ids"], batch["mask"]), batch["attention_mask"]
    coef = (
        torch.linspace(-1, 1, batch["mask"].numel(), dtype=torch.float64).view_as(batch["mask"])
        * batch["mask"]
    )
    gradient = logp_gradient(whole, *given, coef, there, 0.7)
    expected = attribute(whole, *given, coef, gradient, there, 0.7)
    local, exact = (
        score_norms(whole, *given, method, there, 0.7).values for method in ("local", "exact")
    )
    model = shard(tiny_model(architecture, tie=tie).train())
    for parameter, part in zip(model.parameters(), gradient, strict=True):
        parameter.grad = distribute_tensor(part, parameter.device_mesh, parameter.placements)
    kept = [parameter.grad for parameter in model.parameters()]
    before = [one.full_tensor().clone() for one in kept]
    probes = sharded.ShardedProbes(model)
    found = coef * probes.along(*given, there, kept, 0.7)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        probes.local(*given, there, 0.7).values, local, rtol=1e-9, atol=1e-12
    )
    torch.testing.assert_close(probes.exact(*given, there, 0.7), exact, rtol=1e-9, atol=1e-12)
    assert max(probes.checked["along"], probes.checked["local"]) < 1e-8 and model.training
    assert (local > 0).sum() == batch["mask"].sum()
    for parameter, one, value in zip(model.parameters(), kept, before, strict=True):
        assert parameter.grad is one and torch.equal(one.full_tensor(), value)
    for (_, one), (_, other) in zip(
        model.named_parameters(), whole.named_parameters(), strict=True
    ):
        assert torch.equal(one.full_tensor(), other)


@pytest.mark.parametrize("probe", ["along", "local"])
def test_after_a_pass_that_failed_in_its_middle_the_model_trains_on(
    probe: str, monkeypatch: pytest.MonkeyPatch
):
    """A part without a forward mode; attention that cannot be replaced."""

    def refuse(*_):
        raise structure.AttentionError("no attention")

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return 2 * x

        @staticmethod
        def backward(context, gradient):
            return 2 * gradient

    models, batch = [tiny_model(tie=False) for _ in range(2)], random_batch()
    for model in models:
        model.model.layers[1].mlp.register_forward_hook(lambda module, _, out: Doubled.apply(out))
        shard(model)
    direction = [torch.ones_like(parameter) for parameter in models[0].parameters()]
    probes, given = (
        sharded.ShardedProbes(models[0]),
        (batch["input_ids"], batch["mask"], batch["attention_mask"]),
    )
    if probe == "along":
        with pytest.raises(UserError, match="no forward-mode derivative"):
            probes.along(*given, direction, 1.0, check=False)
    else:
        monkeypatch.setattr(structure, "attend", refuse)
        with pytest.raises(UserError, match="no attention"):
            probes.local(*given, 1.0, check=False)
    for model in models:
        model(input_ids=batch["input_ids"]).logits.square().sum().backward()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one.grad.full_tensor(), other.grad.full_tensor())


def test_norms_that_are_wrong_are_refused(monkeypatch: pytest.MonkeyPatch):
    """The self-check compares a token with the model's own gradient."""
    model, batch = shard(tiny_model()), random_batch()
    original = norms.head_gradients

    def wrong(*args, **options):
        output = original(*args, **options)
        output.to_hidden.mul_(1.01)
        return output

    monkeypatch.setattr(norms, "head_gradients", wrong)
    with pytest.raises(CheckError, match="differ from its own gradient"):
        sharded.ShardedProbes(model).local(
            batch["input_ids"], batch["mask"], batch["attention_mask"], 1.0
        )


def test_what_the_method_does_not_know_is_refused():
    model, batch = tiny_model(), random_batch()
    model.model.norm.extra = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    model.model.norm.register_forward_hook(lambda module, _, out: out * module.extra.sin())
    with pytest.raises(UserError, match=r"model\.norm"):
        sharded.ShardedProbes(shard(model)).local(
            batch["input_ids"], batch["mask"], batch["attention_mask"], 1.0
        )


def test_critical_sharpness_is_that_of_the_whole_model():
    ids = torch.arange(12).view(2, 6)

    def measured(model: torch.nn.Module) -> tuple[CriticalSharpness, float]:
        def loss() -> torch.Tensor:
            return torch.nn.functional.cross_entropy(
                model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
            )

        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loss().backward()
        with torch.no_grad():
            loss()  # leaves the weights gathered
        direction = update_direction(optimizer, model)
        slope = update_slope(model, direction)
        return critical_sharpness(loss, model, direction, guess=0.01, slope=slope), slope

    expected = measured(tiny_model())
    model = shard(tiny_model())
    before = [p.full_tensor().clone() for p in model.parameters()]
    found = measured(model)
    assert found[0].outcome == "found" and found[0].value == pytest.approx(
        expected[0].value, rel=1e-5
    )
    assert found[1] == pytest.approx(expected[1], rel=1e-5)
    assert all(
        torch.equal(p.full_tensor(), old) for p, old in zip(model.parameters(), before, strict=True)
    )
    with pytest.raises(UserError, match="pass the model"):
        critical_sharpness(lambda: 1.0, list(model.parameters()), [None] * len(before), guess=0.1)

"""Each probe compares itself with plain autograd: planted faults are refused by name, clean models pass."""

from __future__ import annotations

import pytest
import torch

from sharpscope.probes import directional_derivative
from tests.models import random_batch, tiny_model
from tests.oracles.token_gradients import token_gradients


def given(batch):
    return {name: batch[name] for name in ("input_ids", "mask", "attention_mask")}


@pytest.mark.parametrize("tie", [True, False])
def test_a_padding_token_within_a_row_has_no_gradient_in_any_mode(tie):
    """Reverse mode gives an embedding's padding row none; forward mode and differences used to move it."""
    model, batch = tiny_model("llama", tie=tie), random_batch()
    batch["input_ids"][batch["attention_mask"].bool() & (batch["mask"] == 0)] = 0
    gradients = token_gradients(model, batch["input_ids"], batch["mask"], batch["attention_mask"])
    generator = torch.Generator().manual_seed(1)
    direction = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()]
    expected = torch.zeros(batch["mask"].shape, dtype=torch.float64)
    for place, gradient in gradients.items():
        expected[place] = sum((g * u).sum() for g, u in zip(gradient, direction, strict=True))
    for method, error in (("forward", 1e-9), ("central", 1e-6)):
        found = directional_derivative(model, **given(batch), direction=direction, method=method, check="off").values
        torch.testing.assert_close(found, expected, rtol=error, atol=error)

"""Gradients with gradient checkpointing, and its memory."""

from __future__ import annotations

import pytest
import torch

from sharpscope.policy.head import layers_of
from tests.models import ARCHITECTURES, tiny_model
from tests.policy.helpers import score_gradients


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_layers_computed_again_give_the_same_gradient(architecture, share):
    model = tiny_model(architecture)
    kept = score_gradients(model, share_prompt=share)
    again = score_gradients(model, share_prompt=share, gradient_checkpointing=True)
    for one, other in zip(kept, again, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, rtol=1e-9, atol=1e-12)
    assert all("forward" not in vars(layer) for layer in layers_of(model))  # the layers' own code is back

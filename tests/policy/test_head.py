"""The output layer's logits are the model's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sharpscope.errors import UserError
from sharpscope.policy import make_policy
from sharpscope.policy.head import check_head, output_head
from tests.models import ARCHITECTURES, tiny_model
from tests.policy.helpers import word_tokenizer


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tie", [False, True])
def test_the_head_gives_the_models_own_logits(architecture, tie):
    model = tiny_model(architecture, tie=tie)
    ids = torch.randint(2, 37, (2, 6), generator=torch.Generator().manual_seed(0))
    hidden = model.base_model(input_ids=ids).last_hidden_state
    assert torch.allclose(output_head(model).logits(hidden), model(input_ids=ids).logits, atol=1e-12)


def test_a_head_that_is_something_else_is_refused():
    model = tiny_model()
    model.lm_head.register_forward_hook(lambda module, inputs, out: out * 2)
    with pytest.raises(UserError, match="not a linear function"):
        check_head(model, output_head(model))
    model.lm_head = nn.Sequential(nn.Linear(16, 37))
    with pytest.raises(UserError, match="its output layer is Sequential"):
        make_policy(model, word_tokenizer(), "x")

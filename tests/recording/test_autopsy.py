"""The first value that is not finite is found where it was planted."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from sharpscope.packaged import data_path
from sharpscope.recording.autopsy import MicroBatch, autopsy, first_not_finite

IDS = torch.tensor([[0, 0, 20, 30, 40], [10, 20, 30, 40, 50]])
PRESENT = (IDS != 0).long()
BATCH = MicroBatch(micro=0, input_ids=IDS, attention_mask=PRESENT)


@pytest.fixture
def model():
    return AutoModelForCausalLM.from_pretrained(data_path("policies", "math"))


def test_places_in_the_loss_come_before_masked_ones():
    mask = torch.tensor([[0, 1, 1], [0, 1, 0]])
    value = torch.zeros(2, 3)
    value[0, 0], value[1, 1] = -math.inf, math.nan
    (place,) = first_not_finite({"old_logp": value}, mask, micro=2)
    assert (place.row, place.position, place.masked, place.count) == (1, 1, False, 2)
    value[1, 1] = 0.0
    (place,) = first_not_finite({"old_logp": value}, mask)
    assert (place.row, place.position, place.masked, place.value) == (0, 0, True, -math.inf)
    assert first_not_finite({"advantages": torch.ones(2)}, mask) == []
    (place,) = first_not_finite({"advantages": torch.tensor([1.0, math.nan])}, mask)
    assert (place.row, place.position, place.masked) == (1, -1, False)


def test_a_finite_pass_blames_the_masked_value(model):
    value = torch.zeros(2, 5)
    value[0, :2] = -math.inf
    places = first_not_finite({"old_logp": value}, PRESENT)
    text = autopsy(model, [BATCH], places)
    assert text.startswith("old_logp is -inf at 2 masked positions (first: micro-batch 0, row 0")
    assert text.endswith("0·inf is NaN")


def test_weights_come_first(model):
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, :4] = math.nan
    text = autopsy(model, [BATCH], [])
    assert text.startswith(
        "4 weights (float32) are not finite, first in model.layers.1.mlp.up_proj"
    )


def test_the_first_operation_is_found_with_row_and_position(model):
    def spoil(module, inputs, output):
        output[1, 3] = math.nan
        return output

    model.model.layers[2].mlp.down_proj.register_forward_hook(spoil)
    text = autopsy(model, [BATCH], [])
    assert "model.layers.2.mlp.down_proj (Linear)" in text
    assert text.endswith("row 1, position 3") and text.startswith("micro-batch 0")


def test_float16_overflow_is_named(model):
    half = model.half()
    with torch.no_grad():
        half.model.layers[0].mlp.up_proj.weight.mul_(
            60_000 / half.model.layers[0].mlp.up_proj.weight.abs().max()
        )
    text = autopsy(half, [BATCH], [])
    assert "float16 overflow" in text and "layers.0.mlp" in text


def test_a_gradient_alone_is_named_by_its_layer(model):
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    model.model.layers[1].self_attn.o_proj.weight.grad[0, 0] = math.nan
    assert "model.layers.1.self_attn.o_proj" in autopsy(model, [BATCH], [])

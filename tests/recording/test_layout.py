"""Where a micro-batch has its tokens, its padding and its loss."""

from __future__ import annotations

import pytest
import torch

from sharpscope.recording.capture import odd_layout

END, PAD = 1, 0
IDS = torch.tensor([[PAD, 5, 6, 7, END, PAD], [4, 5, 6, END, PAD, PAD]])
PRESENT = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]])
RIGHT = [[0, 0, 0, 1, 1, 0], [0, 0, 1, 1, 0, 0]]


@pytest.mark.parametrize(
    ("counted", "present", "odd"),
    [
        (RIGHT, PRESENT, {}),
        ([[0, 0, 0, 1, 0, 0], [0, 0, 1, 1, 0, 0]], PRESENT, {"end_outside_loss": 0.5}),
        ([[0, 0, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0]], PRESENT, {"end_outside_loss": 1.0}),
        ([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0]], PRESENT, {"padding_in_loss": 0.5}),
        ([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0]], torch.ones(2, 6), {"padding_in_loss": 0.5}),
        (RIGHT, torch.tensor([[0, 1, 0, 1, 1, 0], [1, 1, 1, 1, 0, 0]]), {"padding_inside": 0.5}),
        ([[0] * 6, [0] * 6], PRESENT, {}),
    ],
)
def test_shares_of_rows_with_an_odd_layout(counted, present, odd):
    found = odd_layout(IDS, present, torch.tensor(counted).bool(), (END,), PAD)
    assert found == {"end_outside_loss": 0.0, "padding_in_loss": 0.0, "padding_inside": 0.0} | odd

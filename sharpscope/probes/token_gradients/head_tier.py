"""The head tier: the output layer alone, in closed form, from one forward pass."""

from __future__ import annotations

import torch
from torch import nn

from sharpscope.probes.token_gradients.head import head_gradients
from sharpscope.probes.token_gradients.result import Collector, Ledger, ScoreNorms
from sharpscope.probes.token_gradients.rows import Rows
from sharpscope.probes.token_gradients.structure import Structure, hidden_states


@torch.no_grad()
def head_norms(model: nn.Module, structure: Structure, rows: Rows, temperature: float) -> ScoreNorms:
    """‖∂ log π/∂(W, b)‖ of z = W h + b, with W in its use as output layer only, also where it is frozen or tied.

    It equals ‖p − e_y‖·sqrt(‖h‖² + 1 if there is a bias)/T, each logit's part times the slope of a soft cap.
    """
    collector = Collector(rows.shape, torch.promote_types(structure.head.weight.dtype, torch.float32), rows.ids.device)
    for chunk in rows.chunks():
        states = hidden_states(model, chunk.ids)[chunk.predicts]  # (M, d)
        output, _ = head_gradients(states, structure.head, chunk.targets, temperature)
        ledger = Ledger({"output": ("head",)}, torch.zeros_like(output.logp))
        ledger.add("output", output.weight_squared)
        if structure.head.bias is not None:
            ledger.add("output", output.pull_squared)
        collector.write(chunk, ledger)
    return collector.result("head", torch.zeros_like(collector.squared))

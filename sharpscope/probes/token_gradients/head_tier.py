"""The tier `head`: score norms of the output layer in closed form, from one forward pass."""

from __future__ import annotations

import torch
from torch import nn

from sharpscope.probes.token_gradients.head import head_gradients
from sharpscope.probes.token_gradients.result import Collector, Ledger, ScoreNorms
from sharpscope.probes.token_gradients.rows import Rows
from sharpscope.probes.token_gradients.structure import Structure, hidden_states


@torch.no_grad()
def head_norms(model: nn.Module, structure: Structure, rows: Rows, temperature: float) -> ScoreNorms:
    """‖∂ log π/∂(W, b)‖ of the output layer z = W h + b, also if W is frozen or tied to the embedding.

    It equals ‖p − e_y‖·sqrt(‖h‖² + 1 if there is a bias)/T, with each logit's part multiplied by the slope of the soft cap.
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

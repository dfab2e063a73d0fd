"""∂L/∂ln π of TRL's own loss, the slow way: its loss is run again with the log-probabilities as independent variables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def loss_coefficients(trainer: Any, compute_loss: Any, model: Any, inputs: dict[str, Any], logp: Tensor) -> Tensor:
    """(n, T) gradient of `compute_loss(model, inputs)` by `logp` (n, T), which stands in for the model's own."""
    leaf = logp.detach().clone().requires_grad_()
    entropy = torch.zeros_like(leaf)
    before = trainer.__dict__.get("_get_per_token_logps_and_entropies")
    metrics = {mode: {k: list(v) for k, v in found.items()} for mode, found in trainer._metrics.items()}
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: _as_trl(trainer, leaf, entropy)
    try:
        loss = compute_loss(model, inputs)
    finally:
        if before is None:
            del trainer._get_per_token_logps_and_entropies
        else:
            trainer._get_per_token_logps_and_entropies = before
        for mode, found in metrics.items():
            trainer._metrics[mode].clear()
            trainer._metrics[mode].update(found)
    return torch.autograd.grad(loss, leaf)[0]


def _as_trl(trainer: Any, logp: Tensor, entropy: Tensor) -> tuple[Any, ...]:
    """TRL before 1.8 returns two values, later ones three (the last is a mixture-of-experts loss)."""
    return (logp, entropy, None) if hasattr(trainer, "aux_loss_enabled") else (logp, entropy)

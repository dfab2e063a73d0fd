"""Per-token gradients by the slowest, most obvious way: one backward pass a token, gradients formed whole."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def aligned(input_ids: Tensor, attention_mask: Tensor | None, row: int) -> tuple[Tensor, Tensor]:
    """The real tokens (1, L) of a row and the columns (L,) they stand in."""
    present = torch.ones_like(input_ids[row]) if attention_mask is None else attention_mask[row]
    columns = present.nonzero()[:, 0]
    return input_ids[row, columns][None], columns


def log_probabilities(model: nn.Module, ids: Tensor, temperature: float) -> Tensor:
    """(L,) log π of each token given its prefix, the first one's entry meaningless; with graph."""
    logits = model(input_ids=ids, use_cache=False).logits[0] / temperature
    logp = torch.log_softmax(logits, -1)
    return torch.cat([logp.new_zeros(1), logp[:-1].gather(1, ids[0, 1:, None])[:, 0]])


def token_gradients(
    model: nn.Module, input_ids: Tensor, mask: Tensor, attention_mask: Tensor | None = None, temperature: float = 1.0
) -> dict[tuple[int, int], list[Tensor]]:
    """(row, column) of every masked token -> ∇ log π over the trainable parameters, in the model's order."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = {}
    for row in range(len(input_ids)):
        ids, columns = aligned(input_ids, attention_mask, row)
        logp = log_probabilities(model, ids, temperature)
        for position, column in enumerate(columns.tolist()):
            if mask[row, column]:
                gradients = torch.autograd.grad(logp[position], parameters, retain_graph=True, allow_unused=True)
                found[row, column] = [
                    torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)
                ]
    return found


def local_token_gradients(
    model: nn.Module, input_ids: Tensor, mask: Tensor, attention_mask: Tensor | None = None, temperature: float = 1.0
) -> dict[tuple[int, int], list[Tensor]]:
    """As `token_gradients`, with other positions' keys and values constant: one token at a time, from a cache."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = {}
    for row in range(len(input_ids)):
        ids, columns = aligned(input_ids, attention_mask, row)
        for position, column in enumerate(columns.tolist()):
            if not mask[row, column]:
                continue
            last = position - 1  # the position that predicts this token
            cache = None
            if last > 0:
                with torch.no_grad():
                    cache = model(input_ids=ids[:, :last], use_cache=True).past_key_values
            logits = model(input_ids=ids[:, last : last + 1], past_key_values=cache, use_cache=True).logits[0, -1]
            logp = torch.log_softmax(logits / temperature, -1)[ids[0, position]]
            gradients = torch.autograd.grad(logp, parameters, allow_unused=True)
            found[row, column] = [
                torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)
            ]
    return found


def squared_norms(gradients: dict[tuple[int, int], list[Tensor]], shape: torch.Size) -> Tensor:
    """(N, S) of Σ‖∇ log π‖² over all parameters; 0 elsewhere."""
    out = torch.zeros(shape, dtype=torch.float64)
    for place, gradient in gradients.items():
        out[place] = sum(float(g.double().square().sum()) for g in gradient)
    return out


# -- Token statistics one token at a time, straight from their definitions, in double precision


def token_statistics(z: torch.Tensor, y: int, temperature: float) -> dict[str, float]:
    """Statistics of token y given one row of logits (V,), undivided: plain Python sums over the vocabulary."""
    scaled = [float(value) / temperature for value in z.double().tolist()]
    top = max(scaled)
    total = math.fsum(math.exp(value - top) for value in scaled)
    logp = [value - top - math.log(total) for value in scaled]
    p = [math.exp(value) for value in logp]
    others = [j for j in range(len(p)) if j != y]
    miss = math.fsum(p[j] for j in others)
    entropy = -math.fsum(p[j] * logp[j] for j in range(len(p)))
    return {
        "logp": math.log1p(-miss) if miss < 0.5 else logp[y],
        "logit": float(z[y]),
        "entropy": entropy,
        "collision": math.fsum(value**2 for value in p),
        "logit_grad_norm": math.sqrt(miss**2 + math.fsum(p[j] ** 2 for j in others)),
        "polarity": p[y] * (logp[y] + entropy) - math.fsum(p[j] ** 2 * (logp[j] + entropy) for j in range(len(p))),
    }

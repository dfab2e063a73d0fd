"""Token statistics one token at a time, straight from their definitions, in double precision."""

from __future__ import annotations

import math

import torch


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

"""Per-token gradients by the slowest, most obvious way: one backward pass a token, gradients formed whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from sharpscope.policy.cache import cache_keyword


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


def whole(model: nn.Module, ids: Tensor, position: int, temperature: float) -> Tensor:
    """log π of the token at a position of a row (1, L)."""
    return log_probabilities(model, ids[:, : position + 1], temperature)[position]


def local(model: nn.Module, ids: Tensor, position: int, temperature: float) -> Tensor:
    """The same with other positions' keys and values constant, from a cache."""
    last, cache = position - 1, None  # the position that predicts the token
    if last > 0:
        with torch.no_grad():
            cache = model(input_ids=ids[:, :last], use_cache=True)[cache_keyword(model)]
    logits = model(input_ids=ids[:, last : last + 1], use_cache=True, **{cache_keyword(model): cache}).logits[0, -1]
    return torch.log_softmax(logits / temperature, -1)[ids[0, position]]


def token_gradients(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor,
    attention_mask: Tensor | None = None,
    temperature: float = 1.0,
    logp: Callable[[nn.Module, Tensor, int, float], Tensor] = whole,
) -> dict[tuple[int, int], list[Tensor]]:
    """(row, column) of every masked token -> ∇ log π over the trainable parameters, in the model's order."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options, found = {"allow_unused": True, "materialize_grads": True}, {}
    for row in range(len(input_ids)):
        ids, columns = aligned(input_ids, attention_mask, row)
        for position, column in enumerate(columns.tolist()):
            if mask[row, column]:
                one = logp(model, ids, position, temperature)
                found[row, column] = list(torch.autograd.grad(one, parameters, **options))
    return found


local_token_gradients = partial(token_gradients, logp=local)


def squared_norms(gradients: dict[tuple[int, int], list[Tensor]], shape: torch.Size) -> Tensor:
    """(N, S) of Σ‖∇ log π‖² over all parameters; 0 elsewhere."""
    out = torch.zeros(shape, dtype=torch.float64)
    for place, gradient in gradients.items():
        out[place] = sum(float(g.double().square().sum()) for g in gradient)
    return out


def weighted_sum(gradients: dict[tuple[int, int], list[Tensor]], coef: Tensor) -> list[Tensor]:
    """Σ c_t ∇log π_t, one tensor a parameter."""
    parameters = range(len(next(iter(gradients.values()))))
    return [sum(coef[place] * g[i] for place, g in gradients.items()) for i in parameters]


def along(gradients: dict[tuple[int, int], list[Tensor]], coef: Tensor, direction: list[Tensor]) -> Tensor:
    """(N, S) c_t⟨∇log π_t, direction⟩."""
    out = torch.zeros(coef.shape, dtype=torch.float64)
    for place, gradient in gradients.items():
        out[place] = coef[place] * sum((g * u).sum() for g, u in zip(gradient, direction, strict=True))
    return out


def gradient_shares(gradients: dict[tuple[int, int], list[Tensor]], coef: Tensor) -> Tensor:
    """(N, S) shares of ‖Σ c_t ∇log π_t‖²."""
    whole = weighted_sum(gradients, coef)
    return along(gradients, coef, whole) / sum(part.square().sum() for part in whole)


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

"""Token sampling with temperature, top-k and top-p, and one random stream per completion."""

from __future__ import annotations

import torch
from torch import Tensor

from sharpscope.config.policy import SamplingSpec

_MASK = (1 << 64) - 1


def completion_uniforms(seed: int, prompts: Tensor, completions: Tensor, count: int) -> Tensor:
    """Uniform random numbers (n, count) in [0, 1), float64; row i depends only on (seed, prompts[i], completions[i]).

    A completion is therefore independent of the other rows of its batch.
    """
    generator, uniforms = torch.Generator(), torch.empty(len(prompts), count, dtype=torch.float64)
    for row, prompt, completion in zip(uniforms, prompts.tolist(), completions.tolist(), strict=True):
        generator.manual_seed(_mix(_mix(_mix(seed) ^ prompt) ^ completion) >> 1)
        torch.rand(count, generator=generator, out=row)
    return uniforms


def _mix(x: int) -> int:
    """Splitmix64's finalizer, which maps consecutive integers to unrelated seeds."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def draw(z: Tensor, u: Tensor, spec: SamplingSpec, row: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sample n tokens by inverting the cumulative distribution at `u`.

    Args:
        z: (m, V) logits, not divided by the temperature.
        u: (n,) float64 uniform random numbers in [0, 1).
        spec: temperature, top_k and top_p. Top-k keeps exactly k tokens (ties are broken arbitrarily); top-p then keeps
            the smallest set of most likely tokens whose share of the remaining probability reaches top_p. Temperature 0
            selects the most likely token.
        row: (n,) long, row of `z` from which each token is sampled; None: m = n, one token from each.

    Returns:
        Tokens (n,) long; their log-probabilities (n,) [nats] under softmax(z/T) (T = 1 for temperature 0); and those under
        the truncated distribution, (n,), or None without truncation.
    """
    row = torch.arange(len(z), device=z.device) if row is None else row
    logp = torch.log_softmax(z / spec.temperature if spec.temperature not in (0, 1) else z, -1)  # (m, V)
    if spec.temperature == 0:
        token = z.argmax(-1)[row]
        return token, logp[row, token], None
    k = spec.top_k if 0 < spec.top_k < z.shape[1] else 0
    if not k and spec.top_p == 1:
        token = _invert(logp.exp(), u, row)
        return token, logp[row, token], None
    kept_logp, tokens = logp.topk(k) if k else logp.sort(descending=True, stable=True)  # (m, K)
    p = kept_logp.exp()
    before = p.cumsum(-1, dtype=torch.float64) - p  # probability of more likely tokens
    p = p.masked_fill(before >= spec.top_p * p.sum(-1, keepdim=True, dtype=torch.float64), 0.0)
    index = _invert(p, u, row)
    behavior = kept_logp[row, index]
    return tokens[row, index], behavior, behavior - p.sum(-1).log()[row]


def _invert(p: Tensor, u: Tensor, row: Tensor) -> Tensor:
    """First index at which the cumulative sum of unnormalized probabilities `p` (m, V) of `row` (n,) exceeds u times their sum."""
    cumulative = p.cumsum(-1, dtype=torch.float64).index_select(0, row)  # (n, V)
    threshold = u[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp_max(p.shape[1] - 1)

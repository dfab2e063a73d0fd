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
    rows = []
    for prompt, completion in zip(prompts.tolist(), completions.tolist(), strict=True):
        generator = torch.Generator().manual_seed(_mix(_mix(_mix(seed) ^ prompt) ^ completion) >> 1)
        rows.append(torch.rand(count, generator=generator, dtype=torch.float64))
    return torch.stack(rows)


def _mix(x: int) -> int:
    """Splitmix64's finalizer, which maps consecutive integers to unrelated seeds."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def draw(z: Tensor, u: Tensor, spec: SamplingSpec) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sample one token per row by inverting the cumulative distribution at `u`.

    Args:
        z: (n, V) logits, not divided by the temperature.
        u: (n,) float64 uniform random numbers in [0, 1).
        spec: temperature, top_k and top_p. Top-k keeps exactly k tokens (ties are broken arbitrarily); top-p then keeps
            the smallest set of most likely tokens whose share of the remaining probability reaches top_p. Temperature 0
            selects the most likely token.

    Returns:
        Tokens (n,) long; their log-probabilities (n,) [nats] under softmax(z/T) (T = 1 for temperature 0); and those under
        the truncated distribution, (n,), or None without truncation.
    """
    logp = torch.log_softmax(z / spec.temperature if spec.temperature not in (0, 1) else z, -1)  # (n, V)
    if spec.temperature == 0:
        token = z.argmax(-1)
        return token, logp.gather(1, token[:, None])[:, 0], None
    k = spec.top_k if 0 < spec.top_k < z.shape[1] else 0
    if not k and spec.top_p == 1:
        token = _invert(logp.exp(), u)
        return token, logp.gather(1, token[:, None])[:, 0], None
    kept_logp, tokens = logp.topk(k) if k else logp.sort(descending=True, stable=True)  # (n, K)
    p = kept_logp.exp()
    before = p.cumsum(-1, dtype=torch.float64) - p  # probability of more likely tokens
    p = p.masked_fill(before >= spec.top_p * p.sum(-1, keepdim=True, dtype=torch.float64), 0.0)
    index = _invert(p, u)[:, None]
    behavior = kept_logp.gather(1, index)[:, 0]
    return tokens.gather(1, index)[:, 0], behavior, behavior - p.sum(-1).log()


def _invert(p: Tensor, u: Tensor) -> Tensor:
    """First index at which the cumulative sum of unnormalized probabilities `p` (n, V) exceeds u times their sum."""
    cumulative = p.cumsum(-1, dtype=torch.float64)
    threshold = u[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp_max(p.shape[1] - 1)

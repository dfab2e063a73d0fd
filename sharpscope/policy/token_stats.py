"""What is known of every chosen token from the distribution it was drawn from: one pass over the logits, in chunks."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sharpscope.policy.head import Head

# Logits made at once: enough rows for an efficient matrix product, a constant in memory whatever the length.
LOGIT_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
# Logits reduced at once: on a CPU (per thread) the several passes over them should stay in its cache.
CACHE_BYTES = {"cpu": 2 * 2**20, "cuda": 128 * 2**20}


@dataclass(frozen=True)
class TokenStats:
    """Statistics of the chosen tokens y under p = softmax(z/T); all (N, T), 0 where the mask is 0.

    float32, but float64 for a float64 model.

    Attributes:
        logp: ln p_y [nats].
        logit: z_y, not divided by the temperature, after any soft cap.
        entropy: H = −Σ_j p_j ln p_j [nats].
        collision: Σ_j p_j².
        logit_grad_norm: ‖p − e_y‖₂, the norm of ∂(−ln p_y)/∂(z/T).
        polarity: p_y(ln p_y + H) − Σ_j p_j²(ln p_j + H) [nats]; a policy-gradient step of size η on this token's logits
            changes the entropy by −η·A·polarity to first order.
        hidden_norm: ‖h‖₂ of the hidden state that the output layer reads.
    """

    logp: Tensor
    logit: Tensor
    entropy: Tensor
    collision: Tensor
    logit_grad_norm: Tensor
    polarity: Tensor
    hidden_norm: Tensor


STAT_NAMES = tuple(field.name for field in fields(TokenStats))


def token_stats(
    hidden: Tensor, head: Head, targets: Tensor, temperature: float, *, mask: Tensor | None = None
) -> TokenStats:
    """Statistics of `targets` given `hidden`, in one chunked pass: extra memory does not grow with length × vocabulary.

    Args:
        hidden: (N, T, d), position t being the state that predicts `targets[:, t]`.
        head: the output layer.
        targets: (N, T) long.
        temperature: T > 0 of the softmax.
        mask: (N, T); only tokens with a nonzero mask are computed, the others are 0. None = all.

    Returns:
        TokenStats of (N, T).

    Raises:
        ValueError: the temperature is not positive.
    """
    keep = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask.bool()
    flat = flat_stats(hidden[keep], head, targets[keep], temperature)  # (M, d), (M,) -> (M,)
    return TokenStats(**{name: spread(value, keep) for name, value in flat.items()})


def spread(values: Tensor, keep: Tensor) -> Tensor:
    """`values` (M,) laid out where `keep` (N, T) is true, row by row; 0 elsewhere. Differentiable."""
    places = keep.flatten().nonzero()[:, 0]
    return values.new_zeros(keep.numel()).scatter(0, places, values).view(keep.shape)


@torch.no_grad()
def flat_stats(hidden: Tensor, head: Head, targets: Tensor, temperature: float) -> dict[str, Tensor]:
    """`token_stats` of M tokens in a row: hidden (M, d), targets (M,) -> name -> (M,)."""
    if not temperature > 0:
        raise ValueError(f"temperature {temperature}: must be positive")
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    out = {name: torch.empty(len(hidden), dtype=dtype, device=hidden.device) for name in STAT_NAMES}
    out["hidden_norm"] = torch.linalg.vector_norm(hidden, dim=-1, dtype=dtype)
    for start, stop in chunks(len(hidden), head.weight.shape[0] * dtype.itemsize, hidden.device, LOGIT_BYTES):
        z = head.logits(hidden[start:stop])  # (C, V)
        logit_stats(z, targets[start:stop], temperature, {k: v[start:stop] for k, v in out.items()})
    return out


def logit_stats(z: Tensor, targets: Tensor, temperature: float, out: dict[str, Tensor]) -> None:
    """Fill `out` (each (C,)) from logits `z` (C, V), which are overwritten: they are the only full-size copy.

    Sums over the vocabulary leave y out and add its exact term afterwards, so that 1 − p_y keeps its relative precision
    when p_y is close to 1 (1 − Σp² and 1 − exp(ln p_y) lose it).
    """
    C, V = z.shape
    blocks = chunks(C, V * z.element_size(), z.device, cache_budget())
    scratch = z.new_empty(blocks[0][1] if blocks else 0, V)
    py, p_max, top, rest, rest_sq, rest_pz, rest_ppz = z.new_empty(7, C).unbind()
    torch.gather(z, 1, targets[:, None], out=out["logit"][:, None])
    # Blocks stay in the processor's cache, so that only the first of these passes reads memory; z' = z/T − max below.
    for start, stop in blocks:
        here = slice(start, stop)
        zb, y, p = z[here], targets[here, None], scratch[: stop - start]
        if temperature != 1.0:
            zb.div_(temperature)
        torch.amax(zb, 1, out=top[here])
        zb.sub_(top[here, None])
        torch.softmax(zb, 1, out=p)
        torch.amax(p, 1, out=p_max[here])
        torch.gather(p, 1, y, out=py[here, None])
        p.scatter_(1, y, 0.0)
        torch.sum(p, 1, out=rest[here])  # Σ_{j≠y} p_j = 1 − p_y
        torch.linalg.vecdot(p, p, out=rest_sq[here])  # Σ_{j≠y} p_j²
        zb.mul_(p)
        torch.sum(zb, 1, out=rest_pz[here])  # Σ_{j≠y} p_j z'_j
        torch.linalg.vecdot(zb, p, out=rest_ppz[here])  # Σ_{j≠y} p_j² z'_j
    zy = out["logit"] / temperature - top
    log_p_max = torch.where(py > 0.5, torch.log1p(-rest), torch.log(p_max))  # −logsumexp(z')
    logp = out["logp"].copy_(zy + log_p_max)
    entropy = out["entropy"].copy_((-log_p_max - rest_pz - py * zy).clamp_min_(0.0))
    out["collision"].copy_(rest_sq + py * py)
    out["logit_grad_norm"].copy_(torch.sqrt(rest * rest + rest_sq))
    rest_pplogp = rest_ppz + log_p_max * rest_sq  # Σ_{j≠y} p_j² ln p_j
    out["polarity"].copy_(py * rest * (logp + entropy) - rest_pplogp - entropy * rest_sq)


def cache_budget() -> dict[str, int]:
    """`CACHE_BYTES` of all threads together."""
    return CACHE_BYTES | {"cpu": CACHE_BYTES["cpu"] * torch.get_num_threads()}


def chunks(rows: int, bytes_per_row: int, device: torch.device, budget: dict[str, int]) -> list[tuple[int, int]]:
    """Bounds of consecutive chunks of `rows`, each within the device's budget and at least one row."""
    size = max(1, budget.get(device.type, budget["cuda"]) // bytes_per_row)
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]

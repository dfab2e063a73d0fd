"""Statistics and differentiable log-probabilities of sampled tokens, without storing all logits of a large vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sharpscope.policy.head import Head

# Size of a chunk of logits: enough rows for an efficient matrix product, independent of the sequence length.
LOGIT_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
# Size of a block of logits for the reductions: on a CPU (per thread) it should fit into the cache.
CACHE_BYTES = {"cpu": 2 * 2**20, "cuda": 128 * 2**20}
# Maximum size of logits stored for the backward pass; larger ones are recomputed.
KEEP_BYTES = {"cpu": 256 * 2**20, "cuda": 1024 * 2**20}


@dataclass(frozen=True)
class TokenStats:
    """Statistics of tokens y under p = softmax(z/T); all (N, T), 0 where the mask is 0.

    The dtype is float32, or float64 for a float64 model.

    Attributes:
        logp: ln p_y [nats].
        logit: z_y before division by the temperature, after any soft cap.
        entropy: H = −Σ_j p_j ln p_j [nats].
        collision: Σ_j p_j².
        logit_grad_norm: ‖p − e_y‖₂, the norm of ∂(−ln p_y)/∂(z/T).
        polarity: p_y(ln p_y + H) − Σ_j p_j²(ln p_j + H) [nats]; a policy-gradient step of size η on this token's logits
            changes the entropy by −η·A·polarity to first order.
        hidden_norm: ‖h‖₂ of the output layer's input.
    """

    logp: Tensor
    logit: Tensor
    entropy: Tensor
    collision: Tensor
    logit_grad_norm: Tensor
    polarity: Tensor
    hidden_norm: Tensor


STAT_NAMES = tuple(field.name for field in fields(TokenStats))


def spread(values: Tensor, keep: Tensor) -> Tensor:
    """Copy `values` (M, …) to the true positions of `keep` (N, T), row by row; 0 elsewhere. Differentiable."""
    index = keep.flatten().nonzero()[:, 0]
    rest = values.shape[1:]
    flat = values.new_zeros(keep.numel(), *rest).index_copy(0, index, values)
    return flat.view(*keep.shape, *rest)


@torch.no_grad()
def flat_stats(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: float,
    z: Tensor | None = None,
) -> dict[str, Tensor]:
    """`TokenStats` by name, (M,) each, of `targets` (M,) given `hidden` (M, d), with memory independent of M × vocabulary.

    `z` (M, V): the logits, if they are known.
    """
    dtype = _dtype(hidden)
    out = {name: torch.empty(len(hidden), dtype=dtype, device=hidden.device) for name in STAT_NAMES}
    out["hidden_norm"] = torch.linalg.vector_norm(hidden, dim=-1, dtype=dtype)
    budget = LOGIT_BYTES if z is None else cache_budget()
    row = head.weight.shape[0] * dtype.itemsize
    for start, stop in chunks(len(hidden), row, hidden.device, budget):
        chunk = slice(start, stop)
        part = head.logits(hidden[chunk]) if z is None else z[chunk].clone()  # (C, V)
        of_chunk = {name: values[chunk] for name, values in out.items()}
        logit_stats(part, targets[chunk], temperature, of_chunk)
    return out


def _dtype(hidden: Tensor) -> torch.dtype:
    """Type of statistics: float64 for a float64 model, else float32."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def flat_logp(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: float,
    *,
    stats: bool,
    keep_logits: bool | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities (M,) [nats] of `targets` (M,), differentiable in `hidden` (M, d), at least float32, and the head.

    With `stats` also the tokens' statistics by name, (M,) each, without gradient, else an empty dict. `keep_logits`: whether
    to store all (M, V) logits for the backward pass instead of recomputing them in chunks; None: if they are small and the
    layer is not in half precision, since its float32 copy would be stored too.
    """
    bytes_per_row = head.weight.shape[0] * max(4, hidden.element_size())
    if keep_logits is None:
        few = len(hidden) * bytes_per_row <= KEEP_BYTES.get(hidden.device.type, KEEP_BYTES["cuda"])
        keep_logits = few and head.weight.dtype == hidden.dtype
    z = None
    if keep_logits:
        z = head.logits(hidden)  # (M, V)
        every = torch.log_softmax(z if temperature == 1.0 else z / temperature, -1)
        logp = every.gather(1, targets[:, None])[:, 0]
        z = z.detach()
    else:
        logp = _in_chunks(_logp, hidden, head, targets, temperature)
    if not stats:
        return logp, {}
    return logp, flat_stats(hidden.detach(), head, targets, temperature, z)


def flat_entropy(hidden: Tensor, head: Head, targets: Tensor, temperature: float) -> Tensor:
    """Entropy (M,) [nats] of softmax(z/T) given `hidden` (M, d), differentiable in hidden and the head."""
    return _in_chunks(_entropy, hidden, head, targets, temperature)


def _in_chunks(
    function: Callable[..., Tensor],
    hidden: Tensor,
    head: Head,
    *given: object,
) -> Tensor:
    """Apply `function` to `hidden` (M, d) and `given`, whose tensors are by token too, in chunks of tokens.

    The logits are computed again in the backward pass.
    """
    bytes_per_row = head.weight.shape[0] * max(4, hidden.element_size())
    parts = []
    for a, b in chunks(len(hidden), bytes_per_row, hidden.device, LOGIT_BYTES):
        some = [x[a:b] if isinstance(x, Tensor) else x for x in (hidden, head, *given)]
        values = checkpoint(function, *some, use_reentrant=False, preserve_rng_state=False)
        parts.append(values)
    return torch.cat(parts) if parts else hidden.sum(1)


def flat_kl(
    hidden: Tensor,
    head: Head,
    other_hidden: Tensor,
    other_head: Head,
    temperature: float,
) -> Tensor:
    """KL(p‖q) (M,) [nats] over the whole vocabulary of p = softmax(z/T) and q = softmax(z'/T), differentiable in both."""
    return _in_chunks(_kl, hidden, head, other_hidden, other_head, temperature)


def _kl(
    hidden: Tensor,
    head: Head,
    other_hidden: Tensor,
    other_head: Head,
    temperature: float,
) -> Tensor:
    log_p = _log_softmax(hidden, head, temperature)
    log_q = _log_softmax(other_hidden, other_head, temperature)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _log_softmax(hidden: Tensor, head: Head, temperature: float) -> Tensor:
    """Log-probabilities (C, V) [nats]."""
    return torch.log_softmax(head.logits(hidden) / temperature, -1)


def _logp(hidden: Tensor, head: Head, targets: Tensor, temperature: float) -> Tensor:
    return _log_softmax(hidden, head, temperature).gather(1, targets[:, None])[:, 0]


def _entropy(hidden: Tensor, head: Head, targets: Tensor, temperature: float) -> Tensor:
    log_p = _log_softmax(hidden, head, temperature)
    return -(log_p.exp() * log_p).sum(-1)


PROXY_MIN_P = 0.02
"""Smallest probability that Lp-Reg's filtered policy keeps, in units of the largest at the position; published."""
CURVATURE_TOP = 50
"""Words of the vocabulary with a gradient in CAPO's model: those of the published top-k sampling."""


@torch.no_grad()
def flat_proxy(hidden: Tensor, head: Head, targets: Tensor, temperature: float) -> Tensor:
    """Log-probabilities (M,) [nats] under p = softmax(z/T) without tokens below `PROXY_MIN_P`·max_j p_j, renormalized.

    −inf for a target that is left out. `hidden` is (M, d), `targets` (M,) long.
    """
    parts = []
    dtype = _dtype(hidden)
    row = head.weight.shape[0] * dtype.itemsize
    for start, stop in chunks(len(hidden), row, hidden.device, LOGIT_BYTES):
        z = head.logits(hidden[start:stop]) / temperature  # (C, V)
        floor = z.amax(1, keepdim=True) + math.log(PROXY_MIN_P)
        kept = torch.where(z >= floor, z, -torch.inf)
        chosen = kept.gather(1, targets[start:stop, None])[:, 0]
        parts.append(chosen - kept.logsumexp(1))
    return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=dtype)


@dataclass(frozen=True)
class Moments:
    """AdamW's state of the output layer: averages (V, d) of the loss's gradient and its square, and what the next step needs."""

    mean: Tensor
    square: Tensor
    step: int  # updates made
    betas: tuple[float, float]
    eps: float

    def next(self, rows: Tensor, gradient: Tensor) -> Tensor:
        """The next ascent step per learning rate of the rows (C, k) on `gradient` (C, k, d) of an objective to be raised."""
        beta1, beta2 = self.betas
        number = self.step + 1
        old_mean = -self.mean[rows].to(gradient)  # of the loss: the objective's has the other sign
        old_square = self.square[rows].to(gradient)
        mean = torch.lerp(gradient, old_mean, beta1).div_(1 - beta1**number)
        square = torch.lerp(gradient.square(), old_square, beta2).div_(1 - beta2**number)
        return mean.div_(square.sqrt_().add_(self.eps))


@torch.no_grad()
def flat_curvature(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: float,
    *,
    advantage: Tensor,
    lr: float,
    moments: Moments | None,
) -> Tensor:
    """m_H and m_F (M, 2) of tokens: change of objective and policy by an AdamW step of the output layer on one token's gradient.

    With x = ∂z/∂W = h·scale/T, v = e_y − π, g = A·v⊗x, G the step per learning rate and u = Gx: m_H = lr·⟨g, G⟩ + lr²/2·A·[(v·u)² −
    (Σ π u² − (Σ π u)²)] and m_F = lr²/2·(v·u)² (arXiv 2510.00819). The rows are y and the `CURVATURE_TOP` − 1 most likely others.
    `hidden` is (M, d), `targets` y and `advantage` A (M,); a soft cap changes π and not x. Where the optimizer has no `moments`
    yet, G = g.
    """
    dtype = _dtype(hidden)
    out = torch.empty(len(hidden), 2, dtype=dtype, device=hidden.device)
    top = min(CURVATURE_TOP, head.weight.shape[0])
    bytes_per_row = dtype.itemsize * max(head.weight.shape[0], 6 * top * hidden.shape[1])
    for start, stop in chunks(len(hidden), bytes_per_row, hidden.device, LOGIT_BYTES):
        h = hidden[start:stop].to(dtype)
        a = advantage[start:stop].to(dtype)
        y = targets[start:stop, None]
        p = torch.softmax(head.logits(h).to(dtype) / temperature, -1)  # (C, V)
        rows = p.scatter(1, y, torch.inf).topk(top).indices  # (C, k)
        pi = p.gather(1, rows)
        v = (rows == y).to(dtype) - pi
        x = h[:, None] * (head.scale / temperature)  # (C, 1, d)
        g = (a[:, None] * v)[:, :, None] * x  # (C, k, d)
        step = g if moments is None else moments.next(rows, g)
        u = (step * x).sum(-1)  # (C, k)
        vu = (v * u).sum(-1)
        spread_u = (pi * u * u).sum(-1) - (pi * u).sum(-1) ** 2
        first_order = lr * (g * step).sum((1, 2))
        second_order = lr**2 / 2 * a * (vu**2 - spread_u)
        out[start:stop, 0] = first_order + second_order
        out[start:stop, 1] = lr**2 / 2 * vu**2
    return out


def logit_stats(z: Tensor, targets: Tensor, temperature: float, out: dict[str, Tensor]) -> None:
    """Fill `out` (each (C,)) from logits `z` (C, V); `z` is overwritten to save memory.

    Sums over the vocabulary exclude y and add its exact term afterwards, so that 1 − p_y keeps its relative precision
    for p_y close to 1 (1 − Σp² and 1 − exp(ln p_y) lose it).
    """
    C, V = z.shape
    blocks = chunks(C, V * z.element_size(), z.device, cache_budget())
    scratch = z.new_empty(blocks[0][1] if blocks else 0, V)
    py, p_max, top, rest, rest_sq, rest_pz, rest_ppz = z.new_empty(7, C).unbind()
    torch.gather(z, 1, targets[:, None], out=out["logit"][:, None])
    # Blocks fit into the CPU cache, so only the first of these passes reads memory. Below, z' = z/T − max.
    for start, stop in blocks:
        block = slice(start, stop)
        zb = z[block]
        y = targets[block, None]
        p = scratch[: stop - start]
        if temperature != 1.0:
            zb.div_(temperature)
        torch.amax(zb, 1, out=top[block])
        zb.sub_(top[block, None])
        torch.softmax(zb, 1, out=p)
        torch.amax(p, 1, out=p_max[block])
        torch.gather(p, 1, y, out=py[block, None])
        p.scatter_(1, y, 0.0)
        torch.sum(p, 1, out=rest[block])  # Σ_{j≠y} p_j = 1 − p_y
        zb.mul_(p)
        torch.sum(zb, 1, out=rest_pz[block])  # Σ_{j≠y} p_j z'_j
        zb.mul_(p)
        torch.sum(zb, 1, out=rest_ppz[block])  # Σ_{j≠y} p_j² z'_j
        p.mul_(p)
        torch.sum(p, 1, out=rest_sq[block])  # Σ_{j≠y} p_j²
    zy = out["logit"] / temperature - top
    log_p_max = torch.where(py > 0.5, torch.log1p(-rest), torch.log(p_max))  # −logsumexp(z')
    logp = out["logp"].copy_(zy + log_p_max)
    entropy = out["entropy"].copy_((-log_p_max - rest_pz - py * zy).clamp_min_(0.0))
    out["collision"].copy_(rest_sq + py * py)
    out["logit_grad_norm"].copy_(torch.sqrt(rest * rest + rest_sq))
    rest_pplogp = rest_ppz + log_p_max * rest_sq  # Σ_{j≠y} p_j² ln p_j
    out["polarity"].copy_(py * rest * (logp + entropy) - rest_pplogp - entropy * rest_sq)


def cache_budget() -> dict[str, int]:
    """`CACHE_BYTES` times the number of threads; of one thread half, so that logits and probabilities both fit.

    Of several threads not: where a block has fewer rows than threads, its sums are made in another order.
    """
    threads = torch.get_num_threads()
    size = CACHE_BYTES["cpu"]
    return CACHE_BYTES | {"cpu": size * threads if threads > 1 else size // 2}


def chunks(
    rows: int,
    bytes_per_row: int,
    device: torch.device,
    budget: dict[str, int],
) -> list[tuple[int, int]]:
    """Bounds of consecutive chunks of `rows`, each of at least one row and within the device's budget."""
    size = max(1, budget.get(device.type, budget["cuda"]) // bytes_per_row)
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]

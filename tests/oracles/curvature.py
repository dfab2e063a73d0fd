"""Slow and obviously right: dense Hessians, exact expectations over completions, the trust-region problem."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel


def flat(parameters: Sequence[Tensor]) -> Tensor:
    """(P,) one after the other."""
    return torch.cat([p.detach().reshape(-1) for p in parameters])


def logp_of(
    model: torch.nn.Module, theta: Tensor, parameters: Sequence[Tensor], batch: dict[str, Tensor], temperature: float
) -> Tensor:
    """(N, S) log-probability of every token given its prefix, 0 at the first, in the batch's own padding."""
    parts = dict(zip(map(id, parameters), theta.split([p.numel() for p in parameters]), strict=True))
    swapped = {
        name: parts[id(p)].view(p.shape) for name, p in model.named_parameters() if id(p) in parts
    }  # tied ones follow
    position = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    inputs = {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "position_ids": position,
        "use_cache": False,
    }
    with sdpa_kernel(SDPBackend.MATH):
        logits = functional_call(model, swapped, (), inputs).logits / temperature
    logp = torch.log_softmax(logits[:, :-1], -1).gather(2, batch["input_ids"][:, 1:, None])[..., 0]
    return torch.nn.functional.pad(logp, (1, 0))


def functional_value(
    name: str, logp: Tensor, mask: Tensor, reward: Tensor, advantage: Tensor, anchor: Tensor, clip: float = 0.2
) -> Tensor:
    """The three functionals, written row by row and token by token."""
    rows, total = len(logp), mask.sum()
    value = logp.new_zeros(())
    for i in range(rows):
        scored = [t for t in range(logp.shape[1]) if mask[i, t]]
        if name == "nll":
            for t in scored:
                value = value - logp[i, t] / total
        elif name == "surrogate":
            for t in scored:
                ratio = (logp[i, t] - anchor[i, t]).exp()
                gain = torch.minimum(ratio * advantage[i], ratio.clamp(1 - clip, 1 + clip) * advantage[i])
                value = value - gain / (rows * len(scored))
        else:
            whole = sum((logp[i, t] - anchor[i, t] for t in scored), start=logp.new_zeros(()))
            value = value + (1 - reward[i] * whole.exp()) / rows
    return value


def dense_hessian(loss: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    """(P, P) by `torch.func.hessian`."""
    return torch.func.hessian(loss)(theta).detach()


def all_completions(vocabulary: int, length: int) -> Tensor:
    """(vocabulary^length, length): every completion there is."""
    return torch.tensor(list(itertools.product(range(vocabulary), repeat=length)))


def trust_region_max(hessian: np.ndarray, gradient: np.ndarray, rho: float) -> float:
    """max gᵀε + ½ εᵀHε over ‖ε‖ ≤ rho, through the secular equation (H ≼ μ, (μ − H) ε = g, ‖ε‖ = rho)."""
    values, vectors = np.linalg.eigh(hessian)
    parts = vectors.T @ gradient

    def length(mu: float) -> float:
        return float(np.sqrt(np.sum((parts / (mu - values)) ** 2)))

    low = max(values[-1], 0.0)
    if values[-1] < 0 and length(0.0) <= rho:  # concave, and its maximum lies inside
        step = parts / (0.0 - values)
        return float(parts @ step + 0.5 * np.sum(values * step**2))
    high = low + np.linalg.norm(gradient) / rho + 1e-9
    low = low + 1e-14 * max(1.0, abs(low))
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if length(middle) > rho else (low, middle)
    step = parts / (high - values)
    return float(parts @ step + 0.5 * np.sum(values * step**2))


def ggn_matrix(logits: Callable[[Tensor], Tensor], theta: Tensor, targets: Tensor) -> Tensor:
    """(P, P) Jᵀ H J of the mean cross-entropy, from the Jacobian of the logits (M, V)."""
    jacobian = torch.func.jacrev(logits)(theta)  # (M, V, P)
    p = logits(theta).softmax(-1)
    total = torch.zeros(len(theta), len(theta), dtype=theta.dtype)
    for m in range(len(targets)):
        total += jacobian[m].T @ (torch.diag(p[m]) - torch.outer(p[m], p[m])) @ jacobian[m]
    return (total / len(targets)).detach()

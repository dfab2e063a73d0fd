"""Slow and obviously right: dense Hessians, exact expectations over completions, the trust-region problem."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

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


def functional_value(name: str, logp: Tensor, mask: Tensor, reward: Tensor, anchor: Tensor) -> Tensor:
    """The two functionals, written row by row and token by token."""
    rows, total = len(logp), mask.sum()
    value = logp.new_zeros(())
    for i in range(rows):
        scored = [t for t in range(logp.shape[1]) if mask[i, t]]
        if name == "nll":
            for t in scored:
                value = value - logp[i, t] / total
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

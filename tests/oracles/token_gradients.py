"""Gradients by the slowest, most obvious way: one backward pass a token, losses of log-probabilities, dense Hessians."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

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
    logits = model(
        input_ids=ids[:, last : last + 1], use_cache=True, **{cache_keyword(model): cache}
    ).logits[0, -1]
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


def along(
    gradients: dict[tuple[int, int], list[Tensor]], coef: Tensor, direction: list[Tensor]
) -> Tensor:
    """(N, S) c_t⟨∇log π_t, direction⟩."""
    out = torch.zeros(coef.shape, dtype=torch.float64)
    for place, gradient in gradients.items():
        out[place] = coef[place] * sum(
            (g * u).sum() for g, u in zip(gradient, direction, strict=True)
        )
    return out


def gradient_shares(gradients: dict[tuple[int, int], list[Tensor]], coef: Tensor) -> Tensor:
    """(N, S) shares of ‖Σ c_t ∇log π_t‖²."""
    whole = weighted_sum(gradients, coef)
    return along(gradients, coef, whole) / sum(part.square().sum() for part in whole)


# -- Token statistics one token at a time, straight from their definitions, in double precision


def token_statistics(z: Tensor, y: int, temperature: float) -> dict[str, float]:
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
        "polarity": p[y] * (logp[y] + entropy)
        - math.fsum(p[j] ** 2 * (logp[j] + entropy) for j in range(len(p))),
    }


# -- What a loss of log-probabilities does with each token, one sequence and one token at a time

Row = tuple[list[int], list[int]]
"""Token ids of a prompt and of what follows it."""


@dataclass(frozen=True)
class Tokens:
    """Of all completion tokens, row by row (M,), and the norm of the gradient."""

    logp: Tensor
    coef: Tensor
    score_norm: Tensor
    attribution: Tensor
    gradient_norm: float


def row_logp(model: nn.Module, row: Row) -> Tensor:
    """(T,) log-probabilities of a completion's tokens."""
    prompt, completion = row
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def tokens_of(
    model: nn.Module, rows: Sequence[Row], loss: Callable[[list[Tensor]], Tensor]
) -> Tokens:
    """What `loss`, a function of the rows' log-probabilities, does with their tokens; `model` is in float64."""
    parameters = list(model.parameters())
    logp = [row_logp(model, row) for row in rows]
    total = loss(logp)
    coef = torch.cat(torch.autograd.grad(total, logp, retain_graph=True))
    gradient = flat(torch.autograd.grad(total, parameters, retain_graph=True))
    scores = [
        flat(torch.autograd.grad(one, parameters, retain_graph=True))
        for part in logp
        for one in part
    ]
    along = torch.stack([score @ gradient for score in scores])
    norms = torch.stack([score.norm() for score in scores])
    return Tokens(
        torch.cat(logp).detach(),
        coef,
        norms,
        coef * along / gradient.square().sum(),
        float(gradient.norm()),
    )


def nll(logp: list[Tensor]) -> Tensor:
    """−Σ log π / N over all tokens of the update."""
    return -torch.cat(logp).sum() / sum(map(len, logp))


def dft(logp: list[Tensor]) -> Tensor:
    """−Σ sg(π) log π / N (arXiv 2508.05629)."""
    every = torch.cat(logp)
    return -(every.exp().detach() * every).sum() / len(every)


def dpo(reference: nn.Module, rows: Sequence[Row], beta: float) -> Callable[[list[Tensor]], Tensor]:
    """DPO's loss (arXiv 2305.18290, eq. 7) of rows that alternate between chosen and rejected."""
    with torch.no_grad():
        base = [row_logp(reference, row).sum() for row in rows]

    def loss(logp: list[Tensor]) -> Tensor:
        ratio = [one.sum() - old for one, old in zip(logp, base, strict=True)]
        margin = torch.stack(
            [good - bad for good, bad in zip(ratio[::2], ratio[1::2], strict=True)]
        )
        return -torch.nn.functional.logsigmoid(beta * margin).mean()

    return loss


# -- Loss surfaces: dense Hessians, exact expectations over completions


def flat(parameters: Sequence[Tensor]) -> Tensor:
    """(P,) one after the other."""
    return torch.cat([p.detach().reshape(-1) for p in parameters])


def logits_of(
    model: torch.nn.Module,
    theta: Tensor,
    parameters: Sequence[Tensor],
    batch: dict[str, Tensor],
) -> Tensor:
    """(N, S, V) logits, in the batch's own padding."""
    parts = dict(
        zip(map(id, parameters), theta.split([p.numel() for p in parameters]), strict=True)
    )
    # tied ones follow
    swapped = {
        name: parts[id(p)].view(p.shape) for name, p in model.named_parameters() if id(p) in parts
    }
    position = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    inputs = {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "position_ids": position,
        "use_cache": False,
    }
    with sdpa_kernel(SDPBackend.MATH):
        return functional_call(model, swapped, (), inputs).logits


def logp_of(
    model: torch.nn.Module,
    theta: Tensor,
    parameters: Sequence[Tensor],
    batch: dict[str, Tensor],
    temperature: float,
) -> Tensor:
    """(N, S) log-probability of every token given its prefix, 0 at the first, in the batch's own padding."""
    logits = logits_of(model, theta, parameters, batch) / temperature
    logp = torch.log_softmax(logits[:, :-1], -1).gather(2, batch["input_ids"][:, 1:, None])[..., 0]
    return torch.nn.functional.pad(logp, (1, 0))


def functional_value(
    name: str, logp: Tensor, mask: Tensor, reward: Tensor, anchor: Tensor
) -> Tensor:
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


def dense_operator(
    name: str,
    logits: Callable[[Tensor], Tensor],
    loss: Callable[[Tensor], Tensor],
    theta: Tensor,
    batch: dict[str, Tensor],
    temperature: float,
    terms: Callable[[Tensor], Tensor],
    weight: float,
) -> Tensor:
    """(P, P) of a curvature operator, written out: sums of outer products, and Jᵀ A J with dense J and A.

    `logits` (N, S, V) are a function of θ, `loss` is one of the logits, `terms` (M,) are those of which the loss is the mean.
    """
    if name in ("hessian", "finite_difference"):
        return dense_hessian(lambda at: loss(logits(at)), theta)
    if name == "empirical_fisher":
        rows = torch.func.jacrev(terms)(theta)
        return weight * sum(torch.outer(g, g) for g in rows)
    jacobian = torch.func.jacrev(logits)(theta)  # (N, S, V, P)
    if name == "gauss_newton":
        z = logits(theta).detach()
        outer = torch.func.hessian(loss)(z).reshape(z.numel(), z.numel())
        flat_jacobian = jacobian.reshape(z.numel(), -1)
        return flat_jacobian.T @ outer @ flat_jacobian
    found = torch.zeros(len(theta), len(theta), dtype=theta.dtype)
    p = torch.softmax(logits(theta).detach() / temperature, -1)
    for i, t in batch["mask"].nonzero().tolist():
        for y in range(p.shape[-1]):
            # ∇ln π(y) = Jᵀ(e_y − p)/T, of the logits one position before the token
            score = jacobian[i, t - 1].T @ ((torch.arange(p.shape[-1]) == y).double() - p[i, t - 1])
            found += weight * p[i, t - 1, y] * torch.outer(score, score) / temperature**2
    return found


def all_completions(vocabulary: int, length: int) -> Tensor:
    """(vocabulary^length, length): every completion there is."""
    return torch.tensor(list(itertools.product(range(vocabulary), repeat=length)))

"""What a loss of log-probabilities does with each token, by plain autograd in float64, one sequence and one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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


def tokens_of(model: nn.Module, rows: Sequence[Row], loss: Callable[[list[Tensor]], Tensor]) -> Tokens:
    """What `loss`, a function of the rows' log-probabilities, does with their tokens; `model` is in float64."""
    parameters = list(model.parameters())
    logp = [row_logp(model, row) for row in rows]
    total = loss(logp)
    coef = torch.cat(torch.autograd.grad(total, logp, retain_graph=True))
    gradient = _flat(torch.autograd.grad(total, parameters, retain_graph=True))
    scores = [_flat(torch.autograd.grad(one, parameters, retain_graph=True)) for part in logp for one in part]
    along = torch.stack([score @ gradient for score in scores])
    norms = torch.stack([score.norm() for score in scores])
    return Tokens(torch.cat(logp).detach(), coef, norms, coef * along / gradient.square().sum(), float(gradient.norm()))


def _flat(gradients: Sequence[Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients])


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
        margin = torch.stack([good - bad for good, bad in zip(ratio[::2], ratio[1::2], strict=True)])
        return -torch.nn.functional.logsigmoid(beta * margin).mean()

    return loss

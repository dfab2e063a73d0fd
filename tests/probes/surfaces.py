"""A small causal language model with its objectives, matrices of given spectra, and a network with odd parameters."""

from __future__ import annotations

import torch
from torch import nn

from sharpscope.probes.language_model import Objective, token_batch
from sharpscope.probes.surface import Operator
from tests.models import tiny_model
from tests.oracles.token_gradients import dense_hessian

SMALL = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
VOCAB, TEMPERATURE = 13, 0.8
OBJECTIVES = ("nll", "expected_failure")


def small_model(**overrides):
    return tiny_model("qwen2", vocab=VOCAB, **{**SMALL, **overrides})


def rewards(rows: int = 3):
    return torch.rand(rows, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def objective(name: str, batch: dict, **rest) -> Objective:
    reward = rewards(len(batch["input_ids"]))
    tokens = token_batch(batch["input_ids"], batch["attention_mask"], batch["mask"], reward=reward)
    return Objective(name, tokens, TEMPERATURE, **rest)


def all_scored(ids: torch.Tensor) -> Objective:
    scored = torch.ones_like(ids)
    scored[:, 0] = 0
    return Objective("nll", token_batch(ids, torch.ones_like(ids), scored))


def operator(matrix: torch.Tensor) -> Operator:
    return Operator([matrix[0]], lambda v: matrix @ v)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def with_spectrum(values, seed: int = 0) -> torch.Tensor:
    values = torch.tensor(values, dtype=torch.float64)
    q = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator(seed), dtype=torch.float64)).Q
    return q @ torch.diag(values) @ q.T


def quadratic(matrix: torch.Tensor, at: torch.Tensor | None = None):
    theta = (torch.zeros(len(matrix), dtype=matrix.dtype) if at is None else at.clone()).requires_grad_()
    return theta, lambda: 0.5 * theta @ matrix @ theta


def sloped(matrix: torch.Tensor, slope: torch.Tensor, start: torch.Tensor):
    """θ at `start`, and L(θ) = 2 + gᵀ(θ − start) + ½(θ − start)ᵀH(θ − start)."""
    theta = start.clone().requires_grad_()

    def loss():
        move = theta - start
        return 2 + slope @ move + 0.5 * move @ matrix @ move

    return theta, loss


class Net(nn.Module):
    """Smooth, with a tied matrix, a frozen one, an unused one and a parameter that enters linearly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(4, 5), nn.Linear(4, 5)
        self.tied.weight = self.first.weight
        self.frozen, self.unused = nn.Linear(5, 5), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.linear = nn.Parameter(torch.ones(2))
        self.double()
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator(p.numel()), dtype=torch.float64))

    def forward(self, x):
        return (
            self.frozen(torch.tanh(self.first(x))) * torch.sigmoid(self.tied(x))
        ).square().mean() + self.linear.sum()


def net_and_dense():
    net, x = Net(), torch.randn(7, 4, generator=generator(), dtype=torch.float64)
    used = [p for p in net.parameters() if p.requires_grad]
    theta = torch.cat([p.detach().reshape(-1) for p in used])
    names = {id(p): name for name, p in net.named_parameters()}

    def loss(at):
        parts = at.split([p.numel() for p in used])
        return torch.func.functional_call(
            net, {names[id(p)]: v.view(p.shape) for p, v in zip(used, parts, strict=True)}, (x,)
        )

    return net, (lambda: net(x)), dense_hessian(loss, theta)


class OpaqueCube(torch.autograd.Function):
    """x³ whose backward pass leaves the graph: its second derivative comes out as 0, or as a part of the truth."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return cotangent * torch.from_numpy(3 * x.detach().numpy() ** 2)

"""L2 norms of a gradient and of the step that AdamW took, in all and by layer, and the factor of clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sharpscope import distributed
from sharpscope.policy.directions import length
from sharpscope.policy.guard import group_names
from sharpscope.policy.sharding import copies, is_shard, local_part


@dataclass(frozen=True)
class Norms:
    """L2 norms of a gradient or an update: of all parameters, and by group (`layer_groups`)."""

    total: float
    layers: dict[str, float]


def layer_groups(model: nn.Module) -> dict[int, str]:
    """Group of each trainable parameter by its identity: `12.attention` in a layer, elsewhere its kind."""
    named = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    made = {}
    for name, (kind, *layer) in group_names(model, named).items():
        made[id(named[name])] = f"{layer[0].removeprefix('layers.')}.{kind}" if layer else kind
    return made


def norms(parts: Iterable[tuple[Tensor, Tensor | None]], groups: Mapping[int, str]) -> Norms:
    """Norms of (parameter, part) pairs, a part being its gradient or its change; without groups only the total.

    With groups, parameters of none are left out: those that an optimizer has besides the model's.
    """
    owners: list[int] = []

    def each() -> Iterator[Tensor | None]:
        """The parts that count, whose owners are noted."""
        for parameter, part in parts:
            if not groups or id(parameter) in groups:
                owners.append(id(parameter))
                yield part

    found = squares(each())
    layers = dict.fromkeys(groups.values(), 0.0)
    for owner, square in zip(owners, found, strict=True):
        if groups:
            layers[groups[owner]] += square
    return Norms(
        math.sqrt(sum(found)), {name: math.sqrt(square) for name, square in layers.items()}
    )


def squares(parts: Iterable[Tensor | None]) -> list[float]:
    """Squared L2 norm of each part, in float64; None counts 0, of a sharded tensor each process contributes its part."""
    found = list[float]()
    shards = list[int]()
    for number, part in enumerate(parts):
        if part is None:
            found.append(0.0)
        elif is_shard(part):
            shards.append(number)
            square = length(local_part(part)) ** 2
            found.append(square / copies(part))
        else:
            found.append(length(part) ** 2)
    if shards:
        every = distributed.gather([found[number] for number in shards])
        for number, values in zip(shards, zip(*every, strict=True), strict=True):
            found[number] = sum(values)
    return found


def total_norm(parts: Iterable[Tensor | None]) -> float:
    """Global L2 norm, summed in float64; None counts 0."""
    return math.sqrt(sum(squares(parts)))


def gradient_norm(parameters: Iterable[Tensor]) -> float:
    """Global L2 norm of `.grad`; parameters without a gradient count 0."""
    return total_norm(p.grad for p in parameters)


def gradient_norms(parameters: Iterable[Tensor], groups: Mapping[int, str]) -> Norms:
    """Norms of `.grad`; parameters without a gradient count 0."""
    return norms(((p, p.grad) for p in parameters), groups)


def has_exact_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `update_norms` gives the size of its steps: AdamW's, on weights that do not round small changes away."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    return (
        isinstance(optimizer, torch.optim.AdamW)
        and not any(group["amsgrad"] for group in optimizer.param_groups)
        and all(p.dtype in (torch.float32, torch.float64) for p in weights)
    )


@torch.no_grad()
def update_norms(optimizer: torch.optim.Optimizer, groups: Mapping[int, str]) -> Norms:
    """Norms of the update Δθ that `optimizer.step()` has just made, weight decay included.

    Computed from AdamW's state, one parameter at a time, so that no copy of the weights is needed:
    Δθ = −lr·m̂/(√v̂ + ε) − lr·λ·θ_before with θ_before = (θ_after + lr·m̂/(√v̂ + ε)) / (1 − lr·λ),
    m̂ = m/(1 − β₁ᵗ), v̂ = v/(1 − β₂ᵗ).
    """
    return norms(_steps_taken(optimizer), groups)


def _steps_taken(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """(parameter, Δθ) of one parameter after the other."""
    for group in optimizer.param_groups:
        lr = group["lr"]
        decay = group["weight_decay"]
        eps = group["eps"]
        beta1, beta2 = group["betas"]
        for parameter in group["params"]:
            if parameter.grad is None:
                continue  # AdamW leaves a parameter without a gradient alone, decay included
            state = optimizer.state[parameter]
            step = float(state["step"])
            scale = math.sqrt(1 - beta2**step)
            # (√v̂ + ε)·scale, in fewer passes over memory
            root = state["exp_avg_sq"].sqrt().add_(eps * scale)
            adaptive = (state["exp_avg"] / root).mul_(lr * scale / (1 - beta1**step))
            before = (parameter + adaptive) / (1 - lr * decay) if decay else parameter
            yield parameter, adaptive + lr * decay * before if decay else adaptive


def clip_factor(norm: float, limit: float | None) -> float:
    """Factor by which clipping multiplies a gradient of this norm: min(1, limit/(norm + 1e-6)), as in torch; 1 without a limit."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))

"""One-dimensional slices of the loss: along the gradient, the sharpest direction, and random filter-normalised ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sharpscope.errors import UserError
from sharpscope.probes.hessian.api import sub_generator
from sharpscope.probes.surface import Surface, flatten, moved

if TYPE_CHECKING:
    import pandas as pd


def filter_normalised(parameters: Sequence[Tensor], generator: torch.Generator) -> Tensor:
    """A random direction (P,) in which every row of a matrix (every filter) has the norm of that row of the weights.

    Biases and norm gains (one-dimensional tensors) do not move (Li et al., arXiv 1712.09913). Its length is that of the
    matrices together, so a distance of 1 in its units replaces the weights by noise of their own size.
    """
    parts: list[Tensor | None] = []
    for parameter in parameters:
        if parameter.ndim < 2:
            parts.append(None)
            continue
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
        axes = tuple(range(1, parameter.ndim))
        norm = torch.linalg.vector_norm(noise, dim=axes, keepdim=True)
        parts.append(noise * (torch.linalg.vector_norm(parameter.detach(), dim=axes, keepdim=True) / norm))
    return flatten(parts, parameters)


def loss_slice(surface: Surface, direction: Tensor, distances: Sequence[float], loss: float) -> list[float]:
    """L(θ + distance·direction) for each distance; the direction (P,) is used as it is, in its own length; `loss`: L(θ)."""
    values = []
    for distance in distances:
        if distance == 0:
            values.append(loss)
            continue
        with moved(surface.parameters, direction * distance):
            values.append(surface.value())
    return values


def loss_slices(
    surface: Surface,
    distances: Sequence[float],
    *,
    top: Tensor | None = None,
    random: int = 2,
    random_scale: float = 0.1,
    seed: int = 0,
    at: tuple[float, Tensor] | None = None,
) -> pd.DataFrame:
    """Slices along the gradient, the top eigenvector and random directions.

    Args:
        surface: guarded already.
        distances: steps in units of L2 norm, negative ones too; for the random directions they are rescaled so that the
            farthest is `random_scale` times the filter-normalised direction.
        top: (P,) unit top eigenvector (`Curvature.vectors[0]`), or None.
        random: number of random directions.
        random_scale: see `distances`; relative to the weights' own size.
        seed: of the random directions.
        at: (L(θ), ∇L(θ)) where they are known already.

    Returns:
        A frame with columns `direction` (gradient | eigenvector | random_i), `distance` [parameters' L2 norm], `loss`.
    """
    import pandas as pd

    farthest = max((abs(d) for d in distances), default=0.0)
    if farthest == 0:
        raise UserError("distances: at least one must not be zero")
    loss, gradient = surface.gradient() if at is None else at
    norm = gradient.norm()
    lines: Mapping[str, tuple[Tensor, float]] = {
        **({"gradient": (gradient / norm, 1.0)} if norm > 0 else {}),
        **({"eigenvector": (top.to(gradient), 1.0)} if top is not None else {}),
    }
    frames = [_frame(surface, name, unit, distances, scale, loss) for name, (unit, scale) in lines.items()]
    for index in range(random):
        direction = filter_normalised(surface.parameters, sub_generator(seed, f"slice_{index}"))
        length = float(direction.norm())
        if length > 0:
            frames.append(
                _frame(
                    surface, f"random_{index}", direction / length, distances, random_scale * length / farthest, loss
                )
            )
    if not frames:  # every direction is zero
        return pd.DataFrame({"direction": [], "distance": [], "loss": []})
    return pd.concat(frames, ignore_index=True)


def _frame(
    surface: Surface, name: str, unit: Tensor, distances: Sequence[float], scale: float, loss: float
) -> pd.DataFrame:
    import pandas as pd

    reached = [distance * scale for distance in distances]
    return pd.DataFrame({"direction": name, "distance": reached, "loss": loss_slice(surface, unit, reached, loss)})

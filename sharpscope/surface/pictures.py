"""Tables for pictures of a loss surface: its spectrum, slices along directions, the plane of two, and its leading tokens.

Every table is tidy, one row a point, and has the columns `functional`, `parameters` and `prompts` (how many prompts the loss is the mean of).
A distance is in the parameters' L2 norm from the present weights. `trained` marks what training has crossed: between 0 and the
distance of the weights that it began from.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sharpscope.policy.directions import length
from sharpscope.progress import Tell, silent, tell_price
from sharpscope.surface.algorithms import Density, quadratic_form
from sharpscope.surface.algorithms.density import ITERATIONS
from sharpscope.surface.language_model import LmSurface
from sharpscope.surface.operators import flatten
from sharpscope.surface.perturbation import FORWARD
from sharpscope.surface.spectrum import PRODUCT, curvature
from sharpscope.surface.surface import moved

if TYPE_CHECKING:
    import pandas as pd

SLICE, PLANE, PRODUCTS = 21, 11, 200
"""Losses along a slice and along an axis of a plane, and Hessian products for the eigenvalues."""
LEADING, READ = 8, 8
"""Leading tokens along whose gradients the curvature is computed, and prompts among whose tokens they are searched."""
PASSES = PRODUCT * (PRODUCTS + 4 * ITERATIONS + LEADING) + FORWARD * (4 * SLICE + PLANE**2)
"""Forward and backward passes of `tables` at most, but for those of single tokens."""


@dataclass(frozen=True, kw_only=True)
class Direction:
    """A unit vector (P,) with the distances along it that training has crossed: from `start` to 0, or 0 to `start`."""

    unit: Tensor
    start: float = 0.0


def direction(vector: Tensor, path: Tensor | None = None) -> Direction:
    """The direction of a vector (P,); `path` (P,) is what training has changed so far, θ − θ_start."""
    unit = vector / length(vector)
    return Direction(
        unit=unit, start=0.0 if path is None else -float(path.double() @ unit.double())
    )


def random_direction(surface: LmSurface, seed: int, path: Tensor | None = None) -> Direction:
    """A random direction with the norm of the weights filter by filter (Li et al., arXiv 1712.09913).

    A filter is a row of a matrix, an output; vectors such as the gains of a norm do not move.
    """
    draws = torch.Generator().manual_seed(seed)
    parts = []
    for weights in surface.parameters:
        noise = torch.randn(weights.shape, generator=draws).to(weights)
        if weights.dim() < 2:
            parts.append(torch.zeros_like(weights))
            continue
        rows = [x.detach().flatten(1).norm(dim=1, keepdim=True) for x in (weights, noise)]
        scaled = noise.flatten(1) * (rows[0] / rows[1].clamp_min(1e-30))
        parts.append(scaled.view_as(weights))
    return direction(flatten(parts, surface.parameters), path)


def spectrum_table(density: Density, surface: LmSurface) -> pd.DataFrame:
    """The spectral density: eigenvalue, density, low and high (its 95 % band over probes, Student's t), probes."""
    import pandas as pd
    from scipy.stats import t

    half = float(t.ppf(0.975, max(density.probes - 1, 1))) * density.std_error
    table = pd.DataFrame(
        {
            "eigenvalue": density.nodes,
            "density": density.values,
            "low": np.maximum(density.values - half, 0),
            "high": density.values + half,
        }
    )
    return table.assign(probes=density.probes, **_labels(surface))


def slices(
    surface: LmSurface,
    directions: Mapping[str, Direction],
    *,
    reach: float,
    points: int = SLICE,
) -> pd.DataFrame:
    """The loss along each direction from −reach to reach, and as far as training has come.

    Columns: direction, distance, loss, std_error (over prompts), rise (loss − loss at 0), rise_std_error (paired by prompt), trained.
    """
    import pandas as pd

    base = surface.by_prompt()
    rows = []
    for name, along in directions.items():
        reached = np.linspace(-reach, reach, points)
        low, high = sorted((0.0, along.start))
        inside = np.linspace(low, high, 5) if low < high else np.zeros(1)
        for distance in np.union1d(reached, inside).tolist():
            each = base
            if distance:
                with moved(surface.parameters, along.unit * distance, relative_error=math.inf):
                    each = surface.by_prompt()
            row = {"direction": name, "distance": distance, "trained": low <= distance <= high}
            row |= _mean("loss", "std_error", each)
            rows.append(row | _mean("rise", "rise_std_error", each - base))
    return pd.DataFrame(rows).assign(**_labels(surface))


def plane(
    surface: LmSurface,
    first: Direction,
    second: Direction,
    *,
    reach: float,
    points: int = PLANE,
    path: Sequence[Tensor] = (),
) -> pd.DataFrame:
    """The loss over the plane of two directions: first, second (distances), loss, std_error, kind.

    The second direction is made orthogonal to the first. `kind` is `grid`, or `path` for the weights θ − θ_i of earlier checkpoints,
    given as differences to the present ones, projected on the plane (their loss is that of the projection); θ itself is the last.
    """
    import pandas as pd

    second = direction(second.unit - first.unit * (first.unit @ second.unit))
    at = np.linspace(-reach, reach, points).tolist()
    places = [("grid", x, y) for x in at for y in at]
    units = (first.unit.double(), second.unit.double())
    for change in path:
        x, y = (-float(change.double() @ unit) for unit in units)
        places.append(("path", x, y))
    places.append(("path", 0.0, 0.0))
    rows = []
    for kind, x, y in places:
        with moved(surface.parameters, first.unit * x + second.unit * y, relative_error=math.inf):
            loss = _mean("loss", "std_error", surface.by_prompt())
        rows.append({"first": x, "second": y, "kind": kind, **loss})
    return pd.DataFrame(rows).assign(**_labels(surface))


def tables(
    surface: LmSurface,
    *,
    rho: float,
    seed: int,
    density_probes: int = 4,
    path: Tensor | None = None,
    tell: Tell = silent,
) -> dict[str, pd.DataFrame]:
    """The tables `spectrum`, `slices`, `plane` and `leading` of a surface, by name; `tell` is told how long they take at most.

    Slices are along the gradient, the eigenvector of the largest eigenvalue, a random direction and, with `path` (P,), what training
    has changed so far, up to twice the radius `rho`; the plane is that of the last two, or of the first two without a path.
    """
    began = time.perf_counter()
    gradient = surface.gradient()[1]
    one = time.perf_counter() - began
    tell_price(tell, "pictures", one * PASSES)
    found = curvature(
        surface,
        None,
        seed,
        max_products=PRODUCTS,
        trace_probes=0,
        density_probes=density_probes,
    )
    along = {"gradient": gradient, "top eigenvector": found.vectors[0]}
    if path is not None and length(path) > 0:
        along["training"] = path
    directions = {name: direction(vector, path) for name, vector in along.items()}
    directions["random"] = random_direction(surface, seed, path)
    names = ("training", "random") if "training" in directions else ("top eigenvector", "gradient")
    reach = 2 * rho
    if path is not None:
        reach = max(reach, length(path))
    pair = [directions[name] for name in names]
    steps = [] if path is None else [path]
    made = {
        "slices": slices(surface, directions, reach=reach),
        "plane": plane(surface, *pair, reach=reach, path=steps).assign(axes=" and ".join(names)),
        "leading": token_curvatures(surface).assign(largest=found.largest),
    }
    if found.density is not None:
        made["spectrum"] = spectrum_table(found.density, surface)
    return made


def token_curvatures(surface: LmSurface) -> pd.DataFrame:
    """The curvature of the loss along the gradient ∇(c·ln π) of its leading tokens, c being a token's coefficient in the loss.

    A row for each of the `LEADING` scored tokens of the first `READ` prompts whose gradient is longest, each of which has a backward
    pass. Columns: row, position, token (its id), logp [nats], norm, curvature.
    """
    import pandas as pd

    prompts = torch.tensor(surface.objective.batch.prompts)
    few = surface.prompts(prompts < READ)
    objective = few.objective
    found = list[tuple[dict[str, float], Tensor]]()
    for row in range(len(objective.batch)):
        index = torch.tensor([row], device=objective.batch.lengths.device)
        logp = few.logp_of(index)
        share = objective.row_shares(index, logp).sum()
        (coefficient,) = torch.autograd.grad(share, logp, retain_graph=True)
        for position in objective.batch.scored[row].nonzero()[:, 0].tolist():
            term = coefficient[0, position].detach() * logp[0, position]
            parts = torch.autograd.grad(term, few.parameters, retain_graph=True, allow_unused=True)
            gradient = flatten(parts, few.parameters)
            known = {"row": row, "position": position, "norm": length(gradient)}
            known["token"] = int(objective.batch.input_ids[row, position])
            found.append((known | {"logp": float(logp[0, position].detach())}, gradient))
            found = sorted(found, key=lambda one: -one[0]["norm"])[:LEADING]
    operator = surface.hessian()
    rows = [known | {"curvature": quadratic_form(operator, along)} for known, along in found]
    return pd.DataFrame(rows).assign(**_labels(surface))


def _mean(name: str, error: str, each: Tensor) -> dict[str, float]:
    """Mean and standard error of values by prompt, (k,)."""
    spread = float(each.std()) / math.sqrt(len(each)) if len(each) > 1 else math.nan
    return {name: float(each.mean()), error: spread}


def _labels(surface: LmSurface) -> dict[str, str | int]:
    objective = surface.objective
    return {
        "functional": objective.name,
        "parameters": surface.selection,
        "prompts": len(objective.prompt_weight),
    }

"""Two checkpoints of one model: what differs at each token, in sharpness, and along the change between them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sharpscope.surface.algorithms import quadratic_form
from sharpscope.surface.estimate import Estimate, labeled, with_prompts
from sharpscope.surface.language_model import LmSurface
from sharpscope.surface.perturbation import (
    FORWARD,
    PAIRS,
    average_sharpness,
    cross_fitted,
    sharpness,
)
from sharpscope.surface.spectrum import PRODUCT, curvature
from sharpscope.surface.swap import js_divergence

if TYPE_CHECKING:
    import pandas as pd

RANDOM = 8
"""Random directions along which the curvature is compared with that along the change."""
TOLERANCE, MAX_PRODUCTS = 1e-2, 60
"""Relative residual of the eigenvalues, and Hessian products for them."""
CHANGED = 0.1
"""JS divergence above which a position counts as changed [nats]; the largest possible is ln 2 = 0.69."""


def token_changes(base: LmSurface, tuned: LmSurface) -> pd.DataFrame:
    """One row for each scored token of the same completions under both models.

    Columns: row, prompt, position (in the completion's row), token (its id), logp_base, logp_tuned [nats], js: the JS divergence of
    the two models' distributions before the token [nats], same_top: whether both have the same most likely token.
    """
    import pandas as pd

    tables = []
    batch = base.objective.batch
    prompts = torch.tensor(batch.prompts)
    for row in range(len(batch)):
        index = torch.tensor([row], device=batch.lengths.device)
        places = batch.scored[row].nonzero()[:, 0]
        ids = batch.input_ids[row, places]
        with torch.no_grad():
            logp = [surface.log_softmax(index).double() for surface in (base, tuned)]
        taken = [values.gather(1, ids[:, None])[:, 0].tolist() for values in logp]
        known = {
            "row": row,
            "prompt": int(prompts[row]),
            "position": places.tolist(),
            "token": ids.tolist(),
            "logp_base": taken[0],
            "logp_tuned": taken[1],
            "js": js_divergence(*logp).tolist(),
            "same_top": (logp[0].argmax(-1) == logp[1].argmax(-1)).tolist(),
        }
        tables.append(pd.DataFrame(known))
    return pd.concat(tables, ignore_index=True)


def change_curvature(surface: LmSurface, change: Tensor, seed: int) -> list[Estimate]:
    """Curvature along the change of the weights, (P,), against the largest eigenvalue and random directions.

    The rows `along_change`, `largest`, `smallest`, and `along_random`: the mean of `RANDOM` Gaussian directions with its standard
    error, an estimate of the mean eigenvalue tr H/P.
    """
    found = curvature(
        surface,
        None,
        seed,
        tolerance=TOLERANCE,
        max_products=MAX_PRODUCTS,
        trace_probes=0,
        along={"change": change},
        by_prompt=True,
    )
    operator = surface.hessian()
    draws = torch.Generator().manual_seed(seed)
    values = torch.tensor(
        [
            quadratic_form(operator, torch.randn(operator.size, generator=draws).to(change))
            for _ in range(RANDOM)
        ]
    )
    error = float(values.std()) / math.sqrt(RANDOM)
    more = Estimate(
        "curvature",
        "along_random",
        float(values.mean()),
        std_error=error,
        samples=RANDOM,
        seed=seed,
    )
    return [*found.estimates(), more]


def sharpness_of(surface: LmSurface, rho: float, seed: int) -> list[Estimate]:
    """Loss, SAM sharpness, plain and cross-fitted, and average sharpness, with values by prompt."""
    loss, gradient, base = surface.gradient_by_prompt()
    plain = sharpness(surface, None, rho, at=(loss, gradient), base=base).estimates()
    rows = [with_prompts(Estimate("loss", "loss", loss), base), *plain]
    rows += [cross_fitted(surface, rho, seed, base), average_sharpness(surface, seed, base)]
    return labeled(rows, functional=surface.objective.name)


def passes(share: float) -> float:
    """Forward and backward passes over all prompts that `sharpness_of` both checkpoints and `change_curvature` take at most.

    `share` is that of the prompts whose curvature is computed; 0 for none.
    """
    of_one = 2 + FORWARD * (
        2 + 2 * PAIRS
    )  # gradients of all prompts and of halves; losses of SAM, halves and pairs
    # values by prompt of three directions cost a product over all prompts each
    products = MAX_PRODUCTS + RANDOM + 1 + 3 if share else 0
    return 2 * of_one + share * PRODUCT * products

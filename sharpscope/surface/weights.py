"""How the weights of two checkpoints differ, matrix by matrix."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sharpscope.errors import UserError
from sharpscope.policy.guard import group_names
from sharpscope.surface.operators import flatten

if TYPE_CHECKING:
    import pandas as pd

TOP = 8
"""Singular vectors of a weight matrix whose directions are compared."""


def trained_pairs(base: nn.Module, tuned: nn.Module) -> list[tuple[str, Tensor, Tensor]]:
    """Name, weights in `base` and in `tuned` of each trainable parameter of `tuned`, in its order.

    Raises:
        UserError: the models have other parameters or shapes.
    """
    before = dict(base.named_parameters())
    pairs = []
    for name, parameter in tuned.named_parameters():
        if not parameter.requires_grad:
            continue
        other = before.get(name)
        if other is None or other.shape != parameter.shape:
            found = "none" if other is None else tuple(other.shape)
            raise UserError(
                f"compare, parameter {name}: {tuple(parameter.shape)} in one model and {found} in the other; "
                "give two checkpoints of one architecture (merge adapters first)"
            )
        pairs.append((name, other.detach(), parameter.detach()))
    return pairs


def parameter_change(base: nn.Module, tuned: nn.Module) -> Tensor:
    """θ_tuned − θ_base of the trainable parameters, (P,), at least float32."""
    changes = []
    for _, before, after in trained_pairs(base, tuned):
        wide = torch.promote_types(after.dtype, torch.float32)
        changes.append(after.to(wide) - before.to(wide))
    return flatten(changes, changes)


def weight_changes(base: nn.Module, tuned: nn.Module) -> pd.DataFrame:
    """One row for each trainable parameter: how it has changed.

    Columns:
        name, layer (index, or its kind outside of layers), kind, size: which parameter and how many weights.
        norm, base_norm, relative_norm: Frobenius norms of the change Δ and of the weights W before, and their quotient.
        spectral_norm: largest singular value of Δ.
        effective_rank: exp of the entropy of Δ's normalized squared singular values, from 1 to the smaller side.
        angle: largest angle between the spaces of the `TOP` left singular vectors of W before and after [degrees].
        principal_share: part of ‖Δ‖² within the spaces of the `TOP` left and right singular vectors of W, ‖UᵀΔV‖²/‖Δ‖²
            (arXiv 2511.08567 asks whether updates avoid them); of a random Δ it is TOP²/(rows·columns), in `principal_random`.
        changed_bfloat16: share of the weights whose value in bfloat16 differs.

    Of vectors the columns of singular values are null.
    """
    import pandas as pd

    groups = group_names(tuned, {n: p for n, p in tuned.named_parameters() if p.requires_grad})
    rows = []
    for name, before, after in trained_pairs(base, tuned):
        kind, *layer = groups[name]
        first = before.double()
        last = after.double()
        change = last - first
        size = float(change.norm())
        whole = float(first.norm())
        row = {
            "name": name,
            "layer": layer[0].removeprefix("layers.") if layer else kind,
            "kind": kind,
            "size": before.numel(),
            "norm": size,
            "base_norm": whole,
            "relative_norm": size / whole if whole > 0 else math.nan,
            "changed_bfloat16": _changed(before, after),
        }
        rows.append(row | (_singular(first, last) if before.dim() == 2 and size > 0 else {}))
    columns = ["spectral_norm", "effective_rank", "angle", "principal_share", "principal_random"]
    known = pd.DataFrame(rows)
    return known.reindex(columns=[*known.columns.drop(columns, errors="ignore"), *columns])


def _changed(before: Tensor, after: Tensor) -> float:
    """Share of the weights that differ in bfloat16."""
    kept = before.to(torch.bfloat16) == after.to(torch.bfloat16)
    return 1 - float(kept.double().mean())


def _singular(before: Tensor, after: Tensor) -> dict[str, float]:
    """The columns of `weight_changes` that need singular values, of matrices in float64."""
    change = after - before
    values = torch.linalg.svdvals(change)
    shares = values.square() / values.square().sum()
    entropy = -float(torch.special.xlogy(shares, shares).sum())
    left, _, right = torch.linalg.svd(before, full_matrices=False)
    count = min(TOP, *before.shape)
    turned = torch.linalg.svd(after, full_matrices=False)[0][:, :count]
    # cosines of the principal angles between the two spaces
    cosine = float(torch.linalg.svdvals(left[:, :count].T @ turned)[-1])
    inside = left[:, :count].T @ change @ right[:count].T
    return {
        "spectral_norm": float(values[0]),
        "effective_rank": math.exp(entropy),
        "angle": math.degrees(math.acos(min(max(cosine, -1.0), 1.0))),
        "principal_share": float(inside.square().sum() / change.square().sum()),
        "principal_random": count**2 / before.numel(),
    }

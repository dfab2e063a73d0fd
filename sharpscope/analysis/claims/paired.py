"""Findings about a difference between two methods, paired by seed; shared by C4, C7, C8, C10, C12 and C13."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sharpscope.analysis.claims.base import Confounder, Estimate
from sharpscope.analysis.statistics import contrast_interval, sign_flip_p, smallest_sign_flip_p
from sharpscope.analysis.study import Pairing, Study

Direction = Literal["higher", "lower"]

PAIRED_BY_SEED = Confounder(
    "luck of the seed", "runs are paired by seed (same puzzles in the same order), and the seed is the unit of the test"
)
SAME_SETTINGS = Confounder(
    "learning rate and other settings",
    "only pairs equal in every setting but the method are compared; runs that differ in one are refused by name",
)
FINISHED_ONLY = Confounder(
    "runs that broke off", "unfinished runs are left out and named in the notes; a method that breaks more is flattered"
)


def directional(values: NDArray[np.floating], direction: Direction, margin: float) -> tuple[float, bool, float, float]:
    """Sign-flip evidence about the mean of `values` (n,), n ≥ 1, that a claim says is higher or lower than 0.

    Returns:
        (p of "no difference", two-sided; whether the mean points as claimed; p of "the claimed effect is at least
        `margin`", one-sided; the smallest two-sided p that n can give).
    """
    sign = 1.0 if direction == "higher" else -1.0
    turned = sign * np.asarray(values, dtype=np.float64)
    return (
        sign_flip_p(turned),
        bool(turned.mean() > 0),
        sign_flip_p(turned, "less", shift=margin),
        smallest_sign_flip_p(len(turned)),
    )


def difference_estimate(name: str, frame: pd.DataFrame, unit: str, note: str = "") -> Estimate | None:
    """Mean of the column `difference` with its interval and sign-flip p; None for no rows."""
    return mean_estimate(name, frame["difference"].to_numpy(dtype=float), unit, note)


def mean_estimate(name: str, values: NDArray[np.floating], unit: str, note: str = "") -> Estimate | None:
    """Mean over clusters with its interval and the two-sided sign-flip p of 0; None for no values."""
    if not len(values):
        return None
    return Estimate(
        name, float(np.mean(values)), unit, contrast_interval(values), sign_flip_p(values), len(values), note
    )


def present(*estimates: Estimate | None) -> tuple[Estimate, ...]:
    """Those that could be computed."""
    return tuple(estimate for estimate in estimates if estimate is not None)


def pairing_notes(study: Study, pairing: Pairing) -> tuple[str, ...]:
    """What a reader should know of the pairs: their setting, pairs of other settings, unfinished runs."""
    notes = [f"{study.treatment} against {study.baseline}" + (f" at {pairing.setting}" if pairing.setting else "")]
    if pairing.left_out:
        notes.append(f"{pairing.left_out} pairs of other settings are not used")
    if study.ignore:
        notes.append(f"the runs of a pair may differ in {', '.join(study.ignore)}, as asked")
    return (*notes, *unfinished(study))


def unfinished(study: Study) -> tuple[str, ...]:
    """A note naming runs that were left out."""
    if not study.left_out:
        return ()
    names = ", ".join(study.left_out[:5]) + (" …" if len(study.left_out) > 5 else "")
    return (f"{len(study.left_out)} unfinished runs are left out: {names}",)

"""C4: the treatment lowers sharpness, per unit of 1 − loss and at a radius at which it is not saturated.

The rise of `expected_failure` cannot exceed the share of correct completions. Near that ceiling it is accuracy under another name:
saturated estimates enter no verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from sharpscope.analysis.claims import one_update
from sharpscope.analysis.claims.base import ClaimData, declared, mean_estimate, pairing_notes
from sharpscope.analysis.measures import FUNCTIONAL, SMOOTHING, by_step, log_ratios, probe_sets, shared_sharpness
from sharpscope.analysis.statistics import sign_flip_p
from sharpscope.analysis.study import Pair, Study
from sharpscope.traces import MAX_SATURATION

if TYPE_CHECKING:
    from sharpscope.traces import Run

MEASURES = {"sam": "SAM", "asam": "adaptive (ASAM)"}
UNIT = "ln(treatment / baseline)"
Matching = Callable[["Run", "Run", pd.DataFrame, pd.DataFrame], tuple[int, int] | None]


def _same_step(first: Run, second: Run, a: pd.DataFrame, b: pd.DataFrame) -> tuple[int, int] | None:
    shared = a.index.intersection(b.index)
    return (int(shared.max()), int(shared.max())) if len(shared) else None


def _same_reward(first: Run, second: Run, a: pd.DataFrame, b: pd.DataFrame) -> tuple[int, int] | None:
    """The probed steps at which each run first reached the highest reward that both reached."""
    rewards = [
        by_step(run)["reward_mean"].rolling(SMOOTHING, min_periods=1).mean().reindex(curve.index).dropna()
        for run, curve in ((first, a), (second, b))
    ]
    if any(not len(reward) for reward in rewards):
        return None
    level = min(reward.max() for reward in rewards)
    steps = [int(reward.index[int(np.argmax(reward.to_numpy() >= level))]) for reward in rewards]
    return steps[0], steps[1]


MATCHED: dict[str, Matching] = {"step": _same_step, "reward": _same_reward}


def compared(study: Study, pairs: list[Pair], quantity: str, matching: Matching) -> tuple[pd.DataFrame, float | None]:
    """(seed, and of both runs rise, per unit of 1 − loss, whether the ceiling is estimated), at the radius that all runs share."""
    columns = [
        "seed",
        *(f"{name}_{which}" for which in ("baseline", "treatment") for name in ("rise", "unit", "estimated")),
    ]
    names = [name for pair in pairs for name in (pair.baseline, pair.treatment)]
    shared = shared_sharpness([study.finished[name] for name in names], quantity, one_set=False) if pairs else None
    if shared is None:
        return pd.DataFrame(columns=columns), None
    radius, found = shared
    curves, rows = dict(zip(names, found, strict=True)), []
    for pair in pairs:
        a, b = curves[pair.baseline], curves[pair.treatment]
        steps = matching(study.finished[pair.baseline], study.finished[pair.treatment], a, b)
        if steps is not None:
            ends = [curve.loc[step] for curve, step in zip((a, b), steps, strict=True)]
            rows.append([pair.seed, *(end[name] for end in ends for name in ("rise", "saturation", "estimated"))])
    return pd.DataFrame(rows, columns=columns), radius


def ratios(frame: pd.DataFrame, what: str = "unit") -> pd.DataFrame:
    """Seed, baseline, treatment and their log ratio, of unsaturated pairs; `what`: unit or rise."""
    fit = (frame[["unit_baseline", "unit_treatment"]] <= MAX_SATURATION).all(axis=1)
    values = frame.rename(columns={f"{what}_baseline": "baseline", f"{what}_treatment": "treatment"})
    return log_ratios(values.loc[fit | (what == "rise"), ["seed", "baseline", "treatment"]])


def measure(study: Study) -> ClaimData:
    """Log ratio of SAM sharpness per unit of 1 − loss at the last probed step of both."""
    pairing = study.pairing()
    if pairing.missing:
        return ClaimData(missing=pairing.missing)
    found = study.finished
    sets = {name: probe_sets(found[name]) for pair in pairing.pairs for name in (pair.baseline, pair.treatment)}
    pairs = [pair for pair in pairing.pairs if sets[pair.baseline] and sets[pair.baseline] == sets[pair.treatment]]
    frames = {(q, name): compared(study, pairs, q, matching) for q in MEASURES for name, matching in MATCHED.items()}
    frame, radius = frames["sam", "step"]
    if radius is None or not len(frame):
        return ClaimData(missing=f"no pair has sam sharpness of {FUNCTIONAL} at one step, radius and probe set")
    main = ratios(frame)
    others, conditions = [], []
    for (q, name), (rows, _) in frames.items():
        text = f"{MEASURES[q]} sharpness at matched {name}"
        tested = ratios(rows)
        if (q, name) != ("sam", "step"):
            others.append(mean_estimate(f"{text}, per unit of 1 − loss", tested, UNIT, "", "log"))
        if (q, name) in (("asam", "step"), ("sam", "reward")):
            higher = len(tested) and sign_flip_p(tested["difference"].to_numpy(), "greater") <= study.terms.level
            conditions.append((f"{text} is not shown to be higher", not higher))
        if name == "step":
            others.append(mean_estimate(f"{text}, the rise itself", ratios(rows, "rise"), UNIT, "", "log"))
    units = frame[["unit_baseline", "unit_treatment"]].to_numpy(dtype=float)
    known = np.isfinite(units).any()
    most = f"{np.nanmedian(units):.2f} of the largest possible rise" if known else "of unknown ceiling"
    estimated = " (ceiling: training accuracy at that step)" if frame.filter(like="estimated").any(axis=None) else ""
    left_out = len(frame) - len(main)
    notes = [f"radius {radius:g}, shared by all runs; sharpness is {most}{estimated}"]
    if left_out:
        notes.append(f"{left_out} of {len(frame)} pairs are saturated or have no positive sharpness and are left out")
    missing = ""
    if not len(main):
        missing = (
            f"sharpness at radius {radius:g} is saturated: {most}{estimated}, and the limit is {MAX_SATURATION:g}; probe a smaller "
            "radius (probes.rho: auto)"
        )
    if len(pairs) < len(pairing.pairs):
        notes.append(f"{len(pairing.pairs) - len(pairs)} pairs were not probed, or not on one probe set")
    return ClaimData(
        parts={"": main},
        missing=missing,
        conditions=tuple(conditions),
        others=tuple(others),
        notes=(*notes, *pairing_notes(study, pairing)),
    )


C4 = declared("C4", measure, other=one_update.C4)

"""What one update does: versions of C4, C7, C9, C10 and C12 from the table `forks` of counterfactual updates.

All arms of a fork start from one state and learn from the same rollouts, and their outcomes are measured on the same completions, at
matched KL. These versions are reported with those between runs and never change them: one update is not a run.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from sharpscope.analysis.claims.base import ClaimData, declared
from sharpscope.analysis.frames import stacked
from sharpscope.analysis.measures import Dose
from sharpscope.analysis.study import Study
from sharpscope.methods import control_label
from sharpscope.traces import MAX_SATURATION

FEWEST_STATES = 6
"""States from which they are the clusters; with fewer, batches are, and the verdict is about these states."""
COMMAND = "sharpscope fork RUN --methods"
KEY = [
    "run",
    "step",
    "fork",
    "batch",
]
STATE = ["run", "step"]


def outcomes(study: Study, outcome: str, comparison: str = "kl") -> pd.DataFrame:
    """KEY, arm, reference, value, start of every valid row with this outcome, of all methods' runs in the setting of the claims.

    Of all runs if there is no such setting.
    """
    columns = [
        *KEY,
        "arm",
        "reference",
        "value",
        "start",
    ]
    parts = []
    runs = study.alike(*study.methods) if study.reference is not None else study.runs
    for name, run in runs.items():
        rows = run.forks
        if rows.empty:
            continue
        asked = (rows["outcome"] == outcome) & (rows["comparison"] == comparison)
        invalid = rows["valid"].eq(False)
        parts.append(rows[asked & ~invalid].assign(run=name))
    return stacked(parts, columns).dropna(subset="value")


def paired(study: Study, arm: str, rival: str, outcome: str) -> pd.DataFrame:
    """One row per batch with both arms: KEY, `value` and `change` of the arm, `rival` and `rival_change`, `gain` of the reference.

    `gain` is |mean change of the fork's reference| over its batches, the same in every row.
    """
    rows = outcomes(study, outcome)
    rows = rows.assign(change=rows["value"] - rows["start"])
    mine, other = (
        rows[rows["arm"] == name].set_index(KEY)[["value", "change"]] for name in (arm, rival)
    )
    both = mine.join(
        other.rename(columns={"value": "rival", "change": "rival_change"}), how="inner"
    ).reset_index()
    gain = rows.loc[rows["arm"] == rows["reference"], "change"].mean()
    return both.assign(gain=abs(float(gain)) if len(rows) else np.nan)


def clusters(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """`difference`: means of `column` by state if there are FEWEST_STATES, else by batch, whatever the fork; NaN is left out."""
    frame = frame[np.isfinite(frame[column].to_numpy(float))]
    by = STATE if frame.groupby(STATE).ngroups >= FEWEST_STATES else [*STATE, "batch"]
    means = frame.groupby(by)[column].mean()
    return means.rename("difference").astype(float).reset_index()


def dose(study: Study, arm: str) -> Dose:
    """Mean rotation of the arm's update against the reference's [degrees]."""
    rows = outcomes(study, "update_rotation", "step")
    values = rows.loc[rows["arm"] == arm, "value"]
    return Dose(arm, float(values.mean()) if len(values) else None)


def _finding(study: Study, parts: dict[str, pd.DataFrame], arm: str, *notes: str) -> ClaimData:
    by_state = "batch" not in next(iter(parts.values()))
    about = "clusters: " + ("states" if by_state else "batches; the verdict is about these states")
    return ClaimData(parts, notes=(about, *notes), dose=dose(study, arm))


def _nothing(study: Study, outcome: str, arm: str, *rivals: str) -> ClaimData:
    arms = dict.fromkeys([study.baseline, arm, *rivals])
    command = f"{COMMAND} {','.join(arms)}"
    return ClaimData(
        missing=f"no counterfactual update measures {outcome} of {arm} and {rivals[0]} ({command})"
    )


def _changes(study: Study, arm: str, *rivals: str, outcome: str = "heldout_failure") -> ClaimData:
    """Differences between an arm's change of an outcome and those of its rivals, as shares of the reference's change."""
    parts = {}
    for number, rival in enumerate(rivals):
        frame = paired(study, arm, rival, outcome)
        share = (frame["change"] - frame["rival_change"]) / frame["gain"]
        frame = clusters(frame.assign(share=share), "share")
        if not len(frame):
            return _nothing(study, outcome, arm, *rivals[number:], *rivals[:number])
        parts["" if len(rivals) == 1 else rival] = frame
    return _finding(study, parts, arm)


def _sharpness(study: Study) -> ClaimData:
    """Log ratio of SAM sharpness per unit of 1 − loss after the update; saturated batches are left out."""
    arm, rival = study.treatment, study.baseline
    frame = paired(study, arm, rival, "sam_sharpness")
    failure = paired(study, arm, rival, "train_failure")[[*KEY, "value", "rival"]]
    frame = frame.merge(failure, on=KEY, suffixes=("", "_failure"))
    if not len(frame):
        return _nothing(study, "sam_sharpness and train_failure", arm, rival)
    units = [frame[name] / (1 - frame[f"{name}_failure"]) for name in ("value", "rival")]
    most = pd.concat(units, axis=1).astype(float).max(axis=1)
    fit = (most <= MAX_SATURATION) & (frame["value"] > 0) & (frame["rival"] > 0)
    if not fit.any():
        limit = f"the limit is {MAX_SATURATION:g}; fork with a smaller radius"
        why = f"sharpness is saturated: {most.median():.2f} of the largest possible rise, {limit}"
        return ClaimData(missing=why, dose=dose(study, arm))
    parts = {
        "": clusters(frame.assign(ratio=np.log((units[0] / units[1])[fit].astype(float))), "ratio")
    }
    left_out = f"{(~fit).sum()} of {len(frame)} batches are saturated and left out"
    return _finding(study, parts, arm, *([] if fit.all() else [left_out]))


def _alignment(study: Study) -> ClaimData:
    """Changes of held-out failure against both controls of the treatment."""
    rivals = [control_label(study.treatment, name) for name in ("reverse", "shuffled")]
    return _changes(study, study.treatment, *rivals)


def unlikely(study: Study) -> ClaimData:
    """Change of held-out failure by an update with the unlikely tokens alone, in units of the reference's change.

    The arms are named `low` and `high`, or by the selection of tokens that they learn from.
    """
    name = f"{study.baseline}+tokens.kind=probability"
    arms = sorted(outcomes(study, "heldout_failure")["arm"].unique())
    chosen = [arm for arm in arms if arm.startswith(name)]
    lows = [arm for arm in chosen if "side=high" not in arm] + (["low"] if "low" in arms else [])
    highs = [arm for arm in chosen if "side=high" in arm] + (["high"] if "high" in arms else [])
    low = [*lows, name][0]
    high = [*highs, f"{name}+tokens.side=high"][0]
    frame = paired(study, low, high, "heldout_failure")
    gained = frame["change"] / frame["gain"]
    more = (frame["change"] - frame["rival_change"]) / frame["gain"]
    parts = {
        "the start": clusters(frame.assign(share=gained), "share"),
        high: clusters(frame.assign(share=more), "share"),
    }
    if not len(parts["the start"]):
        arms_text = f"{study.baseline},low={name},high={name}+tokens.side=high"
        return ClaimData(
            missing=f"no counterfactual update with the unlikely tokens alone ({COMMAND} {arms_text})"
        )
    return replace(_finding(study, parts, low, f"arms {low} and {high}"), dose=None)


C4 = declared("C4 (one update)", _sharpness)
C7 = declared("C7 (one update)", lambda study: _changes(study, study.treatment, study.baseline))
C10 = declared("C10 (one update)", _alignment)
C12 = declared(
    "C12 (one update)", lambda study: _changes(study, "cov-grpo", study.baseline, outcome="entropy")
)

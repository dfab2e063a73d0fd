"""Local versions of claims: what one update does, from the table `forks` of counterfactual updates.

All arms of a fork start from one state and learn from the same rollouts, and their outcomes are measured on the same completions, at
matched KL. Local versions stand beside the versions between runs and never change them: one update is not a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pandas as pd

from sharpscope.analysis.claims.base import (
    Claim,
    Confounder,
    Direction,
    Dose,
    Estimate,
    Finding,
    Rule,
    Sample,
    Scale,
    Verdict,
    against_every,
    difference_figure,
    directional,
    every,
    log_margin,
    mean_estimate,
    picture,
    present,
    rows_of,
)
from sharpscope.analysis.figures.style import Picture
from sharpscope.analysis.forks import NAMES
from sharpscope.analysis.study import Study
from sharpscope.config import control_label
from sharpscope.traces import Run

COMPARISON = "kl"
FEWEST_STATES = 6
"""States from which they are the clusters; with fewer, batches are, and the verdict is about these states."""
MARGIN = 0.1
SHARPNESS_MARGIN = 0.01
COLUMNS = ("step", "fork", "batch", "arm", "comparison", "outcome", "value", "start", "valid")
COMMAND = "sharpscope fork RUN --methods"
KEY = ["run", "step", "fork", "batch"]
STATE = ["run", "step"]
UNIT = "batches of rollouts (states, from 6 states on)"


def forked(study: Study) -> dict[str, Run]:
    """Runs with counterfactual updates: those of the setting that the claims use, of every method; all if there is no such setting."""
    runs = study.alike(*study.methods) if study.reference is not None else dict(study.runs)
    return {name: run for name, run in runs.items() if len(run.forks)}


def outcomes(study: Study, outcome: str, comparison: str = COMPARISON) -> pd.DataFrame:
    """run, step, fork, batch, arm, reference, value, start of every valid row with this outcome."""
    parts = []
    for name, run in forked(study).items():
        rows = run.forks
        chosen = rows[(rows["outcome"] == outcome) & (rows["comparison"] == comparison) & ~rows["valid"].eq(False)]
        parts.append(chosen.assign(run=name)[[*KEY, "arm", "reference", "value", "start"]])
    columns = [*KEY, "arm", "reference", "value", "start"]
    frame = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)
    return frame[frame["value"].notna()]


def paired(study: Study, arm: str, rival: str, outcome: str) -> pd.DataFrame:
    """One row per batch with both arms: KEY, `value` and `change` of the arm, `rival` and `rival_change`, `gain` of the reference.

    `gain` is |mean change of the fork's reference| over its batches, the same in every row.
    """
    rows = outcomes(study, outcome)
    rows = rows.assign(change=rows["value"] - rows["start"])
    mine, other = (rows[rows["arm"] == name].set_index(KEY)[["value", "change"]] for name in (arm, rival))
    both = mine.join(other.rename(columns={"value": "rival", "change": "rival_change"}), how="inner").reset_index()
    return both.assign(
        gain=abs(float(rows.loc[rows["arm"] == rows["reference"], "change"].mean())) if len(rows) else np.nan
    )


def clusters(frame: pd.DataFrame, column: str) -> tuple[np.ndarray, tuple[tuple[object, ...], ...]]:
    """Values by state if there are FEWEST_STATES, else by batch; and the clusters.

    Batches of one number and state are one cluster, whatever the fork: forks of a state draw the same rollouts.
    """
    by = STATE if frame.groupby(STATE).ngroups >= FEWEST_STATES else [*STATE, "batch"]
    means = frame.groupby(by)[column].mean()
    return means.to_numpy(dtype=float), tuple(tuple(key) for key in means.index)


def dose(study: Study, arm: str) -> Dose:
    """Mean rotation of the arm's update against the reference's [degrees]."""
    rows = outcomes(study, "update_rotation", "step")
    values = rows.loc[rows["arm"] == arm, "value"]
    return Dose(float(values.mean()) if len(values) else None, None, arm)


def compared(
    study: Study, pairs: Sequence[tuple[str, str]], outcome: str, direction: Direction, margin: float, scale: Scale
) -> Finding:
    """Differences of an outcome between arms; every one must show the effect.

    On the scale `log` ln(arm/rival) of the outcome; else (change of the arm − change of the rival)/`gain`, the reference's.
    """
    estimates, samples, drawn = [], [], []
    for arm, rival in pairs:
        frame = paired(study, arm, rival, outcome)
        if scale == "log":
            frame = frame[(frame["value"] > 0) & (frame["rival"] > 0)]
            frame = frame.assign(difference=np.log(frame["value"] / frame["rival"]))
        else:
            frame = frame.assign(difference=(frame["change"] - frame["rival_change"]) / frame["gain"])
        frame = frame[np.isfinite(frame["difference"].to_numpy(dtype=float))]
        if not len(frame):
            arms = ",".join(dict.fromkeys([study.baseline, *(a for pair in pairs for a in pair)]))
            return Finding(
                missing=f"no counterfactual update measures {outcome} of {arm} and {rival} ({COMMAND} {arms})"
            )
        values, places = clusters(frame, "difference")
        unit = f"ln({arm} / {rival})" if scale == "log" else f"share of the reference's change, {arm} − {rival}"
        estimates.append(mean_estimate(f"{outcome}, {arm} against {rival}", values, unit, "", scale))
        samples.append(Sample(f"{arm} against {rival}", values, places, direction, margin, runs=0))
        drawn.append(
            pd.DataFrame({"name": f"{arm} − {rival}", "difference": values, "label": f"{NAMES[outcome]}: {unit}"})
        )
    weakest, evidence = against_every([sample.values for sample in samples], direction, margin)
    by_state = len(samples[0].clusters[0]) == 2
    return Finding(
        effect=estimates[weakest],
        n=min(len(sample.values) for sample in samples),
        evidence=evidence,
        confounders=(
            Confounder("size of the update", "all arms are scaled to the KL of the reference's step"),
            Confounder(
                "other rollouts", "all arms learn from the same rollouts and are measured on the same completions"
            ),
            Confounder(
                "a few states",
                "states are the clusters" if by_state else "not handled: the verdict is about these states",
            ),
        ),
        others=present(*(e for k, e in enumerate(estimates) if k != weakest)),
        rows=rows_of(forked(study), "forks", COLUMNS, f"comparison {COMPARISON}, outcome {outcome}, valid"),
        notes=("clusters: " + ("states" if by_state else "batches"),),
        frames={FRAME: pd.concat(drawn, ignore_index=True)},
        dose=dose(study, pairs[0][0]),
        samples=tuple(samples),
    )


def _sharpness(study: Study) -> Finding:
    margin = log_margin(study.terms.margin(C4.key, SHARPNESS_MARGIN), "lower")
    return compared(study, [(study.treatment, study.baseline)], "sam_sharpness", "lower", margin, "log")


def _accuracy(study: Study) -> Finding:
    return compared(
        study,
        [(study.treatment, study.baseline)],
        "heldout_failure",
        "lower",
        study.terms.margin(C7.key, MARGIN),
        "percent",
    )


def _alignment(study: Study) -> Finding:
    pairs = [(study.treatment, control_label(study.treatment, control)) for control in ("reverse", "shuffled")]
    return compared(study, pairs, "heldout_failure", "lower", study.terms.margin(C10.key, MARGIN), "percent")


def _entropy(study: Study) -> Finding:
    return compared(
        study, [("cov-grpo", study.baseline)], "entropy", "higher", study.terms.margin(C12.key, MARGIN), "percent"
    )


def unlikely(study: Study) -> Finding:
    """Change of held-out failure by an update with the unlikely tokens alone, in units of the reference's change."""
    name = f"{study.baseline}+tokens.kind=probability"
    arms = sorted(outcomes(study, "heldout_failure")["arm"].unique())
    low = next((arm for arm in arms if arm == "low" or (arm.startswith(name) and "side=high" not in arm)), name)
    high = next(
        (arm for arm in arms if arm == "high" or (arm.startswith(name) and "side=high" in arm)),
        f"{name}+tokens.side=high",
    )
    frame = paired(study, low, high, "heldout_failure")
    frame = frame[np.isfinite((frame["change"] / frame["gain"]).to_numpy(dtype=float))]
    if not len(frame):
        arms_text = f"{study.baseline},low={name},high={name}+tokens.side=high"
        return Finding(missing=f"no counterfactual update with the unlikely tokens alone ({COMMAND} {arms_text})")
    frame = frame.assign(
        own=frame["change"] / frame["gain"], more=(frame["change"] - frame["rival_change"]) / frame["gain"]
    )
    values, places = clusters(frame, "own")
    more, _ = clusters(frame, "more")
    margin = study.terms.margin("C9", MARGIN)
    parts = (directional(values, "higher", margin), directional(more, "higher", margin))
    unit = "share of the reference's change; above 0 hurts"
    other: Estimate | None = mean_estimate(f"the same, {low} − {high}", more, unit, "", "percent")
    return Finding(
        effect=mean_estimate("change of held-out failure by the unlikely tokens alone", values, unit, "", "percent"),
        n=len(values),
        evidence=every(parts),
        confounders=(
            Confounder("size of the update", "scaled to the KL of the reference's step"),
            Confounder("first order only", "not assumed: the update is made and its outcome measured"),
        ),
        others=present(other),
        rows=rows_of(forked(study), "forks", COLUMNS, f"comparison {COMPARISON}, outcome heldout_failure, valid"),
        notes=(f"arms {low} and {high}",),
        frames={
            FRAME: pd.concat(
                pd.DataFrame({"name": name, "difference": part, "label": f"{NAMES['heldout_failure']}: {unit}"})
                for name, part in ((low, values), (f"{low} − {high}", more))
            )
        },
        samples=(
            Sample("unlikely tokens alone", values, places, "higher", margin, runs=0),
            Sample("unlikely against likely tokens", more, places, "higher", margin, runs=0),
        ),
    )


def draw(verdict: Verdict, study: Study) -> Iterator[Picture]:
    """Differences between arms, a dot for each cluster."""
    frame = verdict.frames.get(FRAME)
    if frame is None or not len(frame):
        return  # the verdict says what is missing
    label = str(frame["label"].iloc[0])
    arms = " and ".join(dict.fromkeys(frame["name"]))
    caption = f"One update at matched KL, {arms}: a dot for each batch or state, with the mean and its 95 % interval"
    yield picture(
        verdict, FRAME, f"one_update_{verdict.claim.lower()}", caption, lambda values: difference_figure(values, label)
    )


FRAME = "one update"


def _claim(name: str, title: str, text: str, test: Callable[[Study], Finding], scale: Scale, margin: float) -> Claim:
    return Claim(
        name,
        title,
        "this project: counterfactual updates",
        Rule(text, UNIT, 6, margin, scale=scale, compares=True),
        "more batches, or states of more runs, with `sharpscope fork`",
        test,
        draw=draw,
        version="one update",
    )


C4 = _claim(
    "C4",
    "one update with the weights lowers sharpness",
    "supported: after one update at matched KL, SAM sharpness is lower than after the baseline's from the same state and rollouts "
    "(sign-flip test of the log ratio); refuted: it is shown to be lower by less than {margin}",
    _sharpness,
    "log",
    SHARPNESS_MARGIN,
)
C7 = _claim(
    "C7",
    "one update with the weights generalizes better",
    "supported: one update at matched KL lowers expected held-out failure more than the baseline's from the same state and rollouts; "
    "refuted: it is shown to gain less than {margin} of the baseline's gain",
    _accuracy,
    "percent",
    MARGIN,
)
C10 = _claim(
    "C10",
    "one update depends on the weights' alignment",
    "supported: one update at matched KL lowers expected held-out failure more than with the weights reversed and than with the weights "
    "shuffled (the larger p); refuted: it is shown to gain less than {margin} of the baseline's gain over one of them (Bonferroni)",
    _alignment,
    "percent",
    MARGIN,
)
C12 = _claim(
    "C12",
    "one update with covariance-aware weights keeps entropy",
    "supported: after one update at matched KL, entropy at fixed tokens is higher under cov-grpo than under the baseline; refuted: it is "
    "shown to be higher by less than {margin} of the baseline's change",
    _entropy,
    "percent",
    MARGIN,
)
C9_TEXT = (
    "supported: an update at matched KL with the unlikely tokens alone raises expected held-out failure, and raises it more than one with "
    "the likely tokens alone (the larger p); refuted: it is shown to raise it by less than {margin} of the reference's change, or by less "
    "than that more than the likely tokens (Bonferroni)"
)

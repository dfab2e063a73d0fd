"""C12: polarity predicts the change of entropy, and covariance-aware weights stabilize it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sharpscope.analysis.claims import one_update
from sharpscope.analysis.claims.base import ClaimData, declared, directional, mean_estimate
from sharpscope.analysis.measures import by_step, dose_of, probe_rows
from sharpscope.analysis.study import Study
from sharpscope.analysis.tokens import Columns, Reducer
from sharpscope.traces import Run

STABLE = "cov-grpo"
CORRELATION = 0.1
"""Partial correlation that matters."""
FEWEST = 15
"""Changes of entropy with a prediction that a run must have [changes]."""
QUANTITY, TOKENS = "entropy", "nll"
"""Entropy at fixed tokens in the probes table: at the tokens of `nll`, the stored solutions of the probe set's training prompts."""
DRIFT = "ln(end / start), difference"


def _predicted(tokens: Columns, run: Run) -> dict[str, Any] | None:
    push = tokens["loss_coef"].astype(np.float64) * tokens["polarity"].astype(np.float64)
    good = np.isfinite(push)
    # c = ∂L/∂ln π, so a descent step of size η on the token's logits changes its entropy by +η·c·polarity
    return {"push": float(push[good].mean())} if good.any() else None


REDUCER = Reducer("C12", ("loss_coef", "polarity"), _predicted, needs="polarity")


def fixed_entropy(run: Run) -> pd.Series:
    """Step → entropy after it at the probe set's fixed tokens [nats]."""
    return probe_rows(run, QUANTITY, TOKENS).groupby("step")["value"].mean().sort_index()


def prediction_frame(study: Study) -> pd.DataFrame:
    """run, seed, step, predicted (Σ lr·updates·mean c·polarity) and measured change of entropy at fixed tokens [nats].

    A row is the change between two successive measurements, `step` the later one, if every step between has a prediction. The
    tokens measured are the same throughout, and none of those that the prediction is made of.
    """
    pushes: dict[str, dict[int, float]] = {}
    for result in study.results(REDUCER.name, study.alike(study.baseline, study.treatment)):
        pushes.setdefault(result.run, {})[result.step] = result.values["push"]
    rows = []
    for name, push in pushes.items():
        run = study.finished[name]
        measured, steps = fixed_entropy(run), by_step(run)
        for before, after in itertools.pairwise(measured.index.astype(int)):
            between = range(before + 1, after + 1)
            if all(step in push and step in steps.index for step in between):
                predicted = sum(float(steps["lr"][step] * steps["updates"][step]) * push[step] for step in between)
                rows.append((name, run.seed, after, predicted, float(measured[after] - measured[before])))
    frame = pd.DataFrame(rows, columns=["run", "seed", "step", "predicted", "measured"])
    frame = frame.astype({"predicted": float, "measured": float})
    return frame[np.isfinite(frame["predicted"]) & np.isfinite(frame["measured"])]


def partial_correlation(
    predicted: NDArray[np.float64], measured: NDArray[np.float64], step: NDArray[np.float64]
) -> float | None:
    """Correlation of predicted and measured change (T,) after removing a parabola in the step from both."""
    if len(step) < FEWEST:
        return None
    design = np.vander((step - step.mean()) / (np.ptp(step) or 1.0), 3)
    left = [v - design @ np.linalg.lstsq(design, v, rcond=None)[0] for v in (predicted, measured)]
    norms = [float(np.linalg.norm(v)) for v in left]
    return float(left[0] @ left[1] / (norms[0] * norms[1])) if min(norms) > 0 else None


def drift(run: Run) -> float | None:
    """ln(H at the last measurement / H at the first) at fixed tokens: negative where entropy falls."""
    entropy = fixed_entropy(run)
    if len(entropy) < 2:
        return None
    start, end = float(entropy.iloc[0]), float(entropy.iloc[-1])
    return math.log(end / start) if start > 0 and end > 0 else None


def _drifts(study: Study, treatment: str) -> pd.DataFrame:
    return study.differences(study.pairing(treatment), lambda first, second: (drift(first), drift(second)))


def measure(study: Study) -> ClaimData:
    """Drift of entropy under covariance-aware weights, and the correlation of predicted and measured change within a run."""
    frame, drifts = prediction_frame(study), _drifts(study, STABLE)
    columns = ["predicted", "measured", "step"]
    found = [
        (rows["seed"].iloc[0], partial_correlation(*rows[columns].to_numpy(float).T))
        for _, rows in frame.groupby("run")
    ]
    by_seed = (
        pd.DataFrame(found, columns=["seed", "r"]).astype({"r": float}).groupby("seed")["r"].mean().dropna().to_numpy()
    )
    treated = _drifts(study, study.treatment)
    others = (
        mean_estimate("partial correlation of predicted and measured change", by_seed, "correlation"),
        mean_estimate(f"drift of entropy of {study.treatment}", treated, DRIFT, "", "log"),
    )
    if not len(by_seed):
        return ClaimData(missing=_unmeasured(study), others=others)
    if not len(drifts):
        why = f"no pair of {STABLE} and {study.baseline} with {QUANTITY} at fixed tokens: half of the claim cannot be tested"
        return ClaimData(missing=why, others=others)
    means = drifts[["baseline", "treatment"]].mean().abs()
    closer = bool(means["treatment"] < means["baseline"])
    return ClaimData(
        parts={"": drifts},
        evidence=(directional(by_seed, "higher", CORRELATION),),
        n=len(by_seed),
        conditions=((f"the mean drift under {STABLE} is closer to 0 than under {study.baseline}", closer),),
        others=others,
        notes=(f"{len(frame)} changes of entropy in {frame['run'].nunique()} runs",),
        dose=dose_of(study.alike(STABLE).values(), STABLE),
    )


def _unmeasured(study: Study) -> str:
    """Reason why no run has enough changes of entropy with a prediction."""
    runs = study.alike(study.baseline, study.treatment)
    if not study.results(REDUCER.name, runs):
        return f"no run has {' and '.join(REDUCER.columns)} of its tokens (recording.tokens_every=1)"
    if all(len(fixed_entropy(run)) < 2 for run in runs.values()):
        return "no run has entropy at the fixed tokens of the probe set (recording.probe_entropy_every=1)"
    return f"no run has {FEWEST} changes of entropy at fixed tokens with a prediction at every step between"


C12 = declared("C12", measure, REDUCER, other=one_update.C12)

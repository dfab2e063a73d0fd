"""C12: polarity predicts the change of entropy, and covariance-aware weights stabilize it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sharpscope.analysis.claims import local
from sharpscope.analysis.claims.base import (
    DOSED,
    PAIRED_BY_SEED,
    Claim,
    Condition,
    Confounder,
    Estimate,
    Finding,
    Rule,
    Sample,
    Verdict,
    difference_estimate,
    directional,
    every,
    log_margin,
    mean_estimate,
    picture,
    present,
    rows_of,
    sample_of,
    unfinished,
)
from sharpscope.analysis.claims.measures import dose_of, probe_rows
from sharpscope.analysis.figures.style import GRAY, Lines, Picture, finish, lines, panels, plain, styled
from sharpscope.analysis.study import Study
from sharpscope.analysis.tokens import Columns, Reducer
from sharpscope.traces import Run

NAME = "C12"
STABLE = "cov-grpo"
COLUMNS = ("loss_coef", "polarity")
MARGIN = 0.1
DRIFT_MARGIN = 0.1
FEWEST = 15
"""Changes of entropy with a prediction that a run must have [changes]."""
QUANTITY, TOKENS = "entropy", "nll"
"""Entropy at fixed tokens in the probes table: at the tokens of `nll`, the stored solutions of the probe set's training prompts."""


def _predicted(tokens: Columns, run: Run) -> dict[str, Any] | None:
    push = tokens["loss_coef"].astype(np.float64) * tokens["polarity"].astype(np.float64)
    good = np.isfinite(push)
    # c = ∂L/∂ln π, so a descent step of size η on the token's logits changes its entropy by +η·c·polarity
    return {"push": float(push[good].mean())} if good.any() else None


REDUCER = Reducer(NAME, COLUMNS, _predicted, needs="polarity")


def fixed_entropy(run: Run) -> pd.Series:
    """Step → entropy after it at the probe set's fixed tokens [nats]."""
    return probe_rows(run, QUANTITY, TOKENS).groupby("step")["value"].mean().sort_index()


def prediction_frame(study: Study) -> pd.DataFrame:
    """run, method, seed, step, predicted (Σ lr·updates·mean c·polarity) and measured change of entropy at fixed tokens [nats].

    A row is the change between two successive measurements, `step` the later one, if every step between has a prediction. The
    tokens measured are the same throughout, and none of those that the prediction is made of.
    """
    pushes: dict[str, dict[int, float]] = {}
    about = {}
    for result in study.results(NAME, study.alike(study.baseline, study.treatment)):
        pushes.setdefault(result.run, {})[result.step] = result.values["push"]
        about[result.run] = result.method, result.seed
    rows = []
    for name, push in pushes.items():
        run = study.finished[name]
        measured, steps = fixed_entropy(run), run.steps.set_index("step")
        for before, after in itertools.pairwise(measured.index.astype(int)):
            between = range(before + 1, after + 1)
            if all(step in push and step in steps.index for step in between):
                sizes = (float(steps["lr"][step] * steps["updates"][step]) * push[step] for step in between)
                rows.append((name, *about[name], after, sum(sizes), float(measured[after] - measured[before])))
    frame = pd.DataFrame(rows, columns=["run", "method", "seed", "step", "predicted", "measured"])
    frame = frame.astype({"predicted": float, "measured": float})
    return frame[np.isfinite(frame["predicted"]) & np.isfinite(frame["measured"])]


def partial_correlation(predicted: np.ndarray, measured: np.ndarray, step: np.ndarray) -> float | None:
    """Correlation of predicted and measured change (T,) after removing a parabola in the step from both."""
    if len(step) < FEWEST:
        return None
    design = np.vander((step - step.mean()) / (np.ptp(step) or 1.0), 3)
    left = [v - design @ np.linalg.lstsq(design, v, rcond=None)[0] for v in (predicted, measured)]
    norms = [float(np.linalg.norm(v)) for v in left]
    return float(left[0] @ left[1] / (norms[0] * norms[1])) if min(norms) > 0 else None


def correlations(frame: pd.DataFrame) -> pd.Series:
    """Seed → partial correlation of predicted and measured change, mean over the runs that have enough changes."""
    matches = [
        (rows["seed"].iloc[0], r)
        for _, rows in frame.groupby("run")
        if (r := partial_correlation(*(rows[c].to_numpy() for c in ("predicted", "measured", "step")))) is not None
    ]
    return pd.DataFrame(matches, columns=["seed", "r"]).groupby("seed")["r"].mean()


def drift(run: Run) -> float | None:
    """ln(H at the last measurement / H at the first) at fixed tokens: negative where entropy falls."""
    entropy = fixed_entropy(run)
    if len(entropy) < 2:
        return None
    start, end = float(entropy.iloc[0]), float(entropy.iloc[-1])
    return math.log(end / start) if start > 0 and end > 0 else None


def drift_frame(study: Study, treatment: str = STABLE) -> pd.DataFrame:
    """seed, drift of baseline and of `treatment` [ln], and `difference`, treatment − baseline."""
    return study.differences(study.pairing(treatment), lambda first, second: (drift(first), drift(second)))


def scales(frame: pd.DataFrame) -> pd.DataFrame:
    """Per seed, the standard deviation over steps of the predicted and of the measured change, mean over runs [nats]."""
    spread = frame.groupby(["seed", "run"])[["predicted", "measured"]].std().reset_index()
    return spread.groupby("seed")[["predicted", "measured"]].mean().reset_index()


def test(study: Study) -> Finding:
    """Partial correlation of predicted and measured entropy change within a run, and drift under covariance weights."""
    frame, drifts = prediction_frame(study), drift_frame(study)
    by_seed = correlations(frame)
    beside = _drift_estimates(study, drifts)
    if by_seed.empty:
        return Finding(missing=_unmeasured(study), others=beside)
    if not len(drifts):
        return Finding(
            missing=f"no pair of {STABLE} and {study.baseline} with {QUANTITY} at fixed tokens: half of the claim cannot be tested",
            others=beside,
        )
    margin, drift_margin = study.terms.margin(NAME, MARGIN), log_margin(DRIFT_MARGIN, "higher")
    stable = directional(drifts["difference"].to_numpy(), "higher", drift_margin)
    means = drifts[["baseline", "treatment"]].mean()
    names = frame["run"].unique()
    return Finding(
        effect=mean_estimate("partial correlation of predicted and measured change", by_seed.to_numpy(), "correlation"),
        n=min(len(by_seed), len(drifts)),
        evidence=every((directional(by_seed.to_numpy(), "higher", margin), stable)),
        conditions=(
            Condition(
                f"the mean drift under {STABLE} is closer to 0 than under {study.baseline}",
                bool(abs(means["treatment"]) < abs(means["baseline"])),
            ),
        ),
        confounders=(
            Confounder(
                "other tokens after a step",
                "entropy is measured at fixed tokens, solutions that the initial policy wrote",
            ),
            Confounder("trends", "a parabola in the step is removed from both"),
            Confounder("learning rate", "the prediction is multiplied by the step's own"),
            Confounder(
                "AdamW, shared parameters", "the prediction is first order in each token's logits alone: a bound on it"
            ),
            PAIRED_BY_SEED,
            DOSED,
        ),
        others=(*beside, *_scale_estimates(frame)),
        rows=rows_of(names, "tokens", COLUMNS, "all recorded steps")
        + rows_of(names, "probes", ("step", "value"), f"quantity {QUANTITY} at the tokens of {TOKENS}, train")
        + rows_of(names, "steps", ("step", "updates", "lr"), "all steps"),
        notes=(
            f"{len(frame)} changes of entropy in {len(names)} runs",
            *unfinished(study),
        ),
        frames={"prediction": frame, "drift": drifts},
        dose=dose_of(list(study.alike(STABLE).values()), STABLE),
        samples=(
            Sample("partial correlation", by_seed.to_numpy(), tuple(by_seed.index), "higher", margin, runs=1),
            sample_of("drift of entropy", drifts, "higher", drift_margin),
        ),
    )


DRIFT_UNIT = "ln(end / start), difference"


def _drift_estimates(study: Study, drifts: pd.DataFrame) -> tuple[Estimate, ...]:
    """Drift of the stable method and of the treatment against the baseline, and of both methods of `drifts` alone."""
    own = drift_frame(study, study.treatment)
    return present(
        difference_estimate(f"drift of entropy, {STABLE} against {study.baseline}", drifts, DRIFT_UNIT, "", "log"),
        difference_estimate(
            f"drift of entropy, {study.treatment} against {study.baseline}", own, DRIFT_UNIT, "", "log"
        ),
        *(
            mean_estimate(f"drift of {name}", drifts[column].to_numpy(dtype=float), "ln(end / start)", "", "log")
            for name, column in ((study.baseline, "baseline"), (STABLE, "treatment"))
        ),
    )


def _scale_estimates(frame: pd.DataFrame) -> tuple[Estimate, ...]:
    """Standard deviations of the predicted and of the measured change, and their ratio."""
    size = scales(frame)
    ratio = np.log(size["predicted"].to_numpy() / size["measured"].to_numpy())
    known = ratio[np.isfinite(ratio)]
    return present(
        mean_estimate("predicted change, standard deviation", size["predicted"].to_numpy(), "nats"),
        mean_estimate("measured change, standard deviation", size["measured"].to_numpy(), "nats"),
        Estimate(
            "predicted over measured",
            float(np.exp(known.mean())) if len(known) else math.nan,
            "1",
            n=len(known),
            note="geometric mean of the ratio of standard deviations; the prediction's scale is not tested, only its sign and order",
        ),
    )


def _unmeasured(study: Study) -> str:
    """Reason why no run has enough changes of entropy with a prediction."""
    runs = study.alike(study.baseline, study.treatment)
    if not study.results(NAME, runs):
        return f"no run has {' and '.join(COLUMNS)} of its tokens (recording.tokens_every=1)"
    if all(len(fixed_entropy(run)) < 2 for run in runs.values()):
        return "no run has entropy at the fixed tokens of the probe set (recording.probe_entropy_every=1)"
    return f"no run has {FEWEST} changes of entropy at fixed tokens with a prediction at every step between"


def entropy_prediction(prediction: pd.DataFrame, lines: Lines) -> Figure:
    """Measured against predicted change of entropy, each in its run's standard deviations; means of ten bins (C12).

    `prediction`: run, method, predicted, measured.
    """
    with styled():
        figure, axes = panels(1, height=3.0)
        axes[0].axhline(0, color=GRAY, linewidth=0.8)
        axes[0].axvline(0, color=GRAY, linewidth=0.8)
        for method, rows in prediction.groupby("method"):
            spread = rows.groupby("run")[["predicted", "measured"]].transform("std").replace(0.0, np.nan)
            scaled = (rows[["predicted", "measured"]] / spread).dropna()
            if len(scaled) < 10:
                continue
            line = lines[str(method)]
            axes[0].plot(
                scaled["predicted"],
                scaled["measured"],
                ".",
                color=line.color,
                alpha=0.15,
                markersize=3,
                rasterized=True,
            )
            bins = pd.qcut(scaled["predicted"].rank(method="first"), 10, labels=False)
            means = scaled.groupby(bins).mean()
            axes[0].plot(means["predicted"], means["measured"], marker=line.marker, label=plain(method), **line.plot)
        axes[0].set(xlabel="predicted ΔH [run's std]", ylabel="measured ΔH [run's std]")
        finish(figure, axes)
    return figure


def draw(verdict: Verdict, study: Study) -> Iterator[Picture]:
    """Predicted against measured change of entropy."""
    caption = "Predicted against measured change of entropy"
    styles = lines(study.methods)
    yield picture(verdict, "prediction", "entropy_prediction", caption, lambda frame: entropy_prediction(frame, styles))


CLAIM = Claim(
    NAME,
    "polarity predicts entropy's change, and covariance-aware weights stabilize it",
    "arXiv 2605.11775 (polarity) and 2605.11538 (covariance)",
    Rule(
        "at fixed tokens, solutions of the probe set; supported: predicted and measured changes of entropy correlate within runs "
        "(sign-flip test over seeds), and entropy falls less under "
        f"{STABLE} than under the baseline (signed drift, ln(end / start)), its mean drift being closer to 0; refuted: the correlation "
        f"is shown to be below {{margin}}, or the drift to be higher by less than {DRIFT_MARGIN:.0%} (Bonferroni)",
        "seeds",
        6,
        MARGIN,
        compares=True,
    ),
    f"more seeds, with recording.tokens_every=1 and recording.probe_entropy_every=1, and of {STABLE}",
    test,
    (REDUCER,),
    draw,
    "between runs",
    local.C12,
)

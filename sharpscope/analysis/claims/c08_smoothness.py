"""C8: the treatment's gradient-norm trajectory is smoother, measured so that scale does not count."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from sharpscope.analysis.claims.base import (
    DOSED,
    FINISHED_ONLY,
    PAIRED_BY_SEED,
    SAME_SETTINGS,
    Claim,
    Condition,
    Confounder,
    Finding,
    Rule,
    Verdict,
    difference_estimate,
    directional,
    log_margin,
    paired_pictures,
    pairing_notes,
    present,
    rows_of,
    sample_of,
)
from sharpscope.analysis.claims.measures import dose_of, log_ratios, log_steps, probe_rows
from sharpscope.analysis.figures.style import Picture
from sharpscope.analysis.statistics import sign_flip_p
from sharpscope.analysis.study import Pairing, Study
from sharpscope.traces import Run

NAME = "C8"
MARGIN = 0.1
FEWEST = 20
"""Steps with a gradient that a run must have [steps]."""
SPIKE_Z = 4.0
WINDOW = 50
UNBIASED, NAIVE = "squared_gradient_norm", "squared_gradient_norm_naive"
"""Quantities of the probes table: ⟨g₁, g₂⟩ of two independent batches, unbiased for ‖∇J‖², and ‖g‖² of all of the same draws."""


def roughness(norms: np.ndarray) -> float | None:
    """Median |ln g_{t+1} − ln g_t| of gradient norms (T,): unchanged if all are multiplied by one number."""
    steps = log_steps(norms)
    return float(np.median(np.abs(steps))) if len(steps) >= FEWEST - 1 else None


def spike_rate(norms: np.ndarray) -> float | None:
    """Share of steps whose log norm is SPIKE_Z robust deviations (1.4826·MAD) above the median of the last WINDOW steps."""
    logs = np.log(norms[np.isfinite(norms) & (norms > 0)])
    if len(logs) < FEWEST:
        return None
    hits = 0
    for t in range(10, len(logs)):
        past = logs[max(0, t - WINDOW) : t]
        middle = np.median(past)
        spread = 1.4826 * np.median(np.abs(past - middle))
        hits += bool(logs[t] > middle + SPIKE_Z * spread)
    return hits / (len(logs) - 10)


def _norms(run: Run, steps: int) -> np.ndarray:
    frame = run.steps.sort_values("step")
    return frame["grad_norm"].to_numpy(dtype=float)[:steps]


def _rough(first: Run, second: Run) -> tuple[float | None, float | None]:
    steps = min(len(first.steps), len(second.steps))
    return roughness(_norms(first, steps)), roughness(_norms(second, steps))


def _spikes(first: Run, second: Run) -> tuple[float | None, float | None]:
    steps = min(len(first.steps), len(second.steps))
    return spike_rate(_norms(first, steps)), spike_rate(_norms(second, steps))


def _noise_share(run: Run) -> float | None:
    """1 − (unbiased ‖∇J‖²)/(‖g‖² of the same draws), over the steps that have both: the share of the squared norm that is noise."""
    unbiased, naive = (
        probe_rows(run, quantity, "surrogate").groupby("step")["value"].mean() for quantity in (UNBIASED, NAIVE)
    )
    both = unbiased.index.intersection(naive.index)
    total = float(naive[both].sum())
    return float(1 - unbiased[both].sum() / total) if total > 0 else None


def _noise(first: Run, second: Run) -> tuple[float | None, float | None]:
    return _noise_share(first), _noise_share(second)


def compared(study: Study, pairing: Pairing) -> pd.DataFrame:
    """seed, roughness of both runs, and ln(treatment/baseline) as `difference`."""
    return log_ratios(study.differences(pairing, _rough))


def test(study: Study) -> Finding:
    """Relative difference of the roughness of ln‖g‖, treatment − baseline."""
    pairing = study.pairing()
    if pairing.missing:
        return Finding(missing=pairing.missing)
    frame = compared(study, pairing)
    if not len(frame):
        return Finding(missing=f"no pair has {FEWEST} steps with a gradient norm")
    spikes, noise = study.differences(pairing, _spikes), study.differences(pairing, _noise)
    margin = log_margin(study.terms.margin(NAME, MARGIN), "lower")
    more = len(spikes) and sign_flip_p(spikes["difference"].to_numpy(), "greater") <= study.terms.level
    return Finding(
        effect=difference_estimate("change of roughness", frame, UNIT, "", "log"),
        n=len(frame),
        evidence=directional(frame["difference"].to_numpy(), "lower", margin),
        conditions=(Condition("spikes are not shown to be more frequent", not more),),
        confounders=(
            PAIRED_BY_SEED,
            SAME_SETTINGS,
            DOSED,
            Confounder(
                "scale", "weights of mean above 1 scale the norm; differences of logarithms do not depend on scale"
            ),
            Confounder(
                "noise of the batch",
                "not handled: the norm is a batch's. Where two-batch ‖∇J‖² was recorded, its noise share on the probe set is beside it",
            ),
            FINISHED_ONLY,
        ),
        others=present(
            difference_estimate("difference of the spike rate", spikes, "share of steps", "", "points"),
            difference_estimate(
                "difference of the noise share of ‖g‖²", noise, "share", "probe set, plain surrogate", "points"
            ),
        ),
        rows=rows_of(pairing.names, "steps", ("step", "grad_norm"), "steps that both runs made"),
        notes=(
            *pairing_notes(study, pairing),
            *(() if len(noise) else ("two-batch unbiased ‖∇J‖² was not recorded",)),
        ),
        frames={"roughness": frame},
        dose=dose_of([study.finished[pair.treatment] for pair in pairing.pairs], study.treatment),
        samples=(sample_of("roughness", frame, "lower", margin),),
    )


UNIT = "ln(treatment / baseline)"


def draw(verdict: Verdict, study: Study) -> Iterator[Picture]:
    """Baseline and treatment, paired by seed."""
    return paired_pictures(verdict, {"roughness": "gradient norm"}, "median |ln g(t+1) − ln g(t)| [1]", log=True)


CLAIM = Claim(
    NAME,
    "GRPO-SG's gradient-norm trajectory is smoother",
    "arXiv 2511.00066",
    Rule(
        "supported: the median |ln g_{t+1} − ln g_t| is lower (sign-flip test of the log ratio over seeds), spikes not shown to "
        "be more frequent; refuted: it is shown to be lower by less than {margin}",
        "pairs of runs with one seed",
        6,
        MARGIN,
        scale="log",
        compares=True,
    ),
    "more paired seeds",
    test,
    draw=draw,
)

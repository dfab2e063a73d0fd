"""C8 and C13: smoothness of the gradient norm, and the gradient shares of lucky and of confident tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sharpscope.analysis.claims.base import ClaimData, declared, log_margin, mean_estimate, pairing_notes
from sharpscope.analysis.measures import log_ratios
from sharpscope.analysis.spikes import SPIKE_Z
from sharpscope.analysis.statistics import sign_flip_p
from sharpscope.analysis.study import Pairing, PairMeasure, Study
from sharpscope.analysis.tokens import INCLUSION, Columns, Reducer, inverse_inclusion
from sharpscope.traces.rules import MINIMUM, robust_z

if TYPE_CHECKING:
    from sharpscope.traces import Run

FEWEST = 20
"""Steps with a gradient that a run must have [steps]."""
LOW, HIGH = 0.25, 0.9
"""Probabilities below which a token is unlikely, above which it is confident."""
LOG = "ln(treatment / baseline)"


def roughness(norms: NDArray[np.float64]) -> float | None:
    """Median |ln g_{t+1} − ln g_t| of gradient norms (T,), gaps skipped: unchanged if all are multiplied by one number."""
    good = np.isfinite(norms) & (norms > 0)
    logs = np.log(np.where(good, norms, 1.0))
    steps = (logs[1:] - logs[:-1])[good[1:] & good[:-1]]
    return float(np.median(np.abs(steps))) if len(steps) >= FEWEST - 1 else None


def spike_rate(norms: NDArray[np.float64]) -> float | None:
    """Share of steps whose log norm is more than SPIKE_Z robust deviations above the median of the 50 before; see `robust_z`."""
    logs = np.log(norms[np.isfinite(norms) & (norms > 0)]).tolist()
    if len(logs) < FEWEST:
        return None
    scores = [robust_z(logs[:t], logs[t]) for t in range(MINIMUM, len(logs))]
    return float(np.mean(np.array(scores) > SPIKE_Z))


def _of_norms(measure: Callable[[NDArray[np.float64]], float | None]) -> PairMeasure:
    """`measure` of both runs' gradient norms over the steps that both made."""

    def _both(first: Run, second: Run) -> tuple[float | None, float | None]:
        steps = min(len(first.steps), len(second.steps))
        norms = [run.steps.sort_values("step")["grad_norm"].to_numpy(dtype=float)[:steps] for run in (first, second)]
        return measure(norms[0]), measure(norms[1])

    return _both


def smoothness(study: Study) -> ClaimData:
    """Log ratio of the roughness of ln‖g‖, treatment over baseline."""
    pairing = study.pairing()
    if pairing.missing:
        return ClaimData(missing=pairing.missing)
    rough = log_ratios(study.differences(pairing, _of_norms(roughness)))
    if not len(rough):
        return ClaimData(missing=f"no pair has {FEWEST} steps with a gradient norm")
    spikes = study.differences(pairing, _of_norms(spike_rate))
    more = len(spikes) and sign_flip_p(spikes["difference"].to_numpy(), "greater") <= study.terms.level
    return ClaimData(
        parts={"": rough},
        conditions=(("spikes are not shown to be more frequent", not more),),
        others=(mean_estimate("spike rate", spikes, "share of steps", "", "points"),),
        notes=pairing_notes(study, pairing),
    )


C8 = declared("C8", smoothness)


def _shares(tokens: Columns, run: Run) -> dict[str, Any] | None:
    pull = np.abs(tokens["loss_coef"].astype(np.float64)) * tokens["score_norm_local"].astype(np.float64)
    pull = pull * inverse_inclusion(tokens)
    weight, logp = tokens["weight"].astype(np.float64), tokens["logp"]
    good = np.isfinite(pull) & np.isfinite(weight) & (weight > 0) & (pull > 0)
    if not good.any():
        return None
    pull, plain, logp = pull[good], (pull / np.where(good, weight, 1.0))[good], logp[good]
    lucky = (logp < np.log(LOW)) & (tokens["advantage"][good] > 0)
    sure = logp > np.log(HIGH)
    return {
        "lucky": float(pull[lucky].sum() / pull.sum()),
        "confident": float(pull[sure].sum() / pull.sum()),
        "lucky_unweighted": float(plain[lucky].sum() / plain.sum()),
        "confident_unweighted": float(plain[sure].sum() / plain.sum()),
    }


SHARES = Reducer(
    "C13",
    ("logp", "advantage", "weight", "loss_coef", "score_norm_local", INCLUSION),
    _shares,
    needs="score_norm_local",
)


def share_frame(study: Study, *methods: str) -> pd.DataFrame:
    """run, method, seed, step and the gradient shares of the methods' runs."""
    columns = ["run", "method", "seed", "step", "lucky", "confident", "lucky_unweighted", "confident_unweighted"]
    results = study.results(SHARES.name, study.alike(*methods))
    rows = [{"run": r.run, "method": r.method, "seed": r.seed, "step": r.step, **r.values} for r in results]
    return pd.DataFrame(rows, columns=columns)


def _between(shares: pd.DataFrame, pairing: Pairing, column: str) -> pd.DataFrame:
    """seed, mean share of both runs over the steps recorded in both, ln(treatment/baseline) as `difference`."""
    by_run = {run: rows.set_index("step")[column] for run, rows in shares.groupby("run")}
    rows = []
    for pair in pairing.pairs:
        a, b = by_run.get(pair.baseline), by_run.get(pair.treatment)
        if a is not None and b is not None and len(both := a.index.intersection(b.index)):
            rows.append((pair.seed, float(a[both].mean()), float(b[both].mean())))
    return log_ratios(pd.DataFrame(rows, columns=["seed", "baseline", "treatment"]))


def lucky_spikes(study: Study) -> ClaimData:
    """Log ratio of the lucky tokens' gradient share, treatment over baseline, paired by seed."""
    pairing = study.pairing()
    if pairing.missing:
        return ClaimData(missing=pairing.missing)
    shares = share_frame(study, study.baseline, study.treatment)
    lucky, sure = (_between(shares, pairing, column) for column in ("lucky", "confident"))
    if not len(lucky):
        return ClaimData(missing="no pair has score_norm_local at one step")
    margin = study.terms.margin(C13.key, C13.margin)
    values = sure["difference"].to_numpy()
    kept = len(values) and sign_flip_p(values, "greater", shift=-log_margin(margin, "lower")) <= study.terms.level
    return ClaimData(
        parts={"": lucky},
        conditions=((f"confident tokens are shown to lose less than {margin:.0%} of their share", bool(kept)),),
        others=(mean_estimate("confident tokens' gradient share", sure, LOG, "", "log"),),
        notes=(f"lucky: π < {LOW:g} and A > 0; confident: π > {HIGH:g}", *pairing_notes(study, pairing)),
    )


C13 = declared("C13", lucky_spikes, SHARES)

"""C8 and C13: smoothness of the gradient norm, and gradient shares of lucky and of confident tokens; checks of the recording.

Checks are facts that hold whatever a method does, so that a violation means a wrong recording: C1 (bounds of the logit gradient) is
a property of the softmax; C13 on the same gradient follows from how weights are made. They give no verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sharpscope.analysis.claims.base import ClaimData, declared, log_margin, mean_estimate, pairing_notes
from sharpscope.analysis.measures import log_ratios
from sharpscope.analysis.spikes import SPIKE_Z
from sharpscope.analysis.statistics import sign_flip_p
from sharpscope.analysis.study import Pairing, PairMeasure, Study
from sharpscope.analysis.tokens import INCLUSION, Columns, Reducer, complement, inverse_inclusion
from sharpscope.traces import Run
from sharpscope.traces.rules import MINIMUM, robust_z

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
        name + tail: float(values[chosen].sum() / values.sum())
        for tail, values in (("", pull), ("_unweighted", plain))
        for name, chosen in (("lucky", lucky), ("confident", sure))
    }


_READ = ("logp", "advantage", "weight", "loss_coef", "score_norm_local", INCLUSION)
SHARES = Reducer("C13", _READ, _shares, needs="score_norm_local")


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

# -- Checks of the recording

EPSILON = float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Check:
    """What a check of the recording found: `holds` is None where nothing was recorded to check."""

    name: str
    title: str
    holds: bool | None
    text: str

    def line(self) -> str:
        """The check on one line."""
        word = {True: "holds", False: "VIOLATED", None: "not recorded"}[self.holds]
        return f"{self.name:<18}{word:<13}{self.title}: {self.text}"


def rounding(logit: NDArray[Any], logp: NDArray[Any], temperature: float) -> NDArray[np.float64]:
    """Absolute error of 1 − π from float32 (n,): ln π is a difference of numbers of the size of the logits over T."""
    size = np.abs(np.asarray(logit, dtype=np.float64)) / temperature
    return np.asarray(4 * EPSILON * (1 + size + np.abs(np.asarray(logp, dtype=np.float64))))


def _violations(tokens: Columns, run: Run) -> dict[str, float] | None:
    norm = tokens["logit_grad_norm"].astype(np.float64)
    seen = np.isfinite(norm)
    if not seen.any():
        return None
    logp = tokens["logp"][seen]
    logit = np.nan_to_num(tokens["logit"][seen], nan=32.0)  # not recorded: allow for a large one
    rest = complement(logp)
    slack = rounding(logit, logp, float((run.config.get("rollout") or {}).get("temperature") or 1.0))
    vocabulary = run.info.get("vocabulary") or 0
    factor = np.sqrt(vocabulary / (vocabulary - 1)) if vocabulary > 1 else 1.0  # the limit where V is not known
    below = norm[seen] * (1 + 1e-5) < factor * (rest - slack)
    above = norm[seen] * (1 - 1e-5) > np.sqrt(2) * (rest + slack)
    return {"tokens": int(seen.sum()), "below": int(below.sum()), "above": int(above.sum())}


BOUNDS = Reducer("C1", ("logp", "logit", "logit_grad_norm"), _violations, needs="logit_grad_norm")


def logit_bounds(study: Study) -> Check:
    """‖∂ℓ/∂z‖₂ lies between √(V/(V − 1))·(1 − π) and √2·(1 − π) on every recorded token, beyond float32's rounding."""
    title = "a token's logit gradient lies between (1 − π) and √2·(1 − π)"
    results = study.results(BOUNDS.name, study.finished)
    if not results:
        return Check("C1", title, None, "no token rows with logit_grad_norm (recording.tokens_every)")
    tokens, below, above = (sum(int(r.values[key]) for r in results) for key in ("tokens", "below", "above"))
    text = f"{tokens:,} tokens, {below} below and {above} above beyond rounding"
    return Check("C1", title, below + above == 0, text)


def direct_shares(study: Study, column: str) -> pd.DataFrame:
    """seed, gradient share without the weights (`baseline`) and with them (`treatment`) on the same tokens, log ratio."""
    shares = share_frame(study, study.treatment)
    means = shares.groupby("seed", as_index=False)[[f"{column}_unweighted", column]].mean()
    return log_ratios(means.rename(columns={f"{column}_unweighted": "baseline", column: "treatment"}))


def same_gradient(study: Study) -> Check:
    """Weights that rise or fall with probability move the shares of lucky and of confident tokens in opposite directions."""
    title = f"the weights of {study.treatment} move the gradient shares of lucky and confident tokens in opposite directions"
    lucky, sure = (mean_estimate(name, direct_shares(study, name), "ln", "", "log") for name in ("lucky", "confident"))
    if lucky is None or sure is None:
        return Check("C13", title, None, f"no run of {study.treatment} has score_norm_local at a step")
    text = f"lucky (π < {LOW:g}, A > 0) {lucky.line}; confident (π > {HIGH:g}) {sure.text}"
    return Check("C13", title, lucky.value * sure.value <= 0, text)


CHECKS: dict[str, tuple[Callable[[Study], Check], Reducer]] = {
    "C1": (logit_bounds, BOUNDS),
    "C13": (same_gradient, SHARES),
}
"""Name → check, and what it needs of the token tables."""

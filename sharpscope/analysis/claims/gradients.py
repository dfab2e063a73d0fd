"""C8, C12 and C13: smoothness of the gradient norm, change of entropy, gradient shares of lucky and of confident tokens.

C1, bounds of the logit gradient, is a property of the softmax: it gives no verdict, and a violation means a wrong recording.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sharpscope.analysis.claims import one_update
from sharpscope.analysis.claims.base import (
    ClaimData,
    declared,
    directional,
    is_shown,
    log_margin,
    mean_estimate,
    paired,
)
from sharpscope.analysis.measures import by_step, dose_of, log_ratios, probe_rows
from sharpscope.analysis.spikes import SPIKE_Z
from sharpscope.analysis.statistics import Doubles
from sharpscope.analysis.study import Pairing, PairMeasure, Study
from sharpscope.analysis.tokens import (
    INCLUSION,
    Columns,
    Found,
    Reducer,
    complement,
    inverse_inclusion,
)
from sharpscope.rules.judging import SPIKE_LEAST, robust_z
from sharpscope.traces import Run

FEWEST = 20
"""Steps with a gradient that a run must have [steps]."""


def roughness(norms: Doubles) -> float | None:
    """Median |ln g_{t+1} − ln g_t| of gradient norms (T,), gaps skipped: unchanged if all are multiplied by one number."""
    good = np.isfinite(norms) & (norms > 0)
    logs = np.log(np.where(good, norms, 1.0))
    steps = (logs[1:] - logs[:-1])[good[1:] & good[:-1]]
    return float(np.median(np.abs(steps))) if len(steps) >= FEWEST - 1 else None


def spike_rate(norms: Doubles) -> float | None:
    """Share of steps whose log norm is more than SPIKE_Z robust deviations above the median of the 50 before; see `robust_z`."""
    logs = np.log(norms[np.isfinite(norms) & (norms > 0)]).tolist()
    if len(logs) < FEWEST:
        return None
    scores = [robust_z(logs[:t], logs[t]) for t in range(SPIKE_LEAST, len(logs))]
    return float(np.mean(np.array(scores) > SPIKE_Z))


def _of_norms(measure: Callable[[Doubles], float | None]) -> PairMeasure:
    """`measure` of both runs' gradient norms over the steps that both made."""

    def _both(first: Run, second: Run) -> tuple[float | None, float | None]:
        steps = min(len(first.steps), len(second.steps))

        def _measured(run: Run) -> float | None:
            norms = by_step(run)["grad_norm"].to_numpy(float)
            return measure(norms[:steps])

        return _measured(first), _measured(second)

    return _both


@paired
def smoothness(study: Study, pairing: Pairing) -> ClaimData:
    """Log ratio of the roughness of ln‖g‖, treatment over baseline."""
    rough = log_ratios(study.differences(pairing, _of_norms(roughness)))
    if not len(rough):
        return ClaimData(missing=f"no pair has {FEWEST} steps with a gradient norm")
    spikes = study.differences(pairing, _of_norms(spike_rate))
    as_rare = not is_shown(study, spikes, "greater")
    return ClaimData(
        parts={"": rough},
        conditions=(("spikes are not shown to be more frequent", as_rare),),
        others=(mean_estimate("spike rate", spikes, "share of steps", "points"),),
    )


C8 = declared("C8", smoothness)

# -- C12: polarity predicts the change of entropy, and covariance-aware weights stabilize it

STABLE = "cov-grpo"
CORRELATION = 0.1
"""Partial correlation that matters."""
FEWEST_CHANGES = 15
"""Changes of entropy with a prediction that a run must have [changes]."""


def _predicted(tokens: Columns, run: Run) -> Found:
    push = tokens["loss_coef"] * tokens["polarity"]
    good = np.isfinite(push)
    # c = ∂L/∂ln π, so a descent step of size η on the token's logits changes its entropy by +η·c·polarity
    return {"push": float(push[good].mean())} if good.any() else None


PUSH = Reducer("C12", ("loss_coef", "polarity"), _predicted, needs="polarity")


def fixed_entropy(run: Run) -> pd.Series:
    """Step → entropy after it at the probe set's fixed tokens, the stored solutions of its training prompts [nats]."""
    return probe_rows(run, "entropy", "nll").groupby("step")["value"].mean().sort_index()


def prediction_frame(study: Study) -> pd.DataFrame:
    """run, seed, step, predicted (Σ lr·updates·mean c·polarity) and measured change of entropy at fixed tokens [nats].

    A row is the change between two successive measurements, `step` the later one, if every step between has a prediction.
    """
    pushes: dict[str, dict[int, float]] = {}
    for result in study.results(PUSH.name, study.alike(study.baseline, study.treatment)):
        pushes.setdefault(result.run, {})[result.step] = result.values["push"]
    rows = []
    for name, push in pushes.items():
        run = study.finished[name]
        measured = fixed_entropy(run)
        steps = by_step(run)
        rates = steps["lr"] * steps["updates"]
        changes = {step: rates[step] * push[step] for step in push if step in rates}
        for before, after in itertools.pairwise(measured.index.astype(int)):
            between = range(before + 1, after + 1)
            if all(step in changes for step in between):
                predicted = sum(changes[step] for step in between)
                change = measured[after] - measured[before]
                rows.append((name, run.seed, after, predicted, change))
    frame = pd.DataFrame(rows, columns=["run", "seed", "step", "predicted", "measured"])
    numbers = frame[["predicted", "measured"]].to_numpy(float)
    return frame[np.isfinite(numbers).all(axis=1)]


def partial_correlation(predicted: Doubles, measured: Doubles, step: Doubles) -> float | None:
    """Correlation of predicted and measured change (T,) after removing a parabola in the step from both."""
    if len(step) < FEWEST_CHANGES:
        return None
    course = (step - step.mean()) / (np.ptp(step) or 1.0)
    design = np.vander(course, 3)  # (T, 3) of a parabola

    def _without_course(values: Doubles) -> Doubles:
        """What the parabola leaves of values (T,)."""
        fitted, *_ = np.linalg.lstsq(design, values, rcond=None)
        return np.asarray(values - design @ fitted)

    left, right = _without_course(predicted), _without_course(measured)
    norms = [np.linalg.norm(values) for values in (left, right)]
    return float(left @ right / (norms[0] * norms[1])) if min(norms) > 0 else None


def drift(run: Run) -> float | None:
    """ln(H at the last measurement / H at the first) at fixed tokens: negative where entropy falls."""
    entropy = fixed_entropy(run).to_numpy(float)
    if len(entropy) < 2 or min(entropy[0], entropy[-1]) <= 0:
        return None
    return math.log(entropy[-1] / entropy[0])


def entropy(study: Study) -> ClaimData:
    """Drift of entropy under covariance-aware weights, and the correlation of predicted and measured change within a run."""
    frame = prediction_frame(study)
    drifts = study.differences(
        study.pairing(STABLE), lambda first, second: (drift(first), drift(second))
    )
    found = []
    for _, rows in frame.groupby("run"):
        changes = rows[["predicted", "measured", "step"]].to_numpy(float).T
        found.append((rows["seed"].iloc[0], partial_correlation(*changes)))
    by_run = pd.DataFrame(found, columns=["seed", "r"]).astype({"r": float})
    by_seed = by_run.groupby("seed")["r"].mean().dropna().to_numpy()
    what = "partial correlation of predicted and measured change"
    others = (mean_estimate(what, by_seed, "correlation"),)
    if not len(by_seed):
        return ClaimData(missing=_unmeasured(study), others=others)
    if not len(drifts):
        why = f"no pair of {STABLE} and {study.baseline} with entropy at fixed tokens: half of the claim is untestable"
        return ClaimData(missing=why, others=others)
    means = drifts[["baseline", "treatment"]].mean().abs()
    closer = bool(means["treatment"] < means["baseline"])
    return ClaimData(
        parts={"": drifts},
        evidence=(directional(by_seed, "higher", CORRELATION),),
        n=len(by_seed),
        conditions=(
            (f"the mean drift under {STABLE} is closer to 0 than under {study.baseline}", closer),
        ),
        others=others,
        notes=(f"{len(frame)} changes of entropy in {frame['run'].nunique()} runs",),
        dose=dose_of(study.alike(STABLE).values(), STABLE),
    )


def _unmeasured(study: Study) -> str:
    """Reason why no run has enough changes of entropy with a prediction."""
    runs = study.alike(study.baseline, study.treatment)
    if not study.results(PUSH.name, runs):
        return f"no run has {' and '.join(PUSH.columns)} of its tokens (recording.tokens_every=1)"
    if all(len(fixed_entropy(run)) < 2 for run in runs.values()):
        return "no run has entropy at the fixed tokens of the probe set (recording.probe_entropy_every=1)"
    return f"no run has {FEWEST_CHANGES} changes of entropy at fixed tokens with a prediction at every step between"


C12 = declared("C12", entropy, PUSH, other=one_update.C12)

# -- C13: the treatment damps lucky spikes while keeping confident tokens

LOW, HIGH = 0.25, 0.9
"""Probabilities below which a token is unlikely, above which it is confident."""


def _shares(tokens: Columns, run: Run) -> Found:
    """Shares of Σ |c|·‖∇ ln π‖ (local method) that lucky and confident tokens have."""
    norm = tokens["score_norm_local"]
    pull = np.abs(tokens["loss_coef"]) * norm * inverse_inclusion(tokens)
    weight = tokens["weight"]
    good = np.isfinite(pull) & np.isfinite(weight) & (weight > 0) & (pull > 0)
    if not good.any():
        return None
    pull = pull[good]
    logp = tokens["logp"][good]
    lucky = (logp < np.log(LOW)) & (tokens["advantage"][good] > 0)
    confident = logp > np.log(HIGH)
    total = pull.sum()
    return {
        "lucky": float(pull[lucky].sum() / total),
        "confident": float(pull[confident].sum() / total),
    }


_READ = ("logp", "advantage", "weight", "loss_coef", "score_norm_local", INCLUSION)
SHARES = Reducer("C13", _READ, _shares, needs="score_norm_local")


def _between(study: Study, pairing: Pairing, kind: str) -> pd.DataFrame:
    """seed, mean share of both runs over the steps recorded in both, ln(treatment/baseline) as `difference`."""
    shares: dict[str, dict[int, float]] = defaultdict(dict)
    for result in study.results(SHARES.name, pairing.names):
        shares[result.run][result.step] = result.values[kind]
    rows = []
    for pair in pairing.pairs:
        of_pair = {"baseline": shares[pair.baseline], "treatment": shares[pair.treatment]}
        both = pd.DataFrame(of_pair).dropna()
        if len(both):
            rows.append({"seed": pair.seed, **both.mean()})
    return log_ratios(pd.DataFrame(rows, columns=["seed", "baseline", "treatment"]))


@paired
def lucky_spikes(study: Study, pairing: Pairing) -> ClaimData:
    """Log ratio of the lucky tokens' gradient share, treatment over baseline, paired by seed."""
    lucky = _between(study, pairing, "lucky")
    sure = _between(study, pairing, "confident")
    if not len(lucky):
        return ClaimData(missing="no pair has score_norm_local at one step")
    margin = C13.margin_in(study.terms)
    kept = is_shown(study, sure, "greater", -log_margin(margin, "lower"))
    return ClaimData(
        parts={"": lucky},
        conditions=(
            (f"confident tokens are shown to lose less than {margin:.0%} of their share", kept),
        ),
        others=(mean_estimate("confident tokens' gradient share", sure, C13.effect_unit, "log"),),
        notes=(f"lucky: π < {LOW:g} and A > 0; confident: π > {HIGH:g}",),
    )


C13 = declared("C13", lucky_spikes, SHARES)

# -- C1, a check of the recording

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


def _violations(tokens: Columns, run: Run) -> Found:
    norm = tokens["logit_grad_norm"]
    seen = np.isfinite(norm)
    if not seen.any():
        return None
    logp = tokens["logp"][seen]
    # not recorded: allow for a large one
    logit = np.nan_to_num(tokens["logit"][seen], nan=32.0)
    rest = complement(logp)
    # float32's rounding of 1 − π: ln π is a difference of numbers of the size of the logits over T
    temperature = float((run.config.get("rollout") or {}).get("temperature") or 1.0)
    slack = 4 * EPSILON * (1 + np.abs(logit) / temperature + np.abs(logp))
    vocabulary = run.info.get("vocabulary") or 0
    # the limit where V is not known
    factor = np.sqrt(vocabulary / (vocabulary - 1)) if vocabulary > 1 else 1.0
    below = norm[seen] * (1 + 1e-5) < factor * (rest - slack)
    above = norm[seen] * (1 - 1e-5) > np.sqrt(2) * (rest + slack)
    return {
        "tokens": int(seen.sum()),
        "below": int(below.sum()),
        "above": int(above.sum()),
    }


BOUNDS = Reducer("C1", ("logp", "logit", "logit_grad_norm"), _violations, needs="logit_grad_norm")


def logit_bounds(study: Study) -> Check:
    """‖∂ℓ/∂z‖₂ lies between √(V/(V − 1))·(1 − π) and √2·(1 − π) on every recorded token, beyond float32's rounding."""
    title = "a token's logit gradient lies between (1 − π) and √2·(1 − π)"
    results = study.results(BOUNDS.name, study.finished)
    if not results:
        text = "no token rows with logit_grad_norm (recording.tokens_every)"
        return Check("C1", title, None, text)
    counts = pd.DataFrame([result.values for result in results]).sum()
    below = int(counts["below"])
    above = int(counts["above"])
    text = f"{int(counts['tokens']):,} tokens, {below} below and {above} above beyond rounding"
    return Check("C1", title, below + above == 0, text)

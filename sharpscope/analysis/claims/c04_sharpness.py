"""C4: the treatment lowers sharpness, at matched step, reward and number of informative groups."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd

from sharpscope.analysis.claims import local
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
from sharpscope.analysis.claims.measures import (
    FUNCTIONAL,
    MEASURES,
    dose_of,
    informative_groups,
    log_ratios,
    probe_noise,
    shared_curves,
    smooth_reward,
)
from sharpscope.analysis.figures.style import Picture
from sharpscope.analysis.statistics import sign_flip_p
from sharpscope.analysis.study import Pairing, Study
from sharpscope.traces import Run

NAME = "C4"
MARGIN = 0.1
Matching = Callable[[Run, Run, pd.Series, pd.Series], tuple[int, int] | None]


def _same_step(first: Run, second: Run, a: pd.Series, b: pd.Series) -> tuple[int, int] | None:
    shared = sorted(set(a.index) & set(b.index))
    return (shared[-1], shared[-1]) if shared else None


def _same_reward(first: Run, second: Run, a: pd.Series, b: pd.Series) -> tuple[int, int] | None:
    """The probed steps at which each run first reached the highest reward that both reached."""
    rewards = [smooth_reward(run).reindex(curve.index).dropna() for run, curve in ((first, a), (second, b))]
    if any(not len(reward) for reward in rewards):
        return None
    level = min(reward.max() for reward in rewards)
    keys = [int(reward.index[int(np.argmax(reward.to_numpy() >= level))]) for reward in rewards]
    return keys[0], keys[1]


def _same_groups(first: Run, second: Run, a: pd.Series, b: pd.Series) -> tuple[int, int] | None:
    """The probed steps at which each run's number of informative groups is closest to the smaller of the two totals."""
    totals = [informative_groups(run) for run in (first, second)]
    if totals[0] is None or totals[1] is None:
        return None
    seen = [
        total.reindex(curve.index).dropna() for total, curve in zip(totals, (a, b), strict=True) if total is not None
    ]
    if any(not len(each) for each in seen):
        return None
    level = min(each.max() for each in seen)
    keys = [int((each - level).abs().idxmin()) for each in seen]
    return keys[0], keys[1]


MATCHED: dict[str, tuple[Matching, str]] = {
    "step": (_same_step, "last probed step of both"),
    "reward": (_same_reward, "conditions on an outcome of the runs; a description, not an experiment"),
    "informative groups": (_same_groups, "as many groups with a signal; conditions on an outcome of the runs"),
}


def compared(study: Study, pairing: Pairing, quantity: str, matching: Matching) -> pd.DataFrame:
    """seed, baseline, treatment sharpness, and ln(treatment/baseline) as `difference`; pairs without a logarithm are left out."""
    measure = functools.partial(_at_matched_steps, quantity, matching)
    return log_ratios(study.differences(pairing, measure))


def _at_matched_steps(quantity: str, matching: Matching, first: Run, second: Run) -> tuple[float, float] | None:
    """Sharpness of both runs, each at the step that `matching` gives it."""
    curves = shared_curves((first, second), quantity)
    if curves is None or any(not len(curve) for curve in curves):
        return None
    keys = matching(first, second, curves[0], curves[1])
    return None if keys is None else (float(curves[0][keys[0]]), float(curves[1][keys[1]]))


def _matched(study: Study, pairing: Pairing) -> tuple[str, ...]:
    """Notes on the number of pairs in which matching selects another step than the last; with few probes it rarely can."""
    notes = []
    for name, (matching, _) in MATCHED.items():
        other = total = 0
        for pair in pairing.pairs if name != "step" else ():
            runs = study.finished[pair.baseline], study.finished[pair.treatment]
            curves = shared_curves(runs, MAIN)
            if curves is None:
                continue
            keys, last = matching(*runs, curves[0], curves[1]), _same_step(*runs, curves[0], curves[1])
            total += keys is not None
            other += keys is not None and keys != last
        if total:
            notes.append(f"matched {name}: another step than the last in {other} of {total} pairs")
    return tuple(notes)


def _not_higher(frame: pd.DataFrame, level: float) -> bool:
    return not len(frame) or sign_flip_p(frame["difference"].to_numpy(), "greater") > level


def test(study: Study) -> Finding:
    """Log ratio of plain sharpness, treatment over baseline, at the last probed step."""
    pairing = study.pairing()
    if pairing.missing:
        return Finding(missing=pairing.missing)
    frames = {q: compared(study, pairing, q, _same_step) for q in MEASURES}
    frame = frames[MAIN]
    if not len(frame):
        return Finding(missing=f"no pair has {MAIN} sharpness of functional {FUNCTIONAL} at one step")
    others, conditions = [], []
    for q, kind in MEASURES.items():
        for name, (matching, note) in MATCHED.items():
            matched = frames[q] if name == "step" else compared(study, pairing, q, matching)
            estimate = difference_estimate(f"{kind} sharpness ({q}) at matched {name}", matched, UNIT, note, "log")
            others.append(estimate)
            if (q, name) in REQUIRED:
                text = f"{kind} sharpness at matched {name} is not shown to be higher"
                conditions.append(Condition(text, _not_higher(matched, study.terms.level)))
    margin = log_margin(study.terms.margin(NAME, MARGIN), "lower")
    unmeasured = len(pairing.pairs) - len(frame)
    pairs = [(study.finished[pair.baseline], study.finished[pair.treatment]) for pair in pairing.pairs]
    return Finding(
        effect=difference_estimate(f"change of plain sharpness ({MAIN})", frame, UNIT, "", "log"),
        n=len(frame),
        evidence=directional(frame["difference"].to_numpy(), "lower", margin),
        conditions=tuple(conditions),
        confounders=(
            PAIRED_BY_SEED,
            SAME_SETTINGS,
            DOSED,
            Confounder(
                "different measurements", f"one functional, {FUNCTIONAL}, one probe set and one radius in a pair"
            ),
            Confounder(
                "scale of the weights", "the adaptive measure, which rescaling leaves alone, must not be higher"
            ),
            Confounder(
                "learning speed",
                "compared at matched reward and at matched number of informative groups too, as finely as the probes are spaced: the "
                "notes say in how many pairs that is another step",
            ),
            FINISHED_ONLY,
        ),
        others=present(*others),
        rows=rows_of(
            pairing.names,
            "probes",
            ("step", "value", "rho"),
            f"functional {FUNCTIONAL}, quantity {' or '.join(MEASURES)}, train",
        )
        + rows_of(pairing.names, "steps", ("reward_mean", "zero_std_groups"), "all steps"),
        notes=(
            *((f"{unmeasured} pairs have no positive sharpness at one radius on one probe set",) if unmeasured else ()),
            *_matched(study, pairing),
            *pairing_notes(study, pairing),
        ),
        frames={f"sharpness_{q}": result for q, result in frames.items()},
        dose=dose_of([second for _, second in pairs], study.treatment),
        samples=(sample_of("plain sharpness", frame, "lower", margin, probe_noise(pairs, MAIN)),),
    )


UNIT = "ln(treatment / baseline)"
MAIN = "sam"
"""The measure that decides."""
REQUIRED = (("asam", "step"), ("sam", "reward"))
"""(Measure, matching) that must not be shown to be higher."""


def draw(verdict: Verdict, study: Study) -> Iterator[Picture]:
    """Baseline and treatment, paired by seed."""
    return paired_pictures(
        verdict,
        {"sharpness_sam": "plain (sam)", "sharpness_asam": "adaptive (asam)"},
        "sharpness at the last probed step [rise of the loss]",
        log=True,
    )


CLAIM = Claim(
    NAME,
    "GRPO-SG lowers sharpness",
    "arXiv 2511.00066",
    Rule(
        f"supported: plain (SAM) sharpness of {FUNCTIONAL} at the last step probed in both runs is lower (sign-flip test of the "
        "log ratio over seeds), adaptive sharpness and plain sharpness at matched reward not shown to be higher; refuted: it "
        "is shown to be lower by less than {margin}",
        "pairs of runs with one seed",
        6,
        MARGIN,
        scale="log",
        compares=True,
    ),
    f"more paired seeds with perturbation probes (functional {FUNCTIONAL}, sam and asam) on more prompts",
    test,
    draw=draw,
    version="between runs",
    beside=local.C4,
)

"""C4: the treatment lowers sharpness, plain and adaptive, at matched step, reward and informative groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd

from sharpscope.analysis.claims.base import (
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
    every,
    paired_pictures,
    pairing_notes,
    present,
    rows_of,
)
from sharpscope.analysis.claims.measures import (
    FUNCTIONAL,
    MEASURES,
    informative_groups,
    relative_difference,
    shared_curves,
    smooth_reward,
)
from sharpscope.analysis.figures.style import Picture
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
    places = [int(reward.index[int(np.argmax(reward.to_numpy() >= level))]) for reward in rewards]
    return places[0], places[1]


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
    places = [int((each - level).abs().idxmin()) for each in seen]
    return places[0], places[1]


MATCHED: dict[str, tuple[Matching, str]] = {
    "step": (_same_step, "last probed step of both"),
    "reward": (_same_reward, "conditions on an outcome of the runs; a description, not an experiment"),
    "informative groups": (_same_groups, "as many groups with a signal; conditions on an outcome of the runs"),
}


def compared(study: Study, pairing: Pairing, quantity: str, matching: Matching) -> pd.DataFrame:
    """seed, baseline, treatment sharpness, and their relative difference as `difference`."""

    def measure(first: Run, second: Run) -> tuple[float, float] | None:
        curves = shared_curves((first, second), quantity)
        if curves is None or any(not len(curve) for curve in curves):
            return None
        places = matching(first, second, curves[0], curves[1])
        return None if places is None else (float(curves[0][places[0]]), float(curves[1][places[1]]))

    frame = study.differences(pairing, measure)
    relative = [relative_difference(a, b) for a, b in zip(frame["baseline"], frame["treatment"], strict=True)]
    return frame.assign(difference=np.array(relative, dtype=float))


def _unmeasured(pairing: Pairing, frames: dict[str, pd.DataFrame]) -> tuple[str, ...]:
    missing = len(pairing.pairs) - min(len(frame) for frame in frames.values())
    return (f"{missing} pairs have no sharpness at one radius on one probe set",) if missing else ()


def _matched(study: Study, pairing: Pairing) -> tuple[str, ...]:
    """In how many pairs matching selects another step than the last; with few probes it rarely can."""
    notes = []
    for name, (matching, _) in MATCHED.items():
        other = total = 0
        for pair in pairing.pairs if name != "step" else ():
            runs = study.finished[pair.baseline], study.finished[pair.treatment]
            curves = shared_curves(runs, "sam")
            if curves is None:
                continue
            places, last = matching(*runs, curves[0], curves[1]), _same_step(*runs, curves[0], curves[1])
            total += places is not None
            other += places is not None and places != last
        if total:
            notes.append(f"matched {name}: another step than the last in {other} of {total} pairs")
    return tuple(notes)


def test(study: Study) -> Finding:
    """Relative difference of both sharpness measures, treatment − baseline; both must be lower."""
    pairing = study.pairing()
    if pairing.missing:
        return Finding(missing=pairing.missing)
    frames = {q: compared(study, pairing, q, _same_step) for q in MEASURES}
    empty = [q for q, frame in frames.items() if not len(frame)]
    if empty:
        return Finding(missing=f"no pair has {' and '.join(empty)} sharpness of functional {FUNCTIONAL} at one step")
    evidence = {q: directional(frame["difference"].to_numpy(), "lower", MARGIN) for q, frame in frames.items()}
    weaker = max(evidence, key=lambda q: (evidence[q].p_supported, not evidence[q].as_claimed))
    if not all(e.as_claimed for e in evidence.values()):
        weaker = next(q for q in evidence if not evidence[q].as_claimed)
    others, conditions = [], []
    for q, kind in MEASURES.items():
        for name, (matching, note) in MATCHED.items():
            frame = frames[q] if name == "step" else compared(study, pairing, q, matching)
            others.append(difference_estimate(f"{kind} sharpness ({q}) at matched {name}", frame, UNIT, note))
            if name != "step" and len(frame):
                lower = bool(frame["difference"].mean() < 0)
                conditions.append(Condition(f"{kind} sharpness is lower at matched {name} too", lower))
    effect = difference_estimate(f"difference of {MEASURES[weaker]} sharpness ({weaker})", frames[weaker], UNIT)
    return Finding(
        effect=effect,
        n=min(len(frame) for frame in frames.values()),
        evidence=every(evidence.values()),
        conditions=tuple(conditions),
        confounders=(
            PAIRED_BY_SEED,
            SAME_SETTINGS,
            Confounder(
                "different measurements", f"one functional, {FUNCTIONAL}, one probe set and one radius in a pair"
            ),
            Confounder("scale of the weights", "the adaptive measure, which rescaling leaves alone, must be lower too"),
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
        notes=(*_unmeasured(pairing, frames), *_matched(study, pairing), *pairing_notes(study, pairing)),
        frames={f"sharpness_{q}": frame for q, frame in frames.items()},
    )


UNIT = "relative difference, treatment − baseline"


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
    "primary",
    Rule(
        "supported: plain (SAM) and adaptive (ASAM) sharpness of one functional at the last matched step are "
        "both lower "
        "(sign-flip test, the larger p), and also at matched reward and matched informative groups; refuted: one "
        "of them "
        f"is shown to be lower by less than {MARGIN:.0%}",
        "pairs of runs with one seed",
        7,
        MARGIN,
    ),
    "more paired seeds with perturbation probes (functional nll, sam and asam)",
    test,
    draw=draw,
)

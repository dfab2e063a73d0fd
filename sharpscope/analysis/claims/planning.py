"""What would help a paired comparison most: the parts of a pair's variance, what less of each would save, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sharpscope.analysis.measures import GREEDY, evaluations, probe_rows
from sharpscope.analysis.pairs import standard_error
from sharpscope.analysis.study import Study
from sharpscope.traces import Run

FACTOR = 4
"""How many times as many prompts, questions or checkpoints an option takes."""
TIMES = ["generation_s", "training_s", "recording_s"]


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """n pairs of runs on a claim's scale.

    Attributes:
        values: (n, 2) of the baseline and the treatment.
        errors: (2n,) standard errors of the runs' values by the prompts that they were measured on.
        late: differences of each pair at its evaluations in the second half of training.
        measured: name of those prompts.
        cost: of measuring a run once.
        seconds: mean processor time of a pair; 0 if not recorded.
    """

    values: np.ndarray
    errors: Sequence[float]
    late: Sequence[Sequence[float]]
    measured: str
    cost: str
    seconds: float

    @property
    def variance(self) -> float:
        """Of the differences."""
        return float(np.diff(self.values).var(ddof=1))

    @property
    def by_prompts(self) -> float:
        """What the choice of prompts explains, at most: runs of a pair share theirs. NaN if not known."""
        return 2 * float(np.square(self.errors).mean())

    @property
    def by_checkpoint(self) -> float:
        """What differs between evaluations of one pair, pooled over pairs; NaN with fewer than two of each."""
        several = [late for late in self.late if len(late) > 1]
        squares = sum(float(np.var(late)) * len(late) for late in several)
        return squares / sum(len(late) - 1 for late in several) if several else math.nan

    @property
    def correlation(self) -> float:
        """Of the two runs of a pair over the pairs; NaN where one does not vary."""
        varies = len(self.values) > 2 and np.ptp(self.values, axis=0).all()
        return float(np.corrcoef(self.values.T)[0, 1]) if varies else math.nan

    def options(self) -> dict[str, float]:
        """What there could be FACTOR times as much of -> its part of the variance, the largest first."""
        parts = {
            f"{FACTOR} times the {self.measured}": self.by_prompts,
            f"mean of {FACTOR} checkpoints": self.by_checkpoint,
        }
        known = {name: min(part, self.variance) for name, part in parts.items() if part > 0}
        return dict(sorted(known.items(), key=lambda item: -item[1]))

    def deviation(self, part: float) -> float:
        """The standard deviation of a pair when a part of the variance is divided by FACTOR."""
        return math.sqrt(self.variance - part * (1 - 1 / FACTOR))


def _questions(run: Run) -> tuple[float, str]:
    """Standard error of the last greedy held-out accuracy, and its cost."""
    found = evaluations(run, temperature=GREEDY)
    error = standard_error(run, "heldout", GREEDY, max(found), "accuracy")
    return error, f"{found[max(found)][1]:,} completions"


def _prompts(run: Run) -> tuple[float, str]:
    """Relative standard error over prompts of the last SAM sharpness, which is that of its logarithm, and its cost."""
    last = run.probes.loc[probe_rows(run, "sam").index[-1]].to_dict()
    error = float(last.get("prompt_std_error", math.nan)) / float(last["value"])
    return error, f"{last.get('seconds', math.nan):.3g} s"


def _late(first: Run, second: Run) -> list[float]:
    a, b = (evaluations(run, temperature=GREEDY) for run in (first, second))
    shared = set(a) & set(b)
    return [b[step][0] - a[step][0] for step in sorted(shared) if 2 * step > max(shared)]


MEASURED = {
    "C4": "probe prompts",
    "C7": "questions",
    "C10": "questions",
}
"""Claim -> the prompts that its values are measured on."""


def pairs_of(study: Study, claim: str, baseline: str, values: pd.DataFrame) -> Pairs:
    """The pairs of a claim with their values (columns seed, baseline, treatment); C4's are sharpness, which the logarithm is taken of."""
    by_seed = {one.seed: one for one in study.pairing(baseline=baseline or None).pairs}
    runs = [
        study.finished[name]
        for seed in values["seed"]
        for name in (by_seed[seed].baseline, by_seed[seed].treatment)
    ]
    numbers = values[["baseline", "treatment"]].to_numpy(dtype=float)
    errors, costs = zip(*map(_prompts if claim == "C4" else _questions, runs), strict=True)
    seconds = [run.steps.reindex(columns=TIMES).to_numpy(dtype=float) for run in runs]
    return Pairs(
        values=np.log(numbers) if claim == "C4" else numbers,
        errors=errors,
        late=[] if claim == "C4" else list(map(_late, runs[::2], runs[1::2])),
        measured=MEASURED[claim],
        cost=costs[0],
        seconds=2 * float(np.mean([np.nansum(part) for part in seconds])),
    )

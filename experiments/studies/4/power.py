"""Level and power of every primary outcome of the fourth study by simulation, before its runs.

python experiments/studies/4/power.py > experiments/studies/4/power.md
"""

# ruff: noqa: E501 - rows of tables
from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from verdicts import NOMINAL, half_width

TRIALS = 4000


@dataclass(frozen=True, kw_only=True)
class Primary:
    """A primary outcome: what a run's or a pair's number scatters by, in the outcome's unit, where it is looked at, and the margin."""

    name: str
    spread: float
    groups: int  # strata whose means are averaged
    looks: tuple[int, ...]  # runs of a stratum
    margin: float
    by: str  # where the spread is from


PRIMARIES = (
    Primary(
        name="D3 H1, math",
        spread=1.4,
        groups=2,
        looks=(20, 50, 90),
        margin=0.5,
        by="pilot: 0.3 × 10 % a state, 5 states a run",
    ),
    Primary(
        name="D3 `acting` (no verdict, for this reason), math",
        spread=4.5,
        groups=2,
        looks=(20, 50, 90),
        margin=0.5,
        by="pilot: 5 to 15 % a state, 5 states a run",
    ),
    Primary(
        name="D3 H2 `published`, math",
        spread=0.2,
        groups=2,
        looks=(20, 50, 90),
        margin=0.1,
        by="pilot: 0.4 % a state, 5 states a run",
    ),
    Primary(
        name="D3 H1, K&K",
        spread=1.2,
        groups=2,
        looks=(8, 16, 24),
        margin=0.5,
        by="a guess: as on math, 3 states a run",
    ),
    Primary(
        name="D3 `acting` (no verdict, for this reason), K&K",
        spread=2.0,
        groups=2,
        looks=(8, 16, 24),
        margin=0.5,
        by="a guess from one state",
    ),
    Primary(
        name="D3 H2 `published`, K&K",
        spread=0.2,
        groups=2,
        looks=(8, 16, 24),
        margin=0.1,
        by="a guess from one state",
    ),
    Primary(
        name="D1 reward, one rate",
        spread=0.08,
        groups=1,
        looks=(20, 40, 60),
        margin=0.03,
        by="the design's pilots: 0.065 to 0.08 a pair",
    ),
    Primary(
        name="D2 greedy accuracy [points]",
        spread=1.8,
        groups=1,
        looks=(34, 67, 100),
        margin=1.0,
        by="study 2: 1.0 to 1.8 points a pair",
    ),
    Primary(
        name="D2 sharpness [100·ln]",
        spread=25.0,
        groups=1,
        looks=(34, 67, 100),
        margin=10.0,
        by="study 2: ± 14 over 12 pairs",
    ),
)


def trial(
    one: Primary, truth: float, heavy: bool, generator: np.random.Generator
) -> tuple[bool, bool]:
    """Whether one of the looks excludes 0, and whether one lies within the margin."""
    shape = one.groups, one.looks[-1]
    noise = (
        generator.standard_t(3, shape) / np.sqrt(3) if heavy else generator.standard_normal(shape)
    )
    values = truth + one.spread * noise
    excludes = inside = False
    for n in one.looks:
        some = values[:, :n]
        mean, half = some.mean(), half_width(list(some), NOMINAL)
        excludes |= bool(abs(mean) > half)
        inside |= bool(abs(mean) + half < one.margin)
    return excludes, inside


def main() -> None:
    """Print the table."""
    generator = np.random.default_rng(4)
    print("# Level and power, by simulation before the first run\n")
    print(
        f"{TRIALS} simulated studies a cell, all looks included; nominal level of a look {NOMINAL}. Heavy: Student's t with 3 degrees of freedom, same spread."
    )
    print(
        '"Excludes 0" at a true 0 is the level of that verdict, "within the margin" at the margin that of the other; the other two are powers.\n'
    )
    print(
        "| outcome | spread of a run or pair | from | looks | margin | errors | excludes 0: truth 0 | at the margin | within the margin: truth at it | at 0 |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for one in PRIMARIES:
        for heavy in (False, True):
            rates = {
                truth: np.mean([trial(one, truth, heavy, generator) for _ in range(TRIALS)], axis=0)
                for truth in (0.0, one.margin)
            }
            cells = (rates[0.0][0], rates[one.margin][0], rates[one.margin][1], rates[0.0][1])
            looks = " / ".join(map(str, one.looks))
            print(
                f"| {one.name} | {one.spread:g} | {one.by} | {looks} | {one.margin:g} | {'heavy' if heavy else 'normal'} | "
                + " | ".join(f"{100 * cell:.1f} %" for cell in cells)
                + " |"
            )


if __name__ == "__main__":
    main()

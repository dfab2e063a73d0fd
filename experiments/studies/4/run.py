"""Make the fourth study's runs that are missing, in the declared order, until the time is over.

python -m experiments.studies.4.run --minutes 60        # repeat to continue; --design D1 for one design only

A run's rows are added to the tables of its design in `results/`, then a line to `results/log.csv`; rows of a run without a line are removed
at the next start.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import torch

states = importlib.import_module("experiments.studies.4.states")
runs = importlib.import_module("experiments.studies.4.runs")

RESULTS = Path(__file__).with_name("results")
LEAVING_RATES = (1.5e-3, 2e-3)
WEIGHTING_RATES = (2.5e-4, 5e-4, 1e-3)
TUNING_SEEDS = range(1000, 1006)
ARMS = ("grpo", "published", "acting", "shuffled", "half", "averaged", "flat")
Tables = Mapping[str, Sequence[Mapping[str, float | str]]]
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A run of the study."""

    design: str
    task: str
    rate: float
    seed: int
    arm: str = "-"

    @property
    def name(self) -> str:
        """Its line in the log."""
        return f"{self.design} {self.task} {self.rate:g} {self.arm} s{self.seed}"

    def make(self, tell: Tell) -> Tables:
        """Make it; rows by table."""
        if self.design == "D3":
            made = states.States(self.task, self.rate, self.seed, states.PLANS[self.task])
            made.run(tell)
            return made.tables
        if self.design == "D1":
            return {"steps": runs.Leaving(self.task, self.rate, self.seed, self.arm).rows(tell)}
        tuning = self.design == "D2-tuning"
        run = runs.Weighting(self.task, self.rate, self.seed, self.arm, sharpness=not tuning)
        return {
            "steps": [{**row, "stage": "tuning" if tuning else "final"} for row in run.rows(tell)]
        }


def tokens_of(task: str, seeds: range) -> Iterator[Unit]:
    """D3."""
    for seed in seeds:
        for rate in states.PLANS[task].rates:
            yield Unit(design="D3", task=task, rate=rate, seed=seed)


def leaving(task: str, seeds: range) -> Iterator[Unit]:
    """D1."""
    for seed in seeds:
        for rate in LEAVING_RATES:
            for arm in runs.LEAVING:
                yield Unit(design="D1", task=task, rate=rate, seed=seed, arm=arm)


def tuning() -> Iterator[Unit]:
    """D2's choice of rates."""
    for seed in TUNING_SEEDS:
        for rate in WEIGHTING_RATES:
            for arm in ("grpo", "published", "acting", "shuffled"):
                yield Unit(design="D2-tuning", task="math", rate=rate, seed=seed, arm=arm)


def best_rate(arm: str) -> float:
    """The rate with the highest mean greedy accuracy of the tuning seeds; controls have that of plain GRPO."""
    rows = pd.read_parquet(RESULTS / "D2-tuning-steps.parquet")
    like = arm if arm in set(rows["arm"]) else "grpo"
    return float(rows[rows["arm"] == like].groupby("rate")["greedy"].mean().idxmax())


def weighting(seeds: range) -> Iterator[Unit]:
    """D2."""
    for seed in seeds:
        for arm in ARMS:
            yield Unit(design="D2", task="math", rate=best_rate(arm), seed=seed, arm=arm)


def order() -> Iterator[Unit]:
    """All runs in the declared order."""
    yield from tokens_of("math", range(20))
    yield from leaving("math", range(20))
    yield from tokens_of("knights_knaves", range(8))
    yield from tokens_of("math", range(20, 50))
    yield from leaving("math", range(20, 40))
    yield from tokens_of("knights_knaves", range(8, 16))
    yield from leaving("math", range(40, 60))
    yield from tokens_of("math", range(50, 90))
    yield from tokens_of("knights_knaves", range(16, 24))
    yield from tuning()
    yield from weighting(range(100))


def finished() -> set[str]:
    """Names of the runs in the log."""
    path = RESULTS / "log.csv"
    return set(pd.read_csv(path)["run"]) if path.exists() else set()


def keep(unit: Unit, tables: Tables) -> None:
    """Add a run's rows to its design's tables; rows of runs that are not in the log are dropped."""
    done = finished()
    for name, rows in tables.items():
        path = RESULTS / f"{unit.design}-{name}.parquet"
        data = pd.DataFrame(rows).assign(run=unit.name)
        data = data.astype({c: "float32" for c in data.select_dtypes("float64") if c != "rate"})
        if path.exists():
            old = pd.read_parquet(path)
            data = pd.concat([old[old["run"].isin(done)], data], ignore_index=True)
        part = path.with_suffix(".part")
        data.to_parquet(part, compression="zstd", index=False)
        part.replace(path)


def note(unit: Unit, began: str, seconds: float, commit: str) -> None:
    """Add a line to the log."""
    path = RESULTS / "log.csv"
    new = not path.exists()
    with path.open("a") as file:
        if new:
            file.write("run,design,began,ended,seconds,commit\n")
        file.write(f"{unit.name},{unit.design},{began},{now()},{seconds:.1f},{commit}\n")


def now() -> str:
    """The time in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def main() -> None:
    """Make runs until the time is over."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, required=True, help="start no run after so many minutes"
    )
    parser.add_argument("--design", default="", help="D1, D2, D2-tuning or D3; default: all")
    given = parser.parse_args()
    torch.set_num_threads(1)
    RESULTS.mkdir(exist_ok=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    end = time.monotonic() + 60 * given.minutes
    done = finished()
    for unit in order():
        if unit.name in done or given.design not in ("", unit.design):
            continue
        if time.monotonic() > end:
            return
        began, spent = now(), time.process_time()
        tables = unit.make(lambda text: None)
        keep(unit, tables)
        note(unit, began, time.process_time() - spent, commit)
        print(unit.name, f"{time.process_time() - spent:.0f} s", flush=True)


if __name__ == "__main__":
    main()

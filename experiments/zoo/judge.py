"""What sharpscope says of the runs of the zoo: the values of healthy runs, the table of causes, and the ablation of identities."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.zoo.registry import CASES, Case
from sharpscope.causes import Recorded, Result, check_recorded, name_causes
from sharpscope.causes.identity import REGISTRY
from sharpscope.packaged import PACKAGE
from sharpscope.traces import load_run

IDENTITIES = PACKAGE / "causes" / "identities.yaml"


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A run of the zoo with its results."""

    case: Case
    seed: int
    folder: Path
    recorded: Recorded
    results: dict[str, Result]

    def named(self, without: frozenset[str] = frozenset()) -> list[str]:
        """The causes that are named, without some identities."""
        kept = {name: result for name, result in self.results.items() if name not in without}
        return [cause.name for cause in name_causes(kept, self.recorded)]


def judged(out: Path, seeds: list[int], *, healthy: bool = False) -> Iterator[Judged]:
    """The recorded runs of some seeds, in the order of the registry."""
    for name, case in CASES.items():
        for seed in seeds:
            folder = out / f"{name}-{seed}"
            if (healthy and case.truth) or not (folder / "run" / "run.json").exists():
                continue
            recorded = Recorded.of(load_run(folder / "run"))
            results = check_recorded(recorded)
            yield Judged(case=case, seed=seed, folder=folder, recorded=recorded, results=results)


def calibrate(out: Path, seeds: list[int]) -> None:
    """Write the identities' values in the healthy runs of some seeds to identities.yaml."""
    values = defaultdict[str, list[float]](list)
    for run in judged(out, seeds, healthy=True):
        for name, result in run.results.items():
            values[name].append(result.value)
    text = IDENTITIES.read_text("utf-8")
    for name in REGISTRY:
        found = np.array(values[name] or [0.0])
        middle, largest = float(np.median(found)), float(found.max())
        entry = f"{{runs: {len(values[name])}, median: {middle:.3g}, largest: {largest:.3g}}}"
        text = re.sub(rf"(?ms)^({name}:\n.*?healthy: )\{{.*?\}}", rf"\g<1>{entry}", text, count=1)
    IDENTITIES.write_text(text, "utf-8")


def table(out: Path, seeds: list[int]) -> pd.DataFrame:
    """A row for each case: what was planted, and in how many seeds it is named first, among others, or another one is."""
    rows = defaultdict[str, list[list[str]]](list)
    for run in judged(out, seeds):
        rows[run.case.name].append(run.named())
    lines = []
    for name, named in rows.items():
        truth = CASES[name].truth
        first = [causes[0] if causes else None for causes in named]
        others = sorted({str(c) for c in first if c != truth})
        lines.append(
            {
                "case": name,
                "planted": CASES[name].planted,
                "runs": len(named),
                "first": sum(c == truth for c in first),
                "else": ", ".join(others),
            }
        )
    return pd.DataFrame(lines)


def ablation(out: Path, seeds: list[int]) -> pd.Series:
    """Identity -> the cases that are no longer named first without it."""
    lost = {name: set[str]() for name in REGISTRY}
    for run in judged(out, seeds):
        truth = run.case.truth
        if truth is None or run.named()[:1] != [truth]:
            continue
        for name in run.results:
            if run.named(frozenset({name}))[:1] != [truth]:
                lost[name].add(run.case.name)
    return pd.Series({name: ", ".join(sorted(cases)) for name, cases in lost.items()})

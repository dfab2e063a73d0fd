"""Which measure of sharpness tells trained policies apart, at radii where none is at its ceiling, and at which cost.

    python -m experiments.studies.reliability FOLDER --values FILE.csv    # repeat to continue

FOLDER holds runs `ARM-sSEED` of one study with checkpoints and one probe set, such as those of `experiments/studies/2/rerun.py`.
The last checkpoint of each is measured twice, on two halves of the training prompts with completions and gradients of their own.
The reliability of a measure is the correlation of the two numbers over policies: over all of them, and over the seeds of an arm.
Radii are multiples of the one that `find_radius` chooses for the first policy.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy.stats import spearmanr

from sharpscope.config import read_recorded
from sharpscope.policy import load_policy
from sharpscope.recording.probe_sets import Drawer, run_probe_set
from sharpscope.surface import (
    Objective,
    ProbeSet,
    find_radius,
    lm_surface,
    rollout_objective,
    sharpness,
)
from sharpscope.tasks import make_task
from sharpscope.training.checkpoint import checkpoints

FACTORS = (0.5, 1.0, 2.0)
SAMPLES = 8
TARGET = 0.9
PER_UNIT = ", per unit of 1 − loss"


def halves(values: pd.Series, other: pd.Series, arms: pd.Series) -> tuple[float, float]:
    """Correlation over policies of the logarithms of two measurements: over all, and within arms."""
    a, b = np.log(values), np.log(other)
    inside = (x - x.groupby(arms).transform("mean") for x in (a, b))
    return float(np.corrcoef(a, b)[0, 1]), float(np.corrcoef(*inside)[0, 1])


def lengthened(half: float) -> tuple[float, float]:
    """Reliability with both halves, and by how much this must be multiplied for TARGET (Spearman and Brown)."""
    if not half > 0:
        return math.nan, math.inf
    full = 2 * half / (1 + half)
    return full, TARGET * (1 - full) / (full * (1 - TARGET)) if full < 1 else 0.0


def measured(folder: Path, radius: float | None) -> Iterator[dict[str, object]]:
    """Rows (half, objective, measure, factor, rho, value, saturation, loss, seconds) of one run's last checkpoint."""
    config = read_recorded(folder)
    task, probe_set = make_task(config.task), run_probe_set(config, make_task(config.task))
    last = str(checkpoints(folder)[-1])
    policy = load_policy(config.policy.model_copy(update={"model": last}))
    train = probe_set.split("train")
    for half in (0, 1):
        part = ProbeSet(probe_set.task, probe_set.policy, probe_set.seed, train[half::2])
        began = time.process_time()
        drawn = part.draw("train", SAMPLES, Drawer(config, policy, task), seed=half)
        drawing = time.process_time() - began
        for objective in (
            rollout_objective("expected_failure", drawn),
            Objective("nll", part.solutions("train")),
        ):
            with lm_surface(policy.model, objective, check="off") as surface:
                radius = find_radius(surface).rho if radius is None else radius
                began = time.process_time()
                loss, gradient = surface.gradient()
                first = (
                    time.process_time()
                    - began
                    + (drawing if objective.name == "expected_failure" else 0.0)
                )
                for kind in ("sam", "asam"):
                    for factor in FACTORS:
                        began = time.process_time()
                        found = sharpness(surface, None, factor * radius, kind, at=(loss, gradient))
                        seconds = time.process_time() - began + first
                        row = {
                            "half": half,
                            "objective": objective.name,
                            "measure": kind,
                            "factor": factor,
                        }
                        numbers = {
                            "value": found.value,
                            "saturation": found.saturation,
                            "loss": loss,
                        }
                        yield row | numbers | {"rho": factor * radius, "seconds": seconds}


def table(data: pd.DataFrame) -> pd.DataFrame:
    """A row for each measure and radius."""
    unit = data[data["objective"] == "expected_failure"]
    unit = unit.assign(
        value=unit["value"] / (1 - unit["loss"]), objective=unit["objective"] + PER_UNIT
    )
    success = 1 - data[data["objective"] == "expected_failure"].groupby("run")["loss"].mean()
    rows = []
    for (objective, kind, _), group in pd.concat([data, unit]).groupby(
        ["objective", "measure", "factor"], sort=False
    ):
        wide = group.pivot(index="run", columns="half", values="value")
        wide = wide[(wide > 0).all(axis=1)]
        arms = wide.index.str.replace(r"-s\d+$", "", regex=True).to_series(index=wide.index)
        everywhere, inside = halves(wide[0], wide[1], arms)
        needed = lengthened(inside)[1]
        seconds = 2 * group["seconds"].median()
        rows.append(
            {
                "objective": objective,
                "measure": kind,
                "radius": f"{group['rho'].iloc[0]:.2g}",
                "saturation": f"{group['saturation'].median():.2f} (most {group['saturation'].max():.2f})",
                "policies": len(wide),
                "correlation of halves, all": f"{everywhere:.2f}",
                "within arms": f"{inside:.2f}",
                "reliability of both halves, all": f"{lengthened(everywhere)[0]:.2f}",
                "within arms ": f"{lengthened(inside)[0]:.2f}",
                "rank correlation with accuracy": f"{spearmanr(wide.mean(axis=1), success[wide.index]).statistic:+.2f}",
                "processor s": f"{seconds:.1f}",
                "s for 0.9 within arms": f"{seconds * needed:.0f}"
                if math.isfinite(needed)
                else "–",
            }
        )
    return pd.DataFrame(rows).replace("nan", "–").replace("nan (most nan)", "–")


def main() -> None:
    """Measure what is not in the file of values yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--values", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = pd.read_csv(given.values) if given.values.exists() else pd.DataFrame(columns=["run"])
    radius = None
    for folder in sorted(
        given.folder.iterdir(), key=lambda path: (path.name.split("-s")[-1].zfill(4), path.name)
    ):
        if (
            not re.fullmatch(r"\w+-s\d+", folder.name)
            or not checkpoints(folder)
            or folder.name in set(data["run"])
        ):
            continue
        if len(data):
            radius = float(data.loc[data["factor"] == 1.0, "rho"].iloc[0])
        rows = pd.DataFrame(measured(folder, radius)).assign(run=folder.name)
        data = pd.concat([data, rows]) if len(data) else rows
        data.to_csv(given.values, index=False)
    found = table(data)
    for cells in (found.columns, ["---"] * found.shape[1], *found.itertuples(index=False)):
        print("| " + " | ".join(map(str, cells)) + " |")


if __name__ == "__main__":
    main()

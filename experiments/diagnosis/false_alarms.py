"""How often each rule of `sharpscope diagnose` applies in healthy runs, kept beside the rules and stated in docs/symptoms.md.

    python -m experiments.diagnosis.false_alarms && python -m experiments.diagnosis.symptoms > docs/symptoms.md

Healthy are the recorded runs of data/reference, those of plain GRPO in the second study (its treatment is known to make the policy
nearly uniform), the healthy logs of tests/diagnose, and simulated ones. A run counts for a rule if it has the rule's quantities for
long enough to be judged.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from sharpscope.diagnose import Log, findings
from sharpscope.diagnose.logs import QUANTITIES, keys_of
from sharpscope.rules.judging import applies
from sharpscope.rules.table import RULES
from tests.diagnose.trainers import healthy

ROOT = Path(__file__).parents[2]


def frame_of(table: pd.DataFrame, framework: str) -> pd.DataFrame:
    """Canonical quantities of a run's rows, index: the step."""
    rows, found = table.set_index("step"), {}
    for quantity in QUANTITIES:
        _, keys = keys_of(quantity, framework, rows.columns)
        if keys:
            found[quantity.name] = rows[list(keys)].astype(float).sum(axis=1, min_count=1)
    return pd.DataFrame(found)


def recorded(folder: Path) -> Iterator[pd.DataFrame]:
    """The runs of a folder of Parquet tables."""
    steps, runs = (
        pd.read_parquet(folder / "steps.parquet"),
        pd.read_parquet(folder / "runs.parquet"),
    )
    groups = {
        row.run: yaml.safe_load(row.config)["rollout"]["prompts_per_step"]
        for row in runs.itertuples()
    }
    for run, rows in steps.groupby("run"):
        if "preset=" in str(run):
            continue
        frame = frame_of(rows.sort_values("step"), "sharpscope")
        yield frame.assign(
            dead_groups=rows.sort_values("step")["zero_std_groups"].to_numpy(float) / groups[run]
        )


def runs() -> dict[str, list[pd.DataFrame]]:
    """Healthy runs by kind."""
    logs = pd.read_csv(ROOT / "tests" / "diagnose" / "logs.csv").set_index("step")
    of_logs = {
        str(name): run.drop(columns="run").dropna(axis=1, how="all")
        for name, run in logs[logs["run"].str.startswith("healthy-")].groupby("run")
    }
    return {
        "reference": list(recorded(ROOT / "data" / "reference")),
        "study": list(recorded(ROOT / "data" / "studies" / "2" / "runs")),
        "embedded": [log for name, log in of_logs.items() if "smollm2" not in name],
        "smollm2": [log for name, log in of_logs.items() if "smollm2" in name],
        "simulated": [
            frame_of(healthy(steps, seed, rate=steps / 5), "TRL")
            for steps in (20, 60, 200, 1000)
            for seed in range(100)
        ],
    }


def main() -> None:
    """Count, print and keep."""
    counts: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for kind, frames in runs().items():
        print(f"{kind}: {len(frames)} runs")
        for name, rule in RULES.items():
            judged = [
                rule.measure({key: frame[key].to_numpy(float) for key in frame})
                for frame in frames
                if set(rule.quantities) & set(frame)
            ]
            judged = [measured for measured in judged if np.isfinite(measured).any()]
            if judged:
                alarms = sum(bool(applies(rule, measured).any()) for measured in judged)
                counts[name][kind] = [alarms, len(judged)]
                print(
                    f"  {name}: {alarms} of {len(judged)}" if alarms else "",
                    end="\n" if alarms else "",
                )
        for number, frame in enumerate(frames):
            bad = [
                f
                for f in findings.find(Log(Path(kind), None, frame), [])
                if f.severity == "critical"
            ]
            for finding in bad:
                print(
                    f"  critical, run {number}: {finding.rule.name} from step {finding.step}: {finding.text}"
                )
    target = Path(findings.__file__).with_name("false_alarms.json")
    body = ",\n".join(
        f" {json.dumps(name)}: {json.dumps(counts[name])}" for name in RULES if counts[name]
    )
    target.write_text("{\n" + body + "\n}\n")


if __name__ == "__main__":
    main()

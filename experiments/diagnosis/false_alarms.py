"""How often each rule of `sharpscope diagnose` applies in healthy runs, kept beside the rules and stated in docs/symptoms.md.

    python -m experiments.diagnosis.false_alarms && python -m experiments.diagnosis.symptoms > docs/symptoms.md

Healthy are the recorded runs of data/reference, those of plain GRPO in the second study (its treatment is known to make the policy
nearly uniform), the healthy logs of tests/diagnose, and simulated ones with 1, 2, 8 and 64 groups in a step. A run counts for a rule
if it has the rule's quantities for long enough to be judged.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from experiments.diagnosis.simulated import GROUPS, simulated
from sharpscope.diagnose import Log, find, findings
from sharpscope.diagnose.findings import judged
from sharpscope.diagnose.logs import own_values
from sharpscope.rules.table import RULES

ROOT = Path(__file__).parents[2]
SEEDS = 50
"""Simulated runs of each length, kind and number of groups."""


def frame_of(table: pd.DataFrame) -> pd.DataFrame:
    """Canonical quantities of a recorded run's rows, index: the step."""
    rows = table.set_index("step")
    values = [
        own_values(row) for row in rows.astype(object).where(rows.notna(), None).to_dict("records")
    ]
    return pd.DataFrame(values, index=rows.index)


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
        frame = frame_of(rows.sort_values("step"))
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
        **{f"simulated, {groups} groups a step": list(simulations(groups)) for groups in GROUPS},
    }


def simulations(groups: int) -> Iterator[pd.DataFrame]:
    """Simulated runs whose steps have `groups` groups."""
    for steps in (60, 200, 1000):
        for seed in range(SEEDS):
            for kind in ("learns", "hard"):
                yield simulated(groups, steps, seed, kind)


def main() -> None:
    """Count, print and keep."""
    counts: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for kind, frames in runs().items():
        print(f"{kind}: {len(frames)} runs", flush=True)
        for number, frame in enumerate(frames):
            log = Log(Path(kind), None, frame)
            found = {finding.rule.name: finding for finding in find(log, [])}
            history = {str(key): frame[key].to_numpy(float) for key in frame}
            for rule in judged(log):
                with np.errstate(all="ignore"):
                    can = bool(np.isfinite(rule.measure(history)).any())
                if can:
                    count = counts[rule.name].setdefault(kind, [0, 0])
                    count[0] += rule.name in found
                    count[1] += 1
            for finding in found.values():
                if finding.severity == "critical":
                    text = f"{finding.rule.name} from step {finding.step}: {finding.text}"
                    print(f"  critical, run {number}: {text}", flush=True)
        for name, count in counts.items():
            if count.get(kind, [0])[0]:
                print(f"  {name}: {count[kind][0]} of {count[kind][1]}", flush=True)
    target = Path(findings.__file__).with_name("false_alarms.json")
    body = ",\n".join(
        f" {json.dumps(name)}: {json.dumps(counts[name])}" for name in RULES if counts[name]
    )
    target.write_text("{\n" + body + "\n}\n")


if __name__ == "__main__":
    main()

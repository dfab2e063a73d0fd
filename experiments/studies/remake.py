"""Make the verdicts on the kept runs of the studies, and say what differs from those stored.

    python experiments/studies/remake.py          # compare with experiments/studies/*/results/claims.json
    python experiments/studies/remake.py --write  # store what the code gives now

Run it by hand before a release; the exit code is 1 if anything differs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sharpscope.analysis.claims import judge, study_of
from sharpscope.analysis.claims.registry import claims_json
from sharpscope.sweeps import read_sweep
from sharpscope.traces import load_runs

ROOT = Path(__file__).resolve().parents[2]
DATA = {"1": ROOT / "data" / "reference"} | {
    name: ROOT / "data" / "studies" / name / "runs" for name in ("2", "3")
}


def main(write: bool) -> int:
    """Compare or store; returns the exit code."""
    differing = 0
    for name, data in DATA.items():
        folder, runs = ROOT / "experiments" / "studies" / name, load_runs(data)
        spec = read_sweep(folder / "study.yaml").claims
        study = study_of(runs, spec.baseline, spec.treatment, terms=spec)
        verdicts, _ = judge(study)
        results = folder / "results"
        if write:
            (results / "claims.json").write_text(claims_json(verdicts), encoding="utf-8")
            continue
        stored = {
            entry["claim"]: entry
            for entry in json.loads((results / "claims.json").read_text("utf-8"))
        }
        for after in json.loads(claims_json(verdicts)):
            before = stored.get(after["claim"], {})
            for key in ("verdict", "reason", "p_value", "n"):
                if before.get(key) != after[key]:
                    differing += 1
                    print(
                        f"study {name}, {after['claim']}, {key}: {before.get(key)} → {after[key]}"
                    )
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv[1:]))

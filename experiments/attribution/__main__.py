"""The leaderboard of scores: `python -m experiments.attribution`, resumable, run from the repository's root.

Runs that were interrupted are made again up to the first step that is not measured, without measuring. `--table` only prints the table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from experiments.attribution.measure import RATES, SETTINGS, Sizes, runner
from experiments.attribution.table import report

HERE = Path(__file__).parent
SIZES = {
    "full": Sizes(),
    "quick": Sizes(tokens=8, prompts=8, completions=8, single=5, samples=4, probes=12),
    "small": Sizes(tokens=8, prompts=8, completions=8, single=0, samples=2, probes=12),
}
FIRST = 2  # the first step of AdamW is the gradient's sign


def main() -> None:
    """Measure what is missing, then write the table."""
    parser = argparse.ArgumentParser(prog="python -m experiments.attribution", description=__doc__)
    parser.add_argument("--task", choices=[*RATES], default="math")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="comma-separated")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="measured steps of a run")
    parser.add_argument("--every", type=int, default=1, help="measure every so many steps")
    parser.add_argument("--prompts", type=int, default=24, help="prompts a step")
    parser.add_argument("--sizes", choices=[*SIZES], default="full", help="how many sets")
    parser.add_argument("--table", action="store_true", help="only write the table")
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = HERE / f"{given.task}.jsonl"
    sizes = SIZES[given.sizes]
    for seed in range(given.seeds if not given.table else 0):
        for setting in given.settings.split(","):
            one(path, given.task, setting, seed, sizes, given)
    report(HERE, [task for task in RATES if (HERE / f"{task}.jsonl").exists()])


def one(
    path: Path, task: str, setting: str, seed: int, sizes: Sizes, given: argparse.Namespace
) -> None:
    """A run, of which steps that the file has are not measured again."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    last = FIRST + given.steps * given.every - 1
    updates = SETTINGS[setting][1]
    count: dict[int, int] = {}
    for row in rows:
        if row["setting"] == setting and row["seed"] == seed:
            count[row["step"]] = count.get(row["step"], 0) + 1
    missing = {s for s in range(FIRST, last + 1, given.every) if count.get(s, 0) < updates}
    if not missing:
        return
    made = runner(task, setting, seed, sizes, given.prompts, last)
    kept: list[dict] = []

    def write(row: dict) -> None:
        kept.append({"setting": setting, "seed": seed, **row})
        if len(kept) == updates or row["update"] == updates - 1:
            with path.open("a") as file:
                file.writelines(json.dumps(item, ensure_ascii=False) + "\n" for item in kept)
            kept.clear()
            print(f"{task}, {setting}, seed {seed}: step {row['step']} of {last}", flush=True)

    made.steps(max(missing), missing.__contains__, write)


if __name__ == "__main__":
    main()

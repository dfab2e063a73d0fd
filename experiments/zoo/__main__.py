"""`python -m experiments.zoo run`: train the cases, one after another; a case that is done is not trained again."""

from __future__ import annotations

import argparse
import os
import shutil
import time
import warnings
from pathlib import Path

for name, value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}.items():
    os.environ.setdefault(name, value)

from experiments.zoo import causes, controls, further, judge, more  # noqa: F401 - they register the cases
from experiments.zoo.bases import Place
from experiments.zoo.registry import CASES

DONE = "seconds.txt"


def train(name: str, folder: Path, seed: int, steps: int | None) -> None:
    """Train one case in `folder`, unless it is done."""
    if (folder / DONE).exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    started = time.process_time()
    try:
        CASES[name].run(Place(folder=folder, seed=seed, steps=steps))
    except RuntimeError as error:  # weights that are not finite end a loop
        (folder / "crash.txt").write_text(repr(error))
    shutil.rmtree(folder / "trainer", ignore_errors=True)
    seconds = time.process_time() - started
    (folder / DONE).write_text(f"{seconds:.1f}\n")
    print(f"{name} seed {seed}: {seconds:.0f} s", flush=True)


def main() -> None:
    """Parse the command and run it."""
    parser = argparse.ArgumentParser(prog="python -m experiments.zoo", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train cases")
    run.add_argument("names", nargs="*", help="cases; all without one")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--steps", type=int, default=None, help="shorten every case")
    run.add_argument("--healthy", action="store_true", help="the controls only")
    others = {
        "calibrate": "write the values of healthy runs to identities.yaml",
        "table": "which causes are named first",
        "ablation": "which cases each identity is needed for",
    }
    made = [commands.add_parser(name, help=text) for name, text in others.items()]
    for command in made:
        command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    for command in (run, *made):
        command.add_argument("--out", type=Path, default=Path("runs/zoo"))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.command == "calibrate":
        judge.calibrate(args.out, args.seeds)
        return
    if args.command != "run":
        found = {"table": judge.table, "ablation": judge.ablation}[args.command]
        print(found(args.out, args.seeds).to_string())
        return
    chosen = args.names or [n for n, c in CASES.items() if not (args.healthy and c.truth)]
    for name in chosen:
        train(name, args.out / f"{name}-{args.seed}", args.seed, args.steps)


if __name__ == "__main__":
    main()

"""Make the second study's runs again with version 0.2.0, evaluate their last checkpoints, and collect `corrected.parquet`.

    git worktree add ../sharpscope-0.2 aeb3745
    python experiments/studies/2/rerun.py ../sharpscope-0.2 runs/study2-again --seeds 0,1    # repeat to continue

Several processes may work on one folder. A run with its evaluations takes about two and a half minutes on a quiet core.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from sharpscope.traces import load_run

DATA = Path(__file__).parents[3] / "data" / "studies" / "2"
VOCABULARY = 288
WEIGHTS = "weight.preset=calibrated", "weight.U=4.0"
ARMS = {
    "grpo": ("grpo",),
    "sg": ("grpo-sg", *(f"method.{field}" for field in WEIGHTS)),
    "reverse": (
        "grpo-sg-reverse",
        *(f"method.{field.replace('weight', 'weight.of', 1)}" for field in WEIGHTS),
    ),
    "shuffled": (
        "grpo-sg-shuffled",
        *(f"method.{field.replace('weight', 'weight.of', 1)}" for field in WEIGHTS),
    ),
    "half": ("grpo", "optimizer.lr=5.0e-5"),
    "twice": ("grpo", "optimizer.lr=2.0e-4"),
}
SETTINGS = [
    "steps=160",
    "task.kind=math",
    "task.families=[arithmetic]",
    "task.levels=[2]",
    "task.train_size=200",
    "task.heldout_size=500",
    "task.unseen_levels=[1,3]",
    "task.unseen_size=100",
    "rollout.prompts_per_step=12",
    "rollout.group_size=8",
    "rollout.max_new_tokens=96",
    "update.mini_batches=2",
    "optimizer.lr=1.0e-4",
    "evaluation.every=0",
    "checkpoint.every=0",
    "checkpoint.keep_last=1",
    "recording.heldout_influence_every=0",
    "recording.tokens_every=20",
    "recording.rollouts_every=20",
    "recording.flush_every=20",
    "recording.token_gradients_every=0",
    "recording.rotation_every=0",
    "recording.spike_z=null",
    "probes.preset=light",
    "probes.every=160",
    "probes.functionals=[nll,expected_failure]",
    "probes.prompts=256",
    "probes.samples=8",
    "probes.heldout_prompts=8",
    "probes.kinds=[sam,asam]",
    "probes.rhos=[0.05,0.1]",
    "probes.critical_sharpness=false",
    "threads=1",
]
EVALUATIONS = {
    "greedy": "--split heldout --temperature 0 --prompts 2500 --set task.heldout_size=2500",
    "splits": "--split heldout --split unseen --split train --temperature 0 --prompts 500",
    "sampled": "--split heldout --temperature 0.6 --temperature 1 --prompts 500 --samples 8 -k 1 -k 8",
}


def make(old: Path, run: Path, arm: str, seed: int) -> None:
    """Train and evaluate one run in `run`, unless it is there or another process makes it."""
    run.parent.mkdir(parents=True, exist_ok=True)
    with run.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        method, *changes = ARMS[arm]
        settings = [*SETTINGS, f"policy.model={DATA / 'policy'}", *changes]
        environment = os.environ | {"PYTHONPATH": str(old), "OMP_NUM_THREADS": "1"}

        def call(*words: str) -> None:
            subprocess.run(
                [sys.executable, "-m", "sharpscope", *words], cwd=old, env=environment, check=True
            )

        if not (run / "checkpoints" / "step-000160").exists():
            shutil.rmtree(run, ignore_errors=True)  # an interrupted run is begun again
            sets = [word for setting in settings for word in ("--set", setting)]
            call(
                "run", "--method", method, "--seed", str(seed), "--out", str(run), "--quiet", *sets
            )
        for name, options in EVALUATIONS.items():
            if not (run / f"{name}.parquet").exists():
                call("eval", str(run), *options.split(), "--out", str(run / f"{name}.parquet"))


def evaluate_start(old: Path, folder: Path) -> None:
    """Evaluate the initial policy like the runs' last checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = [
        word
        for word in SETTINGS
        if word.startswith(("task.families", "task.levels", "task.train", "task.unseen"))
    ]
    fields += ["rollout.max_new_tokens=96", "task.heldout_size=500"]
    sets = " ".join(f"--set {field}" for field in fields)
    for name, options in EVALUATIONS.items():
        if not (file := folder / f"{name}.parquet").exists():
            words = f"{DATA / 'policy'} --task math {sets} {options} --out {file}".split()
            environment = os.environ | {"PYTHONPATH": str(old), "OMP_NUM_THREADS": "1"}
            subprocess.run(
                [sys.executable, "-m", "sharpscope", "eval", *words],
                cwd=old,
                env=environment,
                check=True,
            )


def evaluated(folder: Path) -> Iterator[tuple[str, float]]:
    """(quantity, value) of one checkpoint's evaluations."""
    yield (
        "heldout, T = 0 (2,500 questions)",
        pd.read_parquet(folder / "greedy.parquet")["accuracy"][0],
    )
    names = {"heldout": "heldout, T = 0 (500 questions)", "train": "training questions, T = 0"}
    for row in pd.read_parquet(folder / "splits.parquet").itertuples():
        yield names.get(row.split, f"unseen level {row.level}, T = 0"), row.accuracy
    for row in pd.read_parquet(folder / "sampled.parquet").itertuples():
        yield f"heldout, T = {row.temperature:g}", row.pass_at_1
        yield f"heldout pass@8, T = {row.temperature:g}", row.pass_at_8


def quantities(folder: Path) -> Iterator[tuple[int, str, float]]:
    """(step, quantity, value) of one run."""
    yield from ((160, *row) for row in evaluated(folder))
    run = load_run(folder)
    for row in run.probes.itertuples():
        if row.quantity == "loss":
            yield row.step, f"loss, {row.functional}", row.value
        elif row.quantity in ("sam", "asam"):
            yield row.step, f"{row.quantity}, {row.functional}, radius {row.rho:g}", row.value
    late, rollouts = run.steps[run.steps["step"] > 140], run.rollouts[run.rollouts["step"] >= 140]
    yield 160, "entropy, last 20 steps", late["entropy_mean"].mean()
    yield 160, "completions cut, last 20 steps", late["truncated_fraction"].mean()
    yield 160, "updates whose gradient was clipped", (run.updates["clip_factor"] < 1).mean()
    yield 160, "norm of the update", run.updates["update_norm"].mean()
    yield 160, "rollouts correct, steps 140 and 160", rollouts["correct"].mean()
    completed = rollouts[~rollouts["truncated"].astype(bool)]
    yield 160, "rollouts correct among completed, steps 140 and 160", completed["correct"].mean()
    entropy = run.tokens(steps=[140, 160], columns=["entropy"])["entropy"]
    name = "tokens with entropy above 0.9 ln V, steps 140 and 160"
    yield 160, name, float(np.mean(entropy > 0.9 * math.log(VOCABULARY)))


def main() -> None:
    """Make the runs, then add their numbers to the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path, help="checkout of version 0.2.0")
    parser.add_argument("out", type=Path, help="folder of the runs")
    parser.add_argument("--seeds", default=",".join(map(str, range(12))))
    given = parser.parse_args()
    table, columns = DATA / "corrected.parquet", ["arm", "seed", "step", "quantity", "value"]
    evaluate_start(given.old.absolute(), given.out.absolute() / "start")
    start = [("start", -1, 0, *row) for row in evaluated(given.out / "start")]
    known = pd.read_parquet(table) if table.exists() else pd.DataFrame(columns=columns)
    known = pd.concat([pd.DataFrame(start, columns=columns), known[known["arm"] != "start"]])
    for seed in map(int, given.seeds.split(",")):
        for arm in ARMS:
            folder = given.out.absolute() / f"{arm}-s{seed}"
            make(given.old.absolute(), folder, arm, seed)
            if all((folder / f"{name}.parquet").exists() for name in EVALUATIONS):
                rows = [(arm, seed, *row) for row in quantities(folder)]
                known = known[(known["arm"] != arm) | (known["seed"] != seed)]
                known = pd.concat([known, pd.DataFrame(rows, columns=columns)])
                known.to_parquet(table, index=False)


if __name__ == "__main__":
    main()

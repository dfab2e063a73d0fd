"""One step of each method from the start, the middle and the end of GRPO training, for every embedded policy.

Trains a run of plain GRPO for each task, forks it at three states, and writes the tables of docs/fork.md between its
markers. A repeated call continues, also with more batches; `--tables` only writes what is there.

    python -m experiments.benchmarks.forks --batches 30
    python -m experiments.benchmarks.forks --tables
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pandas as pd

import sharpscope
from sharpscope.analysis import fork_differences
from sharpscope.config import build_config
from sharpscope.traces import Run
from sharpscope.training import train

TITLES = {
    "math": "Mathematics",
    "tool_qa": "Tool-augmented question answering",
    "knights_knaves": "Knights and Knaves",
}
MASS = "weight.preset=calibrated+weight.percentiles=gradient"
INNER = "weight.of.preset=calibrated+weight.of.percentiles=gradient+weight.of.U=4"
ARMS = (
    "grpo",
    "published=grpo-sg+weight.preset=paper",
    f"mass 1.4=grpo-sg+{MASS}",
    f"mass 4=grpo-sg+{MASS}+weight.U=4",
    f"mass 4 reversed=grpo-sg-reverse+{INNER}",
    f"mass 4 shuffled=grpo-sg-shuffled+{INNER}",
    "ar=grpo+weight.kind=linear",
    "cov-grpo",
    "sapo",
    "grpo-sam",
    "low p=grpo+tokens.kind=probability",
    "high p=grpo+tokens.kind=probability+tokens.side=high",
    "A>0=grpo+tokens.kind=advantage",
    "A<0=grpo+tokens.kind=advantage+tokens.sign=negative",
)
ALIGNED, SHUFFLED = "mass 4", "mass 4 shuffled"
RUN = {
    "method": "grpo",
    "evaluation.every": 0,
    "recording.tokens_every": 0,
    "recording.rollouts_every": 0,
    "recording.heldout_influence_every": 0,
    "checkpoint.keep_last": 3,
}
BEGIN, END = "<!-- begin: experiments/benchmarks/forks.py -->\n", "<!-- end -->\n"
POINTS = 100.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", action="append", choices=list(TITLES), help="default: all")
    parser.add_argument("--steps", type=int, default=100, help="of the GRPO runs")
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs/forks"))
    parser.add_argument("--page", type=Path, default=Path("docs/fork.md"))
    parser.add_argument("--tables", action="store_true", help="only write the tables")
    options = parser.parse_args()
    tasks = options.task or list(TITLES)
    for task in [] if options.tables else tasks:
        folder = options.runs / task
        trained(folder, task, options.steps)
        states = [0, options.steps // 2, options.steps]
        sharpscope.fork(
            folder,
            checkpoint=states,
            methods=ARMS,
            batches=options.batches,
            threads=options.threads,
            on_progress=lambda text: print(f"  {text}", flush=True),
        )
    found = {task: sharpscope.load_run(options.runs / task) for task in tasks if (options.runs / task).is_dir()}
    text = "\n".join(section(task, run) for task, run in found.items() if run.rows("forks"))
    page = options.page.read_text("utf-8")
    before, rest = page.split(BEGIN)
    options.page.write_text(before + BEGIN + "\n" + text + "\n" + END + rest.split(END)[1], "utf-8")


def trained(folder: Path, task: str, steps: int) -> None:
    """Train a run of GRPO with checkpoints in the middle and at the end, or continue it."""
    values = {**RUN, "task": {"kind": task}, "steps": steps, "checkpoint.every": steps // 2}
    config = build_config(values={**values, "out": str(folder.parent), "name": folder.name})
    if not (folder / "run.json").exists():
        train(config)
    elif sharpscope.load_run(folder).status != "finished":
        train(config, resume=True)


def section(task: str, run: Run) -> str:
    """The tables of one task: a row per arm, a table per state."""
    forks = run.forks
    forks = forks[forks["fork"] == forks["fork"].iloc[-1]]  # the newest settings
    differences = fork_differences(forks)
    pair = forks[forks["arm"].isin([ALIGNED, SHUFFLED])]
    aligned = fork_differences(pair, reference=SHUFFLED) if pair["arm"].nunique() == 2 else None
    parameters = run.info.get("trainable_parameters", 0)
    lines = [f"### {TITLES[task]} ({parameters:,} parameters)", ""]
    for step in sorted(forks["step"].unique()):
        state, rows = f"step {step}", forks[forks["step"] == step]
        own = differences[differences["state"] == state]
        lines += [_caption(state, own, rows), ""]
        lines += ["| arm | rotation ∇L / Δ [°] | held-out failure | p | predicted | at matched KL | training failure |"]
        lines += ["|---|---|---|---|---|---|---|"]
        reference = _row(own, rows["reference"].iloc[0])
        for arm in (name for name in dict.fromkeys(own["arm"]) if name != rows["reference"].iloc[0]):
            turned = " / ".join(f"{_row(own, arm, f'{of}_rotation')['change']:.2g}" for of in ("gradient", "update"))
            one = _row(own, arm)
            predicted = POINTS * (one["predicted"] - reference["predicted"])
            lines.append(_line(arm, turned, own, f"{predicted:+.2f}"))
        if aligned is not None:
            lines.append(_line(f"{ALIGNED} − {SHUFFLED}", "", aligned[aligned["state"] == state], "", ALIGNED))
        lines.append("")
    return "\n".join(lines)


def _caption(state: str, own: pd.DataFrame, rows: pd.DataFrame) -> str:
    arm = rows["reference"].iloc[0]
    heldout, training = _row(own, arm), _row(own, arm, "train_failure")
    names = ("change", "change_low", "change_high")
    share = rows.loc[rows["outcome"] == "heldout_failure", "effective_share"].min()
    cost = rows.drop_duplicates(["batch", "arm", "comparison"]).groupby("batch")["seconds"].sum().mean()
    return (
        f"**{state.capitalize()}**, {int(heldout['batches'])} batches. `{arm}` changes the held-out failure by "
        f"{_interval(heldout, names)} (predicted {POINTS * heldout['predicted']:+.2f}) and the training failure by "
        f"{_interval(training, names)} points. Smallest effective share of the samples {share:.2f}; {cost:.0f} s per batch of "
        f"{own['arm'].nunique()} arms."
    )


def _line(name: str, turned: str, own: pd.DataFrame, predicted: str, arm: str = "") -> str:
    arm = arm or name
    step, matched, training = _row(own, arm), _row(own, arm, comparison="kl"), _row(own, arm, "train_failure")
    cells = [name, turned, _interval(step), _p_text(step["p"]), predicted, _interval(matched), _interval(training)]
    return "| " + " | ".join(cells) + " |"


def _row(own: pd.DataFrame, arm: str, outcome: str = "heldout_failure", comparison: str = "step") -> pd.Series:
    chosen = (own["arm"] == arm) & (own["outcome"] == outcome) & (own["comparison"] == comparison)
    return own[chosen].iloc[0]


def _interval(row: pd.Series, names: tuple[str, str, str] = ("difference", "low", "high")) -> str:
    mean, low, high = (POINTS * row[name] for name in names)
    return f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"


def _p_text(p: float) -> str:
    return f"{p:.2f}" if p >= 0.01 else f"{p:.0e}".replace("e-0", "e-")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()

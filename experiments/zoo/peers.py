"""What four other tools say of the same runs: `python -m experiments.zoo.peers BIN --out runs/zoo`, BIN the folder of their commands.

rldoctor 0.2.0 reads the user's log; rlprobe 0.1.0 and rlwatch 0.5.1 get its rows through their recorders, rlprobe the completions,
too; rlvr-audit 0.1.0 reads the rewards by group. What each prints is kept in the case's folder, and its first findings are listed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from sharpscope.traces import load_run

FIRST = re.compile(r"(?i)\b(warn\w*|crit\w*|fail\w*|alert|error)\b")
QUANTITIES = {
    "reward_mean": "reward",
    "reward_std": "reward_std",
    "kl_mean": "kl",
    "entropy_mean": "entropy",
    "zero_variance_group_frac": "frac_reward_zero_std",
    "loss": "loss",
    "lr": "learning_rate",
    "grad_norm": "grad_norm",
    "completion_len_mean": "completions/mean_length",
    "truncation_rate": "completions/clipped_ratio",
}
"""rlprobe's name of a quantity -> the log's."""
RLPROBE = """
import json, sys
from rlprobe.recorder.core import Recorder
rows, samples = json.load(open(sys.argv[1])), json.load(open(sys.argv[2]))
recorder = Recorder(sys.argv[3], algorithm="grpo", capture_env=False, install_handlers=False)
for row in rows:
    recorder.log_step(int(row.pop("step")), **row)
for step, group in samples:
    recorder.log_samples(step, group, select=False)
recorder.flush(); recorder.close()
"""
RLWATCH = """
import json, sys, rlwatch
monitor = rlwatch.attach(framework="manual", run_id="zoo")
for row in json.load(open(sys.argv[1])):
    monitor.log_step(int(row.pop("step")), **row)
monitor.stop()
"""
WATCHED = {"kl_divergence": "kl", "reward_mean": "reward"}
WATCHED |= {name: name for name in ("entropy", "reward_std", "loss", "grad_norm")}


def log_of(folder: Path) -> tuple[Path | None, list[dict]]:
    """The user's own log of a case and its rows."""
    state, lines = folder / "trainer_state.json", folder / "log.jsonl"
    if state.exists():
        rows = json.loads(state.read_text())["log_history"]
        return state, [row for row in rows if "loss" in row or "reward" in row]
    if lines.exists():
        return lines, [json.loads(line) for line in lines.read_text().splitlines()]
    return None, []


def renamed(rows: list[dict], names: dict[str, str]) -> list[dict]:
    """The rows with a tool's names of quantities."""
    found = []
    for row in rows:
        values = {ours: float(row[theirs]) for ours, theirs in names.items() if theirs in row}
        found.append({"step": int(row["step"])} | values)
    return found


def run(command: list[str], folder: Path) -> str:
    """What a command prints."""
    environment = os.environ | {"COLUMNS": "160", "NO_COLOR": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def ask(binaries: Path, case: Path) -> dict[str, str]:
    """Tool -> what it says of a case."""
    log, rows = log_of(case)
    if log is None or not rows:
        return {}
    work = case / "peers"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    python = str(binaries / "python")
    said = {"rldoctor": run([str(binaries / "rl-doctor"), "diagnose", str(log.absolute())], work)}
    (work / "rows.json").write_text(json.dumps(renamed(rows, QUANTITIES)))
    (work / "watch.json").write_text(json.dumps(renamed(rows, WATCHED)))
    rollouts = load_run(case / "run").rollouts if (case / "run" / "run.json").exists() else None
    samples, groups = [], []
    if rollouts is not None and rollouts["reward"].notna().any():
        for (step, group), part in rollouts.groupby(["step", "group"]):
            name = f"{step}-{group}"
            fields = part[["completion", "reward"]].itertuples(index=False)
            samples.append(
                (
                    int(step),
                    [
                        {"group_id": name, "completion_text": text, "reward_total": float(reward)}
                        for text, reward in fields
                    ],
                )
            )
            groups.append({"prompt_id": name, "rewards": part["reward"].astype(float).tolist()})
    (work / "samples.json").write_text(json.dumps(samples))
    told = run([python, "-c", RLPROBE, "rows.json", "samples.json", "rlprobe"], work)
    said["rlprobe"] = told + run([str(binaries / "rlprobe"), "doctor", "rlprobe"], work)
    said["rlwatch"] = run([python, "-c", RLWATCH, "watch.json"], work)
    said["rlwatch"] += run([str(binaries / "rlwatch"), "diagnose"], work)
    if groups:
        (work / "groups.jsonl").write_text("".join(json.dumps(g) + "\n" for g in groups))
        command = [str(binaries / "rlvr-audit"), "inspect", "--file", "groups.jsonl"]
        said["rlvr-audit"] = run([*command, "--format", "text"], work)
    for name, text in said.items():
        (work / f"{name}.txt").write_text(text)
    return said


def main() -> None:
    """Ask the tools of every case of one seed."""
    parser = argparse.ArgumentParser(prog="python -m experiments.zoo.peers", description=__doc__)
    parser.add_argument("binaries", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/zoo"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for case in sorted(args.out.glob(f"*-{args.seed}")):
        for name, text in ask(args.binaries.absolute(), case).items():
            lines = [line.strip() for line in text.splitlines() if FIRST.search(line)]
            sys.stdout.write(f"{case.name}\t{name}\t{' / '.join(lines[:3])[:240]}\n")


if __name__ == "__main__":
    main()

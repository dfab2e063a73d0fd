"""Variants of a log that must not change its diagnosis: other keys, other steps, another order."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

Row = dict[str, object]

FIELD = Path(__file__).parent / "field"
STEPS = ("step", "_step", "Step", "iteration", "current_steps", "global_step", "train/global_step")
OTHER_KEYS = {
    "loss": "policy_loss",
    "grad_norm": "gradient_norm",
    "learning_rate": "lr",
    "reward": "reward_avg",
    "reward_std": "reward_stdev",
    "kl": "kl_loss",
    "entropy": "entropy_avg",
    "entropy/mean": "policy/entropy",
    "completions/mean_length": "avg_response_len",
    "completions / mean_length": "Mean Response Length",
    "completions/clipped_ratio": "truncated_frac",
    "completions / clipped_ratio": "truncation rate",
    "frac_reward_zero_std": "zero_std_groups",
    "eval_loss": "val_loss",
    "eval_reward": "eval/mean_score",
    "rewards/chosen": "chosen_reward",
    "rewards/rejected": "rejected_reward",
    "rewards/margins": "reward_margin",
    "rewards/accuracies": "reward_accuracy",
    "mean_token_accuracy": "token_acc",
    "token_acc": "token_accuracy",
    "reward_mean": "score",
    "mean_reward": "avg_score",
    "mean_length": "response_length",
    "score": "total_reward",
    "actor/entropy": "policy_entropy",
    "actor/grad_norm": "policy_grad_norm",
    "actor/lr": "policy_lr",
    "actor/pg_loss": "pg_loss",
    "actor/pg_clipfrac": "clip_fraction",
    "critic/score/mean": "mean_score",
    "critic/entropy/mean": "mean_entropy",
    "response_length/mean": "mean_response_length",
    "tokens/response_length/mean": "response_tokens_mean",
    "response_length/clip_ratio": "truncated_ratio",
    "actor_entropy": "entropy",
    "actor_grad_norm": "gnorm",
    "critic_score_mean": "episode_reward",
    "response_length_mean": "completion_length",
    "response_length_clip_ratio": "overlong_ratio",
    "Training Loss": "train_loss",
    "train/loss": "train/policy_loss",
    "train/grad_norm": "train/gradient_norm",
    "train/learning_rate": "train/lr",
    "train/reward": "train/avg_reward",
    "train/completions/mean_length": "train/response_length",
    "train/completions/clipped_ratio": "train/truncated_ratio",
    "eval/reward": "validation/reward",
    "env/all/reward/total": "total_reward",
    "env/all/ac_tokens_per_turn": "completion_tokens",
    "teacher_kl": "kl_teacher",
    "optim/entropy": "token_entropy",
    "optim/lr": "lr",
}
"""Key of a trainer -> what somebody's own script calls it."""


def rows_of(file: Path) -> list[Row]:
    """The rows of a file of FIELD as they were written."""
    text = file.read_text("utf-8")
    if file.suffix == ".csv":
        return [dict(row) for row in csv.DictReader(io.StringIO(text))]
    if file.suffix == ".jsonl" or not text.startswith('{"global_step"'):
        return [json.loads(line) for line in text.splitlines()]
    history: list[Row] = json.loads(text)["log_history"]
    return history


def write_rows(rows: list[Row], file: Path) -> Path:
    """Write rows in the format of the file's ending."""
    if file.suffix == ".csv":
        keys = list(dict.fromkeys(key for row in rows for key in row))
        with file.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, keys)
            writer.writeheader()
            writer.writerows(rows)
    elif file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        file.write_text(json.dumps({"log_history": rows}))
    return file


def _other_keys(rows: list[Row]) -> list[Row]:
    return [{_renamed(key): _inner(value) for key, value in row.items()} for row in rows]


def _renamed(key: str) -> str:
    return OTHER_KEYS.get(key, key)


def _inner(value: object) -> object:
    if isinstance(value, dict):
        return {_renamed(key): inner for key, inner in value.items()}
    return value


def step_of(step: int) -> int:
    """The step that the variant of other steps has in place of one."""
    return 7 * step + 3


def _other_steps(rows: list[Row]) -> list[Row]:
    made = []
    for row in rows:
        row = dict(row)
        for key in STEPS:
            if key in row:
                row[key] = step_of(int(float(str(row[key]))))
        if "global_step/max_steps" in row:
            step, total = str(row["global_step/max_steps"]).split("/")
            row["global_step/max_steps"] = f"{step_of(int(step))}/{step_of(int(total))}"
        made.append(row)
    return made


def _other_order(rows: list[Row]) -> list[Row]:
    """Keys in another order, and rows too, as steps say where they belong."""
    random = np.random.default_rng(0)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    shuffled = [keys[at] for at in random.permutation(len(keys))]
    made = [{key: row[key] for key in shuffled if key in row} for row in rows]
    return [made[at] for at in random.permutation(len(made))]


VARIANTS: dict[str, Callable[[list[Row]], list[Row]]] = {
    "as it is": lambda rows: rows,
    "other keys": _other_keys,
    "other steps": _other_steps,
    "other order": _other_order,
}


def _text_keys(text: str) -> str:
    for key, other in OTHER_KEYS.items():
        text = text.replace(f"'{key}':", f"'{other}':").replace(f"- {key}:", f"- {other}:")
    return text


def _text_steps(text: str) -> str:
    text = re.sub(r"(\d+)/(\d+) \[", lambda m: f"{step_of(int(m[1]))}/{step_of(int(m[2]))} [", text)
    return re.sub(r"step:(\d+)", lambda m: f"step:{step_of(int(m[1]))}", text)


def _text_order(text: str) -> str:
    """The pairs of each line in reverse."""
    lines = []
    for line in text.split("\n"):
        if line.startswith("{"):
            line = "{" + ", ".join(reversed(line.strip("{}").split(", "))) + "}"
        elif " - " in line:
            first, *rest = line.split(" - ")
            line = " - ".join([first, *reversed(rest)])
        lines.append(line)
    return "\n".join(lines)


TEXT_VARIANTS: dict[str, Callable[[str], str]] = {
    "as it is": lambda text: text,
    "other keys": _text_keys,
    "other steps": _text_steps,
    "other order": _text_order,
}


def variant(name: str, of: str, folder: Path) -> Path:
    """The file of FIELD called `name` in its variant `of`, written to `folder`."""
    file = FIELD / name
    if file.suffix == ".log":
        made = folder / name
        made.write_text(TEXT_VARIANTS[of](file.read_text("utf-8")))
        return made
    return write_rows(VARIANTS[of](rows_of(file)), folder / name)

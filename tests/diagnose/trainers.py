"""Simulated training logs: healthy ones, and one run as each trainer writes it, with its keys, the keys beside them, and its file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from sharpscope.diagnose.trainers import BY_TRAINER

Rows = list[dict[str, float]]


@dataclass(frozen=True)
class Trainer:
    """How a trainer logs."""

    name: str  # as `diagnose` reports it
    # quantity -> keys among which its value is divided equally; "1-key": one minus it
    keys: dict[str, tuple[str, ...]]
    others: dict[str, float]  # keys beside them that no quantity uses, with a value
    write: Callable[[Rows, Path], Path]  # from the rows (with `step`) to the file or folder

    def rows(self, frame: pd.DataFrame) -> Rows:
        """The rows of a frame of canonical quantities, index: the step."""
        made = []
        for step, values in frame.iterrows():
            row = {"step": int(str(step)), **self.others}
            for name, keys in self.keys.items():
                for key in keys:
                    row[key.removeprefix("1-")] = (
                        1 - values[name] if key.startswith("1-") else values[name] / len(keys)
                    )
            made.append(row)
        return made


def healthy(steps: int = 200, seed: int = 0, rate: float = 40.0) -> pd.DataFrame:
    """A run that learns: reward rises and levels off, entropy falls to a fifth, the gradient norm is log-normal."""
    rng = np.random.default_rng(seed)
    t = np.arange(1, steps + 1)
    learned = 1 - np.exp(-t / rate)
    reward = 0.25 + 0.5 * learned + rng.normal(0, 0.05, steps)
    entropy = 0.2 + 0.8 * np.exp(-t / rate) + rng.normal(0, 0.02, steps)
    return pd.DataFrame(
        {
            "step": t,
            "reward": reward,
            "reward_std": 0.3 + rng.normal(0, 0.02, steps),
            "grad_norm": 0.4 * np.exp(rng.normal(0, 0.25, steps)),
            "entropy": np.maximum(entropy, 0.02),
            "kl": 0.05 * learned * np.exp(rng.normal(0, 0.2, steps)),
            "completions/mean_length": 120 * np.exp(rng.normal(0, 0.05, steps)),
            "completions/clipped_ratio": np.clip(rng.normal(0.02, 0.01, steps), 0, 1),
            "frac_reward_zero_std": np.clip(0.1 + 0.2 * learned + rng.normal(0, 0.05, steps), 0, 1),
            "clip_ratio/low_mean": np.abs(rng.normal(0.01, 0.005, steps)),
            "clip_ratio/high_mean": np.abs(rng.normal(0.01, 0.005, steps)),
            "sampling/sampling_logp_difference/mean": np.abs(rng.normal(0.04, 0.005, steps)),
            "learning_rate": np.full(steps, 1e-6),
        }
    )


def write(rows: Rows, folder: Path) -> Path:
    """Rows as the trainer_state.json of transformers' trainers."""
    file = folder / "trainer_state.json"
    file.write_text(
        json.dumps({"best_metric": None, "global_step": rows[-1]["step"], "log_history": rows})
    )
    return file


_NAMES = {
    "completions/mean_length": "length",
    "completions/clipped_ratio": "truncated",
    "frac_reward_zero_std": "dead_groups",
    "sampling/sampling_logp_difference/mean": "mismatch",
    "learning_rate": "lr",
}


def run(steps: int = 120, at: int = 61, seed: int = 0) -> pd.DataFrame:
    """Canonical quantities of a healthy run whose reward collapses at step `at`; index: the step."""
    rng, frame = (
        np.random.default_rng(seed),
        healthy(steps, seed).set_index("step").rename(columns=_NAMES),
    )
    clipped = frame.pop("clip_ratio/low_mean") + frame.pop("clip_ratio/high_mean")
    frame = frame.assign(
        clipped=clipped,
        mismatch_kl=0.001 + rng.uniform(0, 0.001, steps),
        loss=rng.normal(0, 0.01, steps),
    )
    frame.loc[at:, "reward"] = 0.05 + np.abs(rng.normal(0, 0.02, steps - at + 1))
    return frame


def _state(rows: Rows, folder: Path) -> Path:
    """trainer_state.json with an evaluation and the summary of the end, as transformers writes it."""
    history = [{"epoch": row["step"] / 100, **row} for row in rows]
    history.insert(
        20, {"epoch": 0.2, "eval_loss": 0.1, "eval_runtime": 3.2, "step": rows[19]["step"]}
    )
    history.append(
        {"epoch": 1.2, "step": rows[-1]["step"], "train_loss": 0.01, "train_runtime": 640.0}
    )
    return write(history, folder)


def _lines(rows: list[dict], file: Path) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _nested(rows: Rows, folder: Path) -> Path:
    """verl's file logger; what a validation adds stands in the same row."""
    made = [
        {"step": row["step"], "data": {k: v for k, v in row.items() if k != "step"}} for row in rows
    ]
    made[9]["data"]["val-core/gsm8k/acc/mean@1"] = 0.5  # type: ignore[index]
    return _lines(made, folder / "experiment.jsonl")


def _prime(rows: Rows, folder: Path) -> Path:
    """prime-rl's file monitor: the trainer and the orchestrator write a row of a step each."""
    made = []
    trainers = ("optim/", "entropy/", "mismatch_kl/", "is_masked", "loss/")
    for row in rows:
        ours = {k: v for k, v in row.items() if k.startswith(trainers)}
        theirs = {k: v for k, v in row.items() if k not in ours and k != "step"}
        made += [
            {"step": row["step"], "time": 1.7e9, **ours},
            {"step": row["step"], "time": 1.7e9, **theirs},
        ]
    return _lines(made, folder / "metrics.jsonl")


def _csv(rows: Rows, folder: Path) -> Path:
    pd.DataFrame(rows).to_csv(folder / "history.csv", index=False)
    return folder / "history.csv"


def _wandb(rows: Rows, folder: Path) -> Path:
    """A W&B export of charts: the run's name before each key, with the least and the largest beside it."""
    frame = pd.DataFrame(rows).rename(columns={"step": "Step"})
    named = {}
    for key in frame.columns.drop("Step"):
        named |= {f"lucky-sun-7 - {key}{tail}": frame[key] for tail in ("", "__MIN", "__MAX")}
    pd.DataFrame({"Step": frame["Step"], **named}).to_csv(folder / "wandb_export.csv", index=False)
    return folder / "wandb_export.csv"


def _tensorboard(rows: Rows, folder: Path) -> Path:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tb")) as writer:
        for row in rows:
            for key, value in row.items():
                if key != "step":
                    writer.add_scalar(key, value, int(row["step"]))
    return folder / "tb"


def _swift(rows: Rows, folder: Path) -> Path:
    """ms-swift's logging.jsonl: TRL's keys, the step as a text."""
    made = [{"global_step/max_steps": f"{row.pop('step')}/960", **row} for row in map(dict, rows)]
    return _lines(made, folder / "logging.jsonl")


def _lines_of(
    prefix: Callable[[int], str], text: Callable[[dict], str]
) -> Callable[[Rows, Path], Path]:
    """A terminal's lines: a prefix and what the trainer prints of a row, between messages."""

    def write(rows: Rows, folder: Path) -> Path:
        lines = []
        for row in rows:
            kept = {key: value for key, value in row.items() if key != "step"}
            lines += ["(pid=7) INFO generating", prefix(int(row["step"])) + text(kept)]
        (folder / "out.log").write_text("\n".join(lines) + "\n")
        return folder / "out.log"

    return write


def _boxes(row: dict) -> str:
    """AReaL's table of a step, two quantities a line."""
    cells = [f"{key} │ {float(value)!r}" for key, value in row.items()]
    pairs = [f"│ {' │ '.join(cells[at : at + 2])} │" for at in range(0, len(cells), 2)]
    return "\n".join(["┌───┬───┐", *pairs, "└───┴───┘"])


def _page(rows: Rows, folder: Path) -> Path:
    """The table that a notebook shows, with the titles of transformers and spaces around "/"."""
    titles = {"step": "Step", "loss": "Training Loss"}
    head = "".join(f"<th>{titles.get(key, key.replace('/', ' / '))}</th>" for key in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{float(v)!r}</td>" for v in row.values()) + "</tr>" for row in rows
    )
    cell = {"outputs": [{"data": {"text/html": [f"<table><tr>{head}</tr>{body}</table>"]}}]}
    (folder / "train.ipynb").write_text(json.dumps({"cells": [cell]}))
    return folder / "train.ipynb"


def _llamafactory(rows: Rows, folder: Path) -> Path:
    made = [{"current_steps": row.pop("step"), **row} for row in map(dict, rows)]
    return _lines(made, folder / "trainer_log.jsonl")


def keys(trainer: str) -> dict[str, tuple[str, ...]]:
    """Canonical quantity of `run` -> the keys under which a trainer writes it."""
    known = BY_TRAINER[trainer]
    found = {}
    for name in run(1, 1):
        if name in known.keys:
            written = known.keys[name][0]
            found[name] = tuple(key.replace("*", "main") for key in written)
        elif name in known.complements:
            found[name] = (f"1-{known.complements[name]}",)
    return found


_TRL = keys("TRL")
_TRL_OTHERS = {
    "num_tokens": 29865.0,
    "completions/max_length": 512.0,
    "rewards/accuracy_reward/mean": 0.3,
}
_TRL_OTHERS |= {"clip_ratio/high_max": 0.0, "step_time": 9.1}
_CHART = {name: tuple(f"train/{key}" for key in written) for name, written in _TRL.items()}
_OPENRLHF = {
    "reward": ("rollout/reward_mean",),
    "grad_norm": ("actor_grad_norm",),
    "entropy": ("entropy_loss",),
    "kl": ("kl",),
    "length": ("rollout/response_length_mean",),
    "truncated": ("rollout/truncated_rate",),
    "clipped": ("ppo_clip_ratio",),
    "mismatch": ("logprobs_diff",),
    "mismatch_kl": ("vllm_kl",),
    "lr": ("actor_lr",),
    "loss": ("policy_loss",),
}
_OWN = {"reward": ("reward",), "grad_norm": ("opt/grad_norm",), "entropy": ("entropy",)}
_WRITTEN: dict[str, tuple[dict[str, float], Callable[[Rows, Path], Path]]] = {
    "TRL": (_TRL_OTHERS, _state),
    "HF Trainer": ({"mean_token_accuracy": 0.7}, _state),
    "verl": (
        {
            "actor/ppo_kl": 0.9,
            "actor/pg_clipfrac_lower": 0.0,
            "training/rollout_probs_diff_mean": 0.01,
        },
        _nested,
    ),
    "prime-rl": ({"mismatch_kl/all/max": 3.0, "train/agg/effective/main/reward/mean": 0.9}, _prime),
    "Tinker": (
        {
            "optim/kl_sample_train_v1": -0.2,
            "env/all/by_group/frac_mixed": 0.7,
            "progress/batch": 3.0,
        },
        lambda rows, folder: _lines(rows, folder / "metrics.jsonl"),
    ),
    "OpenRLHF": ({"train/return": 0.3, "perf/gen_time": 12.0}, _tensorboard),
    "slime": ({"train/ppo_kl": 0.7, "rollout/zero_std/count_0": 3.0}, _tensorboard),
    "NeMo-RL": ({"train/token_mult_prob_error": 1.01, "train/probs_ratio_max": 9.0}, _tensorboard),
    "SkyRL": ({"reward/avg_pass_at_8": 0.5, "timing/step": 30.0}, _csv),
    "open-instruct": ({"val/ratio": 1.0, "time/total": 50.0}, _wandb),
    "ROLL": (
        {"actor/approxkl@sum": 0.2, "time/step_train": 3.0},
        _lines_of(
            lambda step: (
                f'[2026-01-01 12:00:00] [tracking.py (120)] metrics_tag: {{"step": {step}, "metrics": '
            ),
            lambda row: json.dumps(row) + "}",
        ),
    ),
    "LLaMA-Factory": ({"total_steps": 120.0, "percentage": 1.0}, _llamafactory),
    "AReaL": (
        {"ppo_actor/update/dual_clip_ratio/avg": 0.5, "ppo_actor/seq_len/avg": 300.0},
        _tensorboard,
    ),
}
"""Trainer -> keys of another meaning that it writes too, and its file."""

TRAINERS: dict[str, Trainer] = {
    **{name: Trainer(name, keys(name), *written) for name, written in _WRITTEN.items()},
    "TRL, W&B chart": Trainer("TRL", _CHART, {"train/num_tokens": 9.0}, _wandb),
    "TRL, ms-swift": Trainer(
        "TRL", _TRL, {"memory(GiB)": 52.2, "train_speed(iter/s)": 0.01}, _swift
    ),
    "OpenRLHF, terminal": Trainer(
        "OpenRLHF",
        {**_OPENRLHF, "reward_std": ("rollout/reward_std",)},
        {"return": 0.3, "ppo_kl": 0.1},
        _lines_of(lambda step: f"(PPOTrainer pid=1) Global step {step}: ", str),
    ),
    "AReaL, terminal": Trainer(
        "AReaL",
        keys("AReaL"),
        {"ppo_actor/seq_len/avg": 300.0},
        _lines_of(
            lambda step: (
                f"StatsLogger: Epoch {1 + step // 10}/12 Step {step % 10}/10 Train step {step}/120 done.\n"
            ),
            _boxes,
        ),
    ),
    "TRL, unsloth's notebook": Trainer(
        "TRL", {k: v for k, v in _TRL.items() if k not in ("grad_norm", "lr")}, {}, _page
    ),
    "own keys": Trainer("", _OWN, {"speed": 3.0}, _csv),
}

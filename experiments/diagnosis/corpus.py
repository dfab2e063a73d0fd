"""300 synthetic logs in 12 formats with known truths: how often the first sentence of `sharpscope diagnose` is right.

    python -m experiments.diagnosis.corpus [--seed 0] [--out FOLDER]

Each log is of one training (by rewards with 1 to 64 groups in a step, supervised, or on preferences), healthy or with one fault at a
random step. A first sentence is right if it names the fault within its tolerance, misleading if it names another thing as a warning or
worse, and unreadable if there is none. The makers know nothing of the rules.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.diagnosis.simulated import GROUPS, simulated
from sharpscope.diagnose import diagnose
from sharpscope.errors import UserError

Frame = pd.DataFrame
Random = np.random.Generator


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What is true of a log."""

    right: tuple[str, ...]  # beginnings of a right first sentence; empty for a healthy training
    at: int | None = None  # step at which the fault begins
    late: int = 20  # steps by which it may be dated later (and half of it earlier)


HEALTHY = Truth(right=())


# -- trainings by rewards


def _base(random: Random, kind: str = "learns", many: bool = False) -> Frame:
    groups = int(random.choice([8, 64] if many else GROUPS))
    steps = int(random.choice([80, 150, 300]))
    return simulated(groups, steps, int(random.integers(1 << 30)), kind).assign(
        loss=random.normal(0, 0.01, steps)
    )


def _middle(frame: Frame, random: Random) -> int:
    return int(random.integers(len(frame) // 3, 2 * len(frame) // 3))


def healthy(random: Random) -> tuple[Frame, Truth]:
    return _base(random), HEALTHY


def collapse(random: Random) -> tuple[Frame, Truth]:
    frame = _base(random, many=True)
    at = _middle(frame, random)
    frame.loc[at:, "reward"] *= random.uniform(0, 0.2)
    return frame, Truth(right=("Reward collapsed",), at=at)


def spike(random: Random) -> tuple[Frame, Truth]:
    """A gradient a hundred times as large, after which reward falls and entropy rises."""
    frame = _base(random, many=True)
    at = _middle(frame, random)
    frame.loc[at, "grad_norm"] = 100 * frame["grad_norm"].median()
    frame.loc[at + 1 :, "reward"] *= 0.1
    rise = np.linspace(0.2, 2.0, len(frame) - at)
    frame.loc[at + 1 :, "entropy"] += rise
    return frame, Truth(right=("The gradient spiked",), at=at)


def entropy_gone(random: Random) -> tuple[Frame, Truth]:
    frame = _base(random, many=True)
    at = _middle(frame, random)
    fall = np.exp(-np.arange(len(frame) - at + 1) / 5)
    frame.loc[at:, "entropy"] *= np.maximum(fall, 0.001)
    return frame, Truth(right=("Entropy collapsed",), at=at)


def cut(random: Random) -> tuple[Frame, Truth]:
    frame = _base(random, many=True)
    at = _middle(frame, random)
    frame.loc[at:, "truncated"] = random.uniform(0.5, 0.9)
    return frame, Truth(right=("Completions are cut",), at=at)


def shorter(random: Random) -> tuple[Frame, Truth]:
    frame = _base(random, many=True)
    at = _middle(frame, random)
    frame.loc[at:, "length"] *= np.maximum(np.exp(-np.arange(len(frame) - at + 1) / 8), 0.02)
    frame.loc[at + 10 :, "reward"] *= 0.1
    return frame, Truth(right=("Completions shrink",), at=at)


def dead(random: Random) -> tuple[Frame, Truth]:
    """A reward function that fails: 0 for everything from a step on."""
    frame = _base(random, many=True)
    at = _middle(frame, random)
    frame.loc[at:, ["reward", "reward_std", "grad_norm"]] = 0.0
    frame.loc[at:, "dead_groups"] = 1.0
    return frame, Truth(
        right=("Reward collapsed", "Reward does not vary", "The gradient is zero"), at=at
    )


def lost(random: Random) -> tuple[Frame, Truth]:
    frame = _base(random, many=True)
    frame["grad_norm"], frame["reward_std"] = 0.0, 0.3
    frame["reward"] = 0.3 + random.normal(0, 0.02, len(frame))
    frame["dead_groups"] = 0.1
    return frame, Truth(right=("The gradient is zero although rewards differ",), at=1)


def other_reference(random: Random) -> tuple[Frame, Truth]:
    frame = _base(random, many=True)
    frame["kl"] = random.uniform(0.4, 2) + random.normal(0, 0.02, len(frame))
    return frame, Truth(right=("KL to the reference is large at", "The reference is not"))


def flat(random: Random) -> tuple[Frame, Truth]:
    steps = int(random.choice([200, 400]))
    frame = simulated(64, steps, int(random.integers(1 << 30)), "stays")
    frame["reward"] = 0.4 + random.normal(0, 0.03, steps)
    frame["dead_groups"] = np.clip(0.2 + random.normal(0, 0.03, steps), 0, 1)
    right = ("Reward has not moved", "The learning rate moves nothing")
    return frame.drop(columns="reward_std"), Truth(right=right)


def not_a_number(random: Random) -> tuple[Frame, Truth]:
    frame = _base(random)
    at = _middle(frame, random)
    frame.loc[at:, ["grad_norm", "loss"]] = np.inf
    return frame, Truth(right=("A number stopped being finite",), at=at)


def no_rate(random: Random) -> tuple[Frame, Truth]:
    frame = _base(random, many=True)
    at = _middle(frame, random)
    frame.loc[at:, "lr"] = 0.0
    return frame, Truth(right=("The learning rate is zero",), at=at)


# -- supervised trainings and those on preferences


def _supervised(random: Random) -> Frame:
    steps = int(random.choice([60, 120]))
    fall = np.exp(-3 * np.arange(steps) / steps)
    every = int(random.choice([1, 10]))
    return pd.DataFrame(
        {
            "loss": (0.6 + fall) * np.exp(random.normal(0, 0.02, steps)),
            "grad_norm": np.exp(random.normal(0, 0.15, steps)),
            "lr": np.full(steps, 2e-5),
            "token_accuracy": 0.8 - 0.2 * fall,
        },
        index=pd.RangeIndex(every, every * steps + 1, every, name="step"),
    )


def _row(frame: Frame, random: Random) -> int:
    return int(frame.index[_middle(frame, random)])


def supervised(random: Random) -> tuple[Frame, Truth]:
    return _supervised(random), HEALTHY


def zero_loss(random: Random) -> tuple[Frame, Truth]:
    frame = _supervised(random)
    at = _row(frame, random)
    frame.loc[at:, "loss"], frame.loc[at:, "grad_norm"] = 0.0, 1.0
    return frame, Truth(right=("The loss is exactly zero",), at=at)


def loss_spike(random: Random) -> tuple[Frame, Truth]:
    frame = _supervised(random)
    at = _row(frame, random)
    frame.loc[at, "loss"] *= 6
    return frame, Truth(right=("The loss spiked",), at=at)


def diverges(random: Random) -> tuple[Frame, Truth]:
    frame = _supervised(random)
    at = _row(frame, random)
    rise = np.linspace(0.1, 4, len(frame.loc[at:]))
    frame.loc[at:, "loss"] += rise
    return frame, Truth(right=("The loss keeps growing",), at=at, late=40)


def overfits(random: Random) -> tuple[Frame, Truth]:
    frame = _supervised(random)
    rows = frame.index[4::5]
    course = np.abs(np.linspace(-0.5, 1, len(rows)))
    frame.loc[rows, "eval_loss"] = 1 + 0.4 * course
    return frame, Truth(right=("Held-out loss rises",))


def _pairs(random: Random) -> Frame:
    frame = _supervised(random).drop(columns="token_accuracy")
    share = np.linspace(0, 1, len(frame))
    margin = 1.5 * share + random.normal(0, 0.03, len(frame))
    return frame.assign(
        chosen=0.5 * share,
        rejected=0.5 * share - margin,
        margin=margin,
        loss=np.log1p(np.exp(-margin)),
        preference_accuracy=0.5 + 0.35 * share,
    )


def preferences(random: Random) -> tuple[Frame, Truth]:
    return _pairs(random), HEALTHY


def both_fall(random: Random) -> tuple[Frame, Truth]:
    frame = _pairs(random)
    fall = np.linspace(0, random.uniform(1, 4), len(frame))
    return frame.assign(chosen=-fall, rejected=-fall - frame["margin"]), Truth(
        right=("Chosen answers become less likely",)
    )


def runaway(random: Random) -> tuple[Frame, Truth]:
    frame = _pairs(random)
    frame["margin"] *= 60
    frame["rejected"] = frame["chosen"] - frame["margin"]
    frame["loss"] = np.log1p(np.exp(-frame["margin"]))
    return frame, Truth(right=("Margins grow with a loss of zero",))


def not_told_apart(random: Random) -> tuple[Frame, Truth]:
    frame = _pairs(random)
    noise = random.normal(0, 0.02, len(frame))
    frame["preference_accuracy"] = 0.5 + noise
    frame["loss"] = np.log(2) + noise / 10
    frame["margin"], frame["rejected"] = noise / 10, frame["chosen"] - noise / 10
    return frame, Truth(right=("Pairs are not told apart",))


MAKERS: tuple[Callable[[Random], tuple[Frame, Truth]], ...] = (
    *(healthy, healthy, healthy, collapse, spike, entropy_gone, cut, shorter, dead, lost),
    *(other_reference, flat, not_a_number, no_rate, supervised, zero_loss, loss_spike, diverges),
    *(overfits, preferences, both_fall, runaway, not_told_apart, healthy, collapse),
)


# -- formats

TRL = {
    **{
        "lr": "learning_rate",
        "length": "completions/mean_length",
        "dead_groups": "frac_reward_zero_std",
    },
    **{"truncated": "completions/clipped_ratio", "token_accuracy": "mean_token_accuracy"},
    **{"chosen": "rewards/chosen", "rejected": "rewards/rejected", "margin": "rewards/margins"},
    **{"preference_accuracy": "rewards/accuracies"},
}
OWN = {
    **{"lr": "lr", "length": "avg_response_len", "dead_groups": "zero_std_frac", "kl": "kl_div"},
    **{"truncated": "truncation_rate", "reward": "reward_avg", "entropy": "mean_entropy"},
    **{"reward_std": "reward_std", "grad_norm": "gradient_norm", "token_accuracy": "token_acc"},
    **{"chosen": "chosen_reward", "rejected": "rejected_reward", "margin": "reward_margin"},
    **{"preference_accuracy": "reward_accuracy", "eval_loss": "val/loss"},
}
VERL = {
    **{"reward": "critic/score/mean", "grad_norm": "actor/grad_norm", "entropy": "actor/entropy"},
    **{"kl": "actor/kl_loss", "length": "response_length/mean", "lr": "actor/lr"},
    **{"truncated": "response_length/clip_ratio", "loss": "actor/pg_loss"},
}


def rows(frame: Frame, names: dict[str, str], step: str = "step") -> list[dict[str, float]]:
    """The rows of a log; infinite values are NaN as trainers write them."""
    found = []
    for at, values in frame.iterrows():
        row = {step: int(str(at))}
        for name, value in values.items():
            if not np.isnan(value):
                row[names.get(str(name), str(name))] = (
                    float("nan") if np.isinf(value) else float(f"{value:.6g}")
                )
        found.append(row)
    return found


def _lines(of: list[dict[str, float]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in of)


def _table(of: list[dict[str, float]], delimiter: str) -> str:
    keys = list(dict.fromkeys(key for row in of for key in row))
    cells = [[str(row.get(key, "")) for key in keys] for row in of]
    return "\n".join(delimiter.join(line) for line in [keys, *cells]) + "\n"


def _printed(of: list[dict[str, float]]) -> str:
    last = int(of[-1]["step"])
    return "".join(
        f"{ {k: v for k, v in row.items() if k != 'step'} }\n"
        f"{100 * row['step'] // last}%|#| {row['step']}/{last} [00:01<00:30, 2.0s/it]\n"
        for row in of
    )


def _ray(of: list[dict[str, float]]) -> str:
    return "".join(
        f"(TaskRunner pid=1) step:{row.pop('step')} - "
        + " - ".join(f"{key}:np.float64({value})" for key, value in row.items())
        + "\n"
        for row in of
    )


def _notebook(of: list[dict[str, float]]) -> str:
    keys = list(dict.fromkeys(key for row in of for key in row))
    lines = ["<tr>" + "".join(f"<th>{key}</th>" for key in keys) + "</tr>"]
    for row in of:
        lines.append(
            "<tr>" + "".join(f"<td>{row.get(key, 'No Log')}</td>" for key in keys) + "</tr>"
        )
    output = {"data": {"text/html": ["<table>", *lines, "</table>"]}}
    return json.dumps({"cells": [{"outputs": [output]}]})


def _chart(of: list[dict[str, float]]) -> str:
    return _table(
        [{k if k == "Step" else f"sun-7 - {k}": v for k, v in row.items()} for row in of], ","
    )


FORMATS: dict[str, Callable[[Frame], str | bytes]] = {
    "trainer_state.json": lambda f: json.dumps({"log_history": rows(f, TRL)}),
    "log.jsonl": lambda f: _lines(rows(f, OWN)),
    "verl.jsonl": lambda f: _lines([{"step": r.pop("step"), "data": r} for r in rows(f, VERL)]),
    "history.csv": lambda f: _table(rows(f, TRL, "train/global_step"), ","),
    "semicolons.csv": lambda f: _table(rows(f, OWN, "iteration"), ";"),
    "export.tsv": lambda f: _table(rows(f, OWN), "\t"),
    "chart.csv": lambda f: _chart(rows(f, TRL, "Step")),
    "output.log": lambda f: _printed(rows(f, TRL)),
    "ray.log": lambda f: _ray(rows(f, VERL)),
    "run.ipynb": lambda f: _notebook(rows(f, TRL, "Step")),
    "swift.jsonl": lambda f: _lines(
        [{"global_step/max_steps": f"{r.pop('step')}/9999", **r} for r in rows(f, TRL)]  # type: ignore[dict-item]
    ),
    "log.jsonl.gz": lambda f: gzip.compress(_lines(rows(f, OWN)).encode()),
}
OF_REWARDS_ONLY = ("verl.jsonl", "ray.log")


def verdict(file: Path, truth: Truth) -> tuple[str, str]:
    """ "right", "mild", "misleading" or "unreadable", and the first sentence."""
    try:
        found = diagnose(file)
    except UserError as error:
        return "unreadable", str(error)
    sentence = found.finding
    alarmed = bool(found.causes) or any(f.severity != "info" for f in found.findings[:1])
    if not truth.right:
        return ("misleading" if alarmed else "right"), sentence
    if sentence.startswith(truth.right):
        step = found.findings[0].step if found.findings else None
        gap = 0 if truth.at is None or step is None else step - truth.at
        return ("right" if -truth.late / 2 <= gap <= truth.late else "mild"), sentence
    return ("misleading" if alarmed else "mild"), sentence


def corpus(seed: int, count: int, folder: Path) -> Counter[str]:
    """Make and judge the logs; print what is not right."""
    random, counts = np.random.default_rng(seed), Counter[str]()
    for number in range(count):
        maker = MAKERS[number % len(MAKERS)]
        frame, truth = maker(random)
        names = list(FORMATS)
        if "reward" not in frame or maker in (lost, other_reference):
            names = [name for name in names if name not in OF_REWARDS_ONLY]
        name = names[(number // len(MAKERS) + number) % len(names)]
        content = FORMATS[name](frame)
        file = folder / f"{number:03d}-{maker.__name__}-{name}"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        judged, sentence = verdict(file, truth)
        counts[judged] += 1
        if judged != "right":
            print(f"{judged}: {file.name}, fault at {truth.at}: {sentence}", flush=True)
    return counts


def main() -> None:
    """Judge a corpus and print the shares."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--out", type=Path, help="keep the logs in this folder")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        counts = corpus(given.seed, given.count, folder)
    for name in ("right", "mild", "misleading", "unreadable"):
        print(f"{name}: {counts[name]} of {given.count} ({counts[name] / given.count:.1%})")


if __name__ == "__main__":
    main()

"""Made runs: rows of every table filled at random, and synthetic runs with effects of known size, ground truth for analysis and claims.

Token statistics come from real softmax distributions, so that every identity between columns holds to float32 rounding;
rewards, norms, influences and probes follow simple laws whose constants are `Effects`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from sharpscope.traces import TABLES, TraceWriter, create_run_dir, create_run_info, update_run_info

SIGMOID = {
    "kind": "sigmoid",
    "preset": "calibrated",
    "input": "logit",
    "alpha": 2.0,
    "tau": 3.0,
    "mu": 0.25,
}
SIGMOID |= {"L": 1.0, "U": 1.4, "u0": 2.0}
RHOS = (0.01, 0.05, 0.2)


INFO: dict[str, Any] = {
    "method": "grpo",
    "task": "knights_knaves",
    "seed": 0,
    "config": {"seed": 0, "steps": 3},
}


def new_run(path, **info):
    folder = create_run_dir(path)
    create_run_info(folder, INFO | info)
    return folder


def rows(table: str, step: int, count: int = 4, seed: int = 0) -> dict[str, Any]:
    """`count` valid rows with every column filled, in a dict as TraceWriter.append takes it."""
    rng = np.random.default_rng([seed, step])
    columns: dict[str, Any] = {}
    for column in TABLES[table].columns:
        if column.type == "bool":
            columns[column.name] = rng.random(count) < 0.5
        elif column.name in TABLES[table].key and column.type.startswith("int"):
            columns[column.name] = np.arange(count)  # a key names one row
        elif column.type.startswith("int"):
            columns[column.name] = rng.integers(max(-1, column.low), 2, count)
        elif column.name == "inclusion_probability":
            columns[column.name] = np.ones(count, dtype=np.float32)
        elif column.type.startswith("float"):
            values = rng.normal(size=count)
            if math.isfinite(column.high - column.low):
                values = rng.random(count)
            elif math.isfinite(column.low):
                values = abs(values)
            elif math.isfinite(column.high):
                values = -abs(values)
            columns[column.name] = values.astype(column.type)
        elif column.type == "json":
            columns[column.name] = [{"format": 1.0, "answer": float(i)} for i in range(count)]
        elif column.type == "ids":
            columns[column.name] = [f"[{i}, 7]" for i in range(count)]
        else:
            columns[column.name] = [f"{column.name} {i}" for i in range(count)]
    return columns | {"step": step}


def token_rows(step=1, count=4, **changes):
    return rows("tokens", step, count) | changes


def two_parts(path):
    run = new_run(path)
    writer = TraceWriter(run)
    for step in (1, 2):
        writer.append("tokens", rows("tokens", step, 20))
        writer.flush()
    return run, sorted((run / "traces/tokens").iterdir())


def damage_part(part: Path, column: str, group: int = -1) -> None:
    """Flip one bit in the last page of a column of a row group, so that only readers of that column notice."""
    metadata = pq.read_metadata(part)
    place = metadata.row_group(group % metadata.num_row_groups).column(
        metadata.schema.names.index(column)
    )
    start = place.dictionary_page_offset if place.has_dictionary_page else place.data_page_offset
    content = bytearray(part.read_bytes())
    content[start + place.total_compressed_size - 1] ^= 1
    part.write_bytes(content)


# -- runs with effects of known size


@dataclass(frozen=True)
class Effects:
    """What is true of a method in the synthetic world; every default is "no effect"."""

    accuracy_gain: float = 0.2  # reached slowly over training, on the training prompts
    sharpness: float = 20.0  # largest eigenvalue at the end of training (10 at the start)
    # influence of tokens ~ -harm * (1 - pi), plus noise of size 1
    low_probability_harm: float = 0.0


@dataclass(frozen=True)
class Shape:
    """How much is recorded."""

    steps: int = 9
    prompts: int = 4
    group_size: int = 4
    length: int = 12
    vocabulary: int = 30
    probe_every: int = 4
    eval_every: int = 4
    levels: tuple[str, ...] = ("2", "3")
    eval_prompts: int = 200


@dataclass
class World:
    """State of one run while it is written."""

    rng: np.random.Generator
    shape: Shape
    effects: Effects
    method: str
    seed_gain: float

    def accuracy(self, step: int) -> float:
        share = 1 - np.exp(-3 * step / max(self.shape.steps, 1))
        return float(
            np.clip(0.25 + (self.effects.accuracy_gain + self.seed_gain) * share, 0.01, 0.99)
        )


def write_run(
    path: str | Path,
    *,
    method: str = "grpo",
    seed: int = 0,
    shape: Shape | None = None,
    effects: Effects | None = None,
    probes: bool = True,
    tokens: bool = True,
) -> Path:
    """One run's folder. `method` containing "sg" gets sigmoid weights, any other w = 1."""
    shape, effects = shape or Shape(), effects or Effects()
    rng = np.random.default_rng([seed, *method.encode()])
    world = World(rng, shape, effects, method, rng.normal(0, 0.02))
    weight = SIGMOID if "sg" in method else {"kind": "uniform"}
    folder = create_run_dir(path)
    task = "knights_knaves"
    whole = {
        "seed": seed,
        "steps": shape.steps,
        "task": {"kind": task},
        "policy": {"model": "embedded:knights_knaves"},
    }
    whole |= {
        "method": {"name": method, "weight": weight},
        "optimizer": {"lr": 1e-4},
        "rollout": {"temperature": 1.0},
    }
    info = {"method": method, "task": task, "seed": seed, "config": whole, "calibration": weight}
    info |= {"versions": {"sharpscope": "0.1.0"}, "commit": None, "device": "cpu", "threads": 1}
    create_run_info(folder, info | {"parameters": 1000, "vocabulary": shape.vocabulary})
    with TraceWriter(folder) as writer:
        _evaluate(writer, world, 0)
        if probes:
            _probe(writer, world, 0)
        for step in range(1, shape.steps + 1):
            _step(writer, world, step, tokens, probes and step % shape.probe_every == 0)
            if (shape.eval_every and step % shape.eval_every == 0) or step == shape.steps:
                _evaluate(writer, world, step)
            if probes and step % shape.probe_every == 0:
                _probe(writer, world, step)
        event = {
            "step": shape.steps,
            "rule": "weight_saturation",
            "severity": "warning",
            "value": 0.97,
        }
        writer.append(
            "events",
            event | {"threshold": 0.95, "action": "warn", "message": "weights sit on one bound"},
        )
    update_run_info(folder, status="finished", steps_done=shape.steps)
    return folder


def write_study(
    root: str | Path, methods: dict[str, Effects], seeds: int = 3, **options: Any
) -> Path:
    """runs/<method>-s<seed> for every method and seed."""
    for method, effects in methods.items():
        for seed in range(seeds):
            write_run(
                Path(root) / f"{method}-s{seed}",
                method=method,
                seed=seed,
                effects=effects,
                **options,
            )
    return Path(root)


def softmax_tokens(
    rng: np.random.Generator, count: int, vocabulary: int, sharpness: float = 3.0
) -> dict[str, np.ndarray]:
    """`count` sampled tokens with every exact statistic of their softmax, computed in float64, as float32."""
    z = rng.normal(0, sharpness, (count, vocabulary)) + 2.0
    logp = z - np.log(np.exp(z).sum(1, keepdims=True))
    p = np.exp(logp)
    y = (p.cumsum(1) < rng.random((count, 1)) * p.sum(1, keepdims=True)).sum(1)
    rows = np.arange(count)
    entropy = -(p * logp).sum(1)
    p_y, logp_y = p[rows, y], logp[rows, y]
    others = p.copy()
    others[rows, y] = 0
    rest = others.sum(1)  # 1 - pi without cancellation
    statistics = {
        "logp": logp_y,
        "logit": z[rows, y],
        "entropy": entropy,
        "collision": (p**2).sum(1),
        "polarity": p_y * (logp_y + entropy) - (p**2 * (logp + entropy[:, None])).sum(1),
        "logit_grad_norm": np.sqrt(rest**2 + (others**2).sum(1)),
    }
    return {name: value.astype(np.float32) for name, value in statistics.items()} | {
        "token_id": y.astype(np.int32)
    }


def sigmoid_weight(logit: np.ndarray) -> np.ndarray:
    s = SIGMOID
    return np.clip(
        s["alpha"] * (1 / (1 + np.exp(-(logit - s["u0"]) / s["tau"])) - s["mu"]), s["L"], s["U"]
    )


def _step(writer: TraceWriter, world: World, step: int, record_tokens: bool, probed: bool) -> None:
    shape, rng = world.shape, world.rng
    n, length = shape.prompts * shape.group_size, shape.length
    correct = rng.random(n) < world.accuracy(step)
    reward = np.where(correct, 3.0, rng.choice([-0.5, -1.0, -3.0], n, p=[0.8, 0.1, 0.1]))
    group = np.repeat(np.arange(shape.prompts), shape.group_size)
    grouped = reward.reshape(shape.prompts, -1)
    spread = grouped.std(1, ddof=1, keepdims=True)
    advantage = ((grouped - grouped.mean(1, keepdims=True)) / (spread + 1e-4)).ravel()
    rollout, position = np.repeat(np.arange(n), length), np.tile(np.arange(length), n)
    stats = softmax_tokens(rng, n * length, shape.vocabulary)
    weight = sigmoid_weight(stats["logit"]) if "sg" in world.method else np.ones(n * length)
    coefficient = -advantage[rollout] * weight / (n * length)
    update = (rollout >= n // 2).astype(np.int32)
    norm = np.exp(rng.normal(0, 0.2))
    rollouts = {"step": step, "rollout": np.arange(n), "group": group, "prompt": "who is a knight?"}
    rollouts |= {
        "completion": "<b>Zoey</b> $x$ [red]",
        "reward": reward,
        "correct": correct,
        "advantage": advantage,
    }
    rollouts |= {
        "reward_parts": [{"total": float(r)} for r in reward],
        "length": np.full(n, length),
    }
    writer.append("rollouts", rollouts | {"truncated": np.zeros(n, bool)})
    if record_tokens:
        rows = stats | {
            "step": step,
            "rollout": rollout,
            "position": position,
            "update": update,
            "weight": weight,
        }
        rows |= {
            "behavior_logp": stats["logp"],
            "advantage": advantage[rollout],
            "ratio": 1.0,
            "clipped": 0,
        }
        rows |= {"loss_coef": coefficient, "head_grad_norm": stats["logit_grad_norm"] * 2}
        writer.append("tokens", rows | (_probed_tokens(world, rows) if probed else {}))
    updates = {
        "step": step,
        "update": [0, 1],
        "skipped": [False, False],
        "loss": [-0.01, -0.01],
        "entropy": None,
    }
    updates |= {
        "grad_norm": [norm, norm],
        "clip_factor": [1.0, 1.0],
        "update_norm": [0.01, 0.01],
        "lr": [1e-4, 1e-4],
    }
    updates |= {
        "tokens": [n * length // 2, n * length - n * length // 2],
        "kl_old_k3": [0.0, 0.002],
    }
    updates |= {"ratio_min": [1.0, 0.7], "ratio_max": [1.0, 1.5]}
    writer.append(
        "updates", updates | {"clip_fraction_low": [0.0, 0.01], "clip_fraction_high": [0.0, 0.02]}
    )
    row = {
        "step": step,
        "updates": 2,
        "reward_mean": reward.mean(),
        "reward_std": reward.std(ddof=1),
        "kl": None,
    }
    row |= {
        "accuracy": correct.mean(),
        "loss": -0.01,
        "entropy_mean": 1.0 - 0.02 * step + rng.normal(0, 0.01),
    }
    row |= {
        "grad_norm": norm,
        "update_norm": 0.01,
        "clip_fraction_low": 0.01,
        "weight_mean": weight.mean(),
    }
    row |= {
        f"weight_{name}_gradient": None for name in ("mean", "saturation_low", "saturation_high")
    }
    row |= {
        "clip_fraction_high": 0.02 * rng.random(),
        "zero_std_groups": int((spread == 0).sum()),
        "redrawn_groups": 0,
    }
    row |= {
        "completion_length_mean": float(length),
        "truncated_fraction": 0.0,
        "tokens": n * length,
        "lr": 1e-4,
    }
    writer.append("steps", row | {"generation_s": 0.5, "training_s": 0.4, "recording_s": 0.1})


def _probed_tokens(world: World, rows: dict[str, Any]) -> dict[str, Any]:
    effects, rng = world.effects, world.rng
    rest = -np.expm1(rows["logp"].astype(np.float64))
    score = 5 * rest * np.exp(rng.normal(0, 0.3, rest.size))
    push = (rows["loss_coef"] * score) ** 2 + 1e-12
    totals = np.bincount(rows["update"], push)
    influence = -effects.low_probability_harm * rest + rng.normal(size=rest.size)
    return {
        "score_norm_local": score * 0.95,
        "score_norm": score,
        "score_norm_std_error": np.zeros_like(score),
        "attribution": push / totals[rows["update"]],
        "heldout_influence": influence,
    }


def _evaluate(writer: TraceWriter, world: World, step: int) -> None:
    shape, rng = world.shape, world.rng
    gap = 0.02 * step / max(shape.steps, 1)
    for split in ("heldout", "unseen"):
        for temperature in (0.0, 1.0):
            hits = []
            for level in shape.levels:
                chance = (
                    world.accuracy(step)
                    - gap
                    - 0.05 * (int(level) - 2)
                    - 0.05 * (split == "unseen")
                )
                hits.append(rng.binomial(shape.eval_prompts, np.clip(chance, 0.01, 0.99)))
                _eval_row(writer, step, split, level, shape.eval_prompts, hits[-1], temperature)
            _eval_row(
                writer, step, split, "all", shape.eval_prompts * len(hits), sum(hits), temperature
            )


def _eval_row(
    writer: TraceWriter, step: int, split: str, level: str, n: int, hits: int, temperature: float
) -> None:
    share = hits / n
    row = {
        "step": step,
        "task": "knights_knaves",
        "split": split,
        "level": level,
        "n": n,
        "k": 1,
        "accuracy": share,
    }
    row |= {
        "std_error": np.sqrt(share * (1 - share) / (n - 1)),
        "pass_at_k": share,
        "reward_mean": 4 * share - 1,
    }
    writer.append("eval", row | {"temperature": temperature})


def _probe(writer: TraceWriter, world: World, step: int) -> None:
    effects, rng = world.effects, world.rng
    top = (10 + (effects.sharpness - 10) * step / max(world.shape.steps, 1)) * np.exp(
        rng.normal(0, 0.05)
    )
    base = {
        "step": step,
        "probe_set": "heldout",
        "functional": "nll",
        "parameters": "all",
        "seed": 0,
        "seconds": 0.1,
    }

    def row(probe: str, quantity: str, value: float, **rest: Any) -> None:
        blank = dict.fromkeys(("std_error", "samples", "rho", "converged", "residual"))
        writer.append(
            "probes", base | blank | {"probe": probe, "quantity": quantity, "value": value} | rest
        )

    row("curvature", "largest", top, converged=True, residual=1e-3)
    row("curvature", "smallest", -top / 5, converged=True, residual=1e-3)
    row("curvature", "trace", 4 * top, std_error=0.1 * top, samples=16)
    row("curvature", "gradient_norm", 1.5)
    for rho in RHOS:
        row("perturbation", "sam_first_order", rho * 1.5, rho=rho)
        row("perturbation", "sam", rho * 1.5 + 0.5 * rho**2 * top, rho=rho, samples=1)

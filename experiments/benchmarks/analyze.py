"""`bench analyze`: a synthetic run of millions of token rows, written and then analyzed, with time and peak memory."""

from __future__ import annotations

import json
import math
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharpscope.traces import TraceWriter, create_run_dir, create_run_info, update_run_info

LENGTH = 100
GROUP = 8
REQUIRED_S, REQUIRED_BYTES, REQUIRED_BYTES_PER_ROW = 60.0, 2e9, 64.0
METHOD = "grpo-sg"
EXACT = 32
"""Tokens a recorded step that have an exact score norm: 16 of the largest, 16 at random."""
WEIGHT = {"kind": "sigmoid", "input": "logit", "alpha": 2.0, "tau": 9.0, "mu": 0.25, "L": 1.0, "U": 1.4, "u0": 0.0}


@dataclass(frozen=True)
class AnalyzeBench:
    """What was measured.

    Attributes:
        rows: token rows of the run.
        write_s: seconds to make and write the run.
        analyze_s: seconds of figures, tables and report; `claims_s` of the claims and their figures.
        peak_bytes: peak resident memory of the analyzing process, its libraries included.
        bytes_per_row: size of the tokens table on disk, for each row.
        met: whether all three requirements hold.
    """

    rows: int
    write_s: float
    analyze_s: float
    claims_s: float
    peak_bytes: int
    bytes_per_row: float
    met: bool

    def to_json(self) -> str:
        """The numbers as a JSON object."""
        return json.dumps(asdict(self), indent=2) + "\n"


def bench_analyze(
    rows: int = 10_000_000,
    *,
    steps: int = 200,
    folder: str | Path | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> AnalyzeBench:
    """Write a run of about `rows` token rows and analyze it in a process of its own.

    Args:
        rows: token rows, rounded up to whole groups of completions.
        steps: the rows are spread over so many; probe columns are filled as the default recording does.
        folder: where to work and what to keep; None: a temporary folder, removed afterwards.
        on_progress: hears what is being done.
    """
    tell = on_progress or (lambda text: None)
    with tempfile.TemporaryDirectory() as spare:
        place = Path(folder) if folder is not None else Path(spare)
        tell(f"writing {rows:,} token rows")
        start = time.perf_counter()
        run = write_big_run(place / "runs" / "big", rows, steps)
        written = time.perf_counter() - start
        parts = list((run / "traces" / "tokens").glob("*.parquet"))
        tell("analyzing")
        found = _in_own_process(place / "runs", place / "report")
        size = sum(part.stat().st_size for part in parts) / found["rows"]
    met = (
        found["analyze_s"] + found["claims_s"] <= REQUIRED_S
        and found["peak_bytes"] <= REQUIRED_BYTES
        and size <= REQUIRED_BYTES_PER_ROW
    )
    return AnalyzeBench(found["rows"], written, found["analyze_s"], found["claims_s"], found["peak_bytes"], size, met)


def write_big_run(folder: Path, rows: int, steps: int) -> Path:
    """One finished run with all always-on token columns; score norms and attribution in every 10th step, influence and
    sharp alignment in every 50th.
    """
    groups = max(1, math.ceil(rows / (steps * LENGTH * GROUP)))
    config = {
        "steps": steps,
        "task": {"kind": "knights_knaves", "train_size": 900, "people": 3},
        "policy": {"model": "embedded:knights_knaves"},
        "method": {"name": METHOD, "weight": WEIGHT},
        "optimizer": {"lr": 1e-4, "beta1": 0.9, "weight_decay": 0.0},
        "rollout": {"temperature": 1.0, "prompts_per_step": groups, "group_size": GROUP},
        "recording": {"exact_tokens": EXACT // 2},
    }
    create_run_dir(folder)
    info = {"method": METHOD, "task": "knights_knaves", "seed": 0, "config": config, "calibration": WEIGHT}
    create_run_info(folder, info | {"parameters": 900_000, "vocabulary": 1_000})
    rng = np.random.default_rng(0)
    with TraceWriter(folder) as writer:
        for step in range(1, steps + 1):
            _write_step(writer, rng, step, steps, groups)
            writer.flush()
    update_run_info(folder, status="finished", steps_done=steps)
    return folder


def _write_step(writer: TraceWriter, rng: np.random.Generator, step: int, steps: int, groups: int) -> None:
    completions = groups * GROUP
    correct = rng.random(completions) < 0.3 + 0.4 * step / steps
    reward = np.where(correct, 3.0, -0.5)
    grouped = reward.reshape(groups, GROUP)
    spread = grouped.std(axis=1, ddof=1, keepdims=True)
    advantage = ((grouped - grouped.mean(axis=1, keepdims=True)) / (spread + 1e-4)).ravel()
    tokens = _tokens(rng, step, advantage)
    writer.append("tokens", tokens)
    writer.append(
        "rollouts",
        {
            "step": step,
            "rollout": np.arange(completions),
            "group": np.repeat(np.arange(groups), GROUP),
            "prompt": "A says that B is a knave.",
            "completion": "<think> </think><answer> A is a knight </answer>",
            "reward": reward,
            "reward_parts": [{"total": float(r)} for r in reward],
            "correct": correct,
            "advantage": advantage,
            "length": np.full(completions, LENGTH),
            "truncated": np.zeros(completions, dtype=bool),
        },
    )
    weight = tokens["weight"].astype(np.float64)
    writer.append(
        "steps",
        {
            "step": step,
            "updates": 1,
            "reward_mean": reward.mean(),
            "reward_std": reward.std(ddof=1),
            "accuracy": correct.mean(),
            "loss": 0.0,
            "kl": None,
            "entropy_mean": float(tokens["entropy"].mean()),
            "grad_norm": float(np.exp(rng.normal(0, 0.3))),
            "update_norm": 0.01,
            "clip_fraction_low": 0.0,
            "clip_fraction_high": 0.0,
            "weight_mean": weight.mean(),
            "weight_std": weight.std(),
            "weight_min": weight.min(),
            "weight_max": weight.max(),
            "weight_saturation_low": float((weight <= 1.0).mean()),
            "weight_saturation_high": float((weight >= 1.4).mean()),
            "weight_ess": weight.sum() ** 2 / (weight.size * (weight**2).sum()),
            **{f"weight_{name}_gradient": 1.0 for name in ("mean", "std", "saturation_low", "saturation_high", "ess")},
            "zero_std_groups": int((spread == 0).sum()),
            "completion_length_mean": float(LENGTH),
            "truncated_fraction": 0.0,
            "tokens": len(weight),
            "generated_tokens": len(weight),
            "redrawn_groups": 0,
            "lr": 1e-4,
            "generation_s": 1.0,
            "training_s": 1.0,
            "recording_s": 0.1,
        },
    )
    if step % 25 == 0:
        for split in ("heldout", "unseen"):
            share = 0.25 + 0.4 * step / steps
            writer.append(
                "eval",
                {
                    "step": step,
                    "task": "knights_knaves",
                    "split": split,
                    "level": "3",
                    "n": 500,
                    "k": 1,
                    "accuracy": share,
                    "std_error": 0.02,
                    "pass_at_k": share,
                    "reward_mean": 0.0,
                    "heldout_loss": None,
                    "temperature": 1.0,
                },
            )


def _tokens(rng: np.random.Generator, step: int, advantage: NDArray[np.float64]) -> dict[str, Any]:
    """One step's rows: (completions × LENGTH,) with full-precision noise, so that nothing compresses by luck."""
    count = len(advantage) * LENGTH
    rest = np.clip(rng.beta(0.15, 1.0, count), 1e-6, 1 - 1e-6)
    logp = np.log1p(-rest)
    other = rest * np.sqrt(rng.uniform(0.02, 0.98, count))  # √Σ_{j≠y} p_j², between rest/√(V−1) and rest
    logit = 12 + 3 * rng.normal(size=count)
    weight = np.clip(2 * (1 / (1 + np.exp(-logit / 9)) - 0.25), 1.0, 1.4)
    each = np.repeat(advantage, LENGTH)
    norm = np.hypot(rest, other)
    entropy = rng.exponential(0.3, count)
    columns: dict[str, Any] = {
        "step": step,
        "rollout": np.repeat(np.arange(len(advantage)), LENGTH),
        "position": np.tile(np.arange(LENGTH), len(advantage)),
        "update": 0,
        "token_id": rng.integers(0, 1_000, count),
        "logp": logp,
        "behavior_logp": logp + 1e-6 * rng.normal(size=count),
        "logit": logit,
        "entropy": entropy,
        "collision": (1 - rest) ** 2 + other**2,
        "polarity": rng.normal(size=count),
        "advantage": each,
        "ratio": 1.0,
        "weight": weight,
        "clipped": 0,
        "loss_coef": -each * weight / count,
        "logit_grad_norm": norm,
        "head_grad_norm": norm * rng.lognormal(1, 0.2, count),
    }
    if step % 10 == 0:
        local = norm * rng.lognormal(1, 0.3, count)
        exact = np.ma.masked_all(count)
        chosen = np.concatenate([np.argsort(-local)[: EXACT // 2], rng.choice(count, EXACT // 2, replace=False)])
        exact[chosen] = local[chosen] * 1.05
        columns |= {"score_norm_local": local, "score_norm": exact}
        columns |= {"score_norm_std_error": np.ma.masked_array(np.zeros(count), mask=np.ma.getmaskarray(exact))}
        names = np.full(count, None, dtype=object)
        names[chosen] = "exact"
        columns["score_norm_method"] = names.tolist()
        columns |= {name: rng.normal(size=count) / count for name in ("attribution", "update_attribution")}
    if step % 50 == 0:
        columns |= {"heldout_influence": rng.normal(size=count), "sharp_alignment": rng.random(count)}
    return {k: v.astype(np.float32) if _is_float(v) else v for k, v in columns.items()}


def _is_float(values: Any) -> bool:
    return isinstance(values, np.ndarray) and values.dtype.kind == "f"


def _in_own_process(runs: Path, out: Path) -> dict[str, Any]:
    """Analyze in a fresh process, whose peak memory is that of the analysis."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_analyze, args=(runs, out, sender))
    process.start()
    sender.close()
    try:
        found: dict[str, Any] = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the analyzing process ended with code {process.exitcode}") from None
    process.join()
    return found


def _analyze(runs: Path, out: Path, sender: Any) -> None:
    from sharpscope.analysis import analyze
    from sharpscope.analysis.claims import test_claims, write_claims
    from sharpscope.traces import load_runs

    start = time.perf_counter()
    analyze(runs, out)
    middle = time.perf_counter()
    loaded = load_runs(runs)
    # the one run is the baseline, so that every claim reads its tokens
    verdicts = test_claims(loaded, baseline=METHOD, treatment="grpo")
    write_claims(verdicts, out)
    end = time.perf_counter()
    scale = 1 if sys.platform == "darwin" else 1024
    sender.send(
        {
            "rows": sum(run.rows("tokens") for run in loaded),
            "analyze_s": middle - start,
            "claims_s": end - middle,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale,
        }
    )
    sender.close()

"""Large traces: processor time and peak memory of `show` and `analyze` of made-up runs of millions of token rows."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from experiments.benchmarks.common import ROOT, Row
from sharpscope.traces import (
    TABLES,
    TraceWriter,
    create_run_dir,
    create_run_info,
    load_run,
    update_run_info,
)
from sharpscope.traces.schema import arrow_schema

EXAMPLE = ROOT / "data" / "example" / "sums"
STEP_ROWS = 200_000
"""Token rows of a step, as `recording.token_rows` limits them."""
LENGTH, GROUP = 500, 8
"""Tokens of a completion, and completions of a prompt."""
BLOCK = 4
"""Completions with different numbers; the others of a step repeat them, so that a large run takes little space on the disk."""
MEASURED_EVERY = 10
"""Every so many steps have the measured columns too: norms, shares and effects."""
MEASURED = ("score_norm_local", "attribution", "effect_kl", "effect_entropy")


def _tokens(seed: int, completions: int, *, measured: bool) -> pa.Table:
    """The token rows of a step, but for its number."""
    draw = np.random.default_rng(seed)
    rows = BLOCK * LENGTH
    logp = -draw.exponential(0.4, rows)
    advantage = np.repeat(draw.choice([-1.0, 0.0, 1.0], BLOCK), LENGTH)
    polarity = draw.normal(0, 0.1, rows)
    columns = {
        "update": np.zeros(rows, int),
        "token_id": draw.integers(300, 900, rows),
        "logp": logp,
        "behavior_logp": logp + draw.normal(0, 1e-3, rows),
        "logit": draw.normal(15, 3, rows),
        "entropy": draw.exponential(0.4, rows),
        "collision": np.clip(np.exp(logp) + draw.normal(0, 0.1, rows), 0.01, 1),
        "polarity": polarity,
        "advantage": advantage,
        "ratio": np.ones(rows),
        "weight": np.ones(rows),
        "clipped": np.zeros(rows, int),
        "loss_coef": -advantage / (completions * LENGTH),
        "kl_coef": np.zeros(rows),
        "entropy_coef": np.zeros(rows),
        "logit_grad_norm": 1.1 * -np.expm1(logp),
        "head_grad_norm": 30 * -np.expm1(logp),
    }
    if measured:
        shares = np.abs(draw.normal(0, 1, rows)) * (advantage != 0)
        drawn = {name: draw.normal(0, 1e-4, rows) for name in MEASURED}
        columns |= {n: np.abs(value) if "norm" in n else value for n, value in drawn.items()}
        columns["attribution"] = shares / shares.sum() * BLOCK / completions
        columns["inclusion_probability"] = np.ones(rows)
    repeats = -(-completions // BLOCK)
    tiled = {
        name: np.tile(value, repeats)[: completions * LENGTH] for name, value in columns.items()
    }
    tiled["rollout"] = np.repeat(np.arange(completions), LENGTH)
    tiled["position"] = np.tile(np.arange(LENGTH), completions)
    schema = arrow_schema("tokens")
    arrays = [
        pa.array(tiled[field.name]).cast(field.type, safe=False)
        if field.name in tiled
        else pa.nulls(completions * LENGTH, field.type)
        for field in schema
        if field.name != "step"
    ]
    names = [name for name in TABLES["tokens"].names if name != "step"]
    return pa.Table.from_arrays(arrays, names=names)


def _rollouts(seed: int, completions: int) -> dict[str, Any]:
    """The rows of the completions of a step."""
    draw = np.random.default_rng(seed)
    texts = ["".join(map(chr, draw.integers(97, 123, 4 * LENGTH))) for _ in range(BLOCK)]
    advantage = np.repeat(draw.choice([-1.0, 0.0, 1.0], BLOCK), 1)
    each = np.arange(completions)
    return {
        "rollout": each,
        "group": each // GROUP,
        "prompt": [texts[group % BLOCK][:300] for group in each // GROUP],
        "completion": [f"{one} {texts[one % BLOCK]}" for one in each],
        "reward": (each % GROUP < GROUP // 2).astype(float),
        "reward_parts": ['{"answer": 1.0}'] * completions,
        "correct": each % GROUP < GROUP // 2,
        "advantage": advantage[each % BLOCK],
        "length": np.full(completions, LENGTH),
        "truncated": np.zeros(completions, bool),
    }


def _with_step(rows: pa.Table, step: int, table: str) -> pa.Table:
    """Rows with the number of another step."""
    numbers = pa.repeat(pa.scalar(step, pa.int32()), rows.num_rows)
    if "step" in rows.schema.names:
        rows = rows.drop_columns(["step"])
    return rows.add_column(0, "step", numbers).select(TABLES[table].names)


def write_large(folder: Path, rows: int, step_rows: int = STEP_ROWS, part_steps: int = 1) -> int:
    """Write a run of about `rows` token rows, with the steps and updates of the example in turn; returns the exact number.

    Each step has about `step_rows` of them, and each file `part_steps` steps.
    """
    example = load_run(EXAMPLE)
    steps, completions = max(1, round(rows / step_rows)), step_rows // LENGTH
    create_run_dir(folder)
    shutil.copytree(EXAMPLE / "tokenizer", folder / "tokenizer")
    create_run_info(folder, example.info | {"name": folder.name})
    of_step = {name: example.arrow(name) for name in ("steps", "updates")}
    tokens = {
        kind: _tokens(index, completions, measured=kind) for index, kind in enumerate((False, True))
    }
    texts = _rollouts(0, completions)
    completed = texts.pop("completion")
    with TraceWriter(folder) as writer:
        for step in range(1, steps + 1):
            for name, table in of_step.items():
                chosen = table.filter(
                    pc.equal(table["step"], (step - 1) % example.steps["step"].max() + 1)
                )
                writer.append_table(name, _with_step(chosen, step, name))
            own = {"step": step, "completion": [f"{step} {text}" for text in completed]}
            writer.append("rollouts", own | texts)
            measured = (step - 1) % MEASURED_EVERY == 0
            writer.append_table("tokens", _with_step(tokens[measured], step, "tokens"))
            if step % part_steps == 0:
                writer.flush()
    update_run_info(folder, steps_done=steps, status="finished")
    return steps * completions * LENGTH


def _peak(arguments: Sequence[str], folder: str) -> tuple[float, float, float]:
    """Wall and processor seconds and peak memory [GiB] of a `sharpscope` command."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    before = os.times()
    process = subprocess.Popen(
        [sys.executable, "-m", "sharpscope", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {process.returncode}")
    wall = os.times().elapsed - before.elapsed
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20


def large(sizes: Sequence[int], repeats: int, step_rows: int = STEP_ROWS) -> list[Row]:
    """`show` and `analyze` of a run of each size [token rows]; the runs lie in a temporary folder and are deleted."""
    rows = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            count = write_large(Path(folder) / "run", size, min(size, step_rows))
            for command in (["show", "run"], ["analyze", "run", "--out", "page"]):
                found = [_peak(command, folder) for _ in range(repeats + 1)][1:]
                wall, cpu, peak = zip(*found, strict=True)
                what = f"`{command[0]}` of {count:,} token rows"
                note = f"{statistics.median(wall):.3g} s of wall time"
                rows.append(Row.of_turns(what, cpu, "s", "≤ 30", "", note))
                rows.append(Row.of_turns(f"{what}, peak memory", peak, "GiB", "≤ 2"))
    return rows

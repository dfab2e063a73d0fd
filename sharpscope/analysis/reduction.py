"""Traces made small enough for a repository; every claim and table stays equal, bit for bit.

Kept whole: `steps`, `updates`, `eval`, `probes`, `events`, `forks`, run.json, config.yaml. The token table is replaced by what the claims and
figures make of each step (`reductions.parquet`) and by a uniform sample of tokens for the figures that show single ones.
Rollouts' texts and checkpoints are not kept.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa

from sharpscope.analysis.claims import REDUCERS
from sharpscope.analysis.tokens import scan
from sharpscope.errors import UserError
from sharpscope.traces import (
    RUN_FILE,
    Reduction,
    Run,
    TraceWriter,
    update_run_info,
    write_reductions,
)

TOKENS = 1_500
"""Tokens kept of a run unless asked otherwise."""
KEPT = ("steps", "updates", "eval", "probes", "probe_prompts", "events", "forks")
RULE = "half of the sampled tokens uniformly from the steps with score norms, half uniformly from all other steps"


def reduce_run(run: Run, out: Path, tokens: int = TOKENS) -> Path:
    """Write `out`, a folder that `load_run` reads and that gives the same claims and figures as `run`.

    Half of the sampled `tokens` come from steps with score norms, half from all steps, each drawn uniformly (seeded).

    Raises:
        UserError: for a run that has not finished, was reduced before or has damaged parts, or a folder that is there already.
    """
    reasons = {
        "is a reduction itself": run.reduced is not None,
        run.status: run.status != "finished",
    }
    for why, holds in {**reasons, f"{out} is there already": out.exists()}.items():
        if holds:
            raise UserError(
                f"{run.path}: {why}; only finished runs are reduced, and no folder is overwritten"
            )
    if run.verify((*KEPT, "tokens")):  # a copy of the rest would look whole
        part, why = next(iter(run.damaged.items()))
        raise UserError(
            f"{run.path} has {len(run.damaged)} damaged parts, {part}: {why}; restore them, or leave it out"
        )
    # renamed when it is whole: an interrupted copy is no run
    aside = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for name in (RUN_FILE, "config.yaml"):
        if (run.path / name).exists():
            shutil.copy(run.path / name, aside / name)
    sample = _sample(run, tokens)
    with TraceWriter(aside, groups=False) as writer:
        for table in KEPT:
            writer.append_table(table, run.arrow(table))
        writer.append_table("tokens", sample)
    # all that claims need of whole token tables, whichever methods are compared
    found = scan({"": run}, REDUCERS)
    rows = [
        Reduction(n, one.step, one.tokens, one.values)
        for n, several in found.items()
        for one in several
    ]
    write_reductions(aside, rows)
    update_run_info(
        aside,
        reduced={
            "tokens": run.rows("tokens"),
            "sampled": len(sample),
            "rule": RULE,
        },
    )
    aside.rename(out)
    return out


def reduce_runs(
    runs: Iterable[tuple[str, Run]],
    out: Path,
    tokens: int = TOKENS,
    tell: Callable[[str], None] | None = None,
) -> tuple[list[Path], list[str]]:
    """Reduce every finished run that is not below `out` yet; returns what was written and, one line each, what not.

    Raises:
        UserError: before anything is written, for two runs of one name, and for one whose copy would not be below `out`.
    """
    targets: dict[str, Run] = {}
    # a run given twice counts once
    for name, run in {run.path.resolve(): (name, run) for name, run in runs}.values():
        if name in targets:
            raise UserError(
                f"runs: {name!r} names both {targets[name].path} and {run.path}; use two --out"
            )
        if Path(name).is_absolute() or ".." in Path(name).parts or not Path(name).parts:
            raise UserError(
                f"runs: {name!r} is no folder below --out {out}; give the folder that holds the run"
            )
        targets[name] = run
    written = list[Path]()
    left_out = list[str]()
    for name, run in targets.items():
        if tell is not None:
            tell(name)
        try:
            written.append(reduce_run(run, out / name, tokens))
        except UserError as error:
            left_out.append(f"{name}: {error}")
    return written, left_out


def _sample(run: Run, count: int) -> pa.Table:
    """`count` rows of the token table by RULE, all columns, in the table's order."""
    steps = run.token_steps
    measured = [
        run.tokens([step], ["score_norm_local"])["score_norm_local"].notna().to_numpy()
        for step in steps
    ]
    has_norm = np.concatenate([np.zeros(0, dtype=bool), *measured])
    # one order of all tokens, from which both halves are taken: none is drawn twice
    order = np.random.default_rng(0).permutation(len(has_norm))
    half = order[has_norm[order]][: count // 2]
    rest = order[~has_norm[order]][: count - len(half)]
    chosen = np.isin(np.arange(len(has_norm)), [*half, *rest])
    parts = np.split(chosen, np.cumsum([len(one) for one in measured])[:-1])
    pieces = [
        run.arrow("tokens", steps=[step]).filter(pa.array(kept))
        for step, kept in zip(steps, parts, strict=False)
    ]
    return pa.concat_tables([run.arrow("tokens", steps=[]), *pieces])

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
from sharpscope.traces import RUN_FILE, Reduction, Run, TraceWriter, load_run, update_run_info, write_reductions
from sharpscope.traces.files import TRACES

TOKENS = 1_500
"""Tokens kept of a run unless asked otherwise."""
KEPT = ("steps", "updates", "eval", "probes", "probe_prompts", "events", "forks")


class DamagedRunError(UserError):
    """Parts of a run's tables cannot be read, so a copy made of the rest would look whole and not be."""


def reduce_run(run: Run, out: Path, tokens: int = TOKENS) -> Path:
    """Write `out`, a folder that `load_run` reads and that gives the same claims and figures as `run`.

    Half of the sampled `tokens` come from steps with score norms, half from all steps, each drawn uniformly (seeded).

    Raises:
        DamagedRunError: parts of the run's tables are damaged; nothing is left of `out`.
        UserError: for a run that has not finished or was reduced before, or a folder that is there already.
    """
    if run.reduced is not None:
        raise UserError(f"run: {run.path} is a reduction itself; reduce the run it was made from")
    if run.status != "finished":
        raise UserError(f"run: {run.path} is {run.status}; only a finished run is reduced")
    if out.exists():
        raise UserError(f"out: {out} exists and is not overwritten; give another folder")
    aside = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for name in (RUN_FILE, "config.yaml"):
        if (run.path / name).exists():
            shutil.copy(run.path / name, aside / name)
    _tables(run, aside, tokens)
    write_reductions(aside, _reductions(run))
    # Known now that all was read; rollouts are not kept anyhow.
    damaged = [(part, why) for part, why in run.damaged.items() if not part.startswith(f"{TRACES}/rollouts/")]
    if damaged:
        shutil.rmtree(aside)
        (part, why), *_ = damaged
        raise DamagedRunError(
            f"run: {run.path} has {len(damaged)} damaged parts, {part}: {why}; restore them, or leave the run out"
        )
    sampled = load_run(aside).rows("tokens")
    update_run_info(aside, reduced={"tokens": run.rows("tokens"), "sampled": sampled, "rule": RULE})
    aside.rename(out)
    return out


RULE = "half of the sampled tokens uniformly from the steps with score norms, half uniformly from all other steps"


def reduce_runs(
    runs: Iterable[tuple[str, Run]], out: Path, tokens: int = TOKENS, tell: Callable[[str], None] | None = None
) -> tuple[list[Path], list[str]]:
    """Reduce every finished run that is not below `out` yet; returns what was written and, one line each, what not.

    Raises:
        UserError: before anything is written, for two runs of one name, and for one whose copy would not be below `out` or
            would be the run itself.
    """
    written: list[Path] = []
    left_out: list[str] = []
    for name, run in _targets(runs, out, left_out).items():
        folder = out / name
        if folder.exists():
            left_out.append(f"{name}: is there already")
        elif run.status != "finished":
            left_out.append(f"{name}: {run.status}")
        else:
            if tell is not None:
                tell(name)
            try:
                written.append(reduce_run(run, folder, tokens))
            except DamagedRunError as error:
                left_out.append(f"{name}: {error}")
    return written, left_out


def _targets(runs: Iterable[tuple[str, Run]], out: Path, left_out: list[str]) -> dict[str, Run]:
    """The runs by the folder below `out` that each gets; `left_out` gets a line for those that are reduced already."""
    result: dict[str, Run] = {}
    seen: set[Path] = set()
    for name, run in runs:
        source = run.path.resolve()
        if source in seen:
            continue  # given twice, as by `runs runs/grpo-s0`
        seen.add(source)
        if run.reduced is not None:
            left_out.append(f"{name}: is a reduction itself")
            continue
        if name in result:
            raise UserError(
                f"runs: {name!r} names both {result[name].path} and {run.path}; reduce each into an --out of its own"
            )
        target = Path(name)
        if target.is_absolute() or ".." in target.parts or not target.parts:
            raise UserError(f"runs: {name!r} is no folder below --out {out}; give the folder that holds the run")
        if (out / name).resolve() == source:
            raise UserError(f"--out {out}: holds the run {name} itself; choose another folder")
        result[name] = run
    return result


def _reductions(run: Run) -> list[Reduction]:
    """All that claims and figures need of whole token tables, whichever methods a claim will later compare."""
    result = scan({"": run}, REDUCERS)
    return [Reduction(name, one.step, one.tokens, one.values) for name, several in result.items() for one in several]


def _tables(run: Run, folder: Path, tokens: int) -> None:
    with TraceWriter(folder, groups=False) as writer:
        for table in KEPT:
            writer.append_table(table, run.arrow(table))
        writer.append_table("tokens", _sample(run, tokens))


def _sample(run: Run, count: int) -> pa.Table:
    """`count` rows of the token table by RULE, all columns, in the table's order."""
    steps = run.token_steps
    measured = [run.tokens([step], ["score_norm_local"])["score_norm_local"].notna().to_numpy() for step in steps]
    has_norm = np.concatenate(measured) if measured else np.zeros(0, dtype=bool)
    order = np.random.default_rng(0).permutation(len(has_norm))
    half = order[has_norm[order]][: count // 2]
    rest = order[~has_norm[order]][: count - len(half)]
    chosen = np.zeros(len(has_norm), dtype=bool)
    chosen[half] = chosen[rest] = True
    start, pieces = 0, [run.arrow("tokens", steps=[])]
    for step in steps:
        rows = run.arrow("tokens", steps=[step])
        pieces.append(rows.filter(pa.array(chosen[start : start + len(rows)])))
        start += len(rows)
    return pa.concat_tables(pieces)

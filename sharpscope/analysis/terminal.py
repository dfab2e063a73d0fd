"""Runs in a terminal: `show`, `show --watch` and `tokens`."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from sharpscope.analysis.cause_sections import cause_sections
from sharpscope.analysis.effects import effect_sections
from sharpscope.analysis.headline import layer_sections, sentences, step_sections
from sharpscope.analysis.report import found_sections, laid_out, run_sections, runs_sections
from sharpscope.analysis.sections import Section, to_terminal
from sharpscope.analysis.spikes import explain_step, notable_steps, recorded_by, spike_text
from sharpscope.analysis.study import last_step, quiet, recorded_steps
from sharpscope.analysis.text import printable
from sharpscope.analysis.token_values import needed_columns, with_values
from sharpscope.analysis.tokens import INCLUSION, check_recorded, sample_text
from sharpscope.analysis.update_parts import BY, part_sections
from sharpscope.errors import UserError, nearest
from sharpscope.traces import RUN_FILE, Row, Run, Runs, load_run, load_runs
from sharpscope.traces.parts import is_pack

SHARE = "attribution"
TOKEN_COLUMNS = (
    "probability",
    "logp",
    "entropy",
    "advantage",
    "weight",
    "ratio",
    "clipped",
    "loss_coef",
    "kl_coef",
    "policy_coef",
    "entropy_coef",
    "mismatch",
    "kl",
    "polarity",
    "entropy_change",
    "logit_grad_norm",
    "head_grad_norm",
    "score_norm",
    "score_norm_local",
    "attribution",
    "heldout_influence",
    "effect_kl",
    "effect_entropy",
    "effect_heldout",
    "effect_sharpness",
)
"""Columns of the tokens table, and values computed from them (`token_values`), that `tokens --by` sorts by."""
GOING_ON = "running"
MOST_RUNS = 100
"""Runs that `show` compares; of more it shows a summary."""
MOST_ROWS = 20
"""Rows of the tables in a summary."""


def show(run: Run) -> RenderableType:
    """One run, to be printed by rich: causes, headline, curves, accuracy, sharpness, events and cost."""
    return to_terminal([*cause_sections(run), *run_sections(run)])


def path_sections(paths: Sequence[str | Path]) -> list[Section]:
    """What `show` says of one run, or of several: their differences, and the list of runs; UserError if there is none."""
    with quiet():
        runs = load_runs(paths)
        if not len(runs):
            load_run(Path(paths[0]))  # raises, and says why there is none
        if len(runs) > MOST_RUNS:
            return many_sections(runs, shlex.join(map(str, paths)))
        if len(runs) > 1 or runs.skipped:
            return runs_sections(runs)
        return [*cause_sections(runs[0]), *run_sections(runs[0])]


def many_sections(runs: Runs, source: str) -> list[Section]:
    """A summary of more runs than `show` compares: a row for each method and task, what did not finish, and where to see all."""
    facts = [
        {
            "method": printable(run.method, 40),
            "task": printable(run.task, 40),
            "seed": run.seed,
            "finished": run.status == "finished",
            "steps": int(run.info.get("steps_done") or 0),
            "reward": last_reward(run),
        }
        for run in runs
    ]
    groups = pd.DataFrame(facts).groupby(["method", "task"], sort=False)
    table = pd.DataFrame([group_row(members) for _, members in groups])
    largest = table.sort_values("runs", ascending=False, kind="stable").head(MOST_ROWS)
    more = len(table) - MOST_ROWS
    others = f" {more} more groups are not shown." if more > 0 else ""
    note = f"{len(runs)} runs; rewards of the last third.{others} All of them, compared: sharpscope analyze {source}"
    sections = [Section("Runs", largest.astype(str), note=note)]
    status = {name: run.status for name, run in runs.by_name.items() if run.status != "finished"}
    problems = [f"{name}: {why}" for name, why in runs.skipped.items()]
    problems += [f"{name} is {said}" for name, said in status.items()]
    if problems:
        lines = [printable(line) for line in problems[:MOST_ROWS]]
        if len(problems) > MOST_ROWS:
            lines.append(f"and {len(problems) - MOST_ROWS} more")
        sections.append(Section("Not finished, or not read", "\n".join(lines)))
    return sections


def group_row(members: pd.DataFrame) -> Row:
    """Numbers of runs, seeds, steps and the last rewards of runs of one method on one task."""
    rewards = members["reward"].dropna()
    spread = f" ± {rewards.std():.2g}" if len(rewards) > 1 else ""
    least, most = members["steps"].agg(["min", "max"])
    return {
        "method": members["method"].iloc[0],
        "task": members["task"].iloc[0],
        "runs": len(members),
        "finished": members["finished"].sum(),
        "seeds": members["seed"].nunique(),
        "steps": least if least == most else f"{least} to {most}",
        "reward ± SD": f"{rewards.mean():.3g}{spread}" if len(rewards) else "–",
    }


def last_reward(run: Run) -> float:
    """Mean reward over the last third of a run's steps; NaN without one."""
    table = run.arrow("steps", columns=["step", "reward_mean"]).sort_by("step")
    values = table["reward_mean"].to_numpy()
    values = values[-max(1, len(values) // 3) :]
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def show_headline(paths: Sequence[str | Path]) -> RenderableType:
    """The first part of what `path_sections` and the page say: tokens, accuracy and differences, in about twenty lines."""
    with quiet():
        study, settings = laid_out(load_runs(paths))[0]
        return to_terminal(found_sections(study, settings, top=3, runs=1))


def watch(
    path: str | Path,
    console: Console,
    *,
    every: float = 2.0,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Show a run and refresh the view every `every` seconds until the run ends (on a pipe, then); returns its last status.

    A run that does not exist yet is waited for.

    Raises:
        UserError: the run cannot be read, or its folder was removed.
    """
    folder = Path(path)
    if not (folder / RUN_FILE).exists() and not any(map(is_pack, folder.parents)):
        console.print(Text(f"waiting for {printable(folder)} to begin; Ctrl-C ends it"))
        while not (folder / RUN_FILE).exists():
            sleep(every)
    with quiet():  # the view says which parts are set aside
        run = load_run(path)
        with Live(
            show(run),
            console=console,
            auto_refresh=False,
            vertical_overflow="visible",
        ) as live:
            while run.status == GOING_ON:
                sleep(every)
                if not folder.exists():
                    raise UserError(f"run: {folder} was removed while it was watched")
                run = load_run(path)
                live.update(show(run), refresh=True)
    console.print(Text(f"{printable(run.name)}: {run.status} after {last_step(run)} steps"))
    return run.status


def token_sections(
    run: Run, step: int | None = None, by: str | None = None, top: int = 20, on: str | None = None
) -> list[Section]:
    """The tokens of a step with the largest |`by`|, in their sentences.

    Args:
        run: whose tokens are read.
        step: of the run; None: the one with the largest gradient norm among those at which `by` is recorded.
        by: `effect`, one of BY (`component`, `turn`, `staleness`) for sums, or one of TOKEN_COLUMNS; equal tokens are merged for
            `attribution`. None: `effect` if `on` is given, else `attribution`.
        top: rows.
        on: outcome of `effect`: kl (None), entropy, heldout, sharpness.

    Raises:
        UserError: no such step, no such column, or nothing recorded in it at that step.
    """
    by = by or (SHARE if on is None else "effect")
    if by == "effect":
        return effect_sections(run, step, on or "kl", top)
    if on is not None:
        raise UserError(f"--on {on}: goes with --by effect")
    if by in BY:
        return part_sections(run, by, step)
    if by not in TOKEN_COLUMNS:
        raise UserError(f"--by {by}: no such column{nearest(by, ('effect', *BY, *TOKEN_COLUMNS))}")
    recorded = recorded_steps(run, *needed_columns([by]))
    if not recorded:
        raise UserError(f"--by {by}: never recorded in this run{_instead(run, by)}")
    if step is None:
        norms = run.steps.set_index("step")["grad_norm"].reindex(recorded)
        step = recorded[int(norms.fillna(-1.0).to_numpy().argmax())]
    check_recorded(by, step, recorded)
    if by == SHARE:
        return [*step_sections(run, explain_step(run, step, top), top), *layer_sections(run, step)]
    return [largest_section(run, step, by, top)]


def _instead(run: Run, by: str) -> str:
    """Why a column was never recorded, and one that was."""
    why = recorded_by(run, "recording.token_gradients_every") if by == SHARE else ""
    for name in ("loss_coef", "advantage", "entropy"):
        if name != by and recorded_steps(run, name):
            return f"{why}; try --by {name}"
    return why


def largest_section(run: Run, step: int, by: str, top: int) -> Section:
    """The tokens of a step that are largest in a column."""
    tokens = with_values(run.tokens(steps=[step]))
    size = tokens[by].abs()
    columns = [by]
    if by in ("ratio", "clipped"):  # of every update that used the token (PPO epochs)
        again = run.frame("uses", step)
        first = tokens.drop(columns=["update", "ratio", "clipped", "loss_coef", SHARE])
        later = again.merge(first, on=["step", "rollout", "position"])
        tokens = pd.concat([tokens, later], ignore_index=True)
        columns = [by, "ratio", "clipped", "update"]
        size = np.log(tokens["ratio"]).abs()
        if by == "clipped":
            size = size.where(tokens["clipped"] != 0)
    chosen = tokens.loc[size.dropna().nlargest(top).index]
    places = chosen["rollout"].astype(str).to_numpy()
    table = pd.DataFrame({"completion": places, "token": sentences(run, step, chosen)})
    for name in dict.fromkeys((*columns, "probability", "advantage", "weight", SHARE)):
        if chosen[name].notna().any():
            table["π" if name == "probability" else name] = chosen[name].to_numpy()
    measured = tokens[tokens[by].notna()]
    # else a column of all tokens
    sample = sample_text(run, measured) if measured[INCLUSION].notna().all() else ""
    among = f", among the tokens of {sample}" if sample else ""
    return Section(f"{run.name}, step {step}: tokens by |{by}|{among}", table)


def spike_sections(run: Run, top: int = 8) -> list[Section]:
    """What the rule for spikes found, and the tokens, prompts and probabilities behind each; see `spikes.spike_text`."""
    parts = [Section(f"{run.name}: steps with an unusually large gradient", spike_text(run))]
    for spike in notable_steps(run, top):
        parts += [*step_sections(run, spike, top), *layer_sections(run, spike.step)]
    return parts

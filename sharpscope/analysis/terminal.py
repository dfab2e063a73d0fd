"""Runs for a terminal: `show`, `compare`, `tokens`, `spikes`, `watch`.

Text from files is printed as it is: markup in it has no effect, control characters are replaced.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from sharpscope.analysis.comparison import Comparison
from sharpscope.analysis.frames import natural, with_pooled
from sharpscope.analysis.loading import quiet
from sharpscope.analysis.mismatch import mismatch_line
from sharpscope.analysis.overview import ROTATIONS, SHARPNESS, Overview, overview, probed_steps
from sharpscope.analysis.spikes import Spike
from sharpscope.analysis.statistics import accuracy_interval
from sharpscope.analysis.study import Study, last_step
from sharpscope.analysis.text import number, printable, told_apart
from sharpscope.analysis.token_text import Decode
from sharpscope.analysis.tokens import INCLUSION, sample_text
from sharpscope.analysis.weight_curve import weight_config
from sharpscope.errors import UserError, nearest
from sharpscope.traces import Run, load_run

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 40
SATURATED = 0.95
CURVES = {
    "reward_mean": "reward",
    "grad_norm": "gradient norm",
    "gradient_rotation": "gradient turned by [°]",
    "update_rotation": "update turned by [°]",
    "accuracy": "accuracy",
    "entropy_mean": "entropy [nats]",
    "completion_length_mean": "length [tokens]",
    "truncated_fraction": "truncated [share]",
}
SHOWN = ("probability", "advantage", "weight", "norm", "attribution")
HEADINGS = {
    "probability": "π",
    "advantage": "adv.",
    "attribution": "share",
    "update_attribution": "share of\nupdate",
    "heldout_influence": "held-out\ninfluence",
    "loss_coef": "coef.",
}
CONTEXT = 7  # tokens on either side
GOING_ON = "running"


def sparkline(values: np.ndarray, width: int = WIDTH) -> str:
    """Values as at most `width` block characters from the smallest to the largest; a dot for what is not a number."""
    array = np.asarray(values, dtype=float)
    parts = np.array_split(array, min(width, len(array))) if len(array) else []
    means = np.array([part[np.isfinite(part)].mean() if np.isfinite(part).any() else np.nan for part in parts])
    finite = means[np.isfinite(means)]
    if finite.size == 0:
        return "·" * len(means)
    low, high = finite.min(), finite.max()
    height = np.full(len(means), 3.0) if high == low else (means - low) / (high - low) * (len(BLOCKS) - 1)
    return "".join("·" if math.isnan(h) else BLOCKS[round(h)] for h in height)


def show(run: Run) -> RenderableType:
    """Setting, curves, first screen (see `overview`), last evaluation, weights, events and cost of a run, to be printed by rich.

    Text from files is printed as it is: markup in it has no effect, control characters are replaced.
    """
    parts: list[RenderableType] = [_head(run)]
    if run.steps.empty:
        parts.append(Text("No step is recorded yet."))
    else:
        parts += [_curves(run), Text()]
        screen = overview(Study({run.name: run}))
        if screen is not None:
            parts += [Text(printable(screen.finding, 2000), "bold"), Text(), render_overview(screen)]
    if len(run.eval):
        parts.append(_evaluation(run))
    if len(run.steps):
        parts += [*_weights(run), *_updates(run), *_sampler(run)]
        parts += [_cost(run)] if run.steps["training_s"].notna().any() else []
    parts += _events(run)
    parts += [Text(f"set aside: {printable(part)}: {printable(why)}", "red") for part, why in run.damaged.items()]
    return Group(*parts)


def _head(run: Run) -> RenderableType:
    config = run.config
    policy, optimizer, rollout = (config.get(key) or {} for key in ("policy", "optimizer", "rollout"))
    facts = {
        "method": run.method,
        "task": run.task,
        "model": policy.get("model"),
        "parameters": run.info.get("parameters"),
        "seed": run.seed,
        "steps": f"{last_step(run)} of {config.get('steps', '?')}",
        "learning rate": optimizer.get("lr"),
        "group size": rollout.get("group_size"),
        "device": run.info.get("device"),
        "started": run.info.get("started"),
        "imported": imported_note(run),
    }
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    for key, value in facts.items():
        if value is not None:
            shown = (
                f"{value:,}"
                if isinstance(value, int) and key == "parameters"
                else printable(value, 1000 if key == "imported" else 160)
            )
            grid.add_row(key, Text(shown))
    return Panel(grid, title=Text(f"{printable(run.name)} · {run.status}"), expand=False)


def imported_note(run: Run) -> str | None:
    """Source of an imported run and gaps in its tables; None for other runs."""
    imported = run.info.get("imported")
    if not isinstance(imported, dict):
        return None
    lacks = []
    for table, names in (imported.get("not_recorded") or {}).items():
        if not run.rows(table):
            lacks.append(f"{table}: all")
        elif few := [name for name in names if not name.startswith(("weight_", "redrawn", "generated"))]:
            lacks.append(f"{table}: {', '.join(few)}")
    return f"from {imported.get('from')}; not recorded: {'; '.join(lacks) or 'nothing is missing'}"


def _curves(run: Run) -> Table:
    """Sparklines: reward and gradient norm, then rotation and sharpness, then the rest."""
    table = Table("by step", "first third", "", "last third", box=None, pad_edge=False)
    steps = run.steps.sort_values("step")
    series: dict[str, np.ndarray] = {}
    if steps["reward_mean"].isna().all():  # the loss of a method with advantages says little
        series["loss"] = _series(steps, "loss")
    for column, name in CURVES.items():
        values = _series(steps, column)
        # Rotations are recorded at some steps only.
        series[name] = values[np.isfinite(values)] if column in ROTATIONS else values
    sharp = {name: probed_steps(run, quantity) for quantity, name in SHARPNESS.items()}
    names = list(series)
    cut = names.index(CURVES["update_rotation"]) + 1
    for name, values in [(name, (series | sharp)[name]) for name in (*names[:cut], *sharp, *names[cut:])]:
        third = max(1, len(values) // 3)
        if np.isfinite(values).any():
            table.add_row(
                Text(name),
                number(values[:third].mean(), "not a number"),
                sparkline(values),
                number(values[-third:].mean(), "not a number"),
            )
    return table


def _series(steps: pd.DataFrame, column: str) -> np.ndarray:
    return pd.to_numeric(steps[column], errors="coerce").to_numpy(dtype=float)


def render_overview(screen: Overview) -> RenderableType:
    """The first screen without its finding: tokens in their sentences, then rotation, sharpness and results."""
    parts: list[RenderableType] = []
    for moved in screen.moved:
        parts.append(Text(f"what moved {printable(moved.run)}: {printable(moved.text)}; shares of its square"))
        table = Table.grid(padding=(0, 2))
        table.add_column(justify="right", no_wrap=True)
        table.add_column()
        for spot in moved.spots:
            style = "bold reverse " + ("dark_orange3" if spot.share < 0 else "deep_sky_blue3")
            sentence = Text(visible(spot.before), "dim").append(f"▸{visible(spot.token)}◂", style)
            sentence.append(visible(spot.after), "dim").append(f"  π = {number(spot.probability)}", "not dim")
            table.add_row(f"{spot.share:+.1%}", sentence)
        for share, text in moved.prompts:
            table.add_row(f"{share:+.1%}", Text(f"prompt: {visible(text)}"))
        parts += [table, Text()]
    parts += [Text(printable(screen.moved_text, 400)), Text()] if screen.moved_text else []
    for part in (screen.rotation, screen.sharpness, screen.result):
        if part.grid is None:
            parts.append(Text(f"{part.title}: {part.text}"))
            continue
        table = Table(
            title=Text(f"{part.title}. {part.grid.note}".rstrip()),
            title_justify="left",
            box=None,
            pad_edge=False,
        )
        for number_, name in enumerate(part.grid.columns):
            table.add_column(Text(name), justify="left" if number_ == 0 or name == "setting" else "right")
        for row in part.grid.rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        parts += [table, Text()]
    return Group(*parts)


def _weights(run: Run) -> list[RenderableType]:
    """Weights and their bounds at the last step, with a warning if the method is GRPO up to scale."""
    last = run.steps.sort_values("step").iloc[-1]
    kind = weight_config(run.info).get("kind", "uniform")
    if kind == "uniform" or pd.isna(last["weight_mean"]):
        return []
    line = f"weights ({printable(kind)}): mean {last['weight_mean']:.3f}, "
    line += f"{last['weight_min']:.3f} to {last['weight_max']:.3f}"
    saturated = ""
    for what, suffix in (("tokens", ""), ("gradient", "_gradient")):
        # Traces of version 1 have the shares of tokens only.
        low, high = (last.get(f"weight_saturation_{bound}{suffix}") for bound in ("low", "high"))
        if pd.notna(low) and pd.notna(high):
            line += f"; of the {what} {low:.0%} on the lower bound, {high:.0%} on the upper"
            saturated = what if max(low, high) > SATURATED else ""
    if saturated:
        text = f"almost all of the {saturated} has its weight on one bound: this is GRPO up to the gradient's scale"
        return [Text(line), Text(text, "yellow")]
    return [Text(line)]


def _updates(run: Run) -> list[RenderableType]:
    """How far the last step's updates moved the policy; nothing for one update a step, whose ratios are all 1."""
    if run.updates.empty:
        return []
    last = run.updates[run.updates["step"] == run.updates["step"].max()]
    if len(last) < 2 or last["ratio_max"].isna().all():
        return []
    line = f"updates of step {last['step'].iloc[0]}: {len(last)}, ratio {number(last['ratio_min'].min())} to "
    line += f"{number(last['ratio_max'].max())}, KL(π_old‖π) up to {number(last['kl_old_k3'].max())} nats"
    low, high = last["clip_fraction_low"].max(), last["clip_fraction_high"].max()
    if pd.notna(low) and pd.notna(high):  # not known of verl's updates
        line += f", clipped {low:.1%} below and {high:.1%} above at most"
    return [Text(line)]


def _sampler(run: Run) -> list[RenderableType]:
    line = mismatch_line(run)
    return [] if line is None else [Text(line)]


def _cost(run: Run) -> RenderableType:
    parts = {name: float(run.steps[f"{name}_s"].sum()) for name in ("generation", "training", "recording")}
    total = sum(parts.values())
    text = f"cost: {total / len(run.steps):.2f} s a step, {total / 60:.1f} min in all"
    if total > 0:
        text += " (" + ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts.items()) + ")"
    memory = peak_memory(run)
    if memory:
        text += f"; peak memory {memory}"
    return Text(text)


def peak_memory(run: Run) -> str:
    """The most memory that a run held, by kind: `process 547 MiB`; empty if it was not recorded."""
    matches = run.info.get("peak_memory_bytes")
    kinds = matches if isinstance(matches, dict) else {"process": matches}
    return ", ".join(f"{kind} {size / 2**20:,.0f} MiB" for kind, size in kinds.items() if isinstance(size, int | float))


def _evaluation(run: Run) -> RenderableType:
    """Accuracy of the last evaluation by split and level, with 95 % intervals over prompts."""
    rows = run.eval[run.eval["step"] == run.eval["step"].max()]
    pooled = with_pooled(rows, "accuracy")
    intervals = {
        (row.split, row.level, row.temperature): accuracy_interval(row.accuracy, row.std_error, row.n, row.k).percent()
        for row in rows.itertuples()
    }
    title = Text(f"evaluation at step {int(rows['step'].max())}: accuracy [95 % interval over prompts, %]")
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("split")
    table.add_column("temperature")
    levels = natural(pooled["level"])
    for level in levels:
        table.add_column(Text(printable(level)), justify="right")
    for (split, temperature), group in pooled.groupby(["split", "temperature"]):
        values = dict(zip(group["level"], group["value"], strict=True))
        cells = []
        for level in levels:
            interval = intervals.get((split, level, temperature), "")
            cells.append(Text(f"{values[level]:.1%} {interval}".rstrip() if level in values else "–"))
        table.add_row(Text(printable(split)), "greedy" if temperature == 0 else f"{temperature:g}", *cells)
    return table


def _events(run: Run, most: int = 6) -> list[RenderableType]:
    loud = run.events[run.events["severity"] != "info"]
    lines: list[RenderableType] = []
    for rule, events in loud.groupby("rule"):
        last = events.sort_values("step").iloc[-1]
        text = f"{printable(rule)} × {len(events)}, last at step {last['step']}: {printable(last['message'])}"
        lines.append(Text(text, "red" if last["severity"] == "error" else "yellow"))
    hidden = len(lines) - most
    return [*lines[:most], Text(f"and {hidden} rules more")] if hidden > 0 else lines


def render_comparison(comparison: Comparison) -> RenderableType:
    """Settings that differ, results side by side, and notes; differences beyond their interval are bold."""
    a, b = (Column(Text(printable(name))) for name in comparison.names)
    parts: list[RenderableType] = []
    if comparison.settings.empty:
        parts.append(Text("Their settings are equal."))
    else:
        table = Table("setting", a, b, box=None, pad_edge=False)
        for row in comparison.settings.itertuples(index=False):
            table.add_row(*(Text(printable(cell)) for cell in row))
        parts.append(table)
    if len(comparison.results):
        heads = [Column(Text(printable(name)), justify="right") for name in comparison.names]
        table = Table("result", "unit", *heads, Column("b − a", justify="right"), box=None, pad_edge=False)
        for result in comparison.results.to_dict("records"):
            clear = abs(result["difference"]) > result["difference_half"]
            cells = [
                _cell(result["a"], result["a_half"]),
                _cell(result["b"], result["b_half"]),
                _cell(result["difference"], result["difference_half"], "+"),
            ]
            table.add_row(
                Text(result["quantity"]),
                result["unit"],
                cells[0],
                cells[1],
                Text(cells[2], "bold" if clear else ""),
            )
        parts += [Text(), table]
    return Group(*parts, *(Text(printable(note, 400), "dim") for note in comparison.notes))


def _cell(value: float, half: float, sign: str = "") -> str:
    if math.isnan(value):
        return "not a number"
    return f"{value:{sign}.3f}" + ("" if math.isnan(half) else f" ± {half:.3f}")


def visible(text: str) -> str:
    """`text` on one line with nothing that a terminal would obey: newline as ⏎, other controls as �."""
    return "".join("⏎" if c == "\n" else c if c.isprintable() else "�" for c in text)


TOKEN_COLUMNS = (
    "probability",
    "logp",
    "entropy",
    "advantage",
    "weight",
    "loss_coef",
    "logit_grad_norm",
    "head_grad_norm",
    "score_norm",
    "score_norm_local",
    "attribution",
    "update_attribution",
    "heldout_influence",
    "sharp_alignment",
)  # numeric columns that `sharpscope tokens` sorts by


def largest_recorded_step(run: Run, by: str) -> int:
    """The step with the largest gradient norm among those at which the tokens' column `by` is recorded.

    Raises:
        UserError: no such column, or it was never recorded in this run.
    """
    _check_token_column(by)
    recorded = run.steps[run.steps["step"].isin(recorded_steps(run, by))]
    if recorded.empty:
        raise UserError(f"--by {by}: never recorded in this run")
    largest = recorded["grad_norm"].fillna(-1.0).to_numpy().argmax()
    return int(recorded["step"].iloc[largest])


def _check_token_column(by: str) -> None:
    if by not in TOKEN_COLUMNS:
        raise UserError(f"--by {by}: no such column{nearest(by, TOKEN_COLUMNS)}")


def top_tokens(run: Run, step: int, by: str, top: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(the `top` tokens of `step` by |`by`|, all tokens of the step), with `probability` and the exact norm where there is one.

    Raises:
        UserError: no such step, no such column, or nothing recorded in it at that step.
    """
    _check_token_column(by)
    steps = run.steps["step"].tolist()
    if step not in steps:
        raise UserError(f"--step {step}: the run has steps {min(steps, default=0)} to {max(steps, default=0)}")
    tokens = run.tokens(steps=[step])
    tokens = tokens.assign(probability=np.exp(tokens["logp"]))
    values = tokens[by].abs().dropna()
    if values.empty:
        recorded = recorded_steps(run, by)
        where = f"recorded at steps {', '.join(map(str, recorded[:12]))}" if recorded else "never recorded in this run"
        others = [name for name in TOKEN_COLUMNS if name != by and tokens[name].notna().any()]
        advice = (
            f"; this step has {', '.join(others)}" if others else "; this step has no tokens" if tokens.empty else ""
        )
        raise UserError(f"--by {by}: not recorded at step {step}; {where}{advice}")
    return tokens.loc[values.nlargest(top).index], tokens


def recorded_steps(run: Run, column: str) -> list[int]:
    """Steps at which a column of the tokens table holds a value."""
    column = "logp" if column == "probability" else column
    frame = run.tokens(columns=["step", column]).dropna(subset=[column])
    return sorted(int(step) for step in frame["step"].unique())


def tokens_title(step: int, by: str, everything: pd.DataFrame) -> str:
    """The title of a step's largest tokens; names the sample of groups among which a column was measured."""
    measured = everything[everything[by].notna()]
    sample = sample_text(measured) if measured[INCLUSION].notna().all() else ""  # else a column of all tokens
    return f"step {step}, by |{by}|{f', among the tokens of {sample}' if sample else ''}"


def render_tokens(
    chosen: pd.DataFrame, everything: pd.DataFrame, by: str, decode: Decode, title: str
) -> RenderableType:
    """The tokens in their sentence, colored by sign (blue raises, orange lowers; both also marked), with their numbers.

    A norm is the exact one where it was recorded, else the local tier's, marked by ~.
    """
    columns = [name for name in dict.fromkeys((by, *SHOWN)) if name == "norm" or chosen[name].notna().any()]
    table = Table(title=Text(title), pad_edge=False, padding=(0, 1, 0, 0), expand=True)
    table.add_column("rollout:\nposition", justify="right", no_wrap=True)
    table.add_column("in its sentence", ratio=1)
    for name in columns:
        table.add_column(HEADINGS.get(name, name.replace("_", "\n", 1)), justify="right", no_wrap=True)
    by_rollout = dict(tuple(everything.groupby("rollout")))
    for row in chosen.to_dict("records"):
        sentence = by_rollout[row["rollout"]].sort_values("position")
        cells = [_norm(row) if name == "norm" else number(row[name]) for name in columns]
        table.add_row(
            f"{row['rollout']}:{row['position']}", _sentence(sentence, int(row["position"]), row[by], decode), *cells
        )
    return table


def _norm(row: Mapping[Any, Any]) -> str:
    """‖∇ log π‖: the exact norm, or the local tier's marked by ~."""
    exact, local = row.get("score_norm", math.nan), row.get("score_norm_local", math.nan)
    if not math.isnan(exact):
        return number(exact)
    return number(local) if math.isnan(local) else f"~{number(local)}"


def _sentence(sentence: pd.DataFrame, position: int, value: float, decode: Decode) -> Text:
    text = Text()
    near = sentence[(sentence["position"] >= position - CONTEXT) & (sentence["position"] <= position + CONTEXT)]
    for token, location in zip(near["token_id"], near["position"], strict=True):
        piece = visible(decode(int(token)))
        if location == position:
            text.append(f"▸{piece}◂", style="bold reverse " + ("dark_orange3" if value < 0 else "deep_sky_blue3"))
        else:
            text.append(piece, style="dim")
    return text


def render_spikes(spikes: Sequence[Spike], tokens_of: Callable[[int], pd.DataFrame], decode: Decode) -> RenderableType:
    """Each spike on a screen: how large, which tokens, which prompts, which probabilities."""
    parts: list[RenderableType] = []
    for spike in spikes:
        z = "" if math.isnan(spike.z) else f", {spike.z:.1f} robust standard deviations above"
        parts.append(
            Text(
                f"step {spike.step}: gradient norm {spike.grad_norm:.3g}; typical {spike.typical:.3g}{z}", style="bold"
            )
        )
        if spike.tokens is None or spike.prompts is None or spike.probabilities is None:
            parts.append(Text(f"  {spike.missing}"))
            continue
        of = f" of {spike.sample}" if spike.sample else ""
        title = f"tokens{of} by share of the squared norm"
        parts.append(render_tokens(spike.tokens, tokens_of(spike.step), "attribution", decode, title))
        prompts = Table("share", "prompt", title=f"prompts{of}")
        shown = spike.prompts.head(4)
        for share, text in zip(
            shown["attribution"], told_apart([visible(text) for text in shown["prompt"]]), strict=True
        ):
            prompts.add_row(f"{share:+.1%}", Text(text))
        ranges = Table(
            "π",
            "share of the squared norm",
            "share of the tokens",
            title=f"probability ranges{f', estimated from {spike.sample}' if of else ''}",
        )
        for interval, row in zip(spike.probabilities.index, spike.probabilities.to_dict("records"), strict=True):
            ranges.add_row(
                f"{max(interval.left, 0.0):g} to {interval.right:g}", f"{row['share']:+.1%}", f"{row['tokens']:.1%}"
            )
        parts += [prompts, ranges]
    return Group(*parts)


def watch(
    path: str | Path,
    console: Console,
    *,
    every: float = 2.0,
    once: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Show a run and refresh the view every `every` seconds until the run ends; returns its last status.

    On a terminal the view is drawn in place. On a pipe each new step is one line, and the whole view comes at the end.
    `once`: show what there is and return. Only reads; what another process appends is seen at the next look.

    Raises:
        UserError: if `path` holds no readable run.
    """
    run = _look(path)
    if once or run.status != GOING_ON:
        console.print(show(run))
        return run.status
    if console.is_terminal:
        with Live(show(run), console=console, auto_refresh=False, vertical_overflow="visible") as live:
            while run.status == GOING_ON:
                sleep(every)
                run = _look(path)
                live.update(show(run), refresh=True)
    else:
        done = -1
        while run.status == GOING_ON:
            done = _tell(run, done, console)
            sleep(every)
            run = _look(path)
        console.print(show(run))
    console.print(Text(f"{printable(run.name)}: {run.status} after {last_step(run)} steps"))
    return run.status


def _look(path: str | Path) -> Run:
    """The run as it is now; its small tables are read, so that drawing does not fail half-way."""
    with quiet():  # the view says which parts are set aside
        run = load_run(path)
        for table in ("steps", "eval", "events", "probes", "updates"):
            getattr(run, table)
    return run


def _tell(run: Run, done: int, console: Console) -> int:
    """One line for the newest step, if there is a new one."""
    last = last_step(run)
    if last > done and len(run.steps):
        row = run.steps.sort_values("step").iloc[-1]
        rewarded = pd.notna(row["reward_mean"]) and pd.notna(row["accuracy"])
        said = (
            f"reward {row['reward_mean']:+.3f}, accuracy {row['accuracy']:.1%}"
            if rewarded
            else f"loss {row['loss']:.4g}"
        )
        console.print(Text(f"step {last}: {said}"))
    return last

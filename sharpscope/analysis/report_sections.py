"""The tables of a report, as grids of text that HTML and Markdown both show."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from sharpscope.analysis.claims import Estimate, Verdict
from sharpscope.analysis.comparison import INTERVALS, compare, facts_of
from sharpscope.analysis.completions import completions_dropped
from sharpscope.analysis.report import StudyReport
from sharpscope.analysis.report_content import ReportContent
from sharpscope.analysis.spikes import find_spikes
from sharpscope.analysis.studies import Study
from sharpscope.analysis.tables.summary import interval_text, method_table
from sharpscope.analysis.terminal import peak_memory
from sharpscope.traces import Run, Runs

MOST_PAIRS = 12
MOST_EVENTS = 200
MOST_ROWS = 100
_TOLD_APART = 3


@dataclass(frozen=True)
class Grid:
    """A table of text with what it says in one line."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def run_grid(runs: Runs) -> Grid:
    """One row a run, what could not be read last."""
    rows = [
        (name, run.method, str(run.seed), run.task, _status(run), str(len(run.steps)), str(run.info.get("started") or "–"),
         str(run.info.get("commit") or "–")[:12])
        for name, run in runs.by_name.items()
    ]  # fmt: skip
    rows += [(name, "–", "–", "–", f"cannot be read: {why}", "–", "–", "–") for name, why in runs.skipped.items()]
    return Grid("Runs", ("run", "method", "seed", "task", "status", "steps", "started", "commit"), tuple(rows))


def _status(run: Run) -> str:
    """The status, and how a run that did not finish ended where it says so."""
    why = run.info.get("end")
    return run.status if run.status == "finished" or not why else f"{run.status}: {why}"


def result_grid(report: StudyReport) -> Grid | None:
    """Results of each setting with their intervals, settings across."""
    if not len(report.table):
        return None
    flipped = method_table(report.table).set_index("setting").T.reset_index(names="metric")
    units = dict(zip(report.table["metric"], report.table["unit"], strict=True))
    flipped.insert(1, "unit", [units.get(name, "") for name in flipped["metric"]])
    text = f"All settings at step {report.study.horizon}, the last that all have. ±: half of the 95 % t-interval over seeds"
    single = bool((report.table["runs"] == 1).any())
    text += "; one run alone has none, and says nothing about other seeds." if single else "."
    rows = tuple(tuple(str(cell) for cell in row) for row in flipped.itertuples(index=False))
    return Grid("Results", tuple(map(str, flipped.columns)), rows, text)


def setting_grid(study: Study) -> Grid | None:
    """What the settings of a study differ in, settings across; values that differ between a setting's runs are joined."""
    columns = {setting.label: [facts_of(run) for run in setting.runs.values()] for setting in study.settings}
    keys = list(dict.fromkeys(key for facts in columns.values() for one in facts for key in one))
    rows = []
    for key in keys:
        cells = [_joined([one.get(key, "–") for one in facts]) for facts in columns.values()]
        if len(set(cells)) > 1 and key not in ("name", "out"):
            rows.append((key, *cells))
    if len(columns) < 2 or not rows:
        return None
    return Grid("Settings that differ", ("setting", *columns), tuple(rows))


def _joined(values: Sequence[object]) -> str:
    texts = list(dict.fromkeys(str(value) for value in values))
    return ", ".join(texts[:_TOLD_APART]) + (f" … ({len(texts)} values)" if len(texts) > _TOLD_APART else "")


def difference_grid(study: Study) -> Grid | None:
    """Differences of runs with one seed: each setting against the first (grpo's, if there is one), with intervals."""
    settings = sorted(study.settings, key=lambda setting: setting.method != "grpo")
    pairs = [
        (seed, settings[0].runs[seed], setting.runs[seed])
        for setting in settings[1:]
        for seed in setting.runs
        if seed in settings[0].runs
    ]
    rows: list[tuple[str, ...]] = []
    warnings: list[str] = []
    for seed, first, second in pairs[:MOST_PAIRS]:
        found = compare(first, second)
        for row in found.results.to_dict("records"):
            cells = [interval_text(row[name], row[f"{name}_half"]) for name in ("a", "b", "difference")]
            names = f"{second.name} − {first.name}"
            rows.append((names, str(seed), f"{found.horizon}", row["quantity"], row["unit"], *cells))
        warnings += found.warnings
    if not rows:
        return None
    note = " ".join([f"Each pair up to the last step that both have. {INTERVALS}", *dict.fromkeys(warnings)])
    if len(pairs) > MOST_PAIRS:
        note += f" {len(pairs) - MOST_PAIRS} pairs more are not shown."
    columns = ("runs", "seed", "last step", "quantity", "unit", "first", "second", "difference")
    return Grid("Differences within a seed", columns, tuple(rows), note)


def event_grid(runs: Runs) -> Grid | None:
    """Events that are more than information, latest first within their severity."""
    events = runs.events
    if not len(events):
        return None
    loud = events[events["severity"] != "info"].sort_values(["severity", "step"], ascending=[True, False])
    if not len(loud):
        return None
    rows = [
        (row["run"], str(row["step"]), row["severity"], row["rule"], number(row["value"]), number(row["threshold"]),
         row["action"], row["message"])
        for row in loud.head(MOST_EVENTS).to_dict("records")
    ]  # fmt: skip
    note = f"The first {MOST_EVENTS} of {len(loud)}." if len(loud) > MOST_EVENTS else ""
    return Grid(
        "Events", ("run", "step", "severity", "rule", "value", "threshold", "action", "message"), tuple(rows), note
    )


def cost_grid(runs: Runs) -> Grid:
    """Seconds of each kind and the most memory, a row a run."""
    rows = []
    for name, run in runs.by_name.items():
        parts = [float(run.steps[f"{kind}_s"].sum()) for kind in ("generation", "training", "recording")]
        probes = float(pd.to_numeric(run.probes["seconds"], errors="coerce").sum())
        count = max(1, len(run.steps))
        cells = (*(f"{seconds:,.1f}" for seconds in (*parts, probes)), f"{sum(parts) / count:.2f}")
        rows.append((name, *cells, peak_memory(run) or "–", str(run.info.get("device") or "–")))
    columns = (
        "run",
        "generation [s]",
        "training [s]",
        "recording [s]",
        "of it probes [s]",
        "a step [s]",
        "peak memory",
        "device",
    )
    note = "Sums over the recorded steps; evaluation and loading are not in them. Recording holds the probes of a step."
    return Grid("Costs", columns, tuple(rows), note)


def spike_grid(runs: Runs) -> Grid | None:
    """Gradient-norm spikes of every run."""
    rows = [
        (name, str(row["step"]), number(row["grad_norm"]), number(row["typical"]), f"{row['z']:.1f}")
        for name, run in runs.by_name.items()
        for row in find_spikes(run.steps).to_dict("records")
    ]
    if not rows:
        return None
    note = "A spike: a log gradient norm at least 4 robust standard deviations above the median of the 50 before it."
    return Grid("Spikes", ("run", "step", "gradient norm", "typical", "z"), tuple(rows), note)


def no_spikes(runs: Runs) -> str:
    """What is said in place of spikes; a reduced run had attribution, but of few tokens."""
    return "No spike." if any(run.reduced is not None for run in runs) else "No spike, and no attribution is recorded."


def not_kept(runs: Runs) -> str:
    """Which runs have no completions here because they are reduced ones; empty where there are none."""
    names = [name for name, run in runs.by_name.items() if completions_dropped(run)]
    if not names:
        return ""
    which = "these runs" if len(names) == len(runs) else f"{len(names)} of {len(runs)} runs"
    return (
        f"Completions of {which} were not kept by `sharpscope reduce`; a report of the whole runs shows their tokens."
    )


def frame_grids(verdict: Verdict) -> list[Grid]:
    """The data behind a verdict, as it was computed: each frame's first rows."""
    grids = []
    for name, frame in verdict.frames.items():
        shown = frame.head(MOST_ROWS)
        rows = tuple(tuple(_cell(cell) for cell in row) for row in shown.itertuples(index=False))
        note = (
            f"The first {len(shown):,} of {len(frame):,} rows." if len(frame) > len(shown) else f"{len(frame):,} rows."
        )
        if len(frame):
            grids.append(Grid(name, tuple(map(str, frame.columns)), rows, note))
    return grids


def read_grid(verdict: Verdict) -> Grid | None:
    """Which rows of which runs a verdict read."""
    by_what: dict[tuple[str, str, str], list[str]] = {}
    for rows in verdict.rows:
        by_what.setdefault((rows.table, ", ".join(rows.columns), rows.filter), []).append(rows.run)
    if not by_what:
        return None
    made = tuple((table, columns, which, ", ".join(names)) for (table, columns, which), names in by_what.items())
    return Grid("Rows read", ("table", "columns", "rows", "runs"), made)


def number_grid(verdict: Verdict) -> Grid | None:
    """The verdict's statistic and everything else that was computed, with intervals and p-values."""
    estimates = [*([] if verdict.effect is None else [verdict.effect]), *verdict.others]
    if not estimates:
        return None
    columns = ("quantity", "value", "unit", "interval", "p", "n", "note")
    return Grid("Numbers", columns, tuple(_estimate(estimate) for estimate in estimates))


def _estimate(e: Estimate) -> tuple[str, ...]:
    interval = "–" if e.interval is None else f"{e.interval} ({e.interval.level:.0%}, {e.interval.kind})"
    return (
        e.name,
        number(e.value),
        "" if e.unit == "1" else e.unit,
        interval,
        number(e.p_value),
        "–" if e.n is None else f"{e.n:,}",
        e.note,
    )


def commands(content: ReportContent) -> list[tuple[str, str]]:
    """(what it makes, the command) for everything in a report."""
    source = content.source
    found = [
        ("this report with every figure and table as files", f"sharpscope analyze {source} --out report"),
        ("this page alone", f"sharpscope report {source} --out report.html"),
        ("a verdict in full (here C7)", f"sharpscope claims {source} --claim C7 --details"),
    ]
    found += [
        (f"every figure of {path}", f"sharpscope figures --from {shlex.quote(path)} --out figures")
        for path in content.paths
    ]
    for run in list(content.runs)[:20]:
        if run.config_text is None:
            continue
        name, folder, first = shlex.quote(run.name), shlex.quote(str(run.path)), ""
        if not run.path.exists():  # it is in a pack
            first, folder = f"sharpscope unpack {folder} --out runs && ", f"runs/{name}"
        found.append(
            (f"the run {run.name}, again", f"{first}sharpscope run {folder}/config.yaml --out runs/again-{name}")
        )
    return found


def number(value: object) -> str:
    """Three significant digits; – where there is no number."""
    try:
        found = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "–"
    return "–" if math.isnan(found) else f"{found:.3g}"


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

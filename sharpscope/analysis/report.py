"""A report as plain values: `build(runs)` gathers what html/, markdown.py and the files of `analyze` render."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from sharpscope.analysis.claims import REDUCERS, Estimate, Verdict, claim_pictures, study_of, verdicts_of
from sharpscope.analysis.comparison import INTERVALS, compare, facts_of
from sharpscope.analysis.completions import Choice, choose, completions_dropped
from sharpscope.analysis.figures.forks import fork_effects
from sharpscope.analysis.figures.study import study_pictures
from sharpscope.analysis.figures.style import Picture
from sharpscope.analysis.figures.surface import split_of
from sharpscope.analysis.forks import COMPARISONS, fork_differences, fork_table
from sharpscope.analysis.loading import Paths, quiet
from sharpscope.analysis.mismatch import mismatch_table, worst_ranges
from sharpscope.analysis.overview import Overview, overview, verdict_line
from sharpscope.analysis.power import outline
from sharpscope.analysis.reliability import MISSING as RELIABILITY_MISSING
from sharpscope.analysis.reliability import TARGET as RELIABLE
from sharpscope.analysis.reliability import reliability_table
from sharpscope.analysis.spikes import find_spikes
from sharpscope.analysis.study import Study, studies
from sharpscope.analysis.tables.endpoints import endpoint_tables
from sharpscope.analysis.tables.paper import Table, paper_tables
from sharpscope.analysis.tables.summary import SUMMARY, interval_text, method_table, summary
from sharpscope.analysis.terminal import peak_memory
from sharpscope.analysis.text import Grid, number
from sharpscope.traces import Run, Runs

FORK_NOTE = (
    "One update of each method from the same state on the same rollouts, measured on the same completions by importance "
    "weighting. Cells: difference to the reference with 95 % t-interval; of the reference itself, its change. A negative "
    "difference of a failure means that the arm improves more than the reference. The prediction is to first order, of the "
    "first outcome."
)
COMPARISON_TEXT = {
    "step": "the optimizer's step as it is",
    "norm": "scaled to the norm of the reference's step",
    "kl": "scaled to the KL of the reference's step",
}
MOST_PAIRS = 12
MOST_EVENTS = 200
MOST_ROWS = 100
_TOLD_APART = 3
_ESTIMATES = ("k1", "k2", "k3")
SAMPLER_DIFFERS = 1e-3
"""Mean difference of log-probabilities from which a sampler differs [nats]."""


@dataclass(frozen=True)
class StudySection:
    """A study: its summary table, tables of text, and the figures that belong to no claim, by file name."""

    study: Study
    summary: pd.DataFrame
    grids: tuple[Grid, ...]
    figures: dict[str, Picture]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class VerdictSection:
    """A verdict with its figures by file name, its numbers, the rows read, and the data behind it.

    `line`: statistic and interval, or why there is none. `command` prints it again.
    """

    verdict: Verdict
    figures: dict[str, Picture]
    missing: tuple[str, ...]
    line: str
    numbers: Grid | None
    read: Grid | None
    frames: tuple[Grid, ...]
    command: str


@dataclass(frozen=True)
class ForkSection:
    """Counterfactual updates with one set of settings: differences by arm, tables of text, and the figure."""

    name: str
    differences: pd.DataFrame
    grids: tuple[Grid, ...]
    picture: Picture


@dataclass(frozen=True)
class Report:
    """Everything a report says.

    Attributes:
        overview: the first screen; None if no run has a step.
        runs: all readable runs.
        source: where they were read from, as a shell takes it.
        messages: what a reader should know first.
        studies: none if no run has a step.
        verdicts: of every claim, in their order.
        tables: the paper's tables and those of where training ended.
        run_grid, event_grid, spike_grid, cost_grid: one row per run, event, spike, run.
        sampler: how far the sampler's log-probabilities are from the trainer's: a table of the runs where they differ, or one
            line; None if no run has the sampler's.
        spike_notes: the text if no spike or no completion can be shown.
        commands: what each command makes.
        choices: completions that are shown, by run.
        forks: counterfactual updates, one section for each set of settings.
    """

    overview: Overview | None
    runs: Runs
    source: str
    messages: tuple[str, ...]
    studies: tuple[StudySection, ...]
    verdicts: tuple[VerdictSection, ...]
    tables: tuple[Table, ...]
    run_grid: Grid
    event_grid: Grid | None
    spike_grid: Grid | None
    cost_grid: Grid
    sampler: Grid | str | None
    no_spikes: str
    not_kept: str
    commands: Grid
    choices: dict[str, Choice]
    forks: tuple[ForkSection, ...] = ()

    @property
    def figures(self) -> dict[str, Figure]:
        """Every figure by file name: the studies', then the claims', then those of counterfactual updates."""
        sections: list[StudySection | VerdictSection] = [*self.studies, *self.verdicts]
        result = {name: picture for section in sections for name, picture in section.figures.items()}
        result |= {section.picture.name: section.picture for section in self.forks}
        return {name: picture.figure for name, picture in result.items() if picture.figure is not None}

    @property
    def judged(self) -> tuple[VerdictSection, ...]:
        """Claims that these runs can test."""
        return tuple(section for section in self.verdicts if section.verdict.verdict != "untestable")

    @property
    def untestable(self) -> tuple[VerdictSection, ...]:
        """Claims that these runs cannot test."""
        return tuple(section for section in self.verdicts if section.verdict.verdict == "untestable")

    @property
    def verdict_line(self) -> str:
        """How many claims can be judged, which, and what the others need."""
        return verdict_line([section.verdict for section in self.verdicts], self.source)

    @property
    def summary(self) -> pd.DataFrame:
        """The studies' summary tables as one."""
        tables = [section.summary for section in self.studies if len(section.summary)]
        return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=SUMMARY)

    @property
    def missing(self) -> list[str]:
        """What is missing for figures of studies, one line each."""
        several = len(self.studies) > 1
        return [f"{s.study.name}: {text}" if several else text for s in self.studies for text in s.missing]


def build(
    runs: Runs,
    paths: Paths = (),
    *,
    baseline: str = "grpo",
    treatment: str = "grpo-sg",
    on_progress: Callable[[str], None] | None = None,
) -> Report:
    """Test the claims, draw the figures and gather the tables of `runs`; nothing is written.

    Args:
        runs: from `load_runs` or `load_several`.
        paths: where they were read from, for the commands that make the report again.
        baseline, treatment: the methods that the claims compare.
        on_progress: called with what is being done.
    """
    tell = on_progress or (lambda text: None)
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    source = " ".join(shlex.quote(str(path)) for path in given)
    with quiet():
        whole = study_of(runs, baseline, treatment)
        tell("reading tokens")
        whole.read_tokens(REDUCERS)
        tell("testing the claims")
        verdicts = verdicts_of(whole)
        of_claims: list[tuple[str, Picture]] = []
        every = studies(whole)
        sections = []
        for study in every:
            if study.settings:
                own = []
                for picture in study_pictures(study):
                    tell(f"{study.slug}{picture.name}")
                    own.append((f"{study.slug}{picture.name}", picture))
                of_claims += [pair for pair in own if pair[1].claim]
                sections.append(_study_section(study, own))
        of_claims += [(picture.name, picture) for picture in claim_pictures(verdicts, whole)]
        if sections and (planned := outline(verdicts, whole.terms.level)) is not None:
            # of the study with the most runs, whose pairs the claims compare
            first = next((k for k, section in enumerate(sections) if not section.study.slug), 0)
            grid, drawn = planned
            main = sections[first]
            sections[first] = replace(main, grids=(*main.grids, grid), figures=main.figures | {drawn.name: drawn})
        return Report(
            overview=overview(whole, not_kept(runs)),
            runs=runs,
            source=source,
            messages=tuple(_messages(runs, every)),
            studies=tuple(sections),
            verdicts=tuple(_verdict_section(verdict, of_claims, source) for verdict in verdicts),
            tables=(*paper_tables(whole), *endpoint_tables(whole)),
            run_grid=run_grid(runs),
            event_grid=event_grid(runs),
            spike_grid=spike_grid(runs),
            cost_grid=cost_grid(runs),
            sampler=sampler_part(runs),
            no_spikes=no_spikes(runs),
            not_kept=not_kept(runs),
            commands=command_grid(runs, given, source),
            choices=choose(runs.by_name),
            forks=tuple(fork_sections(runs)),
        )


def fork_sections(runs: Runs) -> Iterator[ForkSection]:
    """A section for each set of settings with which counterfactual updates were made."""
    recorded = [run for run in runs if run.rows("forks")]
    if not recorded:
        return
    differences = fork_differences(runs.forks)
    for count, (name, own) in enumerate(differences.groupby("fork", sort=False), 1):
        settings = next(run.info.get("forks", {}).get(name, {}) for run in recorded if name in set(run.forks["fork"]))
        states = list(dict.fromkeys(own["state"]))
        grids = []
        for state in states:
            # Of several states, the matched comparisons are shown for all of them together; the table has the rest.
            for comparison in COMPARISONS if state == states[-1] else COMPARISONS[:1]:
                columns, rows = fork_table(own, state, comparison)
                if rows:
                    grids.append(Grid(f"{state}, {COMPARISON_TEXT[comparison]}", columns, tuple(rows)))
        updates = settings.get("updates", 1)
        made = runs.forks[runs.forks["fork"] == name].groupby(["run", "step"])["batch"].nunique()
        batches = " to ".join(str(count) for count in sorted({int(made.min()), int(made.max())}))
        text = f"{FORK_NOTE} {batches} batches of each state, {updates} step{'' if updates == 1 else 's'} per arm."
        label = f"fork_{name}" if differences["fork"].nunique() > 1 else "forks"
        yield ForkSection(f"Fork {count}", own, tuple(grids), Picture(label, text, fork_effects(own)))


def _study_section(study: Study, pictures: Sequence[tuple[str, Picture]]) -> StudySection:
    table = summary(study)
    reliable = reliability_grid(study)
    grids = (result_grid(study, table), difference_grid(study), setting_grid(study), reliable)
    figures = {name: picture for name, picture in pictures if picture.figure is not None and not picture.claim}
    missing = tuple(picture.missing for _, picture in pictures if picture.missing)
    missing += () if reliable is not None else (RELIABILITY_MISSING,)
    return StudySection(study, table, tuple(grid for grid in grids if grid is not None), figures, missing)


def _verdict_section(verdict: Verdict, pictures: Sequence[tuple[str, Picture]], source: str) -> VerdictSection:
    own = [(name, picture) for name, picture in pictures if picture.claim == verdict.claim]
    effect, line = verdict.effect, verdict.reason
    if verdict.verdict != "untestable" and effect is not None and number(effect.value) != "–":
        interval = "" if effect.interval is None else f" {effect.interval_text}"
        line = f"{effect.name} {effect.text}{interval}, n = {verdict.n:,}"
    if verdict.beside is not None:
        line += f"; {verdict.beside.version}: {verdict.beside.verdict}"
    return VerdictSection(
        verdict,
        {name: picture for name, picture in own if picture.figure is not None},
        tuple(picture.missing for _, picture in own if picture.missing),
        line,
        number_grid(verdict),
        read_grid(verdict),
        tuple(frame_grids(verdict)),
        f"sharpscope claims {source} --claim {verdict.claim} --details",
    )


def _messages(runs: Runs, every: Sequence[Study]) -> list[str]:
    """Runs left out, damaged parts, rewards that are not numbers, and one line for each rule that warned in a run."""
    messages = [f"{name} is left out: {why}" for name, why in runs.skipped.items()]
    messages += [f"{run.name}: {part} is set aside: {why}" for run in runs for part, why in run.damaged.items()]
    for study in every:
        messages += study.notes
        for _, _, run in study.each():
            bad = run.steps.loc[run.steps["reward_mean"].isna(), "step"].tolist()
            if 0 < len(bad) < len(run.steps):  # of a run without any reward, none was recorded
                messages.append(
                    f"{run.name}: the reward is not a number in {len(bad)} of {len(run.steps)} steps (first: {bad[0]}); "
                    "curves have gaps there and means over them are not numbers."
                )
        for _, _, run in study.each():
            for rule, events in run.events[run.events["severity"] != "info"].groupby("rule"):
                last = events.iloc[-1]
                text = f"{rule} × {len(events)}, last at step {last['step']}: {last['message']}"
                messages.append(f"{run.name}: {text}")
    return messages


def run_grid(runs: Runs) -> Grid:
    """One row per run; runs that cannot be read come last."""
    rows = [
        (
            name,
            run.method,
            str(run.seed),
            run.task,
            _status(run),
            str(len(run.steps)),
            str(run.info.get("started") or "–"),
            str(run.info.get("commit") or "–")[:12],
        )
        for name, run in runs.by_name.items()
    ]
    rows += [(name, "–", "–", "–", f"cannot be read: {why}", "–", "–", "–") for name, why in runs.skipped.items()]
    return Grid("Runs", ("run", "method", "seed", "task", "status", "steps", "started", "commit"), tuple(rows))


def _status(run: Run) -> str:
    """The status, and how an unfinished run ended if run.json says so."""
    why = run.info.get("end")
    return run.status if run.status == "finished" or not why else f"{run.status}: {why}"


def result_grid(study: Study, summary: pd.DataFrame) -> Grid | None:
    """Results of each setting with their intervals, settings across. `summary`: of `tables.summary`."""
    if not len(summary):
        return None
    flipped = method_table(summary).set_index("setting").T.reset_index(names="metric")
    units = dict(zip(summary["metric"], summary["unit"], strict=True))
    flipped.insert(1, "unit", [units.get(name, "") for name in flipped["metric"]])
    text = f"All settings at step {study.horizon}, the last that all have. ±: half of the 95 % t-interval over seeds"
    single = bool((summary["runs"] == 1).any())
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
        result = compare(first, second)
        for row in result.results.to_dict("records"):
            cells = [interval_text(row[name], row[f"{name}_half"]) for name in ("a", "b", "difference")]
            names = f"{second.name} − {first.name}"
            rows.append((names, str(seed), f"{result.horizon}", row["quantity"], row["unit"], *cells))
        warnings += result.warnings
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
        (
            row["run"],
            str(row["step"]),
            row["severity"],
            row["rule"],
            number(row["value"]),
            number(row["threshold"]),
            row["action"],
            row["message"],
        )
        for row in loud.head(MOST_EVENTS).to_dict("records")
    ]
    note = f"The first {MOST_EVENTS} of {len(loud)}." if len(loud) > MOST_EVENTS else ""
    return Grid(
        "Events", ("run", "step", "severity", "rule", "value", "threshold", "action", "message"), tuple(rows), note
    )


def cost_grid(runs: Runs) -> Grid:
    """Seconds of each kind and the most memory, a row a run."""
    rows = []
    for name, run in runs.by_name.items():
        parts = [float(run.steps[f"{kind}_s"].sum()) for kind in ("generation", "training", "recording")]
        if len(run.steps) and run.steps["training_s"].isna().all():  # imported
            rows.append((name, *["–"] * 7))
            continue
        probes = float(pd.to_numeric(run.probes["seconds"], errors="coerce").sum())
        count = max(1, len(run.steps))
        cells = (*(f"{seconds:,.1f}" for seconds in (*parts, probes)), f"{sum(parts) / count:.2f}")
        rows.append((name, *cells, peak_memory(run) or "–", str(run.info.get("device") or "–")))
    seconds = ("generation [s]", "training [s]", "recording [s]", "of it probes [s]", "a step [s]")
    columns = ("run", *seconds, "peak memory", "device")
    note = "Sums over the recorded steps; evaluation and loading are not in them. Recording holds the probes of a step."
    return Grid("Costs", columns, tuple(rows), note)


def reliability_grid(study: Study) -> Grid | None:
    """How reliably each measure of sharpness tells the study's runs apart; None if no run kept values by prompt."""
    table = reliability_table(study)
    if table.empty:
        return None
    rows = tuple(
        (
            row["functional"],
            split_of(row["probe_set"]),
            row["quantity"],
            number(row["rho"]),
            str(row["runs"]),
            str(row["prompts"]),
            number(row["half"]),
            number(row["reliability"]),
            number(row["prompts_needed"]),
            f"{row['relative_std_error']:.0%}" if math.isfinite(row["relative_std_error"]) else "–",
            f"{row['seconds']:.2f}",
        )
        for row in table.to_dict("records")
    )
    note = (
        "At each run's last probed step. Split-half: mean Spearman correlation over runs between the means of two random halves "
        f"of the prompts; reliability: of all prompts, by Spearman and Brown; prompts needed: for a reliability of {RELIABLE:g}. "
        "At least 3 runs are needed; runs that hardly differ in sharpness have a low reliability with any number of prompts."
    )
    columns = (
        "objective",
        "prompts of",
        "measure",
        "radius",
        "runs",
        "prompts",
        "split-half",
        "reliability",
        "prompts needed",
    )
    return Grid("Reliability of sharpness", (*columns, "standard error", "seconds"), rows, note)


def sampler_part(runs: Runs) -> Grid | str | None:
    """Sampler against trainer: a row for each run whose sampler differs, one line if none does; None without such data.

    A sampler differs where some ratio is outside [0.9, 1.1] or the mean |k1|, k2 or k3 exceeds `SAMPLER_DIFFERS`.
    """
    tables = {name: mismatch_table(run) for name, run in runs.by_name.items()}
    tables = {name: table for name, table in tables.items() if len(table)}
    rows = []
    for name, table in tables.items():
        whole = table.iloc[0]
        if whole["outside"] > 0 or max(abs(whole[k]) for k in _ESTIMATES) > SAMPLER_DIFFERS:
            estimates = (number(whole[k]) for k in _ESTIMATES)
            rows.append((name, f"{whole['tokens']:,}", f"{whole['outside']:.2%}", *estimates, worst_ranges(table)))
    if not tables:
        return None
    if not rows:
        largest = max(abs(table.iloc[0][k]) for table in tables.values() for k in _ESTIMATES)
        return (
            f"The sampler's and the trainer's log-probabilities agree in {'all' if len(tables) > 1 else 'the'} "
            f"{len(tables):,} run{'s' if len(tables) > 1 else ''}: no ratio is outside [0.9, 1.1], and no estimate of "
            f"KL(μ‖π) exceeds {largest:.1g} nats."
        )
    note = (
        "Ratio r = π/μ of the trainer's policy at the start of the step to the sampler's; KL(μ‖π) estimated by k1 = −ln r, "
        "k2 = (ln r)²/2, k3 = r − 1 − ln r. Probability: μ. A mean hides a few tokens that differ much."
    )
    if len(rows) < len(tables):
        note += f" They agree in the other {len(tables) - len(rows):,} of {len(tables):,} runs."
    columns = ("run", "tokens", "r outside [0.9, 1.1]", "k1 [nats]", "k2 [nats]", "k3 [nats]", "most outside at")
    return Grid("Sampler against trainer", columns, tuple(rows), note)


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
    """The text in place of spikes. A reduced run had attribution, but keeps it for few tokens."""
    return "No spike." if any(run.reduced is not None for run in runs) else "No spike, and no attribution is recorded."


def not_kept(runs: Runs) -> str:
    """Which runs have no completions because they are reduced; empty if there are none."""
    names = [name for name, run in runs.by_name.items() if completions_dropped(run)]
    if not names:
        return ""
    which = "these runs" if len(names) == len(runs) else f"{len(names)} of {len(runs)} runs"
    return (
        f"Completions of {which} were not kept by `export --to reduced`; a report of the whole runs shows their tokens."
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
    interval = "–" if e.interval is None else f"{e.interval_text} ({e.interval.level:.0%}, {e.interval.kind})"
    unit, n = "" if e.unit == "1" else e.unit, "–" if e.n is None else f"{e.n:,}"
    value = number(e.value) if e.scale == "plain" else e.text
    return (e.name, value, unit, interval, number(e.p_value), n, e.note)


def command_grid(runs: Runs, paths: Sequence[str | Path], source: str) -> Grid:
    """What each command makes, for everything in a report."""
    result = [
        ("this report with every figure and table as files", f"sharpscope analyze {source} --out report"),
        ("this page alone", f"sharpscope report {source} --out report.html"),
        ("a verdict in full (here C7)", f"sharpscope claims {source} --claim C7 --details"),
    ]
    for path in paths:
        command = f"sharpscope figures --from {shlex.quote(str(path))} --out figures"
        result.append((f"every figure of {path}", command))
    for run in list(runs)[:20]:
        if run.config_text is None:
            continue
        name, folder, first = shlex.quote(run.name), shlex.quote(str(run.path)), ""
        if not run.path.exists():  # it is in a pack
            read = f"import sharpscope; print(sharpscope.load_run({str(run.path)!r}).config_text)"
            first, folder = (
                f"mkdir runs/{name} && python -c {shlex.quote(read)} > runs/{name}/config.yaml && ",
                f"runs/{name}",
            )
        command = f"{first}sharpscope run {folder}/config.yaml --out runs/again-{name}"
        result.append((f"the run {run.name}, again", command))
    return Grid("Commands", ("makes", "command"), tuple(result))


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

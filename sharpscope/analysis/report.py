"""What a run, or several, are shown as: a list of sections, the same for `show` and for the page of `analyze`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from sharpscope.analysis.cause_sections import identity_sections
from sharpscope.analysis.curves import study_charts, study_values
from sharpscope.analysis.effects import effect_headline
from sharpscope.analysis.forks import fork_differences, fork_sections
from sharpscope.analysis.headline import (
    largest_update,
    layer_sections,
    moved_sections,
    over_seeds,
    step_sections,
    trained_text,
)
from sharpscope.analysis.measures import (
    STEPS,
    Quantity,
    Z,
    critical_text,
    known,
    rotates,
    sharpness_rows,
)
from sharpscope.analysis.pairs import compare_runs
from sharpscope.analysis.sections import Section, records_of
from sharpscope.analysis.spikes import recorded_by
from sharpscope.analysis.statistics import FEW_PAIRS, FEWEST, NO_COLLAPSE, series_mean
from sharpscope.analysis.study import Setting, Study, flat, per_run, studies
from sharpscope.analysis.summary import facts_of, verdict
from sharpscope.analysis.text import (
    WIDE,
    change_text,
    interval_text,
    method_label,
    number,
    percent,
    printable,
    value_text,
)
from sharpscope.analysis.token_values import (
    entropy_section,
    sampler_section,
    selection_section,
)
from sharpscope.analysis.token_view import RULE, Choice, choose
from sharpscope.analysis.update_parts import telling_sections
from sharpscope.diagnose.report import sparkline
from sharpscope.traces import MAX_SATURATION, Row, Run, Runs

SHOWN_SETTINGS = 4
"""Settings of a study that curves and tables show: those of the comparison, then those with the most seeds."""
LARGEST_TOKENS = 5
LARGEST_STEPS = 6
"""Steps whose largest tokens are listed on the page, the spike that is the most times the typical gradient first."""
WIDTH = 20
"""Bars of a sparkline in a table, which fits into 80 columns."""
GROWN = 2.0
"""`show` names the layers that grew where the gradient norm is at least this many times the typical one."""
HEADLINE = (
    "accuracy, greedy",
    "accuracy, T = 1",
    "reward",
    "SAM sharpness of expected_failure",
    "SAM sharpness of nll",
)
"""What the headline compares, in this order: ends or beginnings of quantities of `compare_runs`, not of the split `train`."""
COVERED = "±: 95 % interval. One pair: over steps or prompts, which says nothing about other seeds; several: Student's t over pairs."
Estimated = Mapping[Hashable, Any]
"""A row of `sharpness_rows`."""


@dataclass(frozen=True)
class Page:
    """What `analyze` writes: sections in order, charts, tables of numbers by name, and the completions that are shown by run."""

    runs: Runs
    source: str
    sections: list[Section]
    charts: list[dict[str, object]]
    tables: dict[str, pd.DataFrame]
    choices: dict[str, Choice]
    rule: str = RULE


def run_sections(run: Run) -> list[Section]:
    """One run, for a terminal: headline, curves, accuracy, sharpness, and what happened."""
    runs = Runs(run.path, {run.name: run}, {})
    title = f"{run.name} · {run.status}"
    problems = problem_sections(runs)
    if run.steps.empty:
        nothing = Section("", "No step is recorded yet.")
        return [Section(title, facts_of(run)), nothing, *problems]
    study = Study({run.name: run}, name=run.task)
    parts = [
        Section(title, f"{verdict(run)}\n{facts_of(run)}"),
        *found_sections(study, study.settings),
    ]
    spike = largest_update(run)
    parts += telling_sections(run, None if spike is None else spike.step)
    if spike is not None and spike.times >= GROWN:
        parts += layer_sections(run, spike.step)
    parts += filter(None, [entropy_section(run), selection_section(run)])
    parts.append(Section("Curves", curve_table(run), "Means of the first and the last third."))
    return [*parts, *sharpness_sections(study.settings), *problems]


def runs_sections(runs: Runs) -> list[Section]:
    """Several runs, for a terminal: what each study found, how its settings differ, and the list of runs."""
    parts: list[Section] = []
    for study, settings in laid_out(runs):
        parts += study_sections(study, settings)
    return [*parts, Section("Runs", run_table(runs), part="Compare"), *problem_sections(runs)]


def study_sections(study: Study, settings: Sequence[Setting]) -> list[Section]:
    """What a study found, with its name before the titles if there is another study of as many runs, or of more."""
    sections = [*found_sections(study, settings), *comparison_sections(study, settings)]
    sections += [*setting_sections(study), *sharpness_sections(settings)]
    name = f"{study.name}: " if study.slug else ""
    return [replace(one, title=f"{name}{one.title}" if one.title else "") for one in sections]


def page_of(runs: Runs, source: str = "", claims: bool = False) -> Page:
    """Everything on the page; `source`: where `runs` were read from, as a shell takes it; `claims`: test the published claims too."""
    sections: list[Section] = []
    charts: list[dict[str, object]] = []
    tables: dict[str, pd.DataFrame] = {"runs": runs.table, "events": runs.events}
    for study, settings in laid_out(runs):
        sections += study_sections(study, settings)
        charts.append(study_charts(study, settings, runs))
        shown = study.only([setting.label for setting in settings])
        tables[f"{study.slug}comparison"] = comparison(study)
        tables[f"{study.slug}curves"] = study_values(shown)
    if claims:
        from sharpscope.analysis.claims import claim_sections

        sections += claim_sections(runs)
    if any(run.rows("forks") for run in runs):
        tables["forks"] = fork_differences(runs.forks)
        several = tables["forks"]["fork"].nunique() > 1
        for name, rows in tables["forks"].groupby("fork", sort=False):
            sections += fork_sections(rows, title=f"{name}: " if several else "")
    choices = choose(runs.by_name)
    sections += token_sections(choices)
    sections += identity_sections(runs)
    sections += [Section("Runs", run_table(runs), part="Compare"), *problem_sections(runs)]
    if len(runs) == 1:
        sections = list(map(_alone, sections))
    sections.append(Section("", command_table(runs, source), part="Make it again"))
    return Page(runs, source, sections, charts, tables, choices)


def token_sections(choices: Mapping[str, Choice]) -> list[Section]:
    """The tokens, parts and layers of the LARGEST_STEPS of all runs; of a run without shares of tokens, what its last step tells."""
    sections: list[Section] = []
    largest = [(choice.run, spike) for choice in choices.values() for spike in choice.spikes]
    largest.sort(key=lambda one: one[1].rank, reverse=True)
    for run, spike in largest[:LARGEST_STEPS]:
        details = [
            *step_sections(run, spike, LARGEST_TOKENS),
            *telling_sections(run, spike.step),
            *layer_sections(run, spike.step),
        ]
        sections += [replace(one, part="Tokens", step=spike.step) for one in details]
    for choice in choices.values():
        if not choice.spikes:
            sections += [replace(one, part="Tokens") for one in telling_sections(choice.run)]
    return sections


def _alone(section: Section) -> Section:
    """A section of a page of one run, where there is nothing to compare."""
    if section.part != "Compare":
        return section
    return replace(section, part="Events and cost" if section.title == "Runs" else "Found")


def laid_out(runs: Runs) -> list[tuple[Study, list[Setting]]]:
    """Each study that has steps with the settings that are shown, the baseline of comparisons first."""
    return [(study, shown_settings(study)) for study in studies(runs) if study.settings]


def shown_settings(study: Study) -> list[Setting]:
    """The baseline of comparisons, then the methods that claims compare, then the settings with the most seeds."""
    leading = [*comparison(study)["baseline"][:1], study.baseline, study.treatment]

    def rank(one: Setting) -> tuple[int, int, str]:
        """Its place among `leading`, or behind them; then the number of seeds."""
        place = leading.index(one.label) if one.label in leading else len(leading)
        return place, -len(one.runs), one.label

    return sorted(study.settings, key=rank)[:SHOWN_SETTINGS]


# -- Found and Compare ---------------------------------------------------------------------------------------------------


def found_sections(
    study: Study, settings: Sequence[Setting], top: int = 4, runs: int = 2
) -> list[Section]:
    """The headline: what was trained and its accuracy, `top` tokens of the first `runs` settings, whether the method mattered."""
    first = [next(iter(setting.runs.values())) for setting in settings[:runs]]
    text = trained_text(study, settings[:2])
    parts = [Section("What was found", text)] if text else []
    for run in first:
        parts += effect_headline(run, top)
    return [*parts, *moved_sections(first, top), *difference_sections(study, settings)]


@per_run
def comparison(study: Study) -> pd.DataFrame:
    """`compare_runs` of a study, computed once."""
    return compare_runs(study.runs)


def compared_settings(
    study: Study, settings: Sequence[Setting]
) -> list[tuple[str, str, pd.DataFrame]]:
    """(baseline, treatment, rows of `comparison`) of the settings that are shown, in their order."""
    pairs = comparison(study).groupby(["baseline", "treatment"])
    groups = {str(second): (str(first), str(second), rows) for (first, second), rows in pairs}
    if len(study.settings) < 3:  # two runs are named by themselves where their method is the same
        return list(groups.values())
    return [groups[setting.label] for setting in settings if setting.label in groups]


def main_differences(rows: pd.DataFrame) -> pd.DataFrame:
    """Those of HEADLINE among the rows of `comparison`, in its order."""
    found = []
    others = rows[~rows["quantity"].str.startswith("train")]
    names = others["quantity"].str
    for name in HEADLINE:
        found.append(others[names.startswith(name) | names.endswith(name)])
    return pd.concat(found)


def difference_sections(study: Study, settings: Sequence[Setting]) -> list[Section]:
    """Whether the change of method mattered: the main differences of the first two settings, in words and numbers."""
    pairs = compared_settings(study, settings)
    if not pairs:
        return []
    baseline, treatment, rows = pairs[0]
    main = main_differences(rows).head(6)
    runs = [run for label, _, run in study.each() if label == treatment]
    said = turning_texts(runs)
    n = main["n"].max() if len(main) else 0
    if n == 1:
        said.append("One pair of runs: repeat with more seeds before believing a difference.")
    else:
        said.append(f"{n} seeds.")
    for halve in main["to_halve"].dropna()[:1]:
        said.append(f"{halve:.0f} seeds would halve the intervals.")
    names = f"{method_label(treatment)} change anything, compared with {method_label(baseline)}?"
    shown = difference_table(main).drop(columns=_PAIRS, errors="ignore")
    return [Section(f"Did {names}", shown, " ".join(said), records=records_of(main))]


def turning_texts(runs: Sequence[Run]) -> list[str]:
    """How far a method turns the gradient and how far the noise does, over the runs in which it does at all."""
    said = []
    steps = [run.steps for run in runs if rotates(run)]
    for name, text in (
        ("gradient_rotation", "It turns the gradient by"),
        ("noise_rotation", "The noise of one batch turns it by about"),
    ):
        angles = [angle for table in steps for angle in table[name].dropna()]
        if angles:
            said.append(f"{text} {np.mean(angles):.0f}°.")
    return said


_PAIRS = ["pairs", "worst pair"]


def comparison_sections(study: Study, settings: Sequence[Setting]) -> list[Section]:
    """All paired differences, a table for each of the `settings` that has pairs with the baseline."""
    result = []
    for baseline, treatment, rows in compared_settings(study, settings):
        n = rows["n"].max()
        title = f"{method_label(treatment)} − {method_label(baseline)}"
        note = f"{n} pair{'s' if n > 1 else ''} of runs. {COVERED}"
        table = difference_table(rows)
        result.append(Section(title, table, note, "Compare", records=records_of(rows)))
    return result


def difference_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of `compare_runs` as text: quantity, both values, difference with interval, what it shows, pairs, worst pair."""
    frame = pd.DataFrame(list(map(_difference_cells, rows.to_dict("records"))))
    return frame if (rows["n"] > 1).any() else frame.drop(columns=_PAIRS, errors="ignore")


def _difference_cells(row: Mapping[Hashable, Any]) -> dict[str, str]:
    """One row of `difference_table`."""
    n = row["n"]
    unit = row["unit"]
    share = unit == "share"
    factor = 100 if share else 1
    quantity = row["quantity"]
    if unit not in ("share", "1", "reward"):
        quantity += f" [{unit}]"
    cells = {"quantity": quantity}
    for side in ("baseline", "treatment"):
        end = number(factor * row[f"{side}_value"])
        cells[method_label(row[side])] = f"{end} %" if share and end != "–" else end
    cells["difference"], cells["shows"] = _difference_texts(row)
    cells["pairs"] = str(n)
    worst = f"{number(factor * row['worst'])} ({row['worst_pair']})"
    cells["worst pair"] = worst if n > 1 else ""
    return cells


def _difference_texts(row: Mapping[Hashable, Any]) -> tuple[str, str]:
    """The difference of a row with its interval, and what that shows, or why there is none."""
    value = row["difference"]
    if not math.isfinite(value):
        return "–", row["note"]
    share = row["unit"] == "share"
    factor = 100 if share else 1
    half = (row["high"] - row["low"]) / 2
    text = "0"
    if value != 0 or half > 0:
        text = interval_text(factor * value, factor * half, sign=True)
        text += " points" if share else ""
    clear = verdict_of(row["low"], row["high"], row["n"], counted=share)
    if clear and 1 < row["n"] < FEW_PAIRS:
        clear += f"; {NO_COLLAPSE}"
    return text, clear


def verdict_of(low: float, high: float, n: int, counted: bool) -> str:
    """What an interval shows. None of seeds that all agree, or of fewer than FEWEST where counts make a share coarse."""
    if not math.isfinite(high - low):
        return ""
    if high == low or (n > 1 and counted and n < FEWEST):
        return "too few seeds to tell"
    return "a difference" if low > 0 or high < 0 else "no difference shown"


def setting_sections(study: Study) -> list[Section]:
    """What the configurations of a study's settings differ in; values that differ between a setting's runs are joined."""
    settings = study.settings[:SHOWN_SETTINGS]
    configs = [[flat(run.config) for run in setting.runs.values()] for setting in settings]
    keys: dict[str, None] = {}  # in their order
    for several in configs:
        for config in several:
            keys |= dict.fromkeys(config)
    rows = []
    for key in keys:
        cells = [_values_text(config.get(key) for config in several) for several in configs]
        if len(set(cells)) > 1 and key not in ("name", "out", "method.name", "seed"):
            rows.append((key, *cells))
    labels = [method_label(setting.label) for setting in settings]
    frame = pd.DataFrame(rows, columns=["setting", *labels])
    return [Section("Settings that differ", frame, part="Compare")] if rows else []


def _values_text(values: Iterable[object]) -> str:
    """Different values of a setting, joined."""
    texts: dict[str, None] = {}
    for value in values:
        text = "none" if value is None else str(value)
        texts[number(value) if isinstance(value, float) else text] = None
    return printable(", ".join(texts), 60)


# -- Sharpness -----------------------------------------------------------------------------------------------------------


def sharpness_sections(settings: Sequence[Setting]) -> list[Section]:
    """Sharpness at the first and the last step measured; a change is paired by prompt. Saturated estimates are marked."""
    runs = [(setting.label, run) for setting in settings for run in setting.runs.values()]
    ends = pd.DataFrame([each for label, run in runs for each in _sharpness_ends(label, run)])
    if ends.empty:
        why = recorded_by(runs[0][1], "probes.preset")
        return [Section("Sharpness", f"Not recorded{why}.", part="Sharpness")]
    groups = [
        several
        for _, of_measure in ends.groupby("measure", sort=False)
        for _, several in of_measure.groupby("setting", sort=False)
    ]
    frame = _dense(pd.DataFrame(list(map(_sharpness_cells, groups))))
    note = (
        "Rise of the loss within the radius (SAM; its value for many prompts lies between plain and cross-fitted), eigenvalue, or 2 / "
        "critical learning rate. ± or [ ]: 95 % interval over prompts or seeds; critical sharpness is of the update's own batch and has "
        "none, relative critical sharpness is of other prompts."
    )
    if "of possible" in frame:
        note += f" Above {percent(MAX_SATURATION)} of the possible rise it says how many answers are right, not how sharp the loss is."
    if len(runs) == 1 and (said := critical_text(runs[0][1].probes)):
        note += f" Last update measured: {said}."
    return [Section("Sharpness at the steps where it was measured", frame, note, "Sharpness")]


def _sharpness_cells(several: pd.DataFrame) -> dict[str, str]:
    """What is shown of a measure in the runs of a setting, rows of `_sharpness_ends`."""
    spans = [_span(several["first_step"]), _span(several["last_step"])]
    steps = [span for span in spans if span]
    named = f"step{'s' if len(steps) > 1 else ''} {' and '.join(steps)}"
    worst = several["saturation"].max()
    possible = percent(worst) if worst >= 0 else "–"
    if worst > MAX_SATURATION:
        possible += " (saturated)"
    return {
        "measure": f"{several['measure'].iloc[0]}; {named}",
        "setting": method_label(several["setting"].iloc[0]),
        "at the first": _value_text(several, "first"),
        "at the last": _value_text(several, "last"),
        "change": change_text(*over_seeds(several[["change", "change_half"]])),
        "of possible": possible,
    }


def _sharpness_ends(setting: str, run: Run) -> Iterator[Row]:
    """For each measure of a run its first estimate, and where there are several steps the last one and the change."""
    estimates = dict[str, list[Estimated]]()
    for row in sharpness_rows(run).to_dict("records"):
        estimates.setdefault(row["measure"], []).append(row)
    for measure, rows in estimates.items():
        first = rows[0]
        last = rows[-1]
        if first["step"] == last["step"]:  # measured once
            last = dict.fromkeys(last, math.nan)
            change, half = math.nan, math.nan
        else:
            change, half = _paired(run, first, last)
        saturations = [row["saturation"] for row in rows if pd.notna(row["saturation"])]
        yield {
            "setting": setting,
            "measure": measure,
            "saturation": max(saturations, default=math.nan),
            "first_step": first["step"],
            "first": first["value"],
            "first_half": first["half"],
            "first_text": first["text"],
            "last_step": last["step"],
            "last": last["value"],
            "last_half": last["half"],
            "last_text": last["text"],
            "change": change,
            "change_half": half,
        }


def _value_text(rows: pd.DataFrame, end: str) -> str:
    """The mean over seeds of the first or the last estimates, with its interval; of one run the run's own."""
    if len(rows) == 1:
        return str(rows[f"{end}_text"].fillna("–").iloc[0])
    return value_text(*over_seeds(rows[[end, f"{end}_half"]]), WIDE)


def _span(steps: pd.Series) -> str:
    """The steps as text: `6`, or `4 to 6` where runs differ; empty without one."""
    there = [int(step) for step in steps.dropna()]
    if not there:
        return ""
    least = min(there)
    most = max(there)
    return str(least) if least == most else f"{least} to {most}"


def _dense(frame: pd.DataFrame) -> pd.DataFrame:
    """Without columns of dashes, and without the setting if there is one only."""
    told = (frame != "–").any()
    told["setting"] = frame["setting"].nunique() > 1
    return frame.loc[:, told]


def _paired(run: Run, first: Estimated, last: Estimated) -> tuple[float, float]:
    """Last minus first of a run's estimates, with half of its interval over prompts; NaN without values by prompt."""
    ends = pd.DataFrame([first, last])
    if ends["half"].isna().all() and ends["low"].notna().any():
        return math.nan, math.nan  # how far the ends of two such intervals can differ is not known
    change = float(last["value"]) - float(first["value"])
    values = _prompt_values(run)
    start = values.get(_estimate_key(first), {})
    end = values.get(_estimate_key(last), {})
    if len(start) < 2 or set(start) != set(end):
        return change, math.nan
    changes = np.array([end[prompt] - start[prompt] for prompt in start])  # (prompts,)
    return change, Z * changes.std(ddof=1) / math.sqrt(len(changes))


IDENTITY = ("step", "probe_set", "functional", "parameters", "quantity", "rho", "seed")
"""Columns that tell an estimate of the probes from another."""


def _estimate_key(row: Estimated) -> tuple[object, ...]:
    """IDENTITY of a row; None for what is null."""
    return tuple(None if pd.isna(row[name]) else row[name] for name in IDENTITY)


@per_run
def _prompt_values(run: Run) -> dict[tuple[object, ...], dict[object, float]]:
    """Estimate → prompt → its first value."""
    found: dict[tuple[object, ...], dict[object, float]] = {}
    rows = run.columns("probe_prompts", [*IDENTITY, "prompt", "value"])
    keys = rows[list(IDENTITY)].astype(object)
    keys = keys.where(keys.notna(), None)
    tuples = keys.itertuples(index=False, name=None)
    for key, prompt, value in zip(tuples, rows["prompt"], known(rows["value"]), strict=True):
        found.setdefault(key, {}).setdefault(prompt, float(value))
    return found


# -- One run -------------------------------------------------------------------------------------------------------------


def curve_table(run: Run) -> pd.DataFrame:
    """Quantity, mean of the first third, sparkline, mean of the last third ± its error over steps; what never varies is left out."""
    steps = run.steps.sort_values("step")
    quantities = STEPS
    if steps["reward_mean"].isna().all():  # of a method with advantages the loss says little
        quantities = {"loss": Quantity("loss")} | STEPS
    rows = []
    for column, quantity in quantities.items():
        if column not in steps:
            continue
        values = quantity.factor * known(steps[column])
        finite = values[np.isfinite(values)]
        if column.endswith("_rotation"):  # recorded at some steps only
            values = finite if rotates(run) else finite[:0]
        if not len(finite) or not len(values):
            continue
        constant = "[%]" in quantity.name or column == "weight_mean"
        if constant and np.ptp(finite) < 1e-6:
            continue
        third = max(1, len(values) // 3)
        first = values[:third].mean()
        last, error = series_mean(values[-third:])
        cells = {
            "by step": quantity.name,
            "first": number(first, "not a number"),
            "": sparkline(values, WIDTH),
            "last": interval_text(last, Z * error) if math.isfinite(last) else "not a number",
        }
        rows.append(cells)
    return pd.DataFrame(rows, columns=["by step", "first", "", "last"])


# -- Events and cost -----------------------------------------------------------------------------------------------------


def problem_sections(runs: Runs) -> list[Section]:
    """What a reader should know: runs left out, damaged parts, events, the sampler, and costs."""
    part = "Events and cost"
    result = []
    said = [f"{name} is left out: {why}" for name, why in runs.skipped.items()]
    for run in runs:
        said += [f"{run.name}: {file} is set aside: {why}" for file, why in run.damaged.items()]
    for study in studies(runs):
        said += study.notes
    if said:
        result.append(Section("To know", "\n".join(said), part=part))
    events = event_table(runs)
    if len(events):
        result.append(Section("Events", events, part=part))
    sampler = sampler_section(runs)
    if sampler is not None:
        result.append(sampler)
    costs = cost_table(runs)
    if len(costs):
        note = "Sums over the recorded steps; evaluation and loading are not in them. Recording includes the probes."
        result.append(Section("Cost", costs, note, part))
    return result


def event_table(runs: Runs) -> pd.DataFrame:
    """How often each rule fired in each run, with its last message; what is for information only is left out."""
    events = runs.events
    if events.empty:
        return events
    loud = events[events["severity"] != "info"].sort_values("step", kind="stable")
    same = loud.groupby(["run", "rule"], sort=False)
    table = same[["step", "message"]].last()
    table = table.assign(times=same.size()).reset_index()
    table = table.rename(columns={"step": "last step"})
    shown = ["run", "rule", "times", "last step", "message"]
    return table[shown if len(runs) > 1 else shown[1:]]


def cost_table(runs: Runs) -> pd.DataFrame:
    """Seconds of each kind and the most memory, a row a run; imported runs have none."""
    rows = []
    for name, run in runs.by_name.items():
        steps = run.steps
        if steps.empty or steps["training_s"].isna().all():
            continue
        kinds = ("generation", "training", "recording")
        parts = {kind: float(steps[f"{kind}_s"].sum()) for kind in kinds}
        seconds = (run.info.get("measuring") or {}).get("seconds") or {}
        # also before and after the steps
        parts["recording"] = sum(map(float, seconds.values())) or parts["recording"]
        total = sum(parts.values())
        held = run.info.get("peak_memory_bytes")
        sizes = held if isinstance(held, dict) else {"process": held}
        memory = [f"{kind} {size / 2**20:,.0f} MiB" for kind, size in sizes.items() if size]
        cells = {
            "run": name,
            "a step [s]": f"{total / len(steps):.2f}",
            "all [min]": f"{total / 60:.1f}",
        }
        for kind, part in parts.items():
            cells[kind] = percent(part / (total or 1.0))
        cells["peak memory"] = ", ".join(memory) or "–"
        cells["device"] = str(run.info.get("device") or "–")
        rows.append(cells)
    frame = pd.DataFrame(rows)
    return frame.drop(columns=["run", "device"], errors="ignore") if len(runs) == 1 else frame


# -- Runs and commands ---------------------------------------------------------------------------------------------------


def run_table(runs: Runs) -> pd.DataFrame:
    """One row per run; runs that cannot be read come last."""
    rows = []
    for name, run in runs.by_name.items():
        why = run.info.get("end")
        count = len(run.steps)
        rewards = known(run.steps.sort_values("step")["reward_mean"])
        reward, error = series_mean(rewards[-max(1, count // 3) :])
        cells = {
            "run": name,
            "method": method_label(run.method),
            "seed": str(run.seed),
            "task": run.task,
            "status": f"{run.status}: {why}" if why and run.status != "finished" else run.status,
            "steps": str(count),
            "reward, last third (± 95 % over steps)": interval_text(reward, Z * error),
        }
        rows.append(cells)
    for name, why in runs.skipped.items():
        rows.append({"run": name, "status": f"cannot be read: {why}"})
    return pd.DataFrame(rows).fillna("–")


def command_table(runs: Runs, source: str) -> pd.DataFrame:
    """What each command makes, for everything on a page."""
    rows = [
        ("this page and its tables", f"sharpscope analyze {source}"),
        ("figures for a paper", f"sharpscope analyze {source} --figures"),
    ]
    for run in list(runs)[:20]:
        if run.config_text is not None and run.path.exists():
            config = shlex.quote(str(run.path / "config.yaml"))
            again = shlex.quote(run.name)
            command = f"sharpscope run {config} --out runs/again-{again}"
            rows.append((f"the run {run.name}, again", command))
    return pd.DataFrame(rows, columns=["makes", "command"])

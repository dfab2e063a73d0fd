"""What a run, or several, are shown as: a list of sections, the same for `show` and for the page of `analyze`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from sharpscope.analysis.curves import study_charts
from sharpscope.analysis.forks import fork_differences, fork_sections
from sharpscope.analysis.headline import largest_update, layer_sections, moved_sections, step_sections, trained_text
from sharpscope.analysis.html.tokens import RULE, Choice, choose, completions_dropped
from sharpscope.analysis.measures import (
    STEPS,
    Quantity,
    Z,
    accuracy_values,
    critical_text,
    known,
    rotates,
    sharpness_rows,
    sharpness_values,
    step_values,
)
from sharpscope.analysis.pairs import compare_runs
from sharpscope.analysis.sections import Code, Section
from sharpscope.analysis.spikes import LARGE, SPIKE_Z, recorded_by
from sharpscope.analysis.statistics import mean_interval, series_mean
from sharpscope.analysis.study import Setting, Study, flat, last_step, per_run, studies
from sharpscope.analysis.text import interval_text, method_label, model_label, number, percent, printable, sampling
from sharpscope.analysis.token_values import entropy_section, gap_section, sampler_section, selection_section
from sharpscope.diagnose.report import sparkline
from sharpscope.traces import MAX_SATURATION, Run, Runs

SHOWN_SETTINGS = 4
"""Settings of a study that curves and tables show: those of the comparison, then those with the most seeds."""
LARGEST_TOKENS = 5
LARGEST_STEPS = 6
"""Steps whose largest tokens are listed on the page, the spike that is the most times the typical gradient first."""
HEADLINE = (
    *("accuracy, greedy", "accuracy, T = 1", "reward"),
    *("SAM sharpness of expected_failure", "SAM sharpness of nll"),
)
"""What the headline compares, in this order: ends or beginnings of quantities of `compare_runs`, not of the split `train`."""
COVERED = "±: 95 % interval. One pair: over steps or prompts, which says nothing about other seeds; several: Student's t over pairs."


@dataclass(frozen=True)
class Page:
    """What `analyze` writes: sections in order, charts, tables of numbers by name, and the completions that are shown by run."""

    runs: Runs
    source: str
    sections: list[Section]
    charts: list[dict[str, Any]]
    tables: dict[str, pd.DataFrame]
    choices: dict[str, Choice]
    rule: str = RULE


def run_sections(run: Run) -> list[Section]:
    """One run, for a terminal: headline, curves, accuracy, sharpness, and what happened."""
    runs = Runs(run.path, {run.name: run}, {})
    head = Section(f"{run.name} · {run.status}", _facts(run))
    if run.steps.empty:
        return [head, Section("", "No step is recorded yet."), *problem_sections(runs)]
    study = Study({run.name: run}, name=run.task)
    found = found_sections(study, study.settings)
    spike = largest_update(run)
    if spike is not None and (spike.z >= SPIKE_Z or spike.times >= LARGE):
        found += layer_sections(run, spike.step)
    curves = Section("Curves", curve_table(run), "Means of the first and the last third.")
    ends = [*accuracy_sections(study.settings), *sharpness_sections(study.settings)]
    parts = [head, *found, entropy_section(run), selection_section(run), curves, *ends, gap_section(run)]
    return [*filter(None, parts), *problem_sections(runs)]


def runs_sections(runs: Runs) -> list[Section]:
    """Several runs, for a terminal: what each study found, how its settings differ, and the list of runs."""
    parts = [section for study, settings in laid_out(runs) for section in study_sections(study, settings)]
    return [*parts, Section("Runs", run_table(runs), part="Compare"), *problem_sections(runs)]


def study_sections(study: Study, settings: Sequence[Setting]) -> list[Section]:
    """What a study found, with its name before the titles if there is another study of as many runs, or of more."""
    found = [*found_sections(study, settings), *comparison_sections(study, settings), *setting_sections(study)]
    sections = [*found, *accuracy_sections(settings), *sharpness_sections(settings)]
    name = f"{study.name}: " if study.slug else ""
    return [replace(one, title=f"{name}{one.title}" if one.title else "") for one in sections]


def page_of(runs: Runs, source: str = "", claims: bool = False) -> Page:
    """Everything on the page, computed.

    Args:
        runs: from `load_runs`.
        source: where they were read from, as a shell takes it.
        claims: test the published claims too, with their figures.
    """
    sections: list[Section] = []
    charts: list[dict[str, Any]] = []
    tables: dict[str, pd.DataFrame] = {"runs": runs.table, "events": runs.events}
    for study, settings in laid_out(runs):
        sections += study_sections(study, settings)
        charts.append(study_charts(study, settings, runs))
        shown = study.only([setting.label for setting in settings])
        each = [accuracy_values(run).assign(setting=label, seed=seed) for label, seed, run in study.each()]
        tables |= {
            f"{study.slug}comparison": comparison(study),
            f"{study.slug}steps": step_values(shown, list(STEPS)),
            f"{study.slug}sharpness": sharpness_values(shown),
            f"{study.slug}accuracy": pd.concat(each, ignore_index=True),
        }
    if claims:
        from sharpscope.analysis.claims import claim_sections

        sections += claim_sections(runs)
    if any(run.rows("forks") for run in runs):
        tables["forks"] = fork_differences(runs.forks)
        several = tables["forks"]["fork"].nunique() > 1
        for name, rows in tables["forks"].groupby("fork", sort=False):
            sections += fork_sections(rows, title=f"{name}: " if several else "")
    choices = choose(runs.by_name)
    largest = [(choice.run, spike) for choice in choices.values() for spike in choice.spikes]
    largest.sort(key=lambda one: one[1].times if one[1].z >= SPIKE_Z else -math.inf, reverse=True)
    for run, spike in largest[:LARGEST_STEPS]:
        details = [*step_sections(run, spike, LARGEST_TOKENS), *layer_sections(run, spike.step)]
        sections += [replace(section, part="Tokens") for section in details]
    sections += [Section("Runs", run_table(runs), part="Compare"), *problem_sections(runs)]
    if len(runs) == 1:  # there is nothing to compare
        instead = {"Runs": "Events and cost"}
        sections = [replace(s, part=instead.get(s.title, "Found")) if s.part == "Compare" else s for s in sections]
    again = Section("", command_table(runs, source), part="Make it again")
    return Page(runs, source, [*sections, again], charts, tables, choices)


def laid_out(runs: Runs) -> list[tuple[Study, list[Setting]]]:
    """Each study that has steps with the settings that are shown, the baseline of comparisons first."""
    result = []
    for study in studies(runs):
        first = dict.fromkeys([*comparison(study)["baseline"][:1], study.baseline, study.treatment])
        rank = {label: n for n, label in enumerate(first)}
        ordered = sorted(study.settings, key=lambda s: (rank.get(s.label, len(rank)), -len(s.runs), s.label))
        if ordered:
            result.append((study, ordered[:SHOWN_SETTINGS]))
    return result


# -- Found and Compare ---------------------------------------------------------------------------------------------------


def found_sections(study: Study, settings: Sequence[Setting], top: int = 4, runs: int = 2) -> list[Section]:
    """The headline: what was trained and its accuracy, which tokens moved the model, whether the method mattered.

    Args:
        study: the runs.
        settings: those that are shown, the baseline first.
        top: tokens of each run.
        runs: runs whose tokens are shown, the first of each setting.
    """
    first = [next(iter(setting.runs.values())) for setting in settings[:runs]]
    filled = [known(sharpness_rows(run)["saturation"]) for setting in settings for run in setting.runs.values()]
    worst = float(np.nanmax([0.0, *np.concatenate([np.zeros(0), *filled])]))
    said = trained_text(study, settings[:2])
    if worst > MAX_SATURATION:
        said += f" SAM sharpness is saturated: its rise is up to {percent(worst)} of what is possible, so it shows how many answers are"
        said += " right and not how sharp the loss is. Choose a smaller probes.rho."
    moved = moved_sections(first, top, not_kept(first))
    return [Section("What was found", said), *moved, *difference_sections(study, settings)]


@per_run
def comparison(study: Study) -> pd.DataFrame:
    """`compare_runs` of a study, computed once."""
    return compare_runs(study.runs)


def _rank(quantity: str) -> int:
    fits = [n for n, name in enumerate(HEADLINE) if quantity.endswith(name) or quantity.startswith(name)]
    return fits[0] if fits and not quantity.startswith("train") else len(HEADLINE)


def main_differences(study: Study, labels: Sequence[str]) -> pd.DataFrame:
    """The rows of `comparison` for a figure: main quantities with an interval, of the settings `labels`."""
    compared = comparison(study)
    main = compared.assign(contrast=compared["treatment"] + " − " + compared["baseline"])
    main = main[main["quantity"].map(_rank) < len(HEADLINE)].dropna(subset=["low"])
    return main[main["treatment"].isin(labels) | (len(study.settings) < 3)]


def difference_sections(study: Study, settings: Sequence[Setting]) -> list[Section]:
    """Whether the change of method mattered: the main differences of the first two settings, in words and numbers."""
    compared = comparison(study)
    if compared.empty:
        return []
    second = compared[compared["treatment"].isin([setting.label for setting in settings[:2]])]
    baseline, treatment = (second if len(second) else compared)[["baseline", "treatment"]].iloc[0]
    part = compared[(compared["baseline"] == baseline) & (compared["treatment"] == treatment)]
    main = part.assign(rank=part["quantity"].map(_rank)).sort_values("rank", kind="stable")
    main = main[main["rank"] < len(HEADLINE)].head(6).drop(columns="rank")
    runs = [run for label, _, run in study.each() if label == treatment and rotates(run)]
    said, turns = (
        [],
        {"gradient_rotation": "It turns the gradient by", "noise_rotation": "The noise of one batch turns it by about"},
    )
    for name, text in turns.items():
        angles = np.concatenate([np.zeros(0), *(known(run.steps[name].dropna()) for run in runs)])
        said += [f"{text} {angles.mean():.0f}°."] if len(angles) else []
    n = int(main["n"].max()) if len(main) else 0
    said.append("One pair of runs: repeat with more seeds before believing a difference." if n == 1 else f"{n} seeds.")
    said += [f"{int(halve)} seeds would halve the intervals." for halve in main["to_halve"].dropna()[:1]]
    title = f"Did {method_label(treatment)} change anything, compared with {method_label(baseline)}?"
    shown = difference_table(main).drop(columns=_PAIRS, errors="ignore")
    return [Section(title, shown, " ".join(said), records=main.to_dict("records"))]


_PAIRS = ["pairs", "worst pair"]


def comparison_sections(study: Study, settings: Sequence[Setting]) -> list[Section]:
    """All paired differences, a table for each of the `settings` that has pairs with the baseline."""
    result, labels = [], [setting.label for setting in settings]
    for (first, second), part in comparison(study).groupby(["baseline", "treatment"], sort=False):
        if second in labels or len(study.settings) < 3:
            n = int(part["n"].max())
            note = f"{n} pair{'s' * (n > 1)} of runs. {COVERED}"
            title = f"{method_label(str(second))} − {method_label(str(first))}"
            records: Any = part.to_dict("records")
            result.append(Section(title, difference_table(part), note, "Compare", records=records))
    return result


def difference_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of `compare_runs` as text: quantity, both values, difference with interval, what it shows, pairs, worst pair."""
    made = []
    for row in rows.to_dict("records"):
        share = row["unit"] == "share"
        factor, value = (100 if share else 1), row["difference"]
        half = (row["high"] - row["low"]) / 2
        text = interval_text(factor * value, factor * half, sign=True) + " points" * share
        text = "–" if not math.isfinite(value) else "0" if value == 0 and not half > 0 else text
        clear = "a difference" if row["low"] > 0 or row["high"] < 0 else "no difference shown" * math.isfinite(half)
        cells = {"quantity": row["quantity"] + ("" if row["unit"] in ("share", "1", "reward") else f" [{row['unit']}]")}
        for side in ("baseline", "treatment"):
            end = number(factor * row[f"{side}_value"])
            cells[method_label(row[side])] = end + " %" * (share and end != "–")
        cells |= {"difference": text, "shows": clear if math.isfinite(value) else row["note"], "pairs": str(row["n"])}
        cells["worst pair"] = f"{number(factor * row['worst'])} ({row['worst_pair']})" if row["n"] > 1 else ""
        made.append(cells)
    frame = pd.DataFrame(made)
    return frame if (rows["n"] > 1).any() else frame.drop(columns=_PAIRS, errors="ignore")


def setting_sections(study: Study) -> list[Section]:
    """What the configurations of a study's settings differ in; values that differ between a setting's runs are joined."""
    columns = {s.label: [flat(run.config) for run in s.runs.values()] for s in study.settings[:SHOWN_SETTINGS]}
    rows = []
    for key in dict.fromkeys(key for facts in columns.values() for one in facts for key in one):
        values = [dict.fromkeys(_value(one.get(key)) for one in part) for part in columns.values()]
        cells = [printable(", ".join(each), 60) for each in values]
        if len(set(cells)) > 1 and key not in ("name", "out", "method.name", "seed"):
            rows.append((key, *cells))
    frame = pd.DataFrame(rows, columns=["setting", *map(method_label, columns)])
    return [Section("Settings that differ", frame, part="Compare")] if rows else []


def _value(value: Any) -> str:
    """A setting's value as text."""
    return "none" if value is None else number(value) if isinstance(value, float) else str(value)


# -- Accuracy and sharpness ----------------------------------------------------------------------------------------------


def accuracy_sections(settings: Sequence[Setting]) -> list[Section]:
    """Accuracy before and after, greedy and sampled, with pass@k, cut completions and accuracy among the completed ones."""
    each = [(s.label, n, run) for s in settings for n, run in enumerate(s.runs.values())]
    whole = pd.concat([accuracy_values(run).assign(setting=label, run=n) for label, n, run in each], ignore_index=True)
    rows = []
    for (split, heat, label), part in whole.groupby(["split", "temperature", "setting"], sort=False):
        runs = [one.sort_values("step") for _, one in part.groupby("run")]
        first, last = ([(100 * one["accuracy"].iloc[k], 100 * one["half"].iloc[k]) for one in runs] for k in (0, -1))
        changes = [(b[0] - a[0], math.hypot(a[1], b[1])) for a, b in zip(first, last, strict=True)]
        paired = all(len(one) > 1 for one in runs)
        ends = pd.DataFrame([one.iloc[-1] for one in runs])
        k = int(ends["k"].max())
        rows.append(
            {
                "on": str(split).replace("heldout", "held-out"),
                "sampling": sampling(float(str(heat))),
                "setting": method_label(str(label)),
                "prompts": str(ends["prompts"].iloc[0]),
                "before [%]": _over_seeds(first if paired else []),
                "after [%]": _over_seeds(last),
                "change [points]": _over_seeds(changes if paired else [], sign=True),
                "right in k tries": f"{percent(known(ends['pass_at_k']).mean(), 1)} (k = {k})" if k > 1 else "–",
                "cut": percent(known(ends["truncated"]).mean(), 1),
                "right of the completed": percent(known(ends["accuracy_completed"]).mean(), 1),
            }
        )
    if not rows:
        return []
    frame = _dense(pd.DataFrame(rows).sort_values(["on", "sampling"], kind="stable"))
    note = "±: 95 % interval over prompts of a run alone, over seeds of several."
    return [Section("Accuracy", frame, note, "Compare")]


def sharpness_sections(settings: Sequence[Setting]) -> list[Section]:
    """Sharpness at the first and the last step measured; a change is paired by prompt. Saturated estimates are marked."""
    rows = []
    for setting in settings:
        each = [(run, sharpness_rows(run)) for run in setting.runs.values()]
        for measure in dict.fromkeys(name for _, one in each for name in one["measure"]):
            parts = [(run, part) for run, one in each if len(part := one[one["measure"] == measure])]
            longer = [(run, part) for run, part in parts if part["step"].nunique() > 1]
            first = [(part["value"].iloc[0], part["half"].iloc[0]) for _, part in parts]
            last = [(part["value"].iloc[-1], part["half"].iloc[-1]) for _, part in longer]
            changes = [_paired(run, part.iloc[0], part.iloc[-1]) for run, part in longer]
            steps = [_span([part["step"].iloc[k] for _, part in several]) for k, several in ((0, parts), (-1, longer))]
            worst = max(known(pd.concat([part["saturation"] for _, part in parts]).fillna(-1.0)))
            filled = percent(worst) + " (saturated)" * bool(worst > MAX_SATURATION) if worst >= 0 else "–"
            row = {
                "measure": measure,
                "setting": method_label(setting.label),
                "steps": " and ".join(filter(None, steps)),
            }
            row |= {"at the first": _over_seeds(first), "at the last": _over_seeds(last)}
            rows.append(row | {"change": _over_seeds(changes, sign=True), "of the possible rise": filled})
    run = next(iter(settings[0].runs.values()))
    if not rows:
        return [Section("Sharpness", f"Not recorded{recorded_by(run, 'probes.preset')}.", part="Sharpness")]
    order = {name: n for n, name in enumerate(dict.fromkeys(row["measure"] for row in rows))}
    frame = _dense(pd.DataFrame(rows).sort_values("measure", key=lambda names: names.map(order), kind="stable"))
    note = "Rise of the loss within the radius (SAM), eigenvalue, or 2 / critical learning rate. ±: 95 % interval over prompts or seeds."
    if "of the possible rise" in frame:
        note += f" Above {percent(MAX_SATURATION)} of the possible rise it says how many answers are right, not how sharp the loss is."
    if len(settings) == 1 and len(settings[0].runs) == 1 and (said := critical_text(run.probes)):
        note += f" Last update measured: {said}."
    return [Section("Sharpness at the steps where it was measured", frame, note, "Sharpness")]


def _span(steps: Sequence[int]) -> str:
    """The steps as text: `6`, or `4 to 6` where runs differ."""
    return " to ".join(map(str, sorted({min(steps), max(steps)}))) if steps else ""


def _dense(frame: pd.DataFrame) -> pd.DataFrame:
    """Without columns of dashes, and without the setting if there is one only."""
    alone = ["setting"] if frame["setting"].nunique() == 1 else []
    return frame.drop(columns=[*alone, *(name for name in frame if (frame[name] == "–").all())])


def _over_seeds(values: Sequence[tuple[float, float]], sign: bool = False) -> str:
    """Mean ± half of its interval: the run's own of one run, Student's t over several."""
    finite = [(float(value), float(half)) for value, half in values if math.isfinite(value)]
    if len(finite) < 2:
        return interval_text(*finite[0], sign=sign) if finite else "–"
    numbers = [value for value, _ in finite]
    interval, mean = mean_interval(numbers), float(np.mean(numbers))
    return interval_text(mean, math.nan if interval is None else interval.high - mean, sign=sign)


def _paired(run: Run, first: pd.Series, last: pd.Series) -> tuple[float, float]:
    """Difference of two estimates of one run, with half of its interval over the prompts that both were made on.

    NaN where the values by prompt were not recorded. Estimates on the prompts of updates count as independent.
    """
    difference = float(last["value"]) - float(first["value"])
    if not first["probe_set"] and not last["probe_set"]:
        return difference, Z * math.hypot(float(first["prompt_std_error"]), float(last["prompt_std_error"]))
    frame, values = run.probe_prompts, []
    for row in (first, last):
        same = np.ones(len(frame), dtype=bool)
        for key in ("step", "probe_set", "functional", "parameters", "quantity", "rho", "seed"):
            same &= (frame[key].isna() if pd.isna(row[key]) else frame[key] == row[key]).to_numpy(dtype=bool)
        values.append(frame[same].drop_duplicates("prompt").set_index("prompt")["value"])
    if len(values[0]) < 2 or set(values[0].index) != set(values[1].index):
        return difference, math.nan
    each = known(values[1] - values[0])
    return difference, Z * float(each.std(ddof=1)) / math.sqrt(len(each))


# -- One run -------------------------------------------------------------------------------------------------------------


def curve_table(run: Run) -> pd.DataFrame:
    """Quantity, mean of the first third, sparkline, mean of the last third ± its error over steps.

    Rotations by rounding, and shares and weights that never vary, are left out.
    """
    steps = run.steps.sort_values("step")
    # of a method with advantages the loss says little
    names = {"loss": Quantity("loss")} if steps["reward_mean"].isna().all() else {}
    rows = []
    for column, quantity in (names | STEPS).items():
        values = quantity.factor * known(steps[column]) if column in steps else np.zeros(0)
        if column.endswith("_rotation"):  # recorded at some steps only
            values = values[np.isfinite(values)] if rotates(run) else np.zeros(0)
        finite = values[np.isfinite(values)]
        if len(finite) and not (np.ptp(finite) < 1e-6 and ("[%]" in quantity.name or column == "weight_mean")):
            third = max(1, len(values) // 3)
            first, last = values[:third].mean(), series_mean(values[-third:])
            end = interval_text(last[0], Z * last[1]) if math.isfinite(last[0]) else "not a number"
            rows.append((quantity.name, number(first, "not a number"), sparkline(values), end))
    return pd.DataFrame(rows, columns=["by step", "first", "", "last"])


def _facts(run: Run) -> str:
    """What was trained, on one line; of an imported trace a second line says what it lacks."""
    config, info = flat(run.config), run.info
    model, size = config.get("policy.model") or info.get("model"), info.get("parameters")
    rate = config.get("optimizer.lr", config.get("learning_rate"))
    sized = f" ({size / 1e6:,.3g} M parameters)" if size else ""
    facts = {
        f"method {method_label(run.method)}, task {run.task}, seed {run.seed}": True,
        f"model {model_label(str(model))}{sized}": model,
        f"{last_step(run)} of {config.get('steps') or config.get('max_steps') or '?'} steps": True,
        f"learning rate {rate}": rate,
        f"group size {config.get('rollout.group_size')}": config.get("rollout.group_size"),
        f"started {info.get('started')}": info.get("started"),
        f"on {info.get('device')}": info.get("device"),
    }
    said = ", ".join(fact for fact, is_known in facts.items() if is_known)
    imported = info.get("imported")
    if not isinstance(imported, dict):
        return said
    absent = (imported.get("not_recorded") or {}).items()
    lacks = [f"{table}: {', '.join(names) if run.rows(table) else 'all'}" for table, names in absent if names]
    return f"{said}\nImported from {imported.get('from')}; not recorded: {'; '.join(lacks) or 'nothing is missing'}."


# -- Events and cost -----------------------------------------------------------------------------------------------------


def problem_sections(runs: Runs) -> list[Section]:
    """What a reader should know: runs left out, events, the sampler, and costs."""
    part = "Events and cost"
    result = [Section("To know", "\n".join(said), part=part)] if (said := messages(runs)) else []
    events = runs.events
    loud = events[events["severity"] != "info"] if len(events) else events
    if len(loud):
        last = loud.sort_values("step", kind="stable").groupby(["run", "rule"], sort=False)
        table = last[["step", "message"]].last().assign(times=last.size()).reset_index()
        table = table[["run", "rule", "times", "step", "message"]].rename(columns={"step": "last step"})
        result.append(Section("Events", table if len(runs) > 1 else table.drop(columns="run"), part=part))
    result += filter(None, [sampler_section(runs)])
    if len(costs := cost_table(runs)):
        note = "Sums over the recorded steps; evaluation and loading are not in them. Recording includes the probes; mostly: its largest part."
        most = {INTERVALS[kind] for kind in costs.get("mostly", []) if kind in INTERVALS}
        note += f" To record less, change {' or '.join(sorted(most))}." if most else ""
        result.append(Section("Cost", costs, note, part))
    return result


def messages(runs: Runs) -> list[str]:
    """Runs left out, damaged parts, rewards that are not numbers, completions that were not kept."""
    said = [f"{name} is left out: {why}" for name, why in runs.skipped.items()]
    said += [f"{run.name}: {part} is set aside: {why}" for run in runs for part, why in run.damaged.items()]
    said += [note for study in studies(runs) for note in study.notes]
    for run in runs:
        bad, total = run.steps.loc[run.steps["reward_mean"].isna(), "step"].tolist(), len(run.steps)
        if 0 < len(bad) < total:  # of a run without any reward, none was recorded
            said.append(f"{run.name}: the reward is not a number in {len(bad)} of {total} steps (first: {bad[0]}).")
    return [*said, *filter(None, [not_kept(list(runs))])]


def not_kept(runs: Sequence[Run]) -> str:
    """Which runs have no completions because they are reduced; empty if there are none."""
    count = sum(completions_dropped(run) for run in runs)
    which = "these runs" if count == len(runs) else f"{count} of {len(runs)} runs"
    kept = f"Completions of {which} were not kept when they were reduced"
    return f"{kept}; a report of the whole runs shows their tokens." if count else ""


def cost_table(runs: Runs) -> pd.DataFrame:
    """Seconds of each kind and the most memory, a row a run; imported runs have none."""
    rows = []
    for name, run in runs.by_name.items():
        if run.steps.empty or run.steps["training_s"].isna().all():
            continue
        parts = {kind: float(run.steps[f"{kind}_s"].sum()) for kind in ("generation", "training", "recording")}
        seconds = (run.info.get("measuring") or {}).get("seconds") or {}
        parts["recording"] = sum(map(float, seconds.values())) or parts["recording"]  # also before and after the steps
        total = sum(parts.values())
        held = run.info.get("peak_memory_bytes")
        sizes = {kind: n for kind, n in (held if isinstance(held, dict) else {"process": held}).items() if n}
        row = {"run": name, "a step [s]": f"{total / len(run.steps):.2f}", "all [min]": f"{total / 60:.1f}"}
        row |= {kind: percent(part / total if total else 0.0) for kind, part in parts.items()}
        row["mostly"] = max(seconds, key=lambda kind: float(seconds[kind]), default="–")
        row["peak memory"] = ", ".join(f"{kind} {size / 2**20:,.0f} MiB" for kind, size in sizes.items()) or "–"
        rows.append(row | {"device": str(run.info.get("device") or "–")})
    frame = pd.DataFrame(rows)
    alone = ["run", "device"] * (len(runs) == 1) + [name for name in frame if (frame[name] == "–").all()]
    return frame.drop(columns=alone, errors="ignore")


INTERVALS = {
    "norms": "recording.token_gradients_every",
    "shares": "recording.token_gradients_every",
    "rotation": "recording.rotation_every",
    "influence": "recording.heldout_influence_every",
    "surface": "probes.every",
    "critical sharpness": "probes.preset",
}
"""What a run measures → the setting that says how often."""


# -- Runs and commands ---------------------------------------------------------------------------------------------------


def run_table(runs: Runs) -> pd.DataFrame:
    """One row per run; runs that cannot be read come last."""
    rows = []
    for name, run in runs.by_name.items():
        why, count = run.info.get("end"), len(run.steps)
        status = run.status if run.status == "finished" or not why else f"{run.status}: {why}"
        reward, error = series_mean(known(run.steps.sort_values("step")["reward_mean"])[-max(1, count // 3) :])
        row = {"run": name, "method": method_label(run.method), "seed": str(run.seed), "task": run.task}
        text = interval_text(reward, Z * error)
        rows.append(row | {"status": status, "steps": str(count), "reward, last third (± 95 % over steps)": text})
    rows += [{"run": name, "status": f"cannot be read: {why}"} for name, why in runs.skipped.items()]
    return pd.DataFrame(rows).fillna("–")


def command_table(runs: Runs, source: str) -> pd.DataFrame:
    """What each command makes, for everything on a page."""
    rows = {"this page and its tables": f"sharpscope analyze {source}"}
    rows["figures for a paper"] = f"sharpscope analyze {source} --figures"
    for run in list(runs)[:20]:
        if run.config_text is not None and run.path.exists():
            config, again = shlex.quote(str(run.path / "config.yaml")), shlex.quote(run.name)
            rows[f"the run {run.name}, again"] = f"sharpscope run {config} --out runs/again-{again}"
    return pd.DataFrame({"makes": list(rows), "command": [Code(text) for text in rows.values()]})

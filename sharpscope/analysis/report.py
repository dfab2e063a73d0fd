"""What a run, or several, are shown as: a list of sections, the same for `show` and for the page of `analyze`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from sharpscope.analysis.completions import Choice, choose, completions_dropped
from sharpscope.analysis.forks import COMPARISONS, fork_differences, fork_table
from sharpscope.analysis.frames import (
    Z,
    accuracy_values,
    eval_values,
    known,
    rotates,
    sharpness_rows,
    sharpness_values,
    step_values,
)
from sharpscope.analysis.headline import moved_sections, step_sections, trained_text
from sharpscope.analysis.mismatch import mismatch_table, worst_ranges
from sharpscope.analysis.pairs import compare_runs
from sharpscope.analysis.sections import Section
from sharpscope.analysis.spikes import recorded_by
from sharpscope.analysis.statistics import mean_interval, series_mean
from sharpscope.analysis.study import Setting, Study, flat, last_step, studies
from sharpscope.analysis.text import interval_text, method_label, model_label, number, percent, printable, sampling
from sharpscope.analysis.tokens import INCLUSION
from sharpscope.traces import MAX_SATURATION, Run, Runs

if TYPE_CHECKING:  # `show` needs no plotting library
    from sharpscope.analysis.figures.style import Picture

BLOCKS = "▁▂▃▄▅▆▇█"
SHOWN_SETTINGS = 6
"""Settings of a study that curves and tables show: those of the comparison, then those with the most seeds."""
MOST_EVENTS = 100
LARGEST_TOKENS = 5
SATURATED_WEIGHTS = 0.95
CURVES = {
    "reward_mean": "reward",
    "accuracy": "accuracy",
    "grad_norm": "gradient norm",
    "update_norm": "norm of the update",
    "gradient_rotation": "gradient turned by [°]",
    "update_rotation": "update turned by [°]",
    "entropy_mean": "entropy [nats]",
    "kl_step": "KL of a step [nats]",
    "completion_length_mean": "length [tokens]",
    "truncated_fraction": "cut at the limit [share]",
    "accuracy_completed": "accuracy, completed only",
    "grad_clipped": "updates with clipped gradient [share]",
}
HEADLINE = ("accuracy, greedy", "accuracy, T = 1", "reward", "SAM sharpness")
"""What the headline compares: quantities of `compare_runs` whose names end or begin so."""
PULL = ["logp", "weight", "loss_coef", "score_norm_local", INCLUSION]
COVERED = (
    "±: 95 % interval. One pair: over steps or prompts, which says nothing about other seeds; several pairs: Student's t over "
    "seeds. "
)
FORK_NOTE = (
    "One update of each method from the same state on the same completions, measured by importance weighting. Cells: "
    "difference to the reference with its 95 % interval; of the reference itself, its change. A negative difference of a failure "
    "means that the arm improves more. The prediction is to first order, of the first outcome."
)
COMPARISON_TEXT = {
    "step": "the optimizer's step as it is",
    "norm": "scaled to the norm of the reference's step",
    "kl": "scaled to the KL of the reference's step",
}


def run_sections(run: Run) -> list[Section]:
    """One run, for a terminal: headline, curves, accuracy, sharpness, and what happened."""
    head = Section(f"{run.name} · {run.status}", _facts(run))
    if run.steps.empty:
        return [head, Section("", "No step is recorded yet."), *problem_sections(Runs(run.path, {run.name: run}, {}))]
    study = Study({run.name: run}, name=run.task)
    settings = study.settings
    parts = [
        head,
        *found_sections(study, settings),
        Section("Curves", curve_table(run), "Means of the first and last third."),
    ]
    parts += [*accuracy_sections(settings), *sharpness_sections(settings)]
    return [*parts, *problem_sections(Runs(run.path, {run.name: run}, {}))]


def runs_sections(runs: Runs, source: str = "") -> list[Section]:
    """Several runs: what each study found and how its settings differ; without anything to compare, the list of runs.

    Args:
        runs: from `load_several`.
        source: where they were read from, as a shell takes it.
    """
    parts: list[Section] = []
    for study, settings in laid_out(runs):
        title = f"{study.name}: " if len(studies(runs)) > 1 else ""
        found = found_sections(study, settings)
        parts += [_titled(section, title) for section in found]
        parts += [_titled(section, title) for section in (*comparison_sections(study), *accuracy_sections(settings))]
        parts += [_titled(section, title) for section in sharpness_sections(settings)]
    return [*parts, Section("Runs", run_table(runs), part="Compare", name="runs"), *problem_sections(runs)]


@dataclass(frozen=True)
class Page:
    """What `analyze` writes: sections in order, tables of numbers by name, and the completions that are shown by run."""

    runs: Runs
    source: str
    sections: list[Section]
    tables: dict[str, pd.DataFrame]
    choices: dict[str, Choice]


def page_of(runs: Runs, source: str = "", claims: bool = False) -> Page:
    """Everything on the page, computed and drawn.

    Args:
        runs: from `load_several`.
        source: where they were read from, as a shell takes it.
        claims: test the published claims too.
    """
    from sharpscope.analysis.figures.plots import differences, fork_effects, study_figures, weights
    from sharpscope.analysis.figures.style import Picture, lines

    found, curves, rest = [], [], []
    tables: dict[str, pd.DataFrame] = {"runs": runs.table, "events": runs.events}
    every = laid_out(runs)
    for study, settings in every:
        title, prefix = (f"{study.name}: ", study.slug) if len(every) > 1 else ("", "")
        shown = study.only([setting.label for setting in settings])
        frames = {"steps": step_values(shown, [*CURVES, "noise_rotation"]), "accuracy": eval_values(shown)}
        frames["sharpness"] = sharpness_values(shown)
        styles = lines(shown.labels)
        pictures = list(study_figures(frames, styles))
        samples = {k: v for k, v in shown.samples(["logp", "weight"]).items() if v["weight"].nunique() > 1}
        if samples:
            caption = "Token weights, and where the gradient is that they multiply."
            pictures.append(Picture("weights", caption, weights(samples, list(shown.samples(PULL).values()), styles)))
        compared = comparison(study)
        table = compared.assign(contrast=compared["treatment"] + " − " + compared["baseline"])
        several = table[table["quantity"].map(_headline_rank) < len(HEADLINE)].dropna(subset=["low"])
        found += [_titled(section, title) for section in found_sections(study, settings)]
        curves += [
            _titled(_drawn(picture, "Curves", prefix), title) for picture in pictures if picture.name != "sharpness"
        ]
        rest += [_titled(section, title) for section in comparison_sections(study)]
        if len(several) > 1:
            picture = Picture("differences", f"Differences between settings. {COVERED}", differences(several))
            rest.append(_titled(_drawn(picture, "Compare", prefix), title))
        rest += [_titled(section, title) for section in accuracy_sections(settings)]
        rest += [_titled(section, title) for section in setting_sections(study)]
        rest += [_titled(section, title) for section in sharpness_sections(settings)]
        rest += [
            _titled(_drawn(picture, "Sharpness", prefix), title) for picture in pictures if picture.name == "sharpness"
        ]
        tables |= {
            f"{prefix}comparison": compared,
            f"{prefix}steps": frames["steps"],
            f"{prefix}sharpness": frames["sharpness"],
        }
        accuracy = [accuracy_values(run).assign(setting=label, seed=seed) for label, seed, run in study.each()]
        tables[f"{prefix}accuracy"] = pd.concat(accuracy, ignore_index=True) if accuracy else pd.DataFrame()
    if claims:
        from sharpscope.analysis.claims import claim_sections

        rest += claim_sections(runs)
    for name, table, sections in fork_parts(runs):
        tables[name] = table
        picture = fork_effects(table)
        rest += [
            *([] if picture is None else [_drawn(Picture(name, FORK_NOTE, picture), "Counterfactual updates", "")]),
            *sections,
        ]
    rest += [Section("Runs", run_table(runs), part="Compare", name="runs"), *problem_sections(runs)]
    choices = choose(runs.by_name)
    for choice in choices.values():
        for spike in choice.spikes:
            rest += [replace(section, part="Tokens") for section in step_sections(choice.run, spike, LARGEST_TOKENS)]
    rest.append(Section("", command_table(runs, source), part="Make it again"))
    return Page(runs, source, [*found, *curves, *rest], tables, choices)


def _titled(section: Section, title: str) -> Section:
    return (
        Section(title + section.title, section.content, section.note, section.part, section.name) if title else section
    )


def _drawn(picture: Picture, part: str, prefix: str) -> Section:
    assert picture.figure is not None
    return Section("", picture.figure, picture.caption, part, prefix + picture.name)


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


# -- Found ---------------------------------------------------------------------------------------------------------------


def found_sections(study: Study, settings: Sequence[Setting], top: int = 4, runs: int = 2) -> list[Section]:
    """The headline: what was trained and its accuracy, which tokens moved the model, whether the method mattered.

    Args:
        study: the runs.
        settings: those that are shown, the baseline first.
        top: tokens of each run.
        runs: runs whose tokens are shown, the first of each setting.
    """
    first = [next(iter(setting.runs.values())) for setting in settings[:runs]]
    said = " ".join([trained_text(study, settings[:2]), *saturation_texts(settings)])
    return [Section("What was found", said), *moved_sections(first, top, not_kept(first)), *difference_sections(study)]


def difference_sections(study: Study) -> list[Section]:
    """Whether the change of method mattered: the main differences of the first comparison, in words and numbers."""
    compared = comparison(study)
    if compared.empty:
        return []
    baseline, treatment = compared[["baseline", "treatment"]].iloc[0]
    own = compared[(compared["baseline"] == baseline) & (compared["treatment"] == treatment)]
    own = own.assign(rank=own["quantity"].map(_headline_rank)).sort_values("rank", kind="stable")
    main = own[own["rank"] < len(HEADLINE)].head(6)
    setting = next((one for one in study.settings if one.label == treatment), None)
    runs = list(setting.runs.values()) if setting is not None else []
    turned = [
        angle
        for run in runs
        if rotates(run) and math.isfinite(angle := float(np.nanmean(known(run.steps["gradient_rotation"]))))
    ]
    noise = [
        float(np.nanmean(angles)) for run in runs if np.isfinite(angles := known(run.steps["noise_rotation"])).any()
    ]
    said = []
    if turned:
        said.append(f"It turns the gradient by {np.mean(turned):.0f}°.")
        said += [f"The luck of one batch turns it by about {np.mean(noise):.0f}°."] if noise else []
    n = int(main["n"].max()) if len(main) else 0
    said.append("One seed each: repeat with more seeds before believing a difference." if n == 1 else f"{n} seeds.")
    halve = main["to_halve"].dropna()
    said += [f"{int(halve.max())} seeds would halve the intervals."] if len(halve) else []
    names = method_label(treatment), method_label(baseline)
    table = difference_table(main).drop(columns=["pairs", "worst pair"], errors="ignore")
    return [
        Section(f"Did {names[0]} change anything, compared with {names[1]}?", table, " ".join(said), name="differences")
    ]


def _headline_rank(quantity: str) -> int:
    names = (quantity.endswith(name) or quantity.startswith(name) for name in HEADLINE)
    return next((n for n, fits in enumerate(names) if fits and not quantity.startswith("train")), len(HEADLINE))


def saturation_texts(settings: Sequence[Setting]) -> list[str]:
    """A sentence where SAM sharpness is saturated and thus measures the accuracy."""
    rows = [sharpness_rows(run) for setting in settings for run in setting.runs.values()]
    worst = max(
        (float(np.nanmax(values)) for one in rows if np.isfinite(values := known(one["saturation"])).any()), default=0.0
    )
    if worst <= MAX_SATURATION:
        return []
    return [
        f"SAM sharpness of expected_failure is saturated: its rise is up to {percent(worst)} of what is possible, so it shows how many "
        "answers are right and not how sharp the loss is. Choose a smaller probes.rho."
    ]


# -- Compare -------------------------------------------------------------------------------------------------------------


def comparison(study: Study) -> pd.DataFrame:
    """`compare_runs` of a study, computed once."""
    if not hasattr(study, "_compared"):
        study._compared = compare_runs(study.runs)  # type: ignore[attr-defined]
    return pd.DataFrame(study._compared)  # type: ignore[attr-defined]


def comparison_sections(study: Study) -> list[Section]:
    """All paired differences, a table for each pair of settings."""
    result = []
    compared = comparison(study)
    for (baseline, treatment), own in compared.groupby(["baseline", "treatment"], sort=False):
        title = f"{method_label(str(treatment))} − {method_label(str(baseline))}"
        result.append(Section(title, difference_table(own), COVERED + _worst_text(own), "Compare"))
    return result


def _worst_text(own: pd.DataFrame) -> str:
    n = int(own["n"].max())
    return f"{n} pairs of runs with one seed each." if n > 1 else "1 pair of runs."


def difference_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of `compare_runs` as text: quantity, both values, difference with interval, what it shows, pairs, worst pair."""
    made = []
    for row in rows.to_dict("records"):
        factor, unit = (100, " %") if row["unit"] == "share" else (1, "")
        ends = [
            f"{number(factor * row[name])}{unit}" if pd.notna(row[name]) else "–"
            for name in ("baseline_value", "treatment_value")
        ]
        value, half = factor * row["difference"], factor * (row["high"] - row["low"]) / 2
        clear = row["low"] > 0 or row["high"] < 0
        verdict = "" if not math.isfinite(half) else "a difference" if clear else "no difference shown"
        worst = f"{number(factor * row['worst'])} ({row['worst_pair']})" if row["n"] > 1 else ""
        quantity = row["quantity"] + ("" if row["unit"] in ("share", "1", "reward") else f" [{row['unit']}]")
        text = (
            "–"
            if not math.isfinite(value)
            else "0"
            if value == 0 and not half > 0
            else interval_text(value, half, sign=True)
        )
        cells = {
            "quantity": quantity,
            method_label(row["baseline"]): ends[0],
            method_label(row["treatment"]): ends[1],
            "difference": text + (" points" if row["unit"] == "share" and text not in ("–", "0") else ""),
            "shows": row["note"] if not math.isfinite(value) else verdict,
            "pairs": str(row["n"]),
            "worst pair": worst,
        }
        made.append(cells)
    frame = pd.DataFrame(made)
    several = len(frame) and (frame["worst pair"] != "").any()
    return frame if several else frame.drop(columns=["pairs", "worst pair"], errors="ignore")


def setting_sections(study: Study) -> list[Section]:
    """What the settings of a study differ in, settings across; values that differ between a setting's runs are joined."""
    columns = {
        setting.label: [flat(run.config) for run in setting.runs.values()]
        for setting in study.settings[:SHOWN_SETTINGS]
    }
    keys = list(dict.fromkeys(key for facts in columns.values() for one in facts for key in one))
    rows = []
    for key in keys:
        cells = [", ".join(dict.fromkeys(_setting_text(one.get(key)) for one in facts)) for facts in columns.values()]
        if len(set(cells)) > 1 and key not in ("name", "out", "method.name", "seed"):
            rows.append((key, *(printable(cell, 60) for cell in cells)))
    if len(columns) < 2 or not rows:
        return []
    frame = pd.DataFrame(rows, columns=["setting", *map(method_label, columns)])
    return [Section("Settings that differ", frame, part="Compare", name="settings")]


def _setting_text(value: Any) -> str:
    return "none" if value is None else number(value) if isinstance(value, float) else str(value)


# -- Accuracy and sharpness ----------------------------------------------------------------------------------------------


def accuracy_sections(settings: Sequence[Setting]) -> list[Section]:
    """Accuracy before and after, greedy and sampled, with pass@k, cut completions and accuracy among the completed ones."""
    rows = []
    for setting in settings:
        each = [accuracy_values(run) for run in setting.runs.values()]
        for split, heat in dict.fromkeys(
            (s, t) for one in each for s, t in zip(one["split"], one["temperature"], strict=True)
        ):
            parts = [one[(one["split"] == split) & (one["temperature"] == heat)].sort_values("step") for one in each]
            parts = [part for part in parts if len(part)]
            first, last = ([100 * known(part[["accuracy", "half"]].iloc[k]) for part in parts] for k in (0, -1))
            changes = [(b[0] - a[0], math.hypot(a[1], b[1])) for a, b in zip(first, last, strict=True)]
            ends = {
                name: np.nanmean(values)
                if np.isfinite(values := [known(p[name])[-1] for p in parts]).any()
                else math.nan
                for name in ("pass_at_k", "truncated", "accuracy_completed")
            }
            k = int(parts[0]["k"].iloc[-1])
            row = {
                "on": split,
                "sampling": sampling(heat),
                "setting": method_label(setting.label),
                "prompts": str(parts[0]["prompts"].iloc[-1]),
            }
            row |= {
                "before [%]": _over_seeds(first),
                "after [%]": _over_seeds(last),
                "change [points]": _over_seeds(changes, sign=True),
            }
            row |= {"right in k tries": f"{percent(ends['pass_at_k'], 1)} (k = {k})" if k > 1 else "–"}
            rows.append(
                row
                | {
                    "cut": percent(ends["truncated"], 1),
                    "right of the completed": percent(ends["accuracy_completed"], 1),
                }
            )
    if not rows:
        return []
    frame = pd.DataFrame(rows)
    frame = frame.drop(
        columns=[name for name in ("right in k tries", "cut", "right of the completed") if (frame[name] == "–").all()]
    )
    frame = frame.drop(columns="setting") if frame["setting"].nunique() == 1 else frame
    once = (frame["before [%]"] == frame["after [%]"]).all() and all(
        "±" not in text for text in frame["change [points]"]
    )
    note = "±: 95 % interval over prompts" + (
        " of a run alone, over seeds of several." if any(len(s.runs) > 1 for s in settings) else "."
    )
    return [
        Section(
            "Accuracy",
            frame.drop(columns=["before [%]", "change [points]"]) if once else frame,
            note,
            "Compare",
            "accuracy",
        )
    ]


def sharpness_sections(settings: Sequence[Setting]) -> list[Section]:
    """Sharpness at the first and the last probe; a change is paired by prompt. Saturated estimates are marked."""
    rows = []
    for setting in settings:
        each = [(run, sharpness_rows(run)) for run in setting.runs.values()]
        for measure in dict.fromkeys(name for _, one in each for name in one["measure"]):
            parts = [(run, one[one["measure"] == measure]) for run, one in each if (one["measure"] == measure).any()]
            first, last = ([known(own[["value", "half"]].iloc[k]) for _, own in parts] for k in (0, -1))
            changes = [_paired(run, own.iloc[0], own.iloc[-1]) for run, own in parts if own["step"].nunique() > 1]
            filled = [float(known(own["saturation"])[k]) for _, own in parts for k in (0, -1)]
            worst = max((one for one in filled if math.isfinite(one)), default=math.nan)
            saturation = percent(worst) + (" (saturated)" if worst > MAX_SATURATION else "")
            row = {
                "measure": measure,
                "setting": method_label(setting.label),
                "start": _over_seeds(first),
                "end": _over_seeds(last),
            }
            rows.append(row | {"change": _over_seeds(changes, sign=True), "of the possible rise": saturation})
    if not rows:
        run = next(iter(settings[0].runs.values()))
        return [Section("Sharpness", f"Not recorded{recorded_by(run, 'probes.preset')}.", part="Sharpness")]
    frame = pd.DataFrame(rows).sort_values(
        "measure", key=lambda m: m.map({n: k for k, n in enumerate(dict.fromkeys(m))}), kind="stable"
    )
    frame = frame.drop(columns="setting") if frame["setting"].nunique() == 1 else frame
    empty = [name for name in ("of the possible rise", "change") if (frame[name] == "–").all()]
    note = "Rise of the loss within the radius (SAM), eigenvalue, or 2 / critical learning rate. ±: 95 % interval over prompts or seeds."
    if "of the possible rise" not in empty:
        note += f" Above {percent(MAX_SATURATION)} of the possible rise a measure says how many answers are right, not how sharp the loss is."
    return [Section("Sharpness at start and end", frame.drop(columns=empty), note, "Sharpness", "sharpness")]


def _over_seeds(values: Sequence[Any], sign: bool = False) -> str:
    """Mean ± half of its interval: the run's own of one run, Student's t over several."""
    finite = [(float(value), float(half)) for value, half in values if math.isfinite(value)]
    if not finite:
        return "–"
    if len(finite) == 1:
        return interval_text(*finite[0], sign=sign)
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
    frame = run.probe_prompts
    values = []
    for row in (first, last):
        same = np.ones(len(frame), dtype=bool)
        for key in ("step", "probe_set", "functional", "parameters", "quantity", "rho", "seed"):
            same &= (frame[key].isna() if pd.isna(row[key]) else frame[key] == row[key]).to_numpy(dtype=bool)
        values.append(frame[same].drop_duplicates("prompt").set_index("prompt")["value"])
    if len(values[0]) < 2 or set(values[0].index) != set(values[1].index):
        return difference, math.nan
    each = (values[1] - values[0]).to_numpy(dtype=float)
    return difference, Z * float(each.std(ddof=1)) / math.sqrt(len(each))


# -- Curves of one run ---------------------------------------------------------------------------------------------------


def sparkline(values: np.ndarray, width: int = 40) -> str:
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


def curve_table(run: Run) -> pd.DataFrame:
    """quantity, mean of the first third, sparkline, mean of the last third ± its error over steps; rounding is left out."""
    steps = run.steps.sort_values("step")
    names = {"loss": "loss"} if steps["reward_mean"].isna().all() else {}  # of a method with advantages it says little
    rows = []
    for column, name in (names | CURVES).items():
        values = known(steps[column]) if column in steps else np.zeros(0)
        if not np.isfinite(values).any() or (column.endswith("_rotation") and not rotates(run)):
            continue
        if column.endswith("_rotation"):
            values = values[np.isfinite(values)]  # recorded at some steps only
        if column in ("truncated_fraction", "grad_clipped", "accuracy_completed") and not np.nanmax(np.abs(values)) > 0:
            continue
        third = max(1, len(values) // 3)
        first, last = values[:third].mean(), series_mean(values[-third:])
        end = interval_text(last[0], Z * last[1]) if math.isfinite(last[0]) else "not a number"
        rows.append((name, number(first, "not a number"), sparkline(values), end))
    return pd.DataFrame(rows, columns=["by step", "first", "", "last"])


def _facts(run: Run) -> str:
    config = run.config
    policy, optimizer, rollout = (config.get(key) or {} for key in ("policy", "optimizer", "rollout"))
    model = policy.get("model") or run.info.get("model")
    parameters = run.info.get("parameters")
    size = f" ({parameters / 1e6:,.3g} M parameters)" if isinstance(parameters, int | float) else ""
    facts = [
        f"method {method_label(run.method)}, task {run.task}, seed {run.seed}",
        f"model {model_label(str(model))}{size}" if model else "",
        f"{last_step(run)} of {config.get('steps') or config.get('max_steps') or '?'} steps",
        f"learning rate {optimizer.get('lr') or config.get('learning_rate')}"
        if optimizer.get("lr") or config.get("learning_rate")
        else "",
        f"group size {rollout['group_size']}" if rollout.get("group_size") else "",
        f"started {run.info['started']}" if run.info.get("started") else "",
    ]
    imported = run.info.get("imported")
    lines = [", ".join(filter(None, facts))]
    if isinstance(imported, dict):
        lacks = [
            f"{table}: all" if not run.rows(table) else f"{table}: {', '.join(names)}"
            for table, names in (imported.get("not_recorded") or {}).items()
            if names
        ]
        lines.append(f"Imported from {imported.get('from')}; not recorded: {'; '.join(lacks) or 'nothing is missing'}.")
    return "\n".join(lines)


# -- Events and cost -----------------------------------------------------------------------------------------------------


def problem_sections(runs: Runs) -> list[Section]:
    """What a reader should know: runs left out, events, the optimizer's updates, the sampler, and costs."""
    part = "Events and cost"
    result = []
    said = messages(runs)
    if said:
        result.append(Section("To know", "\n".join(said), part=part))
    events = runs.events
    loud = events[events["severity"] != "info"] if len(events) else events
    if len(loud):
        result.append(Section("Events", _event_table(loud, len(runs) > 1), part=part, name="events"))
    updates = update_table(runs)
    if len(updates):
        result.append(Section("Updates of the last step", updates, _weight_note(runs), part))
    sampler = sampler_section(runs)
    result += [sampler] if sampler is not None else []
    costs = cost_table(runs)
    if len(costs):
        note = "Sums over the recorded steps; evaluation and loading are not in them. Recording holds the probes."
        result.append(Section("Cost", costs, note, part, "costs"))
    return result


def messages(runs: Runs) -> list[str]:
    """Runs left out, damaged parts, rewards that are not numbers, completions that were not kept."""
    said = [f"{name} is left out: {why}" for name, why in runs.skipped.items()]
    said += [f"{run.name}: {part} is set aside: {why}" for run in runs for part, why in run.damaged.items()]
    said += [note for study in studies(runs) for note in study.notes]
    for run in runs:
        bad = run.steps.loc[run.steps["reward_mean"].isna(), "step"].tolist()
        if 0 < len(bad) < len(run.steps):  # of a run without any reward, none was recorded
            said.append(
                f"{run.name}: the reward is not a number in {len(bad)} of {len(run.steps)} steps (first: {bad[0]})."
            )
    why = not_kept(list(runs))
    return [*said, *([why] if why else [])]


def not_kept(runs: Sequence[Run]) -> str:
    """Which runs have no completions because they are reduced; empty if there are none."""
    count = sum(completions_dropped(run) for run in runs)
    if not count:
        return ""
    which = "these runs" if count == len(runs) else f"{count} of {len(runs)} runs"
    return (
        f"Completions of {which} were not kept by `export --to reduced`; a report of the whole runs shows their tokens."
    )


def _event_table(loud: pd.DataFrame, several: bool) -> pd.DataFrame:
    """One row for each rule of a run: how often, when last, and what to do."""
    rows = []
    for (run, rule), own in loud.groupby(["run", "rule"], sort=False):
        last = own.sort_values("step").iloc[-1]
        row = {"run": str(run)} if several else {}
        rows.append(
            row
            | {
                "rule": str(rule),
                "times": str(len(own)),
                "last step": str(last["step"]),
                "message": str(last["message"]),
            }
        )
    return pd.DataFrame(rows[:MOST_EVENTS])


def update_table(runs: Runs) -> pd.DataFrame:
    """A row a run: weights and their bounds, ratios, clipping and KL at the last step; columns that no run has are left out."""
    rows = []
    for name, run in runs.by_name.items():
        if run.steps.empty:
            continue
        last = run.steps.sort_values("step").iloc[-1]
        row: dict[str, Any] = {"run": name}
        if pd.notna(last["weight_mean"]) and last["weight_min"] != last["weight_max"]:
            row["token weight, mean (range)"] = (
                f"{last['weight_mean']:.3f} ({number(last['weight_min'])} to {number(last['weight_max'])})"
            )
            for bound in ("low", "high"):
                share = last.get(f"weight_saturation_{bound}_gradient")
                if pd.notna(share):
                    row[f"gradient on the {'lower' if bound == 'low' else 'upper'} bound"] = percent(share)
        updates = run.updates[run.updates["step"] == run.updates["step"].max()] if len(run.updates) else run.updates
        if len(updates) > 1 and updates["ratio_max"].notna().any():
            row["ratio"] = f"{number(updates['ratio_min'].min())} to {number(updates['ratio_max'].max())}"
            row["KL to the step's start [nats]"] = number(updates["kl_old_k3"].max())
        if pd.notna(last["clip_fraction_low"]) and last["clip_fraction_low"] + last["clip_fraction_high"] > 0:
            row["tokens clipped below / above"] = (
                f"{percent(last['clip_fraction_low'], 1)} / {percent(last['clip_fraction_high'], 1)}"
            )
        clipped = known(run.steps["grad_clipped"]) if "grad_clipped" in run.steps else np.zeros(0)
        if np.isfinite(clipped).any():
            row["updates with a clipped gradient, all steps"] = percent(np.nanmean(clipped))
        rows.append(row)
    frame = pd.DataFrame(rows)
    if frame.shape[1] < 2:
        return pd.DataFrame()
    frame = frame.fillna("–")
    return frame if len(runs) > 1 else frame.drop(columns="run")


def _weight_note(runs: Runs) -> str:
    for run in runs:
        if run.steps.empty:
            continue
        last = run.steps.sort_values("step").iloc[-1]
        shares = [last.get(f"weight_saturation_{bound}_gradient") for bound in ("low", "high")]
        if any(pd.notna(share) and share > SATURATED_WEIGHTS for share in shares):
            return f"{run.name}: almost all of the gradient has its weight on one bound: this is GRPO up to the gradient's scale."
    return ""


def sampler_section(runs: Runs) -> Section | None:
    """Sampler against trainer: a row for each run whose sampler differs, one line if none does; None without such data.

    A sampler differs where some ratio is outside [0.9, 1.1] or an estimate of KL(μ‖π) exceeds 0.001 nats.
    """
    tables = {name: mismatch_table(run) for name, run in runs.by_name.items()}
    tables = {name: table for name, table in tables.items() if len(table)}
    title, part, estimates = "Sampler against trainer", "Events and cost", ["k1", "k2", "k3"]
    rows = []
    for name, table in tables.items():
        whole = table.iloc[0]
        if whole["outside"] > 0 or whole[estimates].abs().max() > 1e-3:
            values = {f"{k} [nats]": number(whole[k]) for k in estimates}
            rows.append(
                {
                    "run": name,
                    "tokens": f"{whole['tokens']:,}",
                    "ratios outside [0.9, 1.1]": percent(whole["outside"], 2),
                }
                | values
                | {"most at": worst_ranges(table)}
            )
    if not tables:
        return None
    if not rows:
        largest = max(table.iloc[0][estimates].abs().max() for table in tables.values())
        text = f"Their log-probabilities agree: no ratio is outside [0.9, 1.1], and no estimate of KL(μ‖π) exceeds {largest:.1g} nats."
        return Section(title, text, part=part)
    note = "Ratio r = π/μ of the trainer's policy to the sampler's; KL(μ‖π) estimated by k1 = −ln r, k2 = (ln r)²/2, k3 = r − 1 − ln r."
    return Section(title, pd.DataFrame(rows), note, part)


def cost_table(runs: Runs) -> pd.DataFrame:
    """Seconds of each kind and the most memory, a row a run; imported runs have none."""
    rows = []
    for name, run in runs.by_name.items():
        if run.steps.empty or run.steps["training_s"].isna().all():
            continue
        parts = {kind: float(run.steps[f"{kind}_s"].sum()) for kind in ("generation", "training", "recording")}
        total = sum(parts.values())
        row = {"run": name, "a step [s]": f"{total / len(run.steps):.2f}", "all [min]": f"{total / 60:.1f}"}
        row |= {kind: percent(seconds / total if total else 0.0) for kind, seconds in parts.items()}
        rows.append(row | {"peak memory": peak_memory(run) or "–", "device": str(run.info.get("device") or "–")})
    frame = pd.DataFrame(rows)
    return frame if len(runs) > 1 or frame.empty else frame.drop(columns="run")


def peak_memory(run: Run) -> str:
    """The most memory that a run held, by kind: `process 547 MiB`; empty if it was not recorded."""
    held = run.info.get("peak_memory_bytes")
    kinds: Mapping[str, Any] = held if isinstance(held, dict) else {"process": held}
    return ", ".join(f"{kind} {size / 2**20:,.0f} MiB" for kind, size in kinds.items() if isinstance(size, int | float))


# -- Runs, forks, commands -----------------------------------------------------------------------------------------------


def run_table(runs: Runs) -> pd.DataFrame:
    """One row per run; runs that cannot be read come last."""
    rows = []
    for name, run in runs.by_name.items():
        why = run.info.get("end")
        status = run.status if run.status == "finished" or not why else f"{run.status}: {why}"
        reward = series_mean(known(run.steps.sort_values("step")["reward_mean"])[-max(1, len(run.steps) // 3) :])[0]
        row = {
            "run": name,
            "method": method_label(run.method),
            "seed": str(run.seed),
            "task": run.task,
            "status": status,
        }
        rows.append(
            row
            | {
                "steps": str(len(run.steps)),
                "reward, last third": number(reward),
                "started": str(run.info.get("started") or "–"),
            }
        )
    rows += [{"run": name, "status": f"cannot be read: {why}"} for name, why in runs.skipped.items()]
    return pd.DataFrame(rows).fillna("–")


def fork_parts(runs: Runs) -> Iterator[tuple[str, pd.DataFrame, list[Section]]]:
    """(name, differences, sections) for each set of settings with which counterfactual updates were made."""
    recorded = [run for run in runs if run.rows("forks")]
    if not recorded:
        return
    table = fork_differences(runs.forks)
    several = table["fork"].nunique() > 1
    for count, (name, own) in enumerate(table.groupby("fork", sort=False), 1):
        states = list(dict.fromkeys(own["state"]))
        sections = []
        for state in states:
            # of several states, the matched comparisons are shown for all of them together; the table has the rest
            for comparison_ in COMPARISONS if state == states[-1] else COMPARISONS[:1]:
                columns, rows = fork_table(own, state, comparison_)
                if rows:
                    title = f"{f'Fork {count}, ' if several else ''}{state}, {COMPARISON_TEXT[comparison_]}"
                    sections.append(
                        Section(title, pd.DataFrame(rows, columns=list(columns)), part="Counterfactual updates")
                    )
        yield f"fork_{name}" if several else "forks", own, sections


def command_table(runs: Runs, source: str) -> pd.DataFrame:
    """What each command makes, for everything on a page."""
    rows = [("this page with its figures and tables", f"sharpscope analyze {source}")]
    rows += (
        [("the published claims, tested on these runs", f"sharpscope study claims {source}")] if len(runs) > 1 else []
    )
    for run in list(runs)[:20]:
        if run.config_text is not None and run.path.exists():
            name, folder = shlex.quote(run.name), shlex.quote(str(Path(run.path) / "config.yaml"))
            rows.append((f"the run {run.name}, again", f"sharpscope run {folder} --out runs/again-{name}"))
    return pd.DataFrame(rows, columns=["makes", "command"])

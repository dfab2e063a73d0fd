"""What a run, or several, are shown as: a list of sections, the same for `show` and for the page of `analyze`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
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
from sharpscope.analysis.sections import Section
from sharpscope.analysis.spikes import SPIKE_Z, recorded_by
from sharpscope.analysis.statistics import FEW_PAIRS, FEWEST, NO_COLLAPSE, series_mean
from sharpscope.analysis.study import Setting, Study, flat, per_run, studies
from sharpscope.analysis.summary import facts_of, verdict
from sharpscope.analysis.text import (
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
from sharpscope.diagnose.report import sparkline
from sharpscope.traces import MAX_SATURATION, Run, Runs

SHOWN_SETTINGS = 4
"""Settings of a study that curves and tables show: those of the comparison, then those with the most seeds."""
LARGEST_TOKENS = 5
LARGEST_STEPS = 6
"""Steps whose largest tokens are listed on the page, the spike that is the most times the typical gradient first."""
GROWN = 2.0
"""`show` names the layers that grew where the gradient norm is at least this many times the typical one."""
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
    head = Section(f"{run.name} · {run.status}", facts_of(run))
    if len(run.steps):
        head = replace(head, content=f"{verdict(run)}\n{head.content}")
    if run.steps.empty:
        return [head, Section("", "No step is recorded yet."), *problem_sections(runs)]
    study = Study({run.name: run}, name=run.task)
    found = found_sections(study, study.settings)
    spike = largest_update(run)
    if spike is not None and spike.times >= GROWN:
        found += layer_sections(run, spike.step)
    curves = Section("Curves", curve_table(run), "Means of the first and the last third.")
    parts = [head, *found, entropy_section(run), selection_section(run), curves]
    parts += sharpness_sections(study.settings)
    return [*filter(None, parts), *problem_sections(runs)]


def runs_sections(runs: Runs) -> list[Section]:
    """Several runs, for a terminal: what each study found, how its settings differ, and the list of runs."""
    parts = [
        section for study, settings in laid_out(runs) for section in study_sections(study, settings)
    ]
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
    charts: list[dict[str, Any]] = []
    tables: dict[str, pd.DataFrame] = {"runs": runs.table, "events": runs.events}
    for study, settings in laid_out(runs):
        sections += study_sections(study, settings)
        charts.append(study_charts(study, settings, runs))
        shown = study.only([setting.label for setting in settings])
        tables |= {
            f"{study.slug}comparison": comparison(study),
            f"{study.slug}curves": study_values(shown),
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
        sections += [replace(section, part="Tokens", step=spike.step) for section in details]
    sections += identity_sections(runs)
    sections += [Section("Runs", run_table(runs), part="Compare"), *problem_sections(runs)]
    if len(runs) == 1:  # there is nothing to compare
        instead = {"Runs": "Events and cost"}
        sections = [
            replace(s, part=instead.get(s.title, "Found")) if s.part == "Compare" else s
            for s in sections
        ]
    again = Section("", command_table(runs, source), part="Make it again")
    return Page(runs, source, [*sections, again], charts, tables, choices)


def laid_out(runs: Runs) -> list[tuple[Study, list[Setting]]]:
    """Each study that has steps with the settings that are shown, the baseline of comparisons first."""
    result = []
    for study in studies(runs):
        first = dict.fromkeys([*comparison(study)["baseline"][:1], study.baseline, study.treatment])
        rank = {label: n for n, label in enumerate(first)}
        ordered = sorted(
            study.settings, key=lambda s: (rank.get(s.label, len(rank)), -len(s.runs), s.label)
        )
        if ordered:
            result.append((study, ordered[:SHOWN_SETTINGS]))
    return result


# -- Found and Compare ---------------------------------------------------------------------------------------------------


def found_sections(
    study: Study, settings: Sequence[Setting], top: int = 4, runs: int = 2
) -> list[Section]:
    """The headline: what was trained and its accuracy, `top` tokens of the first `runs` settings, whether the method mattered."""
    first = [next(iter(setting.runs.values())) for setting in settings[:runs]]
    text = trained_text(study, settings[:2])
    said = [Section("What was found", text)] if text else []
    effects = [section for run in first for section in effect_headline(run, top)]
    return [*said, *effects, *moved_sections(first, top), *difference_sections(study, settings)]


@per_run
def comparison(study: Study) -> pd.DataFrame:
    """`compare_runs` of a study, computed once."""
    return compare_runs(study.runs)


def compared_settings(
    study: Study, settings: Sequence[Setting]
) -> list[tuple[str, str, pd.DataFrame]]:
    """(baseline, treatment, rows of `comparison`) of the settings that are shown, in their order."""
    labels = [setting.label for setting in settings]
    groups = [
        (str(a), str(b), rows)
        for (a, b), rows in comparison(study).groupby(["baseline", "treatment"])
    ]
    if len(study.settings) < 3:  # two runs are named by themselves where their method is the same
        return groups
    return sorted((one for one in groups if one[1] in labels), key=lambda one: labels.index(one[1]))


def main_differences(rows: pd.DataFrame) -> pd.DataFrame:
    """Those of HEADLINE among the rows of `comparison`, in its order."""

    def rank(quantity: str) -> int:
        fits = [
            n
            for n, name in enumerate(HEADLINE)
            if quantity.endswith(name) or quantity.startswith(name)
        ]
        return fits[0] if fits and not quantity.startswith("train") else len(HEADLINE)

    ranks = rows["quantity"].map(rank)
    return rows.loc[ranks[ranks < len(HEADLINE)].sort_values(kind="stable").index]


def difference_sections(study: Study, settings: Sequence[Setting]) -> list[Section]:
    """Whether the change of method mattered: the main differences of the first two settings, in words and numbers."""
    pairs = compared_settings(study, settings)
    if not pairs:
        return []
    baseline, treatment, rows = pairs[0]
    main, said = main_differences(rows).head(6), []
    runs = [run for label, _, run in study.each() if label == treatment and rotates(run)]
    for name, text in (
        ("gradient_rotation", "It turns the gradient by"),
        ("noise_rotation", "The noise of one batch turns it by about"),
    ):
        angles = known(
            pd.concat([pd.Series(dtype=float), *(run.steps[name].dropna() for run in runs)])
        )
        said += [f"{text} {angles.mean():.0f}°."] if len(angles) else []
    n = int(main["n"].max()) if len(main) else 0
    said.append(
        "One pair of runs: repeat with more seeds before believing a difference."
        if n == 1
        else f"{n} seeds."
    )
    said += [
        f"{int(halve)} seeds would halve the intervals." for halve in main["to_halve"].dropna()[:1]
    ]
    title = (
        f"Did {method_label(treatment)} change anything, compared with {method_label(baseline)}?"
    )
    shown, records = (
        difference_table(main).drop(columns=_PAIRS, errors="ignore"),
        main.to_dict("records"),
    )
    return [Section(title, shown, " ".join(said), records=records)]  # type: ignore[arg-type]


_PAIRS = ["pairs", "worst pair"]


def comparison_sections(study: Study, settings: Sequence[Setting]) -> list[Section]:
    """All paired differences, a table for each of the `settings` that has pairs with the baseline."""
    result = []
    for baseline, treatment, rows in compared_settings(study, settings):
        n, title = int(rows["n"].max()), f"{method_label(treatment)} − {method_label(baseline)}"
        note, records = f"{n} pair{'s' * (n > 1)} of runs. {COVERED}", rows.to_dict("records")
        result.append(Section(title, difference_table(rows), note, "Compare", records=records))  # type: ignore[arg-type]
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
        clear = verdict_of(row["low"], row["high"], row["n"], counted=share)
        if clear and 1 < row["n"] < FEW_PAIRS:
            clear += f"; {NO_COLLAPSE}"
        cells = {
            "quantity": row["quantity"]
            + ("" if row["unit"] in ("share", "1", "reward") else f" [{row['unit']}]")
        }
        for side in ("baseline", "treatment"):
            end = number(factor * row[f"{side}_value"])
            cells[method_label(row[side])] = end + " %" * (share and end != "–")
        cells |= {
            "difference": text,
            "shows": clear if math.isfinite(value) else row["note"],
            "pairs": str(row["n"]),
        }
        cells["worst pair"] = (
            f"{number(factor * row['worst'])} ({row['worst_pair']})" if row["n"] > 1 else ""
        )
        made.append(cells)
    frame = pd.DataFrame(made)
    return frame if (rows["n"] > 1).any() else frame.drop(columns=_PAIRS, errors="ignore")


def verdict_of(low: float, high: float, n: int, counted: bool) -> str:
    """What an interval shows. None of seeds that all agree, or of fewer than FEWEST where counts make a share coarse."""
    if not math.isfinite(high - low):
        return ""
    if high == low or (n > 1 and counted and n < FEWEST):
        return "too few seeds to tell"
    return "a difference" if low > 0 or high < 0 else "no difference shown"


def setting_sections(study: Study) -> list[Section]:
    """What the configurations of a study's settings differ in; values that differ between a setting's runs are joined."""
    columns = {
        s.label: [flat(run.config) for run in s.runs.values()]
        for s in study.settings[:SHOWN_SETTINGS]
    }
    rows = []
    for key in dict.fromkeys(key for facts in columns.values() for one in facts for key in one):
        values = [[one.get(key) for one in part] for part in columns.values()]
        texts = [
            [number(v) if isinstance(v, float) else "none" if v is None else str(v) for v in part]
            for part in values
        ]
        cells = [printable(", ".join(dict.fromkeys(part)), 60) for part in texts]
        if len(set(cells)) > 1 and key not in ("name", "out", "method.name", "seed"):
            rows.append((key, *cells))
    frame = pd.DataFrame(rows, columns=["setting", *map(method_label, columns)])
    return [Section("Settings that differ", frame, part="Compare")] if rows else []


# -- Sharpness -----------------------------------------------------------------------------------------------------------


def sharpness_sections(settings: Sequence[Setting]) -> list[Section]:
    """Sharpness at the first and the last step measured; a change is paired by prompt. Saturated estimates are marked."""
    each = [
        (setting, run, sharpness_rows(run)) for setting in settings for run in setting.runs.values()
    ]
    run = each[0][1]
    if not (names := dict.fromkeys(name for _, _, rows in each for name in rows["measure"])):
        return [
            Section(
                "Sharpness", f"Not recorded{recorded_by(run, 'probes.preset')}.", part="Sharpness"
            )
        ]
    rows = []
    for measure, setting in ((measure, setting) for measure in names for setting in settings):
        parts = [(run, rows[rows["measure"] == measure]) for of, run, rows in each if of is setting]
        parts = [(run, part) for run, part in parts if len(part)]
        if not parts:
            continue
        longer = [(run, part) for run, part in parts if part["step"].nunique() > 1]
        first = [(part["value"].iloc[0], part["half"].iloc[0]) for _, part in parts]
        last = [(part["value"].iloc[-1], part["half"].iloc[-1]) for _, part in longer]
        steps = [
            _span([part["step"].iloc[k] for _, part in several])
            for k, several in ((0, parts), (-1, longer))
        ]
        worst = max(known(pd.concat([part["saturation"] for _, part in parts]).fillna(-1.0)))
        row = {
            "measure": measure,
            "setting": method_label(setting.label),
            "steps": " and ".join(filter(None, steps)),
        }
        row |= {"at the first": value_text(*over_seeds(first))}
        row |= {"at the last": value_text(*over_seeds(last))}
        row["change"] = change_text(*over_seeds([_paired(run, part) for run, part in longer]))
        row["of the possible rise"] = (
            percent(worst) + " (saturated)" * bool(worst > MAX_SATURATION) if worst >= 0 else "–"
        )
        rows.append(row)
    frame = _dense(pd.DataFrame(rows))
    note = "Rise of the loss within the radius (SAM), eigenvalue, or 2 / critical learning rate. ±: 95 % interval over prompts or seeds."
    if "of the possible rise" in frame:
        note += f" Above {percent(MAX_SATURATION)} of the possible rise it says how many answers are right, not how sharp the loss is."
    if len(each) == 1 and (said := critical_text(run.probes)):
        note += f" Last update measured: {said}."
    return [Section("Sharpness at the steps where it was measured", frame, note, "Sharpness")]


def _span(steps: Sequence[int]) -> str:
    """The steps as text: `6`, or `4 to 6` where runs differ."""
    return " to ".join(map(str, sorted({min(steps), max(steps)}))) if steps else ""


def _dense(frame: pd.DataFrame) -> pd.DataFrame:
    """Without columns of dashes, and without the setting if there is one only."""
    alone = ["setting"] if frame["setting"].nunique() == 1 else []
    return frame.drop(columns=[*alone, *(name for name in frame if (frame[name] == "–").all())])


def _paired(run: Run, part: pd.DataFrame) -> tuple[float, float]:
    """Last minus first of a run's estimates, with half of its interval over prompts; on the prompts of updates they are independent."""
    ends = part.iloc[[0, -1]]
    difference = float(ends["value"].iloc[1]) - float(ends["value"].iloc[0])
    if not ends["probe_set"].any():
        return difference, Z * math.hypot(*ends["prompt_std_error"].astype(float))
    first, last = (
        _prompt_values(run).get(key, {}) for key in zip(*_estimate_keys(ends), strict=True)
    )
    if len(first) < 2 or set(first) != set(last):
        return difference, math.nan
    each = np.array([last[prompt] - first[prompt] for prompt in first])
    return difference, Z * float(each.std(ddof=1)) / math.sqrt(len(each))


def _estimate_keys(rows: pd.DataFrame) -> Iterator[list[Any]]:
    """The columns that tell an estimate of the probes from another; None for what is null."""
    for name in ("step", "probe_set", "functional", "parameters", "quantity", "rho", "seed"):
        yield [None if pd.isna(value) else value for value in rows[name].tolist()]


@per_run
def _prompt_values(run: Run) -> dict[tuple[Any, ...], dict[Any, float]]:
    """Estimate → prompt → its first value."""
    found: dict[tuple[Any, ...], dict[Any, float]] = {}
    rows = run.probe_prompts
    keys = zip(*_estimate_keys(rows), strict=True)
    for key, prompt, value in zip(keys, rows["prompt"], known(rows["value"]), strict=True):
        found.setdefault(key, {}).setdefault(prompt, float(value))
    return found


# -- One run -------------------------------------------------------------------------------------------------------------


def curve_table(run: Run) -> pd.DataFrame:
    """Quantity, mean of the first third, sparkline, mean of the last third ± its error over steps; what never varies is left out."""
    steps = run.steps.sort_values("step")
    # of a method with advantages the loss says little
    names = {"loss": Quantity("loss")} if steps["reward_mean"].isna().all() else {}
    rows = []
    for column, quantity in (names | STEPS).items():
        values = quantity.factor * known(steps[column]) if column in steps else np.zeros(0)
        if column.endswith("_rotation"):  # recorded at some steps only
            values = values[np.isfinite(values)] if rotates(run) else np.zeros(0)
        finite = values[np.isfinite(values)]
        if len(finite) and not (
            np.ptp(finite) < 1e-6 and ("[%]" in quantity.name or column == "weight_mean")
        ):
            third = max(1, len(values) // 3)
            first, last = values[:third].mean(), series_mean(values[-third:])
            end = interval_text(last[0], Z * last[1]) if math.isfinite(last[0]) else "not a number"
            rows.append((quantity.name, number(first, "not a number"), sparkline(values), end))
    return pd.DataFrame(rows, columns=["by step", "first", "", "last"])


# -- Events and cost -----------------------------------------------------------------------------------------------------


def problem_sections(runs: Runs) -> list[Section]:
    """What a reader should know: runs left out, damaged parts, events, the sampler, and costs."""
    part = "Events and cost"
    said = [f"{name} is left out: {why}" for name, why in runs.skipped.items()]
    said += [
        f"{run.name}: {part} is set aside: {why}"
        for run in runs
        for part, why in run.damaged.items()
    ]
    said += [note for study in studies(runs) for note in study.notes]
    result = [Section("To know", "\n".join(said), part=part)] if said else []
    events = runs.events
    loud = events[events["severity"] != "info"] if len(events) else events
    if len(loud):
        last = loud.sort_values("step", kind="stable").groupby(["run", "rule"], sort=False)
        table = last[["step", "message"]].last().assign(times=last.size()).reset_index()
        table = table[["run", "rule", "times", "step", "message"]].rename(
            columns={"step": "last step"}
        )
        result.append(
            Section("Events", table if len(runs) > 1 else table.drop(columns="run"), part=part)
        )
    result += filter(None, [sampler_section(runs)])
    if len(costs := cost_table(runs)):
        note = "Sums over the recorded steps; evaluation and loading are not in them. Recording includes the probes."
        result.append(Section("Cost", costs, note, part))
    return result


def cost_table(runs: Runs) -> pd.DataFrame:
    """Seconds of each kind and the most memory, a row a run; imported runs have none."""
    rows = []
    for name, run in runs.by_name.items():
        if run.steps.empty or run.steps["training_s"].isna().all():
            continue
        parts = {
            kind: float(run.steps[f"{kind}_s"].sum())
            for kind in ("generation", "training", "recording")
        }
        seconds = (run.info.get("measuring") or {}).get("seconds") or {}
        # also before and after the steps
        parts["recording"] = sum(map(float, seconds.values())) or parts["recording"]
        total = sum(parts.values())
        held = run.info.get("peak_memory_bytes")
        sizes = {
            kind: n
            for kind, n in (held if isinstance(held, dict) else {"process": held}).items()
            if n
        }
        row = {
            "run": name,
            "a step [s]": f"{total / len(run.steps):.2f}",
            "all [min]": f"{total / 60:.1f}",
        }
        row |= {kind: percent(part / total if total else 0.0) for kind, part in parts.items()}
        row["peak memory"] = (
            ", ".join(f"{kind} {size / 2**20:,.0f} MiB" for kind, size in sizes.items()) or "–"
        )
        rows.append(row | {"device": str(run.info.get("device") or "–")})
    frame = pd.DataFrame(rows)
    return frame.drop(columns=["run", "device"], errors="ignore") if len(runs) == 1 else frame


# -- Runs and commands ---------------------------------------------------------------------------------------------------


def run_table(runs: Runs) -> pd.DataFrame:
    """One row per run; runs that cannot be read come last."""
    rows = []
    for name, run in runs.by_name.items():
        why, count = run.info.get("end"), len(run.steps)
        status = run.status if run.status == "finished" or not why else f"{run.status}: {why}"
        reward, error = series_mean(
            known(run.steps.sort_values("step")["reward_mean"])[-max(1, count // 3) :]
        )
        row = {
            "run": name,
            "method": method_label(run.method),
            "seed": str(run.seed),
            "task": run.task,
        }
        text = interval_text(reward, Z * error)
        rows.append(
            row
            | {
                "status": status,
                "steps": str(count),
                "reward, last third (± 95 % over steps)": text,
            }
        )
    rows += [
        {"run": name, "status": f"cannot be read: {why}"} for name, why in runs.skipped.items()
    ]
    return pd.DataFrame(rows).fillna("–")


def command_table(runs: Runs, source: str) -> pd.DataFrame:
    """What each command makes, for everything on a page."""
    rows = [("this page and its tables", f"sharpscope analyze {source}")]
    rows.append(("figures for a paper", f"sharpscope analyze {source} --figures"))
    for run in list(runs)[:20]:
        if run.config_text is not None and run.path.exists():
            config, again = shlex.quote(str(run.path / "config.yaml")), shlex.quote(run.name)
            rows.append(
                (f"the run {run.name}, again", f"sharpscope run {config} --out runs/again-{again}")
            )
    return pd.DataFrame(rows, columns=["makes", "command"])

"""Tables of docs/fork.md and of the second study's counterfactual part, from the runs of `forks`.

sharpscope reduce runs/forks --tokens 0 --out runs/reduced && sharpscope pack runs/reduced --out data/studies/2/forks
python -m experiments.benchmarks.forks_report
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.benchmarks.forks import TASKS, settings, sharpness_settings
from sharpscope.analysis import fork_differences
from sharpscope.analysis.claims import test_claims
from sharpscope.traces import Run, Runs, load_runs

ROOT = Path(__file__).resolve().parents[2]
DATA = Path("data/studies/2/forks")
PAGE, STUDY = Path("docs/fork.md"), Path("experiments/studies/2/forks.md")
TITLES = {
    "math": "Mathematics",
    "tool_qa": "Tool-augmented question answering",
    "knights_knaves": "Knights and Knaves",
}
BEGIN, END = "<!-- begin: experiments/benchmarks/forks_report.py -->\n", "<!-- end -->\n"
POINTS = 100.0
ALIGNED, REVERSED, SHUFFLED = "mass 4", "mass 4 reversed", "mass 4 shuffled"
NAMES = {REVERSED: f"{ALIGNED}-reverse", SHUFFLED: f"{ALIGNED}-shuffled", "low p": "low", "high p": "high"}
"""Arm -> its name as the claims expect it."""
LEVEL = 0.05
QUANTITIES: tuple[tuple[str, str, str | None], ...] = (
    ("C7", ALIGNED, "grpo"),
    ("C10", ALIGNED, REVERSED),
    ("C10", ALIGNED, SHUFFLED),
    ("C9", "low p", None),
    ("C9", "low p", "high p"),
    ("C13", "A>0", None),
    ("C13", "A<0", None),
    ("C13", "A>0", "A<0"),
)
"""Claim, arm and rival; without a rival the arm's own change."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=DATA, help="a pack, or the folder of the runs")
    options = parser.parse_args()
    runs = found(options.runs)
    for page, text in ((PAGE, tables(runs)), (STUDY, study(runs))):
        page.write_text(placed(page.read_text("utf-8"), text), "utf-8")


def found(folder: Path) -> dict[str, Run]:
    """The runs by task, in the order of TASKS."""
    loaded: Runs = load_runs(folder)
    by_task = {run.task: run for run in loaded}
    return {task: by_task[task] for task in TASKS if task in by_task}


def placed(page: str, text: str) -> str:
    """The page with `text` between its markers."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + text + "\n" + END + rest.split(END)[1]


def forked(run: Run, chosen: Mapping[str, Any], *outcomes: str) -> pd.DataFrame:
    """Rows of the run's fork with these settings; those of some outcomes, if any are named."""
    for name, own in run.info["forks"].items():
        if all(list(own[key]) == list(value) for key, value in chosen.items()) and (
            "outcomes" in chosen or "sharpness" not in own["outcomes"]
        ):
            rows = run.forks[run.forks["fork"] == name]
            return rows[rows["outcome"].isin(outcomes)] if outcomes else rows
    return run.forks.iloc[:0]


# -- docs/fork.md ----------------------------------------------------------------------------------------------------


def tables(runs: Mapping[str, Run]) -> str:
    """A summary, and for each task a table per state with a row per arm."""
    return "\n".join([_counts(runs), *(_section(task, run) for task, run in runs.items())])


def _counts(runs: Mapping[str, Run]) -> str:
    """How many differences from the reference have an interval without 0, and which remain after Holm's adjustment."""
    lines = [
        "| policy | differences | by chance | interval without 0: step / matched KL | after Holm: step / matched KL |"
    ]
    lines += ["|---|---|---|---|---|"]
    errors: list[float] = []
    for task, run in runs.items():
        differences = fork_differences(forked(run, settings(task), "heldout_failure"))
        made = differences[(differences["comparison"] == "step") & (differences["state"] != "all states")]
        errors += (POINTS * (made["predicted"] - made["change"]).abs()).tolist()
        own = differences[(differences["arm"] != differences["reference"]) & (differences["state"] != "all states")]
        cells, kept = [], []
        for comparison in ("step", "kl"):
            chosen = own[own["comparison"] == comparison]
            cells.append(int((chosen["p"] < LEVEL).sum()))
            adjusted = holm(chosen["p"])
            pairs = zip(chosen["arm"] + " (" + chosen["state"] + ")", adjusted, strict=True)
            kept.append([name for name, p in pairs if p < LEVEL])
        count = int((own["comparison"] == "step").sum())
        after = " / ".join(", ".join(names) or "none" for names in kept)
        lines.append(f"| {TITLES[task]} | {count} | {LEVEL * count:.1f} | {cells[0]} / {cells[1]} | {after} |")
    linear = (
        "The mean first-order prediction of a step's change of the held-out failure differs from the measured mean by "
        f"{np.median(errors):.2f} points in the median over arms and states, and by {max(errors):.2f} at most."
    )
    return "\n".join([*lines, "", linear, ""])


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values of tests of one family."""
    values = np.asarray(p, dtype=float)
    order = np.argsort(values)
    adjusted = np.maximum.accumulate(np.minimum(1.0, values[order] * np.arange(len(values), 0, -1)))
    result = np.empty(len(values))
    result[order] = adjusted
    return result.tolist()


def _section(task: str, run: Run) -> str:
    """The tables of one task: a row per arm, a table per state."""
    forks = forked(run, settings(task), "heldout_failure", "train_failure", "gradient_rotation", "update_rotation")
    differences = fork_differences(forks)
    aligned = fork_differences(forks[forks["arm"].isin([ALIGNED, SHUFFLED])], reference=SHUFFLED)
    lines = [f"### {TITLES[task]} ({run.info['trainable_parameters']:,} parameters)", ""]
    for step in sorted(forks["step"].unique()):
        state, rows = f"step {step}", forks[forks["step"] == step]
        own = differences[differences["state"] == state]
        name = rows["reference"].iloc[0]
        reference = _row(own, name)
        lines += [_caption(state, own, rows), ""]
        lines += ["| arm | rotation ∇L / Δ [°] | held-out failure | p | predicted | at matched KL | training failure |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for arm in (arm for arm in dict.fromkeys(own["arm"]) if arm != name):
            turned = " / ".join(f"{_row(own, arm, f'{of}_rotation')['change']:.2g}" for of in ("gradient", "update"))
            predicted = POINTS * (_row(own, arm)["predicted"] - reference["predicted"])
            lines.append(_line(arm, turned, own, f"{predicted:+.2f}"))
        lines.append(_line(f"{ALIGNED} − {SHUFFLED}", "", aligned[aligned["state"] == state], "", ALIGNED))
        lines.append("")
    return "\n".join(lines)


def _caption(state: str, own: pd.DataFrame, rows: pd.DataFrame) -> str:
    arm = rows["reference"].iloc[0]
    heldout, training = _row(own, arm), _row(own, arm, "train_failure")
    names = ("change", "change_low", "change_high")
    share = rows.loc[rows["outcome"] == "heldout_failure", "effective_share"].min()
    cost = rows.drop_duplicates(["batch", "arm", "comparison"]).groupby("batch")["seconds"].sum().median()
    return (
        f"**{state.capitalize()}**, {int(heldout['batches'])} batches. `{arm}` changes the held-out failure by "
        f"{_interval(heldout, names)} (predicted {POINTS * heldout['predicted']:+.2f}) and the training failure by "
        f"{_interval(training, names)} points. Smallest effective share of the samples {share:.2f}; {cost:.0f} s per batch of "
        f"{own['arm'].nunique()} arms."
    )


def _line(name: str, turned: str, own: pd.DataFrame, predicted: str, arm: str = "") -> str:
    arm = arm or name
    step, matched, training = _row(own, arm), _row(own, arm, comparison="kl"), _row(own, arm, "train_failure")
    cells = [name, turned, _interval(step), p_text(step["p"]), predicted, _interval(matched), _interval(training)]
    return "| " + " | ".join(cells) + " |"


def _row(
    own: pd.DataFrame, arm: str, outcome: str = "heldout_failure", comparison: str = "step", state: str = ""
) -> pd.Series:
    chosen = (own["arm"] == arm) & (own["outcome"] == outcome) & (own["comparison"] == comparison)
    if state:
        chosen &= own["state"] == state
    return own[chosen].iloc[0]


def _interval(
    row: pd.Series, names: tuple[str, str, str] = ("difference", "low", "high"), factor: float = POINTS
) -> str:
    mean, low, high = (factor * row[name] for name in names)
    return f"{mean:+.2f}" if math.isnan(low) else f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"


def p_text(p: float) -> str:
    """A p-value with one or two digits."""
    if math.isnan(p):
        return "–"
    return f"{p:.2f}" if p >= 0.01 else f"{p:.0e}".replace("e-0", "e-")


# -- the second study ------------------------------------------------------------------------------------------------


def study(runs: Mapping[str, Run]) -> str:
    """Local versions of C4, C7, C9, C10 and C13: by state, and the verdicts of the claims' own rules."""
    return "\n".join([_by_state(runs), _sharpness(runs), _groups(runs), _verdicts(runs)])


def _by_state(runs: Mapping[str, Run]) -> str:
    """Differences of the held-out failure at matched KL, with p-values adjusted over the whole table."""
    found: list[tuple[str, str, dict[str, pd.Series]]] = []
    for claim, arm, rival in QUANTITIES:
        for task, run in runs.items():
            rows = forked(run, settings(task), "heldout_failure")
            if not {arm, rival or arm} <= set(rows["arm"]):
                continue
            rows = rows[rows["arm"].isin([arm, rival or rows["reference"].iloc[0]])]
            differences = fork_differences(rows, reference=rival)
            text = f"{arm} − {rival}" if rival else f"{arm} alone"
            states = [f"step {step}" for step in sorted(rows["step"].unique())]
            cells = {state: _row(differences, arm, comparison="kl", state=state) for state in states}
            found.append((f"{claim} | {text}" + ("" if rival else " (own change)"), TITLES[task], cells))
    tested = [row["p"] for name, _, cells in found for row in cells.values() if "own change" not in name]
    adjusted = iter(holm(tested))
    lines = ["| claim | arms | policy | batches | start | middle | end |", "|---|---|---|---|---|---|---|"]
    for name, policy, cells in found:
        texts = []
        for row in cells.values():
            if "own change" in name:
                texts.append(_interval(row, ("change", "change_low", "change_high")))
            else:
                texts.append(_interval(row) + ("*" if next(adjusted) < LEVEL else ""))
        texts += ["–"] * (3 - len(texts))
        counts = " / ".join(str(int(row["batches"])) for row in cells.values())
        lines.append(f"| {name} | {policy} | {counts} | {' | '.join(texts)} |")
    return "\n".join([*lines, "", f"\\* p < {LEVEL:g} after Holm's adjustment over the {len(tested)} differences.", ""])


def _sharpness(runs: Mapping[str, Run]) -> str:
    """Ratio of SAM sharpness and critical sharpness after the update, in per cent."""
    lines = [
        "| policy | state | arms | SAM sharpness, matched KL [%] | batches | critical sharpness, step as it is [%] | batches |",
        "|---|---|---|---|---|---|---|",
    ]
    for task, run in runs.items():
        rows = forked(run, sharpness_settings())
        if rows.empty:
            continue
        for step in sorted(rows["step"].unique()):
            for arm, rival in ((ALIGNED, "grpo"), (ALIGNED, REVERSED), (ALIGNED, SHUFFLED), ("grpo-sam", "grpo")):
                here = rows[(rows["step"] == step) & rows["arm"].isin([arm, rival])]
                sam, count = _ratio(here, arm, rival, "sam_sharpness", "kl")
                critical, others = _ratio(here, arm, rival, "critical_sharpness", "step")
                cells = [_percent(sam, count), str(count), _percent(critical, others), str(others)]
                lines.append(f"| {TITLES[task]} | step {step} | {arm} / {rival} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _percent(row: pd.Series, count: int) -> str:
    return f"{_interval(row, factor=1.0)} (p = {p_text(row['p'])})" if count > 1 else "–"


def _ratio(rows: pd.DataFrame, arm: str, rival: str, outcome: str, comparison: str) -> tuple[pd.Series, int]:
    """100·ln(arm / rival) of an outcome over batches, as a row of `fork_differences`; and the batches with both."""
    chosen = rows[(rows["outcome"] == outcome) & (rows["comparison"] == comparison)]
    positive = chosen["value"].astype(float) > 0
    values = 100 * np.log(chosen["value"].astype(float).where(positive))
    logs = chosen.assign(value=values, start=None, predicted=None, reference=rival, valid=chosen["valid"] & positive)
    row = fork_differences(logs)
    own = row[row["arm"] == arm].iloc[0]
    return own, int(own["batches"])


def _groups(runs: Mapping[str, Run]) -> str:
    """Share of the reference's step on the held-out failure that each token group makes alone, and what it turns."""
    lines = ["| policy | state | `grpo` | low p | high p | A>0 | A<0 |", "|---|---|---|---|---|---|---|"]
    names = ("change", "change_low", "change_high")
    for task, run in runs.items():
        rows = forked(run, settings(task), "heldout_failure")
        differences = fork_differences(rows)
        for step in sorted(rows["step"].unique()):
            cells = []
            for arm in ("grpo", "low p", "high p", "A>0", "A<0"):
                there = arm in set(rows["arm"])
                cells.append(_interval(_row(differences, arm, state=f"step {step}"), names) if there else "–")
            lines.append(f"| {TITLES[task]} | step {step} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _verdicts(runs: Mapping[str, Run]) -> str:
    """What the claims' own rules say about one update, for each policy over its states."""
    lines = ["| policy | claim | one update | effect [% of `grpo`'s change; C4: of sharpness] | n | reason |"]
    lines += ["|---|---|---|---|---|---|"]
    for task, run in runs.items():
        for names, rows in (
            (("C4",), forked(run, sharpness_settings())),
            (("C7", "C9", "C10"), forked(run, settings(task))),
        ):
            for verdict in test_claims(_renamed(run, rows), names, treatment=ALIGNED) if len(rows) else ():
                local = next(v for v in (verdict, verdict.beside) if v is not None and v.version == "one update")
                effect = "–" if local.effect is None else f"{local.effect.text} {local.effect.interval_text}"
                lines.append(
                    f"| {TITLES[task]} | {verdict.claim} | {local.verdict} | {effect} | {local.n} | {local.reason} |"
                )
    return "\n".join([*lines, ""])


def _renamed(run: Run, rows: pd.DataFrame) -> Any:
    """The run with these rows alone, its arms named as the claims expect."""
    own = copy.copy(run)
    own.forks = rows.assign(arm=rows["arm"].replace(NAMES))
    return Runs(run.path, {run.task: own}, {})


if __name__ == "__main__":
    main()

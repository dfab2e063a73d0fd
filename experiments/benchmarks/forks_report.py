"""Tables of docs/fork.md and of the second study's counterfactual part, from the runs of `forks`.

sharpscope export runs/forks --to reduced --tokens 0 --out runs/reduced && sharpscope export runs/reduced --to packed --out data/studies/2/forks
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

from experiments.benchmarks.forks import ARMS, POLICIES, run_name, settings, sharpness_settings
from sharpscope.analysis import fork_differences
from sharpscope.analysis.claims import test_claims
from sharpscope.analysis.claims.one_update import FEWEST_STATES
from sharpscope.analysis.forks import ALL_STATES, UNITS
from sharpscope.config import arm_name
from sharpscope.traces import Run, Runs, load_runs

ROOT = Path(__file__).resolve().parents[2]
DATA = Path("data/studies/2/forks")
PAGE, STUDY = Path("docs/fork.md"), Path("experiments/studies/2/forks.md")
TITLES = {
    "math": "Mathematics",
    "tool_qa": "Tool-augmented question answering",
    "knights_knaves": "Knights and Knaves",
    "arithmetic": "Arithmetic of the second study",
}
BEGIN, END = "<!-- begin: experiments/benchmarks/forks_report.py -->\n", "<!-- end -->\n"
POINTS = 100.0
ALIGNED, REVERSED, SHUFFLED = "mass 4", "mass 4 reversed", "mass 4 shuffled"
NAMES = {REVERSED: f"{ALIGNED}-reverse", SHUFFLED: f"{ALIGNED}-shuffled", "low p": "low", "high p": "high"}
"""Arm -> its name as the claims expect it."""
LEVEL = 0.05
QUANTITIES: tuple[tuple[str, str, str | None, str], ...] = (
    ("C7", ALIGNED, "grpo", "heldout_failure"),
    ("C10", ALIGNED, REVERSED, "heldout_failure"),
    ("C10", ALIGNED, SHUFFLED, "heldout_failure"),
    ("C9", "low p", None, "heldout_failure"),
    ("C9", "low p", "high p", "heldout_failure"),
    ("C12", "cov-grpo", "grpo", "entropy"),
    ("–", ALIGNED, "grpo", "entropy"),
    ("–", REVERSED, "grpo", "entropy"),
    ("C13", "A>0", None, "heldout_failure"),
    ("C13", "A<0", None, "heldout_failure"),
    ("C13", "A>0", "A<0", "heldout_failure"),
)
"""Claim, arm, rival and outcome; without a rival the arm's own change."""
SERIES = ["run", "step", "batch", "arm", "comparison", "outcome"]
Forked = Mapping[str, Sequence[Run]]
"""Policy -> its runs by seed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=DATA, help="a pack, or the folder of the runs")
    options = parser.parse_args()
    runs = found(options.runs)
    for page, text in ((PAGE, tables(runs)), (STUDY, study(runs))):
        page.write_text(placed(page.read_text("utf-8"), text), "utf-8")


def found(folder: Path) -> Forked:
    """The runs by policy, in the order of POLICIES."""
    loaded = {run.name: run for run in load_runs(folder) if run.rows("forks")}
    seeds = sorted({int(run.seed) for run in loaded.values()})
    names = {policy: [run_name(policy, seed) for seed in seeds] for policy in POLICIES}
    own = {policy: [loaded[name] for name in listed if name in loaded] for policy, listed in names.items()}
    return {policy: runs for policy, runs in own.items() if runs}


def placed(page: str, text: str) -> str:
    """The page with `text` between its markers."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + text + "\n" + END + rest.split(END)[1]


def forked(runs: Sequence[Run], chosen: Sequence[Mapping[str, Any]], *outcomes: str) -> pd.DataFrame:
    """Rows of the runs' forks with these settings, as one fork, with a column `run`; those of some outcomes, if any are named.

    Forks of a state draw the same batches, so that the reference's rows are the same in all of them.
    """
    parts = [runs[0].forks.iloc[:0].assign(run="")]
    for run in runs:
        for name, own in run.info.get("forks", {}).items():
            if any(_is(own, one) for one in chosen):
                parts.append(run.forks[run.forks["fork"] == name].assign(run=run.name, fork="fork"))
    rows = pd.concat(parts[1:] or parts, ignore_index=True).drop_duplicates(SERIES)
    return rows[rows["outcome"].isin(outcomes)] if outcomes else rows


def _is(own: Mapping[str, Any], chosen: Mapping[str, Any]) -> bool:
    same = all(list(own[key]) == list(value) for key, value in chosen.items())
    return same and ("outcomes" in chosen or "sharpness" not in own["outcomes"])


def _seed_0(runs: Sequence[Run], rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the run with the smallest seed."""
    return rows[rows["run"] == runs[0].name]


# -- docs/fork.md ----------------------------------------------------------------------------------------------------


def tables(runs: Forked) -> str:
    """A summary, and for each policy a table per state of seed 0 and one over all states, with a row per arm."""
    return "\n".join([_counts(runs), *(_section(policy, own) for policy, own in runs.items())])


def _counts(runs: Forked) -> str:
    """How many differences from the reference have an interval without 0, and which remain after Holm's adjustment."""
    lines = [
        "| policy | states | differences | by chance | interval without 0: step / matched KL | after Holm: step / matched KL |"
    ]
    lines += ["|---|---|---|---|---|---|"]
    errors: list[float] = []
    for policy, of_policy in runs.items():
        differences = fork_differences(forked(of_policy, settings(policy), "heldout_failure"))
        differences = differences[differences["state"] != ALL_STATES]
        made = differences[differences["comparison"] == "step"]
        errors += (POINTS * (made["predicted"] - made["change"]).abs()).tolist()
        own = differences[differences["arm"] != differences["reference"]]
        cells, kept = [], []
        for comparison in ("step", "kl"):
            chosen = own[own["comparison"] == comparison]
            cells.append(int((chosen["p"] < LEVEL).sum()))
            pairs = zip(chosen["arm"], chosen["state"], holm(chosen["p"]), strict=True)
            kept.append([f"{arm} ({_state(policy, state)})" for arm, state, p in pairs if p < LEVEL])
        count = int((own["comparison"] == "step").sum())
        after = " / ".join(", ".join(names) or "none" for names in kept)
        lines.append(
            f"| {TITLES[policy]} | {own['state'].nunique()} | {count} | {LEVEL * count:.1f} | {cells[0]} / {cells[1]} | {after} |"
        )
    linear = (
        "The mean first-order prediction of a step's change of the held-out failure differs from the measured mean by "
        f"{np.median(errors):.2f} points in the median over arms and states, and by {max(errors):.2f} at most."
    )
    return "\n".join([*lines, "", linear, ""])


def _state(policy: str, state: str) -> str:
    """A state's name in `fork_differences` without the run's, which says its seed."""
    run, _, step = state.rpartition(", ")
    return step if run in ("", policy) else f"seed {run.removeprefix(f'{policy}-s')}, {step}"


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values of tests of one family."""
    values = np.asarray(p, dtype=float)
    order = np.argsort(values)
    adjusted = np.maximum.accumulate(np.minimum(1.0, values[order] * np.arange(len(values), 0, -1)))
    result = np.empty(len(values))
    result[order] = adjusted
    return result.tolist()


def _section(policy: str, runs: Sequence[Run]) -> str:
    """The tables of one policy."""
    rows = forked(
        runs, settings(policy), "heldout_failure", "train_failure", "entropy", "gradient_rotation", "update_rotation"
    )
    lines = [f"### {TITLES[policy]} ({runs[0].info['trainable_parameters']:,} parameters)", ""]
    first = _seed_0(runs, rows)
    differences, against = fork_differences(first), _against_controls(first)
    for step in sorted(first["step"].unique()):
        state = f"step {step}"
        own = differences[differences["state"] == state]
        reference = _row(own, first["reference"].iloc[0])
        lines += [_caption(state, own, first[first["step"] == step]), ""]
        lines += ["| arm | rotation ∇L / Δ [°] | held-out failure | p | predicted | at matched KL | training failure |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for arm in _arms(own):
            turned = " / ".join(f"{_row(own, arm, f'{of}_rotation')['change']:.2g}" for of in ("gradient", "update"))
            predicted = POINTS * (_row(own, arm)["predicted"] - reference["predicted"])
            lines.append(_line(_counted(arm, own), turned, own, f"{predicted:+.2f}", arm))
        for rival, other in against.items():
            lines.append(_line(f"{ALIGNED} − {rival}", "", other[other["state"] == state], "", ALIGNED))
        lines.append("")
    return "\n".join([*lines, *_over_states(rows), ""])


def _against_controls(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Differences of the aligned weights from each of their controls, by control."""
    return {
        rival: fork_differences(rows[rows["arm"].isin([ALIGNED, rival])], reference=rival)
        for rival in (REVERSED, SHUFFLED)
    }


def _arms(own: pd.DataFrame) -> list[str]:
    """The arms beside the reference, in the order of ARMS."""
    return [arm for arm in map(arm_name, ARMS) if arm in set(own["arm"]) - set(own["reference"])]


def _counted(arm: str, own: pd.DataFrame) -> str:
    """The arm's name, with its batches where they are fewer than the reference's."""
    batches, all_batches = (int(_row(own, name)["batches"]) for name in (arm, own["reference"].iloc[0]))
    return arm if batches >= 0.9 * all_batches else f"{arm} ({batches} batches)"


def _over_states(rows: pd.DataFrame) -> list[str]:
    """A table of the differences in the mean over states, with intervals over states."""
    differences = fork_differences(rows)
    differences = differences[differences["state"] == ALL_STATES]
    count = int(_row(differences, rows["reference"].iloc[0])["states"])
    places = rows.groupby("run")["step"].unique()
    listed = "; ".join(f"`{run}` at steps {', '.join(map(str, sorted(steps)))}" for run, steps in places.items())
    batches = rows.groupby(["run", "step"])["batch"].nunique()
    least = f"{batches.min()}" if batches.min() == batches.max() else f"{batches.min()} to {batches.max()}"
    lines = [f"**All {count} states** ({listed}), {least} batches each; the states' means are the sample.", ""]
    lines += [
        "| arm | held-out failure | p | at matched norm | at matched KL | p | training failure | entropy, matched KL |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|"]
    named = [(arm, arm, differences) for arm in _arms(differences)]
    for rival, other in _against_controls(rows).items():
        named.append((f"{ALIGNED} − {rival}", ALIGNED, other[other["state"] == ALL_STATES]))
    for name, arm, own in named:
        step, matched, training = _row(own, arm), _row(own, arm, comparison="kl"), _row(own, arm, "train_failure")
        norm = own[(own["arm"] == arm) & (own["comparison"] == "norm") & (own["outcome"] == "heldout_failure")]
        entropy = _interval(_row(own, arm, "entropy", "kl"), factor=UNITS["entropy"][1])
        cells = [name, _interval(step), p_text(step["p"]), _interval(norm.iloc[0]) if len(norm) else "–"]
        lines.append(
            "| " + " | ".join([*cells, _interval(matched), p_text(matched["p"]), _interval(training), entropy]) + " |"
        )
    return lines


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


def study(runs: Forked) -> str:
    """Local versions of C4, C7, C9, C10, C12 and C13: by state, and the verdicts of the claims' own rules."""
    return "\n".join([_by_state(runs), _sharpness(runs), _groups(runs), _verdicts(runs)])


def _by_state(runs: Forked) -> str:
    """Differences at matched KL, with p-values adjusted over the whole table."""
    found: list[tuple[str, str, dict[str, pd.Series]]] = []
    for claim, arm, rival, outcome in QUANTITIES:
        for policy, of_policy in runs.items():
            rows = forked(of_policy, settings(policy), outcome)
            if not {arm, rival or arm} <= set(rows["arm"]):
                continue
            rows = rows[rows["arm"].isin([arm, rival or rows["reference"].iloc[0]])]
            first = _seed_0(of_policy, rows)
            differences = fork_differences(first, reference=rival)
            cells = {
                str(step): _row(differences, arm, outcome, "kl", f"step {step}")
                for step in sorted(first["step"].unique())
            }
            cells[ALL_STATES] = _row(fork_differences(rows, reference=rival), arm, outcome, "kl", ALL_STATES)
            text = f"{arm} − {rival}" if rival else f"{arm} alone (own change)"
            unit = ", entropy [millinats]" if outcome == "entropy" else ""
            found.append((f"{claim} | {text}{unit}", TITLES[policy], cells))
    tested = [row["p"] for name, _, cells in found for row in cells.values() if "own change" not in name]
    adjusted = iter(holm(tested))
    lines = ["| claim | arms | policy | batches | start | middle | end | all states | states |", "|" + 9 * "---|"]
    for name, policy, cells in found:
        texts = []
        for row in cells.values():
            factor = UNITS[row["outcome"]][1]
            if "own change" in name:
                texts.append(_interval(row, ("change", "change_low", "change_high"), factor))
            else:
                texts.append(_interval(row, factor=factor) + ("*" if next(adjusted) < LEVEL else ""))
        counts = " / ".join(str(int(row["batches"])) for row in cells.values() if row["state"] != ALL_STATES)
        lines.append(f"| {name} | {policy} | {counts} | {' | '.join(texts)} | {int(cells[ALL_STATES]['states'])} |")
    return "\n".join([*lines, "", f"\\* p < {LEVEL:g} after Holm's adjustment over the {len(tested)} differences.", ""])


def _sharpness(runs: Forked) -> str:
    """Ratio of SAM sharpness and critical sharpness after the update, in per cent."""
    lines = [
        "| policy | state | arms | SAM sharpness, matched KL [%] | batches | critical sharpness, step as it is [%] | batches |",
        "|---|---|---|---|---|---|---|",
    ]
    for policy, of_policy in runs.items():
        rows = _seed_0(of_policy, forked(of_policy, [sharpness_settings()]))
        for step in sorted(rows["step"].unique()):
            for arm, rival in ((ALIGNED, "grpo"), (ALIGNED, REVERSED), (ALIGNED, SHUFFLED), ("grpo-sam", "grpo")):
                here = rows[(rows["step"] == step) & rows["arm"].isin([arm, rival])]
                sam, count = _ratio(here, arm, rival, "sam_sharpness", "kl")
                critical, others = _ratio(here, arm, rival, "critical_sharpness", "step")
                cells = [_percent(sam, count), str(count), _percent(critical, others), str(others)]
                lines.append(f"| {TITLES[policy]} | step {step} | {arm} / {rival} | {' | '.join(cells)} |")
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


def _groups(runs: Forked) -> str:
    """Change of the held-out failure by the reference's step, and by one with a token group alone."""
    lines = ["| policy | state | `grpo` | low p | high p | A>0 | A<0 |", "|---|---|---|---|---|---|---|"]
    names = ("change", "change_low", "change_high")
    for policy, of_policy in runs.items():
        rows = forked(of_policy, settings(policy), "heldout_failure")
        differences = fork_differences(_seed_0(of_policy, rows))
        for step in sorted(_seed_0(of_policy, rows)["step"].unique()):
            own = differences[differences["state"] == f"step {step}"]
            there = set(own["arm"])
            arms = ("grpo", "low p", "high p", "A>0", "A<0")
            cells = [_interval(_row(own, arm), names) if arm in there else "–" for arm in arms]
            lines.append(f"| {TITLES[policy]} | step {step} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _verdicts(runs: Forked) -> str:
    """What the claims' own rules say about one update, for each policy over its states."""
    lines = ["| policy | claim | one update | effect [% of `grpo`'s change; C4: of sharpness] | n | reason |"]
    lines += ["|---|---|---|---|---|---|"]
    for policy, of_policy in runs.items():
        for names, rows in (
            (("C4",), forked(of_policy, [sharpness_settings()])),
            (("C7", "C9", "C10", "C12"), forked(of_policy, settings(policy))),
        ):
            several = rows.groupby(["run", "step"]).ngroups >= FEWEST_STATES
            unit = "states" if several else "batches"
            for verdict in test_claims(_renamed(of_policy, rows), names, treatment=ALIGNED) if len(rows) else ():
                local = next(v for v in verdict.versions if v.claim.version == "one update")
                effect = (
                    "–" if local.effect is None else f"{local.effect.text} {local.effect.ends(local.effect.interval)}"
                )
                lines.append(
                    f"| {TITLES[policy]} | {local.claim.name} | {local.verdict} | {effect} | {local.n} {unit} | {local.reason} |"
                )
    return "\n".join([*lines, ""])


def _renamed(runs: Sequence[Run], rows: pd.DataFrame) -> Runs:
    """The runs with these rows alone, their arms named as the claims expect."""
    named, copies = rows.assign(arm=rows["arm"].replace(NAMES)), {}
    for run in runs:
        own: Any = copy.copy(run)
        own.forks = named[named["run"] == run.name].drop(columns="run")
        copies[run.name] = own
    return Runs(runs[0].path.parent, copies, {})


if __name__ == "__main__":
    main()

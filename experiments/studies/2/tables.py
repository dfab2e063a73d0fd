"""Tables and figures of the second study's training part, from its kept runs.

    python experiments/studies/2/tables.py                       # tables and figures, from the kept runs
    python experiments/studies/2/tables.py --texts runs/study2   # first: count kinds of answers in full runs

The first reads `data/studies/2/runs` and `data/studies/2/errors.csv`, and writes `experiments/studies/2/results`: one row per quantity,
differences between arms paired by seed, kinds of answers, `facts.md` with the numbers as RESULTS.md quotes them in sentences, and the figures
`training_curves.png` and `training_differences.png`. `sharpscope claims` writes the verdicts beside them.

The second needs the completions, which kept runs do not have, and writes `errors.csv`; those of the policy before training come from a run with
`steps: 1` in the folder `start`.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from sharpscope.analysis import load_several
from sharpscope.analysis.claims.measures import accuracy, gap, sharpness_curve
from sharpscope.analysis.statistics import contrast_interval, sign_flip_p
from sharpscope.traces import Run

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "data" / "studies" / "2"
RESULTS = Path(__file__).parent / "results"
CONSTANTS = "weight.preset=calibrated+weight.U=4"
BASE_RATE = 1e-4
LATE = 20
"""Last steps over which training quantities are averaged [steps]."""
ARMS = ("grpo", "mass 4", "reversed", "shuffled", "grpo, lr 5e-05", "grpo, lr 0.0002")
KINDS = ("correct", "miscalculated step", "right steps, wrong answer", "malformed", "cut")
"""Kinds of answers: a step such as 3 + 4 = 8; every step right but not those of the question, or another number in the answer; not of the form
`<think>3 + 4 = 7; …</think><answer>7</answer>`; ended by the limit of tokens."""
_STEP = re.compile(r"(-?\d+) ([-+*]) (-?\d+) = (-?\d+)")
_FORM = re.compile(rf"<think>{_STEP.pattern}(?:; {_STEP.pattern})*</think><answer>-?\d+</answer>")

Measure = Callable[[Run], float]


def arm(run: Run) -> str:
    """Short name of a run's arm."""
    rate = float(run.config["optimizer"]["lr"])
    name = {
        "grpo": "grpo",
        f"grpo-sg+{CONSTANTS}": "mass 4",
        f"grpo-sg-reverse+{CONSTANTS.replace('weight.', 'weight.of.')}": "reversed",
        f"grpo-sg-shuffled+{CONSTANTS.replace('weight.', 'weight.of.')}": "shuffled",
        "grpo-sg": "published",  # the preset `paper` is what `auto` comes to here
    }[run.method]
    return name if rate == BASE_RATE else f"{name}, lr {rate:g}"


def evaluated(split: str, step: int | None = None, level: int | None = None) -> Measure:
    """Accuracy [%] on a split at a step, by default the last; of one level if given."""

    def of(run: Run) -> float:
        at = int(run.config["steps"]) if step is None else step
        if level is not None:
            rows = run.eval
            rows = rows[(rows["split"] == split) & (rows["step"] == at) & (rows["level"].astype(str) == str(level))]
            return 100 * float(rows["accuracy"].iloc[0])
        found = accuracy(run, split, at)
        assert found is not None
        return 100 * found[0]

    return of


def late(column: str, scale: float = 1.0) -> Measure:
    """Mean of a column of `steps` over the LATE last steps."""
    return lambda run: scale * float(run.steps.sort_values("step")[column].tail(LATE).mean())


def sharpness(quantity: str, functional: str) -> Measure:
    """Sharpness at the last probe."""
    return lambda run: float(sharpness_curve(run, quantity, functional).sort_index().iloc[-1])


def rotation(run: Run) -> float:
    """Mean rotation of the optimizer's step against plain GRPO's [degrees]."""
    return float(run.steps["update_rotation"].dropna().mean())


START = "held-out accuracy before training [%]"
MEASURES: Mapping[str, Measure] = {
    START: evaluated("heldout", step=0),
    "held-out accuracy [%]": evaluated("heldout"),
    "training accuracy [%]": evaluated("train"),
    "gap, training − held-out [points]": lambda run: 100 * float(gap(run, int(run.config["steps"])) or math.nan),
    "unseen, level 1 [%]": evaluated("unseen", level=1),
    "unseen, level 3 [%]": evaluated("unseen", level=3),
    f"entropy, last {LATE} steps [nats]": late("entropy_mean"),
    f"completions cut, last {LATE} steps [%]": late("truncated_fraction", 100),
    "rotation of the update [°]": rotation,
    "sharpness of expected failure (SAM)": sharpness("sam", "expected_failure"),
    "adaptive sharpness of expected failure (ASAM)": sharpness("asam", "expected_failure"),
    "sharpness of nll (SAM)": sharpness("sam", "nll"),
}
RATIOS = tuple(name for name in MEASURES if "sharpness" in name)
"""Quantities whose differences are ratios, in per cent."""
CONTRASTS = (
    ("mass 4", "grpo"),
    ("mass 4", "reversed"),
    ("mass 4", "shuffled"),
    ("reversed", "grpo"),
    ("shuffled", "grpo"),
    ("grpo, lr 5e-05", "grpo"),
    ("grpo, lr 0.0002", "grpo"),
)


def values(runs: Mapping[str, Run]) -> pd.DataFrame:
    """arm, seed, quantity, value of every run."""
    rows = [
        {"arm": arm(run), "seed": run.seed, "quantity": name, "value": measure(run)}
        for run in runs.values()
        for name, measure in MEASURES.items()
    ]
    return pd.DataFrame(rows)


def arm_table(frame: pd.DataFrame) -> str:
    """Mean and range over seeds, a row per quantity."""
    present = [name for name in ARMS if name in set(frame["arm"])]
    seeds = frame.groupby("arm")["seed"].nunique()
    lines = [
        "| quantity | " + " | ".join(f"{name} ({seeds[name]} seeds)" for name in present) + " |",
        "|" + "---|" * (len(present) + 1),
    ]
    for quantity in MEASURES:
        cells = []
        for name in present:
            data = frame.loc[(frame["arm"] == name) & (frame["quantity"] == quantity), "value"]
            cells.append(f"{data.mean():.3g} [{data.min():.3g}, {data.max():.3g}]")
        lines.append(f"| {quantity} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def paired(frame: pd.DataFrame, first: str, second: str, quantity: str) -> np.ndarray:
    """Differences first − second by seed; logarithms of ratios for RATIOS."""
    table = frame[frame["quantity"] == quantity].pivot(index="seed", columns="arm", values="value")
    both = table[[first, second]].dropna()
    if quantity in RATIOS:
        both = np.log(both)
    return (both[first] - both[second]).to_numpy(dtype=float)


def contrasts(frame: pd.DataFrame) -> pd.DataFrame:
    """first, second, quantity, unit, mean, low, high, p, n of every contrast."""
    rows = []
    for first, second in CONTRASTS:
        if not {first, second} <= set(frame["arm"]):
            continue
        for quantity in [name for name in MEASURES if name != START]:
            data = paired(frame, first, second, quantity)
            interval = contrast_interval(data)
            ends = [data.mean(), *((interval.low, interval.high) if interval else (math.nan, math.nan))]
            if quantity in RATIOS:
                ends = [100 * math.expm1(end) for end in ends]
            rows.append([first, second, quantity, *ends, sign_flip_p(data), len(data)])
    return pd.DataFrame(rows, columns=["first", "second", "quantity", "mean", "low", "high", "p", "n"])


def contrast_table(found: pd.DataFrame) -> str:
    """One row per contrast and quantity: difference, or change in per cent for sharpness, with its 95 % interval."""
    lines = ["| arms | quantity | difference | 95 % interval | p | pairs |", "|---|---|---|---|---|---|"]
    for row in found.itertuples():
        unit = " %" if row.quantity in RATIOS else ""
        ends = "–" if math.isnan(row.low) else f"[{row.low:+.3g}, {row.high:+.3g}]"
        lines.append(
            f"| {row.first} − {row.second} | {row.quantity} | {row.mean:+.3g}{unit} | {ends} | {row.p:.2g} | {row.n} |"
        )
    return "\n".join(lines) + "\n"


def error_table(counts: pd.DataFrame) -> str:
    """Share of training completions of each kind, pooled over seeds [%]; and of those neither malformed nor cut the share that is correct."""
    lines = [
        "| arm | step | completions | " + " | ".join(KINDS) + " | correct, of those neither malformed nor cut |",
        "|" + "---|" * (len(KINDS) + 4),
    ]
    order = ["start", *ARMS]
    pooled = counts.groupby(["arm", "step", "kind"])["count"].sum().unstack(fill_value=0)
    pooled = pooled.reindex(columns=KINDS, fill_value=0)
    steps = {step for _, step in pooled.index}
    ends = {min(steps), min(steps - {1}), max(steps)}
    for name, step in sorted(
        (key for key in pooled.index if key[0] in order and key[1] in ends),
        key=lambda key: (order.index(key[0]), key[1]),
    ):
        row = pooled.loc[(name, step)]
        shares = " | ".join(f"{100 * row[kind] / row.sum():.1f}" for kind in KINDS)
        inside = 100 * row[KINDS[0]] / row[list(KINDS[:3])].sum()
        lines.append(f"| {name} | {step} | {row.sum():,} | {shares} | {inside:.1f} |")
    return "\n".join(lines) + "\n"


UNITS = {"[%]": " points", "[points]": " points", "[nats]": " nats", "[°]": "°"}


def unit_of(quantity: str) -> str:
    """Unit of a difference in a sentence."""
    return " %" if quantity in RATIOS else UNITS[re.findall(r"\[[^]]*\]", quantity)[-1]]


def number(value: float, signed: bool = True) -> str:
    """A number in a sentence, with a minus sign: one decimal, two below 1, none from 100."""
    digits = 2 if abs(value) < 1 else 1 if abs(value) < 100 else 0
    return f"{value:{'+' if signed else ''}.{digits}f}".replace("-", "−")


def facts(frame: pd.DataFrame, found: pd.DataFrame) -> str:
    """Means of arms and differences as sentences quote them, one per line after a colon."""
    lines = []
    for (name, quantity), rows in frame.groupby(["arm", "quantity"], sort=False):
        if quantity not in RATIOS:
            unit = unit_of(quantity).replace(" points", " %" if "[%]" in quantity else " points")
            lines.append(f"- {name}, {quantity}: {number(rows['value'].mean(), signed=False)}{unit}")
    for row in found.itertuples():
        ends = "" if math.isnan(row.low) else f" ({number(row.low)} to {number(row.high)})"
        lines.append(
            f"- {row.first} less {row.second}, {row.quantity}: {number(row.mean)}{unit_of(row.quantity)}{ends}"
        )
    return "\n".join(lines) + "\n"


def kind(completion: str, correct: bool, cut: bool) -> str:
    """Which of KINDS an answer is."""
    if correct:
        return KINDS[0]
    if cut:
        return KINDS[4]
    if not _FORM.fullmatch(completion.strip()):
        return KINDS[3]
    results = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    right = all(results[sign](int(a), int(b)) == int(c) for a, sign, b, c in _STEP.findall(completion))
    return KINDS[2] if right else KINDS[1]


def count_kinds(runs: Mapping[str, Run]) -> pd.DataFrame:
    """arm, seed, step, kind, count of the recorded completions of runs."""
    parts = []
    for name, run in runs.items():
        rows = run.rollouts
        texts = zip(rows["completion"], rows["correct"] == 1, rows["truncated"], strict=True)
        found = rows[["step"]].assign(kind=[kind(*text) for text in texts])
        counts = found.value_counts().rename("count").reset_index()
        parts.append(counts.assign(arm="start" if name == "start" else arm(run), seed=run.seed))
    return pd.concat(parts).sort_values(["arm", "seed", "step", "kind"])[["arm", "seed", "step", "kind", "count"]]


def curves(runs: Mapping[str, Run]) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Axis label, arm and a table step × seed of what the figure shows."""
    columns = {
        "training accuracy [%]": ("accuracy", 100),
        "entropy [nats]": ("entropy_mean", 1),
        "completions cut [%]": ("truncated_fraction", 100),
    }
    for label, (column, scale) in columns.items():
        for name in ARMS:
            parts = {
                run.seed: run.steps.sort_values("step").set_index("step")[column].rolling(10, min_periods=1).mean()
                for run in runs.values()
                if arm(run) == name
            }
            if parts:
                yield label, name, scale * pd.DataFrame(parts)


def draw(runs: Mapping[str, Run], found: pd.DataFrame, out: Path) -> None:
    """The two figures: curves of every arm, and differences of held-out accuracy and sharpness."""
    import matplotlib.pyplot as plt

    from sharpscope.analysis.figures.style import styled

    with styled():
        figure, axes = plt.subplots(1, 3, figsize=(7.5, 2.4), layout="constrained")
        places = dict(zip(dict.fromkeys(label for label, _, _ in curves(runs)), axes, strict=True))
        colors = dict(zip(ARMS, plt.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
        for label, name, table in curves(runs):
            axis = places[label]
            axis.plot(table.index, table.mean(axis=1), color=colors[name], label=name, linewidth=1)
            axis.fill_between(
                table.index, table.min(axis=1), table.max(axis=1), color=colors[name], alpha=0.15, linewidth=0
            )
            axis.set(xlabel="step", ylabel=label)
        axes[0].legend(fontsize=6, frameon=False)
        figure.savefig(out / "training_curves.png", dpi=200)
        plt.close(figure)
        figure, axes = plt.subplots(1, 2, figsize=(7.5, 2.4), layout="constrained", sharey=True)
        for axis, quantity, unit in (
            (axes[0], "held-out accuracy [%]", "held-out accuracy, difference [points]"),
            (axes[1], "sharpness of expected failure (SAM)", "sharpness of expected failure, change [%]"),
        ):
            rows = found[found["quantity"] == quantity].iloc[::-1]
            names = [f"{row.first} − {row.second}" for row in rows.itertuples()]
            axis.axvline(0, color="0.6", linewidth=0.8)
            axis.errorbar(
                rows["mean"],
                names,
                xerr=[rows["mean"] - rows["low"], rows["high"] - rows["mean"]],
                fmt="o",
                markersize=3,
            )
            axis.set(xlabel=unit)
        figure.savefig(out / "training_differences.png", dpi=200)
        plt.close(figure)


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=DATA / "runs")
    parser.add_argument("--errors", type=Path, default=DATA / "errors.csv")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--texts", type=Path, help="count kinds of answers in these runs and write --errors")
    options = parser.parse_args()
    if options.texts:
        count_kinds(load_several([options.texts]).by_name).to_csv(options.errors, index=False)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    runs = load_several([options.runs]).by_name
    frame = values(runs)
    found = contrasts(frame)
    texts = {
        "arms.md": arm_table(frame),
        "differences.md": contrast_table(found),
        "facts.md": facts(frame, found),
        "errors.md": error_table(pd.read_csv(options.errors)),
    }
    for name, text in texts.items():
        (options.out / name).write_text(text, "utf-8")
    draw(runs, found, options.out)


if __name__ == "__main__":
    main()

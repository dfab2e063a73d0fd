"""Tables and figures of the second study's training part, from its kept runs.

    python experiments/studies/2/tables.py                       # tables and figures, from the kept runs
    python experiments/studies/2/tables.py --texts runs/study2 --supplement runs/study2-supplement --probed runs/probed   # first

The first reads `data/studies/2/runs` and `data/studies/2/full_runs.csv`, and writes into `experiments/studies/2/results`: `tables.md` with one
row per quantity, differences between arms paired by seed, kinds of answers, the supplement, and the numbers as RESULTS.md quotes them in
sentences; and the figures `claims.png`, `training_curves.png`, `training_differences.png` and `supplement.png`. `sharpscope claims` writes the
verdicts beside them.

The second writes `full_runs.csv`, what kept runs do not have: kinds of answers, counted in the completions of full runs (those of the
policy before training come from a run with `steps: 1` in the folder `start`); measurements along the supplement's runs; and curvature
of final checkpoints, from folders that `sharpscope probe` wrote, each with the name of its run.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from sharpscope.analysis import load_several
from sharpscope.analysis.claims import test_claims
from sharpscope.analysis.claims.base import Sample, Verdict
from sharpscope.analysis.claims.measures import accuracy, evaluations, gap, sharpness_curve
from sharpscope.analysis.figures.style import BLUE, COLORS, GRAY, VERMILLION, styled
from sharpscope.analysis.statistics import contrast_interval, sign_flip_p
from sharpscope.cli.studying import terms_of
from sharpscope.sweeps import read_sweep
from sharpscope.traces import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "data" / "studies" / "2"
STUDY = Path(__file__).parent / "study.yaml"
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

COLUMNS = ["arm", "seed", "step", "quantity", "value"]
"""Of full_runs.csv."""
SUPPLEMENT_ARMS = ("grpo", "mass 4", "reversed", "grpo, lr 5e-05")

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


START = ("held-out accuracy before training [%]", "entropy, first step [nats]")
"""Quantities without differences between arms."""
MEASURES: Mapping[str, Measure] = {
    START[0]: evaluated("heldout", step=0),
    START[1]: lambda run: float(run.steps.sort_values("step")["entropy_mean"].iloc[0]),
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
FIXED_ENTROPY = "entropy at fixed tokens [nats]"
CURVATURE = {
    "largest Hessian eigenvalue of expected failure": ("largest", "expected_failure"),
    "Hessian trace of expected failure": ("trace", "expected_failure"),
    "largest Hessian eigenvalue of nll": ("largest", "nll"),
    "Hessian trace of nll": ("trace", "nll"),
}
"""Of final checkpoints: quantity → (its name in the probes table, functional)."""
CURVES = {
    "sharpness of expected failure (SAM)": ("sam", "expected_failure"),
    "adaptive sharpness of expected failure (ASAM)": ("asam", "expected_failure"),
    "sharpness of nll (SAM)": ("sam", "nll"),
}
"""Of the supplement: quantity → (its name in the probes table, functional)."""
RATIOS = (*(name for name in MEASURES if "sharpness" in name), *CURVATURE)
"""Quantities whose differences are ratios, in per cent."""
SHOWN: Mapping[str, tuple[int, ...]] = {
    "held-out accuracy [%]": (0, 40, 80, 120, 160),
    FIXED_ENTROPY: (0, 40, 80, 120, 160),
    **dict.fromkeys(CURVES, (0, 16, 48, 80, 112, 160)),
    **dict.fromkeys(CURVATURE, (160,)),
}
"""Quantities of the supplement → steps in its table."""
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


def contrasts(frame: pd.DataFrame, quantities: Collection[str] = tuple(MEASURES)[len(START) :]) -> pd.DataFrame:
    """first, second, quantity, mean, low, high, p, n of every contrast."""
    rows, present = [], set(frame.loc[frame["quantity"].isin(quantities), "arm"])
    for first, second in CONTRASTS:
        if not {first, second} <= present:
            continue
        for quantity in quantities:
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


def supplement_table(frame: pd.DataFrame) -> str:
    """Mean and range over seeds at some steps, a row for each quantity and step."""
    lines = ["| quantity | step | " + " | ".join(SUPPLEMENT_ARMS) + " |", "|" + "---|" * (len(SUPPLEMENT_ARMS) + 2)]
    for quantity, steps in SHOWN.items():
        for step in steps:
            cells = []
            for name in SUPPLEMENT_ARMS:
                own = frame[(frame["arm"] == name) & (frame["step"] == step) & (frame["quantity"] == quantity)]["value"]
                cells.append(
                    f"{own.mean():.3g} [{own.min():.3g}, {own.max():.3g}], n = {len(own)}" if len(own) else "–"
                )
            lines.append(f"| {quantity} | {step} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def error_table(counts: pd.DataFrame) -> str:
    """Share of training completions of each kind, pooled over seeds [%]; and of those neither malformed nor cut the share that is correct."""
    lines = [
        "| arm | step | completions | " + " | ".join(KINDS) + " | correct, of those neither malformed nor cut |",
        "|" + "---|" * (len(KINDS) + 4),
    ]
    order = ["start", *ARMS]
    counts = counts[counts["quantity"].isin(KINDS)]
    pooled = counts.groupby(["arm", "step", "quantity"])["value"].sum().unstack(fill_value=0).astype(int)
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


def facts(frame: pd.DataFrame, found: pd.DataFrame, more: pd.DataFrame) -> str:
    """Means of arms and differences as sentences quote them, one per line after a colon; `more`: of the supplement."""
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
    for (name, quantity, step), rows in more.groupby(["arm", "quantity", "step"], sort=False):
        if step in SHOWN.get(quantity, ()) and quantity not in RATIOS:
            unit = " nats" if "[nats]" in quantity else " %"
            lines.append(
                f"- supplement, {name}, {quantity}, step {step}: {number(rows['value'].mean(), signed=False)}{unit}"
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
    """arm, seed, step, quantity, value: the number of recorded completions of each kind."""
    parts = []
    for name, run in runs.items():
        rows = run.rollouts
        texts = zip(rows["completion"], rows["correct"] == 1, rows["truncated"], strict=True)
        found = rows[["step"]].assign(kind=[kind(*text) for text in texts])
        counts = found.value_counts().rename("value").reset_index().rename(columns={"kind": "quantity"})
        parts.append(counts.assign(arm="start" if name == "start" else arm(run), seed=run.seed))
    return pd.concat(parts)[COLUMNS]


def measured_along(runs: Mapping[str, Run]) -> pd.DataFrame:
    """arm, seed, step, quantity, value: accuracy, sharpness and entropy at fixed tokens along the supplement's runs."""
    rows = []
    for run in runs.values():
        found: dict[str, Mapping[int, float]] = {
            f"{name} accuracy [%]": {step: 100 * value for step, (value, _) in evaluations(run, split).items()}
            for name, split in (("held-out", "heldout"), ("training", "train"))
        }
        found |= {name: sharpness_curve(run, *place).to_dict() for name, place in CURVES.items()}
        entropy = run.probes[run.probes["probe"] == "entropy"]
        found[FIXED_ENTROPY] = dict(zip(entropy["step"], entropy["value"], strict=True))
        rows += [(arm(run), run.seed, step, name, at[step]) for name, at in found.items() for step in sorted(at)]
    return pd.DataFrame(rows, columns=COLUMNS)


def curvature(probed: Path, runs: Mapping[str, Run]) -> pd.DataFrame:
    """arm, seed, step, quantity, value of folders that `sharpscope probe` wrote, with the names of `runs`."""
    rows = []
    for file in sorted(probed.glob("*/probes.parquet")):
        run, table = runs[file.parent.name], pd.read_parquet(file)
        for name, (quantity, functional) in CURVATURE.items():
            (found,) = table[(table["quantity"] == quantity) & (table["functional"] == functional)].itertuples()
            if found.converged is False:
                raise ValueError(f"{file}: {name} did not converge")
            rows.append((arm(run), run.seed, int(found.step), name, found.value))
    return pd.DataFrame(rows, columns=COLUMNS)


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

    with styled():
        figure, axes = plt.subplots(1, 3, figsize=(7.5, 2.4), layout="constrained")
        places = dict(zip(dict.fromkeys(label for label, _, _ in curves(runs)), axes, strict=True))
        colors = dict(zip(ARMS, COLORS, strict=False))
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
                color=BLUE,
                markersize=3,
            )
            axis.set(xlabel=unit)
        figure.savefig(out / "training_differences.png", dpi=200)
        plt.close(figure)


def draw_supplement(more: pd.DataFrame, out: Path) -> None:
    """Curves of the supplement, a thin line for each seed, and curvature of final checkpoints, a dot for each seed."""
    import matplotlib.pyplot as plt

    with styled():
        figure, axes = plt.subplots(3, 3, figsize=(7.5, 6.2), layout="constrained")
        colors = dict(zip(ARMS, COLORS, strict=False))
        curves = ["held-out accuracy [%]", "training accuracy [%]", FIXED_ENTROPY, *CURVES]
        for axis, quantity in zip(axes.ravel(), [*curves, *tuple(CURVATURE)[:3]], strict=True):
            for position, name in enumerate(SUPPLEMENT_ARMS):
                own = more[(more["arm"] == name) & (more["quantity"] == quantity)]
                if quantity in CURVATURE:
                    axis.plot([position] * len(own), own["value"], "o", color=colors[name], markersize=3, alpha=0.5)
                    if len(own):
                        axis.plot(position, own["value"].mean(), "_", color=colors[name], markersize=14)
                elif len(own):
                    table = own.pivot(index="step", columns="seed", values="value")
                    axis.plot(table.index, table, color=colors[name], linewidth=0.5, alpha=0.5)
                    axis.plot(table.index, table.mean(axis=1), color=colors[name], linewidth=1.3, label=name)
            axis.set_title(quantity.replace(" of ", "\nof "), fontsize=7)
            if quantity in CURVATURE:
                axis.set_xticks(range(len(SUPPLEMENT_ARMS)), [name.replace(", ", "\n") for name in SUPPLEMENT_ARMS])
                axis.set(xlim=(-0.5, len(SUPPLEMENT_ARMS) - 0.5), ylim=(0, None))
            else:
                axis.set(xlabel="step")
        axes[0, 0].legend(fontsize=6, frameon=False)
        figure.savefig(out / "supplement.png", dpi=200)
        plt.close(figure)


def claim_panels(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """The verdicts that get a panel: all but the untestable ones, the two versions of a claim one after the other."""
    both = (version for verdict in verdicts for version in (verdict, verdict.beside))
    return [version for version in both if version is not None and version.verdict != "untestable"]


def draw_claims(verdicts: Iterable[Verdict], runs: Mapping[str, Run], out: Path) -> None:
    """A panel for each claim and version that is not untestable: the values that its test used."""
    import matplotlib.pyplot as plt

    shown = claim_panels(verdicts)
    with styled():
        figure, axes = plt.subplots(-(-len(shown) // 3), 3, figsize=(7.5, 8.5), layout="constrained")
        for axis in axes.ravel()[len(shown) :]:
            axis.remove()
        for axis, verdict in zip(axes.ravel(), shown, strict=False):
            version = f", {verdict.version}" if verdict.version else ""
            axis.set_title(f"{verdict.claim}{version}: {verdict.verdict}", fontsize=7)
            if verdict.claim == "C1":
                _draw_bounds(axis, runs)
            elif verdict.claim == "C2":
                _draw_norms(axis, verdict)
            elif verdict.claim == "C3":
                _draw_lorenz(axis, verdict)
            else:
                _draw_samples(axis, verdict)
        figure.savefig(out / "claims.png", dpi=200)
        plt.close(figure)


def _draw_bounds(axis: Axes, runs: Mapping[str, Run]) -> None:
    parts = [run.tokens(columns=["logp", "logit_grad_norm"]).dropna() for run in runs.values()]
    tokens = pd.concat(parts)
    rest = -np.expm1(tokens["logp"].to_numpy(dtype=float))
    norm = tokens["logit_grad_norm"].to_numpy(dtype=float)
    kept = rest > 1e-4  # below, rounding of ln π dominates the ratio
    axis.hist(norm[kept] / rest[kept], bins=60, color="0.5")
    for bound in (1, math.sqrt(2)):
        axis.axvline(bound, color=VERMILLION, linewidth=0.8, linestyle="--")
    axis.set_yscale("log")
    axis.set_xlabel("‖p − e‖ / (1 − π), bounds dashed", fontsize=6)
    axis.set_ylabel("tokens", fontsize=6)


def _draw_norms(axis: Axes, verdict: Verdict) -> None:
    sample = verdict.frames["sample"]
    rest, norm = sample["one_minus_pi"].to_numpy(dtype=float), sample["score_norm"].to_numpy(dtype=float)
    axis.plot(rest, norm, ".", color=BLUE, markersize=1.5, alpha=0.4, rasterized=True)
    ends = np.array([rest[rest > 0].min(), 1.0])
    axis.plot(ends, np.median(norm[rest > 0.5]) * ends, color=VERMILLION, linewidth=0.8, linestyle="--")
    axis.set(xscale="log", yscale="log")
    axis.set_xlabel("1 − π", fontsize=6)
    axis.set_ylabel("exact ‖∇ ln π‖,\n∝ (1 − π) dashed", fontsize=6)


def _draw_lorenz(axis: Axes, verdict: Verdict) -> None:
    frame = verdict.frames["lorenz"]
    for column, label, style, color in (
        ("lorenz", "measured", "-", BLUE),
        ("lorenz_null", "if norm = 1 − π", ":", GRAY),
    ):
        x, y = (1 - frame[name].to_numpy()[::-1] for name in ("tokens", column))
        axis.plot(x, y, style, color=color, label=label)
    axis.axhline(0.5, color=VERMILLION, linewidth=0.8, linestyle="--")
    axis.set(xscale="log", xlim=(0.01, 1), ylim=(0, 1.02))
    axis.set_xlabel("share of tokens, largest first", fontsize=6)
    axis.set_ylabel("share of Σ|c|·‖∇ ln π‖,\nhalf dashed", fontsize=6)
    axis.legend(fontsize=5, frameon=False)


def _draw_samples(axis: Axes, verdict: Verdict) -> None:
    """Every value that the test used, the mean with its 95 % interval, no effect (gray) and the rule's margin (dashed)."""
    assert verdict.effect is not None
    scale = verdict.effect.scale

    def shown(values: Any) -> Any:
        return 100 * (np.expm1(values) if scale == "log" else np.asarray(values, dtype=float))

    axis.axvline(0, color="0.6", linewidth=0.8)
    for position, sample in enumerate(verdict.samples):
        interval = contrast_interval(sample.values)
        axis.plot(
            shown(sample.values), [position + 0.15] * len(sample.values), "o", color=BLUE, markersize=2.5, alpha=0.35
        )
        axis.plot(shown(sample.values.mean()), position - 0.15, "o", color=BLUE, markersize=4)
        if interval is not None:
            axis.plot(shown([interval.low, interval.high]), [position - 0.15] * 2, color=BLUE, linewidth=1.2)
    sample = verdict.samples[0]
    axis.axvline(
        shown(sample.margin * (1 if sample.direction == "higher" else -1)),
        color=VERMILLION,
        linewidth=0.8,
        linestyle="--",
    )
    axis.set_yticks(range(len(verdict.samples)), [_short(one) for one in verdict.samples], fontsize=6)
    axis.set_ylim(len(verdict.samples) - 0.4, -0.6)
    reference = "of plain GRPO's change [%]" if verdict.version == "one update" and scale != "log" else ""
    axis.set_xlabel(reference or ("change [%]" if scale == "log" else "difference [points]"), fontsize=6)
    if reference:
        axis.set_xscale("symlog", linthresh=100)
        axis.set_xticks([-1000, -100, 0, 100, 1000], ["−1000", "−100", "0", "100", "1000"], fontsize=6)


def _short(sample: Sample) -> str:
    """A sample's name with the arms' short names, on lines of their own."""
    text = sample.name
    for label, name in (
        (f"grpo-sg+{CONSTANTS}", "mass 4"),
        (f"grpo-sg-reverse+{CONSTANTS.replace('weight.', 'weight.of.')}", "reversed"),
        (f"grpo-sg-shuffled+{CONSTANTS.replace('weight.', 'weight.of.')}", "shuffled"),
    ):
        text = text.replace(label, name)
    return text.replace(" against ", "\nagainst ").replace(" tokens", "\ntokens")


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=DATA / "runs")
    parser.add_argument("--full", type=Path, default=DATA / "full_runs.csv")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--texts", type=Path, help="full runs; with --supplement and --probed, write --full")
    parser.add_argument("--supplement", type=Path, help="runs of the supplement")
    parser.add_argument("--probed", type=Path, help="folders of `sharpscope probe`, named as the runs")
    options = parser.parse_args()
    runs = load_several([options.runs])
    given = (options.texts, options.supplement, options.probed)
    if any(given):
        if not all(given):
            parser.error("--texts, --supplement and --probed go together")
        parts = [
            count_kinds(load_several([options.texts]).by_name),
            measured_along(load_several([options.supplement]).by_name),
            curvature(options.probed, runs.by_name),
        ]
        pd.concat(parts).sort_values(COLUMNS[:4]).to_csv(options.full, index=False)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    frame = values(runs.by_name)
    found = contrasts(frame)
    full = pd.read_csv(options.full)
    (options.out / "tables.md").write_text(text(frame, found, full), "utf-8")
    draw(runs.by_name, found, options.out)
    draw_supplement(full, options.out)
    spec = read_sweep(STUDY).claims
    verdicts = test_claims(runs, baseline=spec.baseline, treatment=spec.treatment, terms=terms_of(spec))
    draw_claims(verdicts, runs.by_name, options.out)


def text(frame: pd.DataFrame, found: pd.DataFrame, full: pd.DataFrame) -> str:
    """Everything of tables.md: `frame` from `values`, `found` from `contrasts`, `full` from full_runs.csv."""
    final = contrasts(full, CURVATURE)
    parts = {
        "End of training": arm_table(frame),
        "Differences": contrast_table(found),
        "Kinds of answers": error_table(full),
        "Supplement": supplement_table(full),
        "Curvature of final checkpoints, differences": contrast_table(final),
        "As sentences quote them": facts(frame, pd.concat([found, final]), full),
    }
    return "\n".join(f"## {title}\n\n{part}" for title, part in parts.items())


if __name__ == "__main__":
    main()

"""The paper's figures and tables at laptop scale, from recorded runs: `python -m experiments.paper.figures`.

Writes five figures and README.md with eight tables to figures/paper/ (--out), each beside what the paper (arXiv 2511.00066) reports and
a sentence on what is the same and what is not. Nothing is trained: the runs are those of data/ (0.93 million parameters on Knights and
Knaves and on arithmetic; SmolLM2-135M on sums). We know the paper's subjects and main numbers, not the numbering of its floats.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from sharpscope.analysis import compare_runs, plots
from sharpscope.analysis.statistics import mean_interval
from sharpscope.analysis.text import interval_text, method_label
from sharpscope.traces import Runs, load_runs

ROOT = Path(__file__).parents[2]
NOT_STATED = "–"
PUBLISHED = {"alpha": 2.0, "tau": 9.0, "mu": 0.25, "L": 1.0, "U": 1.4}


def only(runs: Runs, task: str, *methods: str, config: str = "") -> Runs:
    """The runs of a task, of these methods if any are named, at the setting with the most seeds."""
    chosen = {
        name: run
        for name, run in runs.by_name.items()
        if run.task == task and (not methods or run.method in methods)
    }
    keys = {
        name: str({k: v for k, v in run.config.items() if k in ("optimizer", "rollout")})
        for name, run in chosen.items()
    }
    common = pd.Series(keys).mode()[0]
    return Runs(runs.root, {name: run for name, run in chosen.items() if keys[name] == common}, {})


def differences(runs: Runs, quantity: str, factor: float = 1.0) -> pd.DataFrame:
    """baseline, method, ours (both values), difference with its 95 % interval and seeds, for each method."""
    rows = compare_runs(runs.by_name, "grpo")
    made = []
    for row in rows[rows["quantity"].str.startswith(quantity)].to_dict("records"):
        half = factor * (row["high"] - row["low"]) / 2
        made.append(
            {
                "method": method_label(row["treatment"]),
                "GRPO": f"{factor * row['baseline_value']:.3g}",
                "method's": f"{factor * row['treatment_value']:.3g}",
                "difference": interval_text(factor * row["difference"], half, sign=True),
                "seeds": row["n"],
            }
        )
    return pd.DataFrame(made)


# -- Tables: a frame, what the paper reports, and what is the same and what is not


def knights(data: dict[str, Runs]) -> pd.DataFrame:
    """Accuracy by number of people."""
    frame = plots.people.frame_of(only(data["kk"], "knights_knaves", "grpo", "grpo-sg"))
    means = frame.groupby(["setting", "when", "level"])["accuracy"].agg(["mean", "count", list])
    rows = []
    for (setting, when, level), row in means.iterrows():
        interval = mean_interval(row["list"]) if row["count"] > 1 else None
        half = float("nan") if interval is None else 100 * (interval.high - row["mean"])
        text = interval_text(100 * row["mean"], half)
        rows.append({"setting": f"{setting}, {when} training", f"{level} people [%]": text})
    return pd.DataFrame(rows).groupby("setting", sort=True).first()[::-1].reset_index()


def arithmetic(data: dict[str, Runs]) -> pd.DataFrame:
    """Mathematics: held-out accuracy on arithmetic."""
    return differences(only(data["kk"], "math"), "held-out accuracy", 100)


def tools(_: dict[str, Runs]) -> pd.DataFrame:
    """Question answering with a search tool."""
    return pd.DataFrame(
        [
            {
                "setting": "exact match, GRPO",
                "paper": 13.84,
                "ours": "no training of it is recorded",
            },
            {
                "setting": "exact match, GRPO-SG",
                "paper": 27.29,
                "ours": "no training of it is recorded",
            },
        ]
    )


def ablation(data: dict[str, Runs]) -> pd.DataFrame:
    """Weighting functions and reversed weights."""
    return differences(only(data["kk"], "knights_knaves"), "held-out accuracy", 100)


def acting(data: dict[str, Runs]) -> pd.DataFrame:
    """Weights that act: bounds [1, 4], calibrated, and the same reversed and shuffled."""
    return differences(only(data["math"], "math"), "held-out accuracy", 100)


def constants(data: dict[str, Runs]) -> pd.DataFrame:
    """The constants of the weights."""
    run = next(run for run in data["kk"] if run.method == "grpo-sg")
    used = run.info["calibration"]
    rows = [
        {"constant": name, "paper": value, "ours": f"{used[name]:.3g}"}
        for name, value in PUBLISHED.items()
    ]
    return pd.DataFrame(
        [*rows, {"constant": "u0", "paper": NOT_STATED, "ours": f"{used['u0']:.3g}"}]
    )


def sharpness(data: dict[str, Runs]) -> pd.DataFrame:
    """Sharpness and gradient norm at the end of training."""
    kk = only(data["kk"], "knights_knaves", "grpo", "grpo-sg")
    names = [
        "SAM sharpness of nll",
        "SAM sharpness of expected_failure",
        "gradient norm",
        "update norm",
    ]
    parts = [differences(kk, name).assign(quantity=name) for name in names]
    return pd.concat(parts)[["quantity", "GRPO", "method's", "difference", "seeds"]]


def smollm2(data: dict[str, Runs]) -> pd.DataFrame:
    """A pretrained model: SmolLM2-135M on sums; the published weights, weights that act, and sharpness-aware minimization."""
    return differences(data["smollm2"], "held-out accuracy, greedy", 100)


TABLES: dict[str, tuple[Callable[[dict[str, Runs]], pd.DataFrame], str, str]] = {
    "1": (
        knights,
        "K&K with 3–7 people, Qwen2.5-3B: average 0.39 (GRPO) → 0.63 (GRPO-SG).",
        "Same task, reward and weights; a model 3,000 times smaller, trained on 3 people, tested on 2, 3 and 4. Training works; GRPO-SG is "
        "not ahead of GRPO.",
    ),
    "2": (
        arithmetic,
        "AIME 2024 avg@16, DeepScaleR: 28.89 → 43.33.",
        "Verifiable answers in both; ours is arithmetic with a model of 0.93 million parameters. No difference is seen.",
    ),
    "3": (
        tools,
        "Agentic question answering, Qwen2.5-3B: exact match 13.84 → 27.29.",
        "The task is implemented (`tool_qa`), but no pair of trainings of it is recorded, so there is nothing to compare.",
    ),
    "4": (
        ablation,
        "Reversed weights do worse than GRPO-SG.",
        "Not the same: reversed, shuffled and constant weights are as good as GRPO-SG's, within the intervals; the weights hardly act here "
        "(Figure 3). Only `cov-grpo`, in the form of 0.2 that is centered at the mean, is worse than GRPO.",
    ),
    "5": (
        acting,
        NOT_STATED,
        "Not in the paper as we know it: the same comparison with weights that turn the gradient, at temperature 1. GRPO-SG is 3.7 points "
        "*worse* than GRPO, and reversed and shuffled weights are slightly better: the opposite order. Greedy accuracy shows no difference "
        "(experiments/studies/2/RESULTS.md), since what the weights change is mostly the entropy.",
    ),
    "6": (
        constants,
        "The constants of the weighting function.",
        "Same alpha, mu, L and U. u is the raw logit, and tau and the location u0 are fitted to its range in the first step, since logits of "
        "models differ and the published tau would saturate here.",
    ),
    "7": (
        sharpness,
        "Lower sharpness, and smoother gradient norms.",
        "Same direction for the sharpness of both losses, but every interval holds 0: this neither shows nor excludes a gain of this size.",
    ),
    "8": (
        smollm2,
        NOT_STATED,
        "Not in the paper as we know it: a pretrained model. Neither the published weights nor weights that act differ from GRPO beyond the "
        "interval; lowering sharpness directly (`sam`, at its default radius) costs 24 points.",
    ),
}

# -- Figures: name -> the figure, its runs, what the paper shows, what is the same and what is not


def figures(data: dict[str, Runs]) -> dict[str, tuple[plots.Drawn, str, str]]:
    """The five figures with both sentences."""
    pair = only(data["kk"], "knights_knaves", "grpo", "grpo-sg")
    return {
        "1_gradient_norm": (
            plots.gradient_norm(data["pair"], style="paper"),
            "A token's gradient norm is bounded below and above by constants times 1 − π.",
            "Same over the logits: every norm lies in the exact band. Over all parameters the norm falls with π only near π = 1: below "
            "0.8 other things (position, the hidden state) spread it by a factor of about six.",
        ),
        "2_concentration": (
            plots.lorenz(data["example"], style="paper"),
            "Few tokens with a low probability dominate the gradient.",
            "Same, on SmolLM2-135M: 1 % of the tokens hold 43 % of it on average over the recorded steps. The paper gives no number.",
        ),
        "3_weights": (
            plots.weights(data["pair"], style="paper"),
            "Weights grow with the token's probability.",
            "Same against the logit. Against the probability the weights only separate the tokens near π = 1 from the others, and "
            "the gradient (dashed, below) is elsewhere: there the weights vary between 1 and 1.4 with little order.",
        ),
        "4_trajectories": (
            plots.trajectories(pair, style="paper"),
            "GRPO-SG's gradient norm is smoother, and its reward and accuracy are higher.",
            "Not the same: both methods' curves lie within each other's intervals (12 seeds each).",
        ),
        "5_ablation": (
            plots.ablation(only(data["kk"], "knights_knaves"), style="paper"),
            "Reversing the weights does worse.",
            "Not the same: reversed, shuffled and constant weights are as good as GRPO-SG's, within the intervals. "
            "`cov-grpo` is the form of 0.2, centered at the mean.",
        ),
    }


def markdown(frame: pd.DataFrame) -> str:
    """A frame as a table."""
    lines = [list(map(str, frame.columns)), ["---"] * frame.shape[1]]
    lines += [[str(value) for value in row] for row in frame.itertuples(index=False, name=None)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Write figures/paper/."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=ROOT / "data",
        help="folder with reference, studies and example",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "figures" / "paper")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    data = {
        "kk": load_runs(options.data / "reference"),
        "math": load_runs(options.data / "studies/2/runs"),
        "smollm2": load_runs(options.data / "studies/3/runs"),
        "example": load_runs(options.data / "example"),
        "pair": load_runs(ROOT / "tests/data/pair"),
    }
    text = [
        "# The paper's figures and tables, at laptop scale",
        "",
        "Made for version 0.4 by `python -m experiments.paper.figures`; do not edit. The paper is arXiv 2511.00066 (GRPO-SG, "
        "at first TR-GRPO), with models of 1 to 10 billion parameters; ours have 0.93 million, or 135 million where SmolLM2 is named. The "
        "numbers are ours, not the paper's order of floats. ±: 95 % interval over seeds, paired by seed for differences [points]. Small "
        "models refute nothing about large ones.",
    ]
    for name, (drawn, paper, same) in figures(data).items():
        plots.save(drawn.figure, options.out, name)[1].unlink()
        print(f"{name}.png")
        text += ["", f"## Figure {name[0]}", "", f"![{paper}]({name}.png)", ""]
        text += [f"*Paper*: {paper}", "", f"*Here*: {same}"]
    for name, (make, paper, same) in TABLES.items():
        print(f"table {name}")
        text += ["", f"## Table {name}: {(make.__doc__ or '').splitlines()[0].rstrip('.')}", ""]
        text += [markdown(make(data)), "", f"*Paper*: {paper}", "", f"*Here*: {same}"]
    (options.out / "README.md").write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

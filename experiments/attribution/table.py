"""The leaderboard from the measured updates: means over seeds of the means over a run's steps, with intervals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

import sharpscope
from experiments.attribution.measure import POLICIES

KINDS = ("tokens", "prompts", "completions", "single tokens")
OUTCOMES = ("kl", "entropy", "heldout", "sharpness", "gradient_norm", "failure")
SCORES = (
    *("effect", "q before", "SGD", "share", "share of the step", "|c|·‖p − e‖", "size", "random"),
    *("MLPs", "output layer", "last block"),
)
NAMES = {
    "effect": "**effect**",
    "q before": "effect, q before the update",
    "SGD": "influence by SGD",
    "share": "share of ‖∇L‖²",
    "share of the step": "share along the step",
    "size": "|c|·‖∇log π‖",
    "MLPs": "effect through the MLPs alone",
    "output layer": "effect through embedding and output layer",
    "last block": "effect through the last block",
}


INTRODUCTION = """# Which score of tokens predicts what an update does without them?

`python -m experiments.attribution` (see [the definition](../../docs/explanations/effects.md)). Plain GRPO on the embedded policies; of each
measured update, sets of tokens are left out, the update is made again, and the change of each outcome is compared with −Σ score over the
set: rank correlation (Spearman) within the update, mean over the updates ± half of a 95 % interval over them, as if they were independent
(those of one seed are steps of one run). AdamW's first step is left out. Sets: random tenths of the tokens, single prompts, random tenths
of the completions, single tokens; fewer of them, and fewer prompts, in Knights and Knaves, in two updates a step and in whatever was
measured with `--sizes quick` or `small`. SmolLM2 was not measured here.
"""
INDEPENDENT = """
On completions that neither the score nor the update has seen (of the same prompts), with the agreement of two such measurements:

| outcome | effect | share of ‖∇L‖² | ceiling |
|---|---|---|---|"""
LEADING = """
Change of the outcome, in units of the update's own change, when the 12 leading tokens are left out (median, and quartiles over the
updates):

| outcome | by effect (predicted) | by effect | by share | by \\|c\\|·‖∇log π‖ | 12 random |
|---|---|---|---|---|---|"""
COLUMNS = ["kind", "outcome", "score", "rank", "slope"]
REMOVAL = Path(sharpscope.__file__).parent / "analysis" / "removal.json"


def measured(here: Path, name: str) -> list[dict]:
    """The rows of a file of measurements; none where it is missing."""
    path = here / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def removal(rows: list[dict]) -> dict:
    """How well effects predict removal in plain runs of one policy: means over sets of tokens, prompts and completions.

    For each outcome `rank`, and where it was measured on independent completions too `fresh` and `ceiling`.
    """
    plain = [row for row in rows if row["setting"] == "plain"]
    ranks = pd.concat([pd.DataFrame(row["ranks"], columns=COLUMNS) for row in plain])
    ranks = ranks[ranks["kind"] != "single tokens"]
    means = ranks.groupby(["outcome", "score", "kind"])["rank"].mean()
    means = means.groupby(["outcome", "score"]).mean().round(2)
    found = {}
    for outcome in OUTCOMES:
        found[outcome] = {"rank": means[outcome, "effect"]}
        if (fresh := f"{outcome} 2") in means:
            found[outcome] |= {"fresh": means[fresh, "effect"]}
            found[outcome] |= {"ceiling": means[fresh, "ceiling"]}
    return {"updates": len(plain), "outcomes": found}


def report(here: Path, tasks: list[str]) -> None:
    """Write RESULTS.md, and what lists of effects say about their prediction."""
    names = {task: POLICIES[task][0] if task in POLICIES else f"embedded:{task}" for task in tasks}
    of_policy = {names[task]: removal(measured(here, task)) for task in tasks}
    REMOVAL.write_text(json.dumps(of_policy, indent=1) + "\n", encoding="utf-8")
    parts = [INTRODUCTION]
    for task in tasks:
        rows = measured(here, task)
        for setting in dict.fromkeys(row["setting"] for row in rows):
            parts += _setting(task, setting, [row for row in rows if row["setting"] == setting])
        removal_table(rows).to_csv(here / f"removal_{task}.csv", index=False)
    parts += _single(measured(here, "single")) + _several(measured(here, "several"))
    (here / "RESULTS.md").write_text("\n".join(parts), encoding="utf-8")


SINGLE = """
## Single tokens

`python -m experiments.attribution.single`: {tokens} random tokens of each of {count} updates of `math` (steps {steps}), the run in float64.
Rank correlation of −E_t with the change per part if a hundredth of the token is left out (*tiny*), with the optimizer's own change along q
(*step*), with the change of the outcome in float64 (*exact*) and in float32. In float64 first order is exact enough; what single tokens lack
above is float32, whose rounding is larger than what most tokens do.

| outcome | tiny | step | exact | float32 | median change | median error of float32 |
|---|---|---|---|---|---|---|"""


def _single(rows: list[dict]) -> list[str]:
    """Why single tokens are predicted less well; means over the updates."""
    if not rows:
        return []
    steps = ", ".join(str(row["step"]) for row in rows)
    parts = [SINGLE.format(tokens=24, count=len(rows), steps=steps)]
    for outcome in [name for name in rows[0] if name != "step"]:
        means = pd.DataFrame([row[outcome] for row in rows]).mean()
        ranks = " | ".join(f"{value:.2f}" for value in means.iloc[:4])
        sizes = " | ".join(f"{value:.1e}" for value in means.iloc[4:])
        parts.append(f"| {outcome} | {ranks} | {sizes} |")
    return parts


SEVERAL = """
## Over several steps

`python -m experiments.attribution.several`: one prompt left out of a run of {steps} steps of `math` with 16 prompts a step, {count} prompts of
{seeds} seeds, from step 2 on. Rank correlation (and slope) of the change at the run's end with the sum of the tokens' effects, q at the end:
through their own step alone, and with what AdamW's moments carry to later steps. *Kept*: the later steps have the whole run's completions;
*again*: the changed policy draws them with the run's own seeds.

| outcome at the end | kept: own step | kept: with the momentum | again: own step | again: with the momentum | kept against again |
|---|---|---|---|---|---|"""


def _several(rows: list[dict]) -> list[str]:
    """Effects over several steps, over all prompts together."""
    if not rows:
        return []
    seeds = len({row["seed"] for row in rows})
    parts = [SEVERAL.format(steps=rows[0]["steps"], count=len(rows), seeds=seeds)]
    for outcome in ("kl", "sharpness", "failure", "heldout"):
        truth = {t: np.array([row[t][outcome] for row in rows]) for t in ("kept", "again")}
        cells = []
        for true in truth.values():
            for score in ("sum", "momentum"):
                predicted = np.array([row["predicted"][score][outcome] for row in rows])
                slope = predicted @ true / (predicted @ predicted)
                cells.append(f"{spearmanr(predicted, true).statistic:.2f} ({slope:.1f})")
        cells.append(f"{spearmanr(truth['kept'], truth['again']).statistic:.2f}")
        parts.append(f"| {outcome} | " + " | ".join(cells) + " |")
    return parts


def removal_table(rows: list[dict]) -> pd.DataFrame:
    """Predicted and measured change without the 12 leading tokens, a row an update and outcome, for the figure `removal`."""
    named = {"kl": "KL", "entropy": "entropy", "sharpness": "SAM sharpness"}
    unit = "% of the change by the step"
    found = []
    for row in rows:
        for outcome, score, predicted, measured in row["tops"]:
            if score == "effect":
                place = {"setting": row["setting"], "seed": row["seed"], "step": row["step"]}
                values = {"effect": -100 * predicted, "removal": -100 * measured}
                found.append(place | {"outcome": named[outcome]} | values | {"unit": unit})
    return pd.DataFrame(found).round(4)


def _setting(task: str, setting: str, rows: list[dict]) -> list[str]:
    """The tables of one setting."""
    frames = [pd.DataFrame(row["ranks"], columns=COLUMNS) for row in rows]
    ranks = pd.concat(frames)
    steps = sorted({row["step"] for row in rows})
    factor = np.mean([row["clip_factor"] for row in rows])
    clipped = f", mean clip factor {factor:.2f}" if factor < 1 else ""
    tokens = [row["tokens"] for row in rows]
    parts = [
        f"\n## {task}, {setting}\n",
        f"{len(rows)} updates of {len({row['seed'] for row in rows})} seeds, steps {steps[0]} to {steps[-1]}{clipped}; "
        f"{min(tokens)} to {max(tokens)} tokens with a gradient. Each cell: tokens / prompts / completions / single tokens.\n",
        "| score | " + " | ".join(OUTCOMES) + " |",
        "|---|" + "---|" * len(OUTCOMES),
    ]
    for score in SCORES:
        cells = [_cell(ranks, outcome, score) for outcome in OUTCOMES]
        name = NAMES.get(score, score).replace("|", "\\|")
        parts.append(f"| {name} | " + " | ".join(cells) + " |")
    slopes = ranks[ranks["score"] == "effect"].groupby("outcome")["slope"].median()
    said = ", ".join(f"{name} {slopes[name]:.2f}" for name in (*OUTCOMES, "sharpness, no turn"))
    parts += [f"\nSlope of truth on prediction (effect, median): {said}.", INDEPENDENT]
    for outcome in ("kl 2", "entropy 2", "failure 2"):
        cells = [_cell(ranks, outcome, score) for score in ("effect", "share", "ceiling")]
        parts.append(f"| {outcome.removesuffix(' 2')} | " + " | ".join(cells) + " |")
    names = ["outcome", "score", "predicted", "measured"]
    tops = pd.concat([pd.DataFrame(row["tops"], columns=names) for row in rows])
    parts.append(LEADING)
    for outcome in ("kl", "entropy", "sharpness"):
        of = tops[tops["outcome"] == outcome].set_index("score")
        cells = [_change(of.loc[["effect"], "predicted"])]
        cells += [_change(of.loc[[s], "measured"]) for s in ("effect", "share", "size", "random")]
        parts.append(f"| {outcome} | " + " | ".join(cells) + " |")
    seconds = pd.DataFrame([row["first_seconds"] for row in rows]).median()
    parts.append(
        f"\nSeconds an outcome on a machine that did other work at the same time: gradient {seconds.iloc[0]:.2f}, "
        f"derivatives of all tokens {seconds.iloc[1]:.2f}.\n"
    )
    return parts


def _cell(ranks: pd.DataFrame, outcome: str, score: str) -> str:
    """Mean rank correlations by kind of set, with the largest half-width of their 95 % intervals."""
    of = ranks[(ranks["outcome"] == outcome) & (ranks["score"] == score)]
    means, halves = [], []
    for kind in KINDS:
        values = of[of["kind"] == kind]["rank"].dropna()
        if len(values):
            means.append(f"{values.mean():.2f}")
            halves.append(1.96 * values.std() / np.sqrt(len(values)) if len(values) > 1 else np.nan)
    if not means:
        return "–"
    if not np.isfinite(halves).any():
        return " / ".join(means)
    return " / ".join(means) + f" (± {np.nanmax(halves):.2f})"


def _change(values: pd.Series) -> str:
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return f"{100 * middle:+.0f} % ({100 * low:+.0f} to {100 * high:+.0f})"

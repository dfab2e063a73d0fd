"""Recompute the fourth study's numbers and verdicts from its result tables alone, without sharpscope.

python experiments/studies/4/verdicts.py > experiments/studies/4/results/verdicts.md
"""

# ruff: noqa: E501 - rows of tables
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import t

RESULTS = Path(__file__).with_name("results")
NOMINAL = 0.022
"""Level of each of three looks, such that all of them together have 5 % (Pocock)."""
LOOKS = {
    "math": (20, 50, 90),
    "knights_knaves": (8, 16, 24),
    "D1": (20, 40, 60),
    "D2": (34, 67, 100),
}
"""Seeds at which a primary outcome is read."""
DOSE = 0.3
"""Standard deviation of the linear weighting over the gradient's mass."""
MARGIN = {"D3": 0.5, "published": 0.1, "D1": 0.03, "D2": 1.0, "D2 sharpness": 10.0}
Groups = Sequence[np.ndarray]


def half_width(groups: Groups, level: float) -> float:
    """Half of the t-interval of the mean of groups' means, with Welch's degrees of freedom."""
    if min(map(len, groups)) < 2:
        return math.nan
    parts = [np.var(group, ddof=1) / len(group) for group in groups]
    total = sum(parts)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(
        part**2 / (len(group) - 1) for part, group in zip(parts, groups, strict=True)
    )
    return float(t.ppf(1 - level / 2, freedom)) * math.sqrt(total) / len(groups)


def decide(mean: float, half: float, margin: float) -> str:
    """The declared rule."""
    if half == 0:
        return "no verdict: an interval without width"
    said = []
    if abs(mean) > half:
        said.append("above 0" if mean > 0 else "below 0")
    if abs(mean) + half < margin:
        said.append("smaller than the margin")
    return ", ".join(said)


def read_at(groups: Groups, looks: Sequence[int], margin: float) -> str:
    """The verdict of the first look that has one, or how far the runs are."""
    done = min(map(len, groups))
    for n in looks:
        if done < n:
            return f"not finished: {done} of {looks[-1]} seeds, next look at {n}; no verdict"
        some = [group[:n] for group in groups]
        mean, half = float(np.mean([group.mean() for group in some])), half_width(some, NOMINAL)
        found = decide(mean, half, margin)
        if found or n == looks[-1]:
            return f"{found or 'inconclusive'} (look at {n} seeds: {mean:+.3g} ± {half:.2g}, margin {margin:g})"
    return ""


def by_seed(rows: pd.DataFrame, value: str, strata: str = "rate") -> list[np.ndarray]:
    """Means of each seed's rows, in the order of the seeds, for each stratum."""
    return [
        part.groupby("seed")[value].mean().sort_index().to_numpy()
        for _, part in rows.groupby(strata)
    ]


def seed_by_seed(label: str, groups: Groups) -> str:
    """The mean with the seed as the unit, over the seeds that all strata have."""
    whole = np.stack([group[: min(map(len, groups))] for group in groups])
    if whole.shape[1] < 2:
        return f"| {label} | – | – | – | – |"
    mean = [whole.mean(axis=0)]
    related = np.corrcoef(whole)[0, 1]
    halves = " | ".join(f"± {half_width(mean, level):.3f}" for level in (NOMINAL, 0.05))
    return f"| {label} | {mean[0].mean():+.3f} | {halves} | {related:+.2f} |"


def table(name: str) -> pd.DataFrame | None:
    """A result table, None if nothing of it has been run."""
    path = RESULTS / f"{name}.parquet"
    return pd.read_parquet(path) if path.exists() else None


def line(label: str, groups: Groups, unit: str) -> str:
    """A number with its 95 % interval, for description."""
    if min(map(len, groups)) < 2:
        return f"| {label} | – | – | {min(map(len, groups))} |"
    mean = float(np.mean([group.mean() for group in groups]))
    return f"| {label} | {mean:+.3f}{unit} | ± {half_width(groups, 0.05):.3f} | {' + '.join(str(len(g)) for g in groups)} |"


# -- D3


def d3() -> Iterator[str]:
    """Do unlikely tokens sharpen?"""
    steps, slopes, weightings, bins = (
        table(f"D3-{name}") for name in ("steps", "slopes", "weightings", "bins")
    )
    if steps is None or slopes is None or weightings is None or bins is None:
        yield "D3: not started"
        return
    key = ["task", "rate", "seed", "step", "optimizer"]
    level = steps.set_index(key)
    for task, of_task in weightings.groupby("task"):
        states = steps[(steps["task"] == task) & (steps["optimizer"] == "adamw")]
        yield f"\n## D3, `{task}`: {len(states)} states of {states.groupby('rate')['seed'].nunique().min()} seeds × {states['rate'].nunique()} rates\n"
        linear = relative(slopes[slopes["task"] == task], level, key)
        alone = linear[(linear["outcome"] == "sharpness") & (linear["kind"] == "equal KL")]
        primary = alone[
            (alone["regressor"] == "unlikely")
            & (alone["side"] == "all")
            & (alone["optimizer"] == "adamw")
        ]
        measured = of_task[of_task["outcome"] == "sharpness"].assign(
            change=lambda rows: (
                100 * np.log1p((rows["measured"] / rows["plain"]).clip(lower=-0.99))
            ),
            expected=lambda rows: 100 * rows["predicted"] / rows["plain"],
        )
        adamw = measured[measured["optimizer"] == "adamw"]
        yield f"- **H1**, weights 1 + {DOSE}·z of 1 − π, sharpness [%]: {read_at(by_seed(primary, 'alone'), LOOKS[str(task)], MARGIN['D3'])}"
        published = by_seed(adamw[adamw["weighting"] == "published"], "change")
        yield f"- **H2**, `published`, measured at equal KL, 100·ln of the ratio: {read_at(published, LOOKS[str(task)], MARGIN['published'])}"
        yield "\nBoth rates have the same seeds, which the declared intervals take as independent. With the seed as the unit (mean of its two rates; not declared):\n"
        yield "| outcome | mean | at the level of a look | 95 % | correlation of the rates |\n|---|---|---|---|---|"
        yield seed_by_seed("H1", by_seed(primary, "alone"))
        yield seed_by_seed("H2", published)
        yield "\nLinear weightings of a token's property, change of an outcome at equal KL [% of it] for a spread of the weights of 0.3; 95 % intervals over runs, not adjusted:\n"
        yield "| optimizer, outcome, tokens, property | alone | | jointly | | seeds |\n|---|---|---|---|---|---|"
        equal = linear[linear["kind"] == "equal KL"]
        for (optimizer, outcome, side, regressor), rows in equal.groupby(
            ["optimizer", "outcome", "side", "regressor"]
        ):
            if outcome != "sharpness" and side != "all":
                continue
            one, both = by_seed(rows, "alone"), by_seed(rows, "joint")
            cells = [
                f"{np.mean([g.mean() for g in groups]):+.2f} | ± {half_width(groups, 0.05):.2f}"
                for groups in (one, both)
            ]
            yield f"| {optimizer}, {outcome}, {side}, {regressor} | {cells[0]} | {cells[1]} | {' + '.join(str(len(g)) for g in one)} |"
        yield "\nWeightings, sharpness after the step at equal KL [100·ln of the ratio to plain GRPO's; predicted: % of it]:\n"
        yield "| optimizer, weights | spread | turns the step by | predicted | | measured | | rank correlation | slope |\n|---|---|---|---|---|---|---|---|---|"
        for (optimizer, name), rows in measured.groupby(["optimizer", "weighting"]):
            pair = [
                f"{np.mean([g.mean() for g in by_seed(rows, v)]):+.2f} | ± {half_width(by_seed(rows, v), 0.05):.2f}"
                for v in ("expected", "change")
            ]
            rank = rows["expected"].rank().corr(rows["measured"].div(rows["plain"]).rank())
            x, y = 100 * rows["predicted"] / rows["plain"], 100 * rows["measured"] / rows["plain"]
            yield f"| {optimizer}, `{name}` | {rows['spread'].mean():.2f} | {rows['angle'].mean():.1f}° | {pair[0]} | {pair[1]} | {rank:.2f} | {(x * y).sum() / (x * x).sum():.2f} |"
        yield ""
        yield from removable(bins[bins["task"] == task], level, key)
        yield from decomposed(bins[bins["task"] == task], level, key)
        yield from by_rate(primary, adamw)


def relative(slopes: pd.DataFrame, level: pd.DataFrame, key: list[str]) -> pd.DataFrame:
    """Slopes times the dose, in percent of the outcome after the step."""
    outcomes = slopes["outcome"].unique()
    parts = []
    for outcome in outcomes:
        rows = slopes[slopes["outcome"] == outcome]
        after = level[outcome if outcome == "kl" else f"{outcome} after"]
        size = after.loc[pd.MultiIndex.from_frame(rows[key])].to_numpy()
        parts.append(
            rows.assign(
                alone=100 * DOSE * rows["alone"] / size, joint=100 * DOSE * rows["joint"] / size
            )
        )
    return pd.concat(parts)


def removable(bins: pd.DataFrame, level: pd.DataFrame, key: list[str]) -> Iterator[str]:
    """What weights of 0.7 and 1.3 by classes of π change, the class's sign taken from the other half of the seeds."""
    rows = bins[bins["outcome"] == "sharpness"].copy()
    rows["effect"] = (
        100
        * rows["effect"]
        / level["sharpness after"].loc[pd.MultiIndex.from_frame(rows[key])].to_numpy()
    )
    yield "What a weighting by π can remove: ten classes of π with equal mass, weights 1 ± 0.3 by the sign of the class in the other half of the seeds (odd, even), first order, at equal KL:\n"
    yield "| optimizer, tokens | % of the sharpness after a step | | seeds |\n|---|---|---|---|"
    for (optimizer, side), part in rows.groupby(["optimizer", "side"]):
        odd = part["seed"] % 2 == 1
        pieces = []
        for half, other in ((part[odd], part[~odd]), (part[~odd], part[odd])):
            sign = -np.sign(other.groupby(["rate", "bin"])["effect"].mean())
            weight = (
                sign.reindex(pd.MultiIndex.from_frame(half[["rate", "bin"]])).fillna(0.0).to_numpy()
            )
            pieces.append(half.assign(change=DOSE * weight * half["effect"]))
        change = pd.concat(pieces).groupby(["rate", "seed", "step"])["change"].sum().reset_index()
        yield line(f"{optimizer}, {side}", by_seed(change, "change"), "")


def decomposed(bins: pd.DataFrame, level: pd.DataFrame, key: list[str]) -> Iterator[str]:
    """How much of H1's slope is that wrong completions hold the unlikely tokens; not declared.

    x is the class of π with mean 0 and standard deviation 1 over the mass m. *Between* has the mean of x over the completions of a side in
    place of x, *within* has the rest: Σ x·E = Σ_side x̄_side·E_side + Σ (x − x̄_side)·E.
    """
    rows = bins[(bins["outcome"] == "sharpness") & (bins["side"] != "all")].copy()
    rows["effect"] /= level["sharpness after"].loc[pd.MultiIndex.from_frame(rows[key])].to_numpy()
    rows["x"] = -rows["bin"].astype(float)

    def mean(x: str, by: list[str]) -> pd.Series:
        weighted = (rows[x] * rows["mass"]).groupby([rows[k] for k in by]).transform("sum")
        return weighted / rows.groupby(by)["mass"].transform("sum")

    rows["x"] -= mean("x", key)
    rows["square"] = rows["x"] ** 2
    rows["x"] /= np.sqrt(mean("square", key))
    rows["between"] = mean("x", [*key, "side"]).fillna(0.0)
    rows["within"] = rows["x"] - rows["between"]
    for name in ("x", "between", "within"):
        rows[name] *= 100 * DOSE * rows["effect"]
    yield "\nH1's slope by classes of π, in parts between and within right and wrong completions (not declared):\n"
    yield "| optimizer, part | % of the sharpness after a step | | seeds |\n|---|---|---|---|"
    parts = [("all of it", "x", ("right", "wrong")), ("between", "between", ("right", "wrong"))]
    parts += [(f"within {side}", "within", (side,)) for side in ("right", "wrong")]
    for optimizer, some in rows.groupby("optimizer"):
        for label, column, sides in parts:
            chosen = some[some["side"].isin(sides)]
            change = chosen.groupby(["rate", "seed", "step"])[column].sum().reset_index()
            yield line(f"{optimizer}, {label}", by_seed(change, column), "")


def by_rate(primary: pd.DataFrame, adamw: pd.DataFrame) -> Iterator[str]:
    """The primary outcomes at each rate."""
    yield "\nThe primary outcomes by rate:\n\n| outcome, rate | mean | 95 % interval | seeds |\n|---|---|---|---|"
    for rate, rows in primary.groupby("rate"):
        yield line(f"H1, {rate:g}", by_seed(rows, "alone"), "")
    for name in ("acting", "published"):
        for rate, rows in adamw[adamw["weighting"] == name].groupby("rate"):
            yield line(f"`{name}`, {rate:g}", by_seed(rows, "change"), "")


# -- D1 and D2


def paired(rows: pd.DataFrame, value: str, arm: str, base: str) -> np.ndarray:
    """Differences by seed, of the seeds that have both, in their order."""
    wide = rows.pivot_table(index="seed", columns="arm", values=value).sort_index()
    if arm not in wide or base not in wide:
        return np.array([])
    return (wide[arm] - wide[base]).dropna().to_numpy()


def d1() -> Iterator[str]:
    """Do leading tokens cause instability?"""
    rows = table("D1-steps")
    if rows is None:
        yield "\n## D1: not started"
        return
    for (task, rate), part in rows.groupby(["task", "rate"]):
        late = part[part["step"] > 10].groupby(["seed", "arm"])["reward"].mean().reset_index()
        moved = (
            part[part["step"] > 1]
            .assign(log_kl=lambda r: np.log(r["kl"]))
            .groupby(["seed", "arm"])["log_kl"]
            .mean()
            .reset_index()
        )
        end = part[part["step"] == 0]
        yield f"\n## D1, `{task}`, learning rate {rate:g}\n"
        for number, (arm, base) in enumerate((("effect", "random"), ("share", "random")), 1):
            found = read_at([paired(late, "reward", arm, base)], LOOKS["D1"], MARGIN["D1"])
            yield f"- **L{number}**, `{arm}` − `{base}`, mean training reward of steps 11 to 25: {found}"
        yield "\n| difference | mean | 95 % interval | pairs |\n|---|---|---|---|"
        pairs = [
            ("effect", "random"),
            ("share", "random"),
            ("random share", "random"),
            ("random", "none"),
            ("smaller", "none"),
            ("effect", "smaller"),
        ]
        for arm, base in pairs:
            for label, data, value in (
                ("reward", late, "reward"),
                ("greedy accuracy", end, "greedy"),
                ("mean ln KL", moved, "log_kl"),
            ):
                yield line(f"`{arm}` − `{base}`, {label}", [paired(data, value, arm, base)], "")
        yield "\n| arm | reward of steps 11 to 25 | runs whose reward there is under half of that of step 1 | runs |\n|---|---|---|---|"
        first = part[part["step"] == 1].set_index(["seed", "arm"])["reward"]
        for arm, some in late.groupby("arm"):
            begun = first.loc[pd.MultiIndex.from_frame(some[["seed", "arm"]])].to_numpy()
            yield f"| `{arm}` | {some['reward'].mean():.3f} | {int((some['reward'].to_numpy() < begun / 2).sum())} | {len(some)} |"


def d2() -> Iterator[str]:
    """Does GRPO-SG help or flatten?"""
    rows = table("D2-steps")
    if rows is None:
        yield "\n## D2: not started"
        return
    final = rows[rows["stage"] == "final"] if "stage" in rows else rows
    for task, part in final.groupby("task"):
        accuracy = (
            part.assign(points=100 * part["greedy"])
            .groupby(["seed", "arm"])["points"]
            .mean()
            .reset_index()
        )
        last = part[part["sharpness"] > 0].assign(
            log=lambda r: 100 * np.log(r["sharpness"] / r["ceiling"]),
            percent=lambda r: 100 * r["accuracy"],
        )
        yield f"\n## D2, `{task}`\n"
        for number, arm in enumerate(("acting", "published"), 1):
            yield f"- **G{number}**, `{arm}` − `grpo`, greedy accuracy [points]: {read_at([paired(accuracy, 'points', arm, 'grpo')], LOOKS['D2'], MARGIN['D2'])}"
        for control in ("half", "averaged", "flat"):
            yield f"- control `{control}` − `grpo`, sharpness per unit of 1 − loss [100·ln]: {read_at([at_equal_accuracy(last, control)], LOOKS['D2'], MARGIN['D2 sharpness'])}"
        yield f"- **G3**, `acting` − `grpo`, sharpness per unit of 1 − loss at equal accuracy [100·ln]: {read_at([at_equal_accuracy(last, 'acting')], LOOKS['D2'], MARGIN['D2 sharpness'])}"
        yield "\n| difference | mean | 95 % interval | pairs |\n|---|---|---|---|"
        for arm, base in (("acting", "grpo"), ("published", "grpo"), ("acting", "shuffled")):
            yield line(
                f"`{arm}` − `{base}`, greedy accuracy",
                [paired(accuracy, "points", arm, base)],
                " points",
            )


def at_equal_accuracy(last: pd.DataFrame, arm: str) -> np.ndarray:
    """Differences of ln sharpness less what the difference in training accuracy explains, by the slope within arms."""
    within = last[["log", "percent"]] - last.groupby("arm")[["log", "percent"]].transform("mean")
    size = float((within["percent"] ** 2).sum())
    slope = float((within["log"] * within["percent"]).sum()) / size if size > 0 else 0.0
    return paired(
        last.assign(adjusted=last["log"] - slope * last["percent"]), "adjusted", arm, "grpo"
    )


def main() -> None:
    """Print everything in Markdown."""
    log = RESULTS / "log.csv"
    if log.exists():
        done = pd.read_csv(log)
        spent = done["seconds"].sum() / 3600
        yielded = ", ".join(f"{name} {len(part)} runs" for name, part in done.groupby("design"))
        print(f"From `results/` alone: {yielded}; {spent:.1f} core-hours.")
    for text in (*d3(), *d1(), *d2()):
        print(text.replace("± nan", "–").replace("+nan", "–"))


if __name__ == "__main__":
    main()

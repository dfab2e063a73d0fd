"""Recompute the third study's numbers from its Parquet files alone, without sharpscope.

python experiments/studies/3/verdicts.py
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import t, ttest_1samp

DATA = Path(__file__).parents[3] / "data" / "studies" / "3" / "runs"
TABLES = "eval", "probes", "steps"
MAX_SATURATION = 0.3
ARMS = "grpo", "acting", "published", "sam"
OUTCOMES = {
    "accuracy_greedy": (100.0, "greedy accuracy [points]"),
    "heldout_failure": (100.0, "held-out failure [points]"),
    "entropy": (1000.0, "entropy [millinats]"),
}

LOOKS = {4: 2}
"""Step -> how often its single updates were read, if more than once: what p-values are multiplied by."""


def numbers(tables: dict[str, pd.DataFrame]) -> dict[str, float]:
    """The numbers of a finished run, from its rows of each table."""
    evaluation, probes, steps = (tables[name] for name in TABLES)
    last = evaluation[(evaluation["step"] == 16) & (evaluation["split"] == "heldout")].set_index(
        "temperature"
    )
    sam = probes[(probes["step"] == 16) & (probes["quantity"] == "sam")].iloc[0]
    arm, late = steps[steps["step"] > 4], steps[steps["step"] > 12]
    return {
        "greedy accuracy [%]": 100 * last.loc[0.0, "accuracy"],
        "accuracy at T = 1 [%]": 100 * last.loc[1.0, "accuracy"],
        "training reward, steps 13 to 16 [%]": 100 * late["reward_mean"].mean(),
        "SAM sharpness": sam["value"],
        "SAM sharpness per unit of 1 − loss": sam["value"] / sam["ceiling"],
        "entropy, steps 13 to 16 [nats]": late["entropy_mean"].mean(),
        "completions cut, steps 13 to 16 [%]": 100 * late["truncated_fraction"].mean(),
        "norm of the gradient, median": arm["grad_norm"].median(),
        "norm of the update, mean": arm["update_norm"].mean(),
        "rotation of the update, steps 6 and 12 [degrees]": arm["update_rotation"].mean(),
        "rotation of the gradient, steps 6 and 12 [degrees]": arm["gradient_rotation"].mean(),
        "KL(old ‖ new) of a step [nats]": arm["kl_step"].mean(),
    }


def sign_flips(differences: np.ndarray) -> float:
    """Two-sided exact p of the mean under all sign changes."""
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(differences))))
    means = np.abs(signs @ differences)
    return float((means >= abs(differences.sum()) - 1e-12).mean())


def interval(differences: np.ndarray) -> tuple[float, float, float]:
    """Mean and 95 % t-interval."""
    mean, n = float(differences.mean()), len(differences)
    half = float(t.ppf(0.975, n - 1)) * float(differences.std(ddof=1)) / math.sqrt(n)
    return mean, mean - half, mean + half


def forks() -> None:
    """Differences of single updates from that of plain GRPO, paired by batch; *: p below 0.05 after Holm's adjustment over the arms."""
    every = pd.read_parquet(DATA.parent / "forks" / "forks.parquet")
    for step, rows in every.groupby("step"):
        wide = rows[rows["valid"]].pivot_table(
            index=["comparison", "outcome", "arm"], columns="batch", values="value", sort=False
        )
        arms = [arm for arm in rows["arm"].unique() if arm != "grpo"]
        turned = wide.loc["step", "update_rotation"].mean(axis=1)
        table = pd.DataFrame({"rotation of the update [°]": turned.loc[arms].map("{:.1f}".format)})
        for outcome, (factor, name) in OUTCOMES.items():
            values = wide.loc["kl", outcome]
            change = factor * (
                values.loc[[arm for arm in arms if arm in values.index]] - values.loc["grpo"]
            )
            found = {
                arm: (line.dropna(), ttest_1samp(line.dropna(), 0.0).pvalue)
                for arm, line in change.iterrows()
            }
            order = sorted(found, key=lambda arm: found[arm][1])
            adjusted = np.maximum.accumulate(
                [found[arm][1] * (len(order) - place) for place, arm in enumerate(order)]
            )
            for arm, p in zip(order, LOOKS.get(step, 1) * adjusted, strict=True):
                mean, low, high = interval(found[arm][0].to_numpy())
                table.loc[arm, name] = f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]" + "*" * bool(
                    p < 0.05
                )
        before = rows.drop_duplicates(["batch", "outcome"]).groupby("outcome")["start"].mean()
        after = wide.loc["step"].xs("grpo", level="arm").mean(axis=1)
        print(
            f"\nStep {step}, {rows['batch'].nunique()} batches; before, and after the update of plain GRPO:\n"
        )
        for outcome, (factor, name) in OUTCOMES.items():
            print(f"- {name}: {factor * before[outcome]:.4g}, {factor * after[outcome]:.4g}")
        print(f"\n| arm | {' | '.join(table.columns)} |\n{'|---' * (len(table.columns) + 1)}|")
        for arm, cells in table.iterrows():
            print(f"| `{arm}` | {' | '.join(map(str, cells))} |")


def published_kernel() -> None:
    """`cov-grpo` as published and centered (the arm of the forks) at the KL of plain GRPO's update of step 4, paired by batch."""
    later = pd.read_parquet(DATA.parent / "published_cov_grpo.parquet")
    first = pd.read_parquet(DATA.parent / "forks" / "forks.parquet")
    first = first[first["step"] == 4]
    print("\n| outcome | batches | published − grpo | centered − grpo | published − centered |")
    print("|---|---|---|---|---|")
    for outcome, (factor, name) in OUTCOMES.items():
        wide = {}
        for source, rows in (("published", later), ("centered", first)):
            valid = rows[(rows["comparison"] == "kl") & (rows["outcome"] == outcome)]
            found = valid[valid["valid"]].pivot(index="batch", columns="arm", values="value")
            wide[source] = factor * (found["cov-grpo"] - found["grpo"])
        both = pd.DataFrame(wide).dropna()
        both["difference"] = both["published"] - both["centered"]
        cells = [interval(both[column].to_numpy()) for column in both]
        texts = [f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]" for mean, low, high in cells]
        print(f"| {name} | {len(both)} | {' | '.join(texts)} |")


def sharpness() -> None:
    """Sharpness after single updates at the KL of plain GRPO's: 100·ln of its ratio to that of `grpo`, paired by batch."""
    every = pd.read_parquet(DATA.parent / "sharpness.parquet")
    for step, rows in every[every["comparison"] == "kl"].groupby("step"):
        found = rows[(rows["outcome"] == "sam_sharpness") & rows["valid"] & (rows["value"] > 0)]
        wide = found.pivot_table(index="arm", columns="batch", values="value", sort=False)
        change = 100 * np.log(wide.drop("grpo") / wide.loc["grpo"])
        p = {arm: ttest_1samp(line.dropna(), 0.0).pvalue for arm, line in change.iterrows()}
        order = sorted(p, key=lambda arm: p[arm])
        adjusted = np.maximum.accumulate(
            [p[arm] * (len(order) - place) for place, arm in enumerate(order)]
        )
        plain = found[found["arm"] == "grpo"]
        moved = 100 * (plain["value"] / plain["start"] - 1)
        print(
            f"\nSharpness at step {step}, {rows['batch'].nunique()} batches; grpo: {wide.loc['grpo'].mean():.4g}"
        )
        print(
            f"before: {plain['start'].mean():.4g}, changed by {moved.min():+.0f} to {moved.max():+.0f} %\n"
        )
        print("| arm | batches | 100·ln of the ratio to grpo | p, adjusted |\n|---|---|---|---|")
        for arm, line in change.iterrows():
            mean, low, high = interval(line.dropna().to_numpy())
            cells = (
                f"{mean:+.1f} [{low:+.1f}, {high:+.1f}] | {min(adjusted[order.index(arm)], 1):.2g}"
            )
            print(f"| `{arm}` | {line.notna().sum()} | {cells} |")


def contaminated() -> None:
    """Cosines to the policy gradient on clean and contaminated batches, and `delight` − method where contaminated, paired by batch."""
    rows = pd.read_csv(DATA.parent / "contaminated.csv")
    for state, part in rows.groupby("state", sort=False):
        wide = part.pivot_table(
            index="batch", columns=["contaminated", "method"], values="cosine", sort=False
        )
        clean, wrong = (wide[share] for share in sorted(part["contaminated"].unique()))
        others = [name for name in clean if name != "delight"]
        p = {name: ttest_1samp(wrong["delight"] - wrong[name], 0.0).pvalue for name in others}
        order = sorted(p, key=lambda name: p[name])
        adjusted = np.maximum.accumulate(
            [p[name] * (len(order) - place) for place, name in enumerate(order)]
        )
        print(
            f"\n{state}: {len(wide)} batches; halves of the estimate: {part['cosine_of_halves'].iloc[0]:.3f}\n"
        )
        print(
            "| method | cosine, clean | cosine, contaminated | delight − method, contaminated | p, adjusted |\n|---|---|---|---|---|"
        )
        for name in clean:
            cells = f"| `{name}` | {clean[name].mean():.3f} | {wrong[name].mean():.3f} |"
            if name == "delight":
                print(f"{cells} – | – |")
                continue
            mean, low, high = interval((wrong["delight"] - wrong[name]).to_numpy())
            print(
                f"{cells} {mean:+.3f} [{low:+.3f}, {high:+.3f}] | {min(adjusted[order.index(name)], 1):.2g} |"
            )


def read(folder: Path) -> pd.DataFrame:
    """Numbers of the runs in a folder: a row for each (arm, seed)."""
    tables = {
        name: dict(list(pd.read_parquet(folder / f"{name}.parquet").groupby("run")))
        for name in TABLES
    }
    found = {}
    for run in tables["probes"]:  # the runs of the collapse have none
        arm, seed = run.rsplit("-s", 1)
        found[arm, int(seed)] = numbers({name: rows[run] for name, rows in tables.items()})
    return pd.DataFrame(found).T


def means(data: pd.DataFrame, arms: Sequence[str]) -> None:
    """Print the mean of each number over the seeds of `data`."""
    print(f"\n| mean over the seeds | {' | '.join(arms)} |\n{'|---' * (len(arms) + 1)}|")
    for name in data.columns:
        print(
            f"| {name} | " + " | ".join(f"{data.loc[arm, name].mean():.4g}" for arm in arms) + " |"
        )


def differences(data: pd.DataFrame, pairs: Sequence[tuple[str, str]]) -> None:
    """Print the differences of pairs of arms, paired by seed."""
    print(
        "\n| difference | mean | 95 % t-interval | p (sign flips) | by seed |\n|---|---|---|---|---|"
    )
    for arm, base in pairs:
        for name in list(data.columns)[:5]:
            ours, theirs = data.loc[arm, name].to_numpy(float), data.loc[base, name].to_numpy(float)
            ratio = name.startswith("SAM")
            both = (ours > 0) & (theirs > 0) if ratio else np.full(len(ours), True)
            if name.endswith("loss"):  # a saturated estimate is one of the accuracy
                both &= np.maximum(ours, theirs) <= MAX_SATURATION
            if both.sum() < 2:
                continue
            change = 100 * np.log(ours[both] / theirs[both]) if ratio else ours - theirs
            mean, low, high = interval(change)
            label = f"{arm} − {base}: {name.split(' [')[0]}" + (
                ", 100·ln of the ratio" if ratio else ""
            )
            values = ", ".join(f"{value:+.1f}" for value in change)
            print(
                f"| {label} | {mean:+.2f} | [{low:+.2f}, {high:+.2f}] | {sign_flips(change):.3f} | {values} |"
            )


def main() -> None:
    """Print the tables in Markdown."""
    data = read(DATA)
    means(data, ARMS)
    differences(data, [(arm, "grpo") for arm in ARMS[1:]])
    # arms declared later, and the pilot of GRPO-SAM's radius, seed 100
    if (more := DATA.parent / "more").exists():
        later = read(more)
        pilot = later.xs(100, level=1, drop_level=False)
        print("\nThe pilot of the radius:")
        means(pilot, list(pilot.index.get_level_values(0)))
        later = later.drop(pilot.index)
        data = pd.concat([data, later]).sort_index()
        sam = [arm for arm in later.index.unique(0) if arm != "shuffled"]
        print("\nThe arms declared later:")
        means(data, ["grpo", "acting", *later.index.unique(0)])
        differences(data, [*((arm, "grpo") for arm in sam), ("acting", "shuffled")])
    forks()
    published_kernel()
    sharpness()
    contaminated()


if __name__ == "__main__":
    main()

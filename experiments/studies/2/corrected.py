"""Tables of the corrected second study: accuracy by temperature, unsaturated sharpness, clipping; paired by seed.

    python experiments/studies/2/corrected.py

`data/studies/2/corrected.parquet` has a row for each run, step and quantity (arm, seed, step, quantity, value). The runs were made
again with version 0.2.0 from the configurations of `study.yaml`, with final checkpoints kept: greedy accuracy on 2,500 held-out
questions, accuracy and pass@8 at temperatures 0.6 and 1 with 8 completions for each of the study's 500, and probes of 200 training
questions with 8 completions each at radii 0.05 and 0.1.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

DATA = Path(__file__).parents[3] / "data" / "studies" / "2" / "corrected.parquet"
ARMS = {
    "grpo": "grpo",
    "sg": "mass 4",
    "reverse": "reversed",
    "shuffled": "shuffled",
    "half": "grpo, lr 5e-5",
    "twice": "grpo, lr 2e-4",
}
PAIRS = (
    ("sg", "grpo"),
    ("sg", "reverse"),
    ("sg", "shuffled"),
    ("sg", "half"),
    ("reverse", "grpo"),
    ("shuffled", "grpo"),
)
SHARES = ("heldout", "unseen", "training", "rollouts", "updates", "completions", "tokens")


def blocks(data: pd.DataFrame) -> pd.DataFrame:
    """The end of training of the seeds that all six arms have: index (quantity, seed), a column for each arm."""
    table = data[data["step"] == data["step"].max()].pivot_table(
        index=["quantity", "seed"], columns="arm", values="value"
    )
    return table.dropna()[list(ARMS)]


def difference(table: pd.DataFrame, quantity: str, a: str, b: str) -> tuple[float, float]:
    """Mean paired difference and half of its 95 % t-interval; for sharpness that of the log ratio."""
    pair = table.loc[quantity]
    values = np.log(pair[a] / pair[b]) if _sharpness(quantity) else pair[a] - pair[b]
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean()), float(half)


def _sharpness(quantity: str) -> bool:
    return quantity.startswith(("sam", "asam"))


def _scale(quantity: str) -> tuple[float, str]:
    if _sharpness(quantity):
        return 100, " %"
    return (100, " points") if quantity.startswith(SHARES) else (1, "")


def main() -> None:
    """Print both tables as Markdown."""
    data = pd.read_parquet(DATA)
    per_unit = data[data["quantity"].str.contains("expected_failure, radius")]
    loss = data[data["quantity"] == "loss, expected_failure"].set_index(["arm", "seed", "step"])["value"]
    keys = pd.MultiIndex.from_frame(per_unit[["arm", "seed", "step"]])
    per_unit = per_unit.assign(
        value=per_unit["value"].to_numpy() / (1 - loss.reindex(keys).to_numpy()),
        quantity=per_unit["quantity"] + ", per unit of 1 − loss",
    )
    table = blocks(pd.concat([data, per_unit]))
    quantities = list(dict.fromkeys(table.index.get_level_values("quantity")))
    seeds = table.index.get_level_values("seed").nunique()
    print(f"Means over {seeds} seeds at the end of training:\n")
    print("| quantity | " + " | ".join(ARMS.values()) + " |")
    print("|---" * (len(ARMS) + 1) + "|")
    for quantity in quantities:
        factor = 100 if quantity.startswith(SHARES) else 1
        means = table.loc[quantity].mean()
        print(
            f"| {quantity}{' [%]' if factor == 100 else ''} | "
            + " | ".join(f"{factor * means[a]:.3g}" for a in ARMS)
            + " |"
        )
    print(f"\nDifferences paired by seed, 95 % t-intervals over {seeds} seeds; sharpness: 100·ln of the ratio:\n")
    print("| quantity | " + " | ".join(f"{ARMS[a]} − {ARMS[b]}" for a, b in PAIRS) + " |")
    print("|---" * (len(PAIRS) + 1) + "|")
    for quantity in quantities:
        factor, unit = _scale(quantity)
        cells = []
        for a, b in PAIRS:
            mean, half = difference(table, quantity, a, b)
            cells.append(f"{factor * mean:+.2f} ± {factor * half:.2f}")
        print(f"| {quantity}{f' [{unit.strip()}]' if unit else ''} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

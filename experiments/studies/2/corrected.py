"""The corrected second study: accuracy by temperature, unsaturated sharpness, clipping; paired by seed.

    python experiments/studies/2/corrected.py            # print the tables; exit code 1 if a page has other numbers
    python experiments/studies/2/corrected.py --write    # put the numbers into the pages

`data/studies/2/corrected.parquet` has a row for each run, step and quantity (arm, seed, step, quantity, value); the arm `start` is the
initial policy. `rerun.py` makes it. In the pages a number stands between `<!--= … -->` and `<!-- -->`, where `…` is one of

    seeds                       number of seeds that all arms have
    mean QUANTITY ARM           mean over seeds
    range QUANTITY ARM ARM …    smallest and largest of these means
    diff QUANTITY ARM ARM       paired difference ± half of its 95 % t-interval; for sharpness 100·ln of the ratio
    table means | differences | verdicts
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from sharpscope.analysis.claims import CLAIMS, ClaimData
from sharpscope.analysis.claims.accuracy import greedy_finding
from sharpscope.analysis.claims.base import decide
from sharpscope.analysis.statistics import mean_interval
from sharpscope.config import ClaimsSpec

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "data" / "studies" / "2" / "corrected.parquet"
PAGES = (Path(__file__).parent / "RESULTS.md", ROOT / "docs" / "study.md")
README = (
    "Where its weights act, greedy accuracy is not higher than plain GRPO's (<!--= diff greedy sg grpo --><!-- --> points, "
    "<!--= seeds --><!-- --> seeds)"
)
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
FAILURE = "expected_failure, radius 0.05"
QUANTITIES = {
    "greedy": "heldout, T = 0 (2,500 questions)",
    "T=0.6": "heldout, T = 0.6",
    "T=1": "heldout, T = 1",
    "pass@8,T=0.6": "heldout pass@8, T = 0.6",
    "pass@8,T=1": "heldout pass@8, T = 1",
    "train": "training questions, T = 0",
    "easier": "unseen level 1, T = 0",
    "harder": "unseen level 3, T = 0",
    "rollouts": "rollouts correct, steps 140 and 160",
    "completed": "rollouts correct among completed, steps 140 and 160",
    "cut": "completions cut, last 20 steps",
    "noise": "tokens with entropy above 0.9 ln V, steps 140 and 160",
    "clipped": "updates whose gradient was clipped",
    "entropy": "entropy, last 20 steps",
    "sam": f"sam, {FAILURE}",
    "sam/unit": f"sam, {FAILURE}, per unit of 1 − loss",
    "asam": f"asam, {FAILURE}",
    "asam/unit": f"asam, {FAILURE}, per unit of 1 − loss",
    "sam,nll": "sam, nll, radius 0.05",
    "asam,nll": "asam, nll, radius 0.05",
}
"""Key → quantity; the first 13 are shares."""
SHARES = tuple(QUANTITIES)[:13]
SHARPNESS = tuple(QUANTITIES)[14:]
NAMES = {
    "reverse": "grpo-sg-reverse",
    "shuffled": "grpo-sg-shuffled",
    "grpo": "grpo",
    "half": "lr 5e-5",
    "twice": "lr 2e-4",
}
RULES = {
    "C7": ("greedy", ("grpo",)),
    "C4": ("sam/unit", ("grpo",)),
    "C10": ("greedy", ("reverse", "shuffled")),
}
RULES |= {"C14": ("greedy", ("half", "grpo", "twice"))}
"""Claim → quantity and the arms that mass 4 is compared with."""


class Numbers:
    """Values by key and seed at the end of training, of the seeds that all six arms have, and those of the initial policy."""

    def __init__(self, data: pd.DataFrame) -> None:
        wide = data.pivot_table(index=["arm", "seed", "step"], columns="quantity", values="value")
        for measure in ("sam", "asam"):
            wide[f"{measure}, {FAILURE}, per unit of 1 − loss"] = wide[f"{measure}, {FAILURE}"] / (
                1 - wide["loss, expected_failure"]
            )
        wide = wide.reindex(columns=list(QUANTITIES.values())).set_axis(list(QUANTITIES), axis=1)
        self.start = wide.xs(0, level="step").mean()
        ends = wide.drop(index="start", errors="ignore").xs(
            wide.index.get_level_values("step").max(), level="step"
        )
        complete = ends.dropna().groupby("seed").size() == len(ARMS)
        self.seeds = list(complete.index[complete])
        self.table = ends[ends.index.get_level_values("seed").isin(self.seeds)]

    def of(self, key: str, arm: str) -> pd.Series:
        """Seed → value."""
        return self.table.loc[arm][key]

    def differences(self, key: str, a: str, b: str) -> pd.Series:
        """Seed → difference of two arms; for sharpness of the logarithms."""
        first, second = self.of(key, a), self.of(key, b)
        return np.log(first / second) if key in SHARPNESS else first - second

    def mean(self, key: str, arm: str) -> str:
        """Mean over seeds; of shares in per cent."""
        value = self.start[key] if arm == "start" else self.of(key, arm).mean()
        if not np.isfinite(value):
            return "–"
        return f"{100 * value:.1f}" if key in SHARES else f"{value:.3g}"

    def difference(self, key: str, a: str, b: str) -> str:
        """Mean difference ± half of its t-interval."""
        values = self.differences(key, a, b)
        interval, factor = mean_interval(values), 1 if key == "entropy" else 100
        assert interval is not None
        return f"{factor * values.mean():+.1f} ± {factor * (interval.high - interval.low) / 2:.1f}".replace(
            "-", "−"
        )

    def verdict(self, claim: str) -> str:
        """A row of the table of verdicts: the claim's rule on the corrected numbers."""
        key, rivals = RULES[claim]
        name = {arm: NAMES[arm] if len(rivals) > 1 else "" for arm in rivals}
        frames, sampled = (
            {
                name[a]: self.differences(k, "sg", a).rename("difference").reset_index()
                for a in rivals
            }
            for k in (key, "T=1")
        )
        finding = (
            greedy_finding(frames, sampled, 0.05) if key == "greedy" else ClaimData(parts=frames)
        )
        found = decide(
            CLAIMS[claim],
            finding,
            ClaimsSpec(treatment="mass 4", margins={claim: 0.1 if claim == "C4" else 0.02}),
        )
        effect = found.effect.line if found.effect is not None else "–"
        if found.effect is not None and name[rivals[0]]:
            effect = f"{found.effect.name.split(' against ')[-1]}: {effect}"
        return f"| {claim} | {found.verdict} | {effect} | {found.reason} |"

    def block(self, what: str) -> str:
        """A Markdown table."""
        if what == "verdicts":
            rows = [
                "| claim | verdict | effect | reason |",
                "|---" * 4 + "|",
                *map(self.verdict, RULES),
            ]
        elif what == "means":
            rows = [
                "| quantity | before training | " + " | ".join(ARMS.values()) + " |",
                "|---" * (len(ARMS) + 2) + "|",
            ]
            for key, name in QUANTITIES.items():
                cells = [self.mean(key, arm) for arm in ("start", *ARMS)]
                rows.append(f"| {name}{' [%]' if key in SHARES else ''} | {' | '.join(cells)} |")
        else:
            rows = ["| quantity | " + " | ".join(f"{ARMS[a]} − {ARMS[b]}" for a, b in PAIRS) + " |"]
            rows.append("|---" * (len(PAIRS) + 1) + "|")
            for key, name in QUANTITIES.items():
                unit = " [points]" if key in SHARES else " [100·ln]" if key in SHARPNESS else ""
                rows.append(
                    f"| {name}{unit} | {' | '.join(self.difference(key, a, b) for a, b in PAIRS)} |"
                )
        return "\n\n" + "\n".join(rows) + "\n\n"

    def text(self, expression: str) -> str:
        """What a mark asks for."""
        kind, *rest = expression.split()
        if kind == "seeds":
            return str(len(self.seeds))
        if kind == "table":
            return self.block(rest[0])
        if kind == "range":
            means = sorted((self.mean(rest[0], arm) for arm in rest[1:]), key=float)
            return means[0] if means[0] == means[-1] else f"{means[0]} to {means[-1]}"
        return self.mean(*rest) if kind == "mean" else self.difference(*rest)

    def filled(self, page: str) -> str:
        """The page with the numbers of this table between its marks."""
        return re.sub(
            r"(<!--= (.*?) -->).*?(<!-- -->)",
            lambda m: m[1] + self.text(m[2]) + m[3],
            page,
            flags=re.DOTALL,
        )


def main(write: bool) -> int:
    """Print the tables, and compare or write the pages; returns the exit code."""
    numbers = Numbers(pd.read_parquet(DATA))
    for what in ("means", "differences", "verdicts"):
        print(numbers.block(what).strip() + "\n")
    print(re.sub(r"<!--.*?-->", "", numbers.filled(README)))
    differing = 0
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = numbers.filled(before)
        if write:
            page.write_text(after, encoding="utf-8")
        elif after != before:
            differing += 1
            print(f"{page.name}: has other numbers; run with --write")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv[1:]))

"""How far the sampler's log-probabilities are from the trainer's: over all tokens, by position and by probability."""

from __future__ import annotations

import numpy as np
import pandas as pd

from sharpscope.analysis.sections import Section
from sharpscope.analysis.study import per_run
from sharpscope.analysis.text import percent
from sharpscope.traces import Run, Runs
from sharpscope.traces.rules import QUANTITIES, mismatch

POSITIONS = (0, 16, 64, 256, 1024, 4096, 16384)
"""First positions of the ranges by position."""
PROBABILITIES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99)
"""Lower ends of the ranges by the sampler's probability μ."""
COLUMNS = ["part", "range", "tokens", *QUANTITIES]


@per_run
def mismatch_table(run: Run) -> pd.DataFrame:
    """COLUMNS: a row for all tokens (part `all`), and for each step and range of positions and of probabilities that has tokens.

    `outside` is the share of ratios π/μ outside [0.9, 1.1], k1 to k3 are means [nats]; see `traces.rules`. Ranges are of
    μ, not π, so that tokens in a range are draws from μ given the range. Empty without sampler log-probabilities.
    """
    sums: dict[tuple[str, int], np.ndarray] = {}
    for frame in run.iter_tokens(columns=["step", "position", "logp", "behavior_logp"], required=["behavior_logp"]):
        rows = frame.dropna()
        if rows.empty:
            continue
        values = mismatch(rows["logp"].to_numpy(), rows["behavior_logp"].to_numpy())
        table = np.column_stack([np.ones(len(rows)), *(values[name] for name in QUANTITIES)])
        probability = np.exp(rows["behavior_logp"].to_numpy(dtype=np.float64))
        bins = {
            "all": np.zeros(len(rows), dtype=int),
            "step": rows["step"].to_numpy(),
            "position": np.searchsorted(POSITIONS, rows["position"].to_numpy(), side="right") - 1,
            "probability": np.searchsorted(PROBABILITIES, probability, side="right") - 1,
        }
        for part, index in bins.items():
            for bin_number in np.unique(index):
                total = table[index == bin_number].sum(axis=0)
                sums[part, int(bin_number)] = sums.get((part, int(bin_number)), 0.0) + total
    made = [
        [part, _range(part, bin_number), int(total[0]), *(total[1:] / total[0])]
        for (part, bin_number), total in sorted(sums.items())
    ]
    return pd.DataFrame(made, columns=COLUMNS)


def _range(part: str, bin_number: int) -> str:
    if part in ("all", "step"):
        return "all" if part == "all" else str(bin_number)
    edges = POSITIONS if part == "position" else PROBABILITIES
    if bin_number + 1 == len(edges):
        return f"from {edges[bin_number]:g}"
    return (
        f"{edges[bin_number]:g} to {edges[bin_number + 1] - 1:g}"
        if part == "position"
        else f"{edges[bin_number]:g} to {edges[bin_number + 1]:g}"
    )


def mismatch_by_step(run: Run) -> dict[int, float]:
    """Step → estimate k3 of KL(μ‖π) over its tokens [nats]; of the steps that have the sampler's log-probabilities."""
    rows = mismatch_table(run)
    rows = rows[rows["part"] == "step"]
    return dict(zip(map(int, rows["range"]), rows["k3"].astype(float), strict=True))


def sampler_section(runs: Runs) -> Section | None:
    """Sampler against trainer: a row for each run whose sampler differs, one line if none does; None without such data.

    A sampler differs where some ratio is outside [0.9, 1.1] or an estimate of KL(μ‖π) exceeds 0.001 nats.
    """
    tables = {name: table for name, run in runs.by_name.items() if len(table := mismatch_table(run))}
    title, part, estimates = "Sampler against trainer", "Events and cost", ["k1", "k2", "k3"]
    rows = []
    for name, table in tables.items():
        whole = table.iloc[0]
        if whole["outside"] > 0 or whole[estimates].abs().max() > 1e-3:
            row = {
                "run": name,
                "tokens": f"{whole['tokens']:,}",
                "ratios outside [0.9, 1.1]": percent(whole["outside"], 2),
            }
            rows.append(row | {f"{k} [nats]": whole[k] for k in estimates} | {"most at": worst_ranges(table)})
    if not tables:
        return None
    if not rows:
        largest = max(table.iloc[0][estimates].abs().max() for table in tables.values())
        text = f"no ratio is outside [0.9, 1.1], and no estimate of KL(μ‖π) exceeds {largest:.1g} nats"
        return Section(title, f"Their log-probabilities agree: {text}.", part=part)
    note = "Ratio r = π/μ of the trainer's policy to the sampler's; k1 = −ln r, k2 = (ln r)²/2, k3 = r − 1 − ln r estimate KL(μ‖π)."
    return Section(title, pd.DataFrame(rows), note, part)


def worst_ranges(table: pd.DataFrame) -> str:
    """The range of positions and that of probabilities with the most ratios outside [0.9, 1.1]; `–` if none is."""
    worst = table[table["part"].isin(["position", "probability"])].sort_values(
        "outside", ascending=False, kind="stable"
    )
    named = [
        f"{row.part} {row.range} ({row.outside:.1%})" for row in worst.groupby("part", sort=False).head(1).itertuples()
    ]
    return " and ".join(named) if table.iloc[0]["outside"] > 0 else "–"

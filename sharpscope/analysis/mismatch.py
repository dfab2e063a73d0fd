"""How far the sampler's log-probabilities are from the trainer's: over all tokens, by position and by probability."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from sharpscope.analysis.sections import Section
from sharpscope.analysis.study import per_run
from sharpscope.analysis.text import percent
from sharpscope.analysis.tokens import ROW, row_probability
from sharpscope.traces import Run, Runs
from sharpscope.traces.rules import QUANTITIES, mismatch

EDGES = {"position": (0, 16, 64, 256, 1024, 4096, 16384), "probability": (0.0, 0.01, 0.1, 0.5, 0.9, 0.99)}
"""Lower ends of the ranges by position, and by the sampler's probability μ."""
COLUMNS = ["part", "range", "tokens", *QUANTITIES]


@per_run
def mismatch_table(run: Run) -> pd.DataFrame:
    """COLUMNS: a row for all tokens (part `all`), and for each step and range of positions and of probabilities that has tokens.

    `outside` is the share of ratios π/μ outside [0.9, 1.1], k1 to k3 are means [nats]; see `traces.rules`. Ranges are of
    μ, not π, so that tokens in a range are draws from μ given the range. Empty without sampler log-probabilities.
    """
    pieces = []
    for frame in run.iter_tokens(
        columns=["step", "position", "logp", "behavior_logp", ROW], required=["behavior_logp"]
    ):
        rows = frame.assign(**{ROW: row_probability(frame)}).dropna()
        sampler = rows["behavior_logp"].to_numpy(dtype=np.float64)
        values = pd.DataFrame(mismatch(rows["logp"].to_numpy(), rows["behavior_logp"].to_numpy())).assign(tokens=1)
        values = values.mul(1 / rows[ROW].to_numpy(), axis=0) if bool((rows[ROW] < 1).any()) else values
        bins = {"all": np.zeros(len(rows), dtype=int), "step": rows["step"].to_numpy()}
        for part, at in (("position", rows["position"].to_numpy()), ("probability", np.exp(sampler))):
            bins[part] = np.searchsorted(EDGES[part], at, side="right") - 1
        pieces += [values.groupby(index).sum().assign(part=part) for part, index in bins.items() if len(rows)]
    if not pieces:
        return pd.DataFrame(columns=COLUMNS)
    sums = pd.concat(pieces).rename_axis("at").reset_index().groupby(["part", "at"]).sum().reset_index()
    means = sums[list(QUANTITIES)].div(sums["tokens"], axis=0)
    ranges = [_range(part, at) for part, at in zip(sums["part"], sums["at"], strict=True)]
    return means.assign(part=sums["part"], range=ranges, tokens=sums["tokens"])[COLUMNS]


def _range(part: str, at: int) -> str:
    """The name of a range: `16 to 63` of positions, `0.1 to 0.5` of probabilities."""
    if part not in EDGES:
        return "all" if part == "all" else str(at)
    edges = (*EDGES[part], None)
    if edges[at + 1] is None:
        return f"from {edges[at]:g}"
    return f"{edges[at]:g} to {edges[at + 1] - (part == 'position'):g}"  # type: ignore[operator]


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
    if not tables:
        return None
    whole = pd.DataFrame({name: table.iloc[0] for name, table in tables.items()}).T
    largest = whole[estimates].astype(float).abs().max(axis=1)
    differs = whole[(whole["outside"] > 0) | (largest > 1e-3)]
    if differs.empty:
        text = f"no ratio is outside [0.9, 1.1], and no estimate of KL(μ‖π) exceeds {largest.max():.1g} nats"
        return Section(title, f"Their log-probabilities agree: {text}.", part=part)
    cells: dict[str, Any] = {"run": differs.index, "tokens": [f"{count:,}" for count in differs["tokens"]]}
    cells["ratios outside [0.9, 1.1]"] = [percent(share, 2) for share in differs["outside"]]
    cells |= {f"{name} [nats]": differs[name].to_numpy() for name in estimates}
    cells["most at"] = [worst_ranges(tables[name]) for name in differs.index]
    note = "Ratio r = π/μ of the trainer's policy to the sampler's; k1 = −ln r, k2 = (ln r)²/2, k3 = r − 1 − ln r estimate KL(μ‖π)."
    return Section(title, pd.DataFrame(cells), note, part)


def worst_ranges(table: pd.DataFrame) -> str:
    """The range of positions and that of probabilities with the most ratios outside [0.9, 1.1]; `–` if none is."""
    if not table.iloc[0]["outside"] > 0:
        return "–"
    worst = table[table["part"].isin(list(EDGES))].sort_values("outside", ascending=False, kind="stable")
    each = worst.groupby("part", sort=False).head(1)
    return " and ".join(f"{row.part} {row.range} ({row.outside:.1%})" for row in each.itertuples())

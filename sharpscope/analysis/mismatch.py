"""How far the sampler's log-probabilities are from the trainer's: over all tokens, and by step."""

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


@per_run
def mismatch_sums(run: Run) -> pd.DataFrame:
    """Number of `tokens` and the sums over them of `outside`, k1, k2, k3 [nats], see `traces.rules`; index: the step.

    Empty without sampler log-probabilities.
    """
    pieces = [pd.DataFrame(columns=["tokens", *QUANTITIES], dtype=float)]
    for frame in run.iter_tokens(columns=["step", "logp", "behavior_logp", ROW], required=["behavior_logp"]):
        rows = frame.assign(**{ROW: row_probability(frame)}).dropna()
        values = mismatch(rows["logp"].to_numpy(), rows["behavior_logp"].to_numpy())
        table = pd.DataFrame({"tokens": np.ones(len(rows)), **values}).mul(1 / rows[ROW].to_numpy(), axis=0)
        pieces.append(table.groupby(rows["step"].to_numpy()).sum())
    return pd.concat([piece for piece in pieces if len(piece)] or pieces[:1]).groupby(level=0).sum()


def mismatch_by_step(run: Run) -> dict[int, float]:
    """Step → estimate k3 of KL(μ‖π) over its tokens [nats]; of the steps that have the sampler's log-probabilities."""
    sums = mismatch_sums(run)
    return dict(zip(map(int, sums.index), (sums["k3"] / sums["tokens"]).astype(float), strict=True))


def sampler_section(runs: Runs) -> Section | None:
    """Sampler against trainer: a row for each run whose sampler differs, one line if none does; None without such data.

    A sampler differs where some ratio is outside [0.9, 1.1] or an estimate of KL(μ‖π) exceeds 0.001 nats.
    """
    sums = {name: table.sum() for name, run in runs.by_name.items() if len(table := mismatch_sums(run))}
    title, part, estimates = "Sampler against trainer", "Events and cost", ["k1", "k2", "k3"]
    if not sums:
        return None
    means = pd.DataFrame({name: one[list(QUANTITIES)] / one["tokens"] for name, one in sums.items()}).T
    largest = means[estimates].abs().max(axis=1)
    differs = means[(means["outside"] > 0) | (largest > 1e-3)]
    if differs.empty:
        text = f"no ratio is outside [0.9, 1.1], and no estimate of KL(μ‖π) exceeds {largest.max():.1g} nats"
        return Section(title, f"Their log-probabilities agree: {text}.", part=part)
    cells: dict[str, Any] = {"run": differs.index, "tokens": [f"{sums[name]['tokens']:,.0f}" for name in differs.index]}
    cells["ratios outside [0.9, 1.1]"] = [percent(share, 2) for share in differs["outside"]]
    cells |= {f"{name} [nats]": differs[name].to_numpy() for name in estimates}
    note = "Ratio r = π/μ of the trainer's policy to the sampler's; k1 = −ln r, k2 = (ln r)²/2, k3 = r − 1 − ln r estimate KL(μ‖π)."
    return Section(title, pd.DataFrame(cells), note, part)

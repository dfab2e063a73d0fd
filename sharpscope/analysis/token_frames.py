"""What figures need of the token table, read part by part and column by column: memory does not grow with the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from sharpscope.traces import Run

SAMPLE = 200_000
EPSILON = float(np.finfo(np.float32).eps)


DECILE_COLUMNS = ("attribution", "update_attribution", "heldout_influence", "sharp_alignment")
"""Columns whose sums by probability decile are kept of a token table that is not."""


def kept(run: Run, name: str) -> list[Any]:
    """What a reduced run keeps of `name`, computed from the whole token table; empty for a run that has the table."""
    return [row.values for row in run.reductions or () if row.name == name]


def complement(logp: np.ndarray) -> np.ndarray:
    """1 − π = −expm1(ln π), without cancellation."""
    return np.asarray(-np.expm1(np.asarray(logp, dtype=np.float64)))


def recorded(run: Run, columns: Sequence[str]) -> Iterator[pd.DataFrame]:
    """Parts of the token table with `columns`, without rows where one of them is null or not a number."""
    for frame in run.iter_tokens(columns=columns, required=columns):
        kept = frame.dropna()
        if len(kept):
            yield kept


def sample_tokens(run: Run, columns: Sequence[str], limit: int = SAMPLE) -> pd.DataFrame:
    """A uniform sample of at most `limit` tokens that have all `columns`; every token where there are no more.

    Each token draws a number and the smallest stay, so one pass over the parts is enough. Seeded: the same each time.
    """
    rng = np.random.default_rng(0)
    kept = pd.DataFrame({name: pd.Series(dtype=float) for name in columns}).assign(draw=0.0)
    for frame in recorded(run, columns):
        fresh = frame.assign(draw=rng.random(len(frame)))
        kept = fresh if kept.empty else pd.concat([kept, fresh], ignore_index=True)
        if len(kept) > limit:
            kept = kept.nsmallest(limit, "draw").sort_index()
    return kept.drop(columns="draw").reset_index(drop=True)


def bound_violations(run: Run, vocabulary: int | None, temperature: float = 1.0) -> dict[str, Any]:
    """Claim C1 on every token: (1 − π)·√(V/(V−1)) ≤ ‖p − e_y‖ ≤ √2·(1 − π), counted where broken beyond rounding.

    Returns tokens, below, above (counts), and the extremes of ‖p − e_y‖/(1 − π) over tokens with 1 − π > 1e-4. Without
    the vocabulary's size V the lower bound is 1 − π, which is weaker.
    """
    for values in kept(run, "bound violations"):
        return dict(values)
    factor = lower_factor(vocabulary)
    tokens = below = above = 0
    low, high = np.inf, -np.inf
    for frame in recorded(run, ["logp", "logit", "logit_grad_norm"]):
        rest = complement(frame["logp"].to_numpy())
        norm = frame["logit_grad_norm"].to_numpy(dtype=np.float64)
        slack = rounding(frame, temperature)
        tokens += len(frame)
        below += int((norm * (1 + 1e-5) < factor * (rest - slack)).sum())
        above += int((norm * (1 - 1e-5) > np.sqrt(2) * (rest + slack)).sum())
        ratio = (norm / np.maximum(rest, 1e-300))[rest > 1e-4]
        if ratio.size:
            low, high = min(low, float(ratio.min())), max(high, float(ratio.max()))
    return {"tokens": tokens, "below": below, "above": above, "ratio_min": low, "ratio_max": high}


def lower_factor(vocabulary: int | None) -> float:
    """√(V/(V−1)), or its limit 1 where V is not known."""
    return float(np.sqrt(vocabulary / (vocabulary - 1))) if vocabulary and vocabulary > 1 else 1.0


def rounding(tokens: Any, temperature: float) -> np.ndarray:
    """Absolute error of 1 − π from float32, of tokens with columns logit and logp (a frame or a mapping).

    ln π is a difference of numbers of the size of the logits over T.
    """
    logit = np.abs(np.asarray(tokens["logit"], dtype=np.float64)) / temperature
    return np.asarray(4 * EPSILON * (1 + logit + np.abs(np.asarray(tokens["logp"], dtype=np.float64))))


def score_column(run: Run) -> str | None:
    """Which column to take a run's score norms from: `score_norm` if most tokens have it, else `score_norm_local`.

    Spending the exact tier on the largest tokens alone is usual; those are no fair sample. None: neither was recorded.
    """
    for name in kept(run, "score column"):
        # the few exact norms of a reduced run are in its claims' samples, not among its sampled tokens
        return None if name is None else str(name)
    full = local = 0
    for frame in recorded(run, ["score_norm"]):
        full += len(frame)
    for frame in recorded(run, ["score_norm_local"]):
        local += len(frame)
    if full and full >= 0.9 * local:
        return "score_norm"
    return "score_norm_local" if local else None


def quantile_bins(x: np.ndarray, y: np.ndarray, bins: int = 24, log: bool = True) -> pd.DataFrame:
    """y's 10, 50 and 90 % quantiles in `bins` equal bins of x (of ln x if `log`): x (mean), q10, q50, q90, n.

    Bins of fewer than 5 points are left out.
    """
    scale = np.log(x) if log else x
    edges = np.linspace(scale.min(), scale.max(), bins + 1) if len(x) else np.zeros(bins + 1)
    index = np.clip(np.digitize(scale, edges[1:-1]), 0, bins - 1)
    rows = []
    for number in range(bins):
        inside = index == number
        if inside.sum() >= 5:
            center = float(scale[inside].mean())
            rows.append(
                (float(np.exp(center)) if log else center, *np.quantile(y[inside], [0.1, 0.5, 0.9]), int(inside.sum()))
            )
    return pd.DataFrame(rows, columns=["x", "q10", "q50", "q90", "n"]).astype(float)


def lorenz(mass: np.ndarray, points: int = 201) -> pd.DataFrame:
    """Share of the whole held by the largest tokens: `tokens` (share, largest first) and `mass` (share)."""
    ordered = np.sort(np.abs(mass))[::-1]
    total = ordered.sum()
    held = np.concatenate([[0.0], np.cumsum(ordered) / total]) if total > 0 else np.linspace(0, 1, ordered.size + 1)
    # logarithmic places show the few that hold most, linear ones the rest
    places = np.unique(np.concatenate([[0, 1], np.geomspace(1 / max(ordered.size, 1), 1, points)]))
    return pd.DataFrame({"tokens": places, "mass": np.interp(places, np.linspace(0, 1, ordered.size + 1), held)})


def decile_sums(run: Run, column: str) -> pd.DataFrame:
    """Sum of `column` over the tokens of each probability decile: step, update, decile (1 = least likely), sign, value.

    Deciles are by rank of ln π within the step. sign: of the token's advantage (−1, 0, 1).
    """
    for values in kept(run, f"deciles {column}"):
        return pd.DataFrame(values)
    pieces = []
    for frame in recorded(run, ["step", "update", "logp", "advantage", column]):
        rank = frame.groupby("step")["logp"].rank(method="first")
        count = frame.groupby("step")["logp"].transform("size")
        decile = np.minimum((10 * (rank - 1) / count).astype(int) + 1, 10)
        keyed = frame.assign(
            decile=decile, sign=np.sign(frame["advantage"]).astype(int), value=frame[column].astype(float)
        )
        pieces.append(keyed.groupby(["step", "update", "decile", "sign"], as_index=False)["value"].sum())
    columns = ["step", "update", "decile", "sign", "value"]
    whole = pd.concat(pieces, ignore_index=True) if pieces else pd.DataFrame(columns=columns)
    return pd.DataFrame(whole.groupby(columns[:-1], as_index=False)["value"].sum())

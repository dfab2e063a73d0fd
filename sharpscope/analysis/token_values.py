"""Values of tokens that follow from recorded columns, and what kinds of tokens change the entropy.

`tokens --by`, the token view and notebooks all compute them with `with_values`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sharpscope.analysis.sections import Section
from sharpscope.analysis.text import percent
from sharpscope.analysis.tokens import INCLUSION, inverse_inclusion
from sharpscope.traces import Run


@dataclass(frozen=True)
class TokenValue:
    """A value of a token: the columns of `tokens` that it needs, its unit, what it means, and how it is computed."""

    needs: tuple[str, ...]
    unit: str
    definition: str
    of: Callable[[pd.DataFrame], pd.Series]


def _k3(tokens: pd.DataFrame) -> pd.Series:
    difference = tokens["ref_logp"] - tokens["logp"]
    return pd.Series(np.expm1(difference) - difference, index=tokens.index)


VALUES: dict[str, TokenValue] = {
    "probability": TokenValue(("logp",), "1", "probability π of the token", lambda t: np.exp(t["logp"])),
    "mismatch": TokenValue(
        ("logp", "behavior_logp"),
        "nats",
        "ln π − ln μ: the trainer's log-probability minus the sampler's",
        lambda t: t["logp"] - t["behavior_logp"],
    ),
    "kl": TokenValue(
        ("logp", "ref_logp"), "nats", "k3 estimate of KL(π ‖ reference): r − 1 − ln r with r = π_ref / π", _k3
    ),
    "entropy_change": TokenValue(
        ("loss_coef", "polarity"),
        "nats",
        "c·polarity: first-order change of this token's entropy per unit of learning rate on its logits",
        lambda t: t["loss_coef"] * t["polarity"],
    ),
    "policy_coef": TokenValue(
        ("loss_coef", "kl_coef"),
        "1",
        "the part of loss_coef that the surrogate has, without the KL term",
        lambda t: t["loss_coef"] - t["kl_coef"],
    ),
}
"""Values that are computed and not stored."""


def needed_columns(names: Iterable[str]) -> list[str]:
    """Columns of the `tokens` table from which `names`, values or columns, follow."""
    return list(dict.fromkeys(c for name in names for c in (VALUES[name].needs if name in VALUES else (name,))))


def with_values(tokens: pd.DataFrame, names: Iterable[str] | None = None) -> pd.DataFrame:
    """The tokens with the values `names` of VALUES as columns, float64; None: all whose columns are there.

    A value is NaN where one of its columns was not recorded.

    Args:
        tokens: rows of the `tokens` table.
        names: keys of VALUES; other names are left alone.
    """
    chosen = [n for n, v in VALUES.items() if set(v.needs) <= set(tokens)] if names is None else names
    made = {}
    for name in chosen:
        if name in VALUES:
            numbers = tokens[list(VALUES[name].needs)].astype(np.float64)
            made[name] = VALUES[name].of(numbers)
    return tokens.assign(**made)


BINS = {
    "peak, A > 0": "π ≥ Σπ², raised",
    "valley, A > 0": "π < Σπ², raised",
    "peak, A < 0": "π ≥ Σπ², lowered",
    "valley, A < 0": "π < Σπ², lowered",
    "A = 0": "no advantage",
}
"""Kinds of tokens by probability and sign of the advantage (arXiv 2606.16154), and what they are.

Raising one logit of a token with π ≥ Σπ² raises Σπ², the collision probability, so a peak token that is raised lowers the entropy.
"""


def token_bins(tokens: pd.DataFrame) -> np.ndarray:
    """(n,) index into BINS; −1 where the probability, the collision or the advantage is not known."""
    peak = np.exp(tokens["logp"].to_numpy(dtype=float)) >= tokens["collision"].to_numpy(dtype=float)
    sign = np.sign(tokens["advantage"].to_numpy(dtype=float))
    index = np.select([sign == 0, sign > 0, sign < 0], [4, np.where(peak, 0, 1), np.where(peak, 2, 3)], -1)
    return np.asarray(np.where(tokens[["logp", "collision"]].isna().any(axis=1), -1, index))


def entropy_bins(run: Run) -> pd.DataFrame:
    """Shares of each kind of token, over all recorded steps.

    Columns `tokens` (share of the loss tokens), `gradient` (signed share of ‖∇L‖², mean over the steps whose shares were measured,
    scaled to sum to 1; NaN without any) and `entropy` (Σ c·polarity over Σ |c·polarity|: signed, positive raises the entropy).
    Index: BINS. Empty where advantages or statistics were not recorded.
    """
    columns = ["step", "update", "logp", "collision", "advantage", "loss_coef", "polarity", "attribution", INCLUSION]
    count, gradient, change = np.zeros(len(BINS)), np.zeros(len(BINS)), np.zeros(len(BINS))
    size = 0.0
    for part in run.iter_tokens(columns=columns, required=["collision", "advantage"]):
        index = token_bins(part)
        frame, index = part[index >= 0], index[index >= 0]
        count += np.bincount(index, minlength=len(BINS))
        push = with_values(frame, ["entropy_change"])["entropy_change"].fillna(0.0).to_numpy()
        change += np.bincount(index, push, len(BINS))
        size += float(np.abs(push).sum())
        updates = frame.groupby("step")["update"].transform("nunique").clip(lower=1)
        share = (frame["attribution"].astype(float) / updates).fillna(0.0).to_numpy() * inverse_inclusion(frame)
        gradient += np.bincount(index, share, len(BINS))
    if not count.any():
        return pd.DataFrame(columns=["tokens", "gradient", "entropy"])
    total = gradient.sum()
    return pd.DataFrame(
        {
            "tokens": count / count.sum(),
            "gradient": gradient / total if total > 0 else np.nan,
            "entropy": change / size if size > 0 else np.nan,
        },
        index=pd.Index(list(BINS), name="kind"),
    )


def entropy_section(run: Run) -> Section | None:
    """The kinds of tokens with their shares, for `show`; None where they are not known or no token has an advantage."""
    bins = entropy_bins(run)
    if bins.empty or not (bins["tokens"].iloc[:4] > 0).any():
        return None
    shown = bins[bins["tokens"] > 0]
    cells = {
        "kind": [f"{kind}: {BINS[kind]}" if kind != "A = 0" else "A = 0" for kind in shown.index],
        "tokens": [percent(value) for value in shown["tokens"]],
        "of ‖g‖²": [percent(value) for value in shown["gradient"]],
        "of the entropy change": [percent(value, 1, sign=True) for value in shown["entropy"]],
    }
    net = float(bins["entropy"].sum())
    note = (
        f"Entropy change: Σ c·polarity of the kind over Σ |c·polarity| of all, to first order and for each token's own logits; "
        f"positive raises the entropy, the net is {percent(net, 1, sign=True)}."
    )
    return Section("Which tokens change the entropy", pd.DataFrame(cells), note)

"""Values of tokens that follow from recorded columns, and sections made of whole token tables.

These are: what kinds of tokens change the entropy, sampler against trainer, and what a token selection left out of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pandas as pd

from sharpscope.analysis.sections import Section
from sharpscope.analysis.study import per_run
from sharpscope.analysis.text import number, percent
from sharpscope.analysis.tokens import (
    INCLUSION,
    ROW,
    inverse_inclusion,
    passed_steps,
    passed_text,
    row_probability,
    sums_by,
)
from sharpscope.rules.judging import QUANTITIES, mismatch
from sharpscope.traces import Run, Runs


def _k3(tokens: pd.DataFrame) -> pd.Series:
    """The k3 estimate of KL(π ‖ reference): r − 1 − ln r with r = π_ref / π."""
    difference = tokens["ref_logp"] - tokens["logp"]
    return pd.Series(np.expm1(difference) - difference, index=tokens.index)


VALUES: dict[str, tuple[tuple[str, ...], Callable[[pd.DataFrame], pd.Series]]] = {
    "probability": (("logp",), lambda t: np.exp(t["logp"])),
    "mismatch": (("logp", "behavior_logp"), lambda t: t["logp"] - t["behavior_logp"]),
    "kl": (("logp", "ref_logp"), _k3),
    "entropy_change": (("loss_coef", "polarity"), lambda t: t["loss_coef"] * t["polarity"]),
    "policy_coef": (("loss_coef", "kl_coef"), lambda t: t["loss_coef"] - t["kl_coef"]),
}
"""Values that are computed and not stored: the columns of `tokens` that each needs, and how it is computed.

`probability`: π; `mismatch`: ln π − ln μ, trainer minus sampler [nats]; `kl`: k3 estimate of KL(π ‖ reference) [nats];
`entropy_change`: c·polarity, first-order change of the token's entropy per unit of learning rate on its logits [nats];
`policy_coef`: the part of loss_coef that the surrogate has, without the KL term.
"""


def needed_columns(names: Iterable[str]) -> list[str]:
    """Columns of the `tokens` table from which `names`, values or columns, follow."""
    return list(
        dict.fromkeys(c for name in names for c in (VALUES[name][0] if name in VALUES else (name,)))
    )


def with_values(tokens: pd.DataFrame) -> pd.DataFrame:
    """The tokens with each value of VALUES whose columns they have, float64; NaN where one of these was not recorded."""
    there = {name: of for name, of in VALUES.items() if set(of[0]) <= set(tokens)}
    return tokens.assign(
        **{n: value(tokens[list(needs)].astype(np.float64)) for n, (needs, value) in there.items()}
    )


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
    logp, collision, advantage = (
        tokens[name].to_numpy(dtype=float) for name in ("logp", "collision", "advantage")
    )
    valley = (np.exp(logp) < collision).astype(int)
    index = np.where(advantage == 0, 4, np.where(advantage > 0, valley, 2 + valley))
    unknown = np.isnan(logp) | np.isnan(collision) | np.isnan(advantage)
    return np.asarray(np.where(unknown, -1, index))


def entropy_bins(run: Run) -> pd.DataFrame:
    """Shares of each kind of token, over all recorded steps, of a large run over those of `passed_steps`.

    Columns `tokens` (share of the loss tokens), `gradient` (signed share of ‖∇L‖², mean over the steps whose shares were measured,
    scaled to sum to 1; NaN without any) and `entropy` (Σ c·polarity over Σ |c·polarity|: signed, positive raises the entropy).
    Index: BINS. Empty where advantages or statistics were not recorded.
    """
    statistics = ["logp", "collision", "advantage", "loss_coef", "polarity", "attribution"]
    columns = ["step", "update", *statistics, INCLUSION, ROW]
    pieces = [pd.DataFrame(columns=["tokens", "gradient", "entropy", "size"], dtype=float)]
    steps, required = passed_steps(run), ["collision", "advantage"]
    for part in run.iter_tokens(steps, columns, required):
        index = token_bins(part)
        frame = part[index >= 0]
        index = index[index >= 0]
        push = with_values(frame[["loss_coef", "polarity"]])["entropy_change"].fillna(0.0)
        count = 1 / row_probability(frame)
        values = {"tokens": count, "gradient": _update_shares(frame)}
        values |= {"entropy": count * push.to_numpy(), "size": count * push.abs().to_numpy()}
        # by step first: the sums are then the same however many steps a piece has
        pieces.append(sums_by(frame["step"].to_numpy(np.int64) * len(BINS) + index, values))
    whole = pd.concat(pieces[1:] or pieces)
    sums = whole.groupby(whole.index.to_numpy(np.int64) % len(BINS)).sum()
    sums = sums.reindex(range(len(BINS)), fill_value=0.0).set_axis(pd.Index(BINS, name="kind"))
    if not sums["tokens"].any():
        return pd.DataFrame(columns=["tokens", "gradient", "entropy"])
    totals = sums[["tokens", "gradient", "size"]].sum().to_numpy()
    return sums[["tokens", "gradient", "entropy"]].div(np.where(totals > 0, totals, np.nan))


def _update_shares(tokens: pd.DataFrame) -> np.ndarray:
    """(n,) share of ‖∇L‖² over the chance to be measured and the number of updates of the step; 0 where none is recorded."""
    share = tokens["attribution"].astype(float)
    if share.isna().all():
        return np.zeros(len(tokens))
    updates = tokens.groupby("step")["update"].transform("nunique").clip(lower=1)
    each = (share / updates).fillna(0.0).to_numpy(dtype=float)
    return np.asarray(each * inverse_inclusion(tokens))


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
    note = (
        f"Entropy change: Σ c·polarity of the kind over Σ |c·polarity| of all, to first order and for each token's own logits; "
        f"positive raises the entropy, the net is {percent(bins['entropy'].sum(), 1, sign=True)}.{passed_text(run)}"
    )
    return Section("Which tokens change the entropy", pd.DataFrame(cells), note)


@per_run
def mismatch_sums(run: Run) -> pd.DataFrame:
    """Number of `tokens` and the sums over them of `outside`, k1, k2, k3 [nats], see `rules.judging`; index: the step.

    Of a large run the steps are those of `passed_steps`. Empty without sampler log-probabilities.
    """
    pieces = [pd.DataFrame(columns=["tokens", *QUANTITIES], dtype=float)]
    columns, required = ["step", "logp", "behavior_logp", ROW], ["behavior_logp"]
    for frame in run.iter_tokens(passed_steps(run), columns, required):
        rows = frame.dropna(subset=["logp"])
        values = mismatch(rows["logp"].to_numpy(), rows["behavior_logp"].to_numpy())
        count = 1 / row_probability(rows)
        sums = {"tokens": count} | {name: count * value for name, value in values.items()}
        pieces.append(sums_by(rows["step"].to_numpy(), sums))
    return pd.concat([piece for piece in pieces if len(piece)] or pieces[:1]).groupby(level=0).sum()


def mismatch_by_step(run: Run) -> dict[int, float]:
    """Step → estimate k3 of KL(μ‖π) over its tokens [nats]; of the steps that have the sampler's log-probabilities."""
    sums = mismatch_sums(run)
    return dict(zip(map(int, sums.index), (sums["k3"] / sums["tokens"]).astype(float), strict=True))


def sampler_section(runs: Runs) -> Section | None:
    """Sampler against trainer: a row for each run whose sampler differs, one line if none does; None without such data.

    A sampler differs where some ratio is outside [0.9, 1.1] or an estimate of KL(μ‖π) exceeds 0.001 nats.
    """
    sums = pd.DataFrame(
        {
            name: table.sum()
            for name, run in runs.by_name.items()
            if len(table := mismatch_sums(run))
        }
    ).T
    title = "Sampler against trainer"
    part = "Events and cost"
    estimates = ["k1", "k2", "k3"]
    if sums.empty:
        return None
    means = sums.assign(**{name: sums[name] / sums["tokens"] for name in QUANTITIES})
    largest = means[estimates].abs().max(axis=1)
    differs = means[(means["outside"] > 0) | (largest > 1e-3)]
    if differs.empty:
        text = f"no ratio is outside [0.9, 1.1], and no estimate of KL(μ‖π) exceeds {largest.max():.1g} nats"
        return Section(title, f"Their log-probabilities agree: {text}.", part=part)
    cells: dict[str, object] = {
        "run": differs.index,
        "tokens": [f"{count:,.0f}" for count in differs["tokens"]],
    }
    cells["ratios outside [0.9, 1.1]"] = [percent(share, 2) for share in differs["outside"]]
    cells |= {f"{name} [nats]": differs[name].to_numpy() for name in estimates}
    note = "Ratio r = π/μ of the trainer's policy to the sampler's; k1 = −ln r, k2 = (ln r)²/2, k3 = r − 1 − ln r estimate KL(μ‖π)."
    return Section(title, pd.DataFrame(cells), note, part)


def left_out(run: Run) -> pd.DataFrame:
    """Tokens with an advantage that have no policy gradient although no clip stopped them, against the others, by step.

    Columns: step, out (share of the tokens with an advantage), and for left-out and other tokens (`…_out`, `…_kept`) the means
    of probability and entropy [nats] and the share with A < 0. A KL term does not count as a gradient. Empty without tokens.
    """
    columns = ["step", "update", "logp", "entropy", "advantage", "loss_coef", "kl_coef", "clipped"]
    pieces = []
    for part in run.iter_tokens(passed_steps(run), columns, ["advantage", "loss_coef"]):
        used = part[part["update"].notna() & (part["advantage"] != 0)].astype(
            {"logp": float, "entropy": float}
        )
        values = {
            "probability": np.exp(used["logp"]),
            "entropy": used["entropy"],
            "negative": used["advantage"] < 0,
        }
        policy = used["loss_coef"].astype(float) - used["kl_coef"].astype(float).fillna(0.0)
        out = (policy == 0) & (used["clipped"] == 0)
        means = {"out": out.groupby(used["step"]).mean()}
        for which, chosen in (("out", out), ("kept", ~out)):
            of_step = (
                pd.DataFrame(values)[chosen].astype(float).groupby(used["step"][chosen]).mean()
            )
            means |= {f"{name}_{which}": column for name, column in of_step.items()}
        pieces.append(pd.DataFrame(means).rename_axis("step").reset_index())
    return (
        pd.concat(pieces, ignore_index=True)
        if pieces
        else pd.DataFrame({"step": pd.Series(dtype=int)})
    )


def selection_section(run: Run) -> Section | None:
    """What the selection left out in the first, the strictest and the last recorded step, for `show`; None without a selection."""
    selection = (run.config.get("method") or {}).get("tokens")
    if not selection or (found := left_out(run)).empty:
        return None
    named = {
        "first": found.index[0],
        "most left out": found["out"].idxmax(),
        "last": found.index[-1],
    }
    rows = []
    for name, row in zip(named, found.loc[list(named.values())].to_dict("records"), strict=True):
        cells = {"step": f"{row['step']} ({name})", "left out": percent(row["out"], 1)}
        for title, key in (
            ("mean π", "probability"),
            ("mean H [nats]", "entropy"),
            ("share with A < 0", "negative"),
        ):
            cells[title] = f"{number(row[f'{key}_out'])} / {number(row[f'{key}_kept'])}"
        rows.append(cells)
    note = (
        f"Tokens with an advantage that the selection {selection['kind']} leaves out of the loss / those that it keeps; "
        f"over all steps {percent(found['out'].mean(), 1)}.{passed_text(run)}"
    )
    return Section("Tokens left out", pd.DataFrame(rows), note)

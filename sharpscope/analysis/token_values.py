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
    needed: list[str] = []
    for name in names:
        needed += VALUES[name][0] if name in VALUES else [name]
    return list(dict.fromkeys(needed))


def with_values(tokens: pd.DataFrame) -> pd.DataFrame:
    """The tokens with each value of VALUES whose columns they have, float64; NaN where one of these was not recorded."""
    made = {}
    for name, (needs, value) in VALUES.items():
        if set(needs) <= set(tokens):
            made[name] = value(tokens[list(needs)].astype(float))
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
    values = tokens[["logp", "collision", "advantage"]].astype(float)
    valley = np.exp(values["logp"]) < values["collision"]
    index = valley.astype(int)
    index[values["advantage"] < 0] += 2
    index[values["advantage"] == 0] = 4
    index[values.isna().any(axis=1)] = -1
    return index.to_numpy()


def entropy_bins(run: Run) -> pd.DataFrame:
    """Shares of each kind of token, over all recorded steps, of a large run over those of `passed_steps`.

    Columns `tokens` (share of the loss tokens), `gradient` (signed share of ‖∇L‖², mean over the steps whose shares were measured,
    scaled to sum to 1; NaN without any) and `entropy` (Σ c·polarity over Σ |c·polarity|: signed, positive raises the entropy).
    Index: BINS. Empty where advantages or statistics were not recorded.
    """
    statistics = ["logp", "collision", "advantage", "loss_coef", "polarity", "attribution"]
    columns = ["step", "update", *statistics, INCLUSION, ROW]
    pieces = [pd.DataFrame(columns=["tokens", "gradient", "entropy", "size"], dtype=float)]
    for part in run.iter_tokens(passed_steps(run), columns, ["collision", "advantage"]):
        index = token_bins(part)
        frame = part[index >= 0]
        index = index[index >= 0]
        changes = with_values(frame[["loss_coef", "polarity"]])["entropy_change"]
        push = changes.fillna(0.0).to_numpy()
        count = 1 / row_probability(frame)
        values = {
            "tokens": count,
            "gradient": _update_shares(frame),
            "entropy": count * push,
            "size": count * np.abs(push),
        }
        # by step first: the sums are then the same however many steps a piece has
        key = frame["step"].to_numpy(np.int64) * len(BINS) + index
        pieces.append(sums_by(key, values))
    whole = pd.concat(pieces[1:] or pieces)
    kind = whole.index.to_numpy(np.int64) % len(BINS)
    sums = whole.groupby(kind).sum()
    sums = sums.reindex(range(len(BINS)), fill_value=0.0).set_axis(pd.Index(BINS, name="kind"))
    if not sums["tokens"].any():
        return pd.DataFrame(columns=["tokens", "gradient", "entropy"])
    totals = sums[["tokens", "gradient", "size"]].sum()
    parts = sums[["tokens", "gradient", "entropy"]]
    return parts.div(totals.where(totals > 0).to_numpy())


def _update_shares(tokens: pd.DataFrame) -> np.ndarray:
    """(n,) share of ‖∇L‖² over the chance to be measured and the number of updates of the step; 0 where none is recorded."""
    share = tokens["attribution"].astype(float)
    if share.isna().all():
        return np.zeros(len(tokens))
    updates = tokens.groupby("step")["update"].transform("nunique").clip(lower=1)
    each = (share / updates).fillna(0.0).to_numpy(float)
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
    filled = [piece for piece in pieces if len(piece)]
    whole = pd.concat(filled or pieces[:1])
    return whole.groupby(level=0).sum()


def mismatch_by_step(run: Run) -> dict[int, float]:
    """Step → estimate k3 of KL(μ‖π) over its tokens [nats]; of the steps that have the sampler's log-probabilities."""
    sums = mismatch_sums(run)
    means = sums["k3"] / sums["tokens"]
    return {int(str(step)): float(mean) for step, mean in means.items()}


def sampler_section(runs: Runs) -> Section | None:
    """Sampler against trainer: a row for each run whose sampler differs, one line if none does; None without such data.

    A sampler differs where some ratio is outside [0.9, 1.1] or an estimate of KL(μ‖π) exceeds 0.001 nats.
    """
    title = "Sampler against trainer"
    part = "Events and cost"
    estimates = ["k1", "k2", "k3"]
    tables = {name: mismatch_sums(run) for name, run in runs.by_name.items()}
    sums = pd.DataFrame({name: table.sum() for name, table in tables.items() if len(table)}).T
    if sums.empty:
        return None
    means = sums[[*QUANTITIES]].div(sums["tokens"], axis=0)
    largest = means[estimates].abs().max(axis=1)
    chosen = (means["outside"] > 0) | (largest > 1e-3)
    if not chosen.any():
        text = f"no ratio is outside [0.9, 1.1], and no estimate of KL(μ‖π) exceeds {largest.max():.1g} nats"
        return Section(title, f"Their log-probabilities agree: {text}.", part=part)
    differs = means[chosen]
    cells: dict[str, object] = {
        "run": differs.index,
        "tokens": [f"{count:,.0f}" for count in sums.loc[chosen, "tokens"]],
        "ratios outside [0.9, 1.1]": [percent(share, 2) for share in differs["outside"]],
    }
    for name in estimates:
        cells[f"{name} [nats]"] = differs[name].to_numpy()
    note = "Ratio r = π/μ of the trainer's policy to the sampler's; k1 = −ln r, k2 = (ln r)²/2, k3 = r − 1 − ln r estimate KL(μ‖π)."
    return Section(title, pd.DataFrame(cells), note, part)


def left_out(run: Run) -> pd.DataFrame:
    """Tokens with an advantage that have no policy gradient although no clip stopped them, against the others, by step.

    Columns: step, out (share of the tokens with an advantage), and for left-out and other tokens (`…_out`, `…_kept`) the means
    of probability and entropy [nats] and the share with A < 0. A KL term does not count as a gradient. Empty without tokens.
    """
    numbers = ["logp", "entropy", "advantage", "loss_coef", "kl_coef"]
    pieces = [pd.DataFrame({"step": pd.Series(dtype=int)})]
    columns = ["step", "update", "clipped", *numbers]
    for part in run.iter_tokens(passed_steps(run), columns, ["advantage", "loss_coef"]):
        used = part[part["update"].notna() & (part["advantage"] != 0)]
        used = used.astype(dict.fromkeys(numbers, float))
        policy = used["loss_coef"] - used["kl_coef"].fillna(0.0)
        out = (policy == 0) & (used["clipped"] == 0)
        values = pd.DataFrame(
            {
                "probability": np.exp(used["logp"]),
                "entropy": used["entropy"],
                "negative": (used["advantage"] < 0).astype(float),
            }
        )
        step = used["step"]
        means = [
            out.groupby(step).mean().to_frame("out"),
            values[out].groupby(step[out]).mean().add_suffix("_out"),
            values[~out].groupby(step[~out]).mean().add_suffix("_kept"),
        ]
        pieces.append(pd.concat(means, axis=1).rename_axis("step").reset_index())
    return pd.concat(pieces[1:] or pieces, ignore_index=True)


def selection_section(run: Run) -> Section | None:
    """What the selection left out in the first, the strictest and the last recorded step, for `show`; None without a selection."""
    selection = (run.config.get("method") or {}).get("tokens")
    if not selection:
        return None
    found = left_out(run)
    if found.empty:
        return None
    chosen = [found.index[0], found["out"].idxmax(), found.index[-1]]
    names = ("first", "most left out", "last")
    rows = []
    for name, row in zip(names, found.loc[chosen].to_dict("records"), strict=True):
        cells = {"step": f"{row['step']} ({name})", "left out": percent(row["out"], 1)}
        for title, key in (
            ("mean π", "probability"),
            ("mean H [nats]", "entropy"),
            ("share with A < 0", "negative"),
        ):
            out, kept = row[f"{key}_out"], row[f"{key}_kept"]
            cells[title] = f"{number(out)} / {number(kept)}"
        rows.append(cells)
    note = (
        f"Tokens with an advantage that the selection {selection['kind']} leaves out of the loss / those that it keeps; "
        f"over all steps {percent(found['out'].mean(), 1)}.{passed_text(run)}"
    )
    return Section("Tokens left out", pd.DataFrame(rows), note)

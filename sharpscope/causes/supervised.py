"""Identities of supervised rows and of pairs."""

from __future__ import annotations

import pandas as pd

from sharpscope.causes.identity import Measured, first_step, identity, measured
from sharpscope.causes.recorded import Recorded

LAST = 3
"""Tokens at a row's end among which its end token is looked for."""


def _rows(recorded: Recorded) -> pd.DataFrame:
    """One line for each supervised row: step, rollout, mean nll, its tokens and whether a special token is at its end."""
    tokens = recorded.tokens
    if not recorded.supervised or tokens.empty:
        return pd.DataFrame()
    special = tokens["token_id"].isin(set(recorded.words.special))
    last = tokens.groupby(["step", "rollout"])["position"].transform("max")
    at_end = tokens["position"] > last - LAST
    by_row = tokens.assign(ended=special & at_end).groupby(["step", "rollout"])
    return pd.DataFrame(
        {
            "nll": -by_row["logp"].mean(),
            "logp": by_row["logp"].sum(),
            "tokens": by_row.size(),
            "ended": by_row["ended"].any(),
        }
    ).reset_index()


@identity
def row_loss(recorded: Recorded) -> Measured | None:
    """Largest robust z of a row's mean nll among the rows beside it, (nll − median) / (1.48·MAD), in the second half.

    Times √(tokens / median tokens) for rows that are shorter than the median, whose means vary more.
    """
    rows = _rows(recorded)
    if recorded.info.get("method") != "sft" or len(rows) < 64:
        return None
    rows = rows[rows["step"] > rows["step"].max() / 2]
    near = rows["step"] // 4  # rows of four steps are compared: one step has few
    apart = rows["nll"] - rows.groupby(near)["nll"].transform("median")
    spread = apart.abs().groupby(near).transform("median")
    short = (rows["tokens"] / rows["tokens"].median()).clip(upper=1).pow(0.5)  # means of few
    z = short * apart / (1.48 * spread).clip(lower=1e-3)
    odd = rows.assign(z=z)[z > 8].sort_values("z", ascending=False)
    return measured(
        z.max(),
        rows=odd[["step", "rollout"]].head(5).to_numpy(int).tolist(),
        count=len(odd),
        of=len(rows),
        nll=odd["nll"].median() if len(odd) else 0.0,
        usual=rows["nll"].median(),
        step=first_step(odd),
    )


@identity
def row_ends(recorded: Recorded) -> Measured | None:
    """Share of supervised rows with no end token among their last tokens in the loss."""
    rows = _rows(recorded)
    if len(rows) < 16 or recorded.words.end is None:
        return None
    ids = recorded.rollouts[["step", "rollout", "token_ids"]]
    total = ids.assign(total=ids["token_ids"].str.count(",") + 1)  # tokens of prompt and completion
    rows = rows.merge(total, on=["step", "rollout"], how="left")
    open_rows = rows[~rows["ended"]]
    longest = rows["total"].max()
    at_limit = open_rows["total"] == longest
    return measured(
        (~rows["ended"]).mean(),
        longest=0 if pd.isna(longest) else int(longest),
        at_limit=at_limit.mean() if len(open_rows) else 0.0,
        lengths=open_rows["total"].nunique(),
        rows=open_rows[["step", "rollout"]].head(5).to_numpy(int).tolist(),
        step=first_step(open_rows),
    )


@identity
def pair_margins(recorded: Recorded) -> Measured | None:
    """−q10/q90 of ln π(chosen) − ln π(rejected) in the first third, where the policy prefers most chosen ones.

    Pairs that are swapped mirror the others: their margins are as negative as the others' are positive. Only pairs whose
    lengths differ by at most 3 tokens count, since a sum of log-probabilities falls with the length.
    """
    rows = _rows(recorded)
    if recorded.info.get("method") != "dpo" or len(rows) < 64:
        return None
    early = rows[rows["step"] <= max(4, rows["step"].max() / 3)]
    # a pair's chosen row is even, the rejected one behind it odd
    wide = early.assign(pair=early["rollout"] // 2, side=early["rollout"] % 2)
    table = wide.pivot_table(index=["step", "pair"], columns="side", values=["logp", "tokens"])
    apart = table.xs(0, axis=1, level=1) - table.xs(1, axis=1, level=1)
    alike = apart["tokens"].abs() <= 3
    margin = apart["logp"][alike].dropna()
    if len(margin) < 32:
        return None
    low, high = margin.quantile(0.1), margin.quantile(0.9)
    preferred = (margin > 0).mean()
    judged = preferred >= 0.65 and high > 0
    return measured(
        -low / high if judged else 0.0,
        preferred=preferred,
        low=low,
        high=high,
        share=(margin < low / 2).mean(),
        rows=[[int(step), 2 * int(pair)] for step, pair in margin.nsmallest(5).index],
        step=first_step(early),
    )


def _told(recorded: Recorded, *rules: str) -> Measured:
    """The value of what a recorder reported by some rules, 0 where it did not, and its text."""
    events = recorded.events[recorded.events["rule"].isin(rules)]
    return measured(
        0.0 if events.empty else events["value"].max(),
        message=" ".join(events["message"]),
        step=first_step(events),
    )


@identity
def labels(recorded: Recorded) -> Measured | None:
    """1 where a recorder found labels that are not the tokens of their own positions."""
    if not recorded.supervised:
        return None
    text = str(_told(recorded, "recorder").facts["message"])
    return measured("labels" in text, message=text, moved="moved by" in text)


@identity
def prompt_outside_loss(recorded: Recorded) -> Measured | None:
    """1 where a recorder stopped since the first token of a left-padded row is in the loss."""
    if recorded.supervised:
        return None
    text = str(_told(recorded, "recorder").facts["message"])
    return measured("predicted from padding" in text, tokens=1)


@identity
def padding_in_loss(recorded: Recorded) -> Measured | None:
    """Share of rows with tokens in the loss that are behind their end, or where the attention mask is 0."""
    return _told(recorded, "padding_in_loss")


@identity
def end_in_loss(recorded: Recorded) -> Measured | None:
    """Share of rows whose end token stands right behind the last token in the loss."""
    if recorded.drawn.empty:
        return None
    told = _told(recorded, "end_outside_loss")
    beginnings = recorded.beginnings["tokens"]
    before = beginnings.median() if len(beginnings) else 0.0
    return measured(told.value, **told.facts, before=before)


@identity
def trainer_logp(recorded: Recorded) -> Measured | None:
    """Mean difference of the trainer's log-probabilities from the recorder's, where no dropout is on [nats]."""
    if recorded.tokens.empty or "dropout" in set(recorded.events["rule"]):
        return None
    facts = _told(recorded, "trl_statistics", "padding_inside").facts
    return measured(_told(recorded, "trl_statistics").value, **facts)

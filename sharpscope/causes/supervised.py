"""Identities of supervised rows and of pairs."""

from __future__ import annotations

import pandas as pd

from sharpscope.causes.identity import Measured, first_step, identity
from sharpscope.causes.recorded import Recorded

LAST = 3
"""Tokens at a row's end among which its end token is looked for."""


def _rows(recorded: Recorded) -> pd.DataFrame:
    """One line for each supervised row: step, rollout, mean nll, its tokens and whether a special token is at its end."""
    tokens = recorded.tokens
    if not recorded.supervised or tokens.empty:
        return pd.DataFrame()
    by_row = tokens.groupby(["step", "rollout"])
    ends = set(recorded.words.special)
    last = tokens["position"] >= by_row["position"].transform("max") - LAST + 1
    ended = tokens["token_id"].isin(ends) & last
    return pd.DataFrame(
        {
            "nll": -by_row["logp"].mean(),
            "logp": by_row["logp"].sum(),
            "tokens": by_row.size(),
            "ended": ended.groupby([tokens["step"], tokens["rollout"]]).any(),
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
    near = rows.groupby(rows["step"] // 4)["nll"]  # of four steps: one has few rows
    center = near.transform("median")
    spread = (rows["nll"] - center).abs().groupby(rows["step"] // 4).transform("median")
    short = (rows["tokens"] / rows["tokens"].median()).clip(upper=1).pow(0.5)  # means of few
    z = short * (rows["nll"] - center) / (1.48 * spread).clip(lower=1e-3)
    odd = rows[z > 8].assign(z=z[z > 8]).sort_values("z", ascending=False)
    facts = {
        "rows": odd[["step", "rollout"]].head(5).to_numpy(int).tolist(),
        "count": len(odd),
        "of": len(rows),
        "nll": float(odd["nll"].median()) if len(odd) else 0.0,
        "usual": float(rows["nll"].median()),
        "step": first_step(odd),
    }
    return Measured(value=float(z.max()), facts=facts)


@identity
def row_ends(recorded: Recorded) -> Measured | None:
    """Share of supervised rows with no end token among their last tokens in the loss."""
    rows = _rows(recorded)
    if len(rows) < 16 or recorded.words.end is None:
        return None
    ids = recorded.rollouts[["step", "rollout", "token_ids"]]
    total = ids.assign(total=ids["token_ids"].str.count(",") + 1)
    rows = rows.merge(total, on=["step", "rollout"], how="left")
    open_rows = rows[~rows["ended"]]
    longest = rows["total"].max()
    facts = {
        "longest": 0 if pd.isna(longest) else int(longest),
        "at_limit": float((open_rows["total"] == longest).mean()) if len(open_rows) else 0.0,
        "lengths": int(open_rows["total"].nunique()),
        "rows": open_rows[["step", "rollout"]].head(5).to_numpy(int).tolist(),
        "step": first_step(open_rows),
    }
    return Measured(value=float((~rows["ended"]).mean()), facts=facts)


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
    wide = early.assign(pair=early["rollout"] // 2, side=early["rollout"] % 2)
    table = wide.pivot_table(index=["step", "pair"], columns="side", values=["logp", "tokens"])
    alike = (table["tokens"][0] - table["tokens"][1]).abs() <= 3
    margin = (table["logp"][0] - table["logp"][1])[alike].dropna()
    if len(margin) < 32:
        return None
    low, high = margin.quantile(0.1), margin.quantile(0.9)
    preferred = float((margin > 0).mean())
    lowest = margin.nsmallest(5).index
    facts = {
        "preferred": preferred,
        "low": float(low),
        "high": float(high),
        "share": float((margin < low / 2).mean()),
        "rows": [[int(step), 2 * int(pair)] for step, pair in lowest],
        "step": first_step(early),
    }
    judged = preferred >= 0.65 and high > 0
    return Measured(value=float(-low / high) if judged else 0.0, facts=facts)


def _told(recorded: Recorded, *rules: str) -> Measured:
    """The value of what a recorder reported by some rules, 0 where it did not, and its text."""
    events = recorded.events[recorded.events["rule"].isin(rules)]
    value = 0.0 if events.empty else float(events["value"].max())
    facts = {"message": " ".join(events["message"]), "step": first_step(events)}
    return Measured(value=value, facts=facts)


@identity
def labels(recorded: Recorded) -> Measured | None:
    """1 where a recorder found labels that are not the tokens of their own positions."""
    if not recorded.supervised:
        return None
    text = str(_told(recorded, "recorder").facts["message"])
    facts = {"message": text, "moved": "moved by" in text}
    return Measured(value=float("labels" in text), facts=facts)


@identity
def prompt_outside_loss(recorded: Recorded) -> Measured | None:
    """1 where a recorder stopped since the first token of a left-padded row is in the loss."""
    if recorded.supervised:
        return None
    text = str(_told(recorded, "recorder").facts["message"])
    return Measured(value=float("predicted from padding" in text), facts={"tokens": 1})


@identity
def padding_in_loss(recorded: Recorded) -> Measured | None:
    """Share of rows with tokens in the loss that are behind their end, or where the attention mask is 0."""
    return _told(recorded, "padding_in_loss")


@identity
def end_in_loss(recorded: Recorded) -> Measured | None:
    """Share of rows whose end token stands right behind the last token in the loss."""
    if recorded.drawn.empty:
        return None
    told, beginnings = _told(recorded, "end_outside_loss"), recorded.beginnings["tokens"]
    before = float(beginnings.median()) if len(beginnings) else 0.0
    return Measured(value=told.value, facts={**told.facts, "before": before})


@identity
def trainer_logp(recorded: Recorded) -> Measured | None:
    """Mean difference of the trainer's log-probabilities from the recorder's, where no dropout is on [nats]."""
    if recorded.tokens.empty or "dropout" in set(recorded.events["rule"]):
        return None
    facts = _told(recorded, "trl_statistics", "padding_inside").facts
    return Measured(value=_told(recorded, "trl_statistics").value, facts=facts)

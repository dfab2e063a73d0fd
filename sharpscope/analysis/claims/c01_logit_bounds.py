"""C1: ‖∂ℓ/∂z‖₂ lies between (1 − π) and √2·(1 − π), checked on every recorded token."""

from __future__ import annotations

import numpy as np
import pandas as pd

from sharpscope.analysis.claims.base import Claim, Condition, Confounder, Estimate, Finding, Rule, rows_of
from sharpscope.analysis.statistics import share_interval
from sharpscope.analysis.study import RunLike, Study
from sharpscope.analysis.token_frames import complement, lower_factor, rounding
from sharpscope.analysis.tokens import Columns, Reducer

NAME = "C1"
COLUMNS = ("logp", "logit", "logit_grad_norm")
MARGIN = 1e-3


def _violations(tokens: Columns, run: RunLike) -> dict[str, float] | None:
    norm = tokens["logit_grad_norm"].astype(np.float64)
    seen = np.isfinite(norm)
    if not seen.any():
        return None
    rows = {name: tokens[name][seen] for name in COLUMNS}
    rows["logit"] = np.nan_to_num(rows["logit"], nan=32.0)  # not recorded: allow for a large one
    rest = complement(rows["logp"])
    temperature = float((run.config.get("rollout") or {}).get("temperature") or 1.0)
    slack = rounding(rows, temperature)
    low = lower_factor(run.info.get("vocabulary")) * (rest - slack)
    below, above = norm[seen] * (1 + 1e-5) < low, norm[seen] * (1 - 1e-5) > np.sqrt(2) * (rest + slack)
    return {"tokens": int(seen.sum()), "below": int(below.sum()), "above": int(above.sum())}


def reducers(study: Study) -> list[Reducer]:
    """Counts of tokens, and of those below and above the bounds."""
    return [Reducer(NAME, COLUMNS, lambda run: True, _violations, needs="logit_grad_norm")]


def test(study: Study) -> Finding:
    """Share of tokens outside the bounds beyond rounding."""
    results = study.reduced.get(NAME, [])
    if not results:
        return Finding(missing="no token rows with logit_grad_norm")
    frame = pd.DataFrame([{"run": r.run, "step": r.step, **r.values} for r in results])
    tokens, below, above = (int(frame[column].sum()) for column in ("tokens", "below", "above"))
    share = (below + above) / tokens
    chance = (1 - MARGIN) ** tokens
    return Finding(
        effect=Estimate("share of tokens outside the bounds", share, "1", share_interval(below + above, tokens)),
        n=tokens,
        p_supported=chance if share == 0 else 1.0,
        as_claimed=share == 0,
        p_refuted=0.0 if share > 0 else 1.0,
        smallest_p=chance,
        conditions=(Condition("no token outside", share == 0),),
        confounders=(
            Confounder(
                "rounding", "what float32 leaves of ln π at the logit's size, and 1e-5 of the norm, are allowed"
            ),
            Confounder(
                "vocabulary", "the lower bound has √(V/(V − 1)) where run.json names V, else 1, which always holds"
            ),
        ),
        others=(
            Estimate("tokens below the lower bound", below, "tokens", n=tokens),
            Estimate("tokens above the upper bound", above, "tokens", n=tokens),
        ),
        rows=rows_of(frame["run"].unique(), "tokens", COLUMNS, "logit_grad_norm recorded"),
        frames={"violations": frame},
    )


CLAIM = Claim(
    NAME,
    "a token's logit gradient lies between (1 − π) and √2·(1 − π)",
    "arXiv 2511.00066; a fact of the softmax, so a violation means a wrong recording",
    "exploratory",
    Rule(
        "supported: none of at least 3,000 tokens lies outside beyond rounding (p: chance of that if 1 in 1,000 did); "
        "refuted: any does",
        "tokens",
        3_000,
        MARGIN,
    ),
    "record at least 3,000 tokens with recording.tokens_every",
    test,
    reducers,
)

"""Checks of the recording: facts that hold whatever a method does, so that a violation means a wrong recording.

C1 (bounds of the logit gradient) is a property of the softmax; C13 on the same gradient follows from how weights are made. They
are no findings about a method and give no verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sharpscope.analysis.claims.base import mean_estimate
from sharpscope.analysis.claims.gradients import HIGH, LOW, SHARES, share_frame
from sharpscope.analysis.measures import log_ratios
from sharpscope.analysis.study import Study
from sharpscope.analysis.tokens import Columns, Reducer, complement

if TYPE_CHECKING:
    from sharpscope.traces import Run

EPSILON = float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Check:
    """What a check of the recording found: `holds` is None where nothing was recorded to check."""

    name: str
    title: str
    holds: bool | None
    text: str

    def line(self) -> str:
        """The check on one line."""
        word = {True: "holds", False: "VIOLATED", None: "not recorded"}[self.holds]
        return f"{self.name:<18}{word:<13}{self.title}: {self.text}"


def rounding(logit: NDArray[Any], logp: NDArray[Any], temperature: float) -> NDArray[np.float64]:
    """Absolute error of 1 − π from float32 (n,): ln π is a difference of numbers of the size of the logits over T."""
    size = np.abs(np.asarray(logit, dtype=np.float64)) / temperature
    return np.asarray(4 * EPSILON * (1 + size + np.abs(np.asarray(logp, dtype=np.float64))))


def _violations(tokens: Columns, run: Run) -> dict[str, float] | None:
    norm = tokens["logit_grad_norm"].astype(np.float64)
    seen = np.isfinite(norm)
    if not seen.any():
        return None
    logp = tokens["logp"][seen]
    logit = np.nan_to_num(tokens["logit"][seen], nan=32.0)  # not recorded: allow for a large one
    rest = complement(logp)
    slack = rounding(logit, logp, float((run.config.get("rollout") or {}).get("temperature") or 1.0))
    vocabulary = run.info.get("vocabulary") or 0
    factor = np.sqrt(vocabulary / (vocabulary - 1)) if vocabulary > 1 else 1.0  # the limit where V is not known
    below = norm[seen] * (1 + 1e-5) < factor * (rest - slack)
    above = norm[seen] * (1 - 1e-5) > np.sqrt(2) * (rest + slack)
    return {"tokens": int(seen.sum()), "below": int(below.sum()), "above": int(above.sum())}


BOUNDS = Reducer("C1", ("logp", "logit", "logit_grad_norm"), _violations, needs="logit_grad_norm")


def logit_bounds(study: Study) -> Check:
    """‖∂ℓ/∂z‖₂ lies between √(V/(V − 1))·(1 − π) and √2·(1 − π) on every recorded token, beyond float32's rounding."""
    title = "a token's logit gradient lies between (1 − π) and √2·(1 − π)"
    results = study.results(BOUNDS.name, study.finished)
    if not results:
        return Check("C1", title, None, "no token rows with logit_grad_norm (recording.tokens_every)")
    tokens, below, above = (sum(int(r.values[key]) for r in results) for key in ("tokens", "below", "above"))
    text = f"{tokens:,} tokens, {below} below and {above} above beyond rounding"
    return Check("C1", title, below + above == 0, text)


def direct_shares(study: Study, column: str) -> pd.DataFrame:
    """seed, gradient share without the weights (`baseline`) and with them (`treatment`) on the same tokens, log ratio."""
    shares = share_frame(study, study.treatment)
    means = shares.groupby("seed", as_index=False)[[f"{column}_unweighted", column]].mean()
    return log_ratios(means.rename(columns={f"{column}_unweighted": "baseline", column: "treatment"}))


def same_gradient(study: Study) -> Check:
    """Weights that rise or fall with probability move the shares of lucky and of confident tokens in opposite directions."""
    title = f"the weights of {study.treatment} move the gradient shares of lucky and confident tokens in opposite directions"
    lucky, sure = (mean_estimate(name, direct_shares(study, name), "ln", "", "log") for name in ("lucky", "confident"))
    if lucky is None or sure is None:
        return Check("C13", title, None, f"no run of {study.treatment} has score_norm_local at a step")
    text = f"lucky (π < {LOW:g}, A > 0) {lucky.line}; confident (π > {HIGH:g}) {sure.text}"
    return Check("C13", title, lucky.value * sure.value <= 0, text)


CHECKS: dict[str, tuple[Callable[[Study], Check], Reducer]] = {
    "C1": (logit_bounds, BOUNDS),
    "C13": (same_gradient, SHARES),
}
"""Name → check, and what it needs of the token tables."""

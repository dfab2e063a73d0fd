"""C1: ‖∂ℓ/∂z‖₂ lies between (1 − π) and √2·(1 − π), checked on every recorded token."""

from __future__ import annotations

import numpy as np
import pandas as pd

from sharpscope.analysis.claims.base import Claim, Condition, Confounder, Estimate, Evidence, Finding, Rule, rows_of
from sharpscope.analysis.figures.style import BLACK, Lines, Picture, finish, panels, styled
from sharpscope.analysis.figures.tokens import REST, SMALLEST, draw_quantiles
from sharpscope.analysis.statistics import share_interval
from sharpscope.analysis.study import Study
from sharpscope.analysis.tokens import Columns, Reducer, complement
from sharpscope.traces import Run

NAME = "C1"
COLUMNS = ("logp", "logit", "logit_grad_norm")
MARGIN = 1e-3
EPSILON = float(np.finfo(np.float32).eps)
DRAWN = 20_000
"""Tokens of a setting that the figure samples [tokens]."""


def lower_factor(vocabulary: int | None) -> float:
    """√(V/(V−1)), or its limit 1 if V is not known."""
    return float(np.sqrt(vocabulary / (vocabulary - 1))) if vocabulary and vocabulary > 1 else 1.0


def rounding(logit: np.ndarray, logp: np.ndarray, temperature: float) -> np.ndarray:
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
    temperature = float((run.config.get("rollout") or {}).get("temperature") or 1.0)
    slack = rounding(logit, logp, temperature)
    low = lower_factor(run.info.get("vocabulary")) * (rest - slack)
    below, above = norm[seen] * (1 + 1e-5) < low, norm[seen] * (1 - 1e-5) > np.sqrt(2) * (rest + slack)
    return {"tokens": int(seen.sum()), "below": int(below.sum()), "above": int(above.sum())}


REDUCER = Reducer(NAME, COLUMNS, _violations, needs="logit_grad_norm")


def test(study: Study) -> Finding:
    """Share of tokens outside the bounds beyond rounding."""
    results = study.results(NAME, study.finished)
    if not results:
        return Finding(missing="no token rows with logit_grad_norm")
    frame = pd.DataFrame([{"run": r.run, "step": r.step, **r.values} for r in results])
    tokens, below, above = (int(frame[column].sum()) for column in ("tokens", "below", "above"))
    share = (below + above) / tokens
    chance = (1 - study.terms.margin(NAME, MARGIN)) ** tokens
    return Finding(
        effect=Estimate("share of tokens outside the bounds", share, "1", share_interval(below + above, tokens)),
        n=tokens,
        evidence=Evidence(chance if share == 0 else 1.0, share == 0, 0.0 if share > 0 else 1.0, chance),
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
    Rule(
        "supported: none of at least 3,000 tokens lies outside beyond rounding (p: chance of that if a share of {margin} of all did); "
        "refuted: any does",
        "tokens",
        3_000,
        MARGIN,
    ),
    "record at least 3,000 tokens with recording.tokens_every",
    test,
    (REDUCER,),
)


def figure(study: Study, lines: Lines) -> Picture:
    """‖p − e_y‖ against 1 − π with the bounds, and their ratio, which lies between 1 and √2; every setting of a study.

    Sampled tokens are drawn; the counts in the caption are over every recorded token.
    """
    samples = study.samples(["logp", "logit_grad_norm"], DRAWN)
    if not samples:
        return Picture(
            "logit_gradient", "", missing="logit gradients: no token rows with them (recording.tokens_every)"
        )
    counts = {}
    for setting in study.settings:
        results = study.results_of(NAME, setting)
        counts[setting.label] = [sum(int(r.values[key]) for r in results) for key in ("tokens", "below", "above")]
    tokens, broken = sum(c[0] for c in counts.values()), sum(c[1] + c[2] for c in counts.values())
    vocabulary = next((run.info.get("vocabulary") for _, _, run in study.each()), None)
    with styled():
        figure, axes = panels(2)
        lowest = 1.0
        for label, sample in samples.items():
            rest = np.maximum(complement(sample["logp"].to_numpy()), SMALLEST)
            norm = sample["logit_grad_norm"].to_numpy(dtype=float)
            lowest = min(lowest, float(rest[rest > SMALLEST].min(initial=1.0)))
            shown = (norm > 0) & (rest > SMALLEST)
            axes[0].plot(
                rest[shown][:4000],
                norm[shown][:4000],
                ".",
                color=lines[label].color,
                markersize=1.2,
                alpha=0.35,
                rasterized=True,
            )
            clear = rest > 1e-5  # below, rounding decides the ratio
            draw_quantiles(axes[1], rest[clear], norm[clear] / rest[clear], lines[label], label)
        grid = np.geomspace(lowest, 1, 50)
        for factor, dash, name in ((lower_factor(vocabulary), ":", "lower bound"), (np.sqrt(2), "--", "upper bound")):
            axes[0].plot(grid, factor * grid, color=BLACK, linestyle=dash, linewidth=1, label=name)
            axes[1].axhline(factor, color=BLACK, linestyle=dash, linewidth=1, label=name)
        title = f"{tokens:,} tokens checked,\n{broken:,} outside beyond rounding"
        axes[0].set(xscale="log", yscale="log", xlabel=REST, ylabel="‖p − e_y‖ [L2, logits]", title=title)
        axes[1].set(xscale="log", xlabel=REST, ylabel="‖p − e_y‖ / (1 − π) [1]", title="median, 10 to 90 %")
        finish(figure, axes)
    caption = (
        "Norm of a token's gradient with respect to the logits against its probability, with the bounds "
        "√(V/(V−1))·(1 − π) ≤ ‖p − e_y‖ ≤ √2·(1 − π), checked on every recorded token: "
        + "; ".join(f"{label}: {below + above} of {of:,} outside" for label, (of, below, above) in counts.items())
        + "."
        + ("" if vocabulary else " The vocabulary's size is not recorded, so the lower bound is 1 − π.")
    )
    return Picture("logit_gradient", caption, figure, claim=NAME)

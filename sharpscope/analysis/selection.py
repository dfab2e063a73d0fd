"""What a method's token selection left out of the loss, and the critical step of the gradient gap's theory."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from sharpscope.analysis.sections import Section
from sharpscope.analysis.text import number, percent
from sharpscope.traces import Run

GRADIENT_SQUARES = 8.0
"""Coefficient of G² in the bound of the step (arXiv 2510.08539)."""


def left_out(run: Run) -> pd.DataFrame:
    """Tokens with an advantage that have no policy gradient although no clip stopped them, against the others, by step.

    Columns: step, out (share of the tokens with an advantage), and for left-out and other tokens (`…_out`, `…_kept`) the means
    of probability and entropy [nats] and the share with A < 0. A KL term does not count as a gradient. Empty without tokens.
    """
    columns = ["step", "update", "logp", "entropy", "advantage", "loss_coef", "kl_coef", "clipped"]
    pieces = [pd.DataFrame({"step": pd.Series(dtype=int)})]
    for part in run.iter_tokens(columns=columns, required=["advantage", "loss_coef"]):
        used = part[part["update"].notna() & (part["advantage"] != 0)]
        policy = used["loss_coef"].astype(float) - used["kl_coef"].astype(float).fillna(0.0)
        values = {"probability": np.exp(used["logp"].astype(float)), "entropy": used["entropy"].astype(float)}
        values["negative"] = (used["advantage"] < 0).astype(float)
        out = (policy == 0) & (used["clipped"] == 0)
        by_step = pd.DataFrame(values).groupby([used["step"], out.map({True: "out", False: "kept"})]).mean().unstack()
        by_step.columns = [f"{name}_{which}" for name, which in by_step.columns]  # type: ignore[str-unpack, union-attr]
        pieces.append(by_step.assign(out=out.groupby(used["step"]).mean()).reset_index())
    return pd.concat(pieces, ignore_index=True) if len(pieces) > 1 else pieces[0]


def selection_section(run: Run) -> Section | None:
    """What the selection left out in the first, the strictest and the last recorded step, for `show`; None without a selection."""
    method = run.config.get("method") or {}
    if not method.get("tokens") or (found := left_out(run)).empty:
        return None
    named = {"first": found.index[0], "most left out": found["out"].idxmax(), "last": found.index[-1]}
    chosen = found.loc[list(named.values())]
    steps = [f"{step} ({name})" for step, name in zip(chosen["step"], named, strict=True)]
    cells = {"step": steps, "left out": [percent(share, 1) for share in chosen["out"]]}
    for title, key, form in (
        ("mean π", "probability", number),
        ("mean H [nats]", "entropy", number),
        ("A < 0", "negative", percent),
    ):
        both = (chosen.get(f"{key}_{which}", pd.Series(math.nan, chosen.index)) for which in ("out", "kept"))
        cells[title] = [f"{form(out)} / {form(kept)}" for out, kept in zip(*both, strict=True)]
    note = (
        f"Tokens with an advantage that the selection {method['tokens']['kind']} leaves out of the loss / those that it keeps; "
        f"over all steps {percent(found['out'].mean(), 1)}."
    )
    return Section("Tokens left out", pd.DataFrame(cells), note)


def gradient_gap(run: Run) -> pd.DataFrame:
    """Largest learning rate of the gradient gap's theory beside the measured critical one, for runs with two rewards.

    The theory (arXiv 2510.08539) bounds a step θ + η·w, ‖w‖ = 1, by η ≤ [⟨w, gap⟩]₊/(2(L + 8G²)), gap the difference of
    E ∇ln π(completion) between correct and wrong completions, G and L bounds of the norms of ∇ ln π(completion) and its Hessian.
    Along the optimizer's update Δ per learning rate, ⟨Δ, gap⟩ = Δᵀ(−g)/K with g the gradient of the loss and K = Σ |c| over
    the completions with A > 0, c the mean coefficient of a completion's tokens; hence lr ≤ (Δᵀ(−g)/K)/(2·‖Δ‖²·8·G²) with L = 0.
    G² is the largest Σ_t ‖∇ ln π_t‖² over completions.

    Returns:
        Columns step, success (share of correct completions), lr, critical_lr (measured, 2/λ_c; NaN if not found) and gap_lr, a row
        for each step with both; empty where rewards have more than two values or something was not recorded.
    """
    probes = run.probes
    found = probes[probes["probe"] == "critical"].pivot_table(
        index="step", columns="quantity", values="value", aggfunc="first"
    )
    rewards = run.rollouts["reward"].dropna().unique()
    if found.empty or "update_slope" not in found or len(rewards) != 2:
        return pd.DataFrame()
    updates = run.updates[run.updates["update"] == 0].set_index("step")
    columns = ["step", "rollout", "update", "advantage", "loss_coef", "score_norm_local"]
    rows = []
    for step in found.index:
        tokens = run.tokens(steps=int(step), columns=columns)
        first = tokens[(tokens["update"] == 0) & (tokens["loss_coef"] != 0)]
        by_rollout = first.groupby("rollout")
        coefficient = by_rollout["loss_coef"].mean().abs()
        gain = float(coefficient[by_rollout["advantage"].mean() > 0].sum())
        measured = by_rollout["score_norm_local"].apply(lambda norms: norms.notna().all())
        squares = (first["score_norm_local"].astype(float) ** 2).groupby(first["rollout"]).sum()[measured]
        if step not in updates.index or squares.empty or gain == 0:
            continue
        lr, length = (float(updates.loc[step, name]) for name in ("lr", "update_norm"))
        slope = float(found.loc[step, "update_slope"])
        bound = max(slope, 0.0) / gain / (2 * (length / lr) ** 2 * GRADIENT_SQUARES * float(squares.max()))
        success = float(run.rollouts.loc[run.rollouts["step"] == step, "correct"].mean())
        critical = float(found.loc[step].get("critical_lr", math.nan))
        rows.append({"step": int(step), "success": success, "lr": lr, "critical_lr": critical, "gap_lr": bound})
    return pd.DataFrame(rows)


def gap_section(run: Run) -> Section | None:
    """The two critical learning rates, for `show`; None where they are not known."""
    found = gradient_gap(run)
    if found.empty:
        return None
    measured, bound = found["critical_lr"], found["gap_lr"]
    cells = {
        **{"step": found["step"], "correct": found["success"].map(percent), "learning rate": found["lr"].map(number)},
        **{"critical, measured": measured.map(number), "critical, gradient gap": "≤ " + bound.map(number)},
        **{"λ_c": (2 / measured).map(number), "λ of the gap": ("≥ " + (2 / bound).map(number)).where(bound > 0, "–")},
    }
    note = (
        "Along the optimizer's update; measured: where the batch's loss is back at its value (λ_c = 2/learning rate). Gradient gap "
        "(arXiv 2510.08539): up to which success is sure to grow, if all prompts are alike, a completion's tokens have orthogonal "
        "gradients, and ln π has no curvature."
    )
    return Section("Critical step: measured, and by the gradient gap", pd.DataFrame(cells), note)

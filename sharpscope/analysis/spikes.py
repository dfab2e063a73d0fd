"""Gradient-norm spikes, and the tokens, prompts and probabilities that cause them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sharpscope.analysis.tokens import INCLUSION, inverse_inclusion, sample_text
from sharpscope.traces import Run, robust_z

PROBABILITY_EDGES = (0.0, 0.01, 0.1, 0.3, 0.5, 0.8, 0.95, 0.99, 1.0)
"""Ranges of π in which a spike's shares are summed."""

NOT_RECORDED = "(not recorded)"
"""Stands for a prompt that an imported run does not have."""


@dataclass(frozen=True)
class Spike:
    """A step with an unusually large gradient norm, and its causes if attribution was recorded.

    `tokens`: the recorded tokens with the largest |share|; `prompts`: share by prompt; `probabilities`: share by range of π;
    each None if the step has no attribution, and `missing` says so, and what records it. A token's share is a part of ‖∇L‖² of
    its update; the shares by prompt and by range are means over the step's updates and sum to 1. `sample`: the groups whose tokens
    were measured, in words; empty if all were. Then `tokens` and `prompts` are of these groups only, and the shares by range are
    estimates.
    """

    step: int
    grad_norm: float
    z: float
    typical: float
    tokens: pd.DataFrame | None
    prompts: pd.DataFrame | None
    probabilities: pd.DataFrame | None
    sample: str = ""
    missing: str = ""


def find_spikes(steps: pd.DataFrame, z: float = 4.0) -> pd.DataFrame:
    """Steps whose log gradient norm is `z` robust standard deviations above the median of the 50 before it.

    Columns step, grad_norm, z, typical (the median norm of the window); the rule is `sharpscope.traces.rules`.
    """
    logs: list[float] = []
    rows = []
    for row in steps.sort_values("step").itertuples():
        norm = float(row.grad_norm) if row.grad_norm is not None else math.nan  # type: ignore[arg-type]
        if not norm > 0:
            continue
        score = robust_z(logs, math.log(norm))
        if score >= z:
            rows.append((int(row.step), norm, score, math.exp(float(np.median(logs[-50:])))))  # type: ignore[arg-type]
        logs.append(math.log(norm))
    return pd.DataFrame(rows, columns=["step", "grad_norm", "z", "typical"])


def recorded_by(run: Run, option: str) -> str:
    """What records a quantity, as ` (…)`: `option`, or what a trace without such options has; empty if nothing does.

    Imported traces and those of verl's recorder have no section `recording` or `probes` in their configuration.
    """
    if option.split(".", maxsplit=1)[0] in run.config:
        return f" ({option})"
    if option == "recording.token_gradients_every":
        return " (sharpscope probe --tokens RUN --model CHECKPOINT)"
    verl = (run.info.get("trainer") or {}).get("name") == "verl"
    return " (SHARPSCOPE_VERL_CRITICAL_EVERY)" if verl and option == "probes.preset" else ""


def explain_spikes(run: Run, z: float = 4.0, top: int = 8, largest: int = 0) -> list[Spike]:
    """Every spike of a run with its causes; without one, the `largest` steps by gradient norm that have attribution."""
    result = find_spikes(run.steps, z)
    if result.empty and largest:
        recorded = run.tokens(columns=["step", "attribution"]).dropna()["step"].unique()
        rows = run.steps[run.steps["step"].isin(recorded)].nlargest(largest, "grad_norm")
        median = float(run.steps["grad_norm"].median())
        result = pd.DataFrame({"step": rows["step"], "grad_norm": rows["grad_norm"], "z": math.nan, "typical": median})
    return [_explain(run, row, top) for row in result.itertuples()]


def _explain(run: Run, row: object, top: int) -> Spike:
    step, norm = int(row.step), float(row.grad_norm)  # type: ignore[attr-defined]
    columns = [
        "rollout",
        "position",
        "token_id",
        "logp",
        "advantage",
        "weight",
        "loss_coef",
        "attribution",
        "update",
        INCLUSION,
    ]
    tokens = run.tokens(steps=[step], columns=["step", "score_norm", "score_norm_local", *columns]).dropna(
        subset=["attribution"]
    )
    head = (step, norm, float(row.z), float(row.typical))  # type: ignore[attr-defined]
    if tokens.empty:
        how = recorded_by(run, "recording.token_gradients_every")
        return Spike(*head, None, None, None, missing=f"no attribution was recorded at this step{how}")
    tokens = tokens.assign(probability=np.exp(tokens["logp"]))
    biggest = tokens.reindex(tokens["attribution"].abs().sort_values(ascending=False).index).head(top)
    rollouts = run.rollouts[run.rollouts["step"] == step][["rollout", "group", "prompt", "reward"]]
    joined = tokens.merge(rollouts, on="rollout")
    joined = joined.assign(group=joined["group"].fillna(-1).astype(int), prompt=joined["prompt"].fillna(NOT_RECORDED))
    updates = tokens["update"].nunique()
    prompts = pd.DataFrame(joined.groupby(["group", "prompt"])["attribution"].sum() / updates).reset_index()
    prompts = prompts.loc[prompts["attribution"].abs().nlargest(top).index]
    count = inverse_inclusion(tokens)  # above, shares are of the prompt or token itself
    ranges = pd.cut(tokens["probability"], list(PROBABILITY_EDGES), include_lowest=True)
    grouped = tokens.assign(share=count * tokens["attribution"], tokens=count / count.sum())
    probabilities = grouped.groupby(ranges, observed=False)[["share", "tokens"]].sum()
    probabilities["share"] /= updates
    return Spike(*head, biggest, prompts, probabilities, sample_text(tokens))

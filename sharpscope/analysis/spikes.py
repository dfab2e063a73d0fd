"""Steps with a large gradient, and the tokens, prompts and probabilities behind them.

Every share is of one update: a token's part of the squared gradient norm ‖∇L‖², c·⟨∇ ln π, ∇L⟩ / ‖∇L‖². Of a step with several updates
it is the one with the largest gradient among those with shares. The tokens of a prompt sum to the prompt's share, and all prompts to 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from sharpscope.analysis.study import per_run, recorded_steps
from sharpscope.analysis.text import number
from sharpscope.analysis.tokens import (
    INCLUSION,
    held_by_largest,
    inverse_inclusion,
    sample_text,
    sampled_by,
    sampling_error,
)
from sharpscope.rules.judging import SPIKE_LEAST, SPIKE_WINDOW, robust_z
from sharpscope.traces import Run

PROBABILITY_EDGES = (0.0, 0.01, 0.1, 0.3, 0.5, 0.8, 0.95, 0.99, 1.0)
"""Ranges of π in which shares are summed."""
NOT_RECORDED = "(not recorded)"
"""Stands for a prompt that an imported run does not have."""
SUBJECTS = {
    "recording.token_gradients_every": ("attribution", "no shares"),
    "probes.preset": ("critical sharpness", "critical_sharpness"),
}
"""What records a quantity -> words by which events name it, where they say why it is missing."""
SHARED = [
    "step",
    "rollout",
    "position",
    "update",
    "token_id",
    "logp",
    "advantage",
    "weight",
    "loss_coef",
    "attribution",
    "score_norm",
    "score_norm_local",
    INCLUSION,
]
"""Columns of the tokens with shares."""
SPIKE_Z = 4.0
SURE = 0.99
"""Probability from which the model was sure of a token."""
ENOUGH = 0.2
"""Estimated sum of a sample's shares (1 for all groups) from which ranges of probability are scaled to sum to 1."""


@dataclass(frozen=True)
class Spike:
    """A step with a large gradient norm, and its causes if the tokens' shares were recorded.

    Attributes:
        step: of the run.
        grad_norm, typical: its gradient norm, of the update below, and the median of those before it [L2, parameters].
        z: robust standard deviations of the logarithm above that median; NaN where too few steps came before.
        tokens: the tokens with the largest |share|, with `share` and `probability`; None if none was recorded.
        prompts, probabilities: `prompt_shares`, the largest, and `range_shares`.
        sample: the groups whose tokens were measured, in words; empty if all were. Prompts and tokens are of these only.
        missing: why there are no shares, or why all are 0.
        update: which of the step's updates, in words; empty if it has one.
    """

    step: int
    grad_norm: float
    z: float
    typical: float
    tokens: pd.DataFrame | None = None
    prompts: pd.DataFrame | None = None
    probabilities: pd.DataFrame | None = None
    sample: str = ""
    missing: str = ""
    update: str = ""

    @property
    def times(self) -> float:
        """How many times the typical gradient norm its norm is."""
        return self.grad_norm / self.typical if self.typical > 0 else math.nan

    @property
    def rank(self) -> float:
        """`times` of a spike, below all others where z is no spike's."""
        return self.times if self.z >= SPIKE_Z else -math.inf


@per_run
def gradient_scores(run: Run) -> pd.DataFrame:
    """A row for each step with a gradient: step, grad_norm, z (`robust_z` of its logarithm), typical (median norm of the steps before).

    `grad_norm` is that of the step's largest update, so that a spike of one update is no mean over them; `times` is it over the typical.
    """
    steps = run.steps.sort_values("step")
    norms_of = run.columns("updates", ["step", "grad_norm"])
    largest = norms_of.groupby("step")["grad_norm"].max()
    of_updates = steps["step"].map(largest).astype(float)
    norms = of_updates.fillna(steps["grad_norm"].astype(float))
    logs: list[float] = []
    rows = []
    for step, norm in zip(steps["step"], norms, strict=True):
        if norm > 0:
            log = math.log(norm)
            typical = math.exp(np.median(logs[-SPIKE_WINDOW:])) if logs else math.nan
            rows.append((int(step), norm, robust_z(logs, log), typical))
            logs.append(log)
    columns = ["step", "grad_norm", "z", "typical"]
    scores = pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(columns[1:], float))
    return scores.assign(times=scores["grad_norm"] / scores["typical"])


def spike_scores(run: Run) -> pd.DataFrame:
    """The rows of `gradient_scores` that are spikes."""
    scores = gradient_scores(run)
    return scores[scores["z"] >= SPIKE_Z]


def recorded_by(run: Run, option: str) -> str:
    """Why a quantity is missing, as `: …`; else what records it, as ` (…)`; empty if nothing does.

    What records it is `option`; imported traces and those of verl's recorder have no such section in their configuration.
    """
    if len(run.steps) and (run.steps["grad_norm"] == 0).all():
        return ": the gradient was 0 at every step"
    # run.json says it, or else the event of a check that failed
    reasons = [(run.info.get("not_measured") or {}).get(option)]
    failed = run.events["rule"].isin(("probe", "self_check", "no_gradient"))
    for text in run.events.loc[failed, "message"]:
        if any(subject in text for subject in SUBJECTS.get(option, ())):
            reasons.append(text)
    for reason in filter(None, reasons):
        return f": {reason}"
    if option.split(".", maxsplit=1)[0] in run.config:
        return f" ({option})"
    if option == "recording.token_gradients_every":
        return " (sharpscope probe --rollouts RUN --model CHECKPOINT)"
    return ""


def explain_spikes(run: Run, top: int = 8) -> list[Spike]:
    """Every step with z ≥ SPIKE_Z, with its causes; `top`: tokens and prompts of each."""
    return [explain_step(run, int(step), top) for step in spike_scores(run)["step"]]


def notable_steps(run: Run, top: int = 8) -> list[Spike]:
    """The spikes; where none has shares of tokens, also the largest gradient that has."""
    found = explain_spikes(run, top)
    if all(one.tokens is None for one in found):
        scores = gradient_scores(run)
        there = scores[scores["step"].isin(recorded_steps(run, "attribution"))]
        for step in there.nlargest(1, "grad_norm")["step"]:
            found.append(explain_step(run, int(step), top))
    return found


@per_run
def explain_step(run: Run, step: int, top: int = 8) -> Spike:
    """The causes of one step's gradient."""
    tokens = step_shares(run, step)
    scores = gradient_scores(run).set_index("step")
    score = scores.reindex([step]).iloc[0]
    norms = update_norms(run, step)
    found = Spike(step, score["grad_norm"], score["z"], score["typical"])
    if len(norms) > 1:
        largest = norms.index[int(norms.argmax())]
        chosen = int(largest if tokens.empty else tokens["update"].iloc[0])
        norm = norms.loc[chosen]
        named = f"update {chosen + 1} of {len(norms)}"
        found = replace(found, grad_norm=norm, update=named)
    if tokens.empty:
        how = recorded_by(run, "recording.token_gradients_every")
        return replace(found, missing=f"no token's share was recorded at this step{how}")
    sizes = tokens["share"].abs().sort_values(ascending=False, kind="stable")
    prompts = prompt_shares(run, step, tokens)
    sample = sample_text(run, tokens)
    missing = ""
    if (tokens["share"] == 0).all():
        which = f"the measured groups ({sample})" if sample else "its groups"
        missing = f"every token's share is 0: none of {which} has a gradient"
    return replace(
        found,
        tokens=tokens.loc[sizes.index[:top]],
        prompts=prompts.loc[prompts["share"].abs().nlargest(top).index],
        probabilities=range_shares(tokens, drawn_units(run, step, tokens)),
        sample=sample,
        missing=missing,
    )


def step_shares(run: Run, step: int) -> pd.DataFrame:
    """The tokens that have a share in the step's largest update with shares, with `share` and `probability`."""
    there = [step] if step in recorded_steps(run, "attribution") else []
    tokens = run.tokens(steps=there, columns=SHARED).dropna(subset=["attribution"])
    if tokens["update"].nunique() > 1:
        norms = update_norms(run, step)
        updates = sorted(map(int, tokens["update"].dropna().unique()))
        largest = max(updates, key=lambda update: norms.get(update, 0.0))
        tokens = tokens[tokens["update"] == largest]
    return tokens.assign(
        probability=np.exp(tokens["logp"]),
        share=tokens["attribution"].astype(float),
    )


def update_norms(run: Run, step: int) -> pd.Series:
    """Update of a step → its gradient norm."""
    updates = run.updates
    return updates[updates["step"] == step].set_index("update")["grad_norm"]


def prompt_shares(run: Run, step: int, tokens: pd.DataFrame) -> pd.DataFrame:
    """group, prompt, share: the sums over the tokens of each prompt. `tokens`: from `step_shares`."""
    rollouts = run.frame("rollouts", step, ["rollout", "group", "prompt"])
    joined = tokens[["rollout", "share"]].merge(rollouts, on="rollout", how="left")
    joined = joined.fillna({"group": -1, "prompt": NOT_RECORDED}).astype({"group": int})
    return joined.groupby(["group", "prompt"], as_index=False)[["share"]].sum()


def drawn_units(run: Run, step: int, tokens: pd.DataFrame) -> pd.Series:
    """(tokens,) what a sample of tokens was drawn by: their completion, or their group."""
    if sampled_by(run) == "rollout":
        return tokens["rollout"]
    rollouts = run.frame("rollouts", step, ["rollout", "group"]).set_index("rollout")
    return tokens["rollout"].map(rollouts["group"])


def range_shares(tokens: pd.DataFrame, units: pd.Series | None = None) -> pd.DataFrame:
    """low, high, share, tokens (share of the tokens) by range of π; NaN where a sample holds too little of the gradient to tell.

    Of a sample these are estimates (Horvitz and Thompson), scaled to sum to 1, and `error` is the standard error of the share (of a
    ratio, by linearization) where the drawn `units` are given.
    """
    count = inverse_inclusion(tokens)
    ranges = pd.cut(tokens["probability"], list(PROBABILITY_EDGES), include_lowest=True)
    weighted = tokens.assign(share=count * tokens["share"], tokens=count / count.sum())
    sums = weighted.groupby(ranges, observed=False)[["share", "tokens"]].sum()
    total = sums["share"].sum()
    result = pd.DataFrame(
        {
            "low": PROBABILITY_EDGES[:-1],
            "high": PROBABILITY_EDGES[1:],
            "share": sums["share"].to_numpy() / total if total >= ENOUGH else math.nan,
            "tokens": sums["tokens"].to_numpy(),
        }
    )
    if units is None or not (count > 1).any():
        return result
    shares = tokens["share"].to_numpy()
    errors = []
    for each, part in zip(ranges.cat.categories, result["share"], strict=True):
        inside = (ranges == each).to_numpy()
        residuals = (inside - part) * shares / total  # (tokens,) of the ratio, linearized
        errors.append(sampling_error(residuals, units, 1 / count))
    return result.assign(error=errors)


def concentration(tokens: pd.DataFrame) -> tuple[float, float, float]:
    """How few tokens carry the gradient: (share of the largest hundredth, share of the tokens with π > SURE, their share).

    Shares are of Σ|share|, so that no part exceeds the whole; tokens of a sample of groups count by their inverse chance.
    """
    count = inverse_inclusion(tokens)
    size = tokens["share"].abs().to_numpy()
    sure = (tokens["probability"] > SURE).to_numpy()
    largest = float(held_by_largest(size, count, 0.01))
    weighted = count * size
    carried = weighted[sure].sum() / max(weighted.sum(), 1e-300)
    share_sure = count[sure].sum() / count.sum()
    return largest, share_sure, carried


def spike_text(run: Run) -> str:
    """What the rule found in two sentences: the spikes, or how near the run came; and where shares of tokens were recorded."""
    scores = gradient_scores(run)
    if scores.empty:
        return "No step has a gradient norm, so there is nothing to compare."
    spikes = spike_scores(run)
    if len(spikes):
        asked = spikes.nlargest(1, "times")
    else:
        asked = scores.nlargest(1, "grad_norm")
    step = int(asked["step"].iloc[0])
    said = _found_text(scores, spikes, step)
    return f"{said} {_shares_text(run, spikes, step)}"


def _found_text(scores: pd.DataFrame, spikes: pd.DataFrame, step: int) -> str:
    """The spikes, or how near a run came to one; `step` has the largest gradient."""
    if len(spikes):
        each = ", ".join(
            f"{r.step} (z = {r.z:.1f}, {r.times:.1f} × typical)" for r in spikes.itertuples()
        )
        return f"{len(spikes)} step{'s' if len(spikes) > 1 else ''} with z ≥ {SPIKE_Z:g}: {each}."
    if scores["z"].isna().all():
        return f"A spike is judged against {SPIKE_LEAST} earlier steps with a gradient; this run has {len(scores)} such steps."
    top = scores.nlargest(1, "z").iloc[0]
    said = f"No step reaches z = {SPIKE_Z:g}: the highest is z = {top['z']:.1f} at step {top['step']:.0f}, gradient norm "
    said += (
        f"{number(top['grad_norm'])}, {top['times']:.1f} × the typical {number(top['typical'])}."
    )
    if scores.set_index("step")["z"].isna()[step]:
        said += f" The largest is that of step {step}, which has fewer than {SPIKE_LEAST} steps before it to be judged against."
    return said


def _shares_text(run: Run, spikes: pd.DataFrame, step: int) -> str:
    """Which of the spikes, or of `step` without one, have shares of tokens."""
    there = recorded_steps(run, "attribution")
    if not there:
        return (
            f"No token's share was recorded{recorded_by(run, 'recording.token_gradients_every')}."
        )
    wanted = {step, *spikes["step"].astype(int)}
    having = sorted(wanted & set(there))
    if having:
        several = "s" if len(having) > 1 else ""
        listed = " and ".join(map(str, having))
        return f"Tokens' shares were recorded at step{several} {listed}."
    nearest = min(there, key=lambda one: (abs(one - step), one))
    return f"Tokens' shares were not recorded at step {step}; the nearest step that has them is {nearest}."

"""A step of a run, or several, made again with and without some tokens, from the same state.

Left out are the leading tokens of a ranking, a prompt, a completion, or the tokens of a file: their coefficients c = ∂L/∂log π are 0 in
every update of the step. A control of a ranking leaves out as many other tokens, drawn at random. The change that the tokens' effects
predict (`sharpscope.effects`) stands beside the measured one; of several updates, each effect has the outcome's gradient after the last
of them, and what reaches a later update of the step through the moments is not in it.

A step of one of our runs is made again from the nearest checkpoint before it, one that was recorded in another trainer from the
trainer's checkpoint with its AdamW state.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from torch import Tensor

from sharpscope.config import ForkSpec
from sharpscope.errors import UserError
from sharpscope.forks.experiment import Reading, outcome_rows
from sharpscope.forks.recorded_step import trainer_step
from sharpscope.forks.start import Tell, resolve
from sharpscope.forks.step_again import StepAgain, run_step
from sharpscope.forks.token_sets import TokenSet
from sharpscope.recording.run_folder import set_threads
from sharpscope.recording.step import UpdateResult
from sharpscope.settings import validate
from sharpscope.traces import Row, Run, RunLock, TraceWriter, load_run, update_run_info

ALL = "all tokens"
GRADIENT, UPDATE = "layer_gradient:", "layer_update:"
"""Prefixes of outcomes: norms of gradient and update of one group of parameters, mean over the step's updates."""
RANKINGS = ("effect", "share")


def without_tokens(
    run: Path | str,
    step: int,
    sets: Sequence[str] = ("top:12",),
    *,
    by: str = "effect",
    on: str = "kl",
    to: int | None = None,
    model: str | None = None,
    task: str | None = None,
    overrides: Sequence[str] = (),
    on_progress: Tell | None = None,
    **settings: object,
) -> tuple[Run, str]:
    """Make a step of a run again with all tokens, and without each of some sets of them.

    All start from the same weights, optimizer state and rollouts: those of the checkpoint after the step before, or of the nearest
    earlier one, from which the steps between are made again. Rows go to the run's table `forks`, predicted and measured changes to its
    entry in run.json.

    Args:
        run: folder of the run.
        step: that is made again.
        sets: `top:K`, the K leading tokens of the ranking; `prompt:I`, a group of the step; `completion:I`, a row of it; `file:PATH`.
        by: ranking of `top:K`, `effect` or `share` (of ‖∇L‖²).
        on: outcome of the effect: kl, entropy; with held-out prompts also heldout, sharpness.
        to: make all steps from `step` to this one again, each without its prompt, completion or the file's tokens.
        model: of a run that was recorded in another trainer: its checkpoint before the step with AdamW's state (`optimizer.pt`).
        task: of such a run, for the held-out prompts.
        overrides: changes of the run's configuration, `field.subfield=value`.
        on_progress: called with a line of text on what is done.
        **settings: `prompts` and `samples` of `ForkSpec`.

    Returns:
        The run with the rows, and the name of the fork.
    """
    tell = on_progress or (lambda text: None)
    parsed = [TokenSet.parse(text) for text in sets]
    loaded = load_run(run)
    _check(loaded, step, to, parsed, by, model)
    spec = validate(ForkSpec, {**settings, "warm_up": 0, "batches": 1})
    kept = {
        "step": step,
        "to": to,
        "sets": list(sets),
        "by": by,
        "on": on,
        "model": model,
    }
    kept |= {"task": task, **spec.model_dump(mode="json", include={"prompts", "samples"})}
    files = [Path(one.value).read_text() for one in parsed if one.kind == "file"]
    identity = json.dumps(["without", kept, list(overrides), files])
    name = hashlib.sha256(identity.encode()).hexdigest()[:8]
    if name in (loaded.info.get("forks") or {}):
        tell(f"step {step}: measured before")
        return loaded, name
    if model is not None:
        other = None if task is None else resolve("fork", None, model, task, None, overrides)
        set_threads(None, model)
        again = trainer_step(loaded, step, model, other, spec, tell)
    else:
        config = resolve("fork", run, None, task, None, overrides)
        set_threads(config.threads, config.policy.model)
        again = run_step(config, Path(run), step, spec, tell, to=to)
    again.restore()
    again.require_memory()
    start = again.measure()
    again.prepare()
    found = _arms(again, parsed, by, on, start, name, tell)
    again.restore()
    with RunLock(loaded.path):
        with TraceWriter(loaded.path) as writer:
            writer.append("forks", {key: [row[key] for row in found.rows] for key in found.rows[0]})
        forks = dict(load_run(run).info.get("forks") or {})
        entry = {**kept, "tokens": found.tokens, "predictions": found.predictions}
        update_run_info(loaded.path, forks=forks | {name: entry})
    return load_run(run), name


def _check(
    loaded: Run,
    step: int,
    to: int | None,
    sets: Sequence[TokenSet],
    by: str,
    model: str | None,
) -> None:
    """Refuse what does not fit together before anything is computed."""
    known = set(loaded.steps["step"])
    for option, value in (("--step", step), ("--to", to)):
        if value is not None and value not in known:
            last = int(loaded.steps["step"].max()) if len(loaded.steps) else 0
            raise UserError(f"{option} {value}: the run has steps 1 to {last}")
    if by not in RANKINGS:
        raise UserError(f"--by {by}: use {' or '.join(RANKINGS)}")
    if to is not None:
        if to < step:
            raise UserError(f"--to {to}: must not be before --from {step}")
        if model is not None or any(one.kind == "top" for one in sets):
            raise UserError(
                "--to: makes steps of a run of `sharpscope run` again without prompt:I, completion:I or file:PATH, not a ranking"
            )


@dataclass
class Found:
    """What the arms gave: rows of the table `forks`, the leading tokens, predicted and measured changes."""

    rows: list[Row]
    tokens: list[dict[str, float]]
    predictions: list[Row]


def _arms(
    again: StepAgain,
    sets: Sequence[TokenSet],
    by: str,
    on: str,
    start: dict[str, Reading],
    name: str,
    tell: Tell,
) -> Found:
    """Make the step with all tokens and without each set, and measure."""
    before = again.values()
    scores = dict[str, Tensor]()
    if again.to == again.step:
        tell("effects and shares of the tokens")
        scores, made = again.scores()
    else:
        made = again.update(None, None)
    wanted = "share" if by == "share" else on
    if scores and wanted not in scores:
        raise UserError(f"--on {on}: use {', '.join(n for n in scores if n != 'share')} here")
    found = Found([], [], [])
    arms: dict[str, TokenSet | Tensor | None] = {ALL: None}
    for one in sets:
        arms[f"without {one}"] = one
        if one.kind == "top":
            leading = one.chosen(again.step, again.rollouts, scores[wanted])
            arms[f"without {one}"] = leading
            arms[f"without {one.value} others"] = again.others(leading, scores[wanted])
            if not found.tokens:
                found.tokens = _listed(leading, scores[wanted])
    whole: dict[str, list[float]] = {}
    for arm, given in arms.items():
        chosen = given
        if isinstance(given, TokenSet) and again.to == again.step:
            chosen = given.chosen(again.step, again.rollouts, None)
        if chosen is not None:
            made = again.update(chosen, None)
        readings = again.measure() | update_readings(made)
        common = {
            "step": again.step - 1,
            "fork": name,
            "batch": 0,
            "arm": arm,
            "reference": ALL,
        }
        common |= {"comparison": "step", "scale": 1.0}
        sound = not any(update.problem for update in made)
        found.rows += outcome_rows(common, readings, start, sound)
        values = again.values()
        whole = whole or values
        for outcome in again.prepared if arm != ALL else ():
            numbers = _measured(outcome, before[outcome], whole[outcome], values[outcome])
            if isinstance(chosen, Tensor) and scores:
                numbers["predicted"] = -float(scores[outcome][chosen].sum())
            known = {key: value for key, value in numbers.items() if math.isfinite(value)}
            found.predictions.append({"arm": arm, "outcome": outcome, **known})
        tell(f"{arm}: measured")
    return found


def _measured(
    outcome: str,
    before: Sequence[float],
    whole: Sequence[float],
    without: Sequence[float],
) -> dict[str, float]:
    """Change without some tokens and its standard error, and the change by the step; values are of all prompts, then of parts.

    The parts of a sharpness, which depends on the number of prompts, are all but an eighth (the jackknife); the error of another outcome
    is that of the mean of its eighths. NaN without parts.
    """
    changes = pd.Series([b - a for a, b in zip(whole[1:], without[1:], strict=True)], dtype=float)
    error = float(changes.std()) / math.sqrt(max(len(changes), 1))
    return {
        "measured": without[0] - whole[0],
        "step_change": whole[0] - before[0],
        "std_error": (len(changes) - 1) * error if outcome == "sharpness" else error,
    }


def _listed(chosen: Tensor, score: Tensor) -> list[dict[str, float]]:
    """The chosen tokens, the largest |score| first."""
    places = [(int(row), int(column)) for row, column in chosen.nonzero().tolist()]
    places.sort(key=lambda place: -abs(float(score[place])))
    return [{"rollout": r, "position": p, "score": float(score[r, p])} for r, p in places]


def update_readings(updates: Sequence[UpdateResult]) -> dict[str, Reading]:
    """Norms of gradients before clipping and of updates, in all and by layer: means over the updates."""
    rows: list[dict[str, float]] = []
    for update in updates:
        rows.append({"grad_norm": update.grad_norm, "update_norm": update.update_norm})
        for prefix, layers in zip((GRADIENT, UPDATE), update.layers or ({}, {}), strict=True):
            rows[-1] |= {f"{prefix}{group}": value for group, value in layers.items()}
    return {
        str(name): Reading(float(value))
        for name, value in pd.DataFrame(rows).mean(skipna=False).items()
    }

"""Score norms, shares, layers and rotation of a recorded or imported trace, measured afterwards at a checkpoint."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from sharpscope.config.method import Method
from sharpscope.config.probes import Check
from sharpscope.errors import UserError
from sharpscope.policy import Policy
from sharpscope.probes import attribute, score_norms
from sharpscope.recording.health import Event
from sharpscope.recording.norms import layer_groups, norms
from sharpscope.recording.observers import layer_values, leading
from sharpscope.recording.replay import StepRows, replay, step_rows
from sharpscope.recording.rows import rounded
from sharpscope.traces import TABLES, Run, RunLock, TraceWriter, create_run_dir, create_run_info, update_run_info
from sharpscope.traces.files import now

GAP, WRONG = 0.05, 0.5
"""Mean |ln π of the trace − ln π of the checkpoint| above which an event warns, and above which it is an error [nats]."""
STATISTICS = ("logit", "entropy", "collision", "polarity", "logit_grad_norm")
"""Columns of tokens that are filled with the checkpoint's where the trace has none."""


@dataclass(frozen=True)
class Probed:
    """Measurements at one step."""

    step: int  # of the trace
    tokens: int  # number of tokens measured
    logp_gap: float  # mean |ln π of the trace − ln π of the checkpoint| [nats]; large at a checkpoint of another step
    attributed: bool  # whether all tokens have coefficients, of the trace or of a method, so that there are shares


def probe_trace(
    run: Run,
    policy: Policy,
    out: Path,
    *,
    steps: Sequence[int] | None = None,
    method: Method | None = None,
    check: Check = "first",
    on_step: Callable[[Probed], None] | None = None,
    force: bool = False,
) -> list[Probed]:
    """Copy a trace with what a recorded step would have had, measured at a policy's weights.

    Tokens get `score_norm_local`, statistics where they have none and, where there are coefficients, `attribution`; updates get
    the gradient's norm, in all and by layer, where the trace has no rows of them. The gradient of an update is Σ c_t ∇log π_t;
    of a step of which only a sample of the tokens was written it is not known, and there are no shares.
    Everything is exact at the checkpoint, which is the policy of the training at one step only.

    Args:
        run: with `rollouts.token_ids`, which importers and recorders write.
        policy: the checkpoint, in float32 or float64.
        out: folder of the new run.
        steps: to measure; None: all that have tokens.
        method: whose loss gives the coefficients of a trace that has none, and its rotation; see `replay`.
        check: when the probes compare themselves with autograd.
        on_step: called with what was measured at each step.
        force: accept a checkpoint whose log-probabilities differ from the trace's by more than WRONG.

    Raises:
        UserError: the trace has no token IDs of whole sequences, a step does not exist, an ID is not in the vocabulary, the
            checkpoint does not fit, or the method needs what the trace lacks.
    """
    chosen = run.token_steps if steps is None else sorted(set(steps))
    for step in chosen:
        if step not in run.token_steps:
            raise UserError(
                f"--steps {step}: the trace has tokens at steps {', '.join(map(str, run.token_steps[:20]))}"
            )
    if run.rollouts["token_ids"].isna().all():
        raise UserError(
            f"--tokens {run.path}: no token IDs of its prompts were recorded, so a model cannot read them; add `prompt_ids` to the "
            "imported records and import them again, or record the run with sharpscope's recorder"
        )
    made = create_run_dir(out)
    info = {key: value for key, value in run.info.items() if key not in ("name", "schema_version")}
    note = f"score norms and attribution measured afterwards, at the weights of {policy.source}"
    create_run_info(made, info | {"status": "running", "notes": [*(info.get("notes") or []), note]})
    results: list[Probed] = []
    updates: dict[int, list[dict[str, Any]]] = {}
    try:
        with RunLock(made), TraceWriter(made) as writer:
            for step in run.token_steps:
                tokens = run.arrow("tokens", [step])
                if step in chosen:
                    probed, columns, updates[step] = _measure(step_rows(run, step, tokens, policy), method, check)
                    for name, values in columns.items():
                        tokens = _replaced(tokens, name, values)
                    results.append(probed)
                    _judge(probed, writer, force)
                    if on_step is not None:
                        on_step(probed)
                writer.append_table("tokens", tokens)
                writer.flush()
            for table in TABLES:
                if table not in ("tokens", "steps"):
                    writer.append_table(table, run.arrow(table))
            known = set(run.updates["step"])
            for update in (update for step, of_step in updates.items() if step not in known for update in of_step):
                writer.append("updates", update)
            writer.append_table("steps", _with_norms(run.arrow("steps"), updates))
    except BaseException:
        shutil.rmtree(made)  # it was new or empty
        raise
    if (run.path / "tokenizer").is_dir():
        shutil.copytree(run.path / "tokenizer", made / "tokenizer")
    else:
        policy.tokenizer.save_pretrained(made / "tokenizer")
    update_run_info(made, status=run.info.get("status", "finished"), finished=now())
    return results


def _judge(probed: Probed, writer: TraceWriter, force: bool) -> None:
    """Raise UserError if the checkpoint does not fit the trace; write an event if it fits badly."""
    step, gap = probed.step, probed.logp_gap
    if gap > WRONG and not force:
        raise UserError(
            f"--model: its log-probabilities at step {step} differ from the recorded ones by {gap:.2g} nats a token (limit "
            f"{WRONG:g}), so it is not the policy of that step; give that step's checkpoint, or add --force"
        )
    if gap > GAP:
        text = (
            "the checkpoint's log-probabilities are not those of the trace: it is of another step, or the trainer used another "
            "temperature or precision; norms and shares are the checkpoint's"
        )
        event = Event(step, "checkpoint_mismatch", "warning", gap, GAP, "warn", text)
        writer.append("events", event.row())


def _measure(
    rows: StepRows, method: Method | None, check: Check
) -> tuple[Probed, dict[str, pa.Array], list[dict[str, Any]]]:
    """One step: what was measured, columns of its tokens and, where there are coefficients, rows of its updates."""
    frame, known = rows.frame, rows.known
    gap = float(np.nanmean(np.abs(rows.column(rows.stats.logp) - frame["logp"].to_numpy(dtype=float))))
    columns = {
        name: rows.column(getattr(rows.stats, name)) for name in STATISTICS if frame.loc[known, name].isna().all()
    }
    rotation: dict[str, float] = {}
    if method is not None:
        values, rotation = replay(rows, method)
        columns |= {name: rows.column(value) for name, value in values.items()}
        rows = replace(rows, frame=frame.assign(**{name: columns[name] for name in ("loss_coef", "update")}))
    found = score_norms(rows.policy.model, method="local", check=check, **rows.given)
    width = rows.rollouts.prompt_width
    local = found.values[:, width:]
    columns["score_norm_local"] = rows.column(local)
    coef = rows.frame["loss_coef"].to_numpy(dtype=float)[known]
    attributed = bool(rows.whole and np.isfinite(coef).all() and known.any())
    by_layer: dict[tuple[int, int], str] = {}
    updates: list[dict[str, Any]] = []
    if attributed:
        shares, updates = _shares(rows, check)
        columns["attribution"] = rows.column(shares)
        size = torch.nan_to_num(rows.tensor("loss_coef")).abs() * local.double().cpu()
        for r, p in zip(*map(Tensor.tolist, leading(size)), strict=True):
            by_layer[r, p] = json.dumps(rounded(layer_values(found.groups, (r, p + width))))
        updates[0] |= {name: value if math.isfinite(value) else None for name, value in rotation.items()}
    arrays = {name: pa.array(values, mask=np.isnan(values)) for name, values in columns.items()}
    if by_layer:
        texts = np.full(len(known), None, dtype=object)
        texts[known] = [by_layer.get(at) for at in zip(*map(Tensor.tolist, rows.at), strict=True)]
        arrays["score_norm_by_layer"] = pa.array(texts, pa.string())
    return Probed(rows.step, int(known.sum()), gap, attributed), arrays, updates


def _shares(rows: StepRows, check: Check) -> tuple[Tensor, list[dict[str, Any]]]:
    """(N, T) shares of ‖∇L‖² of each token's update, and the rows of the updates table."""
    model, mask = rows.policy.model, rows.rollouts.completion_mask
    shares = torch.zeros(mask.shape, dtype=torch.float64)
    parameters, groups = [p for p in model.parameters() if p.requires_grad], layer_groups(model)
    coef, update, ratio = (rows.tensor(name) for name in ("loss_coef", "update", "ratio"))
    update = torch.nan_to_num(update)
    made: list[dict[str, Any]] = []
    for index in update[rows.at].unique().tolist():
        used = (update == index) & mask.bool().cpu()
        part = torch.where(used, coef, 0.0)
        gradient = rows.gradient(part)
        size = norms(zip(parameters, gradient, strict=True), groups)
        ratios = ratio[used][ratio[used].isfinite()]
        made.append(
            {
                "step": rows.step,
                "update": int(index),
                "skipped": False,
                "grad_norm": size.total,
                "grad_norm_by_layer": [rounded(size.layers)],
                "tokens": int(used.sum()),
                "ratio_min": float(ratios.min()) if len(ratios) else None,
                "ratio_max": float(ratios.max()) if len(ratios) else None,
            }
        )
        if size.total > 0:
            along = attribute(model, coef=rows.wide(part), direction=gradient, check=check, **rows.given)
            along = along[:, rows.rollouts.prompt_width :].double().cpu()
            shares = torch.where(used, along / size.total**2, shares)
    return shares, made


def _replaced(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    """The table with other values in a column."""
    index = table.schema.get_field_index(name)
    return table.set_column(index, table.schema.field(index), values.cast(table.schema.field(index).type))


def _with_norms(steps: pa.Table, updates: dict[int, list[dict[str, Any]]]) -> pa.Table:
    """The steps with the gradient norms and rotations measured, where they have none."""
    for name in ("grad_norm", "gradient_rotation", "gradient_scale", "noise_rotation"):
        known = {step: [u[name] for u in made if u.get(name) is not None] for step, made in updates.items()}
        means = {step: math.fsum(values) / len(values) for step, values in known.items() if values}
        pairs = zip(steps["step"].to_pylist(), steps[name].to_pylist(), strict=True)
        found = [means.get(step) if old is None else old for step, old in pairs]
        steps = _replaced(steps, name, pa.array(found, pa.float64()))
    return steps

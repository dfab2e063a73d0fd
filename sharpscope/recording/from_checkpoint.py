"""Score norms and attribution of a recorded or imported trace, measured afterwards at a checkpoint."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from sharpscope.config.probes import Check
from sharpscope.errors import UserError
from sharpscope.policy import Policy, completions_of
from sharpscope.policy.scoring import Scorer
from sharpscope.probes import attribute, logp_gradient, score_norms
from sharpscope.recording.health import Event
from sharpscope.traces import TABLES, Run, RunLock, TraceWriter, create_run_dir, create_run_info, update_run_info
from sharpscope.traces.files import now

GAP, WRONG = 0.05, 0.5
"""Mean |ln π of the trace − ln π of the checkpoint| above which an event warns, and above which it is an error [nats]."""
MICROBATCH = 8192  # tokens of a forward pass


@dataclass(frozen=True)
class Probed:
    """Measurements at one step.

    Attributes:
        step: of the trace.
        tokens: number of tokens measured.
        logp_gap: mean |ln π of the trace − ln π of the checkpoint| [nats]; a checkpoint of another step has a large one.
        attributed: whether the trace has loss coefficients, so that shares could be computed.
    """

    step: int
    tokens: int
    logp_gap: float
    attributed: bool


def probe_trace(
    run: Run,
    policy: Policy,
    out: Path,
    *,
    steps: Sequence[int] | None = None,
    check: Check = "first",
    on_step: Callable[[Probed], None] | None = None,
    force: bool = False,
) -> list[Probed]:
    """Copy a trace with `score_norm_local` and, where it has `loss_coef`, `attribution` at a policy's weights.

    The gradient of an update is Σ c_t ∇log π_t at these weights; its mean norm over a step's updates becomes `grad_norm` where
    the trace has none. Everything is exact at the checkpoint, which is the policy of the training at one step only.

    Args:
        run: with `rollouts.token_ids`, which importers write.
        policy: the checkpoint, in float32 or float64.
        out: folder of the new run.
        steps: to measure; None: all that have tokens.
        check: when the probes compare themselves with autograd.
        on_step: called with what was measured at each step.
        force: accept a checkpoint whose log-probabilities differ from the trace's by more than WRONG.

    Raises:
        UserError: the trace has no token IDs of whole sequences, a step does not exist, an ID is not in the vocabulary, or the
            checkpoint does not fit.
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
    notes = [
        *(info.get("notes") or []),
        f"score norms and attribution measured afterwards, at the weights of {policy.source}",
    ]
    create_run_info(made, info | {"status": "running", "notes": notes})
    results: list[Probed] = []
    try:
        with RunLock(made), TraceWriter(made) as writer:
            steps_table = run.arrow("steps")
            norms: dict[int, float] = {}
            for step in run.token_steps:
                tokens = run.arrow("tokens", [step])
                if step in chosen:
                    measured, columns, norm = _measure(run, step, tokens, policy, check)
                    tokens = _with(tokens, columns)
                    results.append(measured)
                    if norm is not None:
                        norms[step] = norm
                    if measured.logp_gap > WRONG and not force:
                        raise UserError(
                            f"--model: its log-probabilities at step {step} differ from the recorded ones by {measured.logp_gap:.2g} nats a "
                            f"token (limit {WRONG:g}), so it is not the policy of that step; give that step's checkpoint, or add --force"
                        )
                    if measured.logp_gap > GAP:
                        text = (
                            "the checkpoint's log-probabilities are not those of the trace: it is of another step, or the trainer "
                            "used another temperature or precision; norms and shares are the checkpoint's"
                        )
                        event = Event(step, "checkpoint_mismatch", "warning", measured.logp_gap, GAP, "warn", text)
                        writer.append("events", {name: [value] for name, value in event.row().items()})
                    if on_step is not None:
                        on_step(measured)
                writer.append_table("tokens", tokens)
                writer.flush()
            for table in TABLES:
                if table not in ("tokens", "steps"):
                    writer.append_table(table, run.arrow(table))
            writer.append_table("steps", _with_norms(steps_table, norms))
    except BaseException:
        shutil.rmtree(made)  # it was new or empty
        raise
    _copy_tokenizer(run, made, policy)
    update_run_info(made, status=run.info.get("status", "finished"), finished=now())
    return results


def _measure(
    run: Run, step: int, tokens: pa.Table, policy: Policy, check: Check
) -> tuple[Probed, dict[str, np.ndarray], float | None]:
    """What was measured, columns (n,) for the step's token rows, and the mean norm of its updates' gradients."""
    rollouts = run.rollouts[run.rollouts["step"] == step].dropna(subset=["token_ids"]).sort_values("rollout")
    if rollouts.empty:
        raise UserError(
            f"step {step}: no completion has token IDs; leave the step out with --steps, or import the run again"
        )
    row_of = {int(rollout): row for row, rollout in enumerate(rollouts["rollout"])}
    ids = [json.loads(text) for text in rollouts["token_ids"]]
    cut = [int(length) for length in rollouts["prompt_tokens"]]
    size = policy.head.weight.shape[0]
    largest = max(max(row, default=0) for row in ids)
    if largest >= size:
        raise UserError(
            f"--model: token ID {largest} of step {step} is not among its {size}; give the model of this training"
        )
    frame = tokens.select(["rollout", "position", "token_id", "update", "logp", "loss_coef"]).to_pandas()
    row = np.array([row_of.get(int(rollout), -1) for rollout in frame["rollout"]])
    position = frame["position"].to_numpy()
    known = row >= 0
    for r, p, token in zip(row[known], position[known], frame["token_id"][known], strict=True):
        if cut[r] + p >= len(ids[r]) or ids[r][cut[r] + p] != token:
            raise UserError(f"step {step}: token_ids of a completion are not those of its tokens; import the run again")
    counted = [[False] * (len(one) - c) for one, c in zip(ids, cut, strict=True)]
    for r, p in zip(row[known], position[known], strict=True):
        counted[r][p] = True
    made = completions_of(
        [one[:c] for one, c in zip(ids, cut, strict=True)],
        [one[c:] for one, c in zip(ids, cut, strict=True)],
        counted,
        policy.device,
    )
    temperature = float((run.config.get("rollout") or {}).get("temperature", 1.0))
    scorer = Scorer(policy.model, temperature, MICROBATCH, share_prompt=False, compute=policy.compute)
    logp = scorer.statistics(made.with_reward(torch.zeros(len(ids)))).logp.double().cpu()
    at = (torch.tensor(row[known]), torch.tensor(position[known]))
    gap = float(np.abs(logp[at].numpy() - frame["logp"].to_numpy(dtype=float)[known]).mean())
    width = made.prompt_width
    mask = torch.cat([torch.zeros_like(made.input_ids[:, :width]), made.completion_mask], 1)
    norms = score_norms(
        policy.model,
        made.input_ids,
        mask,
        method="local",
        attention_mask=made.attention_mask,
        temperature=temperature,
        check=check,
    ).values[:, width:]
    columns = {"score_norm_local": _spread(norms, at, known)}
    coef = frame["loss_coef"].to_numpy(dtype=float)
    attributed = bool(np.isfinite(coef[known]).all() and known.any())
    norm = None
    if attributed:
        shares, norm = _shares(policy, made, mask, frame, row, known, temperature, check)
        columns["attribution"] = _spread(shares, at, known)
    return Probed(step, int(known.sum()), gap, attributed), columns, norm


def _shares(
    policy: Policy,
    made: Any,
    mask: Tensor,
    frame: Any,
    row: np.ndarray,
    known: np.ndarray,
    temperature: float,
    check: Check,
) -> tuple[Tensor, float]:
    """(N, T) shares of ‖∇L‖² of each token's update, and the mean of ‖∇L‖ over the updates."""
    width, device = made.prompt_width, made.input_ids.device
    shares = torch.zeros(made.completion_mask.shape, dtype=torch.float64)
    updates = frame["update"].fillna(0).to_numpy(dtype=int)
    sizes = []
    for update in np.unique(updates[known]):
        mine = known & (updates == update)
        at = (torch.tensor(row[mine]), torch.tensor(frame["position"].to_numpy()[mine]))
        coef = torch.zeros(mask.shape, dtype=next(policy.model.parameters()).dtype)
        coef[at[0], at[1] + width] = torch.tensor(frame["loss_coef"].to_numpy(dtype=float)[mine]).to(coef)
        coef = coef.to(device)
        given = (policy.model, made.input_ids, mask, coef)
        gradient = logp_gradient(*given, made.attention_mask, temperature, check=check)
        square = math.fsum(float(part.double().square().sum()) for part in gradient)
        sizes.append(math.sqrt(square))
        if square > 0:
            along = attribute(*given, gradient, made.attention_mask, temperature, check=check)
            shares[at] = along[:, width:].double().cpu()[at] / square
    return shares, math.fsum(sizes) / len(sizes)


def _spread(values: Tensor, at: tuple[Tensor, Tensor], known: np.ndarray) -> np.ndarray:
    """The values of the token rows that are known; NaN for the others."""
    column = np.full(len(known), np.nan)
    column[known] = values.detach().double().cpu()[at].numpy()
    return column


def _with(table: pa.Table, columns: dict[str, np.ndarray]) -> pa.Table:
    """The table with new columns in place of its own; NaN becomes null."""
    for name, values in columns.items():
        index = table.schema.get_field_index(name)
        array = pa.array(values, table.schema.field(index).type, mask=np.isnan(values))
        table = table.set_column(index, table.schema.field(index), array)
    return table


def _with_norms(steps: pa.Table, norms: dict[int, float]) -> pa.Table:
    """The steps with the gradient norms measured, where they have none."""
    old = steps["grad_norm"].to_pylist()
    new = [norms.get(step) if norm is None else norm for step, norm in zip(steps["step"].to_pylist(), old, strict=True)]
    return _with(steps, {"grad_norm": np.array([math.nan if value is None else value for value in new], dtype=float)})


def _copy_tokenizer(run: Run, made: Path, policy: Policy) -> None:
    """Keep the run's tokenizer; without one, the checkpoint's."""
    own = Path(run.path) / "tokenizer"
    if own.is_dir():
        shutil.copytree(own, made / "tokenizer")
    else:
        policy.tokenizer.save_pretrained(made / "tokenizer")

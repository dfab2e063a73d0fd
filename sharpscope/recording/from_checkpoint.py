"""Score norms, shares, layers and rotation of a recorded or imported trace, measured afterwards at a checkpoint."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.nn.functional import pad

from sharpscope.config.run import Check
from sharpscope.errors import UserError
from sharpscope.methods import reference_method
from sharpscope.methods.advantages import estimate_advantages
from sharpscope.methods.first_update import FirstUpdate, first_update
from sharpscope.methods.method import Method
from sharpscope.methods.plan import Plan, calibrate, prepare
from sharpscope.policy import Policy, Rollouts, TokenStats, completions_of
from sharpscope.policy.directions import noise_rotation, rotation
from sharpscope.policy.forward import Scorer
from sharpscope.recording.measurements import layer_values, leading
from sharpscope.recording.norms import layer_groups, norms
from sharpscope.recording.rows import rounded
from sharpscope.recording.saved_optimizer import load_adamw
from sharpscope.recording.step import step_tensors
from sharpscope.rules.judging import Event
from sharpscope.tokens import attribute, effects, logp_gradient, score_norms
from sharpscope.traces import (
    TABLES,
    Row,
    Run,
    RunLock,
    TraceWriter,
    create_run_dir,
    create_run_info,
    update_run_info,
)
from sharpscope.traces.files import now

if TYPE_CHECKING:
    import pandas as pd

MICROBATCH = 8192  # tokens of a forward pass
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
    effects: str  # outcomes on which the first update's tokens have effects, or why there are none


def probe_trace(
    run: Run,
    policy: Policy,
    out: Path,
    *,
    steps: Sequence[int] | None = None,
    method: Method | None = None,
    check: Check = "first",
    force: bool = False,
) -> list[Probed]:
    """Copy a trace to `out` with what its `steps` (None: all) would have had if they had been recorded with `policy`.

    Tokens get `score_norm_local`, statistics where they have none and, where there are coefficients (of the trace or of
    `method`), `attribution`; those of a step's first update also `effect_kl` and `effect_entropy`, if a trainer saved AdamW's state
    with the policy. Updates get the gradient's norms where the trace has no rows of them. The gradient is Σ c_t ∇log π_t, which
    a sample of a step's tokens does not give. With `force` the policy need not fit.

    Raises:
        UserError: the trace lacks token IDs, the step or what the method needs, or the checkpoint does not fit.
    """
    chosen = run.token_steps if steps is None else sorted(set(steps))
    for step in chosen:
        if step not in run.token_steps:
            raise UserError(
                f"--steps {step}: the trace has tokens at steps {', '.join(map(str, run.token_steps[:20]))}"
            )
    if run.rollouts["token_ids"].isna().all():
        raise UserError(
            f"--rollouts {run.path}: no token IDs of its prompts were recorded, so a model cannot read them; add `prompt_ids` to the "
            "imported records and import them again, or record the run with sharpscope's recorder"
        )
    made = create_run_dir(out)
    info = {key: value for key, value in run.info.items() if key not in ("name", "schema_version")}
    note = f"score norms and attribution measured afterwards, at the weights of {policy.source}"
    create_run_info(made, info | {"status": "running", "notes": [*(info.get("notes") or []), note]})
    results: list[Probed] = []
    updates: dict[int, list[Row]] = {}
    try:
        with RunLock(made), TraceWriter(made) as writer:
            for step in run.token_steps:
                tokens = run.arrow("tokens", [step])
                if step in chosen:
                    probed, columns, updates[step] = _measure(
                        step_rows(run, step, tokens, policy), method, check, run.updates
                    )
                    for name, values in columns.items():
                        tokens = _replaced(tokens, name, values)
                    results.append(probed)
                    _judge(probed, writer, force)
                writer.append_table("tokens", tokens)
                writer.flush()
            for table in TABLES:
                if table not in ("tokens", "steps"):
                    writer.append_table(table, run.arrow(table))
            known = set(run.updates["step"])
            for update in (
                update
                for step, of_step in updates.items()
                if step not in known
                for update in of_step
            ):
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
    rows: StepRows, method: Method | None, check: Check, recorded: pd.DataFrame
) -> tuple[Probed, dict[str, pa.Array], list[Row]]:
    """One step: what was measured, columns of its tokens and, where there are coefficients, rows of its updates."""
    frame, known = rows.frame, rows.known
    columns = {
        name: rows.column(getattr(rows.stats, name))
        for name in STATISTICS
        if frame.loc[known, name].isna().all()
    }
    rotation: dict[str, float] = {}
    if method is not None:
        values, rotation = replay(rows, method)
        columns |= {name: rows.column(value) for name, value in values.items()}
        rows = replace(
            rows, frame=frame.assign(**{name: columns[name] for name in ("loss_coef", "update")})
        )
    found = score_norms(rows.policy.model, method="local", check=check, **rows.given)
    width = rows.rollouts.prompt_width
    local = found.values[:, width:]
    columns["score_norm_local"] = rows.column(local)
    coef = rows.frame["loss_coef"].to_numpy(dtype=float)[known]
    attributed = bool(rows.whole and np.isfinite(coef).all() and known.any())
    by_layer: dict[tuple[int, int], str] = {}
    updates: list[Row] = []
    said = "no effects without shares"
    if attributed:
        shares, updates = _shares(rows, check)
        effects_found, said = _effects(rows, check, recorded[recorded["step"] == rows.step])
        columns |= effects_found
        columns["attribution"] = rows.column(shares)
        size = torch.nan_to_num(rows.tensor("loss_coef")).abs() * local.double().cpu()
        for r, p in zip(*map(Tensor.tolist, leading(size)), strict=True):
            by_layer[r, p] = json.dumps(rounded(layer_values(found.groups, (r, p + width))))
        updates[0] |= {
            name: value if math.isfinite(value) else None for name, value in rotation.items()
        }
    arrays = {name: pa.array(values, mask=np.isnan(values)) for name, values in columns.items()}
    if by_layer:
        texts = np.full(len(known), None, dtype=object)
        texts[known] = [by_layer.get(at) for at in zip(*map(Tensor.tolist, rows.at), strict=True)]
        arrays["score_norm_by_layer"] = pa.array(texts, pa.string())
    probed = Probed(rows.step, int(known.sum()), rows.gap, attributed, said)
    return probed, arrays, updates


def _shares(rows: StepRows, check: Check) -> tuple[Tensor, list[Row]]:
    """(N, T) shares of ‖∇L‖² of each token's update, and the rows of the updates table."""
    model = rows.policy.model
    mask = rows.rollouts.completion_mask
    shares = torch.zeros(mask.shape, dtype=torch.float64)
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = layer_groups(model)
    coef, update, ratio = (rows.tensor(name) for name in ("loss_coef", "update", "ratio"))
    update = torch.nan_to_num(update)
    made: list[Row] = []
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
            along = attribute(
                model, coef=rows.wide(part), direction=gradient, check=check, **rows.given
            )
            along = along[:, rows.rollouts.prompt_width :].double().cpu()
            shares = torch.where(used, along / size.total**2, shares)
    return shares, made


def _effects(
    rows: StepRows, check: Check, recorded: pd.DataFrame
) -> tuple[dict[str, np.ndarray], str]:
    """Columns effect_… of the first update's tokens, and what was done, in words; with the optimizer's state of the checkpoint.

    `recorded` are the step's rows of the updates table, which say whether it was clipped.
    """
    mask = rows.rollouts.completion_mask.bool().cpu()
    number = torch.nan_to_num(rows.tensor("update"))
    used = (number == number[rows.at].min()) & mask
    known = recorded[["grad_norm", "clip_factor"]].astype(float).to_numpy()
    norm, factor = known[0] if len(known) else (math.nan, math.nan)
    try:
        found = effects(
            rows.policy.model,
            coef=rows.wide(torch.where(used, rows.tensor("loss_coef"), 0.0)),
            optimizer=load_adamw(Path(rows.policy.source), rows.policy.model),
            outcome=("kl", "entropy"),
            max_grad_norm=norm * factor if factor < 1 else None,
            check=check,
            **rows.given,
        )
    except UserError as problem:
        return {}, f"no effects: {problem}"
    width = rows.rollouts.prompt_width
    columns = {
        f"effect_{name}": rows.column(torch.where(used, values[:, width:].cpu(), math.nan))
        for name, values in found.values.items()
    }
    parts = [f"effects on {name}" for name in found.values] + list(found.withheld.values())
    if not math.isfinite(factor):
        parts.append("as if nothing were clipped (the trace has no clip_factor)")
    return columns, ", ".join(parts)


def _replaced(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    """The table with other values in a column."""
    index = table.schema.get_field_index(name)
    return table.set_column(
        index, table.schema.field(index), values.cast(table.schema.field(index).type)
    )


def _with_norms(steps: pa.Table, updates: dict[int, list[dict[str, Any]]]) -> pa.Table:
    """The steps with the gradient norms and rotations measured, where they have none."""
    for name in ("grad_norm", "gradient_rotation", "gradient_scale", "noise_rotation"):
        known = {
            step: [u[name] for u in made if u.get(name) is not None]
            for step, made in updates.items()
        }
        means = {step: math.fsum(values) / len(values) for step, values in known.items() if values}
        pairs = zip(steps["step"].to_pylist(), steps[name].to_pylist(), strict=True)
        found = [means.get(step) if old is None else old for step, old in pairs]
        steps = _replaced(steps, name, pa.array(found, pa.float64()))
    return steps


# -- the completions of a step, and a method's loss on them ----------------------------------------------------------------


class ProbeArguments(TypedDict):
    """What every probe of tokens takes: (N, P+T) each."""

    input_ids: Tensor
    mask: Tensor
    attention_mask: Tensor
    temperature: float


@dataclass(frozen=True)
class StepRows:
    """A step's completions whose token IDs are known; N rows, P prompt and T completion positions."""

    step: int  # of the trace
    policy: Policy  # the checkpoint
    temperature: float  # of the log-probabilities
    rollouts: Rollouts  # with rewards, groups and the sampler's log-probabilities, NaN where they are not known
    frame: pd.DataFrame  # the step's token rows
    known: np.ndarray  # (tokens,) which of them belong to these completions
    at: tuple[Tensor, Tensor]  # their rows and positions

    @property
    def whole(self) -> bool:
        """Whether these are all tokens of the step, so that their gradient is that of the step."""
        return bool(self.known.all() and self.frame["row_probability"].isna().all())

    @property
    def gap(self) -> float:
        """Mean |ln π of the trace − ln π of the checkpoint| over the tokens [nats]."""
        return float(
            np.nanmean(
                np.abs(self.column(self.stats.logp) - self.frame["logp"].to_numpy(dtype=float))
            )
        )

    @cached_property
    def scorer(self) -> Scorer:
        """Of the checkpoint."""
        return Scorer(
            self.policy.model,
            self.temperature,
            MICROBATCH,
            share_prompt=False,
            compute=self.policy.compute,
        )

    @cached_property
    def stats(self) -> TokenStats:
        """(N, T) statistics of the tokens at the checkpoint."""
        return self.scorer.statistics(self.rollouts)

    @property
    def given(self) -> ProbeArguments:
        """Arguments of the probes: IDs, attention mask and the mask (N, P+T) of the trace's tokens, temperature."""
        return {
            "input_ids": self.rollouts.input_ids,
            "mask": pad(self.rollouts.completion_mask, (self.rollouts.prompt_width, 0)),
            "attention_mask": self.rollouts.attention_mask,
            "temperature": self.temperature,
        }

    def tensor(self, column: str) -> Tensor:
        """(N, T) float64 values of a column of the token rows; NaN where they are null and outside the mask."""
        made = torch.full(self.rollouts.completion_mask.shape, math.nan, dtype=torch.float64)
        made[self.at] = torch.tensor(
            self.frame[column].to_numpy(dtype=float, na_value=math.nan)[self.known]
        )
        return made

    def column(self, values: Tensor) -> np.ndarray:
        """(tokens,) values (N, T) of the token rows; NaN for those of other completions."""
        made = np.full(len(self.known), np.nan)
        made[self.known] = values.detach().double().cpu()[self.at].numpy()
        return made

    def gradient(self, coef: Tensor) -> list[Tensor]:
        """Σ c·∇log π for each trainable parameter, `coef` (N, T); 0 on tokens that are not of the trace."""
        return logp_gradient(self.policy.model, coef=self.wide(coef), **self.given)

    def wide(self, coef: Tensor) -> Tensor:
        """Coefficients (N, T) in the shape of the sequences, (N, P+T), in the model's dtype."""
        dtype = next(self.policy.model.parameters()).dtype
        made = torch.nan_to_num(coef).to(self.rollouts.input_ids.device, dtype)
        return pad(made, (self.rollouts.prompt_width, 0))


def step_rows(run: Run, step: int, tokens: pa.Table, policy: Policy) -> StepRows:
    """The completions of a step of a trace; UserError where a model cannot read them."""
    rollouts = (
        run.rollouts[run.rollouts["step"] == step]
        .dropna(subset=["token_ids"])
        .sort_values("rollout")
    )
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
    frame = tokens.to_pandas()
    row = np.array([row_of.get(int(rollout), -1) for rollout in frame["rollout"]])
    position = frame["position"].to_numpy()
    known = row >= 0
    counted = [[False] * (len(one) - c) for one, c in zip(ids, cut, strict=True)]
    for r, p, token in zip(row[known], position[known], frame["token_id"][known], strict=True):
        if cut[r] + p >= len(ids[r]) or ids[r][cut[r] + p] != token:
            raise UserError(
                f"step {step}: token_ids of a completion are not those of its tokens; import the run again"
            )
        counted[r][p] = True
    prompts = [one[:c] for one, c in zip(ids, cut, strict=True)]
    made = completions_of(
        prompts, [one[c:] for one, c in zip(ids, cut, strict=True)], counted, policy.device
    )
    reward = torch.tensor(
        rollouts["reward"].to_numpy(dtype=float, na_value=math.nan), device=policy.device
    )
    group = rollouts["group"].to_numpy(dtype=float, na_value=-1.0)
    if (group < 0).any():
        group = np.arange(len(group))
    whole = replace(made, group=torch.tensor(group.astype(int), device=policy.device)).with_reward(
        reward
    )
    recorded = frame["temperature"].dropna()
    if recorded.nunique() > 1:
        given = f"{recorded.min():g} to {recorded.max():g}"
        raise UserError(
            f"step {step}: has several temperatures ({given}), of which one can be measured; leave it out with --steps"
        )
    usual = float((run.config.get("rollout") or {}).get("temperature", 1.0))
    temperature = float(recorded.iloc[0]) if len(recorded) else usual
    at = (torch.tensor(row[known]), torch.tensor(position[known]))
    return StepRows(step, policy, temperature, whole, frame, known, at)


def replay(rows: StepRows, method: Method) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Coefficients, ratios and clipping of a step by a method, and how far it turns the gradient, at the checkpoint's weights.

    Columns of the tokens table, (N, T) each, and those of the updates table that compare the gradients. The ratio is to the
    recorded `logp`, the sampler's correction to `behavior_logp`. Advantages are the recorded ones, or else the method's.
    """
    _check_method(rows, method)
    rollouts = rows.rollouts
    stats = rows.stats
    mask = rows.rollouts.completion_mask
    whole = replace(rollouts, behavior_logp=rows.tensor("behavior_logp").to(stats.logp))
    advantage, old = (
        _advantage(rows, method).to(stats.logp.device),
        rows.tensor("logp").to(stats.logp),
    )
    reference = (
        torch.nan_to_num(rows.tensor("ref_logp")).to(stats.logp) if method.needs_reference else None
    )

    def of(one: Method) -> tuple[Plan, FirstUpdate]:
        """The first update of a method, calibrated on these rows."""
        tensors = step_tensors(whole, advantage, stats, torch.nan_to_num(old), 0.0, one)
        one = one.model_copy(update={"weight": calibrate(one.weight, tensors)})
        plan = prepare(one, tensors)
        made = first_update(one, plan, rollouts.group, mask.shape[1], stats.logp, reference)
        return plan, made

    plan, weighted = of(method)
    _, plain = of(reference_method(method))
    columns = {
        "loss_coef": weighted.coef,
        "kl_coef": weighted.kl_coef,
        "ratio": weighted.loss.ratio,
        "clipped": weighted.loss.clipped,
        "weight": plan.weight,
        "advantage": plan.advantage,
        "update": torch.zeros_like(weighted.coef),
    }
    return columns, _rotation(rows, weighted.coef, plain.coef)


def _rotation(rows: StepRows, weighted: Tensor, plain: Tensor) -> dict[str, float]:
    """Angle and ratio of the gradient to the reference objective's, and the angle of the noise, from two halves of the groups."""
    group = rows.rollouts.group
    groups = group.unique()
    parts = [torch.isin(group, half)[:, None] for half in (groups[::2], groups[1::2])]
    halves = [rows.gradient(torch.where(inside, plain, 0.0)) for inside in parts]
    turned = rotation(rows.gradient(weighted), [a + b for a, b in zip(*halves, strict=True)])
    noise = (
        noise_rotation(halves[0], halves[1], len(groups[::2]) / len(groups))
        if len(groups) > 1
        else math.nan
    )
    return {
        "gradient_rotation": turned.angle,
        "gradient_scale": turned.scale,
        "noise_rotation": noise,
    }


def _advantage(rows: StepRows, method: Method) -> Tensor:
    """(N, T) recorded advantages, 0 outside the mask; where none was recorded, those of the method from the rewards."""
    recorded = rows.tensor("advantage")
    mask = rows.rollouts.completion_mask.bool()
    if bool(recorded[mask.cpu()].isfinite().all()):
        return torch.nan_to_num(recorded)
    reward = rows.rollouts.reward.double()
    group = rows.rollouts.group
    if bool(reward.isnan().any()) or len(group.unique()) == len(group):
        raise UserError(
            f"step {rows.step}: has neither advantages nor rewards of groups, from which --method makes them"
        )
    made = estimate_advantages(
        method.advantage, reward, group, mask, logp=rows.stats.logp, collision=rows.stats.collision
    )
    return made[:, None].expand(mask.shape) if made.dim() == 1 else made


def _check_method(rows: StepRows, method: Method) -> None:
    """Refuse a method whose first update is not made of the tokens' coefficients, or needs what was not recorded."""
    known = rows.frame[rows.known]
    name = method.name or "method"
    if known["loss_coef"].notna().any():
        raise UserError(
            f"--method {name}: the files have coefficients of their own (loss_coef); leave --method out"
        )
    if not rows.whole:
        lacks = "has a sample of its tokens, or completions without token IDs"
        raise UserError(
            f"--method {name}: step {rows.step} {lacks}; leave the step out with --steps"
        )
    if (
        method.sharpness is not None
        or method.entropy is not None
        or method.pass_count > 1
        or method.needs_proxy
        or method.proximal is not None
        or getattr(method.tokens, "kind", "") == "curvature"
    ):
        raise UserError(
            f"--method {name}: its update is not Σ c ∇ log π of one pass over the tokens; give a method without SAM, entropy bonus, "
            "Lopti's passes, Lp-Reg, CAPO and an averaged policy"
        )
    for needed, column in (
        (method.needs_reference, "ref_logp"),
        (method.correction is not None, "behavior_logp"),
    ):
        if needed and known[column].isna().any():
            raise UserError(
                f"--method {name}: needs {column} of each token, which step {rows.step} lacks"
            )

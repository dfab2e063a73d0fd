"""The completions of a recorded step as tensors at a checkpoint, and what a method's loss does with their tokens there."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sharpscope.config.method import Method
from sharpscope.errors import UserError
from sharpscope.objective import (
    calibrate,
    estimate_advantages,
    policy_loss,
    prepare,
    reference_method,
    token_normalizer,
)
from sharpscope.policy import Policy, Rollouts, TokenStats, completions_of
from sharpscope.policy.forward import Scorer
from sharpscope.probes import logp_gradient, noise_rotation, rotation
from sharpscope.recording.step import step_tensors
from sharpscope.traces import Run

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

MICROBATCH = 8192  # tokens of a forward pass


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

    @cached_property
    def scorer(self) -> Scorer:
        """Of the checkpoint."""
        return Scorer(self.policy.model, self.temperature, MICROBATCH, share_prompt=False, compute=self.policy.compute)

    @cached_property
    def stats(self) -> TokenStats:
        """(N, T) statistics of the tokens at the checkpoint."""
        return self.scorer.statistics(self.rollouts)

    @property
    def given(self) -> dict[str, Any]:
        """Arguments of the probes: IDs, attention mask and the mask (N, P+T) of the trace's tokens, temperature."""
        made, width = self.rollouts, self.rollouts.prompt_width
        mask = torch.nn.functional.pad(made.completion_mask, (width, 0))
        arguments = {"input_ids": made.input_ids, "mask": mask, "attention_mask": made.attention_mask}
        return arguments | {"temperature": self.temperature}

    def tensor(self, column: str) -> Tensor:
        """(N, T) float64 values of a column of the token rows; NaN where they are null and outside the mask."""
        made = torch.full(self.rollouts.completion_mask.shape, math.nan, dtype=torch.float64)
        made[self.at] = torch.tensor(self.frame[column].to_numpy(dtype=float, na_value=math.nan)[self.known])
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
        return torch.nn.functional.pad(made, (self.rollouts.prompt_width, 0))


def step_rows(run: Run, step: int, tokens: pa.Table, policy: Policy) -> StepRows:
    """The completions of a step of a trace.

    Raises:
        UserError: none has token IDs, an ID is not in the vocabulary, IDs are not those of the token rows, or these have several
            temperatures.
    """
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
    frame = tokens.to_pandas()
    row = np.array([row_of.get(int(rollout), -1) for rollout in frame["rollout"]])
    position, known = frame["position"].to_numpy(), row >= 0
    counted = [[False] * (len(one) - c) for one, c in zip(ids, cut, strict=True)]
    for r, p, token in zip(row[known], position[known], frame["token_id"][known], strict=True):
        if cut[r] + p >= len(ids[r]) or ids[r][cut[r] + p] != token:
            raise UserError(f"step {step}: token_ids of a completion are not those of its tokens; import the run again")
        counted[r][p] = True
    prompts = [one[:c] for one, c in zip(ids, cut, strict=True)]
    made = completions_of(prompts, [one[c:] for one, c in zip(ids, cut, strict=True)], counted, policy.device)
    reward = torch.tensor(rollouts["reward"].to_numpy(dtype=float, na_value=math.nan), device=policy.device)
    group = rollouts["group"].to_numpy(dtype=float, na_value=-1.0)
    if (group < 0).any():
        group = np.arange(len(group))
    whole = replace(made, group=torch.tensor(group.astype(int), device=policy.device)).with_reward(reward)
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

    The denominator of the ratio is the recorded ln π (`logp`), of the sampler's correction `behavior_logp`. Advantages are the
    recorded ones, or else the method's from rewards and groups. A method's constants are calibrated on the step.

    Returns:
        Columns of the tokens table, (N, T) each, and those of the updates table that compare the gradients.

    Raises:
        UserError: the method needs values that were not recorded, or has terms beyond the tokens' coefficients.
    """
    _check_method(rows, method)
    rollouts, stats, mask = rows.rollouts, rows.stats, rows.rollouts.completion_mask
    whole = replace(rollouts, behavior_logp=rows.tensor("behavior_logp").to(stats.logp))
    advantage, old = _advantage(rows, method).to(stats.logp.device), rows.tensor("logp").to(stats.logp)
    reference = torch.nan_to_num(rows.tensor("ref_logp")).to(stats.logp) if method.needs_reference else None

    def first_update(one: Method) -> dict[str, Tensor]:
        tensors = step_tensors(whole, advantage, stats, torch.nan_to_num(old), 0.0, one)
        one = one.model_copy(update={"weight": calibrate(one.weight, tensors)})
        plan = prepare(one, tensors)
        logp = stats.logp.detach().clone().requires_grad_()
        normalizer = token_normalizer(one, mask, mask.shape[1], keep=plan.keep, group=rollouts.group, dtype=logp.dtype)
        out = policy_loss(one, plan, logp, normalizer, reference_logp=reference)
        kl = torch.zeros_like(logp)
        if out.divergence is not None:
            (kl,) = torch.autograd.grad(out.divergence, logp, retain_graph=True)
        (coef,) = torch.autograd.grad(out.loss, logp)
        made = {"loss_coef": coef, "kl_coef": kl, "ratio": out.ratio, "clipped": out.clipped, "weight": plan.weight}
        return made | {"advantage": plan.advantage, "update": torch.zeros_like(logp)}

    weighted, plain = first_update(method), first_update(reference_method(method))
    return weighted, _rotation(rows, weighted["loss_coef"], plain["loss_coef"])


def _rotation(rows: StepRows, weighted: Tensor, plain: Tensor) -> dict[str, float]:
    """Angle and ratio of the gradient to the reference objective's, and the angle of the noise, from two halves of the groups."""
    group = rows.rollouts.group
    groups = group.unique()
    parts = [torch.isin(group, half)[:, None] for half in (groups[::2], groups[1::2])]
    halves = [rows.gradient(torch.where(inside, plain, 0.0)) for inside in parts]
    turned = rotation(rows.gradient(weighted), [a + b for a, b in zip(*halves, strict=True)])
    noise = noise_rotation(halves[0], halves[1], len(groups[::2]) / len(groups)) if len(groups) > 1 else math.nan
    return {"gradient_rotation": turned.angle, "gradient_scale": turned.scale, "noise_rotation": noise}


def _advantage(rows: StepRows, method: Method) -> Tensor:
    """(N, T) recorded advantages, 0 outside the mask; where none was recorded, those of the method from the rewards."""
    recorded, mask = rows.tensor("advantage"), rows.rollouts.completion_mask.bool()
    if bool(recorded[mask.cpu()].isfinite().all()):
        return torch.nan_to_num(recorded)
    reward, group = rows.rollouts.reward.double(), rows.rollouts.group
    if bool(reward.isnan().any()) or len(group.unique()) == len(group):
        raise UserError(
            f"step {rows.step}: has neither advantages nor rewards of groups, from which --method makes them"
        )
    made = estimate_advantages(
        method.advantage, reward, group, mask, logp=rows.stats.logp, collision=rows.stats.collision
    )
    return made[:, None].expand(mask.shape) if made.dim() == 1 else made


def _check_method(rows: StepRows, method: Method) -> None:
    """Raise UserError if a method's first update is not made of the tokens' coefficients, or needs what was not recorded."""
    known: Any = rows.frame[rows.known]
    name = method.name or "method"
    if known["loss_coef"].notna().any():
        raise UserError(f"--method {name}: the files have coefficients of their own (loss_coef); leave --method out")
    if not rows.whole:
        lacks = "has a sample of its tokens, or completions without token IDs"
        raise UserError(f"--method {name}: step {rows.step} {lacks}; leave the step out with --steps")
    if (
        method.sharpness is not None
        or method.entropy is not None
        or method.pass_count > 1
        or method.needs_proxy
        or getattr(method.tokens, "kind", "") == "curvature"
    ):
        raise UserError(
            f"--method {name}: its update is not Σ c ∇ log π of one pass over the tokens; give a method without SAM, entropy bonus, "
            "Lopti's passes, Lp-Reg and CAPO"
        )
    sampler = method.correction is not None
    for needed, column, what in (
        (method.needs_reference, "ref_logp", "log-probabilities of the reference policy"),
        (sampler, "behavior_logp", "log-probabilities of the sampler"),
    ):
        if needed and known[column].isna().any():
            raise UserError(f"--method {name}: needs {what} ({column}), which step {rows.step} lacks")

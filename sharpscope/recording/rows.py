"""Rows of the traces, from the values of a step or of an evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from sharpscope.methods import Method
from sharpscope.methods.clips import PpoClip
from sharpscope.methods.plan import per_token, summarize_weights
from sharpscope.policy import Head, Rollouts, TokenStats
from sharpscope.recording.step import (
    OPTIONAL,
    SUMMARY,
    RolloutBatch,
    StepResult,
    StepTokens,
    UpdateResult,
)
from sharpscope.seeds import generator
from sharpscope.traces import Row

ROTATION = (
    "gradient_rotation",
    "gradient_scale",
    "update_rotation",
    "update_scale",
    "noise_rotation",
)
"""Columns of the steps and updates tables that compare updates with the reference objective's."""


def steps_row(
    step: int, batch: RolloutBatch, result: StepResult, method: Method, progress: float, lr: float
) -> dict[str, Any]:
    """The row of the steps table without its timing columns."""
    rollouts, tokens = batch.rollouts, result.tokens
    mask = rollouts.completion_mask.bool().cpu()
    used = mask & (tokens.update >= 0)
    done = [u for u in result.updates if not u.skipped]
    reward = rollouts.reward.double().cpu()
    counted = tokens.uses > 0
    uses = int(tokens.uses.sum())
    rotations = [_rotation_values(update) for update in result.updates]
    return {
        "step": step,
        "updates": len(done),
        "reward_mean": float(reward.mean()),
        "reward_std": float(reward.std()) if len(reward) > 1 else None,
        "accuracy": float(np.mean([r.correct for r in batch.rewards])),
        "accuracy_completed": accuracy_completed(
            [r.correct for r in batch.rewards], rollouts.truncated.cpu().numpy()
        ),
        "loss": _mean([u.loss for u in done]),
        "kl": _each(float(tokens.kl[counted].sum()), uses) if method.needs_reference else None,
        "entropy_mean": float(tokens.stats.entropy.cpu()[mask].double().mean())
        if mask.any()
        else None,
        "grad_norm": _mean([u.grad_norm for u in done]),
        "update_norm": _mean([u.update_norm for u in done]),
        "grad_clipped": _mean([float(u.clip_factor < 1) for u in done]),
        "kl_step": result.kl_step,
        "clip_fraction_low": _each(int(tokens.uses_low.sum()), uses),
        "clip_fraction_high": _each(int(tokens.uses_high.sum()), uses),
        **weight_columns(method, tokens, used, progress),
        **{
            name: _mean([value for row in rotations if (value := row[name]) is not None])
            for name in ROTATION
        },
        "zero_std_groups": round(batch.zero_variance_share * len(batch.examples)),
        "completion_length_mean": float(rollouts.completion_mask.sum(dim=1).double().mean()),
        "truncated_fraction": float(rollouts.truncated.double().mean()),
        "tokens": int(mask.sum()),
        "redrawn_groups": batch.redrawn_groups,
        "lr": lr if done else None,
    }


def update_columns(step: int, updates: Sequence[UpdateResult]) -> Row:
    """Columns of the updates table, a row for each update of the step; NaN becomes null except in loss and norms."""
    columns: Row = {
        "step": step,
        "update": np.arange(len(updates)),
        "skipped": np.array([u.skipped for u in updates], dtype=bool),
    }
    for name in ("loss", "grad_norm", "clip_factor", "update_norm"):
        columns[name] = np.array([getattr(u, name) for u in updates], dtype=float)
    for name in ("lr", "entropy", "batch_share"):
        columns[name] = [_finite(getattr(u, name)) for u in updates]
    for at, name in enumerate(("grad_norm_by_layer", "update_norm_by_layer")):
        columns[name] = [None if u.layers is None else rounded(u.layers[at]) for u in updates]
    rotations = [_rotation_values(u) for u in updates]
    columns |= {name: [row[name] for row in rotations] for name in ROTATION}
    for name in SUMMARY:
        columns[name] = [None if u.summary is None else _finite(u.summary[name]) for u in updates]
    return columns


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    """The values with six digits, for a column of JSON."""
    return {name: float(f"{value:.6g}") for name, value in values.items()}


def unweighted_gradient(tokens: StepTokens, used: Tensor) -> Tensor:
    """(N, T) |c|/w: how strongly the loss pulls a token before its weight; 0 outside `used` (N, T).

    Where w = 0, |A|·r times the completion's mean of |c|/(w·|A|·r), which is the loss's normalizer; 0 where the ratio is clipped.
    """
    coef = tokens.loss_coef.double().abs()
    weight = tokens.weight.double()
    plain = (tokens.advantage.double() * tokens.ratio.double()).abs()
    known = used & (weight > 0)
    acting = known & (coef > 0) & (plain > 0)
    # (N,)
    scale = torch.where(acting, coef / (weight * plain), 0.0).sum(1) / acting.sum(1).clamp(min=1)
    without = torch.where(tokens.clipped == 0, plain * scale[:, None], 0.0)
    unweighted = torch.where(known, coef / torch.where(known, weight, 1.0), without)
    return torch.where(used, unweighted, 0.0)


def weight_columns(
    method: Method, tokens: StepTokens, used: Tensor, progress: float
) -> dict[str, float | None]:
    """The weight columns of the steps table, over the tokens (N, T) that an update used; null without any."""
    mass = torch.where(
        used, unweighted_gradient(tokens, used) * tokens.stats.logit_grad_norm.cpu().double(), 0.0
    )
    plain = summarize_weights(method.weight, tokens.weight, used, progress=progress)
    massed = summarize_weights(method.weight, tokens.weight, used, progress=progress, mass=mass)
    names = ("mean", "saturation_low", "saturation_high")
    return {
        "weight_mean": _finite(plain.mean),
        **{f"weight_{name}_gradient": _finite(getattr(massed, name)) for name in names},
    }


def _rotation_values(update: UpdateResult) -> dict[str, float | None]:
    """The rotation columns of one update; null where it was not measured, or undefined."""
    rotation = update.rotation
    if rotation is None:
        return dict.fromkeys(ROTATION)
    values = [
        value
        for turned in (rotation.gradient, rotation.update)
        for value in (turned.angle, turned.scale)
    ]
    return {
        name: _finite(value)
        for name, value in zip(ROTATION, [*values, rotation.noise], strict=True)
    }


def clipped_weight_share(method: Method, weight: Tensor, advantage: Tensor, mask: Tensor) -> float:
    """Share of the loss tokens whose weight (N, T) alone is beyond PPO's clip; NaN if it is in none."""
    if method.weight_on != "ratio" or not isinstance(method.clip, PpoClip):
        return math.nan
    killed = method.clip.without_gradient(weight, per_token(advantage, weight).to(weight))
    return float((killed[mask] != 0).double().mean())


def rollout_columns(step: int, batch: RolloutBatch) -> Row:
    """Columns of the rollouts table."""
    rollouts = batch.rollouts
    return {
        "step": step,
        "rollout": np.arange(len(batch.rewards)),
        "group": rollouts.group.cpu(),
        "prompt": [batch.examples[group].prompt for group in rollouts.group.tolist()],
        "completion": list(rollouts.texts),
        "reward": rollouts.reward.cpu(),
        "reward_parts": [dict(reward.parts) for reward in batch.rewards],
        "correct": np.array([reward.correct for reward in batch.rewards]),
        "advantage": completion_advantage(batch.advantage, rollouts.completion_mask).cpu(),
        "length": rollouts.completion_mask.sum(dim=1).int().cpu(),
        "truncated": rollouts.truncated.cpu(),
    }


def id_columns(rollouts: Rollouts) -> Row:
    """token_ids and prompt_tokens of the rollouts table: what a checkpoint needs to read the completions again."""
    rows = zip(rollouts.input_ids.cpu(), rollouts.attention_mask.bool().cpu(), strict=True)
    ids = [json.dumps(row[seen].tolist()) for row, seen in rows]
    return {"token_ids": ids, "prompt_tokens": rollouts.prompt_lengths.int().cpu()}


def completion_advantage(advantage: Tensor, mask: Tensor) -> Tensor:
    """(N,) one advantage for each completion: of those for each token (N, T), the mean over the loss tokens `mask` (N, T)."""
    if advantage.dim() == 1:
        return advantage
    inside = mask.bool().to(advantage.device)
    return torch.where(inside, advantage, 0.0).sum(1) / inside.sum(1).clamp(min=1)


def head_grad_norm(stats: TokenStats, head: Head | None, temperature: float) -> Tensor | None:
    """(N, T) norm of ∇ ln π by the output layer, ‖p − e_y‖·‖h‖·scale/T; None without one or under a soft cap."""
    if head is None or head.soft_cap is not None:
        return None
    length = stats.hidden_norm if head.bias is None else (stats.hidden_norm.square() + 1).sqrt()
    return stats.logit_grad_norm * length * (head.scale / temperature)


def written_groups(rollouts: Rollouts, limit: int, seed: int, step: int) -> tuple[Tensor, float]:
    """(N,) whether a completion's tokens are written, about `limit` of at least two groups, and the share of groups."""
    group = rollouts.group.cpu()
    tokens = int(rollouts.completion_mask.sum())
    groups = group.unique()
    count = len(groups) if tokens <= limit else max(2, round(len(groups) * limit / tokens))
    if count >= len(groups):
        return torch.ones(len(group), dtype=torch.bool), 1.0
    order = torch.randperm(len(groups), generator=generator(seed, "written", step))
    return torch.isin(group, groups[order[:count]]), count / len(groups)


def token_columns(
    step: int,
    batch: RolloutBatch,
    result: StepResult,
    probed: dict[str, Tensor],
    head: Head | None,
    temperature: float,
    by_layer: Mapping[tuple[int, int], Mapping[str, float]] | None = None,
    written: tuple[Tensor, float] | None = None,
) -> Row:
    """Columns of the tokens table, a row for each loss token.

    `probed` has its probe columns (N, T), NaN where not measured; `by_layer` the norms by layer of (rollout, position); `written`
    is what `written_groups` drew, None for all.
    """
    rollouts, tokens = batch.rollouts, result.tokens
    mask = rollouts.completion_mask.bool().cpu()
    if written is not None:
        mask = mask & written[0][:, None]
    rollout, position = torch.nonzero(mask, as_tuple=True)

    def flat(values: Tensor) -> np.ndarray:
        """(tokens,) of the rows that are written."""
        return values.detach().cpu()[mask].numpy()

    used = flat(tokens.update) >= 0
    stats = tokens.stats
    columns: Row = {
        "step": step,
        "rollout": rollout.numpy(),
        "position": position.numpy(),
        "update": np.ma.masked_array(flat(tokens.update), mask=~used),
        "token_id": flat(rollouts.completion_ids),
        "row_probability": None if written is None or written[1] == 1 else written[1],
        "behavior_logp": flat(rollouts.behavior_logp),
        "sampler_logp": None if rollouts.sampler_logp is None else flat(rollouts.sampler_logp),
    }
    for name in ("logp", "logit", "entropy", "collision", "polarity", "logit_grad_norm"):
        columns[name] = flat(getattr(stats, name))
    head_norm = head_grad_norm(stats, head, temperature)
    columns["head_grad_norm"] = None if head_norm is None else flat(head_norm)
    recorded = ("advantage", "ratio", "weight", "clipped", "loss_coef")
    for name in (*recorded, "correction") if result.corrected else recorded:
        columns[name] = np.ma.masked_array(flat(getattr(tokens, name)), mask=~used)
    for name, values in [*((name, getattr(tokens, name)) for name in OPTIONAL), *probed.items()]:
        column = flat(values)
        columns[name] = np.ma.masked_array(column, mask=np.isnan(column))
    if by_layer:
        places = zip(rollout.tolist(), position.tolist(), strict=True)
        columns["score_norm_by_layer"] = [
            rounded(by_layer[at]) if at in by_layer else None for at in places
        ]
    return columns


def accuracy_completed(correct: ArrayLike, truncated: ArrayLike) -> float | None:
    """Accuracy among the completions that ended by themselves; None if all were cut."""
    ended = ~np.asarray(truncated, dtype=bool)
    return float(np.asarray(correct, dtype=bool)[ended].mean()) if ended.any() else None


def evaluation_row(
    step: int,
    task: str,
    split: str,
    level: str,
    correct: np.ndarray,
    rewards: Sequence[float],
    temperature: float,
    truncated: np.ndarray | None = None,
) -> Row:
    """A row of the eval table, of booleans (prompts, k): whether a completion is correct, and was `truncated` if that is known."""
    share = correct.mean(axis=1)
    k = correct.shape[1]
    each = prompt_pass_at_k(correct, k)
    row = {
        "step": step,
        "task": task,
        "split": split,
        "level": level,
        "temperature": temperature,
        "k": k,
    }
    return row | {
        "n": len(share),
        "accuracy": float(share.mean()),
        "std_error": standard_error(share),
        "pass_at_k": float(each.mean()),
        "pass_std_error": standard_error(each),
        "truncated": None if truncated is None else float(truncated.mean()),
        "accuracy_completed": None if truncated is None else accuracy_completed(correct, truncated),
        "reward_mean": float(np.mean(rewards)),
    }


def prompt_pass_at_k(correct: np.ndarray, k: int) -> np.ndarray:
    """(prompts,) unbiased pass@k (arXiv 2107.03374), 1 − C(n−c, k)/C(n, k) with c of a prompt's n ≥ k completions correct."""
    n = correct.shape[1]
    # 1 − Π_{i=n−c+1..n} (1 − k/i), which never overflows
    missed = [
        np.prod(1.0 - k / np.arange(n - c + 1, n + 1)) if n - c >= k else 0.0
        for c in correct.sum(axis=1)
    ]
    return 1.0 - np.array(missed)


def standard_error(values: np.ndarray) -> float | None:
    """Standard error of the mean of `values`, one for each prompt; None for a single prompt."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def _each(total: float, uses: int) -> float | None:
    """`total` for each token use; null without any."""
    return total / uses if uses else None

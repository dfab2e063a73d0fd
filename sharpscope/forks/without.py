"""A step of a run made again with and without its leading tokens, from the same state.

The leading tokens are those with the largest |share| of ‖∇L‖², c·⟨∇log π, ∇L⟩/‖∇L‖² of their update. Without them, their
coefficients c = ∂L/∂log π are 0 in every update of the step; a control leaves out as many other tokens, drawn at random.

A step of one of our runs is made again from the nearest checkpoint before it, one that was recorded in another trainer from the
trainer's checkpoint with its AdamW state.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharpscope.config import ForkSpec, RunConfig
from sharpscope.config.run import PolicySpec, ProbesSpec
from sharpscope.errors import UserError
from sharpscope.forks.experiment import (
    FixedRollouts,
    Reading,
    greedy_success,
    heldout_order,
    outcome_rows,
)
from sharpscope.forks.start import Snapshot, Start, Tell, as_recorded, resolve
from sharpscope.policy import Policy, Rollouts, load_policy
from sharpscope.policy.forward import Scorer
from sharpscope.recording.from_checkpoint import WRONG, step_rows
from sharpscope.recording.norms import clip_factor, gradient_norms, layer_groups, update_norms
from sharpscope.recording.probe_sets import Drawer
from sharpscope.recording.run_folder import set_threads
from sharpscope.recording.step import PendingUpdate, UpdateResult
from sharpscope.seeds import derive, generator
from sharpscope.settings import validate
from sharpscope.surface import Drawn, find_radius, limited_surface, sharpness
from sharpscope.tasks import Task, make_task
from sharpscope.tokens import attribute
from sharpscope.traces import Run, RunLock, TraceWriter, load_run, update_run_info
from sharpscope.training.checkpoint import checkpoints, damage, step_of

ALL = "all tokens"
GRADIENT, UPDATE = "layer_gradient:", "layer_update:"
"""Prefixes of outcomes: norms of gradient and update of one group of parameters, mean over the step's updates."""
NORM_GAP = 0.05
"""Relative difference of the first gradient's norm from the recorded one from which a line says so."""
Places = list[tuple[int, int]]
"""Tokens of a step: (row, position)."""
Observe = Callable[[PendingUpdate], None]
"""Sees an update between its gradient and the optimizer's step."""


def without_tokens(
    run: Path | str,
    step: int,
    top: int = 12,
    *,
    model: str | None = None,
    task: str | None = None,
    overrides: Sequence[str] = (),
    on_progress: Tell | None = None,
    **settings: Any,
) -> tuple[Run, str]:
    """Make a step of a run again with all tokens, without its `top` leading ones, and without as many others.

    All start from the same weights, optimizer state and rollouts: those of the checkpoint after the step before, or of the nearest
    earlier one, from which the steps between are made again. Rows go to the run's table `forks`.

    A run that was recorded in another trainer needs `model`, its checkpoint before the step with AdamW's state (`optimizer.pt`);
    `task` has the held-out prompts that measure its accuracy. `settings`: `prompts` and `samples` of `ForkSpec`.
    Returns the run with the rows, and the name of the fork.
    """
    tell = on_progress or (lambda text: None)
    loaded = load_run(run)
    if step not in set(loaded.steps["step"]):
        last = int(loaded.steps["step"].max()) if len(loaded.steps) else 0
        raise UserError(f"--step {step}: the run has steps 1 to {last}")
    spec: ForkSpec = validate(ForkSpec, {**settings, "warm_up": 0, "batches": 1})
    kept = {"step": step, "top": top, "model": model, "task": task}
    kept |= spec.model_dump(mode="json", include={"prompts", "samples"})
    name = hashlib.sha256(json.dumps(["without", kept, list(overrides)]).encode()).hexdigest()[:8]
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
        again = run_step(config, Path(run), step, spec, tell)
    again.restore()
    start = again.measure()
    tell("leading tokens")
    leading, shares, others, made = again.leading(top)
    rows: list[dict[str, Any]] = []
    for arm, places in {
        ALL: [],
        f"without top {top}": leading,
        f"without {top} others": others,
    }.items():
        if places:
            left_out = torch.zeros(again.rollouts.completion_mask.shape, dtype=torch.bool)
            left_out[tuple(torch.tensor(places).T)] = True
            made = again.update(left_out, None)
        readings = again.measure() | update_readings(made)
        common = {"step": again.step - 1, "fork": name, "batch": 0, "arm": arm, "reference": ALL}
        common |= {"comparison": "step", "scale": 1.0}
        rows += outcome_rows(common, readings, start, not any(update.problem for update in made))
        tell(f"{arm}: measured")
    again.restore()
    tokens = [
        {"rollout": r, "position": p, "share": share}
        for (r, p), share in zip(leading, shares, strict=True)
    ]
    with RunLock(loaded.path):
        with TraceWriter(loaded.path) as writer:
            writer.append("forks", {key: [row[key] for row in rows] for key in rows[0]})
        forks = dict(load_run(run).info.get("forks") or {})
        update_run_info(loaded.path, forks=forks | {name: {**kept, "tokens": tokens}})
    return load_run(run), name


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


@dataclass
class StepAgain:
    """A step of a run that can be made again from its state, and what is measured of the present weights."""

    step: int
    scorer: Scorer
    rollouts: Rollouts
    temperature: float
    seed: int
    update: Callable[[Tensor | None, Observe | None], Sequence[UpdateResult]]
    """Restores the state and makes the step without the tokens (N, T) marked; the model keeps its weights."""
    restore: Callable[[], None]  # puts the state back
    held_out: Callable[[], tuple[Drawn, Tensor]] | None
    """Draws completions of held-out prompts: sampled ones, and the greedy answers' success; None: there are no prompts."""
    probes: ProbesSpec
    fixed: FixedRollouts | None = None
    """Completions on whose tokens entropy and KL are measured; None: those that `held_out` draws at the state."""
    rho: float = math.nan  # of the sharpness, of moderate saturation at the state
    before: dict[str, Tensor] | None = None  # accuracy of each prompt at the state, by outcome

    def measure(self) -> dict[str, Reading]:
        """Entropy and KL at fixed completions; with held-out prompts also the accuracy and the sharpness on new completions of them.

        The first measurement is that of the state.
        """
        found, first = {}, self.before is None
        before = self.before = self.before or {}
        if self.held_out is not None:
            drawn, greedy = self.held_out()
            present = FixedRollouts.scored(drawn, self.scorer)
            self.fixed = self.fixed or present
            _, prompt = drawn.rollouts.group.cpu().unique(return_inverse=True)
            sums = torch.zeros(len(greedy), dtype=torch.float64).index_add_(
                0, prompt, drawn.correct.double().cpu()
            )
            # (prompts,)
            correct = {
                "accuracy_greedy": greedy,
                "accuracy": sums / torch.bincount(prompt),
            }
            for name, values in correct.items():
                change = values - before.setdefault(name, values)
                found[name] = Reading(
                    float(values.mean()), float(change.std()) / math.sqrt(len(change))
                )
            objective = present.failure_objective(self.temperature)
            with limited_surface(self.scorer.model, objective, self.probes) as surface:
                self.rho = find_radius(surface).rho if first else self.rho
                if math.isfinite(self.rho):
                    rise = sharpness(surface, None, self.rho, "sam", at=surface.gradient())
                    found |= {
                        "sam_sharpness": Reading(rise.value),
                        "saturation": Reading(rise.saturation),
                    }
        fixed = self.fixed
        assert fixed is not None
        stats = self.scorer.statistics(fixed.rollouts)
        return {
            "entropy": Reading(fixed.entropy(stats)),
            "kl": Reading(fixed.kl(stats.logp)),
        } | found

    def leading(self, top: int) -> tuple[Places, list[float], Places, Sequence[UpdateResult]]:
        """The `top` tokens with the largest |share| of the step, their shares, as many others, and the updates, which are made."""
        rollouts, model, width = self.rollouts, self.scorer.model, self.rollouts.prompt_width
        shares = torch.full(rollouts.completion_mask.shape, math.nan, dtype=torch.float64)
        parameters, observed = [p for p in model.parameters() if p.requires_grad], []

        def observe(update: PendingUpdate) -> None:
            observed.append(update.index)
            if not update.grad_norm > 0:
                return
            part = rollouts.rows(update.rows)
            gradient = [
                torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
                for p in parameters
            ]
            coef = F.pad(update.loss_coef.to(part.input_ids.device), (width, 0)).to(
                gradient[0].dtype
            )
            given = (
                part.input_ids,
                (coef != 0).long(),
                coef,
                gradient,
                part.attention_mask,
                self.temperature,
            )
            found = attribute(model, *given)[:, width:].double().cpu() / update.grad_norm**2
            first = update.first_use & shares[update.rows].isnan()
            shares[update.rows] = torch.where(first, found, shares[update.rows])

        made = self.update(None, observe)
        size = shares.abs().nan_to_num(0.0).flatten()
        order = size.argsort(descending=True, stable=True)
        order = order[size[order] > 0]
        if len(order) < 2 * top:
            some = f"only {len(order)} tokens of step {self.step} have a part in its gradient"
            raise UserError(f"--without-tokens top:{top}: {some}; give at most {len(order) // 2}")
        rest = order[top:][
            torch.randperm(len(order) - top, generator=generator(self.seed, "without", self.step))[
                :top
            ]
        ]
        leading, others = (
            [divmod(int(one), shares.shape[1]) for one in chosen] for chosen in (order[:top], rest)
        )
        return (
            leading,
            [float(shares[place]) / max(len(observed), 1) for place in leading],
            others,
            made,
        )


def drawn_by(
    config: RunConfig, policy: Policy, task: Task, spec: ForkSpec, seed: int
) -> Callable[[], tuple[Drawn, Tensor]]:
    """Draws of the present policy for `StepAgain`, with the same prompts and random numbers each time."""
    drawer, examples = Drawer(config, policy, task), heldout_order(config, task).take(spec.prompts)

    def draw() -> tuple[Drawn, Tensor]:
        greedy = greedy_success(policy, task, examples, config.rollout)
        return drawer(examples, spec.samples, seed), greedy

    return draw


def run_step(config: RunConfig, run: Path, step: int, spec: ForkSpec, tell: Tell) -> StepAgain:
    """Step `step` of one of our runs, from the nearest checkpoint before it; the steps between are made again."""
    found = {step_of(folder): folder for folder in checkpoints(run) if damage(folder) is None}
    nearest = max((at for at in found if at < step), default=0)
    start = Start(config, {"own": config.method}, found.get(nearest), calibrating=1)
    if nearest + 1 < step:
        tell(
            f"the nearest checkpoint is of step {nearest}: steps {nearest + 1} to {step - 1} are made again"
        )
    start.advance(step - 1 - nearest, tell)
    rollouts = start.rollouts(start.methods["own"], 0).rollouts
    if as_recorded(run, step, rollouts.texts) is False:
        tell(
            f"the completions of step {step} are not those that the run recorded: it ran on another machine or version"
        )
    return StepAgain(
        step,
        start.scorer,
        rollouts,
        config.rollout.temperature,
        config.seed,
        lambda without, observe: (
            start.update("own", 0, without=without, before_step=observe).updates
        ),
        start.snapshot.restore,
        drawn_by(
            config,
            start.policy,
            start.task,
            spec,
            derive(config.seed, "fork heldout", start.step, 0),
        ),
        config.probes,
    )


def trainer_step(
    run: Run, step: int, checkpoint: str, config: RunConfig | None, spec: ForkSpec, tell: Tell
) -> StepAgain:
    """Step `step` of a recorded run from the checkpoint before it: gradients are Σ c·∇log π with the recorded coefficients."""
    policy = load_policy(PolicySpec(model=checkpoint))
    if step not in run.token_steps or run.rollouts["token_ids"].isna().all():
        raise UserError(
            f"--step {step}: has no tokens with IDs; record the run again with recording.tokens_every=1"
        )
    rows = step_rows(run, step, run.arrow("tokens", [step]), policy)
    if rows.frame["row_probability"].notna().any():
        raise UserError(
            f"--step {step}: has a sample of its tokens; record the run with more recording.token_rows"
        )
    if rows.gap > WRONG:
        raise UserError(
            f"--model {checkpoint}: its log-probabilities differ from those recorded before step {step} by {rows.gap:.2g} nats a token "
            f"(limit {WRONG:g}); give the checkpoint that was saved after step {step - 1}"
        )
    parameters, groups = (
        [p for p in policy.model.parameters() if p.requires_grad],
        layer_groups(policy.model),
    )
    optimizer = load_adamw(Path(checkpoint), policy.model)
    snapshot = Snapshot(policy.model, optimizer)
    updates = run.updates[run.updates["step"] == step].sort_values("update").to_dict("records")
    first_use, coef = rows.tensor("update"), torch.nan_to_num(rows.tensor("loss_coef"))
    again = run.uses[run.uses["step"] == step]
    row_of = dict(
        zip(rows.frame["rollout"][rows.known].astype(int), rows.at[0].tolist(), strict=True)
    )
    coefs = []  # (N, T) of each update
    for recorded in updates:
        values = torch.where(first_use == recorded["update"], coef, 0.0)
        for use in again[again["update"] == recorded["update"]].to_dict("records"):
            values[row_of[int(use["rollout"])], int(use["position"])] += float(use["loss_coef"])
        coefs.append(values)

    def update(without: Tensor | None, observe: Observe | None) -> Sequence[UpdateResult]:
        snapshot.restore()
        made: list[UpdateResult] = []
        for recorded, values in zip(updates, coefs, strict=True):
            coef = values if without is None else values.masked_fill(without, 0.0)
            for parameter, part in zip(parameters, rows.gradient(coef), strict=True):
                parameter.grad = part
            norm = gradient_norms(parameters, groups)
            if observe is not None:
                if not made and abs(norm.total / recorded["grad_norm"] - 1) > NORM_GAP:
                    was = f"{norm.total:.3g}, the recorded one {recorded['grad_norm']:.3g}"
                    tell(f"the gradient's norm at the checkpoint is {was}")
                number, every = int(recorded["update"]), torch.arange(len(values))
                observe(PendingUpdate(number, every, first_use == number, coef, norm.total))
            clipped = float(recorded["clip_factor"])
            factor = clip_factor(
                norm.total, recorded["grad_norm"] * clipped if clipped < 1 else None
            )
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)
            for group in optimizer.param_groups:
                group["lr"] = float(recorded["lr"])
            optimizer.step()
            moved = update_norms(optimizer, groups)
            norms = (norm.total, norm.total, moved.total, factor)
            made.append(UpdateResult(math.nan, *norms, False, layers=(norm.layers, moved.layers)))
        return made

    draw = None
    if config is not None:
        draw = drawn_by(
            config, policy, make_task(config.task), spec, derive(config.seed, "fork heldout", step)
        )
    fixed = FixedRollouts(rows.rollouts, torch.zeros(len(rows.rollouts)), rows.stats)
    made = (update, snapshot.restore, draw, ProbesSpec(), fixed)
    return StepAgain(step, rows.scorer, rows.rollouts, rows.temperature, int(run.seed or 0), *made)


def load_adamw(folder: Path, model: nn.Module) -> torch.optim.AdamW:
    """AdamW over a model's trainable parameters with the state that a trainer saved.

    Trainers order parameters by groups (with and without weight decay); each parameter, in the model's order, is the next of the
    one group whose next moment has its shape.
    """
    path = folder / "optimizer.pt"
    if not path.is_file():
        raise UserError(
            f"--model {folder}: has no {path.name}; give a checkpoint with the optimizer's state"
        )
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    groups, moments = state["param_groups"], state["state"]
    waiting = [list(group["params"]) for group in groups]
    chosen: list[list[Tensor]] = [[] for _ in groups]
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        shapes = [moments.get(left[0], {}).get("exp_avg") if left else None for left in waiting]
        fits = [
            at
            for at, moment in enumerate(shapes)
            if getattr(moment, "shape", None) == parameter.shape
        ]
        if len(fits) != 1:
            raise UserError(
                f"--model {path}: is not AdamW's state of this model; its moments do not fit {name}"
            )
        waiting[fits[0]].pop(0)
        chosen[fits[0]].append(parameter)
    if any(waiting):
        raise UserError(f"--model {path}: has moments of more parameters than the model trains")
    made = [
        {"params": some, "weight_decay": one["weight_decay"]}
        for some, one in zip(chosen, groups, strict=True)
    ]
    first = groups[0]
    optimizer = torch.optim.AdamW(
        made, lr=first["lr"], betas=tuple(first["betas"]), eps=first["eps"]
    )
    optimizer.load_state_dict(
        {"state": moments, "param_groups": [{**g, "fused": None} for g in groups]}
    )
    return optimizer

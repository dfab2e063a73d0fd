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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from sharpscope.policy.guard import guarded
from sharpscope.recording.from_checkpoint import WRONG, step_rows
from sharpscope.recording.norms import clip_factor, gradient_norms, layer_groups, update_norms
from sharpscope.recording.probe_sets import Drawer
from sharpscope.recording.run_folder import set_threads
from sharpscope.recording.step import PendingUpdate, UpdateResult
from sharpscope.seeds import derive, generator
from sharpscope.settings import validate
from sharpscope.surface import Drawn, find_radius, limited_surface, sharpness
from sharpscope.tasks import Task, make_task
from sharpscope.tokens import Clip, Outcome, attribute
from sharpscope.tokens.optimizer_steps import ComingStep
from sharpscope.tokens.outcomes import Prepared
from sharpscope.tokens.rows import make_rows
from sharpscope.tokens.structure import structure_of
from sharpscope.traces import Run, RunLock, TraceWriter, load_run, update_run_info
from sharpscope.training.checkpoint import checkpoints, damage, step_of

ALL = "all tokens"
GRADIENT, UPDATE = "layer_gradient:", "layer_update:"
"""Prefixes of outcomes: norms of gradient and update of one group of parameters, mean over the step's updates."""
NORM_GAP = 0.05
"""Relative difference of the first gradient's norm from the recorded one from which a line says so."""
RANKINGS = ("effect", "share")
SUBSETS = 8
"""Parts of the prompts on which an outcome is measured for its noise."""
Observe = Callable[[PendingUpdate], None]
"""Sees an update between its gradient and the optimizer's step."""


@dataclass(frozen=True)
class TokenSet:
    """Tokens of a step that are left out, as they are named: `top:12`, `prompt:3`, `completion:17` or `file:tokens.csv`."""

    kind: str
    value: str

    @classmethod
    def parse(cls, text: str) -> TokenSet:
        """Check what the user wrote."""
        kind, _, value = text.partition(":")
        known = ("top", "prompt", "completion", "file")
        number = value.isdecimal() and (kind != "top" or int(value) > 0)
        if kind not in known or not (number if kind != "file" else Path(value).is_file()):
            raise UserError(
                f"--without {text}: give top:12, prompt:3 (its group in the step), completion:17 (its row), or file:PATH of a CSV with "
                "columns rollout, position and, if it has several steps, step"
            )
        return cls(kind, value)

    def __str__(self) -> str:
        return f"{self.kind}:{self.value}" if self.kind == "file" else f"{self.kind} {self.value}"

    def chosen(self, step: int, rollouts: Rollouts, score: Tensor | None) -> Tensor:
        """(N, T) bool, the tokens of a step; `score` ranks those of `top`."""
        chosen = torch.zeros(rollouts.completion_mask.shape, dtype=torch.bool)
        if self.kind == "top":
            assert score is not None
            size, count = score.abs().nan_to_num(0.0).flatten(), int(self.value)
            order = size.argsort(descending=True, stable=True)
            some = int((size > 0).sum())
            if some < 2 * count:
                raise UserError(
                    f"--without top:{count}: only {some} tokens of step {step} have a part in its gradient; give at most {some // 2}"
                )
            chosen.view(-1)[order[:count]] = True
        elif self.kind == "file":
            table = pd.read_csv(self.value)
            if "step" in table:
                table = table[table["step"] == step]
            if not {"rollout", "position"} <= set(table):
                raise UserError(f"--without {self}: needs the columns rollout and position")
            inside = table["rollout"].between(0, chosen.shape[0] - 1) & table["position"].between(
                0, chosen.shape[1] - 1
            )
            if not bool(inside.all()):
                first = table[~inside].iloc[0]
                raise UserError(
                    f"--without {self}: step {step} has no token at rollout {first['rollout']}, position {first['position']}"
                )
            chosen[table["rollout"].to_list(), table["position"].to_list()] = True
        else:
            labels = rollouts.group.cpu()
            if self.kind == "completion":
                labels = torch.arange(len(labels))
            if not bool((labels == int(self.value)).any()):
                raise UserError(
                    f"--without {self}: step {step} has the numbers 0 to {int(labels.max())}"
                )
            chosen[labels == int(self.value)] = True
        return chosen & rollouts.completion_mask.bool().cpu()


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
    **settings: Any,
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
    spec: ForkSpec = validate(ForkSpec, {**settings, "warm_up": 0, "batches": 1})
    kept = {"step": step, "to": to, "sets": list(sets), "by": by, "on": on, "model": model}
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
    loaded: Run, step: int, to: int | None, sets: Sequence[TokenSet], by: str, model: str | None
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

    rows: list[dict[str, Any]]
    tokens: list[dict[str, float]]
    predictions: list[dict[str, Any]]


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
    before, scores = again.values(), dict[str, Tensor]()
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
    values: dict[str, dict[str, list[float]]] = {}
    for arm, given in arms.items():
        chosen = given
        if isinstance(given, TokenSet) and again.to == again.step:
            chosen = given.chosen(again.step, again.rollouts, None)
        if chosen is not None:
            made = again.update(chosen, None)
        readings = again.measure() | update_readings(made)
        common = {"step": again.step - 1, "fork": name, "batch": 0, "arm": arm, "reference": ALL}
        common |= {"comparison": "step", "scale": 1.0}
        sound = not any(update.problem for update in made)
        found.rows += outcome_rows(common, readings, start, sound)
        values[arm] = again.values()
        for outcome in again.prepared if arm != ALL else ():
            whole, part = values[ALL][outcome], values[arm][outcome]
            changes = [b - a for a, b in zip(whole[1:], part[1:], strict=True)]
            numbers = {
                "measured": part[0] - whole[0],
                "step_change": whole[0] - before[outcome][0],
                "std_error": _std_error(changes),
            }
            if isinstance(chosen, Tensor) and scores:
                numbers["predicted"] = -float(scores[outcome][chosen].sum())
            known = {key: value for key, value in numbers.items() if math.isfinite(value)}
            found.predictions.append({"arm": arm, "outcome": outcome, **known})
        tell(f"{arm}: measured")
    return found


def _std_error(changes: Sequence[float]) -> float:
    """Standard error of the mean of parts of equal size; NaN for fewer than two."""
    if len(changes) < 2:
        return math.nan
    return float(pd.Series(changes).std()) / math.sqrt(len(changes))


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


@dataclass
class StepAgain:
    """A step of a run, or several, that can be made again from its state, and what is measured of the present weights."""

    step: int
    scorer: Scorer
    rollouts: Rollouts  # of the first step
    temperature: float
    seed: int
    optimizer: torch.optim.Optimizer
    update: Callable[[Tensor | TokenSet | None, Observe | None], Sequence[UpdateResult]]
    """Restores the state and makes the step without the tokens (N, T) marked, several steps without the tokens of a set; the model keeps
    its weights."""
    restore: Callable[[], None]  # puts the state back
    held_out: Callable[[], tuple[Drawn, Tensor]] | None
    """Draws completions of held-out prompts: sampled ones, and the greedy answers' success; None: there are no prompts."""
    probes: ProbesSpec
    to: int  # the last step that is made
    fixed: FixedRollouts | None = None
    """Completions on whose tokens entropy and KL are measured; None: those that `held_out` draws at the state."""
    rho: float = math.nan  # of the sharpness, of moderate saturation at the state
    before: dict[str, Tensor] | None = None  # accuracy of each prompt at the state, by outcome
    prepared: dict[str, list[Prepared]] = field(default_factory=dict)
    """Outcomes whose change is predicted, each on all of its prompts and on parts of them."""

    def prepare(self) -> None:
        """Fix the outcomes at the state, after `measure`."""
        of_step: tuple[Rollouts, Tensor | None] = (self.rollouts, None)
        drawn = {"kl": of_step, "entropy": of_step}
        if self.held_out is not None and self.fixed is not None:
            drawn["heldout"] = (self.fixed.rollouts, self.fixed.success)
            if math.isfinite(self.rho):
                drawn["sharpness"] = drawn["heldout"]
        with guarded(self.scorer.model):
            for kind, (rollouts, success) in drawn.items():
                _, prompt = rollouts.group.cpu().unique(return_inverse=True)
                parts = [torch.ones_like(prompt, dtype=torch.bool)]
                # a sharpness depends on the number of prompts
                if kind != "sharpness" and int(prompt.max()) + 1 >= SUBSETS:
                    parts += [prompt % SUBSETS == number for number in range(SUBSETS)]
                self.prepared[kind] = [
                    self._prepared(kind, rollouts.rows(part.nonzero()[:, 0]), success, part)
                    for part in parts
                ]

    def _prepared(
        self, kind: str, rollouts: Rollouts, success: Tensor | None, part: Tensor
    ) -> Prepared:
        """An outcome on the tokens of some rollouts."""
        model = self.scorer.model
        mask = F.pad(rollouts.completion_mask, (rollouts.prompt_width, 0))
        given = (rollouts.input_ids, mask, rollouts.attention_mask, self.temperature)
        outcome: dict[str, Any] = {"kind": kind, "input_ids": given[0], "mask": given[1]}
        if success is not None:
            outcome["reward"] = success[part.to(success.device)]
        if kind == "sharpness":
            outcome["radius"] = self.rho
        rows = make_rows(model, *given)
        return Prepared(
            kind, Outcome(**outcome), model, structure_of(model), rows, self.temperature
        )

    def values(self) -> dict[str, list[float]]:
        """The prepared outcomes at the present weights, each of all prompts and of its parts."""
        with guarded(self.scorer.model):
            return {name: [one.value() for one in parts] for name, parts in self.prepared.items()}

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

    def scores(self) -> tuple[dict[str, Tensor], Sequence[UpdateResult]]:
        """Effects on the prepared outcomes and `share` (N, T), sums over the updates, and the updates, which are made."""
        rollouts, model, width = self.rollouts, self.scorer.model, self.rollouts.prompt_width
        parameters = [p for p in model.parameters() if p.requires_grad]
        updates = self.update(None, None)
        with guarded(model):
            q = {name: parts[0].gradient()[1] for name, parts in self.prepared.items()}
        shape = rollouts.completion_mask.shape
        scores = {name: torch.zeros(shape, dtype=torch.float64) for name in (*q, "share")}

        def observe(update: PendingUpdate) -> None:
            if update.clips is None:
                raise UserError(
                    "--without: the method gives the optimizer another gradient than the loss's (method.sharpness)"
                )
            if not update.grad_norm > 0:
                return
            part = rollouts.rows(update.rows)
            gradient = [
                torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
                for p in parameters
            ]
            coming = ComingStep(self.optimizer, parameters, gradient, update.clips)
            coef = F.pad(update.loss_coef.to(part.input_ids.device), (width, 0)).to(gradient[0])
            scale = len(updates) * update.grad_norm**2
            directions = {name: coming.pull(vector) for name, vector in q.items()}
            directions["share"] = [g / scale for g in gradient]
            for name, direction in directions.items():
                given = (part.input_ids, (coef != 0).long(), coef, direction, part.attention_mask)
                found = attribute(model, *given, self.temperature)[:, width:]
                scores[name][update.rows] += found.double().cpu()

        return scores, self.update(None, observe)

    def others(self, leading: Tensor, score: Tensor) -> Tensor:
        """As many tokens as the leading ones (N, T), drawn from the others with a score."""
        rest = ((score.nan_to_num(0.0) != 0) & ~leading).flatten().nonzero()[:, 0]
        order = torch.randperm(len(rest), generator=generator(self.seed, "without", self.step))
        chosen = torch.zeros_like(leading)
        chosen.view(-1)[rest[order[: int(leading.sum())]]] = True
        return chosen


def drawn_by(
    config: RunConfig, policy: Policy, task: Task, spec: ForkSpec, seed: int
) -> Callable[[], tuple[Drawn, Tensor]]:
    """Draws of the present policy for `StepAgain`, with the same prompts and random numbers each time."""
    drawer, examples = Drawer(config, policy, task), heldout_order(config, task).take(spec.prompts)

    def draw() -> tuple[Drawn, Tensor]:
        greedy = greedy_success(policy, task, examples, config.rollout)
        return drawer(examples, spec.samples, seed), greedy

    return draw


def run_step(
    config: RunConfig, run: Path, step: int, spec: ForkSpec, tell: Tell, *, to: int | None = None
) -> StepAgain:
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

    def update(
        without: Tensor | TokenSet | None, observe: Observe | None
    ) -> Sequence[UpdateResult]:
        if to is None or to == step:
            assert not isinstance(without, TokenSet)
            return start.update("own", 0, without=without, before_step=observe).updates
        start.restore()
        chosen = without if isinstance(without, TokenSet) else None
        start.make_steps(
            to + 1 - step,
            tell,
            None if chosen is None else lambda at, drawn: chosen.chosen(at, drawn, None),
        )
        return []

    seed = derive(config.seed, "fork heldout", start.step, 0)
    return StepAgain(
        step=step,
        scorer=start.scorer,
        rollouts=rollouts,
        temperature=config.rollout.temperature,
        seed=config.seed,
        optimizer=start.optimizer,
        update=update,
        restore=start.snapshot.restore,
        held_out=drawn_by(config, start.policy, start.task, spec, seed),
        probes=config.probes,
        to=step if to is None else to,
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

    def update(
        without: Tensor | TokenSet | None, observe: Observe | None
    ) -> Sequence[UpdateResult]:
        snapshot.restore()
        assert not isinstance(without, TokenSet)
        made: list[UpdateResult] = []
        for recorded, values in zip(updates, coefs, strict=True):
            coef = values if without is None else values.masked_fill(without, 0.0)
            for parameter, part in zip(parameters, rows.gradient(coef), strict=True):
                parameter.grad = part
            norm = gradient_norms(parameters, groups)
            clipped = float(recorded["clip_factor"])
            limit = recorded["grad_norm"] * clipped if clipped < 1 else None
            if observe is not None:
                if not made and abs(norm.total / recorded["grad_norm"] - 1) > NORM_GAP:
                    was = f"{norm.total:.3g}, the recorded one {recorded['grad_norm']:.3g}"
                    tell(f"the gradient's norm at the checkpoint is {was}")
                number, every = int(recorded["update"]), torch.arange(len(values))
                clips = () if limit is None else (Clip(limit=limit),)
                observe(PendingUpdate(number, every, first_use == number, coef, norm.total, clips))
            factor = clip_factor(norm.total, limit)
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)
            for group in optimizer.param_groups:
                group["lr"] = float(recorded["lr"])
            optimizer.step()
            moved = update_norms(optimizer, groups)
            made.append(
                UpdateResult(
                    grad_norm=norm.total,
                    plain_norm=norm.total,
                    update_norm=moved.total,
                    clip_factor=factor,
                    layers=(norm.layers, moved.layers),
                )
            )
        return made

    draw = None
    if config is not None:
        draw = drawn_by(
            config, policy, make_task(config.task), spec, derive(config.seed, "fork heldout", step)
        )
    fixed = FixedRollouts(rows.rollouts, torch.zeros(len(rows.rollouts)), rows.stats)
    return StepAgain(
        step=step,
        scorer=rows.scorer,
        rollouts=rows.rollouts,
        temperature=rows.temperature,
        seed=int(run.seed or 0),
        optimizer=optimizer,
        update=update,
        restore=snapshot.restore,
        held_out=draw,
        probes=ProbesSpec(),
        to=step,
        fixed=fixed,
    )


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

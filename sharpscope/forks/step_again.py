"""A step of a run that is made again from its state, with and without some tokens, and what is measured of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sharpscope.config import ForkSpec, RunConfig
from sharpscope.config.run import ProbesSpec
from sharpscope.errors import UserError
from sharpscope.forks.experiment import FixedRollouts, Reading, greedy_success, heldout_order
from sharpscope.forks.start import Start, Tell, as_recorded
from sharpscope.forks.token_sets import TokenSet
from sharpscope.memory import require_memory
from sharpscope.policy import Policy, Rollouts
from sharpscope.policy.forward import Scorer
from sharpscope.policy.guard import guarded
from sharpscope.recording.probe_sets import Drawer
from sharpscope.recording.step import PendingUpdate, UpdateResult
from sharpscope.seeds import derive, generator
from sharpscope.surface import Drawn, find_radius, limited_surface, sharpness
from sharpscope.tasks import Task
from sharpscope.tokens import Outcome, attribute
from sharpscope.tokens.optimizer_steps import ComingStep
from sharpscope.tokens.outcomes import Prepared
from sharpscope.tokens.rows import make_rows
from sharpscope.tokens.structure import structure_of
from sharpscope.training.checkpoint import checkpoints, damage, step_of

SUBSETS = 8
"""Parts of the prompts on which an outcome is measured for its noise."""
COPIES = 42
"""Copies of the weights that a step takes at its peak: 21 GB for SmolLM2, the second derivative of its sharpness most of all."""
MEMORY_ADVICE = "probe fewer prompts (--set fork.prompts=16), or use a machine with more"
Observe = Callable[[PendingUpdate], None]
"""Sees an update between its gradient and the optimizer's step."""


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

    def require_memory(self) -> None:
        """Check that there is room for the gradients of the outcomes, before anything is measured.

        Raises:
            UserError: less is free than a step of this model has taken.
        """
        weights = list(self.scorer.model.parameters())
        needed = COPIES * sum(p.numel() * p.element_size() for p in weights)
        require_memory(needed, weights[0].device, "leaving tokens out of a step", MEMORY_ADVICE)

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
                if int(prompt.max()) + 1 >= SUBSETS:
                    eighths = [prompt % SUBSETS == number for number in range(SUBSETS)]
                    # a sharpness depends on the number of prompts
                    parts += [~part for part in eighths] if kind == "sharpness" else eighths
                self.prepared[kind] = [
                    self._prepared(kind, rollouts.rows(part.nonzero()[:, 0]), success, part)
                    for part in parts
                ]

    def _prepared(
        self,
        kind: str,
        rollouts: Rollouts,
        success: Tensor | None,
        part: Tensor,
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
            kind,
            Outcome(**outcome),
            model,
            structure_of(model),
            rows,
            self.temperature,
        )

    def values(self) -> dict[str, list[float]]:
        """The prepared outcomes at the present weights, each of all prompts and of its parts."""
        with guarded(self.scorer.model):
            return {name: [one.value() for one in parts] for name, parts in self.prepared.items()}

    def measure(self) -> dict[str, Reading]:
        """Entropy and KL at fixed completions; with held-out prompts also the accuracy and the sharpness on new completions of them.

        The first measurement is that of the state.
        """
        found = {}
        first = self.before is None
        before = self.before = self.before or {}
        if self.held_out is not None:
            drawn, greedy = self.held_out()
            present = FixedRollouts.scored(drawn, self.scorer)
            self.fixed = self.fixed or present
            _, prompt = drawn.rollouts.group.cpu().unique(return_inverse=True)
            sums = torch.zeros(len(greedy), dtype=torch.float64).index_add_(
                0,
                prompt,
                drawn.correct.double().cpu(),
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
        scores = dict[str, Tensor]()
        for name, parts in self.prepared.items():
            # an outcome's gradient is as large as the model, so that there is one at a time
            self.update(None, None)
            with guarded(self.scorer.model):
                q = parts[0].gradient()[1]
            scores[name], _ = self._along(q)
        scores["share"], updates = self._along(None)
        return scores, updates

    def _along(self, q: Sequence[Tensor] | None) -> tuple[Tensor, Sequence[UpdateResult]]:
        """Effects of the tokens (N, T) on an outcome with gradient q, None: their shares of ‖∇L‖²; and the updates, which are made."""
        rollouts = self.rollouts
        model = self.scorer.model
        width = rollouts.prompt_width
        parameters = [p for p in model.parameters() if p.requires_grad]
        sums = torch.zeros(rollouts.completion_mask.shape, dtype=torch.float64)

        def observe(update: PendingUpdate) -> None:
            """Add the values of an update's tokens."""
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
            if q is None:
                direction = [g / update.grad_norm**2 for g in gradient]
            else:
                direction = ComingStep(self.optimizer, parameters, gradient, update.clips).pull(q)
            coef = F.pad(update.loss_coef.to(part.input_ids.device), (width, 0)).to(gradient[0])
            given = (part.input_ids, (coef != 0).long(), coef, direction, part.attention_mask)
            found = attribute(model, *given, self.temperature)[:, width:]
            sums[update.rows] += found.double().cpu()

        updates = self.update(None, observe)
        return sums / len(updates) if q is None else sums, updates

    def others(self, leading: Tensor, score: Tensor) -> Tensor:
        """As many tokens as the leading ones (N, T), drawn from the others with a score."""
        rest = ((score.nan_to_num(0.0) != 0) & ~leading).flatten().nonzero()[:, 0]
        order = torch.randperm(len(rest), generator=generator(self.seed, "without", self.step))
        chosen = torch.zeros_like(leading)
        chosen.view(-1)[rest[order[: int(leading.sum())]]] = True
        return chosen


def drawn_by(
    config: RunConfig,
    policy: Policy,
    task: Task,
    spec: ForkSpec,
    seed: int,
) -> Callable[[], tuple[Drawn, Tensor]]:
    """Draws of the present policy for `StepAgain`, with the same prompts and random numbers each time."""
    drawer, examples = Drawer(config, policy, task), heldout_order(config, task).take(spec.prompts)

    def draw() -> tuple[Drawn, Tensor]:
        """Completions of the present policy, and the success of its greedy answers."""
        greedy = greedy_success(policy, task, examples, config.rollout)
        return drawer(examples, spec.samples, seed), greedy

    return draw


def run_step(
    config: RunConfig,
    run: Path,
    step: int,
    spec: ForkSpec,
    tell: Tell,
    *,
    to: int | None = None,
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
        """See `StepAgain.update`."""
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

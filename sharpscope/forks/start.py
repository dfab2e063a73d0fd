"""One state of a run from which arms make their updates: policy, optimizer, data order and calibrated methods."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from sharpscope.config import ForkSpec, Method, RunConfig, TokenWeight, without_none_kinds
from sharpscope.config.token_weights import UniformWeight
from sharpscope.errors import UserError
from sharpscope.forks.outcomes import FixedRollouts
from sharpscope.forks.state import Snapshot
from sharpscope.objective import EntropyControl, calibrate
from sharpscope.policy import Policy, Rollouts, RolloutSpec, TokenStats
from sharpscope.policy.scoring import Scorer
from sharpscope.recording import Drawer, PendingUpdate, RolloutBatch, StepHealth, StepResult, step_tensors
from sharpscope.seeds import derive
from sharpscope.tasks import Example, Reward, Task
from sharpscope.training import AppliedUpdate, DataOrder, Learner
from sharpscope.training.checkpoint import PROXIMAL, Progress, restore
from sharpscope.training.rollouts import draw_group, draw_rollouts
from sharpscope.training.setup import (
    build_optimizer,
    learning_rate,
    load_start,
    make_learner,
    positive_learning_rate,
    reference_policy,
    set_learning_rate,
)


@dataclass
class SharedDraws:
    """Completions and statistics of the starting policy, computed once and shared by all arms of a batch."""

    rollouts: dict[tuple[int, ...], tuple[Rollouts, list[Reward]]] = field(default_factory=dict)
    stats: dict[int, tuple[Tensor, TokenStats]] = field(default_factory=dict)  # by the identity of the tensor

    def draw(
        self, policy: Policy, task: Task, examples: list[Example], spec: RolloutSpec, seed: int
    ) -> tuple[Rollouts, list[Reward]]:
        """As `draw_group`; the same examples and seed are drawn once."""
        key = (seed, *map(id, examples))
        if key not in self.rollouts:
            self.rollouts[key] = draw_group(policy, task, examples, spec, seed)
        return self.rollouts[key]

    def statistics(self, scorer: Scorer, rollouts: Rollouts) -> TokenStats:
        """As `Scorer.statistics`; the same rollouts are scored once."""
        ids = rollouts.input_ids
        if id(ids) not in self.stats:
            self.stats[id(ids)] = (ids, scorer.statistics(rollouts))
        return self.stats[id(ids)][1]


@dataclass(frozen=True)
class ArmUpdate:
    """What an arm did: its first gradient, the change of the weights, and the results of its steps."""

    gradient: list[Tensor] | None  # ∇L of the first update; None if it was not finite
    applied: list[Tensor] | None  # the same after SAM or a penalty, before clipping: what the optimizer gets
    displacement: list[Tensor]  # θ − θ₀
    results: tuple[StepResult, ...]

    @property
    def sound(self) -> bool:
        """Whether every gradient and all weights were finite."""
        return not any(update.problem for result in self.results for update in result.updates)


class Start:
    """A state of a run that is restored before every arm.

    Attributes:
        config: of the run.
        step: of the state; 0 is before training.
        lr: learning rate of an arm's first step.
        policy, task: of the run.
        scorer: of the policy.
        snapshot: the state.
        methods: calibrated method of each arm.

    Args:
        config: of the run.
        spec: of the fork.
        arms: method of each arm, as configured.
        checkpoint: folder of a checkpoint of the run; None for its initial policy.
        task: of the run.
    """

    def __init__(
        self, config: RunConfig, spec: ForkSpec, arms: Mapping[str, Method], checkpoint: Path | None, task: Task
    ) -> None:
        self.config, self.spec, self.task = config, spec, task
        self.policy = load_start(config, checkpoint)
        model = self.policy.model
        self.methods = {name: method.with_preset("auto", config.default_preset) for name, method in arms.items()}
        needs_reference = any(method.needs_reference for method in arms.values())
        self.reference = reference_policy(config, self.policy) if needs_reference else None
        self.proximal = self._proximal(arms, checkpoint)
        self.optimizer = build_optimizer(model, config.optimizer)
        examples = task.splits()["train"]
        self.step, self._cursor = 0, 0
        self._entropy: dict[str, float | None] = {}  # state of the run's entropy bonus
        if checkpoint is not None:
            kept = self.proximal if (checkpoint / PROXIMAL).exists() else None
            progress = restore(checkpoint, self.policy, self.optimizer, kept)
            self.step, self._cursor = progress.step, progress.cursor
            self._entropy = dict(progress.entropy_control)
            self._keep_calibration(arms, progress)
        self.lr = positive_learning_rate(config, min(self.step + 1, config.steps))
        self._order = DataOrder(examples, config.seed)
        self._heldout = DataOrder(self._all_heldout(), derive(config.seed, "fork held-out"))
        self._learner = make_learner(config, self.policy, self.optimizer)
        self.scorer = self._learner.scorer
        self.drawer = Drawer(config, self.policy, task)
        device = torch.device("cpu") if spec.offload else None
        self.snapshot = Snapshot(model, self.optimizer, self.proximal, device)
        self._calibrate()

    # -- loading -----------------------------------------------------------------------------------------------------

    def _proximal(self, arms: Mapping[str, Method], checkpoint: Path | None) -> nn.Module | None:
        needing = [name for name, method in arms.items() if method.proximal is not None]
        if not needing:
            return None
        if checkpoint is not None and not (checkpoint / PROXIMAL).exists():
            raise UserError(
                f"--methods {needing[0]}: its average of past weights is not in the checkpoint {checkpoint.name}, whose run "
                "used another method; fork this method from --checkpoint 0 or from a run of its own"
            )
        return copy.deepcopy(self.policy.model).eval()

    def _keep_calibration(self, arms: Mapping[str, Method], progress: Progress) -> None:
        """Give the run's own method the constants that the run has calibrated."""
        for name, method in arms.items():
            if method.unlabeled == self.config.method.unlabeled:
                self.methods[name] = Method.model_validate(without_none_kinds(progress.method))

    def _all_heldout(self) -> list[Example]:
        examples = self.task.splits().get("heldout", [])
        if not examples:
            raise UserError(f"task.kind = '{self.config.task.kind}': has no split 'heldout' to measure outcomes on")
        return examples

    def _calibrate(self) -> None:
        """Fill the constants of token weights that are to be calibrated, on the first batch of this state.

        As in a run, percentiles over the gradient wait for a batch that has one. If none has, the weights are 1.
        """
        shared = SharedDraws()
        for name, method in self.methods.items():
            if method.weight.needs_calibration:
                weights = (self._calibrated(method, batch, shared) for batch in range(self.spec.batches))
                weight = next((weight for weight in weights if weight is not None), UniformWeight())
                self.methods[name] = method.model_copy(update={"weight": weight})
        self.snapshot.restore()

    def _calibrated(self, method: Method, batch: int, shared: SharedDraws) -> TokenWeight | None:
        """The method's weight, calibrated on a batch; None if it needs a gradient, and the batch has none."""
        drawn = self.rollouts(method, batch, shared=shared)
        stats = shared.statistics(self.scorer, drawn.rollouts)
        tensors = step_tensors(drawn.rollouts, drawn.advantage, stats, stats.logp, self.progress(0), method)
        if method.weight.needs_gradient and not bool(tensors.mass.any()):
            return None
        return calibrate(method.weight, tensors)

    # -- positions in the run ----------------------------------------------------------------------------------------

    def progress(self, number: int) -> float:
        """Share of the run done at the step `number` of an arm, from 0; a run's last value after its end."""
        return (min(self.step + 1 + number, self.config.steps) - 1) / max(self.config.steps - 1, 1)

    def _seed_step(self, batch: int, number: int) -> int:
        """The step whose seeds are used; those of batch 0 are the run's own."""
        return self.step + 1 + batch * self.spec.updates + number

    def order(self, batch: int) -> DataOrder:
        """The data order at the first prompt of a batch; that of batch 0 is the run's own."""
        taken = self.spec.updates * self.config.rollout.prompts_per_step
        return replace(self._order, cursor=self._cursor + batch * taken)

    # -- updates -----------------------------------------------------------------------------------------------------

    def rollouts(
        self,
        method: Method,
        batch: int,
        number: int = 0,
        *,
        order: DataOrder | None = None,
        shared: SharedDraws | None = None,
    ) -> RolloutBatch:
        """The rollouts of step `number` of an arm."""
        shared_statistics: Callable[[Rollouts], TokenStats] = self.scorer.statistics
        if shared is not None:
            known = shared
            shared_statistics = lambda rollouts: known.statistics(self.scorer, rollouts)  # noqa: E731
        return draw_rollouts(
            self.policy,
            self.task,
            self.order(batch) if order is None else order,
            method,
            self.config.rollout,
            self.config.seed,
            self._seed_step(batch, number),
            shared_statistics,
            draw_group if shared is None else shared.draw,
            self.learner(method).reference_logp if method.kl_in_reward else None,
        )

    def update(self, name: str, batch: int, shared: SharedDraws | None = None) -> ArmUpdate:
        """Restore the state, and make the steps of an arm. The model keeps the arm's weights.

        Args:
            name: of the arm.
            batch: index of the batch, from 0.
            shared: draws of the starting policy; every step after the first is drawn from the arm's own policy.
        """
        self.snapshot.restore()
        method, order = self.methods[name], self.order(batch)
        learner = self.learner(method)
        first: list[list[Tensor]] = []
        reshaped: list[list[Tensor]] = []
        results, number = [], 0

        def keep(pending: PendingUpdate) -> None:
            if number == 0 and pending.index == 0:
                first.append(self.snapshot.collect([p.grad for p in learner.parameters]))

        def keep_reshaped(applied: AppliedUpdate) -> None:
            if number == 0 and applied.index == 0:
                reshaped.append(self.snapshot.collect([p.grad for p in learner.parameters]))

        direct = method.sharpness is None  # the optimizer gets ∇L itself
        for number in range(self.spec.updates):
            step = min(self.step + 1 + number, self.config.steps)
            lr = learning_rate(self.config.optimizer, step, self.config.steps)
            set_learning_rate(self.optimizer, lr)
            common = shared if number == 0 else None
            drawn = self.rollouts(method, batch, number, order=order, shared=common)
            stats = drawn.stats
            if stats is None and common is not None:
                stats = common.statistics(self.scorer, drawn.rollouts)
            seed_step, progress = self._seed_step(batch, number), self.progress(number)
            health = StepHealth(self.config.health, seed_step, drawn, method, progress, self.policy.device)
            result = learner.learn(
                drawn.rollouts,
                drawn.advantage,
                seed_step,
                progress,
                method=method,
                stats=stats,
                before_first_update=health.allows_updates,
                before_step=keep,
                before_optimizer=None if direct else keep_reshaped,
            )
            results.append(result)
            if any(update.broken for update in result.updates):
                break
        gradient = first[0] if first else None
        applied = gradient if direct else None
        if reshaped:
            applied = [part / results[0].updates[0].clip_factor for part in reshaped[0]]
        return ArmUpdate(gradient, applied, self.snapshot.displacement(), tuple(results))

    def learner(self, method: Method) -> Learner:
        """A learner with what this method needs."""
        return replace(
            self._learner,
            reference=self.reference if method.needs_reference else None,
            proximal=self.proximal if method.proximal is not None else None,
            entropy_control=EntropyControl(**self._entropy),
        )

    # -- fixed completions -------------------------------------------------------------------------------------------

    def fixed(self, split: str, batch: int) -> FixedRollouts:
        """New completions of the starting policy, the same for all arms of a batch. The state must be restored.

        Held-out prompts are the next of a seeded order. Training prompts are those that the batch learns from, with as many
        completions in total.
        """
        spec = self.spec
        if split == "heldout":
            examples, samples = self.heldout_examples(batch), spec.samples
        else:
            examples = self.order(batch).take(spec.updates * self.config.rollout.prompts_per_step)
            samples = max(1, math.ceil(spec.prompts * spec.samples / len(examples)))
        return self.drawn(examples, samples, self.draw_seed(split, batch))

    def heldout_examples(self, batch: int) -> list[Example]:
        """The held-out prompts of a batch."""
        return replace(self._heldout, cursor=batch * self.spec.prompts).take(self.spec.prompts)

    def draw_seed(self, split: str, batch: int) -> int:
        """Seed of the completions of `fixed`."""
        return derive(self.config.seed, f"fork {split}", self.step, batch)

    def drawn(self, examples: Sequence[Example], samples: int, seed: int) -> FixedRollouts:
        """New completions of the present policy with its statistics."""
        batch = self.drawer(list(examples), samples, seed)
        return FixedRollouts(batch.rollouts, batch.correct, self.scorer.statistics(batch.rollouts))

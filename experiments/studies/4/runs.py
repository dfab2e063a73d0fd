"""Runs of designs D1 (12 tokens left out at every step) and D2 (weightings compared over a training)."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from sharpscope.config import RunConfig, build_config
from sharpscope.forks.experiment import greedy_success
from sharpscope.forks.start import Start
from sharpscope.methods import parse_methods
from sharpscope.policy.directions import inner
from sharpscope.policy.guard import guarded, moved_by
from sharpscope.recording.probe_sets import Drawer
from sharpscope.recording.step import RolloutBatch, StepResult
from sharpscope.seeds import derive, generator
from sharpscope.surface import limited_surface
from sharpscope.surface.perturbation import cross_fitted
from sharpscope.surface.runner import rollout_objective
from sharpscope.tokens.attribution import _gradient
from sharpscope.tokens.optimizer_steps import ComingStep
from sharpscope.tokens.outcomes import Outcome
from sharpscope.tokens.rows import make_rows
from sharpscope.tokens.update_effects import UpdateEffects
from sharpscope.training.learner import set_learning_rate

tokens = importlib.import_module("experiments.studies.4.tokens")
states = importlib.import_module("experiments.studies.4.states")

Row = dict[str, float | str]
Tell = Callable[[str], None]
TOP = 12
"""Tokens that are left out of a step."""
LEAVING = ("none", "random", "random share", "share", "effect", "smaller")
"""Arms of D1: nothing, 12 random tokens, random tokens with the sum of |share| that the leading 12 have, the 12 leading ones by share, by
their effect on KL, and plain GRPO whose step has the KL that it would have without the latter."""
WEIGHTINGS = {
    "grpo": "grpo",
    "published": "grpo-sg-mean-one+weight.of.preset=paper",
    "acting": "grpo-sg-mean-one+weight.of.preset=calibrated+weight.of.U=16",
    "shuffled": "grpo-sg-mean-one+weight.of.kind=shuffled+weight.of.of.kind=sigmoid+weight.of.of.preset=calibrated+weight.of.of.U=16",
    "flat": "grpo-flat",
}
"""Methods of D2's arms; `flat` is a control that is to lower sharpness, as are plain GRPO at half its rate and averaged weights."""


MANY = {"levels": [2, 3], "train_size": 450, "heldout_size": 1250}
"""Settings of `math` in D2: level 1 has too few different questions."""


def configured(
    task: str,
    rate: float,
    seed: int,
    steps: int,
    settings: Mapping[str, object] = MappingProxyType({}),
) -> RunConfig:
    """The configuration of a run: 24 prompts × 8 completions, one update a step, no clipping of the gradient."""
    given = {
        "policy.model": f"embedded:{task}",
        "task": {"kind": task, **settings},
        "seed": seed,
        "steps": steps,
        "optimizer.lr": rate,
        "optimizer.max_grad_norm": None,
        "update.mini_batches": 1,
        "rollout.prompts_per_step": 24,
    }
    return build_config(None, ["method=grpo"], given)


def greedy(start: Start, prompts: int) -> float:
    """Greedy accuracy on the first held-out questions."""
    examples = start.task.splits()["heldout"][:prompts]
    rollout = start.config.rollout
    parts = [
        greedy_success(start.policy, start.task, examples[at : at + 250], rollout)
        for at in range(0, len(examples), 250)
    ]
    return float(torch.cat(parts).mean())


@dataclass
class Leaving:
    """A run of D1."""

    task: str
    rate: float
    seed: int
    arm: str
    steps: int = 25
    questions: int = 300

    def rows(self, tell: Tell) -> list[Row]:
        """A row for each step, and one of step 0 with the greedy accuracy at the end."""
        config = configured(self.task, self.rate, self.seed, self.steps)
        start = Start(config, {"own": config.method}, None)
        method, order = start.methods["own"], start.order(0)
        learner = start.learner(method)
        where = {"task": self.task, "rate": self.rate, "arm": self.arm, "seed": self.seed}
        made: list[Row] = []
        for number in range(self.steps):
            drawn = start._draw(method, order, self.seed, number + 1)
            scale, left_out = self.change(start, drawn, number + 1)
            set_learning_rate(start.optimizer, self.rate * scale)
            result = learner.learn(
                drawn.rollouts,
                drawn.advantage,
                number + 1,
                start.progress(number),
                method=method,
                stats=start.statistics(drawn.rollouts),
                without=left_out,
            )
            start._made.clear()
            left = 0 if left_out is None else int(left_out.sum())
            made.append(
                {
                    **where,
                    "step": number + 1,
                    **facts(drawn, result),
                    "left out": left,
                    "scale": scale,
                }
            )
        made.append({**where, "step": 0, "greedy": greedy(start, self.questions)})
        return made

    def change(self, start: Start, drawn: RolloutBatch, step: int) -> tuple[float, Tensor | None]:
        """What the learning rate is multiplied by, and the tokens (N, T) that are left out."""
        live = (drawn.advantage.reshape(len(drawn.advantage), -1) != 0) & (
            drawn.rollouts.completion_mask.bool()
        )
        if self.arm == "none" or int(live.sum()) <= TOP:
            return 1.0, None
        mixed = torch.rand(live.shape, generator=generator(self.seed, "left out", step))
        mixed = torch.where(live, mixed, -1.0)
        if self.arm == "random":
            return 1.0, leading(mixed, TOP)
        return self.by_scores(start, drawn, step, mixed)

    def by_scores(
        self, start: Start, drawn: RolloutBatch, step: int, mixed: Tensor
    ) -> tuple[float, Tensor | None]:
        """The same for arms that need the tokens' shares or effects."""
        rollouts = drawn.rollouts
        width, model = rollouts.prompt_width, start.policy.model
        stats = start.statistics(rollouts)
        coef = states.coefficients(start, step, drawn, stats, start.methods["own"])
        padded = nn.functional.pad(coef.to(torch.float32), (width, 0))
        mask = nn.functional.pad(rollouts.completion_mask, (width, 0))
        with guarded(model):
            rows = make_rows(model, rollouts.input_ids, mask, rollouts.attention_mask, 1.0)
            one = UpdateEffects(model, rows, padded, start.optimizer, (), 1.0)
            if self.arm in ("share", "random share"):
                share = one.along(one.gradient)[:, width:].abs()
                share = share / inner(one.gradient, one.gradient)
                if self.arm == "share":
                    return 1.0, leading(share, TOP)
                order = mixed.flatten().argsort(descending=True)
                wanted = share.flatten().topk(TOP).values.sum()
                count = int((share.flatten()[order].cumsum(0) < wanted).sum()) + 1
                return 1.0, leading(mixed, min(count, int((mixed >= 0).sum())))
            kl = one.prepare("kl", Outcome(kind="kl"))
            ((_, q),) = one.outcome_gradients([kl])
            left_out = leading(one.along(one.step.pull(q))[:, width:], TOP)
            if self.arm == "effect":
                return 1.0, left_out
            removed = _gradient(
                model,
                one.structure,
                rows,
                padded * nn.functional.pad(left_out.float(), (width, 0)),
                1.0,
            )
            less = [
                None if g is None else g - part
                for g, part in zip(one.gradient, removed, strict=True)
            ]
            with moved_by(
                one.parameters, ComingStep(start.optimizer, one.parameters, less).steps()
            ):
                wanted_kl = kl.value()
            return tokens.scaled_to(one, kl, one.step.steps(), wanted_kl)[0], None


def leading(score: Tensor, count: int) -> Tensor:
    """(N, T) bool, true at the largest."""
    chosen = torch.zeros_like(score, dtype=torch.bool).flatten()
    chosen[score.flatten().topk(count).indices] = True
    return chosen.view_as(score)


def facts(drawn: RolloutBatch, result: StepResult) -> Row:
    """What a step drew and did."""
    last = result.updates[-1] if result.updates else None
    return {
        "reward": float(drawn.rollouts.reward.double().mean()),
        "kl": math.nan if result.kl_step is None else float(result.kl_step),
        "gradient": math.nan if last is None else last.grad_norm,
        "update": math.nan if last is None else last.update_norm,
    }


@dataclass
class Weighting:
    """A run of D2; arm `averaged` is plain GRPO whose weights after step 20 are averaged, `half` plain GRPO at half the rate."""

    task: str
    rate: float
    seed: int
    arm: str
    steps: int = 40
    measured: tuple[int, ...] = (20, 30, 40)
    questions: int = 2500
    prompts: int = 800
    samples: int = 8
    radius: float = 0.05
    sharpness: bool = True

    def rows(self, tell: Tell) -> list[Row]:
        """A row for each measured step."""
        rate = self.rate / 2 if self.arm == "half" else self.rate
        config = configured(self.task, rate, self.seed, self.steps, MANY)
        name = self.arm if self.arm in WEIGHTINGS else "grpo"
        (method,) = parse_methods([WEIGHTINGS[name]]).values()
        start = Start(config, {"own": method}, None, calibrating=4)
        method, order = start.methods["own"], start.order(0)
        learner = start.learner(method)
        where = {"task": self.task, "rate": self.rate, "arm": self.arm, "seed": self.seed}
        made: list[Row] = []
        rewards: list[float] = []
        total: list[Tensor] = []
        count = 0
        for number in range(self.steps):
            drawn = start._draw(method, order, self.seed, number + 1)
            rewards.append(float(drawn.rollouts.reward.double().mean()))
            start._make(learner, method, drawn, number + 1, number)
            start._made.clear()
            if self.arm == "averaged" and number >= self.measured[0] - 1:
                weights = [p.detach().clone() for p in learner.parameters]
                total = [a + b for a, b in zip(total, weights, strict=True)] if total else weights
                count += 1
            if number + 1 in self.measured:
                moves = (
                    [t / count - p.detach() for t, p in zip(total, learner.parameters, strict=True)]
                    if total
                    else [None] * len(learner.parameters)
                )
                with moved_by(learner.parameters, moves):
                    found = self.measure(start, number + 1)
                made.append(
                    {**where, "step": number + 1, "reward": sum(rewards[-10:]) / 10, **found}
                )
        return made

    def measure(self, start: Start, step: int) -> Row:
        """Accuracy and sharpness at the present weights."""
        row: Row = {"greedy": greedy(start, self.questions)}
        if not self.sharpness or step != self.measured[-1]:
            return row
        drawer = Drawer(start.config, start.policy, start.task)
        examples = start.task.splits()["train"][: self.prompts]
        drawn = drawer(examples, self.samples, derive(self.seed, "sharpness", step) % 2**31)
        objective = rollout_objective("expected_failure", drawn)
        with limited_surface(start.policy.model, objective, start.config.probes) as surface:
            base = surface.by_prompt()
            found = cross_fitted(surface, self.radius, self.seed, base)
        accuracy = float(drawn.correct.double().mean())
        return row | {"accuracy": accuracy, "sharpness": found.value, "ceiling": found.ceiling}

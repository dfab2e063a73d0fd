"""Scores of the tokens of an update, and the true change of outcomes when sets of tokens are left out and the update is made again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from sharpscope.config import RunConfig, build_config
from sharpscope.forks.start import Start
from sharpscope.policy import Rollouts
from sharpscope.policy.directions import inner
from sharpscope.policy.guard import guarded, moved_by
from sharpscope.recording.probe_sets import Drawer, _built
from sharpscope.recording.step import PendingUpdate
from sharpscope.seeds import generator
from sharpscope.surface import Drawn
from sharpscope.surface.language_model import TokenBatch
from sharpscope.tokens import score_norms
from sharpscope.tokens.attribution import _gradient
from sharpscope.tokens.optimizer_steps import Clip, ComingStep
from sharpscope.tokens.outcomes import Outcome, Prepared
from sharpscope.tokens.rows import make_rows
from sharpscope.tokens.update_effects import UpdateEffects

TOP = 12
"""Leading tokens that are left out together."""
RADIUS = 0.05


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How many sets of each kind an update leaves out."""

    tokens: int = 16  # random tenths of the tokens
    prompts: int = 12  # single prompts
    completions: int = 12  # random tenths of the completions
    single: int = 10  # single tokens
    samples: int = 8  # independent completions a prompt
    probes: int = 32  # held-out prompts


@dataclass
class Runner:
    """A run of plain GRPO, whose updates are measured at some steps."""

    config: RunConfig
    sizes: Sizes
    limit: float | None
    start: Start = field(init=False)
    solutions: dict[str, TokenBatch] = field(init=False)

    def __post_init__(self) -> None:
        self.start = Start(self.config, {"own": self.config.method}, None)
        probes = _built(self.config, self.start.policy, self.start.task)
        self.probe_set = probes
        self.solutions = {split: probes.solutions(split) for split in ("train", "heldout")}
        self.drawer = Drawer(self.config, self.start.policy, self.start.task)

    def steps(
        self, steps: int, wanted: Callable[[int], bool], write: Callable[[dict], None]
    ) -> None:
        """Make the steps of the run; `wanted` ones are measured at each update."""
        start = self.start
        method, order = start.methods["own"], start.order(0)
        learner = start.learner(method)
        for number in range(steps):
            step = number + 1
            drawn = start._draw(method, order, self.config.seed, step)
            hook = None
            if wanted(step):
                fresh = [
                    self.drawer(drawn.examples, self.sizes.samples, 1000 * step + part)
                    for part in (1, 2)
                ]
                held = [
                    self.probe_set.draw(
                        "heldout", self.sizes.samples, self.drawer, 1000 * step + part
                    )
                    for part in (3, 4)
                ]

                def hook(
                    update: PendingUpdate,
                    step: int = step,
                    drawn: object = drawn,
                    fresh: Sequence[Drawn] = fresh,
                    held: Sequence[Drawn] = held,
                ) -> None:
                    began = time.perf_counter()
                    row = self.measure(update, step, drawn.rollouts, fresh, held)
                    write(
                        {
                            "step": step,
                            "update": update.index,
                            **row,
                            "seconds": round(time.perf_counter() - began, 1),
                        }
                    )

            start._make(learner, method, drawn, step, number, before_step=hook)
            start._made.clear()

    def measure(
        self,
        update: PendingUpdate,
        step: int,
        rollouts: Rollouts,
        fresh: Sequence[Drawn],
        held: Sequence[Drawn],
    ) -> dict:
        """Rank correlations, slopes and changes of one update."""
        model, temperature = self.start.policy.model, self.config.rollout.temperature
        part = rollouts.rows(update.rows)
        mask = nn.functional.pad(part.completion_mask, (part.prompt_width, 0))
        coef = nn.functional.pad(update.loss_coef.to(torch.float32), (part.prompt_width, 0))
        gradient = [p.grad.detach().clone() for p in self.start._learner.parameters]
        clips = () if self.limit is None else (Clip(limit=self.limit),)
        seeded = generator(self.config.seed, "attribution", step, update.index)
        with guarded(model):
            rows = make_rows(model, part.input_ids, mask, part.attention_mask, temperature)
            one = UpdateEffects(
                model, rows, coef, self.start.optimizer, clips, temperature, gradient=gradient
            )
            outcomes = self._outcomes(one, fresh, held)
            scores, seconds = self._scores(one, outcomes, part, seeded)
            before = values(outcomes)
            with moved_by(one.parameters, one.step.steps()):
                after = values(outcomes)
            change = {name: after[name] - before[name] for name in after}
            sets = self._sets(one, part.group, seeded)
            for name in ("kl", "entropy", "sharpness"):
                for label in ("effect", "share", "size", "random"):
                    table = scores[name] if label in scores[name] else scores[""]
                    worth = table[label]
                    worth = (
                        worth * math.copysign(1, change[name]) if label == "effect" else worth.abs()
                    )
                    sets.append((f"top by {label} on {name}", leading(worth)))
            truth: list[dict[str, float]] = []
            for _, chosen in sets:
                less = _gradient(model, one.structure, rows, coef * chosen, temperature)
                without = [
                    None if g is None else g - p for g, p in zip(gradient, less, strict=True)
                ]
                moves = ComingStep(self.start.optimizer, one.parameters, without, clips).steps()
                with moved_by(one.parameters, moves):
                    found = values(outcomes)
                truth.append({name: found[name] - after[name] for name in found})
        return self._compare(sets, truth, scores, change) | {
            "tokens": int((coef != 0).sum()),
            "clip_factor": one.step._factor(clips[0], gradient) if clips else 1.0,
            "first_seconds": seconds,
        }

    def _outcomes(
        self, one: UpdateEffects, fresh: Sequence[Drawn], held: Sequence[Drawn]
    ) -> dict[str, Prepared]:
        """Outcomes on the update's own rows, on stored solutions, and on independent completions (2 and 3)."""
        made = {"kl": Outcome(kind="kl"), "entropy": Outcome(kind="entropy")}
        made["heldout"] = Outcome(kind="heldout", **solution_rows(self.solutions["heldout"]))
        train = solution_rows(self.solutions["train"])
        made["sharpness"] = Outcome(kind="sharpness", radius=RADIUS, **train)
        made["sharpness, no turn"] = Outcome(kind="sharpness", radius=RADIUS, turn=False, **train)
        made["gradient_norm"] = Outcome(kind="gradient_norm", **train)
        made["failure"] = Outcome(kind="heldout", **drawn_rows(held[0]), reward=held[0].correct)
        made["failure 2"] = Outcome(kind="heldout", **drawn_rows(held[1]), reward=held[1].correct)
        for number, drawn in zip((2, 3), fresh, strict=True):
            for kind in ("kl", "entropy"):
                made[f"{kind} {number}"] = Outcome(kind=kind, **drawn_rows(drawn))
        return {name: one.prepare(name, outcome) for name, outcome in made.items()}

    def _scores(
        self,
        one: UpdateEffects,
        outcomes: Mapping[str, Prepared],
        part: Rollouts,
        seeded: torch.Generator,
    ) -> tuple[dict[str, dict[str, Tensor]], dict[str, float]]:
        """Scores (N, S) by outcome ("" those without one) and name; seconds of an effect's parts."""
        scored = [name for name in outcomes if not name[-1].isdigit()]
        prepared = [outcomes[name] for name in scored]
        began = time.perf_counter()
        after = dict(zip(scored, one.outcome_gradients(prepared), strict=True))
        gradients_done, along = time.perf_counter(), 0.0
        names = list(one.structure.named)
        last = max(int(n.split(".layers.")[1].split(".")[0]) for n in names if ".layers." in n)
        parts = {
            "output layer": ("embed_tokens", "lm_head"),
            "last block": (f".layers.{last}.",),
            "MLPs": (".mlp.",),
        }
        scores: dict[str, dict[str, Tensor]] = {}
        for name in scored:
            _, q = after.pop(name)  # as long as the model: one at a time
            pulled = one.step.pull(q)
            started = time.perf_counter()
            table = scores[name] = {"effect": one.along(pulled)}
            along += time.perf_counter() - started
            if name == "sharpness, no turn":
                continue
            table["SGD"] = one.along([-part for part in q])
            for label, words in parts.items():
                direction = [
                    u if any(word in n for word in words) else torch.zeros_like(u)
                    for n, u in zip(names, pulled, strict=True)
                ]
                table[label] = one.along(direction)
        before = dict(zip(scored, one.outcome_gradients(prepared, after=False), strict=True))
        for name in scored:
            _, q = before.pop(name)
            if name not in ("kl", "sharpness, no turn"):  # KL is 0 at the weights before the update
                scores[name]["q before"] = one.along(one.step.pull(q))
        square = inner(one.gradient, one.gradient)
        step = [-d for d in one.step.steps()]
        stats = self.start.scorer.statistics(part)
        logit_norm = nn.functional.pad(stats.logit_grad_norm, (part.prompt_width, 0))
        norms = score_norms(
            one.model,
            part.input_ids,
            (one.coef != 0).long(),
            "local",
            part.attention_mask,
            one.temperature,
        ).values
        scores[""] = {
            "share": one.along(one.gradient) / square,
            "share of the step": one.along(step),
            "|c|·‖p − e‖": one.coef.abs() * logit_norm,
            "size": one.coef.abs() * norms,
            "random": torch.randn(one.coef.shape, generator=seeded) * (one.coef != 0),
        }
        count = len(scored)
        seconds = {
            "outcome gradients": (gradients_done - began) / count,
            "derivatives": along / count,
        }
        return scores, {name: round(value, 3) for name, value in seconds.items()}

    def _sets(
        self, one: UpdateEffects, group: Tensor, seeded: torch.Generator
    ) -> list[tuple[str, Tensor]]:
        """(kind, tokens (N, S)) that are left out."""
        live = one.coef != 0
        sets: list[tuple[str, Tensor]] = []
        places = live.nonzero()

        def some(index: Tensor) -> Tensor:
            chosen = torch.zeros_like(one.coef)
            chosen[tuple(places[index].T)] = 1.0
            return chosen

        for _ in range(self.sizes.tokens):
            order = torch.randperm(len(places), generator=seeded)
            sets.append(("tokens", some(order[: max(len(places) // 10, 1)])))
        groups = group[live.any(1)].unique()
        for label in groups[torch.randperm(len(groups), generator=seeded)[: self.sizes.prompts]]:
            sets.append(("prompts", live * (group == label)[:, None].float()))
        rows = live.any(1).nonzero()[:, 0]
        for _ in range(self.sizes.completions):
            order = rows[torch.randperm(len(rows), generator=seeded)[: max(len(rows) // 10, 1)]]
            chosen = torch.zeros_like(one.coef)
            chosen[order] = live[order].float()
            sets.append(("completions", chosen))
        for index in torch.randperm(len(places), generator=seeded)[: self.sizes.single]:
            sets.append(("single tokens", some(index[None])))
        return sets

    @staticmethod
    def _compare(
        sets: Sequence[tuple[str, Tensor]],
        truth: Sequence[Mapping[str, float]],
        scores: Mapping[str, Mapping[str, Tensor]],
        change: Mapping[str, float],
    ) -> dict:
        """Rank correlations and slopes by kind of set, outcome and score, and changes by the leading tokens."""
        ranks: list[list] = []
        for kind in ("tokens", "prompts", "completions", "single tokens"):
            at = [i for i, (name, _) in enumerate(sets) if name == kind]
            if len(at) < 4:
                continue
            for name in [n for n in scores if n]:
                own = "sharpness" if name == "sharpness, no turn" else name
                true = np.array([truth[i][own] for i in at])
                for label, worth in {**scores[""], **scores[name]}.items():
                    if name == "sharpness, no turn" and label != "effect":
                        continue
                    predicted = np.array([-float((worth * sets[i][1]).sum()) for i in at])
                    slope = (
                        float(predicted @ true / (predicted @ predicted))
                        if label == "effect"
                        else None
                    )
                    ranks.append([kind, name, label, rank(predicted, true), slope])
                    other = f"{own} 2"
                    if label in ("effect", "share") and other in truth[0]:
                        independent = np.array([truth[i][other] for i in at])
                        ranks.append([kind, other, label, rank(predicted, independent), None])
                if f"{own} 2" in truth[0]:
                    first = np.array([truth[i][f"{own} 2"] for i in at])
                    second = np.array(
                        [truth[i][f"{own} 3" if f"{own} 3" in truth[0] else own] for i in at]
                    )
                    ranks.append([kind, f"{own} 2", "ceiling", rank(first, second), None])
        tops = []
        for (kind, chosen), found in zip(sets, truth, strict=True):
            if kind.startswith("top by "):
                label, _, name = kind.removeprefix("top by ").partition(" on ")
                predicted = -float((scores[name]["effect"] * chosen).sum())
                tops.append([name, label, predicted / change[name], found[name] / change[name]])
        return {"ranks": ranks, "tops": tops, "change": dict(change)}


def rank(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's rank correlation; NaN where one is constant."""
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return math.nan
    return round(float(spearmanr(one, other).statistic), 4)


def leading(worth: Tensor) -> Tensor:
    """(N, S), 1 at the `TOP` largest."""
    chosen = torch.zeros_like(worth).flatten()
    chosen[worth.flatten().topk(TOP).indices] = 1.0
    return chosen.view_as(worth)


@torch.no_grad()
def values(outcomes: Mapping[str, Prepared]) -> dict[str, float]:
    """Values at the present weights; means over the same rows share a pass, the two of the sharpness's loss its gradient."""
    found: dict[str, float] = {}
    together: dict[int, list[Prepared]] = {}
    for name, one in outcomes.items():
        if one.is_plain:
            together.setdefault(id(one.mean.rows), []).append(one)
        elif name == "sharpness":
            loss, gradient = one.mean.gradient()
            size = math.sqrt(inner(gradient, gradient))
            found["gradient_norm"] = size
            with one._at_radius(gradient, size):
                found[name] = one.mean.value() - loss
    for group in together.values():
        total = {one.name: one.mean.constant for one in group}
        for number, chunk in group[0].mean.chunks():
            run = group[0].mean.run(number, chunk)
            for one in group:
                total[one.name] += float(one.mean.term(run))
        found |= total
    return found


def solution_rows(batch: TokenBatch) -> dict[str, Tensor]:
    """Rows of stored solutions for an `Outcome`."""
    present = torch.arange(batch.input_ids.shape[1]) < batch.lengths[:, None]
    return {
        "input_ids": batch.input_ids,
        "mask": batch.scored.long(),
        "attention_mask": present.long(),
    }


def drawn_rows(drawn: Drawn) -> dict[str, Tensor]:
    """Rows of completions for an `Outcome`."""
    part = drawn.rollouts
    mask = nn.functional.pad(part.completion_mask, (part.prompt_width, 0))
    return {"input_ids": part.input_ids, "mask": mask, "attention_mask": part.attention_mask}


SETTINGS = {"plain": (None, 1), "clipped": (0.1, 1), "two updates": (None, 2)}
"""Limit of the gradient's norm, updates a step."""
RATES = {"math": 5e-4, "knights_knaves": 1e-4, "sums": 1e-5}
POLICIES = {"sums": ("smollm2", "experiments.smollm2.sums:sums")}
"""Folder of the model and factory of the task, where the policy is not embedded; see experiments/smollm2."""


def runner(task: str, setting: str, seed: int, sizes: Sizes, prompts: int, steps: int) -> Runner:
    """A run of a task's embedded policy, or of SmolLM2 on sums of two numbers."""
    limit, updates = SETTINGS[setting]
    given: dict[str, object] = {
        "seed": seed,
        "steps": steps,
        "optimizer.lr": RATES[task],
        "optimizer.max_grad_norm": limit,
        "update.mini_batches": updates,
        "rollout.prompts_per_step": prompts,
        "probes.prompts": sizes.probes,
    }
    if task in POLICIES:
        model, factory = POLICIES[task]
        given |= {"policy.model": model, "policy.prompt_format": "plain"}
        given |= {"task": {"kind": "custom", "factory": factory}}
        given |= {"rollout.max_new_tokens": 6, "probes.heldout_prompts": sizes.probes}
    else:
        given |= {"policy.model": f"embedded:{task}", "task": {"kind": task}}
    return Runner(build_config(None, ["method=grpo"], given), sizes, limit)

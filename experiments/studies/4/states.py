"""States of runs of plain GRPO at which the effects of tokens are measured (design D3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sharpscope.config import build_config
from sharpscope.forks.start import Start
from sharpscope.methods import Method, parse_methods
from sharpscope.methods.loss import policy_loss, token_normalizer
from sharpscope.policy import TokenStats
from sharpscope.policy.guard import guarded
from sharpscope.recording.probe_sets import Drawer, _built
from sharpscope.recording.step import PendingUpdate, RolloutBatch
from sharpscope.seeds import generator
from sharpscope.surface import Drawn
from sharpscope.surface.language_model import TokenBatch
from sharpscope.tokens.outcomes import Outcome, Prepared
from sharpscope.tokens.rows import make_rows
from sharpscope.tokens.update_effects import UpdateEffects
from sharpscope.training.learner import calibrated

from .tokens import Row, Step, Tokens, bins, make_step, sgd_of_equal_kl, slopes, weightings

RADIUS = 0.05
METHODS = {
    "published": "grpo-sg+weight.preset=paper",
    "acting": "grpo-sg+weight.preset=calibrated+weight.U=16",
    "tr-grpo": "tr-grpo+weight.preset=paper",
    "cov-grpo": "cov-grpo",
}
"""Weightings of methods."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the states of a task are made."""

    prompts: int  # of an update, times 8 completions
    probe: int  # prompts whose solutions sharpness and held-out loss are measured on
    samples: int  # completions of each held-out prompt, drawn anew at each state
    measured: tuple[int, ...]  # steps of a run
    rates: tuple[float, ...]


PLANS = {
    "math": Plan(
        prompts=24, probe=240, samples=4, measured=(3, 6, 9, 12, 15), rates=(5e-4, 1.5e-3)
    ),
    "knights_knaves": Plan(
        prompts=8, probe=200, samples=1, measured=(3, 8, 13), rates=(1e-4, 3e-4)
    ),
}


@dataclass
class States:
    """A run of plain GRPO with AdamW, measured before the updates of some of its steps."""

    task: str
    rate: float
    seed: int
    plan: Plan
    tables: dict[str, list[Row]] = field(
        default_factory=lambda: {"steps": [], "slopes": [], "bins": [], "weightings": []}
    )

    def __post_init__(self) -> None:
        given = {
            "policy.model": f"embedded:{self.task}",
            "task": {"kind": self.task},
            "seed": self.seed,
            "steps": max(self.plan.measured),
            "optimizer.lr": self.rate,
            "optimizer.max_grad_norm": None,
            "update.mini_batches": 1,
            "rollout.prompts_per_step": self.plan.prompts,
            "probes.prompts": self.plan.probe,
            "probes.heldout_prompts": self.plan.probe,
        }
        self.config = build_config(None, ["method=grpo"], given)
        methods = {name: method_of(text) for name, text in METHODS.items()}
        self.start = Start(self.config, {"own": self.config.method, **methods}, None)

    def run(self, tell: Callable[[str], None]) -> None:
        """Make the run and fill the tables."""
        start = self.start
        probes = _built(self.config, start.policy, start.task)
        self.drawer = Drawer(self.config, start.policy, start.task)
        self.probes = probes
        self.solutions = {split: rows_of(probes.solutions(split)) for split in ("train", "heldout")}
        method, order = start.methods["own"], start.order(0)
        learner = start.learner(method)
        for number in range(max(self.plan.measured)):
            step = number + 1
            drawn = start._draw(method, order, self.config.seed, step)
            hook = self.measuring(step, drawn, tell) if step in self.plan.measured else None
            start._make(learner, method, drawn, step, number, before_step=hook)
            start._made.clear()

    def measuring(
        self, step: int, drawn: RolloutBatch, tell: Callable[[str], None]
    ) -> Callable[[PendingUpdate], None]:
        """What sees the update of a step."""

        def hook(update: PendingUpdate) -> None:
            began = time.process_time()
            if update.grad_norm > 0:
                self.measure(step, drawn, update)
            tell(f"step {step}: {time.process_time() - began:.1f} s")

        return hook

    def measure(self, step: int, drawn: RolloutBatch, update: PendingUpdate) -> None:
        """Add a state to the tables."""
        start, rollouts = self.start, drawn.rollouts
        width = rollouts.prompt_width
        model, temperature = start.policy.model, self.config.rollout.temperature
        mask = nn.functional.pad(rollouts.completion_mask, (width, 0))
        coef = nn.functional.pad(update.loss_coef.to(torch.float32), (width, 0))
        stats = start.statistics(rollouts)
        gradient = [p.grad.detach().clone() for p in start._learner.parameters]
        ratios = self.ratios(step, drawn)
        heldout = self.probes.draw("heldout", self.plan.samples, self.drawer, step)
        with guarded(model):
            rows = make_rows(model, rollouts.input_ids, mask, rollouts.attention_mask, temperature)
            one = UpdateEffects(
                model, rows, coef, start.optimizer, (), temperature, gradient=gradient
            )
            columns = (
                nn.functional.pad(part, (width, 0))
                for part in (stats.logp.exp(), stats.logit_grad_norm, stats.entropy)
            )
            tokens = Tokens.of(coef, *columns)
            outcomes = self.outcomes(one, heldout)
            steps = self.steps(one, tokens, outcomes)
            weights = {
                name: nn.functional.pad(ratio, (width, 0))[tokens.live].double()
                for name, ratio in ratios.items()
            }
            likely = 1 - tokens.values["unlikely"]
            weights["likely"] = 1 + 3 * likely
            weights["reversed"] = 4 - 3 * likely
            mixed = torch.randperm(
                len(likely), generator=generator(self.seed, "shuffled weights", step)
            )
            weights["shuffled"] = weights["likely"][mixed]
            where = {"task": self.task, "rate": self.rate, "seed": self.seed, "step": step}
            before = {name: outcome.value() for name, outcome in outcomes.items()}
            for label, made in steps.items():
                here = {**where, "optimizer": label}
                self.tables["steps"].append({**here, **facts(tokens, before, made)})
                for name in outcomes:
                    if name != "kl":
                        self.tables["slopes"] += slopes(tokens, made, name, here)
                self.tables["bins"] += bins(tokens, made, "sharpness", here)
            values = {name: outcomes[name] for name in ("kl", "sharpness")}
            for row in weightings(one, tokens, steps, values, weights):
                self.tables["weightings"].append({**where, **row})

    def outcomes(self, one: UpdateEffects, drawn: Drawn) -> dict[str, Prepared]:
        """What the effects are on: KL on the update's own rows, the others on stored solutions."""
        made = {
            "kl": Outcome(kind="kl"),
            "sharpness": Outcome(kind="sharpness", radius=RADIUS, **self.solutions["train"]),
            "gradient norm": Outcome(kind="gradient_norm", **self.solutions["train"]),
            "held-out loss": Outcome(kind="heldout", **self.solutions["heldout"]),
        }
        made["held-out failure"] = Outcome(
            kind="heldout", reward=drawn.correct, **drawn_rows(drawn)
        )
        return {name: one.prepare(name, outcome) for name, outcome in made.items()}

    def steps(
        self, one: UpdateEffects, tokens: Tokens, outcomes: Mapping[str, Prepared]
    ) -> dict[str, Step]:
        """The steps of AdamW and of plain SGD with the same KL."""
        every = list(outcomes.values())
        adamw = make_step(one, tokens, self.start.optimizer, every)
        sgd = sgd_of_equal_kl(one, outcomes["kl"], adamw.after["kl"], 100 * self.rate)
        return {"adamw": adamw, "sgd": make_step(one, tokens, sgd, every)}

    def ratios(self, step: int, drawn: RolloutBatch) -> dict[str, Tensor]:
        """(N, T) coefficients of each method over those of plain GRPO, at the policy that has drawn the tokens."""
        start = self.start
        stats, progress = start.statistics(drawn.rollouts), start.progress(step - 1)
        for name, method in start.methods.items():
            if method.weight.needs_calibration:
                start.methods[name] = calibrated(method, drawn, stats, progress) or method
        found = {
            name: coefficients(start, step, drawn, stats, method)
            for name, method in start.methods.items()
        }
        own = found.pop("own")
        return {name: part / own for name, part in found.items()}


def coefficients(
    start: Start, step: int, drawn: RolloutBatch, stats: TokenStats, method: Method
) -> Tensor:
    """(N, T) ∂L/∂log π of a method's loss, at the policy that has drawn the tokens."""
    rollouts, progress = drawn.rollouts, start.progress(step - 1)
    learner = start.learner(method)
    plan = learner.plan(rollouts, drawn.advantage, step, progress, method, stats)
    logp = stats.logp.clone().requires_grad_()
    normalizer = token_normalizer(
        method,
        rollouts.completion_mask,
        learner.max_new_tokens,
        keep=plan.keep,
        group=rollouts.group,
        dtype=logp.dtype,
    )
    (found,) = torch.autograd.grad(policy_loss(method, plan, logp, normalizer).loss, logp)
    return found


def method_of(text: str) -> Method:
    """A method from its text."""
    (found,) = parse_methods([text]).values()
    return found


def facts(tokens: Tokens, before: Mapping[str, float], step: Step) -> Row:
    """What a step is and does."""
    share = tokens.mass / tokens.mass.sum()
    unlikely = tokens.values["unlikely"]
    mean = float((share * unlikely).sum())
    row: Row = {
        "tokens": len(tokens.coef),
        "right": int(tokens.side("right").sum()),
        "kl": step.after["kl"],
        "unlikely mean": mean,
        "unlikely spread": float((share * (unlikely - mean).square()).sum().sqrt()),
    }
    for name in before:
        if name != "kl":
            row |= {f"{name} before": before[name], f"{name} after": step.after[name]}
            row[f"{name} by gradient"] = float(step.effects[name].sum())
    return row


def drawn_rows(drawn: Drawn) -> dict[str, Tensor]:
    """Completions as rows of an outcome."""
    part = drawn.rollouts
    mask = nn.functional.pad(part.completion_mask, (part.prompt_width, 0))
    return {"input_ids": part.input_ids, "mask": mask, "attention_mask": part.attention_mask}


def rows_of(batch: TokenBatch) -> dict[str, Tensor]:
    """Stored solutions as rows of an outcome."""
    present = torch.arange(batch.input_ids.shape[1]) < batch.lengths[:, None]
    return {
        "input_ids": batch.input_ids,
        "mask": batch.scored.long(),
        "attention_mask": present.long(),
    }

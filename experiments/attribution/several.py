"""Effects over several steps: `python -m experiments.attribution.several`, resumable, run from the repository's root.

A prompt is left out of a run of plain GRPO, and outcomes at the run's end are compared with the sum of effects of its tokens, with the
outcome's gradient q at the end of the whole run:

- `sum`: through the step that the tokens are in alone;
- `momentum`: also through the later steps that AdamW's moments carry their gradient into. With D_k = Σ_{j≥k} (∂Δ_j/∂h_k)ᵀ,
  A_k = 1/((1 − β₁ᵏ)s_k) + β₁A_{k+1} and B_k = m̂_k/(s_k²·(1 − β₂ᵏ)·√v̂_k) + β₂B_{k+1}: D_k = −lr·[(1 − β₁)A_k − (1 − β₂)h_k·B_k].

Both leave out that later gradients are taken at other weights. The truth is measured twice: with the completions of the whole run in the
later steps (`kept`), and with those that the changed policy draws with the run's own seeds (`again`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.attribution.measure import (
    RADIUS,
    Runner,
    Sizes,
    drawn_rows,
    runner,
    solution_rows,
    values,
)
from sharpscope.forks.start import Snapshot
from sharpscope.policy.guard import guarded
from sharpscope.recording.step import PendingUpdate, RolloutBatch
from sharpscope.seeds import generator
from sharpscope.tokens import Outcome, attribute
from sharpscope.tokens.outcomes import Prepared
from sharpscope.tokens.rows import make_rows
from sharpscope.tokens.structure import structure_of

PATH = Path(__file__).parent / "several.jsonl"
FIRST = 2  # AdamW's first step is the gradient's sign


@dataclass(kw_only=True)
class Made:
    """A step of the whole run: the state before it, its completions and coefficients, and AdamW's numbers after it."""

    before: Snapshot
    drawn: RolloutBatch
    coef: Tensor  # (N, T)
    gradient: list[Tensor]
    mean: list[Tensor]  # m̂
    root: list[Tensor]  # √v̂


class Several:
    """A run and its outcomes at the end."""

    def __init__(self, seed: int, steps: int, prompts: int) -> None:
        self.runner: Runner = runner("math", "plain", seed, Sizes(), prompts, steps)
        self.start, self.seed = self.runner.start, seed
        self.method = self.start.methods["own"]
        self.order = self.start.order(0)
        self.learner = self.start.learner(self.method)
        self.model = self.start.policy.model
        self.made: list[Made] = []
        drawer, probes = self.runner.drawer, self.runner.probe_set
        rows = drawn_rows(probes.draw("heldout", 8, drawer, 1))
        self.outcomes = {"kl": self._prepared("kl", Outcome(kind="kl", **rows))}
        for _ in range(steps):
            self._whole_step()
        held = probes.draw("heldout", 8, drawer, 2)
        ends = {
            "failure": Outcome(kind="heldout", **drawn_rows(held), reward=held.correct),
            "heldout": Outcome(kind="heldout", **solution_rows(self.runner.solutions["heldout"])),
            "sharpness": Outcome(
                kind="sharpness", radius=RADIUS, **solution_rows(self.runner.solutions["train"])
            ),
        }
        self.outcomes |= {name: self._prepared(name, one) for name, one in ends.items()}
        with guarded(self.model):
            self.whole = values(self.outcomes) | {"sharpness": self.outcomes["sharpness"].value()}
            self.q = {name: one.gradient()[1] for name, one in self.outcomes.items()}
        self.carried = self._carried()

    def _prepared(self, name: str, outcome: Outcome) -> Prepared:
        temperature = self.runner.config.rollout.temperature
        with guarded(self.model):
            given = (outcome.input_ids, outcome.mask, outcome.attention_mask, temperature)
            rows = make_rows(self.model, *given)
            return Prepared(name, outcome, self.model, structure_of(self.model), rows, temperature)

    def _step(self, number: int, drawn: RolloutBatch, **options: object) -> None:
        self.start._make(self.learner, self.method, drawn, number + 1, number, **options)
        self.start._made.clear()

    def _draw(self, number: int) -> RolloutBatch:
        return self.start._draw(self.method, self.order, self.seed, number + 1)

    def _whole_step(self) -> None:
        """The next step of the whole run."""
        number, optimizer = len(self.made), self.start.optimizer
        before, kept = Snapshot(self.model, optimizer), dict[str, object]()
        parameters = before.parameters

        def hook(update: PendingUpdate) -> None:
            kept["coef"] = update.loss_coef.clone()
            kept["gradient"] = [p.grad.detach().clone() for p in parameters]

        drawn = self._draw(number)
        self._step(number, drawn, before_step=hook)
        beta1, beta2 = optimizer.param_groups[0]["betas"]
        states = [optimizer.state[p] for p in parameters]
        mean = [s["exp_avg"] / (1 - beta1 ** (number + 1)) for s in states]
        root = [(s["exp_avg_sq"] / (1 - beta2 ** (number + 1))).sqrt() for s in states]
        self.made.append(Made(before=before, drawn=drawn, mean=mean, root=root, **kept))

    def _carried(self) -> list[list[tuple[Tensor, Tensor]]]:
        """(D_k of `sum`, D_k of `momentum`) for each step and parameter."""
        group = self.start.optimizer.param_groups[0]
        lr, eps, (beta1, beta2) = group["lr"], group["eps"], group["betas"]
        found: list[list[tuple[Tensor, Tensor]]] = []
        later = [(torch.zeros_like(m), torch.zeros_like(m)) for m in self.made[0].mean]
        for number in range(len(self.made), 0, -1):
            one, row, now = self.made[number - 1], [], []
            parts = zip(one.gradient, one.mean, one.root, later, strict=True)
            for h, mean, root, (a_later, b_later) in parts:
                s = root + eps
                a = 1 / ((1 - beta1**number) * s)
                b = torch.where(
                    root > 0, mean / (s.square() * (1 - beta2**number) * root), torch.zeros(())
                )
                both = (a + beta1 * a_later, b + beta2 * b_later)
                row.append(
                    tuple(-lr * ((1 - beta1) * x - (1 - beta2) * h * y) for x, y in ((a, b), both))
                )
                now.append(both)
            later = now
            found.append(row)
        return found[::-1]

    def candidates(self) -> list[tuple[int, int]]:
        """(number of the step, group) of the prompts with a gradient, from step FIRST."""
        found = []
        for number in range(FIRST - 1, len(self.made)):
            live = self.made[number].coef.ne(0).any(1)
            groups = self.made[number].drawn.rollouts.group[live].unique().tolist()
            found += [(number, int(group)) for group in groups]
        return found

    def predicted(self, number: int, group: int) -> dict[str, dict[str, float]]:
        """−Σ effect of a prompt's tokens on each outcome, by score."""
        one = self.made[number]
        one.before.restore()
        rollouts = one.drawn.rollouts
        rows = (rollouts.group == group).nonzero()[:, 0]
        part, coef = rollouts.rows(rows), one.coef[rows]
        wide = nn.functional.pad(coef, (part.prompt_width, 0))
        found: dict[str, dict[str, float]] = {}
        for at, score in enumerate(("sum", "momentum")):
            for name, q in self.q.items():
                direction = [d[at] * v for d, v in zip(self.carried[number], q, strict=True)]
                shares = attribute(
                    self.model,
                    part.input_ids,
                    (wide != 0).long(),
                    wide,
                    direction,
                    part.attention_mask,
                    self.runner.config.rollout.temperature,
                )
                found.setdefault(score, {})[name] = -float(shares.double().sum())
        return found

    def measured(self, number: int, group: int, *, again: bool) -> dict[str, float]:
        """The change of each outcome at the end if a prompt is left out, with its later completions drawn again or kept."""
        one = self.made[number]
        one.before.restore()
        chosen = (one.drawn.rollouts.group == group)[
            :, None
        ] & one.drawn.rollouts.completion_mask.bool()
        self.order.cursor = (number + 1) * self.runner.config.rollout.prompts_per_step
        self._step(number, one.drawn, without=chosen.cpu())
        for later in range(number + 1, len(self.made)):
            self._step(later, self._draw(later) if again else self.made[later].drawn)
        with guarded(self.model):
            found = values(self.outcomes) | {"sharpness": self.outcomes["sharpness"].value()}
        return {name: found[name] - self.whole[name] for name in self.outcomes}


def measured_prompts(seed: int) -> set[tuple[int, int]]:
    """(number, group) of the prompts of a seed that the file has."""
    lines = PATH.read_text().splitlines() if PATH.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row["number"], row["group"]) for row in rows if row["seed"] == seed}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--prompts", type=int, default=16, help="of a step")
    parser.add_argument("--leave-out", type=int, default=24, help="prompts of each seed")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for seed in range(given.seeds):
        several = Several(seed, given.steps, given.prompts)
        candidates = several.candidates()
        order = torch.randperm(len(candidates), generator=generator(seed, "several"))
        done = measured_prompts(seed)
        for place in order[: given.leave_out].tolist():
            number, group = candidates[place]
            if (number, group) in done:
                continue
            row = {"seed": seed, "steps": given.steps, "number": number, "group": group}
            row |= {"predicted": several.predicted(number, group)}
            row |= {"kept": several.measured(number, group, again=False)}
            row |= {"again": several.measured(number, group, again=True)}
            with PATH.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"seed {seed}: prompt {group} of step {number + 1} of {given.steps}", flush=True)


if __name__ == "__main__":
    main()

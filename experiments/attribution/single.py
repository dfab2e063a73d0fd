"""Why single tokens are predicted less well than sets: `python -m experiments.attribution.single`, run from the repository's root.

A run of plain GRPO on `math` in float64. At some steps random tokens are left out, one at a time, and −E_t is compared with

- `tiny`: the change per part if a hundredth of the token is left out, times 100: what a first-order effect is;
- `step`: ⟨q, Δ(g − part) − Δ(g)⟩: the optimizer's own curvature, the outcome's left out;
- `exact`: the change of the outcome in float64;
- `float32`: the same change with the outcomes computed in float32, as a run does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.attribution.measure import Runner, Sizes, rank, runner, solution_rows
from sharpscope.policy.directions import inner
from sharpscope.policy.guard import guarded, moved_by
from sharpscope.recording.step import PendingUpdate
from sharpscope.seeds import generator
from sharpscope.tokens import Outcome, logp_gradient
from sharpscope.tokens.optimizer_steps import ComingStep
from sharpscope.tokens.outcomes import Prepared
from sharpscope.tokens.rows import make_rows
from sharpscope.tokens.structure import structure_of
from sharpscope.tokens.update_effects import UpdateEffects

PATH = Path(__file__).parent / "single.jsonl"
STEPS, TOKENS, TINY = (4, 8), 24, 1e-2


class Single:
    """One update of a run in float64."""

    def __init__(self, run: Runner, update: PendingUpdate, step: int, rollouts: object) -> None:
        self.run, self.model = run, run.start.policy.model
        part = rollouts.rows(update.rows)
        self.rows = {
            "input_ids": part.input_ids,
            "mask": nn.functional.pad(part.completion_mask, (part.prompt_width, 0)),
            "attention_mask": part.attention_mask,
        }
        self.coef = nn.functional.pad(update.loss_coef.double(), (part.prompt_width, 0))
        self.temperature = run.config.rollout.temperature
        self.seeded = generator(run.config.seed, "single", step)
        self.given = make_rows(self.model, *self.rows.values(), self.temperature)
        gradient = [p.grad.detach().clone() for p in run.start._learner.parameters]
        with guarded(self.model):
            optimizer, temperature = run.start.optimizer, self.temperature
            self.one = UpdateEffects(
                self.model, self.given, self.coef, optimizer, (), temperature, gradient=gradient
            )

    def outcomes(self) -> dict[str, Prepared]:
        """The outcomes, in the model's present precision."""
        held = solution_rows(self.run.solutions["heldout"])
        made = {
            "kl": Outcome(kind="kl", **self.rows),
            "entropy": Outcome(kind="entropy", **self.rows),
            "heldout": Outcome(kind="heldout", **held),
        }
        structure = structure_of(self.model)
        found = {}
        for name, outcome in made.items():
            of = (outcome.input_ids, outcome.mask, outcome.attention_mask, self.temperature)
            given = (self.model, structure, make_rows(self.model, *of), self.temperature)
            found[name] = Prepared(name, outcome, *given)
        return found

    def moves(self, part: list[Tensor], scale: float) -> list[Tensor]:
        """The step without a part of the gradient."""
        less = [g - scale * p for g, p in zip(self.one.gradient, part, strict=True)]
        return ComingStep(self.run.start.optimizer, self.one.parameters, less).steps()

    def measure(self) -> dict[str, dict[str, float]]:
        """Rank correlations by outcome, and the least change that float32 tells from 0."""
        one = self.one
        with guarded(self.model):
            outcomes = self.outcomes()
            pulled = one.outcome_gradients(list(outcomes.values()))
            q = dict(zip(outcomes, pulled, strict=True))
            effects = {name: one.along(one.step.pull(value[1])) for name, value in q.items()}
            places = (self.coef != 0).nonzero()
            chosen = torch.randperm(len(places), generator=self.seeded)[:TOKENS]
            whole = self.moves(one.gradient, 0.0)
            found = {name: {k: [] for k in ("predicted", *KINDS)} for name in outcomes}
            without = []
            for place in places[chosen].tolist():
                coef = torch.zeros_like(self.coef)
                coef[tuple(place)] = self.coef[tuple(place)]
                rows = self.rows.values()
                ids, _, there = rows
                part = logp_gradient(
                    self.model, ids, (coef != 0).long(), coef, there, self.temperature
                )
                without.append(self.moves(part, 1.0))
                tiny = self.moves(part, TINY)
                turned = [b - a for a, b in zip(whole, without[-1], strict=True)]
                for name, outcome in outcomes.items():
                    row = found[name]
                    row["predicted"].append(-float(effects[name][tuple(place)]))
                    row["step"].append(inner(q[name][1], turned))
                    row["exact"].append(self.value(outcome, without[-1]) - q[name][0])
                    row["tiny"].append((self.value(outcome, tiny) - q[name][0]) / TINY)
        self.in_float32(found, whole, without)
        return {name: compared(row) for name, row in found.items()}

    def value(self, outcome: Prepared, moves: list[Tensor]) -> float:
        """The outcome after a step."""
        with moved_by(self.one.parameters, moves):
            return outcome.value()

    def in_float32(self, found: Mapping, whole: list[Tensor], without: list[list[Tensor]]) -> None:
        """Add the changes as float32 has them."""
        kept = [p.detach().clone() for p in self.one.parameters]
        self.model.float()
        with guarded(self.model):
            outcomes, start = self.outcomes(), dict[str, float]()
            for moves in (whole, *without):
                with torch.no_grad():
                    for p, before, move in zip(self.one.parameters, kept, moves, strict=True):
                        p.copy_(before + move)
                for name, outcome in outcomes.items():
                    if name in start:
                        found[name]["float32"].append(outcome.value() - start[name])
                    else:
                        start[name] = outcome.value()
        self.model.double()
        with torch.no_grad():
            for p, before in zip(self.one.parameters, kept, strict=True):
                p.copy_(before)


KINDS = ("tiny", "step", "exact", "float32")


def compared(row: Mapping[str, list[float]]) -> dict[str, float]:
    """Rank correlations with the prediction, and how large the changes and float32's errors are."""
    values = {name: torch.tensor(one).double() for name, one in row.items()}
    found = {name: rank(values["predicted"].numpy(), values[name].numpy()) for name in KINDS}
    errors = (values["float32"] - values["exact"]).abs().median()
    found["median |change|"] = float(values["exact"].abs().median())
    found["median |error| in float32"] = float(errors)
    return found


def keep_precision(model: nn.Module) -> None:
    """Make the norms compute in the precision of their input: those of transformers compute in float32."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):

            def forward(x: Tensor, own: nn.Module = module) -> Tensor:
                size = x.square().mean(-1, keepdim=True) + own.variance_epsilon
                return own.weight * (x * size.rsqrt())

            module.forward = forward


def main() -> None:
    """Measure, and write a line for each update."""
    torch.set_num_threads(1)
    run = runner("math", "plain", 0, Sizes(), 24, max(STEPS))
    start = run.start
    keep_precision(start.policy.model.double())
    method, order = start.methods["own"], start.order(0)
    learner = start.learner(method)
    PATH.write_text("")
    for number in range(max(STEPS)):
        step = number + 1
        drawn = start._draw(method, order, run.config.seed, step)

        def hook(
            update: PendingUpdate, step: int = step, rollouts: object = drawn.rollouts
        ) -> None:
            row = {"step": step, **Single(run, update, step, rollouts).measure()}
            with PATH.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row, indent=1), flush=True)

        start._make(
            learner, method, drawn, step, number, before_step=hook if step in STEPS else None
        )
        start._made.clear()


if __name__ == "__main__":
    main()

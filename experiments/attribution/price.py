"""What effects cost: `python -m experiments.attribution.price TASK`, processor seconds in units of the update's own gradient.

The parts are measured in turns in one process, so that other work on the machine falls on all of them; the medians over the turns are printed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

from experiments.attribution.measure import RADIUS, RATES, Sizes, runner, solution_rows
from sharpscope.recording.step import PendingUpdate, RolloutBatch
from sharpscope.tokens import Outcome, attribute, effects, logp_gradient

TURNS, STEP = 3, 3


def main() -> None:
    """Make two steps, then measure at the third."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=[*RATES])
    parser.add_argument("--prompts", type=int, default=24, help="of a step")
    given = parser.parse_args()
    torch.set_num_threads(1)
    run = runner(given.task, "plain", 0, Sizes(), given.prompts, STEP)
    start, method = run.start, run.start.methods["own"]
    order, learner = start.order(0), start.learner(start.methods["own"])
    for number in range(STEP):
        drawn = start._draw(method, order, run.config.seed, number + 1)

        def hook(update: PendingUpdate, drawn: RolloutBatch = drawn) -> None:
            for name, times in parts(run, update, drawn).items():
                print(f"{name:28} {times:.2f}")

        start._make(
            learner,
            method,
            drawn,
            number + 1,
            number,
            before_step=hook if number + 1 == STEP else None,
        )
        start._made.clear()


def parts(run: object, update: PendingUpdate, drawn: RolloutBatch) -> dict[str, float]:
    """Seconds of the gradient, and of each part in units of it."""
    part = drawn.rollouts.rows(update.rows)
    model, temperature = run.start.policy.model, run.config.rollout.temperature
    mask = nn.functional.pad(part.completion_mask, (part.prompt_width, 0))
    coef = nn.functional.pad(update.loss_coef.float(), (part.prompt_width, 0))
    held, train = (solution_rows(run.solutions[split]) for split in ("heldout", "train"))
    outcomes = {
        "kl": Outcome(kind="kl"),
        "entropy": Outcome(kind="entropy"),
        "heldout": Outcome(kind="heldout", **held),
        "sharpness": Outcome(kind="sharpness", radius=RADIUS, **train),
    }
    rows = (part.input_ids, mask, coef)

    def of(*names: str, check: str = "off") -> Callable[[], object]:
        chosen = {name: outcomes[name] for name in names}
        gradient = [p.grad for p in run.start._learner.parameters]
        there = part.attention_mask
        return lambda: effects(
            model, *rows, run.start.optimizer, chosen, there, gradient=gradient, check=check
        )

    made: dict[str, Callable[[], object]] = {
        "gradient [s]": lambda: logp_gradient(model, *rows, part.attention_mask, temperature),
        "shares": lambda: attribute(model, *rows, None, part.attention_mask, check="off"),
    }
    made |= {name: of(name) for name in outcomes} | {"all four": of(*outcomes)}
    made["all four, with self-check"] = of(*outcomes, check="always")
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(TURNS):
        for name, call in made.items():
            began = time.process_time()
            call()
            seconds[name].append(time.process_time() - began)
    unit = median(seconds["gradient [s]"])
    return {n: median(t) / (unit if n != "gradient [s]" else 1.0) for n, t in seconds.items()}


if __name__ == "__main__":
    main()

"""What weights by effect do: predicted and measured change of sharpness and KL, and the price of a step.

    python -m experiments.effect_weights [--model math] [--batches 12] [--seed 3]

From one state (AdamW's moments of three batches of plain GRPO) one update of each arm is compared with that of plain GRPO on the same
completions. Predicted: Σ_t (w_t − 1)·E_t with the effects E_t of plain GRPO's update. Measured: the outcome after the arm's update less
that after plain GRPO's. `-shuffled` gives each completion's weights to other tokens. The price is the processor time of whole updates,
measured in turns. Prints Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy.stats import t as student
from torch import Tensor
from torch.nn.functional import pad

from sharpscope import Outcome, effects
from sharpscope.config import build_config
from sharpscope.forks.start import Start
from sharpscope.methods import named_method
from sharpscope.recording.step import RolloutBatch, step_tensors
from sharpscope.tokens.update_effects import Effects
from sharpscope.training.token_effects import unweighted_coefficients

ARMS = ("grpo-flat", "grpo-flat-shuffled", "grpo-flat-kl", "grpo-flat-kl-shuffled")
OUTCOMES = {"sharpness": Outcome(kind="sharpness"), "kl": Outcome(kind="kl")}
TIMED = ("grpo", "grpo-flat", "grpo-flat-kl")
ROUNDS = 5


@dataclass
class Found:
    """Changes against plain GRPO by arm and outcome, a value for each batch, and plain GRPO's own outcomes."""

    predicted: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    measured: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    plain: dict[str, list[float]] = field(default_factory=dict)


class Measured(Start):
    """A state, and the outcomes of updates from it that are not made."""

    def effects_of(self, batch: RolloutBatch, coef: Tensor) -> Effects:
        """Outcomes after the update with these coefficients (N, T), and the tokens' effects on them."""
        rollouts = batch.rollouts
        before = rollouts.input_ids.shape[1] - coef.shape[1]
        return effects(
            self.policy.model,
            rollouts.input_ids,
            pad(rollouts.completion_mask, (before, 0)),
            pad(coef, (before, 0)),
            self.optimizer,
            OUTCOMES,
            rollouts.attention_mask,
            self.scorer.temperature,
            max_grad_norm=self.config.optimizer.max_grad_norm,
            check="off",
        )

    def compare(self, number: int, found: Found) -> None:
        """Add a batch: every arm against plain GRPO."""
        grpo = named_method("grpo")
        batch = self.rollouts(grpo, number)
        stats = self.statistics(batch.rollouts)
        given = (batch.rollouts, batch.advantage)
        step = step_tensors(*given, stats, stats.logp, self.progress(), grpo)
        coef = unweighted_coefficients(grpo, step, self.config.rollout.max_new_tokens)
        plain, width = self.effects_of(batch, coef), coef.shape[1]
        for name in OUTCOMES:
            found.plain.setdefault(name, []).append(plain.after[name])
        for arm in ARMS:
            method = self.methods[arm]
            plan = self.learner(method).plan(*given, number, self.progress(), method, stats)
            changed = self.effects_of(batch, coef * plan.weight)
            for name in OUTCOMES:
                effect = plain[name][:, -width:].double()
                predicted = float((effect * (plan.weight.double() - 1))[step.mask.bool()].sum())
                found.predicted.setdefault((arm, name), []).append(predicted)
                change = changed.after[name] - plain.after[name]
                found.measured.setdefault((arm, name), []).append(change)
        self._made.clear()

    def prices(self) -> Mapping[str, list[float]]:
        """Processor time of sampling a batch and of an update of each timed method on it, in turns [s]."""
        spent: dict[str, list[float]] = {name: [] for name in ("sampling", *TIMED)}
        for _ in range(ROUNDS):
            self._made.clear()
            started = time.process_time()
            self.statistics(self.rollouts(named_method("grpo"), 0).rollouts)
            spent["sampling"].append(time.process_time() - started)
            for name in TIMED:
                started = time.process_time()
                self.update(name, 0)
                spent[name].append(time.process_time() - started)
        return {name: values[1:] for name, values in spent.items()}  # the first round warms up


def interval(values: list[float], scale: float) -> str:
    """Mean with its 95 % t-interval over batches, in units of `scale`."""
    array = np.array(values) / scale
    half = student.ppf(0.975, len(array) - 1) * array.std(ddof=1) / len(array) ** 0.5
    return f"{array.mean():+.2f} ± {half:.2f}".replace("-", "−")


def ratio(spent: Mapping[str, list[float]], name: str, also: str | None = None) -> str:
    """Processor time of a method in that of plain GRPO, median and range over the turns; `also` is added to both."""
    added = [0.0] * len(spent[name]) if also is None else spent[also]
    ratios = [
        (own + more) / (base + more)
        for own, base, more in zip(spent[name], spent["grpo"], added, strict=True)
    ]
    return f"{statistics.median(ratios):.1f} times plain GRPO's processor time ({min(ratios):.1f} to {max(ratios):.1f})"


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="math", help="an embedded policy")
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--seed", type=int, default=3)
    options = parser.parse_args()
    values = {
        "policy.model": f"embedded:{options.model}",
        "task.kind": options.model,
        "seed": options.seed,
        "update.mini_batches": 1,
        "steps": 1000,  # a constant learning rate over the batches
    }
    methods = {name: named_method(name) for name in ("grpo", *ARMS)}
    start = Measured(build_config(values=values), methods, None, warm_up=3, mini_batches=1)
    found = Found()
    for number in range(options.batches):
        start.compare(number, found)
    plain = {name: statistics.mean(of) for name, of in found.plain.items()}
    print(
        f"`{options.model}`, {options.batches} batches; plain GRPO's update ends at a sharpness of {plain['sharpness']:.4g} and a KL of "
        f"{plain['kl']:.3g} nats. Changes in percent of these, predicted and measured:\n"
    )
    print(f"| arm | {' | '.join(f'{name}: predicted | measured' for name in OUTCOMES)} |")
    print(f"|{'---|' * 5}")
    for arm in ARMS:
        cells = [
            interval(of[arm, name], plain[name] / 100)
            for name in OUTCOMES
            for of in (found.predicted, found.measured)
        ]
        print(f"| `{arm}` | {' | '.join(cells)} |")
    spent = start.prices()
    for name in TIMED[1:]:
        print(
            f"\n`{name}` takes {ratio(spent, name)} an update, {ratio(spent, name, 'sampling')} with sampling."
        )


if __name__ == "__main__":
    main()

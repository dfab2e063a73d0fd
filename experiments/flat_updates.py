"""Four ways to a flatter policy in one update each: weights by effect, the same weights shuffled, SAM and two gradient penalties.

    python -m experiments.flat_updates [--model math] [--seeds 3,4,5] [--batches 2] [--lr 1e-4]

From one state for each seed (AdamW's moments of four batches of plain GRPO) every arm makes its update on the same completions, which
is then scaled to the KL of plain GRPO's. SAM sharpness of the expected failure, the failure itself and the entropy are measured on
held-out prompts that no arm has learned from; sharpness and failure on different ones. The price is the model's forward passes in an
update, counted in tokens, and its processor time measured in turns, both in plain GRPO's. Prints Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from typing import Any

import pandas as pd
import torch

from experiments.effect_weights import interval
from sharpscope.config import ForkSpec, build_config
from sharpscope.forks.experiment import FixedRollouts, Measure
from sharpscope.forks.start import Start
from sharpscope.methods import parse_methods

ARMS = ["grpo", "grpo-flat", "grpo-flat-shuffled", "grpo-sam", "grpo-gnp", "grpo-gr"]
OUTCOMES = {
    "sam_sharpness": "SAM sharpness [%]",
    "heldout_failure": "held-out failure [points]",
    "entropy": "entropy [%]",
}
PROMPTS = 75
"""Held-out prompts of a batch for each outcome: two of them, and then the next batch's two, fill the 300 of `math`."""


class Independent(Measure):
    """Measures sharpness on further held-out prompts in place of those that the update learned from."""

    def fixed(self, split: str, batch: int) -> FixedRollouts:
        """Completions for the outcomes of a batch; `train` is what sharpness is measured on."""
        return super().fixed("heldout", 2 * batch + (1 if split == "train" else 0))


def start_of(model: str, seed: int, lr: float) -> Start:
    """A state of the policy from which the updates are made."""
    values: dict[str, Any] = {
        "policy.model": f"embedded:{model}",
        "task.kind": model,
        "seed": seed,
        "optimizer.lr": lr,
        "update.mini_batches": 1,
        "steps": 1000,  # a constant learning rate over the batches
    }
    return Start(build_config(values=values), parse_methods(ARMS), None, warm_up=4, mini_batches=1)


def measured(start: Start, spec: ForkSpec, seed: int) -> pd.DataFrame:
    """Rows of the outcomes of every arm and batch, at the KL of plain GRPO's update."""
    measure = Independent(start, spec, None)
    rows = []
    for batch in range(spec.batches):
        found = pd.DataFrame(measure.batch_rows("", batch)).assign(seed=seed)
        rows.append(found)
        print(f"seed {seed}, batch {batch + 1} of {spec.batches}", flush=True)
    return pd.concat(rows)


def differences(rows: pd.DataFrame, outcome: str) -> pd.DataFrame:
    """Value of an outcome after each arm's update at equal KL less that after plain GRPO's, a row for each state and batch."""
    chosen = rows[(rows["outcome"] == outcome) & (rows["comparison"] == "kl") & rows["valid"]]
    wide = chosen.pivot(index=["seed", "batch"], columns="arm", values="value")[ARMS]
    change = wide.sub(wide["grpo"], axis=0)
    return change if outcome == "heldout_failure" else change.div(wide["grpo"], axis=0)


def prices(start: Start) -> Mapping[str, tuple[float, float]]:
    """Tokens of the model's forward passes and processor time of each arm's update, in plain GRPO's."""
    passed: list[int] = []
    embedding = start.policy.model.get_input_embeddings()
    hook = embedding.register_forward_hook(
        lambda module, given, output: passed.append(given[0].numel())
    )
    spent: dict[str, list[float]] = {arm: [] for arm in ARMS}
    tokens = {}
    for _ in range(4):
        start.restore()
        start.statistics(start.rollouts(start.methods["grpo"], 0).rollouts)
        for arm in ARMS:
            passed.clear()
            began = time.process_time()
            start.update(arm, 0)
            spent[arm].append(time.process_time() - began)
            tokens[arm] = sum(passed)
    hook.remove()
    return {
        arm: (
            tokens[arm] / tokens["grpo"],
            statistics.median(
                own / plain for own, plain in zip(spent[arm][1:], spent["grpo"][1:], strict=True)
            ),
        )
        for arm in ARMS
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="math", help="an embedded policy")
    parser.add_argument("--seeds", default="3,4,5")
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate of the update")
    options = parser.parse_args()
    torch.set_num_threads(1)
    spec = ForkSpec(
        methods=tuple(ARMS),
        batches=options.batches,
        outcomes=("failure", "entropy", "sharpness"),
        prompts=PROMPTS,
        samples=4,
    )
    frames = []
    for seed in map(int, options.seeds.split(",")):
        start = start_of(options.model, seed, options.lr)
        frames.append(measured(start, spec, seed))
    rows = pd.concat(frames)
    changes = {outcome: differences(rows, outcome) for outcome in OUTCOMES}
    turned = rows[rows["outcome"] == "update_rotation"].groupby("arm")["value"].mean()
    price = prices(start)
    counts = [f"{len(change.dropna())} batches" for change in changes.values()]
    heads = [f"{head}, {count}" for head, count in zip(OUTCOMES.values(), counts, strict=True)]
    print(
        f"| arm | turn of the update [°] | {' | '.join(heads)} | tokens passed | processor time |"
    )
    print(f"|{'---|' * (4 + len(heads))}")
    for arm in ARMS[1:]:
        cells = [interval(change[arm].dropna().tolist(), 0.01) for change in changes.values()]
        passes, seconds = price[arm]
        print(
            f"| `{arm}` | {turned[arm]:.1f} | {' | '.join(cells)} | {passes:.1f} | {seconds:.1f} |"
        )
    plain = rows[(rows["arm"] == "grpo") & (rows["comparison"] == "step")]
    print(plain.groupby("outcome")[["start", "value"]].mean().to_string())


if __name__ == "__main__":
    main()

"""The tails of cov-grpo's covariances beside the paper's table (arXiv 2605.11538).

    python -m experiments.covariance_tails [--batches 2] [--seed 3]

For each embedded policy, at its start: c_t = (ln π_t − mean ln π)·(A_t − mean A) of the loss tokens of some batches of plain GRPO, each
centered on its own means. A row has a share of the tokens: the value that this share of the tokens with c > 0 exceeds, and the same share of
those with c < 0 falls below, then the means beyond these values [nats × advantage]. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import torch
from torch import Tensor

from sharpscope.config import build_config
from sharpscope.methods import named_method
from sharpscope.policy import load_policy
from sharpscope.policy.forward import Scorer
from sharpscope.recording.step import step_tensors
from sharpscope.tasks import make_task
from sharpscope.training import DataOrder
from sharpscope.training.rollouts import draw_rollouts, split_examples

POLICIES = ("knights_knaves", "math", "tool_qa")
PAPER: Mapping[float, tuple[float, float]] = {
    0.0001: (11.52, -13.62),
    0.01: (3.32, -3.34),
    0.2: (0.58, -0.36),
    0.4: (0.33, -0.22),
    1.0: (0.06, -0.04),
}
"""Share of the tokens -> the paper's positive and negative covariance, as a reader's note has its table."""


def covariances(name: str, batches: int, seed: int) -> Tensor:
    """Covariances of the loss tokens of some batches of an embedded policy, (M,)."""
    config = build_config(
        values={"policy.model": f"embedded:{name}", "task.kind": name, "seed": seed}
    )
    policy, task = load_policy(config.policy), make_task(config.task)
    scorer = Scorer(policy.model, config.rollout.temperature, 4096, share_prompt=True)
    order, grpo, found = DataOrder(split_examples(task, "train"), seed), named_method("grpo"), []
    for step in range(1, batches + 1):
        batch = draw_rollouts(policy, task, order, grpo, config.rollout, seed, step)
        stats = scorer.statistics(batch.rollouts)
        tensors = step_tensors(batch.rollouts, batch.advantage, stats, stats.logp, 0.0, grpo)
        found.append(tensors.covariance[tensors.mask.bool()])
    return torch.cat(found)


def tail(values: Tensor, share: float) -> tuple[float, float]:
    """The smallest of the `share` of the largest values, at least one of them, and their mean."""
    largest = values.topk(max(1, round(share * len(values)))).values
    return float(largest[-1]), float(largest.mean())


def cell(values: Tensor, share: float) -> str:
    """Thresholds of both signs, and in brackets the means beyond them, unless they are of one token."""
    (above, mean_above), (below, mean_below) = (
        tail(side[side > 0], share) for side in (values, -values)
    )
    means = f" ({mean_above:.3g} / {-mean_below:.3g})" if mean_above > above else ""
    return f"{above:.3g} / {-below:.3g}{means}".replace(" -", " −")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=2, help="batches of each policy")
    parser.add_argument("--seed", type=int, default=3)
    options = parser.parse_args()
    found = {name: covariances(name, options.batches, options.seed) for name in POLICIES}
    heads = [f"`{name}` ({len(values):,} tokens)" for name, values in found.items()]
    print(f"| share | paper | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 2)}")
    for share, (above, below) in PAPER.items():
        cells = [cell(values, share) for values in found.values()]
        print(f"| {100 * share:g} % | {above} / −{-below} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

"""Delightful policy gradient's claim, on a batch of which a part was not drawn from the policy (see DECLARATION.md).

For every batch and method, the cosine between the gradient on the batch and the policy gradient, which is estimated once from
many completions of the policy itself. A contaminated completion is a number drawn uniformly among the possible sums.

python -m experiments.studies.3.contaminated RUN CHECKPOINT --out FILE
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from random import Random

import pandas as pd
import torch
from torch import Tensor

from sharpscope.config import read_recorded
from sharpscope.forks.rotating import _Start
from sharpscope.forks.start import arms_of, saved_states
from sharpscope.methods.plan import calibrate
from sharpscope.policy import Rollouts, completions_of
from sharpscope.policy.forward import score_completions
from sharpscope.recording.step import RolloutBatch, step_tensors
from sharpscope.tasks import Example
from sharpscope.training.rollouts import draw_group, step_advantages

SUM = "+advantage.scale=none+aggregate=token_mean"  # of all tokens alike, so that plain GRPO's is the policy gradient
METHODS = (
    f"plain=grpo{SUM}",
    f"probability=grpo{SUM}+weight.kind=power",
    f"acting=grpo-sg{SUM}+weight.preset=calibrated+weight.U=16",
    "delight",
)
SUMS = range(20, 199)
"""What a contaminated completion says, with equal probability."""
NUMBERS = {f" {number}\n" for number in SUMS}
REFERENCE = 64
"""Completions a question of the estimate of the policy gradient."""


def main() -> None:
    """Print a row a batch, share of contamination and method."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("checkpoint")
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True, help="CSV file")
    options = parser.parse_args()
    config = read_recorded(options.run, overrides=())
    (state,) = saved_states(options.run, [options.checkpoint])
    start = _Start(config, arms_of(METHODS, config), state, measure=False, warm_up=0)
    questions = start.task.splits()["train"]
    halves = [true_gradient(start, questions, seed) for seed in (1, 2)]
    truth, noise = halves[0] + halves[1], cosine(*halves)
    rows = []
    for number in range(options.batches):
        chosen = Random(f"batch {number}").sample(questions, config.rollout.prompts_per_step)
        clean, _ = draw_group(start.policy, start.task, chosen, config.rollout, 1000 + number)
        for wrong in (0, 2):  # of the 8 completions of a question
            batch = contaminated(start, chosen, clean, wrong, number)
            share = wrong / config.rollout.group_size
            for name, gradient in gradients(start, batch, share).items():
                rows.append(
                    (
                        number,
                        share,
                        name,
                        cosine(gradient, truth),
                        float(gradient.double().norm()),
                        noise,
                    )
                )
        names = ["batch", "contaminated", "method", "cosine", "norm", "cosine_of_halves"]
        table = pd.DataFrame(rows, columns=names)
        table.to_csv(options.out, index=False)  # whole batches: an interrupted command keeps them
        print(
            table[table["batch"] == number].to_string(index=False, header=number == 0), flush=True
        )


def true_gradient(start: _Start, questions: list[Example], seed: int) -> Tensor:
    """Estimate of ∇E[reward] from half of the completions: unbiased up to a factor, since plain GRPO's baseline is the group's mean."""
    spec = start.config.rollout.model_copy(update={"group_size": REFERENCE // 2})
    total = torch.zeros(())
    for first in range(0, len(questions), 8):
        part = questions[first : first + 8]
        rollouts, _ = draw_group(start.policy, start.task, part, spec, 1_000_000 * seed + first)
        centered = rollouts.reward.view(len(part), -1)
        centered = (centered - centered.mean(1, keepdim=True)).flatten()
        total = (
            total
            + gradients_of(start, rollouts, [-centered[:, None] * rollouts.completion_mask])[0]
        )
    return total


def contaminated(
    start: _Start, examples: list[Example], clean: Rollouts, wrong: int, number: int
) -> RolloutBatch:
    """The batch with the last `wrong` completions of each question replaced."""
    draw, tokenizer, size = (
        Random(f"wrong {number}"),
        start.policy.tokenizer,
        start.config.rollout.group_size,
    )
    prompts, completions, texts = [], [], list(clean.texts)
    for row in range(len(clean)):
        present = clean.attention_mask[row, : clean.prompt_width].bool()
        prompts.append(clean.input_ids[row, : clean.prompt_width][present].tolist())
        completion = clean.completion_ids[row][clean.completion_mask[row].bool()].tolist()
        if row % size >= size - wrong:
            texts[row] = f" {draw.choice(SUMS)}\n"
            completion = tokenizer(texts[row], add_special_tokens=False)["input_ids"]
        completions.append(completion)
    rewards = [start.task.score(examples[row // size], text) for row, text in enumerate(texts)]
    made = replace(completions_of(prompts, completions), group=clean.group, texts=texts)
    rollouts = made.with_reward(torch.tensor([reward.total for reward in rewards]))
    return RolloutBatch(examples, rollouts, rewards, torch.zeros(len(rollouts)), None)


def gradients(start: _Start, batch: RolloutBatch, share: float) -> dict[str, Tensor]:
    """The gradient of each method, and of plain GRPO with exact importance ratios of the completions."""
    rollouts, stats = batch.rollouts, start.scorer.statistics(batch.rollouts)
    coefs = {}
    for name, method in start.methods.items():
        advantage = step_advantages(method, rollouts, batch.rewards, stats)
        tensors = step_tensors(rollouts, advantage, stats, stats.logp, start.progress(), method)
        calibrated = method.model_copy(update={"weight": calibrate(method.weight, tensors)})
        coefs[name] = start.tokens(
            calibrated, replace(batch, advantage=advantage), advantage, stats
        ).loss_coef
    policy = (stats.logp.cpu() * rollouts.completion_mask).sum(1).exp()  # (N,) π of the completion
    possible = torch.tensor([text in NUMBERS for text in rollouts.texts])
    behavior = (1 - share) * policy + share * possible / len(SUMS)
    coefs["importance"] = coefs["plain"] * (policy / behavior)[:, None]
    return dict(zip(coefs, gradients_of(start, rollouts, list(coefs.values())), strict=True))


def gradients_of(start: _Start, rollouts: Rollouts, coefs: list[Tensor]) -> list[Tensor]:
    """The gradient Σ coef·∇log π as one vector, for each of the coefficients (N, T)."""
    model = start.policy.model
    weights = [p for p in model.parameters() if p.requires_grad]
    scored = score_completions(
        model, rollouts, start.config.rollout.temperature, share_prompt=True, with_grad=True
    )
    losses = [(scored.logp * coef.to(scored.logp)).sum() for coef in coefs]
    found = (
        torch.autograd.grad(loss, weights, retain_graph=loss is not losses[-1]) for loss in losses
    )
    return [torch.cat([part.flatten() for part in parts]) for parts in found]


def cosine(one: Tensor, other: Tensor) -> float:
    """Their cosine, in float64: float32 sums of 1.3e8 products are off by a percent."""
    a, b = one.double(), other.double()
    return float(a @ b / (a.norm() * b.norm()))


if __name__ == "__main__":
    main()

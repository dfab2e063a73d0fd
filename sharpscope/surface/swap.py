"""The swap test: how much of a tuned model's gain comes from the few positions where it differs most (arXiv 2603.22446)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import Cache

from sharpscope.config.run import SamplingSpec
from sharpscope.errors import UserError
from sharpscope.policy import Policy, render_prompts
from sharpscope.policy.decoding import as_text, completion_uniforms, draw
from sharpscope.policy.generation import left_pad
from sharpscope.progress import Remaining, Tell, silent
from sharpscope.tasks import Example, InteractiveTask, Task

if TYPE_CHECKING:
    import pandas as pd

SHARES = (0.01, 0.04, 0.16)
"""Shares of the positions that are sampled from the tuned model."""

Choice = Callable[[Tensor], Tensor]
"""JS divergences (n,) of the next tokens → which of them are drawn from the tuned model, (n,) bool, on the CPU."""


def js_divergence(first: Tensor, second: Tensor) -> Tensor:
    """Jensen–Shannon divergence (...,) [nats], at most ln 2, of log-probabilities (..., V) of two distributions."""
    middle = torch.logaddexp(first, second) - math.log(2)
    parts = [(p.exp() * (p - middle)).nan_to_num(0.0).sum(-1) for p in (first, second)]
    return ((parts[0] + parts[1]) / 2).clamp_min(0.0)


def swap_test(
    base: Policy,
    tuned: Policy,
    task: Task,
    examples: Sequence[Example],
    spec: SamplingSpec,
    *,
    seed: int = 0,
    shares: Sequence[float] = SHARES,
    tell: Tell = silent,
) -> pd.DataFrame:
    """Success where only the most changed positions are sampled from the tuned model, the others from the base model.

    A position is changed most where the JS divergence of the two models' next tokens is above a threshold: the quantile of it that
    leaves a share of the positions of the tuned model's own completions. All arms use the same random numbers. `tell` is told each
    arm's success.

    Returns:
        A row for each prompt and arm. Columns: arm (`base`, `tuned`, `changed` positions, `random` positions), share (intended),
        used (realized share), prompt, correct (of one completion).

    Raises:
        UserError: the models have different vocabularies, or the task replies within completions.
    """
    import pandas as pd

    if base.head.weight.shape[0] != tuned.head.weight.shape[0]:
        raise UserError("compare: the models have vocabularies of different sizes")
    prompts = render_prompts(examples, base)
    rows = torch.arange(len(prompts))
    uniforms = completion_uniforms(seed, rows, torch.zeros_like(rows), spec.max_new_tokens)
    draws = torch.Generator().manual_seed(seed)
    remaining = Remaining(2 + 2 * len(shares))
    made: list[pd.DataFrame] = []

    def measure(arm: str, share: float, choice: Choice) -> Tensor:
        """Add an arm's rows, and return the divergences of its positions."""
        ended = partial(_ended, base, task, examples)
        texts, js, used = _complete(base, tuned, prompts, uniforms, choice, spec, ended)
        pairs = zip(examples, texts, strict=True)
        correct = [float(task.score(example, text).correct) for example, text in pairs]
        known = {
            "arm": arm,
            "share": share,
            "used": used,
            "prompt": rows,
            "correct": correct,
        }
        made.append(pd.DataFrame(known))
        left = remaining.after(len(made))
        tell(f"swap test: {arm} {share:.0%}, success {sum(correct) / len(correct):.1%}{left}")
        return js

    measure("base", 0.0, lambda js: js > math.inf)
    divergences = measure("tuned", 1.0, lambda js: js > -math.inf)
    for share in shares:
        measure("changed", share, partial(torch.lt, torch.quantile(divergences, 1 - share)))
        measure("random", share, partial(_at_random, draws, share))
    return pd.concat(made, ignore_index=True)


def _at_random(draws: torch.Generator, share: float, js: Tensor) -> Tensor:
    """A random share of the positions."""
    return torch.rand(len(js), generator=draws) < share


def _ended(
    policy: Policy,
    task: Task,
    examples: Sequence[Example],
    row: int,
    tokens: list[int],
) -> bool:
    """Whether the task ends a completion at one of its stops; refused where it replies."""
    if not isinstance(task, InteractiveTask):
        return False
    text = as_text(policy, tokens)
    if not any(stop in text for stop in task.stop):
        return False
    if task.respond(examples[row], text) is not None:
        raise UserError(
            f"task, {task.name}: replies within completions, which the swap test does not do"
        )
    return True


@torch.no_grad()
def _complete(
    base: Policy,
    tuned: Policy,
    prompts: Sequence[Sequence[int]],
    uniforms: Tensor,
    choice: Choice,
    spec: SamplingSpec,
    ended: Callable[[int, list[int]], bool],
) -> tuple[list[str], Tensor, float]:
    """Completions, JS divergence at each of their positions (M,), and the share of positions drawn from the tuned model."""
    new, mask = (part.to(base.device) for part in left_pad(prompts, base.pad_id))
    ends = torch.tensor(base.eos_ids)
    going = torch.ones(len(prompts), dtype=torch.bool)
    tokens: list[list[int]] = [[] for _ in prompts]
    caches: list[Cache | None] = [None, None]
    divergences: list[Tensor] = []
    swapped = 0
    heat = spec.temperature or 1.0  # of greedy sampling, too, the models' own distributions differ
    for position in range(spec.max_new_tokens):
        logits = []
        places = (mask.cumsum(1) - 1).clamp(min=0)  # (n, L)
        places = places[:, -new.shape[1] :]
        for number, policy in enumerate((base, tuned)):
            output = policy.model(
                input_ids=new,
                attention_mask=mask,
                position_ids=places,
                past_key_values=caches[number],
                use_cache=True,
            )
            caches[number] = output.past_key_values
            logits.append(output.logits[:, -1].float())
        js = js_divergence(*(torch.log_softmax(z / heat, -1) for z in logits)).cpu()  # (n,)
        chosen = choice(js)
        z = torch.where(chosen.to(base.device)[:, None], logits[1], logits[0])
        token, _, _ = draw(z, uniforms[:, position].to(base.device), spec)
        divergences.append(js[going])
        swapped += int(chosen[going].sum())
        for row in going.nonzero()[:, 0].tolist():
            tokens[row].append(int(token[row]))
            going[row] = not ended(row, tokens[row])
        going &= ~torch.isin(token.cpu(), ends)
        if not bool(going.any()):
            break
        new = token[:, None]
        mask = torch.cat([mask, torch.ones_like(new)], 1)
    every = torch.cat(divergences)
    texts = [as_text(base, row) for row in tokens]
    return texts, every, swapped / len(every)

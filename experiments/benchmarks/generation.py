"""Tokens per second of generation against transformers' `generate` with its cache, on the same batch of prompts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from sharpscope.config import build_config
from sharpscope.policy import Policy, SamplingSpec, decoding, load_policy, render_prompts, with_openings
from sharpscope.policy.generation import generate, left_pad
from sharpscope.recording import environment
from sharpscope.tasks import make_task

REQUIRED = 3.0
"""Least ratio of tokens per second."""


@dataclass(frozen=True)
class Generated:
    """The policy's tokens, wall seconds and processor seconds of one measurement."""

    tokens: int
    wall: float
    cpu: float


@dataclass(frozen=True)
class Comparison:
    """Measurements of one policy, the sides alternating."""

    policy: str
    parameters: int
    completions: int
    prompt_tokens: float
    limit: int
    sides: dict[str, list[Generated]]  # "direct", "layers" (through transformers' layers), "generate"

    def ratios(self, side: str, clock: str) -> list[float]:
        """Tokens per second of `side` over those of transformers' generate, by measurement; `clock` is wall or cpu."""
        return [
            (ours.tokens / getattr(ours, clock)) / (theirs.tokens / getattr(theirs, clock))
            for ours, theirs in zip(self.sides[side], self.sides["generate"], strict=True)
        ]


def compare_generation(
    tasks: Sequence[str], repeats: int, threads: int | None, overrides: Sequence[str] = ()
) -> tuple[list[Comparison], dict[str, Any]]:
    """Generate a training step's completions of each task with its embedded policy.

    All sides sample their own tokens at temperature 1 until the end-of-text token or the limit, so that lengths agree in
    distribution only; tokens after the end are not counted.

    Args:
        tasks: Kinds of tasks with an embedded policy.
        repeats: Measurements of each side, alternating.
        threads: Threads of torch; None: all physical cores.
        overrides: Any field of the run.

    Returns:
        A comparison for each task, and the settings.
    """
    used, found = environment.set_threads(threads), []
    for task in tasks:
        config = build_config(None, overrides, {"task": {"kind": task}})
        policy = load_policy(config.policy)
        examples = make_task(config.task).splits()["train"][: config.rollout.prompts_per_step]
        prompts = render_prompts(with_openings(examples, policy), policy)
        size, spec = config.rollout.group_size, config.rollout
        runs: dict[str, Callable[[int], int]] = {
            "direct": lambda seed, p=policy, t=prompts, n=size, s=spec: _ours(p, t, n, s, seed),
            "layers": lambda seed, p=policy, t=prompts, n=size, s=spec: _through_layers(p, t, n, s, seed),
            "generate": lambda seed, p=policy, t=prompts, n=size, s=spec: _theirs(p, t, n, s, seed),
        }
        _ours(policy, prompts, 1, spec, 0)  # what is loaded at first use is no part of the time
        _theirs(policy, prompts[:1], 1, spec, 0)
        sides: dict[str, list[Generated]] = {name: [] for name in runs}
        for seed in range(repeats):
            for name, run in runs.items():
                wall, cpu = time.perf_counter(), time.process_time()
                tokens = run(seed)
                sides[name].append(Generated(tokens, time.perf_counter() - wall, time.process_time() - cpu))
        mean = statistics.mean(map(len, prompts))
        found.append(
            Comparison(config.policy.model, policy.parameters, len(prompts) * size, mean, spec.max_new_tokens, sides)
        )
    settings = {
        "threads": used,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": str(policy.device),
        "repeats": repeats,
    }
    return found, settings


def _ours(policy: Policy, prompts: list[list[int]], group_size: int, spec: SamplingSpec, seed: int) -> int:
    out = generate(policy, prompts, group_size, spec, torch.Generator().manual_seed(seed))
    return int(out.completion_mask.sum())


def _through_layers(policy: Policy, prompts: list[list[int]], group_size: int, spec: SamplingSpec, seed: int) -> int:
    direct = decoding.can_decode_directly
    decoding.can_decode_directly = lambda model: False
    try:
        return _ours(policy, prompts, group_size, spec, seed)
    finally:
        decoding.can_decode_directly = direct


@torch.no_grad()
def _theirs(policy: Policy, prompts: list[list[int]], group_size: int, spec: SamplingSpec, seed: int) -> int:
    ids, attention = (part.repeat_interleave(group_size, 0) for part in left_pad(prompts, policy.pad_id))
    model: Any = policy.model
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        options = {name: getattr(spec, name) for name in ("temperature", "top_k", "top_p", "max_new_tokens")}
        out = model.generate(
            ids.to(policy.device),
            attention_mask=attention.to(policy.device),
            do_sample=True,
            pad_token_id=policy.pad_id,
            eos_token_id=list(policy.eos_ids),
            **options,
        )[:, ids.shape[1] :]
    ended = torch.isin(out, torch.tensor(policy.eos_ids, device=out.device)).long()
    return int((ended.cumsum(1) - ended == 0).sum())  # up to the first end-of-text token, which counts


def report(found: Sequence[Comparison], settings: dict[str, Any]) -> str:
    """The result as a page of Markdown."""
    lines = [
        "# Generation against transformers' generate",
        "",
        f"`python -m experiments.benchmarks generation`: a training step's completions, temperature 1, {settings['device']}, "
        f"threads: {settings['threads']}, torch {settings['torch']}, transformers {settings['transformers']}; medians of "
        f'{settings["repeats"]} measurements of each side, alternating. Both keep keys and values. "Direct" is what runs use '
        'for these policies; "layers" is the general path, through transformers\' layers.',
        "",
        "| policy | completions | mean prompt, limit [tokens] | mean completion (ours, generate) | tokens/s direct | layers | "
        "generate | ratio direct, wall (range) | direct, processor time | layers, processor time |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        lengths = [
            statistics.mean(g.tokens for g in one.sides[side]) / one.completions for side in ("direct", "generate")
        ]
        speeds = [
            f"{statistics.median(g.tokens / g.wall for g in one.sides[side]):.0f}"
            for side in ("direct", "layers", "generate")
        ]
        wall = one.ratios("direct", "wall")
        cpu = {side: statistics.median(one.ratios(side, "cpu")) for side in ("direct", "layers")}
        lines.append(
            f"| `{one.policy}` ({one.parameters:,}) | {one.completions} | {one.prompt_tokens:.0f}, {one.limit} | "
            f"{lengths[0]:.0f}, {lengths[1]:.0f} | {' | '.join(speeds)} | **{statistics.median(wall):.1f}** "
            f"({min(wall):.1f}–{max(wall):.1f}) | {cpu['direct']:.1f} | {cpu['layers']:.1f} |"
        )
    lines += ["", f"Required: at least {REQUIRED:g}. Ratios are of tokens per second."]
    return "\n".join(lines) + "\n"

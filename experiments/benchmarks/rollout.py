"""Conversations of several turns: all together, against one at a time with transformers' own generate and its cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from sharpscope.config import build_config
from sharpscope.errors import UserError
from sharpscope.policy import Policy, SamplingSpec, draw_completions, load_policy, render_prompts, with_openings
from sharpscope.policy.decoding import as_text
from sharpscope.recording import environment
from sharpscope.tasks import Example, InteractiveTask, make_task

REQUIRED = 5.0
"""Least ratio of the two sides' times a conversation."""


@dataclass(frozen=True)
class Played:
    """Seconds a conversation, and per conversation the mean tokens: the policy's own and the environment's."""

    seconds: float
    own: float
    heard: float


def compare_rollouts(
    prompts: int = 24,
    group_size: int = 8,
    slow: int = 24,
    repeats: int = 3,
    threads: int | None = None,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Time a conversation of the task `tool_qa` with its embedded policy, played together and one at a time.

    Both sides draw their own tokens from the same policy and distribution and have the same limit, so that lengths agree in
    distribution only; the result has them, and the ratio of the policy's tokens per second too. One at a time keeps its
    keys and values over all turns, as transformers' generate allows: nothing is read twice.

    Args:
        prompts: questions.
        group_size: conversations about each, all decoded together.
        slow: how many of these are played one at a time; time is compared per conversation.
        repeats: measurements of each side, alternating, whose median counts.
        threads: of torch, for both sides; None: all physical cores.
        overrides: any field of the configuration.

    Raises:
        UserError: the task does not interact, or its training questions are too few.
    """
    config = build_config(None, overrides, {"task": {"kind": "tool_qa"}})
    used = environment.set_threads(threads)
    policy, task = load_policy(config.policy), make_task(config.task)
    if not isinstance(task, InteractiveTask):
        raise UserError(f"task.kind = '{config.task.kind}': has no turns to play; use tool_qa")
    examples = task.splits()["train"][:prompts]
    if len(examples) < prompts:
        raise UserError(f"--prompts {prompts}: the task has only {len(examples)} training questions")
    ours, theirs = [], []
    together(policy, task, examples[:2], 2, config.rollout, 0)  # what is loaded at first use is no part of the time
    one_at_a_time(policy, task, examples[:2], config.rollout, 0)
    chosen = [examples[i % prompts] for i in range(slow)]
    for repeat in range(repeats):
        ours.append(together(policy, task, examples, group_size, config.rollout, repeat))
        theirs.append(one_at_a_time(policy, task, chosen, config.rollout, repeat))
    fast, single = _median(ours), _median(theirs)
    return {
        "threads": used,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "policy": config.policy.model,
        "parameters": policy.parameters,
        "device": str(policy.device),
        "together": prompts * group_size,
        "one_at_a_time": slow,
        "repeats": repeats,
        "max_new_tokens": config.rollout.max_new_tokens,
        "together_ms": 1e3 * fast.seconds,
        "one_at_a_time_ms": 1e3 * single.seconds,
        "together_own": fast.own,
        "one_at_a_time_own": single.own,
        "together_heard": fast.heard,
        "one_at_a_time_heard": single.heard,
        "ratio": single.seconds / fast.seconds,
        "ratio_per_token": (single.seconds / single.own) / (fast.seconds / fast.own),
        "ratios": [b.seconds / a.seconds for a, b in zip(ours, theirs, strict=True)],
    }


def _median(played: Sequence[Played]) -> Played:
    return Played(*(statistics.median(getattr(p, name) for p in played) for name in ("seconds", "own", "heard")))


def together(
    policy: Policy, task: InteractiveTask, examples: Sequence[Example], group_size: int, spec: SamplingSpec, seed: int
) -> Played:
    """All conversations at once, as a training step draws them."""
    began = time.perf_counter()
    drawn = draw_completions(policy, task, examples, group_size, spec, seed)
    _wait(policy)
    seconds, own = time.perf_counter() - began, int(drawn.completion_mask.sum())
    count = len(drawn)
    return Played(seconds / count, own / count, (int(drawn.lengths.sum()) - own) / count)


@torch.no_grad()
def one_at_a_time(
    policy: Policy, task: InteractiveTask, examples: Sequence[Example], spec: SamplingSpec, seed: int
) -> Played:
    """The same conversations one after the other: generate until a stop text, ask the task, go on with the same cache."""
    own = heard = 0
    before = torch.random.get_rng_state()
    torch.manual_seed(seed)  # generate draws from the global generator
    began = time.perf_counter()
    for example, prompt in zip(with_openings(examples, policy), render_prompts(examples, policy), strict=True):
        spoken, replied = _play(policy, task, example, prompt, spec)
        own, heard = own + spoken, heard + replied
    _wait(policy)
    seconds = time.perf_counter() - began
    torch.random.set_rng_state(before)
    return Played(seconds / len(examples), own / len(examples), heard / len(examples))


def _play(
    policy: Policy, task: InteractiveTask, example: Example, prompt: list[int], spec: SamplingSpec
) -> tuple[int, int]:
    """One conversation; returns its numbers of own and of replied tokens."""
    model: Any = policy.model
    ids, text, own, heard, cache = list(prompt), "", 0, 0, DynamicCache()
    while own + heard < spec.max_new_tokens:
        inputs = torch.tensor([ids], device=policy.device)
        out = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            past_key_values=cache,
            do_sample=True,
            temperature=spec.temperature,
            top_k=spec.top_k,
            top_p=spec.top_p,
            max_new_tokens=spec.max_new_tokens - own - heard,
            stop_strings=list(task.stop),
            tokenizer=policy.tokenizer,
            pad_token_id=policy.pad_id,
            eos_token_id=list(policy.eos_ids),
        )
        turn = out[0, len(ids) :].tolist()
        ids, own = ids + turn, own + len(turn)
        text += as_text(policy, turn)
        reply = task.respond(example, text)
        if reply is None:
            break
        new = policy.tokenizer(reply, add_special_tokens=False)["input_ids"]
        if own + heard + len(new) >= spec.max_new_tokens:
            break
        ids, text, heard = ids + new, text + reply, heard + len(new)
    return own, heard


def _wait(policy: Policy) -> None:
    if policy.device.type == "cuda":
        torch.cuda.synchronize(policy.device)


def report(found: dict[str, Any]) -> str:
    """The result as a page of Markdown."""
    rows = [
        ("", "conversations", "ms each", "own tokens each", "replied tokens each"),
        ("---", "---", "---", "---", "---"),
        (
            "all together",
            str(found["together"]),
            f"{found['together_ms']:.2f}",
            f"{found['together_own']:.1f}",
            f"{found['together_heard']:.1f}",
        ),
        (
            "one at a time (transformers generate, cache kept over turns)",
            str(found["one_at_a_time"]),
            f"{found['one_at_a_time_ms']:.2f}",
            f"{found['one_at_a_time_own']:.1f}",
            f"{found['one_at_a_time_heard']:.1f}",
        ),
    ]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    each = ", ".join(f"{ratio:.1f}" for ratio in found["ratios"])
    return (
        "# Conversations: all together against one at a time\n\n"
        f"Task `tool_qa`, `{found['policy']}` ({found['parameters']:,} parameters, {found['device']}, {found['threads']} "
        f"threads), temperature 1, at most {found['max_new_tokens']} tokens a conversation, replies included; torch "
        f"{found['torch']}, transformers {found['transformers']}. Medians of {found['repeats']} measurements of each side, "
        f"alternating.\n\n{table}\n\n"
        f"Ratio of times a conversation: **{found['ratio']:.1f}** (required: at least {REQUIRED:g}); of each pair: {each}. "
        f"Ratio of times a token of the policy's own: {found['ratio_per_token']:.1f}.\n"
    )

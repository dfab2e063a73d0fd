"""Generation and scoring one completion and one token at a time, running the whole text through the model each time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def log_softmax(z: list[float]) -> list[float]:
    """ln softmax(z) by its definition."""
    top = max(z)
    total = math.log(math.fsum(math.exp(value - top) for value in z))
    return [value - top - total for value in z]


def choose(logp: list[float], u: float, *, greedy: bool, top_p: float) -> tuple[int, float]:
    """The token that inverse sampling gives at `u`, and its log-probability among the tokens that were kept."""
    likeliest_first = sorted(range(len(logp)), key=lambda j: -logp[j])
    if greedy:
        return likeliest_first[0], 0.0
    kept = likeliest_first if top_p < 1 else list(range(len(logp)))
    if top_p < 1:
        needed, mass, total = 0, 0.0, math.fsum(math.exp(logp[j]) for j in kept)
        # rounding can leave the sum below the total
        while mass < top_p * total and needed < len(kept):
            mass += math.exp(logp[kept[needed]])
            needed += 1
        kept = kept[:needed]
    total = math.fsum(math.exp(logp[j]) for j in kept)
    reached = 0.0
    for j in kept:
        reached += math.exp(logp[j])
        if reached > u * total:
            break
    return j, logp[j] - math.log(total)


def completion_logp(
    model: torch.nn.Module, prompt: list[int], completion: list[int], temperature: float
) -> torch.Tensor:
    """(T,) log-probabilities of a completion's tokens, each from a forward pass over its own prefix; differentiable."""
    values = []
    for t, token in enumerate(completion):
        ids = torch.tensor([prompt + completion[:t]])
        z = model(input_ids=ids, use_cache=False).logits[0, -1]
        values.append(torch.log_softmax(z / temperature, -1)[token])
    return torch.stack(values)


@torch.no_grad()
def converse_one(
    model: torch.nn.Module,
    prompt: list[int],
    uniforms: list[float],
    respond: Callable[[str], str | None],
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
    *,
    stop: tuple[str, ...],
    temperature: float,
    top_p: float = 1.0,
    ends: tuple[int, ...] = (1,),
) -> dict[str, Any]:
    """One conversation of at most len(uniforms) tokens, replies included, by a full forward pass for every token.

    `mask` is 1 where the model chose; log-probabilities are 0 on replies.
    """
    ids: list[int] = []
    mask: list[int] = []
    behavior: list[float] = []
    sampler: list[float] = []
    text, turn, truncated = "", [], True
    while len(ids) < len(uniforms):
        z = (
            model(input_ids=torch.tensor([prompt + ids]), use_cache=False)
            .logits[0, -1]
            .double()
            .tolist()
        )
        logp = log_softmax([value / (temperature or 1.0) for value in z])
        token, kept_logp = choose(logp, uniforms[len(ids)], greedy=temperature == 0, top_p=top_p)
        ids, mask, turn = [*ids, token], [*mask, 1], [*turn, token]
        behavior, sampler = [*behavior, logp[token]], [*sampler, kept_logp]
        spoken = decode(turn[:-1] if token in ends else turn)
        if token not in ends and not any(end in spoken for end in stop):
            continue
        text, turn = text + spoken, []
        reply = respond(text)
        if reply is None:
            truncated = False
            break
        heard = encode(reply)
        if len(ids) + len(heard) >= len(uniforms):
            break
        text += reply
        ids, mask = ids + heard, mask + [0] * len(heard)
        behavior, sampler = behavior + [0.0] * len(heard), sampler + [0.0] * len(heard)
    return {
        "ids": ids,
        "mask": mask,
        "behavior_logp": behavior,
        "sampler_logp": sampler,
        "truncated": truncated,
        "text": text + decode(turn[:-1] if turn and turn[-1] in ends else turn),
    }

"""Generate completions of one turn, or of several turns with replies from an environment.

A prompt runs once per group. Replies are tokenized separately and appended to the cache in one pass for all rows, so
sampled tokens never change and no token runs twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sharpscope.config.policy import LocalBackend, SamplingSpec
from sharpscope.errors import UserError
from sharpscope.policy.cache import extend, read_prompts
from sharpscope.policy.conversation import Environment, Turns, as_text
from sharpscope.policy.decoding import Ended, Output, Start, decode_turn
from sharpscope.policy.head import backbone, computing
from sharpscope.policy.loading import Policy
from sharpscope.policy.rollouts import Completions
from sharpscope.policy.sampling import completion_uniforms


@torch.no_grad()
def generate(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    group_size: int,
    spec: SamplingSpec,
    generator: torch.Generator,
    environment: Environment | None = None,
    first: int = 0,
) -> Completions:
    """Generate `group_size` completions per prompt.

    The random numbers of a completion depend only on the generator's state, the index of its prompt and its index in the
    group, so `spec.decode_batch` and the other rows change it at most by rounding.

    Args:
        policy: Model and tokenizer.
        prompts: Token ids of each prompt, not empty, without padding.
        group_size: Completions per prompt, G.
        spec: Temperature, top-p, top-k, maximum number of new tokens and batch size.
        generator: A CPU generator; one number is drawn from it.
        environment: Replies after each of its stop strings and each end-of-text token, until it returns None. Its text
            counts toward the maximum number of new tokens. A row is truncated if no token would fit after a reply.
        first: Index of the first prompt if the prompts are a part of a longer list; the completions are those of the list.

    Returns:
        Completions of N = len(prompts) × G rows, the rows of a prompt adjacent.

    Raises:
        UserError: A prompt and `spec.max_new_tokens` exceed the model's context.
    """
    check_lengths(policy, prompts, spec.max_new_tokens)
    seed = int(torch.randint(2**62, (), generator=generator))
    count = len(prompts) * group_size
    out, texts = Output.blank(count, spec.max_new_tokens, policy.pad_id), [""] * count
    truncates = spec.temperature > 0 and (spec.top_p < 1 or spec.top_k > 0)
    if not isinstance(spec.backend, LocalBackend):
        if environment is not None:
            raise UserError(f"rollout.backend.kind = {spec.backend.kind}: interactive tasks need backend local")
        from sharpscope.policy.remote import draw_remotely

        texts = draw_remotely(policy, prompts, group_size, spec, seed, first, out)
        return _collect(policy, prompts, group_size, out, texts, truncates)
    # Batch prompts of similar length to reduce padding.
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    order = torch.tensor([i * group_size + g for i in by_length for g in range(group_size)])
    for batch in order.split(spec.decode_batch):
        rows = batch.sort().values  # the rows of a prompt adjacent
        uniforms = completion_uniforms(seed, first + rows // group_size, rows % group_size, spec.max_new_tokens)
        # One autocast context per batch, so that weights are cast once and not for every token.
        with computing(policy.model, policy.compute):
            start = _run_prompts(policy, prompts, rows, group_size)
            if environment is None:
                decode_turn(policy, start, uniforms.to(policy.device), spec, out)
            else:
                _converse(policy, start, uniforms.to(policy.device), spec, out, environment, group_size, texts)
    if environment is None:
        lengths = (out.length - (~out.truncated).long()).tolist()  # without the end-of-text token
        texts = [as_text(policy.tokenizer, row[:n]) for row, n in zip(out.ids.tolist(), lengths, strict=True)]
    return _collect(policy, prompts, group_size, out, texts, truncates)


def check_lengths(policy: Policy, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Check that all prompts have tokens and fit into the model's context with `max_new_tokens`.

    Raises:
        UserError: A prompt is empty or too long; the message names the first one.
    """
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"prompt {index}: has no tokens; give a text")
        if policy.context is not None and len(prompt) + max_new_tokens > policy.context:
            text = policy.tokenizer.decode(list(prompt[:12]))
            raise UserError(
                f"prompt {index} ({text!r}…): {len(prompt)} tokens and max_new_tokens {max_new_tokens} exceed the "
                f"model's context of {policy.context} tokens; shorten the prompt or lower rollout.max_new_tokens"
            )


def _run_prompts(policy: Policy, prompts: Sequence[Sequence[int]], rows: Tensor, group_size: int) -> Start:
    """Run the prompts of completions `rows` (n,) once each."""
    used, row_prompt = (rows // group_size).unique(return_inverse=True)
    ids, lengths = right_pad([prompts[i] for i in used.tolist()], policy.pad_id, policy.device)
    last, cache = read_prompts(backbone(policy.model), ids, lengths)  # (B, P) -> (B, d)
    return Start(rows, cache, lengths, row_prompt.to(policy.device), last)


def right_pad(texts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pad token ids on the right with `pad_id`: ids (B, L) and lengths (B,)."""
    width = max(map(len, texts))
    ids = torch.tensor([[*text, *[pad_id] * (width - len(text))] for text in texts], device=device)
    return ids, torch.tensor([len(text) for text in texts], device=device)


def _converse(
    policy: Policy,
    start: Start,
    uniforms: Tensor,
    spec: SamplingSpec,
    out: Output,
    environment: Environment,
    group_size: int,
    texts: list[str],
) -> None:
    """Decode turns and append replies for all rows until no row continues; extend `texts` (N) with both."""
    while True:
        turns = Turns(policy, environment.stop, len(start.rows))
        ended = decode_turn(policy, start, uniforms, spec, out, turns)
        for member, row in enumerate(start.rows.tolist()):
            texts[row] += turns.text(member)
        if ended is None:
            return
        rows = start.rows[ended.members]
        replies = environment.replies((rows // group_size).tolist(), [texts[row] for row in rows.tolist()])
        last = [turns.tokens[member][-1] for member in ended.members.tolist()]
        continuing, chunks = [], []
        for index, (row, reply) in enumerate(zip(rows.tolist(), replies, strict=True)):
            if reply is not None and _append(policy, reply, row, spec.max_new_tokens, out, texts):
                continuing.append(index)
                begin, end = int(out.own[row].nonzero()[-1]) + 1, int(out.length[row])
                chunks.append([last[index], *out.ids[row, begin:end].tolist()])
        if not continuing:
            return
        start = _extend(policy, ended, continuing, chunks, rows)
        uniforms = uniforms[ended.members[continuing].to(policy.device)]


def _append(policy: Policy, reply: str, row: int, limit: int, out: Output, texts: list[str]) -> bool:
    """Append a reply to a row; if no token would fit after it, mark the row as truncated and return False."""
    ids = policy.tokenizer(reply, add_special_tokens=False)["input_ids"]
    begin = int(out.length[row])
    if begin + len(ids) >= limit:
        out.truncated[row] = True
        return False
    out.ids[row, begin : begin + len(ids)] = torch.tensor(ids, dtype=torch.long)
    out.length[row] += len(ids)
    texts[row] += reply
    return True


def _extend(policy: Policy, ended: Ended, index: list[int], chunks: list[list[int]], rows: Tensor) -> Start:
    """Run each row's last token and its reply; rows no longer share texts."""
    members = torch.tensor(index, device=policy.device)
    ids, new = right_pad(chunks, policy.pad_id, policy.device)
    body, cache = backbone(policy.model), ended.cache.rows(members)
    hidden, cache, lengths = extend(body, cache, ended.lengths[members], ids, new)  # (m, d)
    return Start(rows[index], cache, lengths, torch.arange(len(index), device=policy.device), hidden)


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Pad prompts on the left with `pad_id`: ids (B, P) and attention mask (B, P), both long."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    attention = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, attention


def _collect(
    policy: Policy, prompts: Sequence[Sequence[int]], group_size: int, out: Output, texts: list[str], truncates: bool
) -> Completions:
    width = int(out.length.max())  # T
    used = (torch.arange(width) < out.length[:, None]).long()  # (N, T)
    ids, attention = left_pad(prompts, policy.pad_id)
    ids, attention = ids.repeat_interleave(group_size, 0), attention.repeat_interleave(group_size, 0)  # (N, P)
    completion_ids, device = out.ids[:, :width], policy.device
    return Completions(
        input_ids=torch.cat([ids, completion_ids], 1).to(device),
        attention_mask=torch.cat([attention, used], 1).to(device),
        completion_ids=completion_ids.to(device),
        completion_mask=out.own[:, :width].long().to(device),
        behavior_logp=out.logp[:, :width].to(device),
        sampler_logp=out.sampler_logp[:, :width].to(device) if truncates else None,
        group=(torch.arange(len(prompts)).repeat_interleave(group_size)).to(device),
        truncated=out.truncated.to(device),
        texts=texts,
    )

"""Completions, of one turn or of several with an environment's replies between them.

A prompt is read once for its group; replies are tokenized for themselves and read into the cache in one pass for all
rows, so what was sampled stays as it was sampled and nothing is read twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sharpscope.config.policy import LocalBackend, SamplingSpec
from sharpscope.errors import UserError
from sharpscope.policy.cache import read_on, read_prompts
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
    """Draw `group_size` completions for every prompt.

    A completion's randomness depends on the generator's state, its prompt's index and its index in the group only, so
    `spec.decode_batch` and the other rows change it by float rounding at most.

    Args:
        policy: model and tokenizer.
        prompts: token ids of each prompt, not empty, without padding.
        group_size: completions per prompt, G.
        spec: temperature, top-p, top-k, limit of new tokens, rows decoded at once.
        generator: a CPU generator; one number is drawn from it.
        environment: speaks whenever a row has written one of its stop texts or an end-of-text token, until it has
            nothing more to say; its text takes part in the limit of new tokens. A reply that would leave no room for
            another token is not appended: the row counts as truncated.
        first: index of the first prompt, where the prompts are a part of a longer list: the completions are then those
            that the same state gives for the whole list.

    Returns:
        Completions of N = len(prompts) × G rows, the rows of a prompt adjacent.

    Raises:
        UserError: a prompt and `spec.max_new_tokens` do not fit into the model's context.
    """
    check_lengths(policy, prompts, spec.max_new_tokens)
    seed = int(torch.randint(2**62, (), generator=generator))
    count = len(prompts) * group_size
    out, texts = Output.blank(count, spec.max_new_tokens, policy.pad_id), [""] * count
    truncates = spec.temperature > 0 and (spec.top_p < 1 or spec.top_k > 0)
    if not isinstance(spec.backend, LocalBackend):
        if environment is not None:
            raise UserError(
                f"rollout.backend.kind = {spec.backend.kind}: a task that answers in the middle of a completion needs backend local"
            )
        from sharpscope.policy.remote import draw_remotely

        texts = draw_remotely(policy, prompts, group_size, spec, seed, first, out)
        return _collect(policy, prompts, group_size, out, texts, truncates)
    # Prompts of like length share a batch, so that little of it is padding.
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    order = torch.tensor([i * group_size + g for i in by_length for g in range(group_size)])
    for batch in order.split(spec.decode_batch):
        rows = batch.sort().values  # the rows of a prompt adjacent
        uniforms = completion_uniforms(seed, first + rows // group_size, rows % group_size, spec.max_new_tokens)
        # One context for all of a batch: weights are rounded to the computing type once, not at every token.
        with computing(policy.model, policy.compute):
            start = _read(policy, prompts, rows, group_size)
            if environment is None:
                decode_turn(policy, start, uniforms.to(policy.device), spec, out)
            else:
                _converse(policy, start, uniforms.to(policy.device), spec, out, environment, group_size, texts)
    if environment is None:
        spoken = (out.length - (~out.truncated).long()).tolist()  # without the end-of-text token
        texts = [as_text(policy.tokenizer, row[:n]) for row, n in zip(out.ids.tolist(), spoken, strict=True)]
    return _collect(policy, prompts, group_size, out, texts, truncates)


def check_lengths(policy: Policy, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raise a UserError that names the first prompt which is empty or does not fit into the model's context."""
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"prompt {index}: it has no tokens; give it some text")
        if policy.context is not None and len(prompt) + max_new_tokens > policy.context:
            beginning = policy.tokenizer.decode(list(prompt[:12]))
            raise UserError(
                f"prompt {index} ({beginning!r}…): {len(prompt)} tokens and max_new_tokens {max_new_tokens} exceed the "
                f"model's context of {policy.context} tokens; shorten the prompt or lower rollout.max_new_tokens"
            )


def _read(policy: Policy, prompts: Sequence[Sequence[int]], rows: Tensor, group_size: int) -> Start:
    """The prompts of completions `rows` (n,), read once each."""
    used, row_prompt = (rows // group_size).unique(return_inverse=True)
    asked = [prompts[i] for i in used.tolist()]
    ids, lengths = right_pad(asked, policy.pad_id, policy.device)
    last, cache = read_prompts(backbone(policy.model), ids, lengths)  # (B, P) -> (B, d)
    row_prompt = row_prompt.to(policy.device)
    return Start(rows, cache, lengths, row_prompt, last[row_prompt])


def right_pad(texts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids (B, L) padded on the right with `pad_id`, and their numbers (B,)."""
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
    """Turns and replies of rows, all rows together, until none goes on; `texts` (N) gets everything that is said."""
    while True:
        turns = Turns(policy, environment.stop, len(start.rows))
        ended = decode_turn(policy, start, uniforms, spec, out, turns)
        for member, row in enumerate(start.rows.tolist()):
            texts[row] += turns.text(member)
        if ended is None:
            return
        rows = start.rows[ended.members]
        said = environment.replies((rows // group_size).tolist(), [texts[row] for row in rows.tolist()])
        last = [turns.tokens[member][-1] for member in ended.members.tolist()]
        going, chunks = [], []
        for place, (row, reply) in enumerate(zip(rows.tolist(), said, strict=True)):
            if reply is not None and _append(policy, reply, row, spec.max_new_tokens, out, texts):
                going.append(place)
                begin, end = int(out.own[row].nonzero()[-1]) + 1, int(out.length[row])
                chunks.append([last[place], *out.ids[row, begin:end].tolist()])
        if not going:
            return
        start, uniforms = _resume(policy, ended, going, chunks, rows), uniforms[ended.members[going].to(policy.device)]


def _append(policy: Policy, reply: str, row: int, most: int, out: Output, texts: list[str]) -> bool:
    """Write a reply behind a row; False, and the row is truncated, where no token would fit behind it."""
    ids = policy.tokenizer(reply, add_special_tokens=False)["input_ids"]
    begin = int(out.length[row])
    if begin + len(ids) >= most:
        out.truncated[row] = True
        return False
    out.ids[row, begin : begin + len(ids)] = torch.tensor(ids, dtype=torch.long)
    out.length[row] += len(ids)
    texts[row] += reply
    return True


def _resume(policy: Policy, ended: Ended, going: list[int], chunks: list[list[int]], rows: Tensor) -> Start:
    """Read each row's last token and its reply; every row is a text of its own from here on."""
    place = torch.tensor(going, device=policy.device)
    ids, new = right_pad(chunks, policy.pad_id, policy.device)
    hidden, cache, lengths = read_on(
        backbone(policy.model), ended.cache.rows(place), ended.lengths[place], ids, new
    )  # (m, d)
    return Start(rows[going], cache, lengths, torch.arange(len(going), device=policy.device), hidden)


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Prompts as ids (B, P) and attention mask (B, P), both long, padded on the left with `pad_id`."""
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

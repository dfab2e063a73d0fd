"""Completions by key-value cached decoding: a prompt is read once for its group, finished rows leave the batch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from sharpscope.errors import UserError
from sharpscope.policy.cache import DecodeCache, read_prompts
from sharpscope.policy.head import backbone
from sharpscope.policy.loading import Policy
from sharpscope.policy.rollouts import Completions
from sharpscope.policy.sampling import completion_uniforms, draw
from sharpscope.policy.shared_decoding import SharedDecodeCache, can_share_decoding, shared_attention
from sharpscope.policy.spec import SamplingSpec

# Rows that are done stay until they are this share of the batch: leaving copies the cache of those who go on.
LEAVE_SHARE = 0.125
FIRST_ROOM = 64  # positions behind the prompt that the cache starts with; it doubles when it is full


@torch.no_grad()
def generate(
    policy: Policy, prompts: Sequence[Sequence[int]], group_size: int, spec: SamplingSpec, generator: torch.Generator
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

    Returns:
        Completions of N = len(prompts) × G rows, the rows of a prompt adjacent.

    Raises:
        UserError: a prompt and `spec.max_new_tokens` do not fit into the model's context.
    """
    check_lengths(policy, prompts, spec.max_new_tokens)
    seed = int(torch.randint(2**62, (), generator=generator))
    count = len(prompts) * group_size
    out = _Output(
        ids=torch.full((count, spec.max_new_tokens), policy.pad_id),
        logp=torch.zeros(count, spec.max_new_tokens),
        sampler_logp=torch.zeros(count, spec.max_new_tokens),
        length=torch.zeros(count, dtype=torch.long),
        truncated=torch.ones(count, dtype=torch.bool),
    )
    # Prompts of like length share a batch, so that little of it is padding.
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    order = torch.tensor([i * group_size + g for i in by_length for g in range(group_size)])
    for batch in order.split(spec.decode_batch):
        rows = batch.sort().values  # the rows of a prompt adjacent
        uniforms = completion_uniforms(seed, rows // group_size, rows % group_size, spec.max_new_tokens)
        _decode(policy, prompts, rows, group_size, uniforms, spec, out)
    truncates = spec.temperature > 0 and (spec.top_p < 1 or spec.top_k > 0)
    return _collect(policy, prompts, group_size, out, truncates)


@dataclass(frozen=True)
class _Output:
    """Tensors on the CPU that decoding fills in place: (N, max_new_tokens), or (N,) for length and truncated."""

    ids: Tensor
    logp: Tensor
    sampler_logp: Tensor
    length: Tensor
    truncated: Tensor


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


def _decode(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    rows: Tensor,
    group_size: int,
    uniforms: Tensor,
    spec: SamplingSpec,
    out: _Output,
) -> None:
    """Decode the completions `rows` (n,) together and write them into `out`."""
    device, body, head = policy.device, backbone(policy.model), policy.head
    used, row_prompt = (rows // group_size).unique(return_inverse=True)
    asked, row_prompt = [prompts[i] for i in used.tolist()], row_prompt.to(device)
    width = max(map(len, asked))
    ids = torch.tensor([[*prompt, *[policy.pad_id] * (width - len(prompt))] for prompt in asked], device=device)
    lengths = torch.tensor([len(prompt) for prompt in asked], device=device)
    last, prompt_cache = read_prompts(body, ids, lengths)  # (B, P) -> (B, d)
    share = can_share_decoding(policy.model)
    room = min(FIRST_ROOM, spec.max_new_tokens)
    cache = (SharedDecodeCache if share else DecodeCache)(prompt_cache, lengths, row_prompt, room)
    del prompt_cache
    hidden, position = last[row_prompt], lengths[row_prompt]  # (n, d), (n,)
    uniforms, ends = uniforms.to(device), torch.tensor(policy.eos_ids, device=device)
    alive, going = rows.to(device), torch.ones(len(rows), dtype=torch.bool, device=device)
    record: list[tuple[Tensor, ...]] = []
    with shared_attention(policy.model, cache) if isinstance(cache, SharedDecodeCache) else nullcontext():
        for step in range(spec.max_new_tokens):
            token, logp, sampler_logp = draw(head.logits(hidden), uniforms[:, step], spec)
            record.append((alive, going, token, logp, logp if sampler_logp is None else sampler_logp))
            going = going & ~torch.isin(token, ends)
            done = int((~going).sum())
            if done == len(going) or step + 1 == spec.max_new_tokens:
                break
            if done > LEAVE_SHARE * len(going):
                keep = going.nonzero()[:, 0]
                alive, uniforms, token, position = alive[keep], uniforms[keep], token[keep], position[keep]
                going = going[keep]
                cache.keep(keep)
            hidden = body(
                input_ids=token[:, None],
                attention_mask=cache.mask(),
                position_ids=position[:, None],
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state[:, 0]  # (n, d)
            position = position + 1
    _write(record, ends, out)


def _write(record: list[tuple[Tensor, ...]], ends: Tensor, out: _Output) -> None:
    """Move what each decoding step recorded into `out`, in one transfer a column kind."""
    for step, (alive, going, token, logp, sampler_logp) in enumerate(record):
        rows = alive[going].cpu()
        out.ids[rows, step] = token[going].cpu()
        out.logp[rows, step] = logp[going].float().cpu()
        out.sampler_logp[rows, step] = sampler_logp[going].float().cpu()
        out.length[rows] = step + 1
        out.truncated[rows] = ~torch.isin(token[going], ends).cpu()


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Prompts as ids (B, P) and attention mask (B, P), both long, padded on the left with `pad_id`."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    attention = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, attention


def _collect(
    policy: Policy, prompts: Sequence[Sequence[int]], group_size: int, out: _Output, truncates: bool
) -> Completions:
    width = int(out.length.max())  # T
    mask = (torch.arange(width) < out.length[:, None]).long()  # (N, T)
    ids, attention = left_pad(prompts, policy.pad_id)
    ids, attention = ids.repeat_interleave(group_size, 0), attention.repeat_interleave(group_size, 0)  # (N, P)
    completion_ids = out.ids[:, :width]
    spoken = (out.length - (~out.truncated).long()).tolist()  # without the end-of-text token
    texts = policy.tokenizer.batch_decode(
        [row[:n] for row, n in zip(completion_ids.tolist(), spoken, strict=True)],
        skip_special_tokens=False, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    device = policy.device
    return Completions(
        input_ids=torch.cat([ids, completion_ids], 1).to(device),
        attention_mask=torch.cat([attention, mask], 1).to(device),
        completion_ids=completion_ids.to(device),
        completion_mask=mask.to(device),
        behavior_logp=out.logp[:, :width].to(device),
        sampler_logp=out.sampler_logp[:, :width].to(device) if truncates else None,
        group=(torch.arange(len(prompts)).repeat_interleave(group_size)).to(device),
        truncated=out.truncated.to(device),
        texts=texts,
    )

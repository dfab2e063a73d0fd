"""Render prompts, generate completions of one turn, or of several turns with replies from an environment, and score them.

A prompt runs once per group. After a reply, a conversation is read again from its start; sampled tokens never change, since
replies are tokenized separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sharpscope import distributed
from sharpscope.config.run import SamplingSpec
from sharpscope.errors import UserError
from sharpscope.policy.decoding import Output, as_text, completion_uniforms, decode
from sharpscope.policy.head import bare, computing
from sharpscope.policy.loading import Policy
from sharpscope.policy.rollouts import Completions, join_rollouts, padded
from sharpscope.policy.sharding import unsharded
from sharpscope.tasks import Example, InteractiveTask, Reward, Task, respond_all
from sharpscope.tasks.math import limited_step

# -- Prompts

THINK = "<think>"


def render_prompts(examples: Sequence[Example], policy: Policy) -> list[list[int]]:
    """Tokenize the examples' prompts.

    With `policy.chat`, the chat template is applied to the prompt (or its `messages`) unless the example is `templated`.
    The prefill is appended at the end; a prefill that starts with `<think>` replaces that of the template.

    Raises:
        UserError: The chat template rejects the messages of an example.
    """
    tokenizer, rendered = policy.tokenizer, []
    for example in examples:
        if policy.chat and not example.templated:
            text = _apply_template(example, policy)
            if example.prefill.lstrip().startswith(THINK):
                text = text.removesuffix(_opening(text))
        else:
            text = example.prompt.removesuffix(example.prefill)
        text += example.prefill
        # Chat markup contains the special tokens; for plain prompts the tokenizer adds them.
        markup = policy.chat or example.templated
        ids = list(tokenizer(text, add_special_tokens=not markup)["input_ids"])
        if (
            not markup
            and ids
            and ids[-1] in policy.eos_ids
            and not text.endswith(str(tokenizer.eos_token))
        ):
            ids.pop()  # the prompt must not end with an end-of-text token
        rendered.append(ids)
    return rendered


def with_openings(examples: Sequence[Example], policy: Policy) -> list[Example]:
    """Move a `<think>` at the end of the chat template to the prefill of each example.

    Templates of reasoning models end with `<think>`, so completions do not contain it, and scorers that require it read the
    prefill. `render_prompts` returns the same tokens for these examples.

    Raises:
        UserError: The chat template rejects the messages of an example.
    """
    opened = []
    for example in examples:
        opening = (
            _opening(_apply_template(example, policy))
            if policy.chat and not example.templated
            else ""
        )
        if not opening or example.prefill.lstrip().startswith(THINK):
            opened.append(example)
            continue
        opened.append(
            replace(
                example,
                prefill=opening + example.prefill,
                messages=example.messages and _messages(example),
                # it does not end with the new prefill
                prompt=example.prompt.removesuffix(example.prefill),
            )
        )
    return opened


def _messages(example: Example) -> list[dict[str, str]]:
    """Chat messages of the prompt, without the prefill at the end of the last one."""
    turns = example.messages or [{"role": "user", "content": example.prompt}]
    return [
        *map(dict, turns[:-1]),
        {**turns[-1], "content": turns[-1]["content"].removesuffix(example.prefill)},
    ]


def _apply_template(example: Example, policy: Policy) -> str:
    """Apply the chat template to the prompt, up to the start of the completion."""
    from jinja2 import TemplateError

    messages = _messages(example)
    try:
        return str(
            policy.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=True,
            )
        )
    except (
        TemplateError
    ) as error:  # some templates have no system role, others require alternating roles
        roles = ", ".join(message["role"] for message in messages)
        why = f"the chat template of {policy.source!r} rejects the roles {roles} ({' '.join(str(error).split())})"
        raise UserError(
            f"policy.prompt_format = 'chat': {why}; change them, or use policy.prompt_format=plain"
        ) from error


def _opening(text: str) -> str:
    """The `<think>` at the end of a text, with trailing white space, or an empty string."""
    return text[text.rfind(THINK) :] if text.rstrip().endswith(THINK) else ""


# -- Generation

CACHE_BYTES = {"cpu": 2 * 2**30, "cuda": 8 * 2**30}
"""Maximum size of the keys and values of a batch; longer completions and larger models decode fewer rows at once."""


@torch.no_grad()
def generate(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    group_size: int,
    spec: SamplingSpec,
    generator: torch.Generator,
    task: InteractiveTask | None = None,
    examples: Sequence[Example] = (),
    first: int = 0,
) -> Completions:
    """Generate `group_size` completions per prompt of token IDs; the rows of a prompt are adjacent.

    The random numbers of a completion depend only on the state of the CPU generator, from which one number is drawn, the index
    of its prompt and its index in the group, so the size of the batches and the other rows change it at most by rounding. If the
    prompts are a part of a longer list, `first` is the index of the first one; the completions are those of the list.

    An interactive `task` replies after each of its stop strings and each end-of-text token, given the example of the prompt,
    until it returns None. Its text counts toward the maximum number of new tokens. A row is truncated if no token would fit after
    a reply.

    Raises:
        UserError: A prompt and `spec.max_new_tokens` exceed the model's context.
    """
    check_lengths(policy, prompts, spec.max_new_tokens)
    seed = int(torch.randint(2**62, (), generator=generator))
    count = len(prompts) * group_size
    out = Output(count, spec.max_new_tokens, policy.pad_id)
    texts = [""] * count
    stop = () if task is None else tuple(task.stop)
    # Batch prompts of similar length to reduce padding.
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    order = torch.tensor([i * group_size + g for i in by_length for g in range(group_size)])
    width = -(-max(map(len, prompts)) // group_size) + spec.max_new_tokens
    for batch in order.split(_batch_size(policy, width, spec.decode_batch)):
        rows = batch.sort().values  # the rows of a prompt adjacent
        uniforms = completion_uniforms(
            seed,
            first + rows // group_size,
            rows % group_size,
            spec.max_new_tokens,
        )
        # One autocast context per batch, so that weights are cast once and not for every token.
        with computing(policy.model, policy.compute):
            used, row_text = (rows // group_size).unique(return_inverse=True)
            # shared by the rows of a prompt in the first turn
            read = [prompts[i] for i in used.tolist()]
            while len(rows):
                begins = out.length[rows].tolist()
                decode(policy, read, row_text, rows, uniforms, spec, out, stop)
                for row, begin in zip(rows.tolist(), begins, strict=True):
                    texts[row] += as_text(
                        policy, out.ids[row, begin : int(out.length[row])].tolist()
                    )
                if task is None:
                    break
                asked = [examples[row // group_size] for row in rows.tolist()]
                going = _reply(policy, task, asked, rows, out, texts)
                rows = rows[going]
                uniforms = uniforms[going]
                row_text = torch.arange(len(going))
                read = [
                    [*prompts[r // group_size], *out.ids[r, : int(out.length[r])].tolist()]
                    for r in rows.tolist()
                ]
    width = int(out.length.max())  # T
    used = (torch.arange(width) < out.length[:, None]).long()  # (N, T)
    # (N, P)
    ids, attention = (
        part.repeat_interleave(group_size, 0) for part in left_pad(prompts, policy.pad_id)
    )
    truncates = spec.temperature > 0 and spec.top_p < 1
    return Completions(
        input_ids=torch.cat([ids, out.ids[:, :width]], 1),
        attention_mask=torch.cat([attention, used], 1),
        completion_ids=out.ids[:, :width],
        completion_mask=out.sampled[:, :width].long(),
        behavior_logp=out.logp[:, :width],
        sampler_logp=out.sampler_logp[:, :width] if truncates else None,
        group=torch.arange(len(prompts)).repeat_interleave(group_size),
        truncated=out.truncated,
        texts=texts,
    ).to(policy.device)


def check_lengths(policy: Policy, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Check that all prompts have tokens and fit into the model's context with `max_new_tokens`.

    Raises:
        UserError: A prompt is empty or too long; the message names the first one.
    """
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"prompt {index}: has no tokens; give a text")
        if policy.context is not None and len(prompt) + max_new_tokens > policy.context:
            sizes = f"{len(prompt)} tokens and max_new_tokens {max_new_tokens} exceed the context of {policy.context} tokens"
            start = as_text(policy, prompt[:12])
            raise UserError(
                f"prompt {index} ({start!r}…): {sizes}; shorten it or lower rollout.max_new_tokens"
            )


def _batch_size(policy: Policy, width: int, largest: int) -> int:
    """Rows of `width` tokens whose keys and values fit into `CACHE_BYTES`, from 1 to `largest`."""
    config = bare(policy.model).config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    itemsize = next(policy.model.parameters()).element_size()
    row = 2 * config.num_hidden_layers * heads * head_size * itemsize * width
    return max(1, min(largest, CACHE_BYTES.get(policy.device.type, CACHE_BYTES["cuda"]) // row))


def _reply(
    policy: Policy,
    task: InteractiveTask,
    examples: Sequence[Example],
    rows: Tensor,
    out: Output,
    texts: list[str],
) -> list[int]:
    """Append replies to `rows` (n,) and return the indices of those that continue; rows without room for a token are truncated."""
    ended = [(index, row) for index, row in enumerate(rows.tolist()) if not out.truncated[row]]
    given = [examples[index] for index, _ in ended], [texts[row] for _, row in ended]
    going = []
    for (index, row), reply in zip(ended, respond_all(task, *given) if ended else (), strict=True):
        if reply is None:
            continue
        ids = policy.tokenizer(reply, add_special_tokens=False)["input_ids"]
        begin = int(out.length[row])
        end = int(out.length[row]) + len(ids)
        if end >= out.ids.shape[1]:
            out.truncated[row] = True
            continue
        out.ids[row, begin:end] = torch.tensor(ids, dtype=torch.long)
        out.length[row] = end
        texts[row] += reply
        going.append(index)
    return going


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Pad prompts on the left with `pad_id`: ids (B, P) and attention mask (B, P), both long."""
    return padded(prompts, pad_id, left=True), padded(
        [[1] * len(prompt) for prompt in prompts], left=True
    )


def draw_scored(
    policy: Policy,
    task: Task,
    examples: Sequence[Example],
    group_size: int,
    spec: SamplingSpec,
    seed: int,
    first: int = 0,
) -> tuple[Completions, list[Reward]]:
    """Generate `group_size` completions per example and score them; N = examples × group_size rows.

    An interactive task replies within completions. `first` is the index of the first example in a longer list. With several
    processes, each generates and scores a part, and all return the same rows as a single one.
    """
    opened = with_openings(examples, policy)
    part = distributed.local_slice(len(opened))
    selected = opened[part]
    drawn = None
    rewards = list[Reward]()
    with unsharded(policy.model):
        if selected:
            prompts = render_prompts(selected, policy)
            replying = task if isinstance(task, InteractiveTask) else None
            generator = torch.Generator().manual_seed(seed)
            drawn = generate(
                policy,
                prompts,
                group_size,
                spec,
                generator,
                replying,
                selected,
                first + part.start,
            )
    if drawn is not None:
        with limited_step():
            rewards = [
                task.score(selected[row // group_size], text)
                for row, text in enumerate(drawn.texts)
            ]
        if distributed.world_size() == 1:
            return drawn, rewards
        drawn = replace(drawn, group=drawn.group + part.start).to(torch.device("cpu"))
    parts = distributed.gather((drawn, rewards))
    joined = join_rollouts(*(completions for completions, _ in parts if completions is not None))
    return joined.to(policy.device), [reward for _, each in parts for reward in each]

"""Prompts as token ids, as the model sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sharpscope.errors import UserError
from sharpscope.policy.loading import Policy
from sharpscope.tasks import Example

THINK = "<think>"


def render_prompts(examples: Sequence[Example], policy: Policy) -> list[list[int]]:
    """Token ids of the examples' prompts.

    Where `policy.chat` is set and the example is not `templated`, the prompt (or its `messages`) is wrapped in the chat
    template. The prefill stands once, at the very end; a prefill that begins with `<think>` replaces the template's own.

    Raises:
        UserError: the chat template rejects the messages of an example.
    """
    tokenizer, rendered = policy.tokenizer, []
    for example in examples:
        if _is_wrapped(example, policy):
            text = _wrapped(example, policy)
            if example.prefill.lstrip().startswith(THINK):
                text = text.removesuffix(_opening(text))
        else:
            text = example.prompt.removesuffix(example.prefill)
        text += example.prefill
        # Markup contains its own special tokens; a plain prompt gets those that the tokenizer adds.
        markup = policy.chat or example.templated
        ids = list(tokenizer(text, add_special_tokens=not markup)["input_ids"])
        if not markup and ids and ids[-1] in policy.eos_ids and not text.endswith(tokenizer.eos_token):
            ids.pop()  # after an end-of-text token the model would not answer
        rendered.append(ids)
    return rendered


def with_openings(examples: Sequence[Example], policy: Policy) -> list[Example]:
    """The examples as tasks score them: a `<think>` at the end of the chat template becomes part of the prefill.

    Templates of reasoning models end with `<think>`, so the policy never writes it, and a scorer that requires it has to
    be told. `render_prompts` gives the same tokens for these examples as for the given ones.

    Raises:
        UserError: the chat template rejects the messages of an example.
    """
    return [_with_opening(example, policy) if _is_wrapped(example, policy) else example for example in examples]


def _with_opening(example: Example, policy: Policy) -> Example:
    opening = _opening(_wrapped(example, policy))
    if not opening or example.prefill.lstrip().startswith(THINK):
        return example
    # The longer prefill no longer ends the prompt, so the shorter one is removed there.
    return replace(
        example,
        prompt=example.prompt.removesuffix(example.prefill),
        prefill=opening + example.prefill,
        messages=_messages(example) if example.messages else (),
    )


def _is_wrapped(example: Example, policy: Policy) -> bool:
    return policy.chat and not example.templated


def _messages(example: Example) -> list[dict[str, str]]:
    """The chat turns of the prompt, without a prefill at the end of the last one."""
    turns = example.messages or [{"role": "user", "content": example.prompt}]
    return [*map(dict, turns[:-1]), {**turns[-1], "content": turns[-1]["content"].removesuffix(example.prefill)}]


def _wrapped(example: Example, policy: Policy) -> str:
    """The prompt in the chat template, up to where the completion begins.

    Raises:
        UserError: the template rejects the messages (some take no system turn, others require user and assistant to
            alternate).
    """
    from jinja2 import TemplateError

    messages = _messages(example)
    try:
        return str(policy.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(
            f"policy.prompt_format = 'chat': the chat template of {policy.source!r} rejects messages with the roles {roles} "
            f"({' '.join(str(error).split())}); change them in the data, or use policy.prompt_format=plain"
        ) from error


def _opening(text: str) -> str:
    """The `<think>` that ends a text, with the white space after it; empty where there is none."""
    return text[text.rfind(THINK) :] if text.rstrip().endswith(THINK) else ""

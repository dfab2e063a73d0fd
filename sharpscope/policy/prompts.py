"""Render prompts as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sharpscope.errors import UserError
from sharpscope.policy.loading import Policy
from sharpscope.tasks import Example

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
        if not markup and ids and ids[-1] in policy.eos_ids and not text.endswith(str(tokenizer.eos_token)):
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
        opening = _opening(_apply_template(example, policy)) if policy.chat and not example.templated else ""
        changes: dict[str, Any] = {}
        if opening and not example.prefill.lstrip().startswith(THINK):
            changes = {"prefill": opening + example.prefill, "messages": example.messages and _messages(example)}
            changes["prompt"] = example.prompt.removesuffix(example.prefill)  # it does not end with the new prefill
        opened.append(replace(example, **changes))
    return opened


def _messages(example: Example) -> list[dict[str, str]]:
    """Chat messages of the prompt, without the prefill at the end of the last one."""
    turns = example.messages or [{"role": "user", "content": example.prompt}]
    return [*map(dict, turns[:-1]), {**turns[-1], "content": turns[-1]["content"].removesuffix(example.prefill)}]


def _apply_template(example: Example, policy: Policy) -> str:
    """Apply the chat template to the prompt, up to the start of the completion."""
    from jinja2 import TemplateError

    messages = _messages(example)
    try:
        return str(policy.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:  # some templates have no system role, others require alternating roles
        roles = ", ".join(message["role"] for message in messages)
        why = f"the chat template of {policy.source!r} rejects the roles {roles} ({' '.join(str(error).split())})"
        raise UserError(
            f"policy.prompt_format = 'chat': {why}; change them, or use policy.prompt_format=plain"
        ) from error


def _opening(text: str) -> str:
    """The `<think>` at the end of a text, with trailing white space, or an empty string."""
    return text[text.rfind(THINK) :] if text.rstrip().endswith(THINK) else ""

"""Prompts as token ids, as the model shall see them, and what a chat template opens of the completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from sharpscope.errors import UserError
from sharpscope.policy.loading import Policy
from sharpscope.tasks import Example

THINK = "<think>"


class PromptExample(Protocol):
    """What is read of a task's Example."""

    @property
    def prompt(self) -> str:
        """The question."""
        ...

    @property
    def meta(self) -> Mapping[str, Any]:
        """May hold `templated`, `messages` and `prefill`."""
        ...


def render_prompts(examples: Sequence[PromptExample], policy: Policy) -> list[list[int]]:
    """Token ids of every example's prompt, as the model shall see it.

    Where `policy.chat` and the example is not `meta["templated"]`, the prompt (or the chat turns `meta["messages"]`) is
    wrapped in the chat template. A prefill (`meta["prefill"]`, text that opens the completion and with which the prompt
    may end already) stands once at the very end; one that opens `<think>` takes the place of the template's own.

    Raises:
        UserError: the chat template refuses an example's turns.
    """
    tokenizer, rendered = policy.tokenizer, []
    for example in examples:
        prefill = _prefill(example)
        if _is_wrapped(example, policy):
            text = _wrapped(example, policy)
            if prefill.lstrip().startswith(THINK):
                text = text.removesuffix(_opening(text))
        else:
            text = example.prompt.removesuffix(prefill)
        text += prefill
        # Markup brings its own special tokens; a plain prompt gets those that the tokenizer puts around text.
        markup = policy.chat or bool(example.meta.get("templated"))
        ids = list(tokenizer(text, add_special_tokens=not markup)["input_ids"])
        if not markup and ids and ids[-1] in policy.eos_ids and not text.endswith(tokenizer.eos_token):
            ids.pop()  # a prompt that ends with end-of-text would be finished before it is answered
        rendered.append(ids)
    return rendered


def with_openings(examples: Sequence[Example], policy: Policy) -> list[Example]:
    """The examples as tasks shall score them: what the chat template opens of the completion is part of the prefill.

    Templates of reasoning models end in `<think>`, so the policy never writes it, and a scorer that asks for it must be
    told. `render_prompts` makes the same tokens of these examples as of the given ones.

    Raises:
        UserError: the chat template refuses an example's turns.
    """
    return [_with_opening(example, policy) if _is_wrapped(example, policy) else example for example in examples]


def _with_opening(example: Example, policy: Policy) -> Example:
    prefill, opening = _prefill(example), _opening(_wrapped(example, policy))
    if not opening or prefill.lstrip().startswith(THINK):
        return example
    # The longer prefill no longer ends the prompt, so the part that did is taken off there.
    meta = {**example.meta, "prefill": opening + prefill}
    if meta.get("messages"):
        meta["messages"] = _turns(example)
    return replace(example, prompt=example.prompt.removesuffix(prefill), meta=meta)


def _prefill(example: PromptExample) -> str:
    return str(example.meta.get("prefill") or "")


def _is_wrapped(example: PromptExample, policy: Policy) -> bool:
    return policy.chat and not example.meta.get("templated")


def _turns(example: PromptExample) -> list[dict[str, str]]:
    """The chat turns of the prompt, without the prefill that may end the last of them."""
    turns = example.meta.get("messages") or [{"role": "user", "content": example.prompt}]
    return [*turns[:-1], {**turns[-1], "content": turns[-1]["content"].removesuffix(_prefill(example))}]


def _wrapped(example: PromptExample, policy: Policy) -> str:
    """The prompt in the chat template, up to where the completion begins.

    Raises:
        UserError: the template refuses the turns (some take no system turn, or want user and assistant to alternate).
    """
    from jinja2 import TemplateError

    turns = _turns(example)
    try:
        return str(policy.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        roles = ", ".join(turn["role"] for turn in turns)
        raise UserError(
            f"policy.prompt_format = 'chat': the chat template of {policy.source!r} refuses a prompt with the turns {roles} "
            f"({' '.join(str(error).split())}); change these turns in the data, or use policy.prompt_format=plain"
        ) from error


def _opening(text: str) -> str:
    """The `<think>` that ends a text, with the white space after it; empty where there is none."""
    return text[text.rfind(THINK) :] if text.rstrip().endswith(THINK) else ""

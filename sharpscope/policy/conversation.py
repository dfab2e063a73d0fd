"""Conversations: when a turn of the policy has ended, and what the environment says to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from sharpscope.policy.loading import Policy
from sharpscope.tasks import Example, InteractiveTask, respond_all

_closing: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[str, ...], list[bool]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Environment:
    """A task that speaks in the middle of completions; `examples` has one entry a prompt."""

    task: InteractiveTask
    examples: Sequence[Example]

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end a turn of the policy."""
        return tuple(self.task.stop)

    def replies(self, prompts: Sequence[int], completions: Sequence[str]) -> list[str | None]:
        """What it says to conversations about `prompts`, given everything after the prompt; None ends one."""
        return respond_all(self.task, [self.examples[i] for i in prompts], completions)


class Turns:
    """Listens to `count` rows while they write one turn each.

    A turn has ended when its text contains one of `stop`. Text is only made where the new token can be the end of such
    a text, which is known of every token of the vocabulary beforehand.
    """

    def __init__(self, policy: Policy, stop: tuple[str, ...], count: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self._policy, self._stop = policy, stop
        self._may_end = closing_tokens(policy.tokenizer, stop)

    def hear(self, members: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """Add a token to each of the rows `members`; whether it completes a stop text."""
        ended = []
        for member, token in zip(members, tokens, strict=True):
            spoken = self.tokens[member]
            spoken.append(token)
            may = token < len(self._may_end) and self._may_end[token]
            ended.append(may and any(stop in self.text(member) for stop in self._stop))
        return ended

    def text(self, member: int) -> str:
        """What a row wrote in this turn, without a final end-of-text token."""
        tokens = self.tokens[member]
        spoken = tokens[:-1] if tokens and tokens[-1] in self._policy.eos_ids else tokens
        return as_text(self._policy.tokenizer, spoken)


def as_text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Tokens as text, special ones included."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def closing_tokens(tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> list[bool]:
    """For each token of the vocabulary whether it could complete one of the texts `stop`.

    It could if it contains one, or begins with the end of one, or is part of a character.
    """
    known = _closing.setdefault(tokenizer, {})
    if stop not in known:
        ends = tuple({text[i:] for text in stop for i in range(len(text))})
        texts = tokenizer.batch_decode(
            [[i] for i in range(len(tokenizer))], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        known[stop] = [
            "\ufffd" in text or text.startswith(ends) or text.lstrip().startswith(ends) or any(s in text for s in stop)
            for text in texts
        ]
    return known[stop]

"""Multi-turn conversations: the environment's replies and the end of the policy's turns."""

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
    """An interactive task, which replies within completions.

    Attributes:
        task: The task.
        examples: One example per prompt.
    """

    task: InteractiveTask
    examples: Sequence[Example]

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a turn of the policy."""
        return tuple(self.task.stop)

    def replies(self, prompts: Sequence[int], completions: Sequence[str]) -> list[str | None]:
        """Replies to conversations.

        Args:
            prompts: Index of each conversation's prompt.
            completions: Text of each conversation after the prompt.

        Returns:
            The replies; None ends a conversation.
        """
        return respond_all(self.task, [self.examples[i] for i in prompts], completions)


class Turns:
    """Tokens of `count` rows in one turn; a turn ends when its text contains one of `stop`.

    Text is decoded only after tokens that can complete a stop string, which is precomputed for the vocabulary.
    """

    def __init__(self, policy: Policy, stop: tuple[str, ...], count: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self._policy, self._stop = policy, stop
        self._can_end = closing_tokens(policy.tokenizer, stop)

    def add(self, members: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """Append a token to each of the rows `members`; return whether each completes a stop string."""
        ended = []
        for member, token in zip(members, tokens, strict=True):
            self.tokens[member].append(token)
            can_end = token < len(self._can_end) and self._can_end[token]
            ended.append(can_end and any(stop in self.text(member) for stop in self._stop))
        return ended

    def text(self, member: int) -> str:
        """Text of a row's turn, without a final end-of-text token."""
        tokens = self.tokens[member]
        ended = bool(tokens) and tokens[-1] in self._policy.eos_ids
        return as_text(self._policy.tokenizer, tokens[:-1] if ended else tokens)


def as_text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Decode tokens, including special tokens."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def closing_tokens(tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> list[bool]:
    """Return for each token of the vocabulary whether it can complete one of the strings `stop`.

    It can if it contains one, starts with the end of one, or is part of a character.
    """
    cached = _closing.setdefault(tokenizer, {})
    if stop not in cached:
        suffixes = tuple({text[i:] for text in stop for i in range(len(text))})
        texts = tokenizer.batch_decode(
            [[i] for i in range(len(tokenizer))], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        cached[stop] = [
            "\ufffd" in text
            or text.startswith(suffixes)
            or text.lstrip().startswith(suffixes)
            or any(s in text for s in stop)
            for text in texts
        ]
    return cached[stop]

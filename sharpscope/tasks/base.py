"""Examples, rewards and the interface of a task."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Example:
    """One question.

    Attributes:
        prompt: the question as text.
        answer: the correct answer as text.
        meta: `id` (hash of the content), `level` (people, difficulty, hops) and whatever the task's scorer needs.
        messages: the chat turns, where the prompt has more than one.
        prefill: text that begins the completion, such as `<think>`. It ends the prompt and is never generated;
            `Task.score` puts it before the completion.
        templated: the prompt contains chat markup already and is not wrapped in the chat template.

    The keys `messages`, `prefill` and `templated` of `meta`, where version 0.1 had them, set the attributes of that name.
    """

    prompt: str
    answer: str
    meta: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, str]] = ()
    prefill: str = ""
    templated: bool = False

    def __post_init__(self) -> None:
        for name in ("messages", "prefill", "templated"):
            if self.meta.get(name) and not getattr(self, name):
                object.__setattr__(self, name, self.meta[name])

    def whole(self, completion: str) -> str:
        """The prefill and the completion: the text that scorers read."""
        return self.prefill + completion


@dataclass(frozen=True)
class Reward:
    """What a completion earned: `total` is what training sees, `parts` its summands, `correct` what accuracy counts."""

    total: float
    parts: Mapping[str, float]
    correct: bool


class Task(Protocol):
    """What a trainer needs of a task; any object with these three will do."""

    name: str

    def splits(self) -> dict[str, list[Example]]:
        """Finite lists by split name (`train`, `heldout`, `unseen`…): the same in every call and process."""
        ...

    def score(self, example: Example, completion: str) -> Reward:
        """Worth of a completion *as generated* (without the prefill). Never raises; linear in the text's length."""
        ...


@runtime_checkable
class InteractiveTask(Task, Protocol):
    """A task that answers in the middle of a completion (tools, retrieval).

    Generation of a row halts as soon as what it wrote since the environment last spoke contains one of `stop` (its
    last token may carry a few characters more: sampled tokens are kept as they are), or at the end-of-text token, or
    at the length limit. Then, but for the limit, `respond` is called with everything after the prompt so far: what the
    policy wrote and what was appended before. A task may also have `respond_many(examples, completions)`, which
    `respond_all` prefers.
    """

    stop: tuple[str, ...]

    def respond(self, example: Example, completion: str) -> str | None:
        """Text of the environment to append (tokens of it carry mask 0), or None when the conversation is finished."""
        ...


def respond_all(task: InteractiveTask, examples: Sequence[Example], completions: Sequence[str]) -> list[str | None]:
    """`respond` for many rows at once: in one call where the task has `respond_many`, so that a retriever sees a
    batch.
    """
    many = getattr(task, "respond_many", None)
    if many is not None:
        return list(many(examples, completions))
    return [task.respond(example, completion) for example, completion in zip(examples, completions, strict=True)]


def content_id(*parts: str) -> str:
    """First 16 hex digits of the SHA-256 of the parts: identity of content, equal in every process."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:16]


def held_out_share(content: str) -> float:
    """A number in [0, 1) from the content alone; a split holds out the contents whose number is below its share."""
    return int(content_id("held-out", content), 16) / 16.0**16


def stream_seed(*parts: object) -> int:
    """Seed in [0, 2**63) of the random stream named by `parts`; streams with different names are independent."""
    return int(content_id("stream", *map(str, parts)), 16) >> 1

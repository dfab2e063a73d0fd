"""Examples, rewards, the interface of a task, and splits by hash of the content."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from sharpscope.errors import UserError

HELD_OUT = 0.25
"""Fraction of all contents that is never in a training set of generated questions, for every seed."""
GIVE_UP = 5_000
"""Number of consecutive repeated questions after which `take` reports that there are too few."""


@dataclass(frozen=True)
class Example:
    """One prompt and its correct answer, both as text.

    Attributes:
        meta: `id` (hash of the content), `level` (number of people, difficulty or number of hops) and values for the scorer.
        messages: chat messages, if the prompt has more than one.
        prefill: start of the completion, such as `<think>`. It is the end of the prompt and is not generated; `Task.score`
            prepends it to the completion.
        templated: whether the prompt already contains chat markup; if so, the chat template is not applied.
    """

    prompt: str
    answer: str
    meta: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, str]] = ()
    prefill: str = ""
    templated: bool = False

    @classmethod
    def from_row(cls, prompt: str, answer: str, meta: Mapping[str, Any]) -> Example:
        """Create an example from a stored row, whose `meta` has `messages`, `prefill` and `templated` where they are set."""
        chat: dict[str, Any] = {
            name: meta[name] for name in ("messages", "prefill", "templated") if name in meta
        }
        return cls(prompt, answer, meta, **chat)

    def whole(self, completion: str) -> str:
        """Prefill and completion, as read by scorers."""
        return self.prefill + completion


@dataclass(frozen=True)
class Reward:
    """Reward of a completion.

    Attributes:
        total: the value that training maximizes.
        parts: name -> component of the reward.
        correct: whether the completion counts as correct in the accuracy.
    """

    total: float
    parts: Mapping[str, float]
    correct: bool


class Task(Protocol):
    """Interface of a task."""

    name: str

    def splits(self) -> dict[str, list[Example]]:
        """Examples by split name (`train`, `heldout`, `unseen`…), equal in every call and process."""
        ...

    def score(self, example: Example, completion: str) -> Reward:
        """Reward of a completion as generated, without the prefill. Never raises; linear in the length of the text."""
        ...


@runtime_checkable
class InteractiveTask(Task, Protocol):
    """A task whose environment inserts text into the completion (tools, retrieval).

    Generation of a row stops when the text since the last response contains one of `stop` (the last token may extend beyond
    it), at the end-of-text token, or at the length limit. Except at the limit, `respond` is then called with all text after
    the prompt: generated text and previous responses.
    """

    stop: tuple[str, ...]

    def respond(self, example: Example, completion: str) -> str | None:
        """Text to append (its tokens have loss mask 0), or None if the conversation is finished."""
        ...


def respond_all(
    task: InteractiveTask,
    examples: Sequence[Example],
    completions: Sequence[str],
) -> list[str | None]:
    """Call `respond` for every row, or `respond_many(examples, completions)` once if the task has it."""
    if hasattr(task, "respond_many"):
        return list(task.respond_many(examples, completions))
    return [
        task.respond(example, completion)
        for example, completion in zip(examples, completions, strict=True)
    ]


S = TypeVar("S")
T = TypeVar("T")


def once(method: Callable[[S], T]) -> Callable[[S], T]:
    """Decorator that keeps the result of a method without arguments on its instance."""
    name = f"_{method.__name__}_result"

    @wraps(method)
    def kept(self: S) -> T:
        """The result, computed at the first call."""
        if not hasattr(self, name):
            setattr(self, name, method(self))
        return cast(T, getattr(self, name))

    return kept


def content_id(*parts: str) -> str:
    """First 16 hex digits of the SHA-256 of the parts, which identify the content in every process."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:16]


def held_out_share(content: str) -> float:
    """Hash of the content as a number in [0, 1). A split holds out contents whose number is below its fraction."""
    return int(content_id("held-out", content), 16) / 16.0**16


def stream_seed(*parts: object) -> int:
    """Seed in [0, 2**63) of the random stream named by `parts`. Streams with different names are independent."""
    return int(content_id("stream", *map(str, parts)), 16) >> 1


def splits_by_level(
    spec: Any,
    levels: Iterable[int],
    unseen: Iterable[int],
    make: Callable[[str, int, int], Iterable[Example]],
) -> dict[str, list[Example]]:
    """Splits `train` and `heldout` of some levels and `unseen` of others, without those of size 0.

    `spec` has the sizes, and `make(split, level, size)` the examples.
    """
    # a level that is given twice counts once
    seen = dict.fromkeys(levels)
    new = dict.fromkeys(unseen)
    splits = {
        "train": [example for level in seen for example in make("train", level, spec.train_size)],
        "heldout": [
            example for level in seen for example in make("heldout", level, spec.heldout_size)
        ],
        "unseen": [example for level in new for example in make("unseen", level, spec.unseen_size)],
    }
    return {split: examples for split, examples in splits.items() if examples}


def take(
    stream: Iterable[Example],
    split: str,
    level: int,
    count: int,
    without: Container[str] = (),
) -> list[Example]:
    """Take `count` examples of a level with distinct `meta["id"]` for a split, without those whose `meta["form"]` is in `without`.

    The id is a hash of the question, which alone determines whether it is held out. A question held out in one set is therefore
    in no training set, whatever its seed or size.

    Raises:
        UserError: the stream has fewer different questions.
    """
    taken: dict[str, Example] = {}
    misses = 0
    for example in stream if count else ():
        id_ = str(example.meta["id"])
        held_out = held_out_share(id_) < HELD_OUT
        if id_ in taken or example.meta.get("form") in without or held_out == (split == "train"):
            misses += 1
            if misses >= GIVE_UP:
                found = f"only {len(taken)} different questions of level {level} found"
                raise UserError(f"task.{split}_size = {count}: {found}; use fewer or higher levels")
            continue
        misses = 0
        taken[id_] = example
        if len(taken) == count:
            break
    return list(taken.values())

"""Custom tasks: a function that returns splits and a scorer, or an object with both, given as `module:function`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sharpscope.config.tasks import CustomSpec
from sharpscope.errors import UserError
from sharpscope.settings.reading import import_function
from sharpscope.tasks.base import Example, Reward, T, Task, content_id, once


def make_custom(spec: CustomSpec) -> Task:
    """Call the factory with the options (`task.options.x=…`, as keyword arguments) and check the result.

    It returns `(splits, score)`: lists of `Example` by split name, and a function from an example and a completion to a
    `Reward`, a number (correct if at least 1) or a bool. It may instead return an object with `name`, `splits` and `score`;
    an interactive task also has `respond` and `stop`.

    Raises:
        UserError: the factory does not exist, does not accept the options, or does not return a task.
    """
    where = f"task.factory = '{spec.factory}'"
    factory = import_function(spec.factory, "task.factory")
    made = _call_user(f"{where} with options {dict(spec.options)}", lambda: factory(**spec.options))
    if isinstance(made, tuple) and len(made) == 2 and callable(made[1]):
        return CheckedTask(spec.factory, lambda: made[0], made[1])
    missing = [part for part in ("splits", "score") if not callable(getattr(made, part, None))]
    if missing:
        lacks = f"returned {type(made).__name__} without {' and '.join(missing)}"
        raise UserError(f"{where}: {lacks}; return (splits, score) or an object with both")
    name = str(getattr(made, "name", spec.factory))
    if callable(getattr(made, "respond", None)):
        return InteractiveCheckedTask(name, made)
    return CheckedTask(name, made.splits, made.score)


def _call_user(what: str, call: Callable[[], T]) -> T:
    """The result of a user's function; an error in it names the function, and --debug shows its traceback."""
    try:
        return call()
    except UserError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(f"{what}: raised {problem}; correct it there") from error


class CheckedTask:
    """Wrapper of a custom task that checks its splits and rewards."""

    def __init__(
        self,
        name: str,
        splits: Callable[[], object],
        score: Callable[..., object],
    ) -> None:
        self.name = name
        self._make_splits = splits
        self._score = score

    @once
    def splits(self) -> dict[str, list[Example]]:
        """The task's splits, with `id` and `level` (default "all") in the `meta` of each example."""
        splits = _call_user(f"task '{self.name}', splits", self._make_splits)
        if not isinstance(splits, Mapping) or not splits.get("train"):
            raise UserError(
                f"task '{self.name}': splits must be a dict with a list of examples under 'train'"
            )
        return {
            str(split): [
                self._checked(f"{split}[{i}]", example) for i, example in enumerate(examples)
            ]
            for split, examples in splits.items()
        }

    def _checked(self, where: str, made: object) -> Example:
        if not (
            isinstance(made, Example)
            and isinstance(made.prompt, str)
            and isinstance(made.answer, str)
        ):
            raise UserError(
                f"task '{self.name}': {where} must be Example(prompt: str, answer: str), got {made!r:.80}"
            )
        return replace(
            made,
            meta={"id": content_id(made.prompt, made.answer), "level": "all"} | dict(made.meta),
        )

    def score(self, example: Example, completion: str) -> Reward:
        """The scorer's result as a `Reward`. A total that is not finite is left to the health rule `non_finite`."""
        reward = _call_user(f"task '{self.name}', score", lambda: self._score(example, completion))
        if isinstance(reward, Reward):
            return reward
        if isinstance(reward, (bool, int, float)):
            return Reward(float(reward), {"answer": float(reward)}, correct=float(reward) >= 1.0)
        found = type(reward).__name__
        raise UserError(
            f"task '{self.name}': score returned {found}; return a Reward, a number or a bool"
        )


class InteractiveCheckedTask(CheckedTask):
    """Wrapper of a custom interactive task, which also checks its responses."""

    def __init__(self, name: str, task: Any) -> None:
        super().__init__(name, task.splits, task.score)
        self._task, stop = task, getattr(task, "stop", None)
        # ("</search>") is a string, not a tuple
        self.stop = (stop,) if isinstance(stop, str) else stop
        texts = self.stop if isinstance(self.stop, tuple | list) and self.stop else ("",)
        if not all(isinstance(text, str) and text for text in texts):
            raise UserError(
                f"task '{name}': defines respond but not stop; set stop = ('…',), texts that end a turn"
            )

    def respond(self, example: Example, completion: str) -> str | None:
        """The task's response, or None if the conversation is finished."""
        what = f"task '{self.name}', respond"
        response = _call_user(what, lambda: self._task.respond(example, completion))
        if not isinstance(response, str | None):
            raise UserError(f"{what}: returned {type(response).__name__}; return a str or None")
        return response

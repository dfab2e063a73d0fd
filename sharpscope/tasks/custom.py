"""A user's own task: a function that returns the splits and a scorer, registered by name or given by import path."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sharpscope.config.tasks import CustomSpec
from sharpscope.errors import UserError, nearest
from sharpscope.tasks.base import Example, InteractiveTask, Reward, Task, content_id

Scorer = Callable[[Example, str], Reward | float | bool]
Factory = Callable[..., Any]

_REGISTRY: dict[str, Factory] = {}


def register_task(name: str) -> Callable[[Factory], Factory]:
    """Decorator: make `name` a task, `sharpscope run --task NAME` after the module is imported.

    The function takes the options (`task.options.x=…`) as keywords and returns `(splits, score)`: lists of `Example`
    by split name, and a function from an example and a completion to a `Reward`, or to a number (correct where it is
    at least 1) or a truth value. It may also return an object with `name`, `splits` and `score`, and with `respond`
    and `stop` if it interacts.

    Raises:
        UserError: the name is taken, or is not an identifier.
    """

    def add(factory: Factory) -> Factory:
        if not name.isidentifier():
            raise UserError(f"register_task: '{name}' is not a name; use letters, digits and underscores")
        if name in _REGISTRY and _REGISTRY[name].__qualname__ != factory.__qualname__:
            raise UserError(f"register_task: the name '{name}' is taken; choose another")
        _REGISTRY[name] = factory
        return factory

    return add


def registered_tasks() -> tuple[str, ...]:
    """Names added by `register_task`, sorted."""
    return tuple(sorted(_REGISTRY))


def make_custom(spec: CustomSpec) -> Task:
    """Call the factory with the options and check what it returns.

    Raises:
        UserError: no such factory, or what it returns is not a task; the message says what is missing.
    """
    factory = _find(spec.factory)
    _check_options(factory, spec)
    made = factory(**spec.options)
    if isinstance(made, tuple) and len(made) == 2 and callable(made[1]):
        splits, score = made
        return CheckedTask(spec.factory, lambda: splits, score)
    missing = [part for part in ("splits", "score") if not callable(getattr(made, part, None))]
    if missing:
        raise UserError(
            f"task.factory = '{spec.factory}': returned {type(made).__name__} without {' and '.join(missing)};"
            " return (splits, score) or an object that has both"
        )
    if callable(getattr(made, "respond", None)):
        return InteractiveCheckedTask(spec.factory, made)
    return CheckedTask(str(getattr(made, "name", spec.factory)), made.splits, made.score)


def _check_options(factory: Factory, spec: CustomSpec) -> None:
    """Hold the options against the signature before the call, so that an error within the factory keeps its own name.

    Raises:
        UserError: the factory does not take them.
    """
    try:
        signature = inspect.signature(factory)
    except ValueError:  # some callables written in C have none: the call will tell
        return
    try:
        signature.bind(**spec.options)
    except TypeError as error:
        raise UserError(f"task.options = {dict(spec.options)}: {spec.factory} does not take them ({error})") from error


def _find(path: str) -> Factory:
    """The registered factory of that name, or what `module:function` names (modules in the working directory count)."""
    if ":" not in path:
        if path not in _REGISTRY:
            raise UserError(
                f"task.factory = '{path}': no task is registered so{nearest(path, _REGISTRY)} or give module:function"
            )
        return _REGISTRY[path]
    module_name, _, attribute = path.partition(":")
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise UserError(f"task.factory = '{path}': cannot import '{module_name}' ({error})") from error
    finally:
        if added:
            sys.path.remove(here)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise UserError(
            f"task.factory = '{path}': module '{module_name}' has no function '{attribute}'"
            f"{nearest(attribute, vars(module))}"
        )
    return factory


class CheckedTask:
    """A task whose splits and rewards are checked, so that a mistake in it is named where it is made."""

    def __init__(self, name: str, splits: Callable[[], Any], score: Scorer) -> None:
        self.name = name
        self._make_splits = splits
        self._score = score
        self._splits: dict[str, list[Example]] | None = None

    def splits(self) -> dict[str, list[Example]]:
        """The task's splits, each example with `id` and `level` ("all" where it has none)."""
        if self._splits is None:
            made = self._make_splits()
            if not isinstance(made, Mapping) or not made.get("train"):
                raise UserError(f"task '{self.name}': splits must be a dict with a list of examples under 'train'")
            self._splits = {str(split): self._checked(str(split), examples) for split, examples in made.items()}
        return self._splits

    def _checked(self, split: str, examples: Sequence[Any]) -> list[Example]:
        checked = []
        for i, example in enumerate(examples):
            if (
                not isinstance(example, Example)
                or not isinstance(example.prompt, str)
                or not isinstance(example.answer, str)
            ):
                raise UserError(
                    f"task '{self.name}': {split}[{i}] must be Example(prompt: str, answer: str), got {example!r:.80}"
                )
            meta = {"id": content_id(example.prompt, example.answer), "level": "all"} | dict(example.meta)
            checked.append(replace(example, meta=meta))
        return checked

    def score(self, example: Example, completion: str) -> Reward:
        """The task's reward, from whatever its scorer returns."""
        made = self._score(example, completion)
        if isinstance(made, Reward):
            reward = made
        elif isinstance(made, (bool, int, float)):
            reward = Reward(float(made), {"answer": float(made)}, correct=float(made) >= 1.0)
        else:
            raise UserError(
                f"task '{self.name}': score returned {type(made).__name__}; return a Reward, a number or a truth value"
            )

        return reward  # a total that is not finite is for the trainer to judge (health.non_finite)


class InteractiveCheckedTask(CheckedTask):
    """A checked task that also answers in the middle of a completion."""

    def __init__(self, name: str, task: InteractiveTask) -> None:
        super().__init__(str(getattr(task, "name", name)), task.splits, task.score)
        self._respond, self._respond_many = task.respond, getattr(task, "respond_many", None)
        stop: Any = getattr(task, "stop", ())
        if isinstance(stop, str):  # ("</search>") is text and no tuple; its letters are never meant
            stop = (stop,)
        self.stop = tuple(stop) if isinstance(stop, Iterable) else ()
        if not self.stop or not all(isinstance(text, str) and text for text in self.stop):
            raise UserError(
                f"task '{self.name}': has respond, so it needs stop = ('…',), the texts at which generation halts"
            )

    def respond(self, example: Example, completion: str) -> str | None:
        """The environment's text, or None at the end."""
        return self._text(self._respond(example, completion))

    def respond_many(self, examples: Sequence[Example], completions: Sequence[str]) -> list[str | None]:
        """The environment's texts, from the task's own `respond_many` where it has one."""
        if self._respond_many is None:
            return [self.respond(*row) for row in zip(examples, completions, strict=True)]
        made = list(self._respond_many(examples, completions))
        if len(made) != len(examples):
            raise UserError(f"task '{self.name}': respond_many returned {len(made)} replies to {len(examples)} texts")
        return [self._text(reply) for reply in made]

    def _text(self, made: Any) -> str | None:
        if made is not None and not isinstance(made, str):
            raise UserError(f"task '{self.name}': respond returned {type(made).__name__}; return text or None")
        return made

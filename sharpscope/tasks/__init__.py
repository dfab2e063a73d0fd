"""What is asked and how an answer is scored.

Door: `make_task(spec)` turns a configuration into a `Task`; `TaskSpec` is the union of the configurations; `Example`,
`Reward`, `Task` and `InteractiveTask` are the values; `register_task` adds a task of one's own; `task_choice` reads
the short form that the command line takes. Nothing heavy is imported before a task is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, cast

from sharpscope.config.base import Spec
from sharpscope.config.tasks import CustomSpec, DatasetSpec, GymSpec, KnightsKnavesSpec, MathSpec, TaskSpec, ToolQaSpec
from sharpscope.errors import UserError, nearest
from sharpscope.tasks.base import Example, InteractiveTask, Reward, Task, respond_all
from sharpscope.tasks.custom import register_task, registered_tasks

_MAKERS: dict[type[Spec], str] = {
    KnightsKnavesSpec: "knights_knaves:KnightsKnaves",
    MathSpec: "math_task:MathTask",
    ToolQaSpec: "tool_qa:ToolQa",
    GymSpec: "gym:GymTask",
    DatasetSpec: "dataset:DatasetTask",
    CustomSpec: "custom:make_custom",
}

task_specs: dict[str, type[Spec]] = {str(spec.model_fields["kind"].default): spec for spec in _MAKERS}
"""Every kind of task and the type of its configuration."""


def make_task(spec: Spec) -> Task:
    """The task that a configuration describes. Examples are made or read at the first `splits()`, not here.

    Raises:
        UserError: a file, module or library that the task needs is absent or wrong.
    """
    module, _, name = _MAKERS[type(spec)].partition(":")
    maker = getattr(importlib.import_module(f"sharpscope.tasks.{module}"), name)
    return cast(Task, maker(spec))


def task_choice(text: str) -> Mapping[str, Any]:
    """The configuration fields that a short form stands for.

    A kind (`knights_knaves`), `gym:NAME`, a registered task's name, or an import path `module:function`.

    Raises:
        UserError: none of these.
    """
    if text in task_specs and text != "custom":
        return {"kind": text}
    if text.startswith("gym:"):
        return {"kind": "gym", "name": text[len("gym:") :]}
    if ":" in text or text in registered_tasks():
        return {"kind": "custom", "factory": text}
    raise UserError(f"task = '{text}': unknown{nearest(text, {*task_specs, *registered_tasks()} - {'custom'})}")


__all__ = [
    "CustomSpec",
    "DatasetSpec",
    "Example",
    "GymSpec",
    "InteractiveTask",
    "KnightsKnavesSpec",
    "MathSpec",
    "Reward",
    "Task",
    "TaskSpec",
    "ToolQaSpec",
    "make_task",
    "register_task",
    "registered_tasks",
    "respond_all",
    "task_choice",
    "task_specs",
]

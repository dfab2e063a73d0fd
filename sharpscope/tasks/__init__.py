"""Tasks: prompts and the rewards of their completions.

`make_task` creates a `Task` from its configuration, a `TaskSpec`. The modules of the tasks are imported when a task is created.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, cast

from sharpscope.config.tasks import CustomSpec, DatasetSpec, KnightsKnavesSpec, MathSpec, ToolQaSpec
from sharpscope.errors import UserError, nearest
from sharpscope.settings import Spec
from sharpscope.tasks.base import Example, InteractiveTask, Reward, Task, respond_all

_FACTORIES: dict[type[Spec], str] = {
    KnightsKnavesSpec: "knights_knaves:KnightsKnaves",
    MathSpec: "math:MathTask",
    ToolQaSpec: "tool_qa:ToolQa",
    DatasetSpec: "dataset:DatasetTask",
    CustomSpec: "custom:make_custom",
}

task_specs: dict[str, type[Spec]] = {
    str(spec.model_fields["kind"].default): spec for spec in _FACTORIES
}
"""Kind of task -> class of its configuration."""


def make_task(spec: Spec) -> Task:
    """Create the task of a configuration. Its examples are generated or read at the first call of `splits()`.

    Raises:
        UserError: a file, module or library that the task needs is missing or invalid.
    """
    module, _, name = _FACTORIES[type(spec)].partition(":")
    factory = getattr(importlib.import_module(f"sharpscope.tasks.{module}"), name)
    return cast(Task, factory(spec))


def task_choice(text: str) -> Mapping[str, object]:
    """Configuration fields of a task's short form: a kind (`knights_knaves`) or an import path `module:function`.

    Raises:
        UserError: `text` is none of these.
    """
    if text in task_specs and text != "custom":
        return {"kind": text}
    if ":" in text:
        return {"kind": "custom", "factory": text}
    raise UserError(f"task = '{text}': unknown{nearest(text, {*task_specs} - {'custom'})}")

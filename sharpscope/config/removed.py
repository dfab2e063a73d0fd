"""Settings of version 0.2 that are gone: an error in a user's configuration, ignored in that of a recorded run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharpscope.errors import UserError

REMOVED: dict[str, str] = {
    "name": "give `out`, the run's folder",
    "method.advantage.ddof": "it is 1",
    "method.advantage.epsilon": "it is the published constant",
    "method.advantage.tail": "a token without another at its place has A = R",
    "method.penalty.estimator": "it is |ln r|",
    "checkpoint.keep_best": "set checkpoint.keep_last, and compare checkpoints by the table eval",
    "checkpoint.keep_every": "set checkpoint.keep_last",
    "health.no_variance": "the rule is health.dead_groups",
    "probes.average_samples": "average sharpness is gone; sam is",
    "probes.backend": "use `sharpscope probe --backend pyhessian`",
    "probes.basis_mb": "set probes.memory_mb",
    "probes.budget": "set probes.every",
    "probes.curvature": "set probes.curvature_prompts; 0: no curvature",
    "probes.density_samples": "the spectral density is gone",
    "probes.density_steps": "the spectral density is gone",
    "probes.gauss_newton": "the Gauss-Newton matrix is gone; the Hessian is probed",
    "probes.graph_mb": "set probes.memory_mb",
    "probes.groups": "parameter groups are not probed one by one any more",
    "probes.head_mb": "set probes.memory_mb",
    "probes.m": "m-sharpness is gone; sam is",
    "probes.preconditioned": "it comes with the curvature",
    "probes.rhos": "set probes.rho, one radius or auto",
    "probes.rounds": "set probes.every",
    "probes.slices": "loss slices are gone",
    "probes.smallest": "it comes with the curvature",
    "probes.stale_threshold": "it is 0.5",
    "probes.tolerance": "it is 0.01; set probes.max_products",
    "probes.worst_steps": "worst-case sharpness is gone; sam is",
    "recording.budget": "intervals are fixed; set recording.token_gradients_every and rotation_every",
    "recording.derivative": "it is forward mode",
    "recording.exact_random": "set recording.exact_tokens",
    "recording.exact_top": "set recording.exact_tokens",
    "recording.flush_every": "every step is flushed",
    "recording.heldout_functional": "it is the expected failure",
    "recording.heldout_samples": "set probes.samples",
    "task.source": "a path that exists is read as files, owner/name from the Hub",
    "rollout.backend": "completions are generated in this process; to sample with vLLM, train with TRL or verl and record that",
}
"""Path of a setting -> what to use instead."""

MEASURED = ("recording", "probes", "health")
"""Parts of a run of 0.2 that are read as today's defaults, since what they said of measuring is not what it means today."""

NONE_KINDS: dict[str, str] = {
    "clip": "none",
    "correction": "none",
    "entropy": "none",
    "tokens": "all",
    "penalty": "none",
    "proximal": "behavior",
    "passes": "single",
    "sharpness": "none",
}
"""Parts of a method that are null in 0.3 -> the kind that said so in 0.2."""


def check_removed(data: Mapping[str, Any]) -> None:
    """Check that no setting of 0.2 is used that is gone.

    Raises:
        UserError: one is used; the message says what replaces it.
    """
    for path, instead in REMOVED.items():
        if _has(data, path.split(".")):
            raise UserError(f"{path}: removed in 0.3: {instead}")
    method = data.get("method")
    for part, kind in NONE_KINDS.items():
        value = method.get(part) if isinstance(method, Mapping) else None
        if isinstance(value, Mapping) and value.get("kind") == kind:
            raise UserError(f"method.{part}.kind = {kind}: removed in 0.3: set method.{part} to null")


def without_removed(data: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a recorded run in the form of this version; one with a `name` is of 0.2."""
    result = {part: value for part, value in data.items() if part not in MEASURED} if "name" in data else dict(data)
    for path in REMOVED:
        result = _without(result, path.split("."))
    if isinstance(result.get("method"), Mapping):
        result["method"] = without_none_kinds(result["method"])
    return result


def without_none_kinds(method: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded method, with null for the parts that 0.2 called none, all, behavior or single."""
    return {
        name: None if isinstance(value, Mapping) and value.get("kind") == NONE_KINDS.get(name, "") else value
        for name, value in method.items()
    }


def _has(data: Any, path: list[str]) -> bool:
    if not isinstance(data, Mapping) or path[0] not in data:
        return False
    return len(path) == 1 or _has(data[path[0]], path[1:])


def _without(data: Any, path: list[str]) -> Any:
    if not isinstance(data, Mapping) or path[0] not in data:
        return data
    rest = {name: value for name, value in data.items() if name != path[0]}
    return rest if len(path) == 1 else {**data, path[0]: _without(data[path[0]], path[1:])}

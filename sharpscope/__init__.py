"""Sharpness diagnostics for reinforcement-learning fine-tuning of language models.

The public names are imported at first access, so `import sharpscope` takes milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.4.0"

if TYPE_CHECKING:
    from sharpscope import integrations as integrations
    from sharpscope.forks import fork as fork
    from sharpscope.forks import rotate as rotate
    from sharpscope.integrations.record import record as record
    from sharpscope.methods import weight_bounds as weight_bounds
    from sharpscope.surface import critical_sharpness as critical_sharpness
    from sharpscope.surface import curvature as curvature
    from sharpscope.surface import sharpness as sharpness
    from sharpscope.surface import update_direction as update_direction
    from sharpscope.tokens import Clip as Clip
    from sharpscope.tokens import Outcome as Outcome
    from sharpscope.tokens import attribute as attribute
    from sharpscope.tokens import effects as effects
    from sharpscope.tokens import score_norms as score_norms
    from sharpscope.views import load_run as load_run
    from sharpscope.views import load_runs as load_runs

_TOKENS = ("Clip", "Outcome", "attribute", "effects", "score_norms")
_SURFACE = ("critical_sharpness", "curvature", "sharpness", "update_direction")
_MODULES = {
    **dict.fromkeys(_TOKENS, "sharpscope.tokens"),
    **dict.fromkeys(_SURFACE, "sharpscope.surface"),
    **dict.fromkeys(("fork", "rotate"), "sharpscope.forks"),
    **dict.fromkeys(("load_run", "load_runs"), "sharpscope.views"),
    "record": "sharpscope.integrations.record",
    "weight_bounds": "sharpscope.methods",
}

__all__ = ["__version__", *sorted(_MODULES)]  # noqa: PLE0604 - the names are strings


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if name == "integrations":
        return import_module("sharpscope.integrations")
    raise AttributeError(f"module 'sharpscope' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__

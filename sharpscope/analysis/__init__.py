"""Analysis: from recorded runs to figures, tables, a report; reads traces, never trains.

The names below are imported when first used: `show` and `compare` need no plotting library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sharpscope.analysis.analyzing import AnalysisResult as AnalysisResult
    from sharpscope.analysis.analyzing import analyze as analyze
    from sharpscope.analysis.analyzing import figures_of as figures_of
    from sharpscope.analysis.analyzing import load_several as load_several
    from sharpscope.analysis.comparison import Comparison as Comparison
    from sharpscope.analysis.comparison import compare as compare
    from sharpscope.analysis.glance import show as show

_HOMES = {
    "AnalysisResult": "analyzing",
    "Comparison": "comparison",
    "analyze": "analyzing",
    "compare": "comparison",
    "figures_of": "analyzing",
    "load_several": "analyzing",
    "show": "glance",
}

__all__ = ["AnalysisResult", "Comparison", "analyze", "compare", "figures_of", "load_several", "show"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"sharpscope.analysis.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'sharpscope.analysis' has no attribute '{name}'")

"""Analysis: from recorded runs to figures, tables, a report; reads traces, never trains.

The names below are imported when first used: `show` and `compare` need no plotting library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sharpscope.analysis.comparison import Comparison as Comparison
    from sharpscope.analysis.comparison import compare as compare
    from sharpscope.analysis.full_report import write_full_report as write_full_report
    from sharpscope.analysis.full_report import write_page as write_page
    from sharpscope.analysis.output import AnalysisResult as AnalysisResult
    from sharpscope.analysis.output import analyze as analyze
    from sharpscope.analysis.output import figures_of as figures_of
    from sharpscope.analysis.output import load_several as load_several
    from sharpscope.analysis.spikes import explain_spikes as explain_spikes
    from sharpscope.analysis.spikes import find_spikes as find_spikes
    from sharpscope.analysis.terminal import show as show
    from sharpscope.analysis.token_text import piece_maker as piece_maker

_HOMES = {
    "AnalysisResult": "output",
    "Comparison": "comparison",
    "analyze": "output",
    "compare": "comparison",
    "explain_spikes": "spikes",
    "figures_of": "output",
    "find_spikes": "spikes",
    "load_several": "output",
    "piece_maker": "token_text",
    "show": "terminal",
    "write_full_report": "full_report",
    "write_page": "full_report",
}

__all__ = [
    "AnalysisResult",
    "Comparison",
    "analyze",
    "compare",
    "explain_spikes",
    "figures_of",
    "find_spikes",
    "load_several",
    "piece_maker",
    "show",
    "write_full_report",
    "write_page",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"sharpscope.analysis.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'sharpscope.analysis' has no attribute '{name}'")

"""Analysis: from recorded runs to figures, tables, claims and a report. It reads traces and never trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sharpscope.analysis.comparison import Comparison, compare
from sharpscope.analysis.loading import load_several
from sharpscope.analysis.spikes import explain_spikes, find_spikes
from sharpscope.analysis.terminal import show, watch
from sharpscope.analysis.token_text import piece_maker

if TYPE_CHECKING:
    from sharpscope.analysis.output import AnalysisResult, analyze, figures_of, write_page
    from sharpscope.analysis.report import Report, build

__all__ = [
    "AnalysisResult",
    "Comparison",
    "Report",
    "analyze",
    "build",
    "compare",
    "explain_spikes",
    "figures_of",
    "find_spikes",
    "load_several",
    "piece_maker",
    "show",
    "watch",
    "write_page",
]


def __getattr__(name: str) -> Any:
    """What draws is imported when first used: `show` and `compare` need no plotting library."""
    if name in __all__:
        from sharpscope.analysis import output

        return getattr(output, name)
    raise AttributeError(f"module 'sharpscope.analysis' has no attribute '{name}'")

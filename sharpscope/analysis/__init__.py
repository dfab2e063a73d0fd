"""Analysis: from recorded runs to figures, tables, claims and a report. It reads traces and never trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sharpscope.analysis.comparison import Comparison, compare
from sharpscope.analysis.forks import batches_needed, fork_differences
from sharpscope.analysis.loading import load_several, nothing_found
from sharpscope.analysis.spikes import explain_spikes, find_spikes, recorded_by
from sharpscope.analysis.terminal import (
    largest_recorded_step,
    render_overview,
    render_spikes,
    render_tokens,
    show,
    tokens_title,
    top_tokens,
    watch,
)
from sharpscope.analysis.token_text import piece_maker, token_decoder

if TYPE_CHECKING:
    from sharpscope.analysis.figures.study import probe_pictures, token_picture
    from sharpscope.analysis.output import AnalysisResult, analyze, figures_of, write_figures, write_page
    from sharpscope.analysis.reduction import reduce_runs
    from sharpscope.analysis.report import Report, build

__all__ = [
    "AnalysisResult",
    "Comparison",
    "Report",
    "analyze",
    "batches_needed",
    "build",
    "compare",
    "explain_spikes",
    "figures_of",
    "find_spikes",
    "fork_differences",
    "largest_recorded_step",
    "load_several",
    "nothing_found",
    "piece_maker",
    "probe_pictures",
    "recorded_by",
    "reduce_runs",
    "render_overview",
    "render_spikes",
    "render_tokens",
    "show",
    "token_decoder",
    "token_picture",
    "tokens_title",
    "top_tokens",
    "watch",
    "write_figures",
    "write_page",
]


def __getattr__(name: str) -> Any:
    """What draws is imported when first used: `show` and `compare` need no plotting library."""
    if name in __all__:
        from sharpscope.analysis import output, reduction
        from sharpscope.analysis.figures import study

        modules = {"reduce_runs": reduction, "probe_pictures": study, "token_picture": study}
        return getattr(modules.get(name, output), name)
    raise AttributeError(f"module 'sharpscope.analysis' has no attribute '{name}'")

"""Analysis: from recorded runs to comparisons, figures, tables, claims and a page. It reads traces and never trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sharpscope.analysis.forks import batches_needed, fork_differences
from sharpscope.analysis.loading import load_several, nothing_found
from sharpscope.analysis.pairs import compare_runs
from sharpscope.analysis.spikes import explain_spikes, find_spikes, recorded_by, spike_text
from sharpscope.analysis.terminal import path_sections, show, show_headline, spike_sections, token_sections, watch
from sharpscope.traces.token_text import piece_maker

if TYPE_CHECKING:
    from sharpscope.analysis.figures.plots import probe_pictures, token_picture
    from sharpscope.analysis.output import AnalysisResult, analyze
    from sharpscope.analysis.reduction import reduce_runs

__all__ = [
    "AnalysisResult",
    "analyze",
    "batches_needed",
    "compare_runs",
    "explain_spikes",
    "find_spikes",
    "fork_differences",
    "load_several",
    "nothing_found",
    "path_sections",
    "piece_maker",
    "probe_pictures",
    "recorded_by",
    "reduce_runs",
    "show",
    "show_headline",
    "spike_sections",
    "spike_text",
    "token_picture",
    "token_sections",
    "watch",
]


def __getattr__(name: str) -> Any:
    """What draws is imported when first used: `show` needs no plotting library."""
    if name in __all__:
        from importlib import import_module

        modules = {"reduce_runs": "reduction", "probe_pictures": "figures.plots", "token_picture": "figures.plots"}
        return getattr(import_module(f"sharpscope.analysis.{modules.get(name, 'output')}"), name)
    raise AttributeError(f"module 'sharpscope.analysis' has no attribute '{name}'")

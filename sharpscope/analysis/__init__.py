"""Analysis: from recorded runs to comparisons, figures, tables, claims and a page. It reads traces and never trains."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sharpscope.analysis.forks import fork_differences
from sharpscope.analysis.pairs import compare_runs
from sharpscope.analysis.spikes import explain_spikes, spike_text
from sharpscope.analysis.study import nothing_found
from sharpscope.analysis.terminal import path_sections, show, show_headline, spike_sections, token_sections, watch

if TYPE_CHECKING:
    from sharpscope.analysis.output import AnalysisResult, analyze
    from sharpscope.analysis.reduction import reduce_runs

_LATER = {"AnalysisResult": "output", "analyze": "output", "reduce_runs": "reduction"}


def __getattr__(name: str) -> Any:
    """What draws or reads Parquet in bulk is imported when first used: `show` needs no plotting library."""
    if name in _LATER:
        return getattr(import_module(f"sharpscope.analysis.{_LATER[name]}"), name)
    raise AttributeError(f"module 'sharpscope.analysis' has no attribute '{name}'")

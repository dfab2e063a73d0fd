"""Analysis: from recorded runs to comparisons, figures, tables, claims and a page. It reads traces and never trains."""

from sharpscope.analysis.forks import fork_differences
from sharpscope.analysis.output import AnalysisResult, analyze
from sharpscope.analysis.pairs import compare_runs
from sharpscope.analysis.spikes import explain_spikes, spike_text
from sharpscope.analysis.study import nothing_found
from sharpscope.analysis.terminal import (
    path_sections,
    show,
    show_headline,
    spike_sections,
    token_sections,
    watch,
)

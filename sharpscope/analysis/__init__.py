"""Analysis: from recorded runs to figures, tables, a report; reads traces, never trains."""

from sharpscope.analysis.analyze import AnalysisResult, analyze
from sharpscope.analysis.compare import Comparison, compare
from sharpscope.analysis.show import show

__all__ = ["AnalysisResult", "Comparison", "analyze", "compare", "show"]

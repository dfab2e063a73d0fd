"""The HTML report: a self-contained, inert page with the verdicts, figures and tokens of some runs."""

from sharpscope.analysis.html.page import report_html

__all__ = ["report_html"]

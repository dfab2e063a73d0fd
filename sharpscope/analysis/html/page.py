"""The HTML report: one file that needs nothing from outside, in which text from runs and models is inert."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from sharpscope import __version__
from sharpscope.analysis import report_sections as sections
from sharpscope.analysis.claims import Verdict
from sharpscope.analysis.claims.writers import LIMITS
from sharpscope.analysis.completions import completions_dropped
from sharpscope.analysis.figures.style import styled
from sharpscope.analysis.html.inert import data_uri, script_json, source_hash
from sharpscope.analysis.html.interactive import plot_of
from sharpscope.analysis.html.tokens import token_view
from sharpscope.analysis.report import StudyReport
from sharpscope.analysis.report_content import ReportContent
from sharpscope.analysis.text import shown

SIGNS = {"supported": "✓", "refuted": "✗", "inconclusive": "?", "untestable": "–"}
_SCRIPTS = ("colours.js", "tokens.js", "view.js")


@dataclass(frozen=True)
class Chart:
    """A figure of the page: `image` is the picture as an address, `plot` plotly's data where its values can be read.

    width, height: of the picture [CSS pixels].
    """

    name: str
    caption: str
    image: str
    width: int
    height: int
    plot: dict[str, Any] | None


def report_html(content: ReportContent, pictures: Mapping[str, str] | None = None) -> str:
    """The whole page.

    Args:
        content: what it tells.
        pictures: name → SVG text of figures that were drawn already; the others are drawn here.
    """
    charts = {
        name: chart(name, picture.caption, picture.figure, (pictures or {}).get(name))
        for name, picture in content.pictures()
        if picture.figure is not None
    }
    view = token_view(content.runs.by_name)
    plots = {name: one.plot for name, one in charts.items() if one.plot is not None}
    data = {"data-plots": Markup(script_json(plots))}
    scripts = [_asset("figures.js")]
    if view["completions"]:
        data["data-tokens"] = Markup(script_json(view))
        scripts = [*map(_asset, _SCRIPTS), *scripts]
    if plots:
        scripts = [plotly_script(), *scripts]
    css, plot_css = _asset("report.css"), _asset("plotly.css")
    context = _context(content, charts) | {
        "policy": policy(scripts, [css, plot_css] if plots else [css]), "css": Markup(css), "plot_css": Markup(plot_css),
        "plots": bool(plots), "scripts": [Markup(text) for text in scripts], "data": list(data.items()),
        "guards": style_guards(scripts[0]) if plots else [], "token_count": len(view["completions"]),
        "token_rule": view["rule"], "token_notes": view["notes"], "spike_count": len(view["spikes"]),
    }  # fmt: skip
    return _environment().get_template("report.html.j2").render(context)


def policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """The Content-Security-Policy: nothing from outside, no form, no frame, and of inline code only what is hashed here."""
    return "; ".join([
        "default-src 'none'",
        "script-src " + " ".join(map(source_hash, scripts)),
        "style-src " + " ".join(map(source_hash, styles)),
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ])  # fmt: skip


def chart(name: str, caption: str, figure: Figure, svg: str | None = None) -> Chart:
    """A figure for the page. `svg`: its picture, if it was drawn already."""
    width, height = (round(float(inches) * 96) for inches in figure.get_size_inches())
    image = data_uri(svg or svg_text(figure), "image/svg+xml")
    return Chart(name, caption, image, width, height, plot_of(figure))


def svg_text(figure: Figure) -> str:
    """A figure as SVG text, the same for equal figures."""
    sink = io.StringIO()
    with styled():
        figure.savefig(sink, format="svg", metadata={"Date": None})
    return sink.getvalue()


@cache
def plotly_script() -> str:
    """plotly.js as the Python package brings it, fit to stand inside a script element."""
    from plotly.offline import get_plotlyjs

    text = get_plotlyjs().replace("\r\n", "\n")
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def style_guards(script: str) -> list[str]:
    """Ids that keep parts of plotly.js from adding style sheets of their own, which the policy forbids.

    Its map library looks for an element with a certain id before it adds its sheet; there is no map in a report.
    """
    return sorted(set(re.findall(r'getElementById\("([0-9a-f]{64})"\)', script)))


def _context(content: ReportContent, charts: Mapping[str, Chart]) -> dict[str, Any]:
    of_claims: dict[str, list[Chart]] = {}
    for name, picture in content.pictures():
        if picture.claim:
            of_claims.setdefault(picture.claim, []).append(charts[name])
    missing = {picture.claim: picture.missing for picture in content.evidence if picture.missing}
    methods = content.verdicts[0].methods if content.verdicts else ("–", "–")
    counts = Counter(str(verdict.verdict) for verdict in content.verdicts)
    names = list(content.runs.by_name)
    listed = sections.Grid("Commands", ("makes", "command"), tuple(sections.commands(content)))
    return {
        "version": __version__, "source": content.source, "messages": content.messages,
        "title": f"{len(names)} run{'s' if len(names) != 1 else ''}: {', '.join(names[:4])}{' …' if len(names) > 4 else ''}",
        "baseline": methods[0], "treatment": methods[1], "signs": SIGNS, "limits": LIMITS,
        "tally": [(outcome, counts[outcome]) for outcome in SIGNS if counts[outcome]],
        "verdicts": [_verdict(v, of_claims.get(v.claim, []), missing.get(v.claim, ""), content) for v in content.verdicts],
        "studies": [_study(report, charts) for report in content.reports],
        "other_figures": [charts[name] for name, p in content.pictures() if not p.claim and p in content.evidence],
        "run_table": sections.run_grid(content.runs), "event_table": sections.event_grid(content.runs),
        "cost_table": sections.cost_grid(content.runs), "spike_table": sections.spike_grid(content.runs),
        "no_spikes": sections.no_spikes(content.runs), "not_kept": sections.not_kept(content.runs),
        "all_dropped": all(map(completions_dropped, content.runs)),
        "command_table": listed,
    }  # fmt: skip


def _verdict(verdict: Verdict, figures: Sequence[Chart], missing: str, content: ReportContent) -> dict[str, Any]:
    effect = verdict.effect
    line = verdict.reason
    if verdict.verdict != "untestable" and effect is not None and sections.number(effect.value) != "–":
        interval = "" if effect.interval is None else f" {effect.interval}"
        line = f"{effect.name} {sections.number(effect.value)}{interval}, n = {verdict.n:,}"
    p = "" if verdict.p_value is None else sections.number(verdict.p_value)
    if p and verdict.role == "primary":
        p += f", after Holm {sections.number(verdict.p_adjusted)}"
    return {
        "verdict": verdict, "line": line, "figures": figures, "missing": missing, "p": p,
        "numbers": sections.number_grid(verdict), "read": sections.read_grid(verdict),
        "frames": sections.frame_grids(verdict), "command": f"sharpscope claims {content.source} --claim {verdict.claim} --details",
    }  # fmt: skip


def _study(report: StudyReport, charts: Mapping[str, Chart]) -> dict[str, Any]:
    tables = (sections.result_grid(report), sections.difference_grid(report.study), sections.setting_grid(report.study))
    return {
        "name": report.study.name,
        "tables": [table for table in tables if table is not None],
        "figures": [charts[f"{report.study.slug}{p.name}"] for p in report.pictures if p.figure is not None],
        "missing": [p.missing for p in report.pictures if p.missing],
    }


@cache
def _environment() -> Environment:
    """Every expression is escaped, and every control and bidirectional mark in it made visible."""
    return Environment(
        loader=PackageLoader("sharpscope.analysis.html", "templates"),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        finalize=lambda value: shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )  # fmt: skip


@cache
def _asset(name: str) -> str:
    return files("sharpscope.analysis.html").joinpath("assets", name).read_text(encoding="utf-8")

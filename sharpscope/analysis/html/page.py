"""The page: one file that needs nothing from outside, in which text from runs and models is inert."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sharpscope import __version__
from sharpscope.analysis.html.tokens import token_view
from sharpscope.analysis.report import Page, not_kept
from sharpscope.analysis.sections import Code, Marked, cell_text, is_text
from sharpscope.analysis.text import shown

PARTS = (
    *("Found", "Curves", "Tokens", "Compare", "Sharpness"),
    *("Counterfactual updates", "Events and cost", "Claims", "Make it again"),
)
"""The parts of the page in order."""
_SVG = "data:image/svg+xml;base64,"


def report_html(page: Page, pictures: Mapping[str, str]) -> str:
    """The whole page.

    Args:
        page: what it says.
        pictures: name of a figure → its SVG text.
    """
    view = token_view(page.runs.by_name, page.choices)
    scripts, data = [_asset("page.js")], {}
    charts = [group for group in page.charts if group["charts"]]
    if view["completions"]:
        data["tokens"] = Markup(script_json(view))
        scripts = [*map(_asset, ("colors.js", "tokens.js", "view.js")), *scripts]
    if charts:
        data["curves"] = Markup(script_json(charts))
        scripts += map(_asset, ("uplot/uPlot.iife.min.js", "curves.js"))
    css = _asset("report.css") + (_asset("uplot/uPlot.min.css") if charts else "")
    names, numbers = list(page.runs.by_name), {name: n for n, name in enumerate(page.choices)}
    there = {(view["runs"][c["r"]], c["s"], c["n"]) for c in view["completions"] if "t" in c}

    def link(cell: Marked) -> str:
        """Address of a token in the token view; empty if its completion is not shown there."""
        known = cell.run in numbers and (shown(cell.run), cell.step, cell.rollout) in there
        return f"#token-{numbers[cell.run]}-{cell.step}-{cell.rollout}-{cell.position}" if known else ""

    parts = {name: [section for section in page.sections if section.part == name] for name in PARTS}
    held = {
        name: content for name, content in parts.items() if content or name == "Tokens" or (name == "Curves" and charts)
    }
    html = _environment().get_template("report.html.j2")
    return html.render(
        version=__version__,
        source=page.source,
        policy=policy(scripts, [css]),
        css=Markup(css),
        scripts=list(map(Markup, scripts)),
        data=data,
        parts=held,
        kind=lambda section: {str: "text", pd.DataFrame: "table"}.get(type(section.content), "figure"),
        # the address of an SVG file inside the page, in which nothing can run
        picture=lambda section: Markup(_SVG + base64.b64encode(pictures[section.name].encode()).decode()),
        link=link,
        is_code=lambda cell: isinstance(cell, Code),
        is_marked=lambda cell: isinstance(cell, Marked),
        text_columns=lambda frame: [is_text(frame.iloc[:, n]) for n in range(frame.shape[1])],
        cell_text=cell_text,
        one_line=lambda text: " ".join(text.replace("\n", " ⏎ ").split(" ")),
        title=f"{len(names)} run{'s' * (len(names) != 1)}: {', '.join(names[:4])}{' …' * (len(names) > 4)}",
        token_count=len(view["completions"]),
        token_rule=page.rule,
        token_notes=view["notes"],
        not_kept=not_kept(list(page.runs)),
    )


def policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """The Content-Security-Policy: nothing from outside, no form, no frame, and only the inline code that is hashed here."""
    rules = ["default-src 'none'", "img-src data:", "base-uri 'none'", "form-action 'none'"]
    rules += ["script-src " + " ".join(map(_source_hash, scripts)), "style-src " + " ".join(map(_source_hash, styles))]
    return "; ".join(rules)


def script_json(value: Any) -> str:
    """`value` as JSON for the inside of a script element: no character in it can end the element or open a comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _source_hash(text: str) -> str:
    """The source expression of the policy that allows exactly this inline script or style."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


@cache
def _environment() -> Environment:
    """Every expression is escaped, and every control and bidirectional mark in it made visible."""
    return Environment(
        loader=PackageLoader("sharpscope.analysis.html", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )


@cache
def _asset(name: str) -> str:
    return files("sharpscope.analysis.html").joinpath("assets", name).read_text(encoding="utf-8")

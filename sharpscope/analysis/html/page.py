"""The HTML report: one file that needs nothing from outside, in which text from runs and models is inert."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sharpscope import __version__
from sharpscope.analysis.claims import LIMITS
from sharpscope.analysis.completions import RULE, completions_dropped
from sharpscope.analysis.figures.style import Picture, compact_svg, svg_text
from sharpscope.analysis.html.tokens import token_view
from sharpscope.analysis.overview import Moved, Spot
from sharpscope.analysis.report import Report, VerdictSection
from sharpscope.analysis.text import number, shown

_PLAIN = "".join(chr(code) for code in range(32, 127) if chr(code) not in '"#%&<>')
"""Characters that stand for themselves in a data address and in an HTML attribute in double quotes."""
SIGNS = {"supported": "✓", "refuted": "✗", "inconclusive": "?", "untestable": "–"}


def report_html(report: Report, pictures: Mapping[str, str] | None = None) -> str:
    """The whole page.

    Args:
        report: what it says.
        pictures: name → SVG text of figures that were drawn already; the others are drawn here.
    """
    images = {name: _image(figure, (pictures or {}).get(name)) for name, figure in report.figures.items()}
    view = token_view(report.runs.by_name, report.choices)
    scripts, data = [_asset("page.js")], {}
    if view["completions"]:
        data["data-tokens"] = Markup(script_json(view))
        scripts = [*map(_asset, ("colors.js", "tokens.js", "view.js")), *scripts]
    css = _asset("report.css")
    methods = report.verdicts[0].verdict.methods if report.verdicts else ("–", "–")
    names, choices = list(report.runs.by_name), list(report.choices)
    shown_completions = {(choices[c["r"]], c["s"], c["n"]): c["r"] for c in view["completions"] if "t" in c}
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            version=__version__,
            report=report,
            policy=policy(scripts, [css]),
            css=Markup(css),
            scripts=list(map(Markup, scripts)),
            data=list(data.items()),
            figure=lambda name, picture: _figure(name, picture, images[name]),
            p_text=_p_text,
            token_link=partial(_token_link, shown_completions),
            percent=lambda share: f"{100 * share:+.1f} %".replace("-", "−"),
            p3=number,
            one_line=lambda text: " ".join(text.replace("\n", " ⏎ ").split(" ")),
            title=f"{len(names)} run{'s' if len(names) != 1 else ''}: {', '.join(names[:4])}{' …' if len(names) > 4 else ''}",
            baseline=methods[0],
            treatment=methods[1],
            signs=SIGNS,
            limits=LIMITS,
            token_count=len(view["completions"]),
            token_rule=RULE,
            token_notes=view["notes"],
            spike_count=len(view["spikes"]),
            all_dropped=all(map(completions_dropped, report.runs)),
        )
    )


def policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """The Content-Security-Policy: nothing from outside, no form, no frame, and only the inline code that is hashed here."""
    rules = ["default-src 'none'", "img-src data:", "base-uri 'none'", "form-action 'none'"]
    rules += ["script-src " + " ".join(map(_source_hash, scripts)), "style-src " + " ".join(map(_source_hash, styles))]
    return "; ".join(rules)


def script_json(value: Any) -> str:
    """`value` as JSON for the inside of a script element: no character in it can end the element or open a comment.

    Numbers that are not finite become null.
    """
    text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def finite(value: Any) -> Any:
    """The same value with None in place of every number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _source_hash(text: str) -> str:
    """The source expression of the policy that allows exactly this inline script or style."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def _image(figure: Any, svg: str | None) -> tuple[str, int, int]:
    """Address of the picture (an SVG file inside the page, in which nothing can run), width and height [CSS pixels]."""
    width, height = (round(float(inches) * 96) for inches in figure.get_size_inches())
    address = Markup("data:image/svg+xml,") + Markup(quote(compact_svg(svg or svg_text(figure)), safe=_PLAIN))
    return address, width, height


def _figure(name: str, picture: Picture, image: tuple[str, int, int]) -> dict[str, Any]:
    return {"name": name, "caption": picture.caption, "image": image[0], "width": image[1], "height": image[2]}


def _token_link(shown: Mapping[tuple[str, int, int], int], moved: Moved, spot: Spot) -> str:
    """Address of a token in the token view; empty if its completion (run, step, rollout) is not shown there."""
    run = shown.get((moved.run, moved.step, spot.rollout))
    return "" if run is None else f"#token-{run}-{moved.step}-{spot.rollout}-{spot.position}"


def _p_text(section: VerdictSection) -> str:
    verdict = section.verdict
    return "" if verdict.p_value is None else number(verdict.p_value)


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

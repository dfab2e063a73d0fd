"""Hooks of mkdocs: reference pages generated from the code, and formulas as MathML, which needs no script."""

from __future__ import annotations

import contextlib
import html
import re
from pathlib import Path
from typing import Any

import latex2mathml.converter
import pandas as pd
import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.cli import get_docs_for_click
from typer.core import TyperGroup

from sharpscope.analysis import analyze
from sharpscope.analysis.output import MARK
from sharpscope.analysis.plots import PLOTS
from sharpscope.cli import app
from sharpscope.config import ForkSpec, RunConfig
from sharpscope.methods import constants, describe, method_names
from sharpscope.settings import settings_of
from sharpscope.traces import SCHEMA_VERSION, TABLES

ROOT = Path(__file__).parents[1]
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
_DOLLARS = re.compile(r"\$\$(.+?)\$\$|\$([^$]+)\$", re.DOTALL)
_EXAMPLES = re.compile(r"Examples:\n((?:  ?\S.*\n|\s*\n(?=  ))+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and the studies' main figures."""
    pages = {
        "changelog.md": _of_root("CHANGELOG.md"),
        "contributing.md": _of_root("CONTRIBUTING.md"),
        "reference/commands.md": _commands(),
        "reference/configuration.md": _configuration(),
        "reference/methods.md": _methods(),
        "reference/trace.md": _schema(),
    }
    pages["gallery.md"] = _gallery(files, config)
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    files.append(File.generated(config, "images/mark.svg", content=mark("#0173b2", "#de8f05")))
    files.append(
        File.generated(config, "images/mark-white.svg", content=mark("#ffffff", "#ffd28a"))
    )
    for picture in sorted((ROOT / "figures" / "paper").glob("*.png")):
        files.append(File.generated(config, f"images/{picture.name}", abs_src_path=str(picture)))
    return files


def mark(peak: str, lens: str) -> str:
    """The project's mark as an SVG file: a sharp peak under a lens, in these colors."""
    line = "fill:none;stroke-width:3;stroke-linejoin:round;stroke-linecap:round"
    look = f"<style>.peak,.lens{{{line}}}.peak{{stroke:{peak}}}.lens{{stroke:{lens}}}</style>"
    body = f"{look}{MARK}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 40 40">{body}</svg>\n'


RUN, PAIR, REFERENCE = "data/example/sums", "tests/data/pair", "data/reference"
SOURCES = {
    **dict.fromkeys(("token_steps", "layer_steps"), RUN),
    **dict.fromkeys(("gradient_norm", "lorenz", "weights", "distribution", "sharpness"), PAIR),
    **dict.fromkeys(("trajectories", "ablation", "people", "paired", "forest"), REFERENCE),
    **dict.fromkeys(("rotation", "rotation_map"), "docs/data/rotations.csv"),
    **{name: f"docs/data/{name}.csv" for name in ("plane", "spectrum", "slices")},
    "removal": "experiments/attribution/removal_math.csv",
    # of `sharpscope rotate RUN --plot`, with a run of grpo-sg on the embedded policy knights_knaves
    "weight_functions": "docs/data/weights.csv",
    "log": "tests/diagnose/logs.csv",
}
"""Figure of the gallery -> what it is drawn from."""
CHOICES = {"log": {"run": "kl_k1"}}
"""Figure -> its choices."""


def _gallery(files: Files, config: MkDocsConfig) -> str:
    """The page of all figures, each with its code, drawn for the light and for the dark page."""
    lines = [
        "# Gallery",
        "",
        "Every figure of `run.plot` and `sharpscope plot`, drawn from the runs that come with the project while this site was built.",
        "Each returns its axes and the frame that it shows: `axes, frame = run.plot.lorenz()`; `--out FILE` writes the figure and its numbers.",
    ]
    for name, one in PLOTS.items():
        lines += ["", f"## {name}", "", one.says, ""]
        source = SOURCES[name]
        for style, only in (("notebook", "light"), ("dark", "dark")):
            picture = f"images/gallery/{name}-{only}.png"
            files.append(File.generated(config, picture, content=_drawn(name, source, style)))
            lines.append(f"![{one.says}]({picture}#only-{only})")
        code = f'sharpscope.load_runs("{source}").plot.{name}()'
        chosen = CHOICES.get(name, {})
        given = "".join(f', {key}="{value}"' for key, value in chosen.items())
        if not Path(ROOT / source).is_dir():
            code = f'sharpscope.analysis.plots.{name}("{source}"{given})'
        options = "".join(f" --choose {key}={value}" for key, value in chosen.items())
        lines += ["", f"```python\n{code}\n```", ""]
        lines += [f"```bash\nsharpscope plot {source} {name}{options}\n```"]
    return "\n".join(lines) + "\n"


def _drawn(name: str, source: str, style: str) -> bytes:
    """A figure as PNG."""
    data: Any = str(ROOT / source)
    if name == "rotation":
        table = pd.read_csv(data)
        data = table[table["policy"] == "knights_knaves"]
    return PLOTS[name](data, style=style, **CHOICES.get(name, {}))._repr_png_()


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """Write the report of the example run into the site, as example/report.html."""
    site = Path(config.site_dir).absolute()
    with contextlib.chdir(ROOT):  # the page names the folder as it is given
        analyze("data/example", out=site / "example")


def on_page_content(content: str, page: Page, **_: Any) -> str:
    r"""Replace \(…\) and \[…\] by MathML, and the notebooks' links to source files by links to pages."""

    def dollars(match: re.Match[str]) -> str:
        display = "block" if match[1] else "inline"
        return latex2mathml.converter.convert(html.unescape(match[1] or match[2]), display=display)

    # the notebook plugin leaves links as they are; a page is a folder
    if page.file.src_uri.endswith(".ipynb"):
        content = re.sub(r'href="(?!\w+:)([^"#]*/)?index\.md', r'href="../\1', content)
        content = re.sub(r'href="(?!\w+:)([^"#]+)\.(?:md|ipynb)(?=[#"])', r'href="../\1/', content)
        content = re.sub(
            r"<p>.*?</p>",
            lambda paragraph: _DOLLARS.sub(dollars, paragraph[0]),
            content,
            flags=re.DOTALL,
        )

    def formula(match: re.Match[str]) -> str:
        display = "block" if match[2] == "[" else "inline"
        return latex2mathml.converter.convert(html.unescape(match[3]), display=display)

    return _FORMULA.sub(formula, content)


def _of_root(name: str) -> str:
    """A page of the repository's root, with links as they are in docs/; those to files that the site lacks become text."""
    text = (ROOT / name).read_text("utf-8").replace("](docs/", "](")
    return re.sub(
        r"\[([^]]+)\]\((?:experiments|sharpscope|tests|data|figures)/[^)]*\)", r"\1", text
    )


def _commands() -> str:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    context = typer.Context(group, info_name="sharpscope")
    pages = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is not None and not command.hidden:
            pages.append(
                get_docs_for_click(obj=command, ctx=context, indent=1, call_prefix="sharpscope")
            )
    text = _EXAMPLES.sub(
        lambda found: "Examples:\n\n```bash\n" + _unindent(found[1]) + "```\n", "\n".join(pages)
    )
    return "# Commands\n\n`sharpscope COMMAND --help` prints the same in a terminal.\n\n" + text


def _unindent(lines: str) -> str:
    return "".join(f"{line.strip()}\n" for line in lines.splitlines() if line.strip())


def _configuration() -> str:
    """A table for each part of the configuration, for each kind that it may have."""
    lines = [
        "# Configuration",
        "",
        "The settings of a run, for YAML files and `--set path=value`. `sharpscope config` prints the common ones, "
        "`sharpscope config PART` those of a part.",
    ]
    for title, model, prefix in (
        ("Run", RunConfig, ""),
        ("Fork (--set fork.…)", ForkSpec, "fork."),
    ):
        sections: dict[str, list[str]] = {}
        for row in settings_of(model, prefix):
            part = (
                row.path.removeprefix(prefix).split(".")[0]
                if "." in row.path.removeprefix(prefix)
                else ""
            )
            heading = f"{title}: {part}" if part else title
            heading += f", kind {row.kind}" if row.kind else ""
            code = [
                f"<code>{html.escape(text)}</code>" if text else ""
                for text in (row.path, row.values, row.default)
            ]
            cells = (
                text.replace("|", "&#124;").replace("\n", " ")
                for text in (*code, html.escape(row.description))
            )
            sections.setdefault(heading, []).append("| " + " | ".join(cells) + " |")
        for heading, rows in sections.items():
            lines += [
                "",
                f"## {heading}",
                "",
                "| setting | values | default | description |",
                "|---|---|---|---|",
                *rows,
            ]
    return "\n".join(lines) + "\n"


def _methods() -> str:
    lines = [
        "# Methods",
        "",
        "Each name is a value of the configuration's part `method`. `sharpscope methods NAME` prints an entry.",
        "Append `-reverse`, `-shuffled`, `-constant`, `-mean-one` or `-entropy` to a method with token weights for a control.",
    ]
    for name in method_names():
        note = describe(name)
        lines += ["", f"## {name}", "", f"**{note.title}.** {note.differs}", ""]
        rows = {
            "loss": note.loss,
            "constants": constants(note.method),
            "source": note.source,
            "choices of this project": note.choices,
        }
        lines += [f"- *{title}*: {text}" for title, text in rows.items() if text]
    return "\n".join(lines) + "\n"


def _schema() -> str:
    """The trace schema as Markdown."""
    lines = [
        f"# Trace schema, version {SCHEMA_VERSION}",
        "",
        "`runs/<name>/traces/<table>/part-*.parquet`. 'or null': the value may be missing. 'with a probe': null",
        "unless a probe or an option records it. Columns in seconds differ between two runs of one config.",
    ]
    for table in TABLES.values():
        lines += [
            "",
            f"## {table.name}",
            "",
            f"A row is {table.row}, identified by {', '.join(table.key)}.",
            "",
        ]
        lines += ["| column | type | unit | recorded | definition |", "|---|---|---|---|---|"]
        for column in table.columns:
            when = "with a probe" if column.probe else "or null" if column.nullable else ""
            cells = (column.name, column.type, column.unit, when, column.definition)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"

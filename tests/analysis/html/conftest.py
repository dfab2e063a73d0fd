"""One report of two hostile runs, made once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from sharpscope.analysis import analyze
from sharpscope.analysis.output import AnalysisResult
from tests.analysis.html.runs import write_report_run


@dataclass(frozen=True)
class Made:
    """A report, the folder of its runs, and the page's text."""

    files: AnalysisResult
    runs: Path

    @property
    def html(self) -> str:
        return self.files.page.read_text(encoding="utf-8")

    def data(self, name: str):
        """A block of JSON data of the page."""
        import json

        (text,) = re.findall(rf'<script type="application/json" id="data-{name}">(.*?)</script>', self.html, re.DOTALL)
        return json.loads(text)


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Made:
    folder = tmp_path_factory.mktemp("report")
    for method in ("grpo", "grpo-sg"):
        write_report_run(folder / "runs" / f"{method}-s0", method, spike=method == "grpo")
    return Made(analyze(folder / "runs", folder / "out"), folder / "runs")


@pytest.fixture
def page(chromium, made):
    """The report in a fresh tab; the test fails if the page ever said an error or asked for anything outside."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    tab = context.new_page()
    said: list[str] = []
    tab.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on(
        "request", lambda request: said.append(request.url) if not request.url.startswith(("file:", "data:")) else None
    )
    tab.set_default_timeout(10_000)
    tab.goto(made.files.page.as_uri())
    yield tab
    context.close()
    assert said == []

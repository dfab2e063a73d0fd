"""One small synthetic study for all tests of figures and tables."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from sharpscope.analysis import analyze
from sharpscope.analysis.claims import REDUCERS
from sharpscope.analysis.output import AnalysisResult
from sharpscope.analysis.study import studies
from sharpscope.traces import load_runs
from tests.analysis.runs import write_report_run
from tests.traces.synthetic import Effects, Shape, write_study

SHAPE = Shape(steps=6, prompts=3, length=8, probe_every=3, eval_every=3)
METHODS = {"grpo": Effects(), "grpo-sg": Effects(accuracy_gain=0.4, sharpness=14.0, low_probability_harm=2.0)}


@pytest.fixture(scope="session")
def study_folder(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("study") / "runs", METHODS, seeds=6, shape=SHAPE)


@pytest.fixture(scope="session")
def study(study_folder):
    (result,) = studies(load_runs(study_folder))
    result.read_tokens(REDUCERS)
    return result


@pytest.fixture(scope="session")
def chromium():
    """A headless browser."""
    if (path := shutil.which("chromium")) is None:
        pytest.skip("no `chromium` on the PATH (Debian's package chromium)")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    with sync_api.sync_playwright() as driver:
        root = hasattr(os, "geteuid") and os.geteuid() == 0
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"] if root else [])
        yield browser
        browser.close()


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
    said, asked = [], []
    tab.on("console", lambda message: said.append((message.type, message.text)))
    tab.on("pageerror", lambda error: said.append(("error", str(error))))
    tab.on("request", lambda request: asked.append(request.url))
    tab.set_default_timeout(10_000)
    tab.goto(made.files.page.as_uri())
    yield tab
    context.close()
    assert not [text for kind, text in said if kind in ("error", "warning")]
    assert not [url for url in asked if not url.startswith(("file:", "data:"))]

"""One small synthetic study for all tests of figures and tables."""

from __future__ import annotations

import os
import shutil

import pytest

from sharpscope.analysis.claims import REDUCERS
from sharpscope.analysis.study import studies
from sharpscope.traces import load_runs
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
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no `chromium` on the PATH (Debian's package chromium)")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")

    with sync_api.sync_playwright() as driver:
        root = hasattr(os, "geteuid") and os.geteuid() == 0
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"] if root else [])
        yield browser
        browser.close()

"""Make the pictures of README, of the pages and of figures/paper from the recorded runs: `python docs/screenshots.py`.

The report is photographed in headless Chromium (Debian's package `chromium`, and the Python package `playwright`); terminal output is
saved by rich as SVG. `tests/test_examples.py` checks that the terminal output is current.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from sharpscope.analysis import analyze, token_sections
from sharpscope.analysis.card import write_card
from sharpscope.analysis.sections import to_terminal
from sharpscope.traces import load_run

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
RUN = ROOT / "data" / "example" / "sums"
COMMAND = "sharpscope tokens data/example/sums --top 6"


def terminal() -> str:
    """The beginning of COMMAND's output, its tokens and prompts, as SVG."""
    console = Console(width=100, record=True, file=io.StringIO(), force_terminal=True)
    console.print(f"$ {COMMAND}")
    console.print(to_terminal(token_sections(load_run(RUN), top=6)[:2]))
    picture = console.export_svg(title=COMMAND, unique_id="tokens")
    # they would be loaded from another host
    return re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)


def photograph(page: Path, tokens: Path, curves: Path) -> None:
    """Photograph the page's first screen, light and dark, its curves, and its token view at the token with the largest share."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("screenshots: no `chromium` on the PATH; install Debian's package chromium")
    with sync_playwright() as driver:
        root = hasattr(os, "geteuid") and os.geteuid() == 0
        browser = driver.chromium.launch(
            executable_path=chromium, args=["--no-sandbox"] if root else []
        )
        tab = browser.new_page(viewport={"width": 1180, "height": 650}, device_scale_factor=1.5)
        tab.set_default_timeout(180_000)  # [ms]; a busy machine takes long to draw the page
        for scheme in ("dark", "light"):
            tab.emulate_media(color_scheme=scheme)
            tab.goto(page.as_uri())
            tab.wait_for_selector("html[data-curves=drawn]")
            tab.screenshot(path=IMAGES / f"page-{scheme}.png")
        tab.locator("#curves").scroll_into_view_if_needed()
        tab.evaluate("document.getElementById('curves').scrollIntoView({block: 'start'})")
        tab.wait_for_timeout(1000)
        tab.screenshot(path=curves)
        tab.evaluate("document.querySelector('a.spot').scrollIntoView()")
        tab.locator("a.spot").first.click()
        tab.locator("#tip dl").wait_for()
        tab.evaluate("document.getElementById('legend').scrollIntoView({block: 'start'})")
        tab.screenshot(path=tokens)
        browser.close()


def main() -> None:
    """Write docs/images/ and figures/paper/."""
    IMAGES.mkdir(exist_ok=True)
    subprocess.run([sys.executable, "-m", "experiments.paper.figures"], check=True, cwd=ROOT)
    write_card(load_run(RUN), IMAGES / "card.png")
    (IMAGES / "tokens.svg").write_text(terminal(), "utf-8")
    # the page names the folder as it is given
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(ROOT):
        photograph(
            analyze("data/example", folder).page,
            IMAGES / "report-tokens.png",
            IMAGES / "report-curves.png",
        )


if __name__ == "__main__":
    main()

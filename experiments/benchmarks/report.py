"""What a report of many runs costs: seconds to make it, its size, and its first paint in headless Chromium."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sharpscope.analysis import write_page
from sharpscope.errors import UserError


def report_cost(paths: Sequence[Path], repeats: int = 3) -> dict[str, Any]:
    """Write the page of the runs below `paths` once and open it `repeats` times, each in a fresh tab.

    Returns:
        `seconds` and `processor_seconds` to make the page, `megabytes`, and the medians `first_paint_s` and `load_s`, with all
        `first_paints_s`.

    Raises:
        UserError: there is no `chromium` on the PATH.
    """
    with tempfile.TemporaryDirectory(prefix="sharpscope-bench-") as folder:
        began = time.perf_counter(), time.process_time()
        page = write_page(list(paths), Path(folder) / "report.html")
        seconds, processor = time.perf_counter() - began[0], time.process_time() - began[1]
        paints, loads = _paints(page, repeats)
        return {
            "seconds": seconds,
            "processor_seconds": processor,
            "megabytes": page.stat().st_size / 1e6,
            "first_paint_s": statistics.median(paints),
            "first_paints_s": paints,
            "load_s": statistics.median(loads),
        }


def _paints(page: Path, repeats: int) -> tuple[list[float], list[float]]:
    """First paint and end of loading, from the start of navigation [s]."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        raise UserError("bench report: no `chromium` on the PATH; install Debian's package chromium")
    script = "performance.getEntriesByName('first-contentful-paint').map(entry => entry.startTime / 1000)"
    paints, loads = [], []
    with sync_playwright() as driver:
        root = hasattr(os, "geteuid") and os.geteuid() == 0
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"] if root else [])
        for _ in range(repeats):
            tab = browser.new_page(viewport={"width": 1280, "height": 900})
            began = time.perf_counter()
            tab.goto(page.as_uri(), timeout=120_000)
            loads.append(time.perf_counter() - began)
            tab.wait_for_function(f"{script}.length > 0")
            paints += tab.evaluate(script)
            tab.close()
        browser.close()
    return paints, loads

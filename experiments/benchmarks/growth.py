"""How costs grow with length, batch, width, vocabulary, layers and number of runs, and what the report of many runs costs.

Growth is in processor seconds of one thread, with a slope fitted on logarithmic axes and its limit.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from experiments.benchmarks.tokens import random_model
from sharpscope.analysis import analyze
from sharpscope.errors import UserError
from sharpscope.probes import directional_derivative, logp_gradient, score_norms

MEASURES = ("forward and backward", "local norms", "exact norms of 8 tokens a row", "shares (forward mode)", "report")


@dataclass(frozen=True)
class Axis:
    """What grows.

    Attributes:
        name: Label with its unit.
        values: Sizes, ascending.
        limit: Greatest allowed slope of log(seconds) over log(size).
    """

    name: str
    values: tuple[int, ...]
    limit: float


AXES = {
    "length": Axis("length T [tokens a row]", (64, 128, 256, 512, 1024), 2.0),  # attention is quadratic
    "batch": Axis("batch [rows]", (2, 4, 8, 16, 32), 1.1),
    "width": Axis("width d", (64, 128, 256, 512), 2.0),
    "vocabulary": Axis("vocabulary [words]", (624, 2_496, 9_984, 39_936), 1.1),
    "layers": Axis("layers", (2, 4, 8, 16), 1.1),
    "runs": Axis("runs in a report", (20, 40, 66, 105), 1.1),
}


@dataclass(frozen=True)
class Curve:
    """Seconds of a measure at the sizes of an axis."""

    axis: str
    measure: str
    seconds: tuple[float, ...]

    @property
    def slope(self) -> float:
        """Least-squares slope of log(seconds) over log(size) at the three largest sizes, where fixed costs matter least."""
        sizes = AXES[self.axis].values[: len(self.seconds)][-3:]
        return float(np.polyfit(np.log(sizes), np.log(self.seconds[-3:]), 1)[0])


def measure(axis: str, repeats: int = 3, data: Path = Path("data/reference")) -> list[Curve]:
    """Median processor seconds of every measure at each size of an axis.

    Sizes that do not vary: 2 rows of 128 tokens, 4 layers, width 128, 624 words.
    """
    if axis == "runs":
        return [Curve(axis, "report", tuple(_report_seconds(data, count) for count in AXES[axis].values))]
    seconds: dict[str, list[float]] = {}
    for size in AXES[axis].values:
        length, rows = (size if axis == name else usual for name, usual in (("length", 128), ("batch", 2)))
        shape = {axis: size} if axis in ("width", "vocabulary", "layers") else {}
        model = random_model(**shape, feed_forward=3 * shape.get("width", 128))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            ids = torch.randint(2, model.config.vocab_size, (rows, length))  # type: ignore[union-attr, arg-type, operator]
        for name, call in _calls(model, ids).items():
            call()  # warms up, and checks the tier on this model
            seconds.setdefault(name, []).append(statistics.median(_seconds(call) for _ in range(repeats)))
    return [Curve(axis, name, tuple(values)) for name, values in seconds.items()]


def _calls(model: nn.Module, ids: Tensor) -> dict[str, Callable[[], object]]:
    mask, few = torch.ones_like(ids), torch.zeros_like(ids)
    mask[:, 0] = 0
    few[:, torch.linspace(1, ids.shape[1] - 1, 8).long()] = 1
    direction = logp_gradient(model, ids, mask, mask.float())
    return {
        "forward and backward": lambda: logp_gradient(model, ids, mask, mask.float()),
        "local norms": lambda: score_norms(model, ids, mask),
        "exact norms of 8 tokens a row": lambda: score_norms(model, ids, few, "exact"),
        "shares (forward mode)": lambda: directional_derivative(model, ids, mask, direction),
    }


def _seconds(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def _report_seconds(data: Path, count: int) -> float:
    """Processor seconds of the report of the first `count` runs of a pack by seed, so that settings stay as they are."""
    names = pq.read_table(data / "runs.parquet", columns=["run"])["run"].unique().to_pylist()
    chosen = sorted(names, key=lambda name: int(name.rpartition("-s")[2]))[:count]
    with tempfile.TemporaryDirectory(prefix="sharpscope-bench-") as folder:
        for file in data.glob("*.parquet"):
            table = pq.read_table(file)
            pq.write_table(table.filter(pc.is_in(table["run"], pa.array(chosen))), Path(folder) / file.name)
        return _seconds(lambda: analyze([Path(folder)], Path(folder) / "report"))


def table(curves: Sequence[Curve]) -> str:
    """Slopes and limits as a table of Markdown."""
    lines = ["| axis | sizes | measure | seconds at the largest size | slope | limit |", "|---|---|---|---|---|---|"]
    for curve in curves:
        axis = AXES[curve.axis]
        verdict = "" if curve.slope <= axis.limit else ": missed"
        lines.append(
            f"| {axis.name} | {axis.values[0]:,}–{axis.values[-1]:,} | {curve.measure} | {curve.seconds[-1]:.2f} | "
            f"{curve.slope:.2f} | ≤ {axis.limit:g}{verdict} |"
        )
    return "\n".join(lines)


def picture(curves: Sequence[Curve], path: Path) -> None:
    """One panel an axis: processor seconds over size, with the fitted slopes."""
    from sharpscope.analysis.figures.style import COLORS, DASHES, MARKERS, finish, panels, styled

    looks = dict(zip(MEASURES, zip(COLORS, DASHES, MARKERS, strict=False), strict=False))
    names = [name for name in AXES if any(curve.axis == name for curve in curves)]
    with styled():
        figure, axes = panels(len(names), columns=3, height=1.7)
        for name, panel in zip(names, axes, strict=True):
            own, sizes = [curve for curve in curves if curve.axis == name], AXES[name].values
            for line, curve in enumerate(own):
                color, dash, marker = looks[curve.measure]
                panel.loglog(sizes, curve.seconds, color=color, linestyle=dash, marker=marker, label=curve.measure)
                text = f"slope {curve.slope:.2f}"
                place = (0.04, 0.97 - 0.1 * line)
                panel.text(*place, text, fontsize=6, color=color, va="top", transform=panel.transAxes)
            panel.set(xlabel=AXES[name].name, title=f"limit of the slope: {AXES[name].limit:g}")
            bottom, top = panel.get_ylim()
            panel.set_ylim(bottom, top * 2.5)  # room for the slopes
        for panel in axes[::3]:
            panel.set_ylabel("processor time [s]")
        finish(figure, axes)
        for name, panel in zip(names, axes, strict=True):
            panel.set_xticks(AXES[name].values[::2], [f"{size:,}" for size in AXES[name].values[::2]])
            panel.set_xticks([], minor=True)
        figure.savefig(path, dpi=150, metadata={"Software": None})


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
        page = analyze(list(paths), Path(folder) / "report").page
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

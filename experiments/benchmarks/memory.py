"""Does a long run's memory grow? Resident memory after every step of a tiny run in a process of its own."""

from __future__ import annotations

import json
import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults.setting import SETTINGS, tiny_config, tiny_policy

WARM_UP = 0.2  # share of the steps in which allocators still find their size
BLOCKS = 20


@dataclass(frozen=True)
class Memory:
    """Resident memory over a run's steps, the warm-up left out.

    Attributes:
        steps: steps of the run.
        slope: bytes a step, by least squares.
        std_error: of the slope, from the means of 20 blocks of steps: neighboring steps' residuals are not independent.
        growth: bytes that the slope adds over the measured steps.
        spread: standard deviation of the residuals [bytes].
        peak: largest resident memory of the process [bytes], as run.json states it.
        first, last: mean resident memory of the first and last block [bytes].
        seconds: of the run.
    """

    steps: int
    slope: float
    std_error: float
    growth: float
    spread: float
    peak: int
    first: float
    last: float
    seconds: float

    @property
    def flat(self) -> bool:
        """Whether the slope is within noise: at most two standard errors, or less than 1 % of the peak over the run."""
        return abs(self.slope) <= 2 * self.std_error or abs(self.growth) < 0.01 * self.peak

    def text(self) -> str:
        """One line for a person."""
        return (
            f"{self.steps} steps: slope {self.slope:+,.0f} ± {self.std_error:,.0f} bytes a step ({self.growth / 2**20:+.2f} MiB in all), "
            f"{self.first / 2**20:,.1f} MiB at first, {self.last / 2**20:,.1f} MiB at last, peak {self.peak / 2**20:,.1f} MiB: "
            f"{'flat' if self.flat else 'GROWING'}"
        )


def slope_of(values: np.ndarray, blocks: int = BLOCKS) -> tuple[float, float, float]:
    """(slope a step, its standard error, standard deviation of the residuals) of a series.

    The line is fitted to the means of `blocks` equal blocks; the error is that fit's, so that residuals may depend on each
    other within a block.
    """
    parts = np.array_split(np.arange(len(values)), blocks)
    x = np.array([part.mean() for part in parts])
    y = np.array([values[part].mean() for part in parts])
    (slope, level), covariance = np.polyfit(x, y, 1, cov=True)
    residual = values - (slope * np.arange(len(values)) + level)
    return float(slope), math.sqrt(float(covariance[0, 0])), float(residual.std())


def measure(steps: int = 1000, tell: Callable[[str], None] = lambda text: None) -> Memory:
    """Train a tiny policy for `steps` steps with every recorder on, and follow its process's memory."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="sharpscope-memory-") as folder:
        place = Path(folder)
        tiny_policy(place / "policy")
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_main, args=(theirs, folder, steps), daemon=True)
        started = time.monotonic()
        process.start()
        theirs.close()
        resident: list[int] = []
        while True:
            try:
                resident.append(mine.recv())
            except EOFError:
                break
            if len(resident) % max(steps // 10, 1) == 0:
                tell(f"{len(resident)} of {steps} steps")
        process.join()
        info = json.loads((place / "run" / "run.json").read_text(encoding="utf-8"))
        seconds = time.monotonic() - started
    if info["status"] != "finished" or len(resident) != steps:
        raise RuntimeError(f"the run ended as {info['status']} after {len(resident)} steps: {info.get('end')}")
    values = np.array(resident[int(WARM_UP * steps) :], dtype=float)
    slope, error, spread = slope_of(values)
    block = max(len(values) // BLOCKS, 1)
    return Memory(
        steps=steps,
        slope=slope,
        std_error=error,
        growth=slope * len(values),
        spread=spread,
        peak=int(info["peak_memory_bytes"]["process"]),
        first=float(values[:block].mean()),
        last=float(values[-block:].mean()),
        seconds=seconds,
    )


def write(found: Memory, out: Path) -> Path:
    """Write memory.json to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "memory.json"
    path.write_text(json.dumps(asdict(found) | {"flat": found.flat}, indent=1) + "\n", encoding="utf-8")
    return path


def _main(pipe: Connection, folder: str, steps: int) -> None:
    import psutil

    from sharpscope.training import Display, train

    process = psutil.Process()

    class Watch(Display):
        def step(self, row: Mapping[str, Any]) -> None:
            pipe.send(process.memory_info().rss)

    place = Path(folder)
    setting = SETTINGS["calibrated weights, KL to a reference"]
    changes: dict[str, Any] = {
        "steps": steps,
        "checkpoint__every": 50,
        "evaluation__every": 50,
        "recording__token_gradients_every": 10,
        "recording__heldout_influence_every": 50,
    }
    train(tiny_config(place / "policy", place / "run", setting, **changes), Watch())
    pipe.close()

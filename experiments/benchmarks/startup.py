"""Start-up: how long commands take, when a run draws its first token, and what two runs cost each other on the same cores.

`python -m experiments.benchmarks startup`. Wall times are the least of several repeats, since other work on the machine only adds
to them; CPU times, of all threads, hardly depend on it. `--sharpscope DIR` measures another checkout.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {
    "--help": 0.5,
    "methods": 1.5,
    "config": 1.5,
    "schema": 1.5,
    "show": 1.5,
}
"""Most wall time of each command [s], on two cores with a warm disk cache."""
FIRST_TOKEN_S = 8.0
SIDE_BY_SIDE = 1.3

# Stops at the first draw and prints the seconds since the parent started the command.
FIRST_TOKEN = """
import sys, time
import sharpscope.cli
import sharpscope.policy.decoding as decoding
draw = decoding.draw
def first(*arguments, **named):
    draw(*arguments, **named)
    print(time.time() - float(sys.argv[1]), flush=True)
    raise SystemExit
decoding.draw = first
sharpscope.cli.main(["run", "--quiet", "--out", "runs/first"])
"""
WITHOUT_TORCH = """
import sys
import sharpscope.cli
try:
    sharpscope.cli.main(sys.argv[1:])
except SystemExit:
    pass
print("torch" in sys.modules)
"""


def _run(command: Sequence[str], source: Path, folder: Path) -> tuple[float, float, str]:
    """Wall time, CPU time [s] and output of a command in `folder` with the sharpscope of `source`."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=_environment(source), capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])}: {done.stderr[-500:]}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def _environment(source: Path) -> dict[str, str]:
    own = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # what a new user has not set
    return {k: v for k, v in os.environ.items() if k not in own} | {"PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1"}


def commands(source: Path, repeats: int) -> dict[str, tuple[float, float]]:
    """Least wall and CPU time [s] of each command that reads no model."""
    example = ROOT / "data" / "example" / "grpo-s0"
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in LIMITS:
            arguments = ["show", str(example)] if name == "show" else [name]
            times = [
                _run([sys.executable, "-m", "sharpscope", *arguments], source, Path(folder)) for _ in range(repeats)
            ]
            found[name] = (min(wall for wall, _, _ in times), min(cpu for _, cpu, _ in times))
    return found


def analyze_imports_torch(source: Path) -> bool:
    """Whether `analyze` of the example's runs imports torch."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["analyze", str(ROOT / "data" / "example"), "--out", "report"]
        output = _run([sys.executable, "-c", WITHOUT_TORCH, *arguments], source, Path(folder))[2]
    return output.split()[-1] == "True"


def first_token(source: Path, repeats: int) -> tuple[float, float]:
    """Least wall and CPU time [s] from the command `run` to its first token."""
    walls, cpus = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            _, cpu, output = _run([sys.executable, "-c", FIRST_TOKEN, str(time.time())], source, Path(folder))
        walls.append(float(output.split()[-1]))
        cpus.append(cpu)
    return min(walls), min(cpus)


def side_by_side(source: Path, steps: int, repeats: int) -> tuple[float, float]:
    """Least wall time [s] of a run alone, and of two runs at once until both have ended."""
    alone, both = [], []
    for _ in range(repeats):
        alone.append(_together(source, steps, 1))
        both.append(_together(source, steps, 2))
    return min(alone), min(both)


def _together(source: Path, steps: int, count: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        running = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "sharpscope",
                    "run",
                    "--quiet",
                    "--steps",
                    str(steps),
                    "--out",
                    f"runs/{number}",
                    "--set",
                    "evaluation.every=0",
                ],
                cwd=folder,
                env=_environment(source),
                stdout=subprocess.DEVNULL,
            )
            for number in range(count)
        ]
        if any(process.wait() for process in running):
            raise RuntimeError("a run failed")
        return time.perf_counter() - start


def generation_seconds(source: Path, steps: int = 3) -> list[float]:
    """`generation_s` of the first steps of a default run [s]."""
    from sharpscope.traces import load_run

    with tempfile.TemporaryDirectory() as folder:
        small = ["--steps", str(steps), "--set", "evaluation.every=0", "--out", "runs/first", "--quiet"]
        _run([sys.executable, "-m", "sharpscope", "run", *small], source, Path(folder))
        return [round(float(value), 2) for value in load_run(Path(folder) / "runs" / "first").steps["generation_s"]]

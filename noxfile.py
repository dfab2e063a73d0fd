"""The versions that sharpscope is said to run with, each tried: `nox`, or `nox -s low`; results are in docs/limits.md.

A session makes a fresh environment, installs the wheel's requirements at the versions named, and runs a core selection of the
tests: reading models, generation, scoring, per-token gradients, curvature, training with checkpoints, traces, puzzles.
"""

from __future__ import annotations

import nox

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False

CORE = [
    "tests/policy/test_forward.py",
    "tests/policy/test_loading.py",
    "tests/policy/test_token_stats.py",
    "tests/surface/test_curvature.py",
    "tests/surface/test_language_model.py",
    "tests/tokens/test_token_gradients.py",
    "tests/tasks/test_knights_knaves.py",
    "tests/traces/test_files.py",
    "tests/training/test_learner.py",
    "tests/training/test_loop.py",
]
RECORDERS = ["tests/integrations/test_trl.py", "tests/integrations/test_supervised.py"]
SUPPORT = ["pytest", "pytest-xdist", "hypothesis"]
EXTRAS = "peft,accelerate,math,tools"
NEWEST = ["torch==2.15.0", "transformers==5.24.0", "trl==1.16.0", "peft==0.21.2"]
PRINT = "import torch, transformers; print(torch.__version__, transformers.__version__)"


def _tests(session: nox.Session, pins: list[str], tests: list[str], extras: str = EXTRAS) -> None:
    """Install sharpscope with `pins` in force and run `tests`, or what follows `--` on nox's command line."""
    session.install(*pins)
    session.install(f".[{extras}]", *pins, *SUPPORT)
    session.run("python", "-c", PRINT)
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    session.run("python", "-m", "pytest", "-n", "0", *(session.posargs or tests), env=environment)


@nox.session(python="3.11")
def low(session: nox.Session) -> None:
    """The lowest versions that pyproject.toml allows."""
    _tests(session, ["torch==2.6.0", "transformers==5.3.0"], CORE)


@nox.session(python="3.11")
def verl(session: nox.Session) -> None:
    """What verl 0.9.1 allows of transformers."""
    _tests(session, ["torch==2.13.0", "transformers>=5.5.3,<5.11"], CORE)


@nox.session(python="3.11")
def verl_recorder(session: nox.Session) -> None:
    """The recorder of verl, which needs an older transformers than the other tests: two processes on CPU."""
    pins = ["torch==2.13.0", "verl==0.9.1", "transformers>=5.5.3,<5.11"]
    session.install("fastapi", "uvicorn", "cachetools")
    _tests(session, pins, ["tests/integrations/test_verl.py"])


@nox.session(python="3.11")
def ray(session: nox.Session) -> None:
    """Sweeps on a Ray cluster: two nodes on loopback, whose slow tests kill a worker."""
    pins = ["torch==2.13.0", "ray==2.60.0"]
    _tests(session, pins, ["tests/test_ray.py", "-m", "slow or not slow"])


@nox.session(python="3.11")
def trl_lowest(session: nox.Session) -> None:
    """The recorders of TRL and transformers with the oldest TRL, which imports requests and does not ask for it."""
    session.install("requests")
    _tests(session, ["torch==2.13.0", "trl==1.0.0", "transformers==5.24.0"], RECORDERS)


@nox.session(python=["3.11", "3.12", "3.13"])
def newest(session: nox.Session) -> None:
    """The newest versions this release was tried with, and its recorders."""
    _tests(session, NEWEST, CORE + RECORDERS, f"{EXTRAS},trl")

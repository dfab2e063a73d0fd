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
    "tests/surface/test_hessian.py",
    "tests/surface/test_language_model.py",
    "tests/tokens/test_token_gradients.py",
    "tests/tasks/test_knights_knaves.py",
    "tests/traces/test_files.py",
    "tests/training/test_learner.py",
    "tests/training/test_loop.py",
]
SUPPORT = ["pytest", "pytest-xdist", "hypothesis"]
EXTRAS = "peft,accelerate,math,tools"


def _core(session: nox.Session, *pins: str) -> None:
    session.install(*pins)
    session.install(f".[{EXTRAS}]", *pins, *SUPPORT)
    session.run(
        "python",
        "-c",
        "import torch, transformers; print(torch.__version__, transformers.__version__)",
    )
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    session.run("python", "-m", "pytest", "-n", "0", *(session.posargs or CORE), env=environment)


@nox.session(python="3.11")
def low(session: nox.Session) -> None:
    """The lowest versions that pyproject.toml allows."""
    _core(session, "torch==2.6.0", "transformers==5.3.0")


@nox.session(python="3.11")
def verl(session: nox.Session) -> None:
    """What verl 0.9.1 allows of transformers."""
    _core(session, "torch==2.13.0", "transformers>=5.5.3,<5.11")


@nox.session(python="3.11")
def verl_recorder(session: nox.Session) -> None:
    """The recorder of verl, which needs an older transformers than the other tests: two processes on CPU."""
    pins = ("torch==2.13.0", "verl==0.9.1", "transformers>=5.5.3,<5.11")
    session.install(*pins)
    session.install(".", *pins, *SUPPORT, "fastapi", "uvicorn", "cachetools")
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    session.run(
        "python", "-m", "pytest", "-n", "0", "tests/integrations/test_verl.py", env=environment
    )


@nox.session(python="3.11")
@nox.parametrize("trl", ["1.0.0", "1.16.0"])
def trl_recorder(session: nox.Session, trl: str) -> None:
    """The recorders of TRL and transformers with the oldest and the newest TRL; 1.0.0 imports requests and does not ask for it."""
    pins = ("torch==2.13.0", f"trl=={trl}", "transformers==5.23.0")
    session.install(*pins, "requests")
    session.install(".[peft,accelerate]", *pins, *SUPPORT)
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    tests = ("tests/integrations/test_trl.py", "tests/integrations/test_supervised.py")
    session.run("python", "-m", "pytest", "-n", "0", *tests, env=environment)


@nox.session(python=["3.11", "3.12", "3.13"])
def newest(session: nox.Session) -> None:
    """The newest versions this release was tried with."""
    _core(session, "torch==2.13.0", "transformers==5.23.0")

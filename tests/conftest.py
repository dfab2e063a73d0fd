"""Shared fixtures: a tiny random policy on disk with a real tokenizer, a small configuration, and two small recorded runs."""

from __future__ import annotations

import atexit
import gc
import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch

from sharpscope.traces import TABLES, TraceWriter, load_runs

torch.set_num_threads(1)
gc.disable()  # until all tests are collected: nothing that is imported before becomes garbage

BLANK = '<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"></svg>'

TOY = {
    "task.kind": "custom",
    "task.factory": "tests.toy_task:vowels",
    "threads": 1,
    "steps": 3,
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 8,
    "update.mini_batches": 1,
    "evaluation.prompts": 4,
    "evaluation.every": 2,
    "optimizer.lr": 0.01,
    "recording.token_gradients_every": 10,
    "recording.group_share": 1.0,
    "recording.rotation_every": 10,
    "recording.heldout_influence_every": 0,
    "probes.preset": "off",
    "probes.check": "off",  # a quarter of so short a run; tests/surface and tests/recording/test_observers.py have it on
}

MEMORY_DISK = Path("/dev/shm")
if (
    "TMPDIR" not in os.environ
    and MEMORY_DISK.is_dir()
    and shutil.disk_usage(MEMORY_DISK).free > 4 << 30
):
    # the many small files of the tests, each flushed, cost nothing there
    tempfile.tempdir = str(MEMORY_DISK)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what was imported out of each garbage collection: trainers ask for one after each run, of 0.4 s otherwise."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def quick_curvature():
    """Few Hessian products in probes; tests of their values call `curvature`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"TOP": 1, "MAX_PRODUCTS": 12, "TRACE_PROBES": 2}.items():
            patch.setattr(f"sharpscope.surface.runner.{name}", value)
        yield


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a randomly initialised two-layer Qwen2 policy with a byte-level tokenizer."""
    from tests.faults import conftest as setting

    return setting.tiny_policy(
        tmp_path_factory.mktemp("tiny_policy"), layers=2, width=32, feed_forward=48
    )


@pytest.fixture
def toy_config(tiny_policy: Path, tmp_path: Path):
    """A function from field paths to a RunConfig of the toy task in a fresh folder."""
    from sharpscope.config import build_config

    def make(**changes):
        values = {
            **TOY,
            "policy.model": str(tiny_policy),
            "out": str(tmp_path / changes.pop("name", "run")),
        }
        return build_config(
            values=values | {path.replace("__", "."): value for path, value in changes.items()}
        )

    return make


@contextmanager
def empty_pictures():
    """Within it figures are made but saved as empty pictures: drawing is tested elsewhere, and slow."""

    def save(figure, folder, name):
        paths = [folder / f"{name}.{ending}" for ending in ("png", "svg")]
        for path in paths:
            path.write_text(BLANK)
        return paths

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sharpscope.analysis.plots.save", save)
        yield


@pytest.fixture
def quick():
    """Figures are saved as empty pictures."""
    with empty_pictures():
        yield


ROOT = Path(__file__).parents[1]


@cache
def pair() -> Path:
    """A temporary folder with the folders of both runs, which have the tokenizer of the policy that they began from."""
    folder = Path(tempfile.mkdtemp(prefix="pair-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, run in load_runs(ROOT / "tests/data/pair").by_name.items():
        (folder / name / "tokenizer").mkdir(parents=True)
        for file in (ROOT / "data/policies/knights_knaves").glob("tokenizer*.json"):
            shutil.copy(file, folder / name / "tokenizer")
        (folder / name / "run.json").write_text(json.dumps(run.info, indent=2))
        (folder / name / "config.yaml").write_text(run.config_text)
        with TraceWriter(folder / name, groups=False) as writer:
            for table in TABLES:
                writer.append_table(table, run.arrow(table))
    return folder

"""Two small recorded runs for tests, `grpo-s0` and `grpo-sg-s0` of experiments/example.yaml, stored as packed data."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

from sharpscope.traces import TABLES, TraceWriter, load_runs

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

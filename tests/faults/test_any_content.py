"""Any bytes, any JSON and any Arrow table in each file that is read: a value or one named reason, in bounded time and memory."""

from __future__ import annotations

import json
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sharpscope.causes.recorded import Words
from sharpscope.config import build_config
from sharpscope.diagnose import diagnose
from sharpscope.errors import UserError
from sharpscope.integrations.dumps import COLUMNS
from sharpscope.integrations.importers import Options, read
from sharpscope.recording.saved_optimizer import load_adamw
from sharpscope.surface.runner import ProbeSet, read_rows
from sharpscope.sweeps import read_sweep
from sharpscope.tasks.dataset import read_file
from sharpscope.traces import load_run, load_runs
from sharpscope.traces.parts import packed_runs
from sharpscope.traces.reader import piece_maker
from sharpscope.training.checkpoint import damage, load_checkpoint
from tests.traces.test_boundary import ANY

SECONDS, BYTES = 5.0, 200_000_000
"""Most processor time and memory of one read."""


def checkpoint(folder: Path) -> object:
    """Both JSON files of a checkpoint; what is read first is not asked."""
    assert damage(folder) is None or "\n" not in str(damage(folder))
    model = torch.nn.Linear(1, 1)
    return load_checkpoint(folder, model, torch.optim.AdamW(model.parameters()))


def packed(folder: Path) -> object:
    packed_runs.cache_clear()
    return [run.verify() for run in load_runs(folder)]


def tokenizer(folder: Path) -> object:
    return Words.read(folder / "tokenizer"), piece_maker(load_run(folder))


def dump(kind: str) -> Callable[[Path], object]:
    return lambda folder: list(read(folder, kind, Options(columns={}), {}))


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "run.json": ("run.json", lambda folder: load_run(folder).status),
    "config of a run": ("config.yaml", lambda folder: load_run(folder).config_text),
    "packed runs": ("runs.parquet", packed),
    "checksums of a checkpoint": ("checksums.json", checkpoint),
    "state of a checkpoint": ("trainer_state.json", checkpoint),
    "weights of an optimizer": ("optimizer.safetensors", checkpoint),
    "saved optimizer": ("optimizer.pt", lambda folder: load_adamw(folder, torch.nn.Linear(1, 1))),
    "tokenizer": ("tokenizer/tokenizer.json", tokenizer),
    "settings of a tokenizer": ("tokenizer/tokenizer_config.json", tokenizer),
    "log of a trainer": ("trainer_state.json", diagnose),
    "log of lines": ("log.jsonl", lambda folder: diagnose(folder / "log.jsonl")),
    "log of JSON": ("log.json", lambda folder: diagnose(folder / "log.json")),
    "log of a table": ("log.csv", lambda folder: diagnose(folder / "log.csv")),
    "configuration": ("a.yaml", lambda folder: build_config(folder / "a.yaml")),
    "sweep": ("a.yaml", lambda folder: read_sweep(folder / "a.yaml")),
    "data set": ("a.jsonl", lambda folder: list(read_file(folder / "a.jsonl"))),
    "data set in Parquet": ("a.parquet", lambda folder: list(read_file(folder / "a.parquet"))),
    "texts to probe": ("a.jsonl", lambda folder: read_rows(folder / "a.jsonl")),
    "texts to probe in Parquet": ("a.parquet", lambda folder: read_rows(folder / "a.parquet")),
    "probe set": ("a.parquet", lambda folder: ProbeSet.load(folder / "a.parquet")),
    "prime-rl": ("token_exports/step_1/rank_0.jsonl", dump("prime-rl")),
    "nemo-rl": ("train_data_step1.jsonl", dump("nemo-rl")),
    "slime": ("train_data/1.pt", dump("slime")),
    "verifiers": ("traces.jsonl", dump("verifiers")),
    "open-instruct": ("run_rollouts_1.jsonl", dump("open-instruct")),
    "jsonl": ("a.jsonl", dump("jsonl")),
}
NAMES = [
    *(*COLUMNS, "log_history", "global_step", "samples", "traces", "nodes", "tokens", "parent"),
    *("schema_version", "config", "prompt", "completion", "added_tokens", "loss", "version", "run"),
    *("rewards", "logprobs", "loss_masks", "token_ids", "steps", "method", "seeds", "methods"),
]
VALUES = ANY | st.lists(st.integers(0, 5) | st.floats(-3, 0), max_size=4)
OBJECT = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), VALUES, max_size=6)
NESTED = OBJECT | st.dictionaries(st.sampled_from(NAMES), st.lists(OBJECT, max_size=3), max_size=3)


def encoded(value: Any, form: str) -> bytes:
    """A JSON value as the content of a file of some form, as far as the form can hold it."""
    text = json.dumps(value)
    if form == "parquet":
        table = pa.table({"meta": [text], "prompt": [text], "run": ["a"], "info": [text]})
        key = {b"sharpscope.probe_set": text.encode()}
        sink = pa.BufferOutputStream()
        pq.write_table(table.replace_schema_metadata(key), sink)
        return sink.getvalue().to_pybytes()
    if form == "csv":
        pairs = value.items() if isinstance(value, dict) else enumerate(value or [0])
        names, cells = zip(*pairs, strict=True) if value else ((), ())
        text = ",".join(map(str, names)) + "\n" + ",".join(map(str, cells)) + "\n"
    return text.encode("utf-8", "surrogatepass")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """A folder with run.json and the rest of what the readers need beside the file at hand."""
    made = tmp_path_factory.mktemp("any")
    (made / "tokenizer").mkdir()
    (made / "token_exports/step_1").mkdir(parents=True)
    (made / "token_exports/step_1/STABLE").touch()
    (made / "train_data").mkdir()
    return made


@pytest.mark.parametrize("reader", READERS)
def test_any_content_is_a_value_or_one_reason(folder, reader):
    name, call = READERS[reader]
    file = folder / name
    ends = []
    form = file.suffix[1:]
    others = {"run.json": '{"schema_version": 5}', "tokenizer/tokenizer.json": "{}"}
    others |= {"tokenizer/tokenizer_config.json": "{}", "trainer_state.json": "{}"}

    @settings(
        max_examples=25,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(st.binary(max_size=300) | NESTED.map(lambda value: encoded(value, form)))
    def tried(content: bytes) -> None:
        file.write_bytes(content)
        began = time.process_time()
        tracemalloc.start()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call(folder)
        except (UserError, OSError) as error:
            assert "\n" not in str(error).strip() and len(str(error)) < 2000
            ends.append(str(error))
        else:
            ends.append("")
        finally:
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert time.process_time() - began < SECONDS and most < BYTES

    for other, text in others.items():
        (folder / other).write_text(text)
    try:
        tried()
    finally:
        file.unlink()
    assert len(ends) >= 25

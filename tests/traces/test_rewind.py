"""Before a run is resumed its traces are wound back: no row after the checkpoint stays, none is there twice."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from sharpscope.traces import DamagedPartWarning, TraceWriter, load_run, rewind
from sharpscope.traces.rewind import Rewound
from tests.traces.rows import new_run, rows


def test_rewind_removes_what_lies_after_a_step_and_can_be_repeated(tmp_path):
    run = new_run(tmp_path / "a")
    with TraceWriter(run) as writer:
        for step in (1, 2, 3, 4, 5):
            writer.append("tokens", rows("tokens", step))
            if step in (3, 4):
                writer.flush()
    assert rewind(run, 2) == Rewound(12)
    assert rewind(run, 2) == Rewound(0)
    frame = load_run(run).tokens()
    assert frame["step"].tolist() == [1] * 4 + [2] * 4
    np.testing.assert_array_equal(frame["logp"], np.concatenate([rows("tokens", 1)["logp"], rows("tokens", 2)["logp"]]))
    assert not load_run(run).verify()


def test_an_interrupted_rewind_shows_no_row_twice(tmp_path):
    run = new_run(tmp_path / "a")
    with TraceWriter(run) as writer:
        for step in (1, 2):
            writer.append("tokens", rows("tokens", step))
    (before,) = (run / "traces/tokens").iterdir()
    content = before.read_bytes()
    rewind(run, 1)
    before.write_bytes(content)  # as if the process had died between writing the new part and removing the old
    assert load_run(run).tokens()["step"].tolist() == [1] * 4
    rewind(run, 1)
    assert not before.exists() and load_run(run).tokens()["step"].tolist() == [1] * 4


def damage_part(part: Path, column: str) -> None:
    """Flip one bit in the last page of a column, so that only readers of that column notice."""
    metadata = pq.read_metadata(part)
    place = metadata.row_group(metadata.num_row_groups - 1).column(metadata.schema.names.index(column))
    start = place.dictionary_page_offset if place.has_dictionary_page else place.data_page_offset
    content = bytearray(part.read_bytes())
    content[start + place.total_compressed_size - 1] ^= 1
    part.write_bytes(content)


@pytest.mark.parametrize("together", [False, True], ids=["a part a step", "a part on both sides"])
def test_a_damaged_part_does_not_give_rows_twice_after_a_rewind(tmp_path, together):
    run = new_run(tmp_path / "a")
    columns = ["step", "rollout", "position", "logp"]

    def write(steps):
        with TraceWriter(run) as writer:
            for step in steps:
                writer.append("tokens", rows("tokens", step, 3))
                if not together or step == 3:
                    writer.flush()

    write(range(1, 8))
    last = max((run / "traces/tokens").iterdir())
    damage_part(last, "logit")
    rewound = rewind(run, 5)
    write((6, 7))
    loaded = load_run(run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedPartWarning)
        counts = loaded.tokens(columns=columns).groupby("step").size().to_dict()
    if together:  # what it held of steps 4 and 5 is lost, and said to be
        name = f"traces/tokens/damaged-{last.name}"
        assert counts == dict.fromkeys((1, 2, 3, 6, 7), 3)
        assert list(rewound.damaged) == list(loaded.damaged) == list(loaded.verify()) == [name]
        assert "its pages cannot be read" in rewound.damaged[name] and "a resume found it" in loaded.damaged[name]
    else:
        assert counts == dict.fromkeys(range(1, 8), 3) and not loaded.verify() and not rewound.damaged

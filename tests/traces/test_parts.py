"""Damaged parts are named and set aside, and whole parts survive."""

from __future__ import annotations

import random
import warnings

import pytest

from sharpscope.traces import (
    DamagedPartWarning,
    TraceWriter,
    load_run,
)
from tests.traces.rows import rows, two_parts


def test_a_flipped_byte_is_noticed_or_harmless(tmp_path):
    run, (first, _) = two_parts(tmp_path / "a")
    whole = load_run(run).tokens()
    content = first.read_bytes()
    chooser = random.Random(0)
    found = 0
    for _ in range(150):
        damaged = bytearray(content)
        damaged[chooser.randrange(len(content))] ^= 1 << chooser.randrange(8)
        first.write_bytes(damaged)
        loaded = load_run(run)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DamagedPartWarning)
            frame = loaded.tokens()
        if loaded.damaged:
            found += 1
            assert list(loaded.damaged) == [first.relative_to(run).as_posix()]
            assert frame.equals(whole[whole.step == 2].reset_index(drop=True))
        else:
            assert frame.equals(whole)
    assert found > 100


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_cut_part_is_named_and_set_aside(tmp_path, share):
    run, (first, _) = two_parts(tmp_path / "a")
    content = first.read_bytes()
    first.write_bytes(content[: int(share * len(content))])
    loaded = load_run(run)
    with pytest.warns(DamagedPartWarning, match=first.name):
        assert set(loaded.tokens()["step"]) == {2}
    assert "truncated" in loaded.damaged[first.relative_to(run).as_posix()]


def test_a_damaged_page_sets_the_whole_part_aside_for_all_columns(tmp_path):
    run, (first, _) = two_parts(tmp_path / "a")
    import pyarrow.parquet as pq

    place = pq.read_metadata(first).row_group(0).column(4)  # token_id
    content = bytearray(first.read_bytes())
    content[place.dictionary_page_offset + place.total_compressed_size - 1] ^= 255
    first.write_bytes(content)
    loaded = load_run(run)
    assert set(loaded.tokens(columns=["step"])["step"]) == {1, 2}  # its page is sound, and nobody has looked further
    with pytest.warns(DamagedPartWarning):
        assert list(loaded.verify()) == [first.relative_to(run).as_posix()]
    assert set(loaded.tokens(columns=["step"])["step"]) == {2}


def test_numbers_after_a_damaged_part_do_not_reuse_its_name(tmp_path):
    run, (_, second) = two_parts(tmp_path / "a")
    second.write_bytes(b"rubbish")
    with TraceWriter(run) as writer:
        writer.append("tokens", rows("tokens", 3, 2))
    assert second.read_bytes() == b"rubbish"
    assert max(p.name for p in (run / "traces/tokens").iterdir()).startswith("part-000002-")

"""Estimates of the time that is left."""

from __future__ import annotations

import pytest

from sharpscope import progress
from sharpscope.progress import Remaining


@pytest.mark.parametrize(
    ("before", "done", "passed", "said"),
    [
        (0, 0, 5.0, ""),  # nothing is known
        (0, 1, 5.0, "  about 45 s left"),
        (0, 9, 90.0, ""),  # 10 s are not worth a word
        (0, 2, 100.0, "  about 7 min left"),
        (8, 9, 60.0, "  about 60 s left"),  # after a resume the earlier pieces took no time
        (0, 10, 500.0, ""),
    ],
)
def test_the_time_left_is_that_of_the_pieces_done(monkeypatch, before, done, passed, said):
    monkeypatch.setattr(progress.time, "monotonic", lambda: 100.0)
    remaining = Remaining(10, before)
    monkeypatch.setattr(progress.time, "monotonic", lambda: 100.0 + passed)
    assert remaining.after(done) == said

"""A recorder that stops would only warn: here that fails the test, unless it says otherwise."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

import sharpscope.recording.core  # noqa: F401 - before `say` is replaced


@pytest.fixture(autouse=True)
def a_recorder_that_stops_fails_the_test(request: pytest.FixtureRequest) -> Iterator[None]:
    if "may_stop" in request.keywords:
        yield
        return
    stopped: list[str] = []
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.filterwarnings("error", "sharpscope stopped recording")
        patch.setattr("sharpscope.recording.guard.say", stopped.append)
        yield
    assert stopped == []

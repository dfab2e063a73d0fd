"""A recorder that stops would only warn: here that fails the test, unless it says otherwise."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def a_recorder_that_stops_fails_the_test(request: pytest.FixtureRequest) -> Iterator[None]:
    if "may_stop" in request.keywords:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "sharpscope stopped recording")
        yield

"""Puzzles by number of people."""

from __future__ import annotations

import pytest

from sharpscope.warm_start.knights_knaves import puzzles


@pytest.fixture(scope="package")
def pools():
    return {people: puzzles(people, 15, seed=4) for people in (2, 3, 4)}

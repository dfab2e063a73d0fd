"""The examples in the docstrings of the public functions run and print what they say."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

import sharpscope
import sharpscope.config
import sharpscope.tasks.custom

ALIASES = {"__version__", "record"}


@pytest.fixture
def unregistered(monkeypatch):
    """Forgets the tasks and weights that an example registers."""
    for module in (sharpscope.config.weighting, sharpscope.tasks.custom):
        monkeypatch.setattr(module, "_REGISTRY", dict(module._REGISTRY))


@pytest.mark.parametrize("name", sorted(set(sharpscope.__all__) - ALIASES))
def test_public_function_has_an_example_that_runs(name, monkeypatch, unregistered):
    monkeypatch.chdir(Path(__file__).parents[1])
    (found,) = [
        test for test in doctest.DocTestFinder(recurse=False).find(getattr(sharpscope, name), name) if test.examples
    ]
    output: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(found, out=output.append)
    assert result.failed == 0, "".join(output)

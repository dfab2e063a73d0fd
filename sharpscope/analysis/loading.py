"""What to say where there are no runs, and quiet reading."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sharpscope.traces import DamagedPartWarning, Runs

Paths = str | Path | Iterable[str | Path]


def nothing_found(paths: Paths, runs: Runs) -> str:
    """The message for `paths` below which there is nothing to analyze."""
    where = runs.root if isinstance(paths, str | Path) else ", ".join(map(str, paths))
    if runs.skipped:
        name, why = next(iter(runs.skipped.items()))
        return f"runs: none of the {len(runs.skipped)} below {where} can be read; {name}: {why}"
    if len(runs):
        return f"runs: none below {where} has a finished step yet; wait for one, or look at run.json of {runs[0].name}"
    return f"runs: no run below {where}; make one with `sharpscope run --steps 20`, or give the folder that holds yours"


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings about damaged parts and runs left out: a report names them itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedPartWarning)
        warnings.filterwarnings("ignore", message=".* is left out: ")
        yield

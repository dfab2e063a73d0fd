"""Runs from one folder or several."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sharpscope.traces import DamagedPartWarning, Run, Runs, load_runs

Paths = str | Path | Iterable[str | Path]


def load_several(paths: Paths) -> Runs:
    """The runs below one folder or several; if a name occurs twice, the second run is named by its path."""
    if isinstance(paths, str | Path):
        return load_runs(paths)
    several = [load_runs(path) for path in paths]
    if len(several) == 1:
        return several[0]
    names: dict[str, Run] = {}
    for runs in several:
        for name, run in runs.by_name.items():
            names[name if name not in names else str(run.path)] = run
    skipped = {str(runs.root / name): why for runs in several for name, why in runs.skipped.items()}
    return Runs(several[0].root if several else Path(), names, skipped)


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

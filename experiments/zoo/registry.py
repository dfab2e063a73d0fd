"""The cases of the zoo: a name, what was planted, where people met it, and the training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from experiments.zoo.bases import Place

CASES: dict[str, Case] = {}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training of the zoo. `truth` is the identifier that `sharpscope.causes` must name first; None: a healthy control."""

    name: str
    planted: str
    threads: str  # public threads in which people met it
    truth: str | None
    run: Callable[[Place], None]


def cause(planted: str, threads: str, truth: str) -> Callable[[Callable[[Place], None]], None]:
    """Register a training with a planted cause."""

    def keep(run: Callable[[Place], None]) -> None:
        name = run.__name__
        CASES[name] = Case(name=name, planted=planted, threads=threads, truth=truth, run=run)

    return keep


def control(what: str) -> Callable[[Callable[[Place], None]], None]:
    """Register a healthy training."""

    def keep(run: Callable[[Place], None]) -> None:
        name = run.__name__
        CASES[name] = Case(name=name, planted=what, threads="", truth=None, run=run)

    return keep

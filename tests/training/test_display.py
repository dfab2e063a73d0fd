"""What is printed where there is no terminal: enough to follow a run, a sweep or a report from its log file."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from sharpscope.cli import running
from sharpscope.cli.console import progress
from sharpscope.training import display as shown
from sharpscope.training.display import RichDisplay, minutes


def lines(slow: bool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(shown, "LINE_EVERY", 0.0 if slow else 1e9)
    file = io.StringIO()
    display = RichDisplay(Console(file=file, width=40))
    display.start("a run", 12, 0)
    for step in range(1, 13):
        display.step({"step": step, "reward_mean": 0.5, "accuracy": 0.25})
    display.stop()
    return file.getvalue().splitlines()


def test_slow_steps_are_printed_each_and_fast_ones_every_tenth(monkeypatch):
    fast, slow = lines(False, monkeypatch), lines(True, monkeypatch)
    assert [line.split(":")[0] for line in fast] == ["step 1 of 12", "step 10 of 12"]
    assert [line.split(":")[0] for line in slow] == [f"step {step} of 12" for step in range(1, 13)]
    assert all("reward +0.500" in line and line.endswith(" s") and "  left " in line for line in fast + slow)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7000, "117 min"), (11100, "3 h 05 min")]
)
def test_minutes(seconds, text):
    assert minutes(seconds) == text


def test_a_sweep_prints_its_steps(monkeypatch, capsys):
    runs = [
        SimpleNamespace(steps_done=done, config=SimpleNamespace(steps=10), name=name)
        for name, done in (("one", 10), ("two", 3))
    ]
    monkeypatch.setattr(running, "LINE_EVERY", 0.0)
    with running._Bar(runs) as bar:
        bar.update(runs[1:])
    assert capsys.readouterr().err == "13 of 20 steps of all runs; running: two 3/10\n"


def test_parts_of_a_report_are_printed_without_control_characters(capsys):
    with progress("reading traces") as update:
        update("figure\x1b[2J 1")
    assert capsys.readouterr().err == "  reading traces\n  figure�[2J 1\n"

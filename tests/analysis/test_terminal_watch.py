"""`watch` on runs that go on, end, die or are not there."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from sharpscope.analysis import watch
from sharpscope.errors import UserError
from sharpscope.traces import RunLock, TraceWriter, update_run_info
from tests.analysis.html.runs import write_report_run
from tests.traces.rows import new_run, rows


def _console(terminal: bool) -> Console:
    return Console(width=120, file=io.StringIO(), force_terminal=terminal, color_system=None)


@pytest.fixture
def running(tmp_path):
    """A run at step 1, which each look lets go on by one step until it ends after 4."""
    folder = new_run(tmp_path / "run")
    with TraceWriter(folder) as writer:
        writer.append("steps", rows("steps", 1, 1) | {"reward_mean": 0.1})
    waits = []

    def go_on(seconds):
        waits.append(seconds)
        with TraceWriter(folder) as writer:
            writer.append("steps", rows("steps", len(waits) + 1, 1) | {"reward_mean": len(waits) + 0.5})
        if len(waits) == 3:
            update_run_info(folder, status="finished", steps_done=4)

    with RunLock(folder):
        yield folder, waits, go_on


@pytest.mark.parametrize("terminal", [True, False])
def test_it_refreshes_until_the_run_ends(running, terminal):
    folder, waits, go_on = running
    console = _console(terminal)
    assert watch(folder, console, every=0.5, sleep=go_on) == "finished"
    text = console.file.getvalue()
    assert waits == [0.5] * 3 and "finished after 4 steps" in text
    if not terminal:
        assert [line.split(":")[0] for line in text.splitlines() if line.startswith("step ")] == [
            "step 1",
            "step 2",
            "step 3",
        ]
        assert "reward +2.500" in text


def test_once_shows_a_running_run_and_leaves(running):
    folder, waits, go_on = running
    console = _console(False)
    assert watch(folder, console, once=True, sleep=go_on) == "running" and not waits
    assert "1 of 3" in console.file.getvalue()


def test_a_run_without_an_owner_has_died(tmp_path):
    console = _console(False)
    assert watch(new_run(tmp_path / "run"), console, sleep=lambda seconds: pytest.fail("nothing to wait for")) == "died"
    assert "No step is recorded yet" in console.file.getvalue()


def test_an_unknown_run_is_a_clear_mistake(tmp_path):
    with pytest.raises(UserError, match=r"nowhere has no run.json"):
        watch(tmp_path / "nowhere", _console(False))


def test_hostile_names_and_messages_do_not_drive_the_terminal(tmp_path):
    folder = write_report_run(tmp_path / "run", "[bold]\x1b[31mx")
    console = _console(False)
    assert watch(folder, console) == "finished"
    assert "\x1b" not in console.file.getvalue() and "[bold]" in console.file.getvalue()

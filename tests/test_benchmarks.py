"""What the benchmarks make of their turns."""

from __future__ import annotations

from itertools import count

import pytest

from experiments.benchmarks import common, training
from experiments.benchmarks.common import Cost, Row, costs, ratios, table


def test_a_row_of_turns_has_their_median_smallest_and_largest():
    row = Row.of_turns("a", [3.0, 1.0, 10.0, 2.0], "×", "≤ 4")
    assert (row.value, row.required, row.turns) == (2.5, "≤ 4", (3.0, 1.0, 10.0, 2.0))
    assert "| a | 2.5 × (1 to 10, 4 turns) | ≤ 4 |  |  |" in table([row])


def test_turns_alternate_and_the_first_call_of_each_is_not_counted(monkeypatch):
    calls, numbers = [], count(1)
    monkeypatch.setattr(
        common, "cost", lambda work: (work(), Cost(float(next(numbers)), 0.0, 0))[1]
    )
    found = costs({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2)
    assert calls == ["a", "b"] * 3
    assert [one.cpu for one in found["a"]] == [3, 5]
    assert [one.cpu for one in found["b"]] == [4, 6]
    if not common.torch.cuda.is_available():
        assert ratios(found["b"], found["a"]) == [4 / 3, 6 / 5]


def test_a_clock_leaves_out_the_first_step_and_the_pauses(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(training.time, "process_time", lambda: now[0])

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    clock = training.Clock(lambda: pass_time(1000.0))
    for seconds in (50.0, 2.0, 3.0):
        pass_time(seconds)
        clock.mark()
    assert [one.cpu for one in clock.costs] == [2, 3]


def test_a_command_that_fails_is_not_timed(tmp_path):
    failing = ["-c", "raise SystemExit(3)"]
    with pytest.raises(RuntimeError):
        common.child(failing, str(tmp_path))
    assert common.child(failing, str(tmp_path), allowed=(3,))[2] == ""

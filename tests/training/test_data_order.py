"""Every example once before any twice, and the cursor is all there is to resume."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sharpscope.tasks import Example
from sharpscope.training.data_order import DataOrder


def examples(count: int) -> list[Example]:
    return [Example(str(index), "", {"id": str(index)}) for index in range(count)]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.lists(st.integers(1, 7), max_size=8), st.integers(0, 5))
def test_epochs_are_permutations_and_takes_only_cut_them(count, takes, seed):
    order = DataOrder(examples(count), seed)
    seen = [example.prompt for take in takes for example in order.take(take)]
    assert order.cursor == len(seen)
    for start in range(0, len(seen) - count + 1, count):
        assert sorted(seen[start : start + count], key=int) == [str(index) for index in range(count)]
    whole = DataOrder(examples(count), seed).take(len(seen)) if seen else []
    assert [example.prompt for example in whole] == seen


def test_epochs_and_seeds_differ():
    first = DataOrder(examples(50), 0)
    one, two = first.take(50), first.take(50)
    assert one != two and first.epoch == 2.0
    assert DataOrder(examples(50), 1).take(50) != one


def test_resuming_from_the_cursor_continues_the_order():
    through = DataOrder(examples(7), 3)
    through.take(10)
    expected = through.take(9)
    assert DataOrder(examples(7), 3, cursor=10).take(9) == expected

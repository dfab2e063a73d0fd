"""The own sampler and wording: numpy's draws, reasoning-gym's puzzles, and the sets that results rest on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sharpscope.errors import UserError
from sharpscope.tasks import knights_knaves as room
from sharpscope.tasks.base import content_id
from sharpscope.tasks.knights_knaves import NAMED_SETS, named_puzzles
from sharpscope.tasks.puzzles import NAMES, Draws, sample_puzzle, word_puzzle
from sharpscope.tasks.statements import solve
from sharpscope.traces import load_run

EXAMPLE = Path(__file__).parents[2] / "data" / "example"


@pytest.mark.parametrize("seed", [0, 7, 2**62 + 3])
def test_draws_are_those_of_numpys_generator(seed):
    draws, oracle = Draws(seed), np.random.default_rng(seed)
    for end in [6, 2, 1, 7, 18, 3_000_000_000] * 200:  # of the largest, a third of all words is rejected
        assert draws.below(end) == oracle.integers(0, end)
    for count in (1, 2, 7, 51) * 20:
        assert draws.sample(NAMES, count) == list(oracle.choice(NAMES, count, replace=False))


@pytest.mark.parametrize(("people", "depth", "width"), [(2, 2, 2), (3, 3, 4), (7, 2, 2), (5, 4, 5)])
def test_puzzles_and_wording_are_those_of_reasoning_gym(people, depth, width):
    theirs = pytest.importorskip("reasoning_gym.logic.knights_knaves", reason="needs the library reasoning-gym")
    draws, sampler = Draws(people), theirs.KKProblemSampler(people, people, depth, width)
    for number in range(60):
        puzzle = sample_puzzle(draws, people, depth, width)
        assert puzzle == sampler.sample()
        formatter = theirs.KKProblemFormatter(number, {"statements": puzzle, "solution": (True,) * people})
        made = formatter.format_problem()
        expected = made["quiz"].partition(" (Format your answer like")[0]
        for key in ("a_knight", "a_knave", "knight", "knave", "Knight", "Knave"):
            expected = expected.replace(made["knight_knave"][key], key.replace("_", " "))
        assert word_puzzle(puzzle, Draws(number)) == (expected, tuple(made["names"]))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "policy" else []) for name in NAMED_SETS]
)
def test_puzzles_that_results_rest_on_are_found_by_set_and_hash(name):
    puzzles = named_puzzles(name)
    assert len(puzzles) == {"study": 900 + 500 + 2 * 200, "policy": 1846 + 8000 + 1846 + 369 + 4 * 100}[name]
    for identity, example in list(puzzles.items())[::50]:
        assert content_id(example.prompt) == identity
        assert solve(example.meta["statements"]) == [example.meta["solution"]]


def test_every_prompt_of_a_kept_run_is_in_the_studys_set():
    puzzles = named_puzzles("study")
    prompts = {prompt for name in ("grpo-s0", "grpo-sg-s0") for prompt in load_run(EXAMPLE / name).rollouts["prompt"]}
    assert len(prompts) > 50
    assert {content_id(prompt) for prompt in prompts} <= set(puzzles)


def test_another_set_than_the_known_one_is_an_error(monkeypatch):
    monkeypatch.setattr(room, "HELD_OUT", 0.3)
    with pytest.raises(RuntimeError, match=r"puzzle set 'study': hash \w+, expected"):
        named_puzzles("study")
    with pytest.raises(UserError, match="puzzle set 'studi': unknown; did you mean 'study'"):
        named_puzzles("studi")

"""The own sampler and wording: numpy's draws, reasoning-gym's puzzles, and the sets that results rest on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sharpscope.tasks import KnightsKnavesSpec, make_task
from sharpscope.tasks.base import content_id
from sharpscope.tasks.puzzles import NAMES, Draws, sample_puzzle, word_puzzle
from sharpscope.traces import load_run

EXAMPLE = Path(__file__).parents[1] / "data" / "pair"


@pytest.mark.parametrize("seed", [0, 7, 2**62 + 3])
def test_draws_are_those_of_numpys_generator(seed):
    draws, oracle = Draws(seed), np.random.default_rng(seed)
    for end in [6, 2, 1, 7, 18, 3_000_000_000] * 200:  # of the largest, a third of all words is rejected
        assert draws.below(end) == oracle.integers(0, end)
    for count in (1, 2, 7, 51) * 20:
        assert draws.sample(NAMES, count) == list(oracle.choice(NAMES, count, replace=False))


@pytest.mark.parametrize(("people", "depth"), [(2, 2), (3, 3), (7, 2), (5, 4)])
def test_puzzles_and_wording_are_those_of_reasoning_gym(people, depth):
    theirs = pytest.importorskip("reasoning_gym.logic.knights_knaves", reason="needs the library reasoning-gym")
    draws, sampler = Draws(people), theirs.KKProblemSampler(people, people, depth, 2)
    for number in range(60):
        puzzle = sample_puzzle(draws, people, depth)
        assert puzzle == sampler.sample()
        formatter = theirs.KKProblemFormatter(number, {"statements": puzzle, "solution": (True,) * people})
        made = formatter.format_problem()
        expected = made["quiz"].partition(" (Format your answer like")[0]
        for key in ("a_knight", "a_knave", "knight", "knave", "Knight", "Knave"):
            expected = expected.replace(made["knight_knave"][key], key.replace("_", " "))
        assert word_puzzle(puzzle, Draws(number)) == (expected, tuple(made["names"]))


def test_every_prompt_of_a_kept_run_is_in_the_studys_set():
    """The puzzles of the published runs: their hash, and the prompts that the runs kept."""
    spec = KnightsKnavesSpec(unseen_people=(2, 4))
    identities = [example.meta["id"] for split in make_task(spec).splits().values() for example in split]
    assert content_id(*identities) == "4fe5fae273d39abf"
    prompts = {prompt for name in ("grpo-s0", "grpo-sg-s0") for prompt in load_run(EXAMPLE / name).rollouts["prompt"]}
    assert len(prompts) > 50
    assert {content_id(prompt) for prompt in prompts} <= set(identities)

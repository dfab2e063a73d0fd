"""Knights and Knaves: puzzles with one solution, held out by content, and Logic-RL's reward, against the slow versions."""

from __future__ import annotations

import random
import time

import pytest
from numpy.random import default_rng

from sharpscope.errors import UserError
from sharpscope.tasks import KnightsKnavesSpec, make_task
from sharpscope.tasks import knights_knaves as room
from sharpscope.tasks.base import Example, content_id
from sharpscope.tasks.knights_knaves import (
    content_key,
    sample_puzzle,
    score_logic_rl,
    solve,
    word_puzzle,
)
from sharpscope.traces import load_run
from tests.conftest import pair
from tests.loops import some
from tests.oracles import puzzles as oracle

OPERATORS = ("and", "or", "->", "<=>", "not")


def random_statement(rng: random.Random, people: int, depth: int):
    if depth == 0 or rng.random() < 0.3:
        return (rng.choice(("telling-truth", "lying")), rng.randrange(people))
    operator = rng.choice(OPERATORS)
    count = {"not": 1, "->": 2, "<=>": 2}.get(operator, rng.randint(2, 3))
    return (operator, *(random_statement(rng, people, depth - 1) for _ in range(count)))


def random_puzzle(rng: random.Random, people: int, depth: int = 2):
    return tuple(random_statement(rng, people, depth) for _ in range(people))


@pytest.mark.parametrize("people", range(1, 8))
def test_solver_finds_what_trying_every_assignment_finds(people):
    rng = random.Random(people)
    for _ in range(60):
        puzzle = random_puzzle(rng, people, 3)
        assert set(solve(puzzle)) == oracle.solutions(puzzle)
        assert len(solve(puzzle)) == len(set(solve(puzzle)))


@pytest.mark.parametrize("people", range(1, 6))
def test_content_key_is_equal_exactly_for_puzzles_that_are_the_same_up_to_people(people):
    rng = random.Random(10 + people)
    made = [random_puzzle(rng, people, 1) for _ in range(60)]
    keys = [content_key(puzzle) for puzzle in made]
    contents = [oracle.contents(puzzle) for puzzle in made]
    for i in range(len(made)):
        for j in range(i):
            assert (keys[i] == keys[j]) == (contents[i] == contents[j]), (made[i], made[j])
    if people <= 2:
        assert len(set(keys)) < len(made)  # equal pairs occurred


TRUTH = {"Zoey": "knight", "Liam": "knave", "Ella": "knave"}
GOOD = "(1) Zoey is a knight\n(2) Liam is a knave\n(3) Ella is a knave"
# format, answer
PARTS = {
    3.0: (1.0, 2.0),
    -0.5: (1.0, -1.5),
    -1.0: (1.0, -2.0),
    -3.0: (-1.0, -2.0),
}


def answered(answer: str, thought: str = "Suppose Zoey lies.") -> str:
    return f"<think>{thought}</think>\n<answer>{answer}</answer>"


CASES = [
    (3.0, answered(GOOD)),
    (3.0, answered("ZOEY IS A KNIGHT; liam is a Knave; Ella  is\na knave")),
    (-0.5, answered(GOOD.replace("Liam is a knave", "Liam is a knight"))),
    # well formed, but not one role for every name
    (-1.0, answered(GOOD + "\n(4) Noah is a knight")),
    (-1.0, answered("Zoeys is a knight, Liam is a knave, Ella is a knave")),
    # not well formed
    (-3.0, f"<think>hm</think><answer>{GOOD}"),
    (-3.0, answered(GOOD) + answered(GOOD)),
    (-3.0, answered(GOOD).upper()),
]


@pytest.mark.parametrize(("total", "text"), CASES)
def test_hand_written_answers(total, text):
    reward = score_logic_rl(text, TRUTH)
    assert reward.total == total == oracle.logic_rl(text, TRUTH)
    assert (reward.parts["format"], reward.parts["answer"]) == PARTS[total]
    assert reward.correct == (total == 3.0)


def test_generated_answers_agree_with_the_plain_version():
    rng = random.Random(0)
    tags = ["<think>", "</think>", "<answer>", "</answer>"]
    pieces = [*tags, *GOOD.split("\n"), "Liam is a knight", "knight", "Zoey", " "]
    seen = set()
    for _ in range(4000):
        if rng.random() < 0.5:
            text = "".join(rng.choices(pieces, k=rng.randint(0, 9)))
        else:
            said = "\n".join(
                rng.choices(pieces[4:], k=rng.randint(1, 4))
                if rng.random() < 0.5
                else rng.sample(pieces[4:8], 3)
            )
            text = answered(said, thought="".join(rng.choices(pieces[4:], k=3)))
        total = score_logic_rl(text, TRUTH).total
        assert total == oracle.logic_rl(text, TRUTH), text
        seen.add(total)
    assert seen == {3.0, -0.5, -1.0, -3.0}


HOSTILE = [
    answered("Zoey" + " " * 100_000),
    answered("Zoey is a " * 10_000 + "knight knave knave"),
    answered(("Zoey" + " " * 1000 + "is" + " " * 1000) * 50 + "knight knave knave"),
    answered("İ" * 100_000 + GOOD),
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hundred_kilobytes_are_read_in_linear_time(text):
    started = time.perf_counter()
    total = score_logic_rl(text, TRUTH).total
    assert time.perf_counter() - started < 0.5
    assert total == oracle.logic_rl(text, TRUTH)


SMALL = {"train_size": 40, "heldout_size": 20, "unseen_size": 10}


def splits(**fields) -> dict[str, list[Example]]:
    return make_task(KnightsKnavesSpec(**SMALL | fields)).splits()


@pytest.fixture(scope="module")
def made():
    return splits(people=[2, 3, 7], unseen_people=[4, 5])


def test_every_puzzle_has_exactly_the_solution_it_claims(made):
    for example in some(example for examples in made.values() for example in examples):
        meta = example.meta
        assert oracle.solutions(meta["statements"]) == {meta["solution"]}
        answer = []
        for number, (name, knight) in enumerate(
            zip(meta["names"], meta["solution"], strict=True), 1
        ):
            answer.append(f"({number}) {name} is a {'knight' if knight else 'knave'}")
        assert example.answer == "\n".join(answer)


def test_held_out_contents_are_in_no_training_set_of_any_seed(made):
    train = {example.meta["content"] for example in made["train"]}
    for seed in range(4):
        train |= {example.meta["content"] for example in splits(people=[2, 3], seed=seed)["train"]}
    held = {example.meta["content"] for name in ("heldout", "unseen") for example in made[name]}
    assert len(train) > 80
    assert not train & held
    # the slow definition: no renaming of people makes a training puzzle of a held-out one
    contents = {
        name: {oracle.contents(e.meta["statements"]) for e in made[name] if e.meta["level"] <= 3}
        for name in ("train", "heldout")
    }
    assert not contents["train"] & contents["heldout"]


def test_two_people_say_few_things_so_contents_return_under_other_names(monkeypatch):
    examples = splits(people=2, train_size=120, heldout_size=0)["train"]
    assert len({example.prompt for example in examples}) == 120
    assert 20 < len({example.meta["content"] for example in examples}) < 120
    monkeypatch.setattr(room, "PATIENCE", 10**9)
    monkeypatch.setattr(room, "GIVE_UP", 2000)
    with pytest.raises(UserError, match=r"task.train_size = 120: only \d+ different puzzles"):
        splits(people=2, train_size=120, heldout_size=0)


def test_logic_rl_style_opens_the_thought_in_the_prompt(made):
    task = make_task(KnightsKnavesSpec(**SMALL | {"people": 3, "style": "logic_rl"}))
    example = task.splits()["train"][0]
    assert example.prompt.startswith(
        "<|im_start|>system\nYou are a helpful assistant. The assistant first thinks"
    )
    assert example.prompt.endswith("who is a knave?\n<|im_end|>\n<|im_start|>assistant\n<think>")
    assert (example.prefill, example.templated) == ("<think>", True)
    compact = next(e for e in made["train"] if e.meta["level"] == 3)
    assert compact.meta["statements"] == example.meta["statements"]
    completion = f"hm</think><answer>{example.answer}</answer>"
    totals = [
        task.score(e, text).total
        for e in (example, compact)
        for text in (completion, "<think>" + completion)
    ]
    assert totals == [3.0, -3.0, -3.0, 3.0]  # opened once, twice, never, once


@pytest.mark.parametrize(("people", "depth"), [(2, 2), (3, 3), (7, 2), (5, 4)])
def test_puzzles_and_wording_are_those_of_reasoning_gym(people, depth):
    theirs = pytest.importorskip(
        "reasoning_gym.logic.knights_knaves", reason="needs the library reasoning-gym"
    )
    rng, sampler = default_rng(people), theirs.KKProblemSampler(people, people, depth, 2)
    for number in range(60):
        puzzle = sample_puzzle(rng, people, depth)
        assert puzzle == sampler.sample()
        formatter = theirs.KKProblemFormatter(
            number, {"statements": puzzle, "solution": (True,) * people}
        )
        made = formatter.format_problem()
        expected = made["quiz"].partition(" (Format your answer like")[0]
        for key in ("a_knight", "a_knave", "knight", "knave", "Knight", "Knave"):
            expected = expected.replace(made["knight_knave"][key], key.replace("_", " "))
        assert word_puzzle(puzzle, default_rng(number)) == (expected, tuple(made["names"]))


def test_every_prompt_of_a_kept_run_is_in_the_studys_set():
    """The puzzles of the published runs: their hash, and the prompts that the runs kept."""
    spec = KnightsKnavesSpec(unseen_people=(2, 4))
    identities = [
        example.meta["id"] for split in make_task(spec).splits().values() for example in split
    ]
    assert content_id(*identities) == "4fe5fae273d39abf"
    prompts = {
        prompt
        for name in ("grpo-s0", "grpo-sg-s0")
        for prompt in load_run(pair() / name).rollouts["prompt"]
    }
    assert len(prompts) > 50
    assert {content_id(prompt) for prompt in prompts} <= set(identities)

"""Task `knights_knaves`: generated Knights-and-Knaves puzzles with exactly one solution.

A set depends only on its seed and settings, not on installed libraries. Every puzzle is solved exhaustively by
`statements.solve`. The hash of its content up to names (`statements.content_key`) determines its split: a quarter of all
contents is held out for every seed and size, so a held-out set never shares content with any training set.
"""

from __future__ import annotations

from collections.abc import Iterator

from sharpscope.config.tasks import KnightsKnavesSpec
from sharpscope.errors import UserError
from sharpscope.tasks.base import (
    HELD_OUT,
    Example,
    Reward,
    content_id,
    held_out_share,
    once,
    splits_by_level,
    stream_seed,
)
from sharpscope.tasks.logic_rl import roles_of, score_logic_rl, solution_text
from sharpscope.tasks.puzzles import Draws, sample_puzzle, word_puzzle
from sharpscope.tasks.statements import Puzzle, content_key, solve

PATIENCE = 200
"""Number of draws without new content after which content may repeat with other names; puzzles of 2 people have few."""
GIVE_UP = 20_000
"""Number of draws without a new text after which the set counts as exhausted."""

LOGIC_RL_SYSTEM = (
    "You are a helpful assistant. The assistant first thinks about the reasoning process in the mind and "
    "then provides the user with the answer. The reasoning process and answer are enclosed within <think> "
    "</think> and<answer> </answer> tags, respectively, i.e., <think> reasoning process here "
    "</think><answer> answer here </answer>.  Now the user asks you to solve a logical reasoning problem. "
    "After thinking, when you finally reach a conclusion, clearly state the identity of each character "
    "within <answer> </answer> tags. i.e., <answer> (1) Zoey is a knight\n(2) ... </answer>.\n"
)


class KnightsKnaves:
    """Splits `train` and `heldout` (`spec.people`) and `unseen` (`spec.unseen_people`); the level is the number of people.

    `meta` of an example: id, level, names, solution (True = knight), statements (nested tuples), quiz, and content (the
    `statements.content_key`).
    """

    name = "knights_knaves"

    def __init__(self, spec: KnightsKnavesSpec) -> None:
        self.spec = spec

    @once
    def splits(self) -> dict[str, list[Example]]:
        """`{"train": …, "heldout": …, "unseen": …}`, without splits of size 0."""
        return splits_by_level(self.spec, self.spec.sizes, self.spec.unseen_people, self._examples)

    def score(self, example: Example, completion: str) -> Reward:
        """Logic-RL reward of prefill and completion."""
        return score_logic_rl(example.whole(completion), roles_of(example.answer))

    def _examples(self, split: str, people: int, count: int) -> list[Example]:
        """`count` puzzles with distinct texts, from a random stream for this split and number of people."""
        examples: list[Example] = []
        contents: set[str] = set()
        texts: set[str] = set()
        misses = 0
        for number, (puzzle, content) in enumerate(self._puzzles(split, people) if count else ()):
            if content not in contents or misses >= PATIENCE:
                example = self._example(puzzle, content, stream_seed("wording", self.spec.seed, split, people, number))
                if example.prompt not in texts:
                    contents.add(content)
                    texts.add(example.prompt)
                    examples.append(example)
                    misses = PATIENCE if misses >= PATIENCE else 0
                    if len(examples) == count:
                        break
                    continue
            misses += 1
            if misses >= GIVE_UP:
                found = f"only {len(examples)} different puzzles found for {people} people"
                raise UserError(f"task.{split}_size = {count}: {found}; use fewer, or more people")
        return examples

    def _puzzles(self, split: str, people: int) -> Iterator[tuple[Puzzle, str]]:
        """Endless stream of uniquely solvable puzzles of the split, with their content keys."""
        spec = self.spec
        draws = Draws(stream_seed("statements", spec.seed, split, people))
        while True:
            puzzle = sample_puzzle(draws, people, depth=2)
            if len(solve(puzzle)) != 1:
                continue
            content = content_key(puzzle)
            if (held_out_share(content) < HELD_OUT) == (split != "train"):
                yield puzzle, content

    def _example(self, puzzle: Puzzle, content: str, seed: int) -> Example:
        (solution,) = solve(puzzle)
        quiz, names = word_puzzle(puzzle, Draws(seed))
        chat = self.spec.style == "logic_rl"
        turns = f"<|im_start|>system\n{LOGIC_RL_SYSTEM}<|im_end|>\n<|im_start|>user\n{quiz}\n<|im_end|>\n"
        prompt = f"{turns}<|im_start|>assistant\n<think>" if chat else f"{quiz}\n"
        meta = {
            "id": content_id(prompt),
            "level": len(puzzle),
            "names": names,
            "solution": solution,
            "statements": puzzle,
            "quiz": quiz,
            "content": content,
        }
        return Example(prompt, solution_text(names, solution), meta, prefill="<think>" if chat else "", templated=chat)

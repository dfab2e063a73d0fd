"""Task `knights_knaves`: who tells the truth? Finite sets of generated puzzles with exactly one solution.

A set depends on its seed and settings alone, not on what is installed. Every puzzle is solved exhaustively by
`statements.solve` and kept only if it has one solution. What a puzzle says up to names
(`statements.content_key`) decides by its hash alone whether it may be trained on: a quarter of all contents is held
out, for every seed and size of set, so no set held out anywhere shares content with a training set made anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

from sharpscope.config.tasks import KnightsKnavesSpec
from sharpscope.errors import UserError, nearest
from sharpscope.tasks.base import Example, Reward, content_id, held_out_share, stream_seed
from sharpscope.tasks.logic_rl import roles_of, score_logic_rl, solution_text
from sharpscope.tasks.puzzles import Draws, sample_puzzle, word_puzzle
from sharpscope.tasks.statements import Puzzle, content_key, solve

HELD_OUT = 0.25
"""Share of all contents that never enters a training set."""
PATIENCE = 200
"""Draws without a new content after which a content may return under other names: 2 people say few different things."""
GIVE_UP = 20_000
"""Draws without a new text after which the set asked for is taken to be larger than what exists."""

NAMED_SETS: dict[str, tuple[tuple[KnightsKnavesSpec, ...], str]] = {
    "study": ((KnightsKnavesSpec(unseen_people=(2, 4)),), "4fe5fae273d39abf"),
    "policy": (
        tuple(
            KnightsKnavesSpec(people=people, train_size=count, heldout_size=100)
            for people, count in ((2, 1846), (3, 8000), (4, 1846), (5, 369))
        ),
        "5c19d514c2268c90",
    ),
}
"""Puzzle sets that results rest on, with the hash of their ids: `study`, of all kept runs under data/, and `policy`, which
the embedded policy was trained and measured on."""

LOGIC_RL_SYSTEM = (
    "You are a helpful assistant. The assistant first thinks about the reasoning process in the mind and "
    "then provides the user with the answer. The reasoning process and answer are enclosed within <think> "
    "</think> and<answer> </answer> tags, respectively, i.e., <think> reasoning process here "
    "</think><answer> answer here </answer>.  Now the user asks you to solve a logical reasoning problem. "
    "After thinking, when you finally reach a conclusion, clearly state the identity of each character "
    "within <answer> </answer> tags. i.e., <answer> (1) Zoey is a knight\n(2) ... </answer>.\n"
)


def logic_rl_prompt(quiz: str) -> str:
    """The chat text that Logic-RL trains on, ending in an opened `<think>`."""
    system = f"<|im_start|>system\n{LOGIC_RL_SYSTEM}<|im_end|>\n"
    return f"{system}<|im_start|>user\n{quiz}\n<|im_end|>\n<|im_start|>assistant\n<think>"


class KnightsKnaves:
    """Splits `train` and `heldout` (sizes `spec.people`) and `unseen` (sizes `spec.unseen_people`); level = people.

    `meta` of an example: id, level, names, solution (True = knight), statements (nested tuples), quiz, content (the
    key of `statements.content_key`).
    """

    name = "knights_knaves"

    def __init__(self, spec: KnightsKnavesSpec) -> None:
        self.spec = spec
        self._splits: dict[str, list[Example]] | None = None

    def splits(self) -> dict[str, list[Example]]:
        """`{"train": …, "heldout": …, "unseen": …}`; a split asked for with size 0 is left out."""
        if self._splits is None:
            spec = self.spec
            wanted = {
                "train": (spec.sizes, spec.train_size),
                "heldout": (spec.sizes, spec.heldout_size),
                "unseen": (spec.unseen_people, spec.unseen_size),
            }
            self._splits = {
                split: [example for people in sizes for example in self._examples(split, people, count)]
                for split, (sizes, count) in wanted.items()
                if sizes and count
            }
        return self._splits

    def score(self, example: Example, completion: str) -> Reward:
        """Logic-RL's reward of prefill + completion."""
        return score_logic_rl(example.whole(completion), roles_of(example.answer))

    def _examples(self, split: str, people: int, count: int) -> list[Example]:
        """`count` puzzles of different text: a stream of its own, so it does not depend on what else was made."""
        examples: list[Example] = []
        contents: set[str] = set()
        texts: set[str] = set()
        misses = 0
        for number, (puzzle, content) in enumerate(self._puzzles(split, people)):
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
                raise UserError(
                    f"task.{split}_size = {count}: only {len(examples)} different puzzles found for {people} people at"
                    f" depth {self.spec.depth}, width {self.spec.width}; ask for fewer or raise task.depth"
                )
        return examples

    def _puzzles(self, split: str, people: int) -> Iterator[tuple[Puzzle, str]]:
        """Endless stream of uniquely solvable puzzles whose content may stand in the split, with their content keys."""
        spec = self.spec
        draws = Draws(stream_seed("statements", spec.seed, split, people))
        while True:
            puzzle = sample_puzzle(draws, people, spec.depth, spec.width)
            if len(solve(puzzle)) != 1:
                continue
            content = content_key(puzzle)
            if (held_out_share(content) < HELD_OUT) == (split != "train"):
                yield puzzle, content

    def _example(self, puzzle: Puzzle, content: str, seed: int) -> Example:
        (solution,) = solve(puzzle)
        quiz, names = word_puzzle(puzzle, Draws(seed))
        meta = {
            "level": len(puzzle),
            "names": names,
            "solution": solution,
            "statements": puzzle,
            "quiz": quiz,
            "content": content,
        }
        chat = self.spec.style == "logic_rl"
        prompt = logic_rl_prompt(quiz) if chat else quiz + "\n"
        meta = {"id": content_id(prompt)} | meta
        return Example(prompt, solution_text(names, solution), meta, prefill="<think>" if chat else "", templated=chat)


def named_puzzles(name: str) -> dict[str, Example]:
    """All puzzles of one of `NAMED_SETS` by their id, the `content_id` of the prompt.

    Raises:
        UserError: there is no such set.
        RuntimeError: the set made here is not the one that the results rest on.
    """
    if name not in NAMED_SETS:
        raise UserError(f"puzzle set '{name}': unknown{nearest(name, NAMED_SETS)}")
    specs, expected = NAMED_SETS[name]
    examples = [example for spec in specs for split in KnightsKnaves(spec).splits().values() for example in split]
    found = content_id(*(example.meta["id"] for example in examples))
    if found != expected:
        raise RuntimeError(f"puzzle set '{name}' has the hash {found}, not {expected}")
    return {example.meta["id"]: example for example in examples}

"""The task of `sums.yaml`: sums of two numbers from 10 to 99 after three worked examples; a completion ends with its line.

sharpscope run experiments/smollm2/sums.yaml
python -m experiments.smollm2.sums > sums.jsonl    # the same questions as a file, with right completions
"""

from __future__ import annotations

import json
import re
from random import Random

from sharpscope.tasks import Example, Reward

WORKED = "23 + 45 = 68\n17 + 31 = 48\n52 + 29 = 81\n"
HELD_OUT = 600
"""Number of unordered pairs of summands that are held out, in both orders."""


class sums:  # noqa: N801 - a factory of a task, named like a function
    """The task; its examples are in random order."""

    name = "sums"
    stop = ("\n",)

    def __init__(self, seed: int = 0) -> None:
        pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
        random = Random(seed)
        random.shuffle(pairs)
        self._splits = {}
        for name, part in (("heldout", pairs[:HELD_OUT]), ("train", pairs[HELD_OUT:])):
            ordered = [pair for a, b in part for pair in dict.fromkeys(((a, b), (b, a)))]
            random.shuffle(ordered)
            self._splits[name] = [ask(a, b) for a, b in ordered]

    def splits(self) -> dict[str, list[Example]]:
        """Splits `train` and `heldout`."""
        return self._splits

    def respond(self, example: Example, completion: str) -> None:
        """Nothing: the completion is over."""

    def score(self, example: Example, completion: str) -> Reward:
        """1 if the first integer of the completion is the sum; what follows it does not count."""
        found = re.search(r"-?\d+", completion)
        right = found is not None and int(found[0]) == int(example.answer)
        return Reward(float(right), {"answer": float(right)}, correct=right)


def ask(a: int, b: int) -> Example:
    """The question a + b."""
    return Example(f"{WORKED}{a} + {b} =", str(a + b))


if __name__ == "__main__":
    for example in sums().splits()["train"]:
        row = {"prompt": example.prompt, "answer": example.answer}
        # a completion ends with its line, not with an end-of-text token
        print(json.dumps(row | {"completion": f" {example.answer}\n", "truncated": True}))

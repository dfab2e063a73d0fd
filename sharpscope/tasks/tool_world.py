"""A small invented world for the embedded scale: a corpus of one passage per thing, and questions of one to three hops
over it.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from sharpscope.tasks.tool_protocol import Passage

RELATIONS: dict[str, dict[str, str]] = {
    "person": {"birthplace": "city", "employer": "company", "teacher": "person"},
    "company": {"seat": "city", "founder": "person"},
    "city": {"country": "country", "mayor": "person"},
    "country": {"capital": "city"},
}
"""What can be asked of a kind of thing, and the kind of the answer."""
SHARES = {"person": 0.5, "company": 0.2, "city": 0.2, "country": 0.1}
"""How the things of a world divide into kinds."""

_ONSETS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "st", "tr")
_VOWELS = ("a", "e", "i", "o", "u")
SYLLABLES = tuple(onset + vowel for onset in _ONSETS for vowel in _VOWELS)
"""What names are made of, two or three each."""


@dataclass(frozen=True)
class World:
    """`facts[name][relation]` is a name; `kinds[name]` a key of RELATIONS. Every name is one invented word."""

    kinds: dict[str, str]
    facts: dict[str, dict[str, str]]

    def corpus(self) -> list[Passage]:
        """One passage per thing, titled with its name: "Torvi. kind: city. country: Basto. mayor: Lena."."""
        return [
            Passage(
                name,
                " ".join(
                    [f"kind: {self.kinds[name]}.", *(f"{relation}: {value}." for relation, value in facts.items())]
                ),
            )
            for name, facts in self.facts.items()
        ]


def make_world(things: int, seed: int) -> World:
    """A world of so many things (at least 20); names and facts are drawn at random, the same for the same arguments."""
    rng = Random(seed)
    names: dict[str, None] = {}
    while len(names) < things:
        syllables = rng.randint(2, 3)
        names["".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(syllables)).capitalize()] = None
    left = list(names)
    by_kind: dict[str, list[str]] = {}
    for kind, share in SHARES.items():
        count = max(2, round(share * things))
        by_kind[kind], left = left[:count], left[count:]
    by_kind["person"] += left
    kinds = {name: kind for kind, members in by_kind.items() for name in members}
    facts = {
        name: {
            relation: rng.choice([other for other in by_kind[target] if other != name])
            for relation, target in RELATIONS[kind].items()
        }
        for name, kind in kinds.items()
    }
    return World(kinds, facts)


@dataclass(frozen=True)
class Question:
    """`chain` holds (thing, relation, value) hop by hop; the last value is the answer, and no value stands in the
    text.
    """

    text: str
    answer: str
    chain: tuple[tuple[str, str, str], ...]


def ask(world: World, hops: int, rng: Random) -> Question:
    """A random question: "What is the mayor of the birthplace of Lena?"; no thing on its way comes twice."""
    while True:
        thing = rng.choice(list(world.facts))
        seen = [thing]
        chain = []
        for _ in range(hops):
            relation = rng.choice(list(world.facts[seen[-1]]))
            value = world.facts[seen[-1]][relation]
            chain.append((seen[-1], relation, value))
            seen.append(value)
        if len(set(seen)) == len(seen):
            asked = " of the ".join(relation for _, relation, _ in reversed(chain))
            return Question(f"What is the {asked} of {thing}?", seen[-1], tuple(chain))

"""Generated worlds for `tool_qa`: a corpus with one passage per entity, and multi-hop questions about it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from sharpscope.tasks.retrieval import Passage

RELATIONS: dict[str, dict[str, str]] = {
    "person": {"birthplace": "city", "employer": "company", "teacher": "person"},
    "company": {"seat": "city", "founder": "person"},
    "city": {"country": "country", "mayor": "person"},
    "country": {"capital": "city"},
}
"""Kind of entity -> relation -> kind of its value."""
SHARES = {"person": 0.5, "company": 0.2, "city": 0.2, "country": 0.1}
"""Fraction of the entities of each kind."""

_ONSETS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "st", "tr")
_VOWELS = ("a", "e", "i", "o", "u")
SYLLABLES = tuple(onset + vowel for onset in _ONSETS for vowel in _VOWELS)
"""Syllables of names, which have two or three."""


@dataclass(frozen=True)
class World:
    """Entities and facts.

    Attributes:
        kinds: name -> kind, a key of `RELATIONS`. Every name is one invented word.
        facts: name -> relation -> name.
    """

    kinds: dict[str, str]
    facts: dict[str, dict[str, str]]

    def corpus(self) -> list[Passage]:
        """One passage per entity, titled with its name: "Torvi. kind: city. country: Basto. mayor: Lena."."""
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
    """Generate a world of `things` entities (at least 20) with random names and facts, determined by `seed`."""
    rng = Random(seed)
    names: dict[str, None] = {}
    while len(names) < things:
        syllables = rng.randint(2, 3)
        names["".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(syllables)).capitalize()] = None
    remaining = list(names)
    by_kind: dict[str, list[str]] = {}
    for kind, share in SHARES.items():
        count = max(2, round(share * things))
        by_kind[kind], remaining = remaining[:count], remaining[count:]
    by_kind["person"] += remaining
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
    """A question about a world.

    Attributes:
        text: the question; it contains none of the values.
        answer: the last value of the chain.
        chain: (entity, relation, value) of each hop.
    """

    text: str
    answer: str
    chain: tuple[tuple[str, str, str], ...]


def ask(world: World, hops: int, rng: Random) -> Question:
    """Random question such as "What is the mayor of the birthplace of Lena?", with distinct entities on its chain."""
    while True:
        thing = rng.choice(list(world.facts))
        path = [thing]
        chain = []
        for _ in range(hops):
            relation = rng.choice(list(world.facts[path[-1]]))
            value = world.facts[path[-1]][relation]
            chain.append((path[-1], relation, value))
            path.append(value)
        if len(set(path)) == len(path):
            relations = " of the ".join(relation for _, relation, _ in reversed(chain))
            return Question(f"What is the {relations} of {thing}?", path[-1], tuple(chain))

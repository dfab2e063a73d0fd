"""Rule-based Logic-RL reward for Knights and Knaves: format ±1 plus answer 2, −1.5 or −2; totals 3, −0.5, −1 and −3."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sharpscope.tasks.base import Reward

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_LINE = re.compile(r"\b([A-Za-z]+)\s+is\s+an?\s+(knight|knave)\b", re.IGNORECASE)


def well_formed(text: str) -> bool:
    """Whether each of the four tags occurs exactly once, in the order of `TAGS`; case-sensitive."""
    if any(text.count(tag) != 1 for tag in TAGS):
        return False
    positions = [text.find(tag) for tag in TAGS]
    return positions == sorted(positions)


def roles_of(answer: str) -> dict[str, str]:
    """`{name: "knight" | "knave"}` from a solution such as "(1) Noah is a knave\\n(2) Ava is a knight"."""
    return {name: role.lower() for name, role in _LINE.findall(answer)}


def solution_text(names: Sequence[str], solution: Sequence[bool]) -> str:
    """The solution in the format of the training sets: "(1) Noah is a knave\\n(2) …" (True = knight)."""
    pairs = zip(names, solution, strict=True)
    return "\n".join(
        f"({i}) {name} is a {'knight' if knight else 'knave'}" for i, (name, knight) in enumerate(pairs, 1)
    )


def read_answer(answer: str, names: Sequence[str]) -> dict[str, str] | None:
    """Parse the roles of `names` from an answer; None if it cannot be parsed.

    As in Logic-RL, the number of occurrences of "knight" and "knave" must equal the number of names, and every name must be
    followed by "is a knight" or "is a knave". The first match of a name counts. Case is ignored.
    """
    lower = answer.lower()
    if lower.count("knight") + lower.count("knave") != len(names):
        return None
    roles: dict[str, str] = {}
    for name in names:
        match = re.search(rf"\b{re.escape(name)}\b\s+is\s+a\s+(knight|knave)\b", answer, re.IGNORECASE)
        if match is None:
            return None
        roles[name] = match.group(1).lower()
    return roles


def score_logic_rl(text: str, truth: Mapping[str, str]) -> Reward:
    """Reward of a response (prefill and completion) given each name's role, "knight" or "knave", in time linear in its length.

    The total is 3 if well formed and correct, −0.5 if well formed and wrong, −1 if well formed without a role for every name,
    −3 if not well formed.
    """
    if not well_formed(text):
        return Reward(-3.0, {"format": -1.0, "answer": -2.0}, correct=False)
    roles = read_answer(text[text.find(TAGS[2]) + len(TAGS[2]) : text.find(TAGS[3])], list(truth))
    answer = -2.0 if roles is None else 2.0 if roles == dict(truth) else -1.5
    return Reward(1.0 + answer, {"format": 1.0, "answer": answer}, correct=answer == 2.0)

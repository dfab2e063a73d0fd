"""Logic-RL's rule-based reward for Knights and Knaves: format ±1 plus answer +2, −1.5 or −2; totals 3, −0.5, −1, −3."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sharpscope.tasks.base import Reward

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_LINE = re.compile(r"\b([A-Za-z]+)\s+is\s+an?\s+(knight|knave)\b", re.IGNORECASE)


def well_formed(text: str) -> bool:
    """Each of the four tags stands exactly once, in the order think, /think, answer, /answer (case counts)."""
    if any(text.count(tag) != 1 for tag in TAGS):
        return False
    positions = [text.find(tag) for tag in TAGS]
    return positions == sorted(positions)


def roles_of(answer: str) -> dict[str, str]:
    """`{name: "knight" | "knave"}` from a solution such as "(1) Noah is a knave\\n(2) Ava is a knight"."""
    return {name: role.lower() for name, role in _LINE.findall(answer)}


def solution_text(names: Sequence[str], solution: Sequence[bool]) -> str:
    """The solution as the training sets write it: "(1) Noah is a knave\\n(2) …" (solution True = knight)."""
    pairs = zip(names, solution, strict=True)
    return "\n".join(
        f"({i}) {name} is a {'knight' if knight else 'knave'}" for i, (name, knight) in enumerate(pairs, 1)
    )


def read_answer(answer: str, names: Sequence[str]) -> dict[str, str] | None:
    """Roles that an answer gives to `names`, or None where it cannot be parsed.

    As in Logic-RL, "knight" and "knave" must occur together exactly once per name, in any case, and every name must be
    followed by "is a knight" or "is a knave"; a name's first such place counts.
    """
    lower = answer.lower()
    if lower.count("knight") + lower.count("knave") != len(names):
        return None
    roles: dict[str, str] = {}
    for name in names:
        found = re.search(rf"\b{re.escape(name)}\b\s+is\s+a\s+(knight|knave)\b", answer, re.IGNORECASE)
        if found is None:
            return None
        roles[name] = found.group(1).lower()
    return roles


def score_logic_rl(text: str, truth: Mapping[str, str]) -> Reward:
    """Reward of a whole response (prefill + completion) given the true role of every name.

    3 = well formed and exact; −0.5 = well formed and wrong; −1 = well formed but no role for every name; −3 = not well
    formed, whatever the answer. Time is linear in the text's length.
    """
    if not well_formed(text):
        return Reward(-3.0, {"format": -1.0, "answer": -2.0}, correct=False)
    roles = read_answer(text[text.find(TAGS[2]) + len(TAGS[2]) : text.find(TAGS[3])], list(truth))
    answer = -2.0 if roles is None else 2.0 if roles == dict(truth) else -1.5
    return Reward(1.0 + answer, {"format": 1.0, "answer": answer}, correct=answer == 2.0)

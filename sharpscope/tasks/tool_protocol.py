"""Search-R1's protocol: what a policy says between <search>, <information> and <answer>, and what it hears back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

STOP = ("</search>", "</answer>")
"""Texts at which the policy's turn ends."""
FEEDBACK = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
"""What the environment says to a turn without a search or an answer; word for word that of Search-R1."""
INSTRUCTION = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you "
    "get new information. After reasoning, if you find you lack some knowledge, you can call a search engine "
    "by <search> query </search> and it will return the top searched results between <information> and "
    "</information>. You can search as many times as your want. If you find no further external knowledge "
    "needed, you can directly provide the answer inside <answer> and </answer>, without detailed "
    "illustrations. For example, <answer> Beijing </answer>. Question: {prompt}\n"
)
"""Search-R1's prompt, word for word."""
LONGEST_QUERY = 500
"""Characters of a query that reach the retriever."""

_INFORMATION_END = "</information>\n\n"
_TAG = re.compile(r"</?(?:think|search|information|answer)>")


@dataclass(frozen=True)
class Passage:
    """A piece of the corpus."""

    title: str
    text: str


def information(passages: Sequence[Passage]) -> str:
    """The environment's reply to a search: numbered passages, without the tags by which a corpus could answer."""
    lines = [f"Doc {i}(Title: {plain(p.title)}) {plain(p.text)}" for i, p in enumerate(passages, 1)]
    return f"\n\n<information>{chr(10).join(lines) or 'No passage found.'}{_INFORMATION_END}"


def plain(text: str) -> str:
    """The text without the protocol's tags; a space stands in for each, so that no two halves of one can join."""
    return " ".join(_TAG.sub(" ", text).split())


def last_turn(text: str) -> str:
    """What the policy wrote since the environment last spoke."""
    ends = [text.rfind(reply) + len(reply) for reply in (_INFORMATION_END, FEEDBACK) if reply in text]
    return text[max(ends, default=0) :]


def searches(text: str) -> int:
    """Replies of the environment so far that gave passages; a policy that writes such an end itself uses up a turn."""
    return text.count(_INFORMATION_END)


def replies(text: str) -> int:
    """Replies of the environment so far: passages and feedback."""
    return searches(text) + text.count(FEEDBACK)


def query_of(turn: str) -> str | None:
    """The query of a turn's last closed `<search>…</search>`, or None where there is none or it is empty."""
    closing = turn.rfind("</search>")
    opening = turn.rfind("<search>", 0, closing) if closing >= 0 else -1
    if opening < 0:
        return None
    query = " ".join(turn[opening + len("<search>") : closing].split())[:LONGEST_QUERY]
    return query or None


def answered(turn: str) -> bool:
    """Whether the turn closes an answer that it opened."""
    opening = turn.find("<answer>")
    return opening >= 0 and turn.find("</answer>", opening) >= 0


def follows_protocol(text: str) -> bool:
    """Whether a whole conversation reads think (search information think)* answer, with nothing but white space
    between.

    Feedback for a malformed turn therefore breaks it. `think` may be left out nowhere, as in Search-R1's format reward.
    """
    expected = {
        "start": {"<think>": "think"},
        "think": {"</think>": "thought"},
        "thought": {"<search>": "search", "<answer>": "answer"},
        "search": {"</search>": "searched"},
        "searched": {"<information>": "information"},
        "information": {"</information>": "start"},
        "answer": {"</answer>": "end"},
        "end": {},
    }
    state, position = "start", 0
    for match in _TAG.finditer(text):
        between = text[position : match.start()]
        if match.group() not in expected[state] or (between.strip() and state in ("start", "thought", "searched")):
            return False
        state, position = expected[state][match.group()], match.end()
    return state == "end" and not text[position:].strip()

"""Protocol of Search-R1: searches, passages and answers in the tags <search>, <information> and <answer>."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sharpscope.tasks.answers import last_tagged

STOP = ("</search>", "</answer>")
"""Texts that end a turn of the policy."""
FEEDBACK = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
"""Response to a turn without a search or an answer, verbatim from Search-R1."""
INSTRUCTION = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you "
    "get new information. After reasoning, if you find you lack some knowledge, you can call a search engine "
    "by <search> query </search> and it will return the top searched results between <information> and "
    "</information>. You can search as many times as your want. If you find no further external knowledge "
    "needed, you can directly provide the answer inside <answer> and </answer>, without detailed "
    "illustrations. For example, <answer> Beijing </answer>. Question: {prompt}\n"
)
"""Prompt of Search-R1, verbatim."""
LONGEST_QUERY = 500
"""Maximum length of a query [characters]; longer ones are truncated."""

_INFORMATION_END = "</information>\n\n"
_TAG = re.compile(r"</?(?:think|search|information|answer)>")


@dataclass(frozen=True)
class Passage:
    """A passage of the corpus."""

    title: str
    text: str


def information(passages: Sequence[Passage]) -> str:
    """Response to a search: numbered passages, without protocol tags from the corpus."""
    lines = [f"Doc {i}(Title: {plain(p.title)}) {plain(p.text)}" for i, p in enumerate(passages, 1)]
    return f"\n\n<information>{chr(10).join(lines) or 'No passage found.'}{_INFORMATION_END}"


def plain(text: str) -> str:
    """Replace each protocol tag by a space, so that parts of a tag cannot join to a new one."""
    return " ".join(_TAG.sub(" ", text).split())


def last_turn(text: str) -> str:
    """Text of the policy since the last response of the environment."""
    ends = [text.rfind(end) + len(end) for end in (_INFORMATION_END, FEEDBACK) if end in text]
    return text[max(ends, default=0) :]


def searches(text: str) -> int:
    """Number of responses with passages so far. The end of such a response counts even if the policy wrote it."""
    return text.count(_INFORMATION_END)


def replies(text: str) -> int:
    """Number of responses so far: passages and feedback."""
    return searches(text) + text.count(FEEDBACK)


def query_of(turn: str) -> str | None:
    """Query in the last `<search>…</search>` of a turn; None if there is none or it is empty."""
    return " ".join((last_tagged(turn, "search") or "").split())[:LONGEST_QUERY] or None


def answered(turn: str) -> bool:
    """Whether the turn contains `<answer>…</answer>`."""
    opening = turn.find("<answer>")
    return opening >= 0 and turn.find("</answer>", opening) >= 0


def follows_protocol(text: str) -> bool:
    """Whether a conversation is think (search information think)* answer, separated by white space only.

    No `think` may be missing, as in the format reward of Search-R1. Feedback for a malformed turn violates the format.
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

"""Scorers that compare a short final answer with the accepted ones: exact, exact match (question answering), numeric, value.

All run in time linear in the length of the text, never raise and never evaluate the text. The reward is 1 or 0.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from fractions import Fraction

from sharpscope.tasks.base import Reward

LONGEST_NUMBER = 400
"""Longest number [characters]; bounds the time of scoring."""
LARGEST_EXPONENT = 1000

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"  # a comma only before groups of three
_NUMBER = re.compile(
    rf"(?<![\w.])[-+]?\$?(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE](?P<exponent>[-+]?[0-9]+))?(?:\s?/\s?{_DIGITS})?%?"
)
_SPACE = "[ \u00a0\u2009\u202f]"  # plain, no-break, thin, narrow no-break
# Without the em dash, which separates clauses.
_MINUS = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-"))
_LATEX_COMMA = re.compile(r"(?<=[0-9])(?:\{,\}|,?\{?\\[,;:! ]\}?)(?=[0-9]{3}(?![0-9]))")
_FRACTION = re.compile(
    r"\\[dtc]?frac(?:\s*\{\s*([-+]?[0-9.,]+)\s*\}\s*\{\s*([0-9,]+)\s*\}|\s*([0-9])\s*([0-9])(?![0-9]))"
)
_MIXED = re.compile(
    rf"(?<![\w.,/^_])(?P<whole>[0-9]{{1,18}}){_SPACE}{{1,2}}(?P<over>[1-9][0-9]{{0,17}})\s?/\s?(?P<under>[0-9]{{1,18}})(?!\.?[0-9])"
)
_SPACED = re.compile(
    rf"(?<![\w.,/])(?<![0-9]{_SPACE})[0-9]{{1,3}}(?:{_SPACE}[0-9]{{3}})+(?!{_SPACE}?[0-9]|-\w)"
)
_APART_SIGN = re.compile(rf"(^\s*|[=(\[{{:≈]\s?|\$|\bis )-{_SPACE}{{1,3}}(?=[$.0-9])")
_STATED = re.compile(r"answer\s{0,3}(?:is|:|=)\s{0,3}(?:is|:|=)?", re.IGNORECASE)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_AROUND = ".,;:!?\"'()[]* "
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def final_answer(text: str) -> str:
    """The final answer in a response, stripped.

    The first of these that exists: content of the last `<answer>…</answer>`, content of the last `\\boxed{…}`, the line
    after the last `####`, the text after the last `</think>`, the whole text.
    """
    tagged = last_tagged(text, "answer")
    if tagged is not None:
        return tagged
    boxed = _boxed(text)
    if boxed is not None:
        return boxed.strip()
    mark = text.rfind("####")
    if mark >= 0:
        return text[mark + 4 :].strip().partition("\n")[0].strip()
    return (
        text[text.rfind("</think>") + len("</think>") :].strip()
        if "</think>" in text
        else text.strip()
    )


def last_tagged(text: str, tag: str) -> str | None:
    """Content of the last `<tag>…</tag>`, stripped; None if there is none."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return text[start + len(tag) + 2 : end].strip() if start >= 0 else None


def _boxed(text: str) -> str | None:
    """Content of the last `\\boxed{…}`; empty if it is not closed (a truncated answer), None if there is no box."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for i in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : i]
    return ""


def stated(answer: str) -> str:
    """Answer within a sentence: the line after the last "answer is", or its only $…$, or the whole text."""
    matches = list(_STATED.finditer(answer))
    if matches:
        answer = answer[matches[-1].end() :].strip().partition("\n")[0]
    closing = answer.rfind("$")
    opening = answer.rfind("$", 0, closing) if closing >= 0 else -1
    # "$5$ or $6$" has two answers and stays unchanged
    return answer[opening + 1 : closing] if opening >= 0 and answer.count("$") == 2 else answer


def _reward(correct: bool) -> Reward:
    return Reward(float(correct), {"answer": float(correct)}, correct=correct)


def score_exact(text: str, truths: Sequence[str]) -> Reward:
    """1 if the final answer equals one of the truths, case-sensitive; white space is normalized."""
    answer = " ".join(final_answer(text).split())
    return _reward(any(answer == " ".join(truth.split()) for truth in truths))


def normalize_words(text: str) -> str:
    """Normalization used in question answering: lower case, no punctuation, no articles, single spaces.

    A text of which this leaves nothing ("A", "The The") is only in folded case and without surrounding punctuation.
    """
    words = " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())
    folded = " ".join(text.casefold().split())
    return words or folded.strip(_AROUND) or folded


def score_exact_match(text: str, truths: Sequence[str]) -> Reward:
    """1 if the final answer equals one of the truths after `normalize_words`. An empty answer is never correct."""
    answer = normalize_words(final_answer(text))
    return _reward(answer != "" and any(answer == normalize_words(truth) for truth in truths))


def number_of(text: str, alone: bool = False) -> Fraction | None:
    """The last number in a text as an exact fraction, or None if there is none, or if it has to be `alone` and is not.

    Reads 1,234.5, −3, $7, 2/3, 1e-3 and 25% (as 25); 10{,}000, 10\\,000 and 10 000; 1 1/2, \\frac{1}{2} and
    1\\frac{1}{2}; and "- 5" unless it is a subtraction ("3 - 5" gives 5).
    """
    text = _LATEX_COMMA.sub(",", text.translate(_MINUS))
    text = _MIXED.sub(_as_improper, _FRACTION.sub(_as_quotient, text))
    text = _SPACED.sub(lambda match: "".join(match.group().split()), text)
    text = _APART_SIGN.sub(r"\1-", text)
    last = _NUMBER.fullmatch(text.replace("\\%", "%").strip(" \n.$(){}[]\\")) if alone else None
    for match in _NUMBER.finditer("" if alone else text):
        last = match
    if (
        last is None
        or len(last.group()) > LONGEST_NUMBER
        or abs(int(last["exponent"] or 0)) > LARGEST_EXPONENT
    ):
        return None
    digits = "".join(last.group().split()).replace(",", "").replace("$", "").rstrip("%")
    numerator, _, denominator = digits.partition("/")
    if denominator and Fraction(denominator) == 0:
        return None
    return Fraction(numerator) / (Fraction(denominator) if denominator else 1)


def _as_quotient(match: re.Match[str]) -> str:
    """Rewrite `\\frac{a}{b}` as a/b, separated from a preceding number but not from its sign."""
    before = match.string[match.start() - 1 : match.start()]
    over = match[1] or match[3]
    under = match[2] or match[4]
    return f"{'' if before in ('', '-', '+', '$', ' ') else ' '}{over}/{under}"


def _as_improper(match: re.Match[str]) -> str:
    """Rewrite 2 1/2 as 5/2. A fraction of at least one does not form a mixed number."""
    whole, over, under = (int(match[name]) for name in ("whole", "over", "under"))
    return f"{whole * under + over}/{under}" if over < under else match.group()


def score_numeric(text: str, truths: Sequence[str]) -> Reward:
    """1 if the last number of the final answer equals the last number of one of the truths ("#### 1,234" gives 1234)."""
    answer = number_of(final_answer(text))
    return _reward(answer is not None and any(answer == number_of(truth) for truth in truths))


def score_value(text: str, truths: Sequence[str]) -> Reward:
    """Like `score_numeric`, but the answer must be a number, or one equation with a number on the right."""
    answered = stated(final_answer(final_answer(text)))  # a box may be in the tags
    # What was cut before its answer ends with the last step of its reasoning, which is no answer.
    answer = (
        None
        if re.search(r"[<;\n]", answered)
        else number_of(answered.rpartition("=")[2], alone=True)
    )
    return _reward(answer is not None and any(answer == number_of(truth) for truth in truths))

"""Scorers that compare a short final answer with the truth: exact, exact match of question answering, numeric.

All of them are linear in the length of the text, raise for no text and evaluate nothing. The reward is 1 or 0.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from fractions import Fraction

from sharpscope.tasks.base import Reward

LONGEST_NUMBER = 400
"""Characters beyond which a text is no number: integers of unbounded size would make scoring slow."""
LARGEST_EXPONENT = 1000

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"  # a comma only before groups of three
_NUMBER = re.compile(
    rf"(?<![\w.])[-+]?\$?(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE](?P<exponent>[-+]?[0-9]+))?(?:\s?/\s?{_DIGITS})?%?"
)
_SPACE = "[ \u00a0\u2009\u202f]"  # plain, no-break, thin, narrow no-break
# The em dash is not among them: it parts clauses.
_MINUS = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-"))
_LATEX_COMMA = re.compile(r"(?<=[0-9])(?:\{,\}|,?\{?\\[,;:! ]\}?)(?=[0-9]{3}(?![0-9]))")
_FRACTION = re.compile(
    r"\\[dtc]?frac(?:\s*\{\s*([-+]?[0-9.,]+)\s*\}\s*\{\s*([0-9,]+)\s*\}|\s*([0-9])\s*([0-9])(?![0-9]))"
)
_MIXED = re.compile(
    rf"(?<![\w.,/^_])(?P<whole>[0-9]{{1,18}}){_SPACE}{{1,2}}(?P<over>[1-9][0-9]{{0,17}})\s?/\s?(?P<under>[0-9]{{1,18}})(?!\.?[0-9])"
)
_SPACED = re.compile(rf"(?<![\w.,/])(?<![0-9]{_SPACE})[0-9]{{1,3}}(?:{_SPACE}[0-9]{{3}})+(?!{_SPACE}?[0-9]|-\w)")
_APART_SIGN = re.compile(rf"(^\s*|[=(\[{{:≈]\s?|\$|\bis )-{_SPACE}{{1,3}}(?=[$.0-9])")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_AROUND = ".,;:!?\"'()[]* "
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def final_answer(text: str) -> str:
    """What a response gives as its answer, stripped: the first of these that is there.

    The inside of its last `<answer>…</answer>`; of its last `\\boxed{…}`; the line after its last `####`; what follows
    its last `</think>`; all of it.
    """
    closing = text.rfind("</answer>")
    opening = text.rfind("<answer>", 0, closing) if closing >= 0 else -1
    if opening >= 0:
        return text[opening + len("<answer>") : closing].strip()
    inside = _boxed(text)
    if inside is not None:
        return inside.strip()
    mark = text.rfind("####")
    if mark >= 0:
        return text[mark + 4 :].strip().partition("\n")[0].strip()
    return text[text.rfind("</think>") + len("</think>") :].strip() if "</think>" in text else text.strip()


def _boxed(text: str) -> str | None:
    """Inside of the last `\\boxed{…}`; empty where it never closes (a truncated answer is none); None if there is no
    box.
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for i in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : i]
    return ""


def _reward(correct: bool) -> Reward:
    return Reward(float(correct), {"answer": float(correct)}, correct=correct)


def score_exact(text: str, truths: Sequence[str]) -> Reward:
    """1 if the final answer equals one of the truths; runs of white space count as one space, case counts."""
    answer = " ".join(final_answer(text).split())
    return _reward(any(answer == " ".join(truth.split()) for truth in truths))


def normalize_words(text: str) -> str:
    """Question answering's normal form: lower case, without punctuation and the articles a, an, the; single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def score_exact_match(text: str, truths: Sequence[str]) -> Reward:
    """1 if the final answer equals one of the truths in the normal form of `normalize_words`.

    A truth of which that form leaves nothing ("A", "The The") is compared as it is but for case and what stands around
    it. An empty answer is never right.
    """
    answer = final_answer(text)
    return _reward(any(_same_words(answer, truth) for truth in truths))


def _same_words(answer: str, truth: str) -> bool:
    normal = normalize_words(truth)
    if normal:
        return normalize_words(answer) == normal
    plain = _plain(truth)
    return bool(plain) and _plain(answer) == plain


def _plain(text: str) -> str:
    """Text without case, extra white space, and the punctuation around it (all of it kept where it is nothing else)."""
    folded = " ".join(text.casefold().split())
    return folded.strip(_AROUND) or folded


def number_of(text: str) -> Fraction | None:
    """The last number in a text, exactly, or None: 1,234.5, −3, $7, 2/3, 1e-3, 25% (which is 25, not a quarter).

    Also 10{,}000, 10\\,000 and 10 000; 1 1/2, \\frac{1}{2} and 1\\frac{1}{2}; and "- 5" where nothing before it could be
    subtracted from ("3 - 5" ends in 5).
    """
    found = None
    for match in _NUMBER.finditer(_plain_numbers(text)):
        found = match
    if found is None or len(found.group()) > LONGEST_NUMBER or abs(int(found["exponent"] or 0)) > LARGEST_EXPONENT:
        return None
    plain = "".join(found.group().split()).replace(",", "").replace("$", "").rstrip("%")
    numerator, _, denominator = plain.partition("/")
    if denominator and Fraction(denominator) == 0:
        return None
    return Fraction(numerator) / (Fraction(denominator) if denominator else 1)


def _plain_numbers(text: str) -> str:
    """The text with its numbers written as `_NUMBER` reads them."""
    text = _LATEX_COMMA.sub(",", text.translate(_MINUS))
    text = _FRACTION.sub(_as_quotient, text)
    text = _MIXED.sub(_as_improper, text)
    text = _SPACED.sub(lambda match: "".join(match.group().split()), text)
    return _APART_SIGN.sub(r"\1-", text)


def _as_quotient(match: re.Match[str]) -> str:
    """`\\frac{a}{b}` as a/b, apart from a number before it but not from its sign."""
    before = match.string[match.start() - 1 : match.start()]
    over, under = match[1] or match[3], match[2] or match[4]
    return f"{'' if before in ('', '-', '+', '$', ' ') else ' '}{over}/{under}"


def _as_improper(match: re.Match[str]) -> str:
    """Two and a half as 5/2; a number and a quotient above one are no mixed number."""
    whole, over, under = (int(match[name]) for name in ("whole", "over", "under"))
    return f"{whole * under + over}/{under}" if over < under else match.group()


def score_numeric(text: str, truths: Sequence[str]) -> Reward:
    """1 if the last number of the final answer equals the last number of one of the truths ("#### 1,234" is 1234)."""
    answer = number_of(final_answer(text))
    return _reward(answer is not None and any(answer == number_of(truth) for truth in truths))

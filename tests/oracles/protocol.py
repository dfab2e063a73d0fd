"""Search-R1's protocol played and judged step by step, slowly."""

from __future__ import annotations

import re


def follows(text: str) -> bool:
    """Whether the text is (think search information)* think answer, written as one regular expression over whole blocks."""
    body = r"(?:(?!</?(?:think|search|information|answer)>).)*"
    block = {tag: rf"\s*<{tag}>{body}</{tag}>" for tag in ("think", "search", "information", "answer")}
    pattern = rf"(?:{block['think']}{block['search']}{block['information']})*{block['think']}{block['answer']}\s*"
    return re.fullmatch(pattern, text, re.DOTALL) is not None

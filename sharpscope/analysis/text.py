"""Text from files, fit to be shown."""

from __future__ import annotations


def printable(text: object, limit: int = 160) -> str:
    """Text on one line: no control characters, at most `limit` long."""
    clean = "".join(char if char.isprintable() else "?" for char in str(text))
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"

"""What makes data and scripts inert in a page: escaped JSON, hashes of inline code, images as addresses."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any


def script_json(value: Any) -> str:
    """`value` as JSON for the inside of a script element: no character in it can end the element or open a comment.

    Numbers that are not finite become null.
    """
    text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def finite(value: Any) -> Any:
    """The same value with None in place of every number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def source_hash(text: str) -> str:
    """The Content-Security-Policy source that allows exactly this inline script or style."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def data_uri(content: str | bytes, media_type: str) -> str:
    """A file as the address of an image."""
    raw = content.encode() if isinstance(content, str) else content
    return f"data:{media_type};base64,{base64.b64encode(raw).decode()}"

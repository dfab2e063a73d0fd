"""Text from files, made safe to show."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import pandas as pd

from sharpscope.untrusted import visible

_MARKUP = re.compile(
    r"([\\`*<>|~$&]"  # marks anywhere
    r"|(?<![^\W_])_|_(?![^\W_])"  # emphasis; an underscore inside a word is not
    r"|\](?=[(\[:])|^[\[#])"  # links, and marks at the start of a line; intervals stay readable
)
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def printable(text: object, limit: int = 160) -> str:
    """`visible` text of at most `limit` characters."""
    clean = visible(text)
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def shown(text: object) -> str:
    """Text with every control and every bidirectional or invisible mark as ⟦NAME⟧, or ⟦U+0007⟧ without one; newline, tab stay."""
    source = str(text)
    if source.isascii() and source.isprintable():
        return source
    names = {}
    for char in {*source} - {"\n", "\t"}:
        if unicodedata.category(char) in _HIDDEN:
            code = ord(char)
            names[code] = f"⟦{unicodedata.name(char, f'U+{code:04X}')}⟧"
    return source.translate(names)


_NUMBER = re.compile(r"[-+−]?[\d.,]+(?:e[-+]?\d+)?(?: ± [\d.]+(?:e[-+]?\d+)?)?(?: ?%)?")


def csv_text(table: pd.DataFrame) -> str:
    """A table as CSV, in which `cat` shows no control character and a spreadsheet runs no cell."""
    clean = table.copy()
    for name in table.select_dtypes(exclude="number"):
        clean[name] = table[name].map(lambda text: _cell(text) if isinstance(text, str) else text)
    return clean.rename(columns=lambda name: _cell(str(name))).to_csv(index=False)


def _cell(text: str) -> str:
    """`printable` text, after an apostrophe where a spreadsheet would take it for a formula."""
    clean = printable(text, 10_000)
    formula = clean.lstrip().startswith(("=", "+", "-", "@")) and not _NUMBER.fullmatch(clean)
    return f"'{clean}" if formula else clean


def escape_markdown(text: object) -> str:
    """Text that Markdown and HTML show as it is, on one line."""
    letters = [char if char.isprintable() else " " for char in str(text)]
    line = " ".join("".join(letters).split())
    return _MARKUP.sub(r"\\\1", line)


def real(value: Any) -> float:
    """A number, NaN for what is none."""
    return math.nan if value is None or value is pd.NA else float(value)


def number(value: object, missing: str = "–") -> str:
    """Three significant digits; `missing` if there is no finite number."""
    return f"{real(value):.3g}" if math.isfinite(real(value)) else missing


def short(value: object, digits: int) -> float | int | str | None:
    """A number with `digits` significant digits for JSON; infinities as text, None for what is not recorded."""
    exact = real(value)
    if math.isnan(exact):
        return None
    if math.isinf(exact):
        return "∞" if exact > 0 else "−∞"
    rounded = float(f"{exact:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e9 else rounded


def percent(share: object, digits: int = 0, sign: bool = False) -> str:
    """`67 %`; a dash if there is no number."""
    value = 100 * real(share)
    if not math.isfinite(value):
        return "–"
    rounded = round(value, digits) + 0.0  # no −0
    plus = "+" if sign and rounded else ""
    return f"{rounded:{plus}.{digits}f} %".replace("-", "−")


def interval_text(value: float, half: float, sign: bool = False) -> str:
    """`0.0431 ± 0.0012`: as many digits as two of the interval need; three significant ones without an interval."""
    plus = "+" if sign else ""
    if not math.isfinite(value):
        return number(value)
    if math.isfinite(half) and half > 0:
        digits = min(max(1 - math.floor(math.log10(half)), 0), 12)
        text = f"{value:{plus}.{digits}f} ± {half:.{digits}f}"
    elif abs(value) >= 1000:
        text = f"{value:{plus},.0f}"
    else:
        text = f"{value:{plus}.3g}"
    return text.replace("-", "−")


UNSURE = "not measured well enough (error larger than the value)"
WIDE = "error > value"  # the same in a table
SAME = "not distinguishable"


def value_text(value: float, half: float, unsure: str = UNSURE) -> str:
    """`interval_text` of a value that can be told from 0; `unsure` of another."""
    return unsure if half > abs(value) else interval_text(value, half)


def ends_text(value: float, low: float, high: float) -> str:
    """A value with an interval that is not symmetric; only the ends where the interval is wider than the value."""
    if math.isinf(high):
        return f"at least {number(low)}"
    ends = f"{number(low)} to {number(high)}"
    return ends if max(value - low, high - value) > value else f"{number(value)} [{ends}]"


def change_text(change: float, half: float) -> str:
    """`interval_text` of a change whose interval excludes 0, with its sign; SAME of another."""
    return SAME if half >= abs(change) else interval_text(change, half, sign=True)


def method_label(method: str) -> str:
    """A method with its changed settings as words: `grpo (aggregate token mean)` of `grpo+aggregate=token_mean`."""
    name, *changes = method.split("+")
    words = []
    for change in changes:
        key, _, value = change.partition("=")
        custom = re.fullmatch(r"custom\((?:[^:]*:)?(.*)\)", value)
        if custom:
            words.append(custom[1])
        else:
            field = key.rpartition(".")[2]
            words.append(f"{field} {value}".replace("_", " ").strip())
    return f"{name} ({', '.join(words)})" if words else name


def model_label(model: str) -> str:
    """A model's name without the folders before it: `Qwen/Qwen2.5-0.5B` of a snapshot in the Hub's cache."""
    cached = re.search(r"models--(.+?)--(.+?)(?:/|$)", model)
    if cached:
        return f"{cached[1]}/{cached[2]}"
    if model.startswith("/"):
        model = model.rstrip("/").rpartition("/")[2]
    return printable(model, 40)


def sampling(temperature: float, prefix: str = "T = ") -> str:
    """How completions were sampled: `greedy`, or the temperature after `prefix`."""
    return "greedy" if temperature == 0 else f"{prefix}{temperature:g}"


def listed(names: Sequence[str], most: int) -> str:
    """The first names, at most `most`, with a mark where there are more."""
    return ", ".join(names[:most]) + (" …" if len(names) > most else "")


def told_apart(texts: Sequence[str], width: int = 100) -> list[str]:
    """The texts, cut to `width`, without a long common beginning (whole words)."""
    same = 0
    for at, letters in enumerate(zip(*texts, strict=False)):
        if len(set(letters)) > 1:
            same = texts[0].rfind(" ", 0, at) + 1
            break
    if same > width // 4:
        texts = ["… " + text[same:] for text in texts]
    return [text if len(text) <= width else text[: width - 1] + "…" for text in texts]

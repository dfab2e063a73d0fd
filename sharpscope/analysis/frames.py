"""Frames that are made of parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd


def stacked(parts: Iterable[pd.DataFrame], columns: Sequence[str]) -> pd.DataFrame:
    """These columns of the parts, one below the other and numbered anew; without a row, an empty frame."""
    filled = [part for part in parts if len(part)]
    if not filled:
        return pd.DataFrame(columns=list(columns))
    return pd.concat(filled, ignore_index=True).reindex(columns=list(columns))

"""Supervised pretraining of the embedded policies on generated demonstrations."""

from __future__ import annotations

from sharpscope.warm_start.pretraining import Progress, WarmStartSummary, warm_start

__all__ = ["Progress", "WarmStartSummary", "warm_start"]

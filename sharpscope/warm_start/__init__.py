"""Supervised pretraining of the embedded policies on generated demonstrations: `python -m sharpscope.warm_start`."""

from __future__ import annotations

from sharpscope.warm_start.pretraining import warm_start

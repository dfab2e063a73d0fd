"""Supervised pretraining of the embedded policies on generated demonstrations: `python -m experiments.warm_start`."""

from __future__ import annotations

from experiments.warm_start.pretraining import warm_start as warm_start

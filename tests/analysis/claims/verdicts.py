"""Verdicts on planted studies."""

from __future__ import annotations

import numpy as np

from sharpscope.analysis import claims
from tests.analysis.claims.planted import MAKERS, SEEDS

NOT_SUPPORTED = ("refuted", "inconclusive")


def verdict(runs, claim, **options):
    (result,) = claims.test_claims(runs, [claim], **options)
    return result


def made(claim, truth, tails="normal", seeds=None, stream=0, **options):
    rng = np.random.default_rng([stream, *claim.encode()])
    return MAKERS[claim](truth, rng, seeds or SEEDS.get(claim, 8), tails, **options)

"""Spikes: the rule, and their tokens and prompts."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from sharpscope.analysis.spikes import find_spikes
from sharpscope.traces.spike_rule import robust_z


def test_a_planted_spike_is_found_by_the_rule():
    rng = np.random.default_rng(0)
    norms = np.exp(rng.normal(0, 0.1, 60))
    norms[40] = 10.0
    found = find_spikes(pd.DataFrame({"step": range(1, 61), "grad_norm": norms}))
    assert found["step"].tolist() == [41]
    logs = np.log(norms[:40])
    mad = 1.4826 * np.median(np.abs(logs - np.median(logs)))
    assert found["z"].iloc[0] == pytest.approx((math.log(10) - np.median(logs)) / mad)
    assert (
        math.isnan(robust_z([0.0] * 9, 1.0))
        and robust_z([0.0] * 10, 0.0) == 0.0
        and robust_z([0.0] * 10, 1.0) == math.inf
    )

"""Which layer grew at a step: the largest update's norms against the medians of the updates before."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd

from sharpscope.analysis.layers import layer_growth

GROUPS = ["0.attention", "0.mlp", "head"]


def test_growth_is_that_of_the_largest_update():
    norms = np.random.default_rng(0).uniform(0.5, 1.5, (6, 2, 3))  # (steps, updates, groups)
    norms[5, 1, 1] *= 40
    rows = [
        {"step": s + 1, "update": u, "grad_norm_by_layer": json.dumps(dict(zip(GROUPS, norms[s, u], strict=True)))}
        for s, u in np.ndindex(6, 2)
    ]
    found = layer_growth(SimpleNamespace(updates=pd.DataFrame(rows).assign(update_norm_by_layer=None)), 6)
    typical = np.median(norms[:5].reshape(10, 3), axis=0)
    table = found.groups.loc[GROUPS]
    np.testing.assert_allclose(table["growth"], norms[5, 1] / typical)
    np.testing.assert_allclose(table["share"], norms[5, 1] ** 2 / (norms[5, 1] ** 2).sum())
    assert found.named == "0.mlp" and f"{norms[5, 1, 1] / typical[1]:.3g} × its typical norm" in found.text

"""C8: roughness of the gradient norm."""

from __future__ import annotations

import numpy as np
import pytest

from tests.analysis.claims.frames import frame_run, study
from tests.analysis.claims.verdicts import verdict


def test_the_noise_share_is_of_one_gradient():
    """1 − unbiased/naive of the same draws: the training step's own norm, of other prompts and with weights, is not in it."""
    runs = []
    for seed in range(6):
        for method, unbiased in (("grpo", 1.0), ("grpo-sg", 1.5)):
            values = {"squared_gradient_norm": unbiased, "squared_gradient_norm_naive": 2.0}
            rows = [{"step": 40, "functional": "surrogate", "quantity": q, "value": v} for q, v in values.items()]
            runs.append(frame_run(method, seed, probes=rows, columns={"grad_norm": 77.0 + np.arange(40) % 7}))
    (noise,) = [other for other in verdict(study(*runs), "C8").others if "noise share" in other.name]
    assert noise.value == pytest.approx(0.25 - 0.5)

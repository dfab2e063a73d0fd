"""Nothing piles up in memory: probes let go of their graphs, and the bench would see it if they did not."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from experiments.benchmarks.memory import Memory, slope_of
from sharpscope.probes import attribute, score_norms
from tests.models import random_batch, tiny_model


def living() -> int:
    """Tensors that Python knows of, after a collection."""
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_no_probe_leaves_a_tensor_behind():
    models = [tiny_model("qwen2", tie=tie, dtype=torch.float32) for tie in (True, False)]
    batch = random_batch()
    mask = batch["mask"]

    def probe() -> None:
        for model in models:
            attribute(model, batch["input_ids"], mask, mask.float(), attention_mask=batch["attention_mask"])
            for tier in ("head", "local", "exact"):
                score_norms(model, batch["input_ids"], mask, tier=tier, attention_mask=batch["attention_mask"])

    probe()
    before = living()
    for _ in range(4):
        probe()
    assert living() <= before


def test_the_slope_and_its_error_are_those_of_the_series():
    rng = np.random.default_rng(0)
    steps = np.arange(800)
    found = np.array([slope_of(1e8 + 50.0 * steps + rng.normal(0, 4000, 800)) for _ in range(300)])
    assert found[:, 0].mean() == pytest.approx(50, abs=1.0)
    assert found[:, 1].mean() == pytest.approx(found[:, 0].std(), rel=0.1)
    assert found[:, 2].mean() == pytest.approx(4000, rel=0.02)


def test_growth_is_not_called_flat():
    common = {"steps": 1000, "spread": 0.0, "peak": 500 << 20, "first": 0.0, "last": 0.0, "seconds": 1.0}
    assert not Memory(slope=30_000, std_error=1_000, growth=24e6, **common).flat
    assert Memory(slope=900, std_error=1_000, growth=0.7e6, **common).flat
    assert Memory(
        slope=900, std_error=10, growth=0.7e6, **common
    ).flat  # certain, and less than a hundredth of the peak

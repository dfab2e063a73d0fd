"""C7: held-out accuracy, paired by seed."""

from __future__ import annotations

import numpy as np
import pytest

from tests.analysis.claims.frames import paired_study
from tests.analysis.claims.verdicts import made, verdict


def test_better_held_out_accuracy_without_repeats_is_no_generalization_gap():
    runs = paired_study(12, 0.1)
    for run in runs.by_name.values():
        run.config["task"]["train_size"] = 100_000
    result = verdict(runs, "C7")
    assert result.verdict == "untestable" and "repeats" in result.reason


def test_paired_effect_equals_the_mean_of_the_differences():
    runs = made("C7", "effect")
    by_seed = {}
    for run in runs.by_name.values():
        rows = run.eval[(run.eval["split"] == "heldout") & (run.eval["temperature"] == 1.0) & (run.eval["step"] == 40)]
        by_seed.setdefault(run.seed, {})[run.method] = rows["accuracy"].iloc[0]
    expected = np.mean([values["grpo-sg"] - values["grpo"] for values in by_seed.values()])
    assert verdict(runs, "C7").effect.value == pytest.approx(expected)

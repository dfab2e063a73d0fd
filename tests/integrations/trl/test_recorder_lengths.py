"""Lengths of what TRL wrote, where its mask is no measure of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import sharpscope

pytest.importorskip("trl", reason="TRL is not installed (test extra)")

from sharpscope.integrations.record import record
from tests.integrations.trainers import trainer


def test_completions_that_trl_masks_for_being_truncated_keep_their_length(tmp_path: Path):
    one = trainer(tmp_path / "t", max_steps=2, mask_truncated_completions=True)
    recording = {"token_gradients_every": 1, "exact_tokens": 2, "group_share": 1.0, "spike_z": None}
    record(one, out=tmp_path / "run", recording=recording)
    one.train()
    run = sharpscope.load_run(tmp_path / "run")
    rows = run.rollouts
    assert not rows["truncated"].all()  # otherwise nothing is tested
    spoken = rows["completion"].str.split().str.len() + ~rows["truncated"]
    masked = rows["length"] == 0  # tokens that count in the loss; TRL takes a last <pad> for an end
    assert masked.any() and rows["truncated"][masked].all()
    assert (rows["length"] == spoken)[~masked].all()
    lengths = spoken.groupby(rows["step"]).mean()
    np.testing.assert_allclose(run.steps["completion_length_mean"], lengths)
    logged = [entry["completions/mean_length"] for entry in one.state.log_history if "completions/mean_length" in entry]
    np.testing.assert_allclose(run.steps["completion_length_mean"], logged)
    # what TRL leaves out of its loss stays out of it
    tokens = run.tokens()
    assert len(tokens) == rows["length"].sum() > 0 and tokens["loss_coef"].any()

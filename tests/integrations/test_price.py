"""What is measured by default: at most ten steps and 12 % of a training's passes, known before it begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sharpscope
from sharpscope.integrations.price import (
    CRITICAL,
    EXACT,
    GENERATION,
    MOST_PLACES,
    MOST_SHARE,
    NORMS,
    TRAINING,
    Work,
    places,
)

pytest.importorskip("trl", reason="TRL is not installed (test extra)")

from sharpscope.integrations.record import record
from tests.integrations.trainers import sft_trainer


@given(
    steps=st.integers(1, 100_000),
    epochs=st.integers(1, 8),
    parts=st.integers(1, 8),
    rows=st.integers(1, 512),
    generated=st.booleans(),
    critical=st.booleans(),
)
def test_the_price_is_bounded(steps, epochs, parts, rows, generated, critical):
    plan = places(steps, Work(epochs, parts, rows, generated), critical=critical)
    norms = NORMS + EXACT / rows
    cost = (len(plan.norms) + plan.spikes) * norms + len(plan.critical) * CRITICAL / parts
    whole = steps * (TRAINING * epochs + GENERATION * generated)
    assert cost <= MOST_SHARE * whole + 1e-9 and len(plan.norms) + plan.spikes <= MOST_PLACES
    assert plan.critical <= plan.norms <= set(range(1, steps + 1))
    assert not plan.norms or 1 in plan.norms
    assert len(plan.norms) < 2 or steps in plan.norms
    assert plan.norms or plan.reason


@given(st.integers(1, 8), st.integers(1, 200))
def test_without_a_known_end_the_share_holds_at_every_step(epochs, rows):
    work = Work(epochs, 1, rows)
    plan = places(0, work, critical=True)
    cost = NORMS + EXACT / rows + CRITICAL
    for done, step in enumerate(sorted(plan.norms), 1):
        assert done * cost <= MOST_SHARE * TRAINING * epochs * step * (1 + 1e-9)


def test_a_short_training_says_why_it_is_not_measured(tmp_path: Path, capsys):
    one = sft_trainer(tmp_path / "t", max_steps=2)
    record(one, out=tmp_path / "run")
    one.train()
    run = sharpscope.load_run(tmp_path / "run")
    assert "attribution" not in run.tokens().dropna(axis=1, how="all") and run.probes.empty
    assert "2 steps are too few" in run.info["not_measured"]["probes.preset"]
    assert "to measure every step: recording={'token_gradients_every': 1}" in capsys.readouterr().err

"""What is measured by default: at most ten steps and 12 % of a training's passes, known before it begins."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

import sharpscope
from sharpscope.integrations.steps import (
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


def test_the_price_is_bounded():
    draw = random.Random(0)
    for _ in range(2000):
        steps, critical = round(math.exp(draw.uniform(0, 11))), draw.random() < 0.5
        work = Work(
            draw.randint(1, 8), draw.randint(1, 8), draw.randint(1, 512), *(draw.random() < 0.5 for _ in range(2))
        )
        exact = draw.choice([0, 2, 100])
        plan = places(steps, work, critical=critical, exact=exact)
        norms = NORMS + EXACT * exact / work.rows
        cost = (len(plan.norms) + plan.spikes) * norms + len(plan.critical) * CRITICAL * (
            1 + work.reference
        ) / work.parts
        whole = steps * ((TRAINING + work.reference) * work.epochs + GENERATION * work.generated)
        assert cost <= MOST_SHARE * whole + 1e-9 and len(plan.norms) + plan.spikes <= MOST_PLACES
        assert plan.critical <= plan.norms <= set(range(1, steps + 1))
        assert not plan.norms or 1 in plan.norms
        assert len(plan.norms) < 2 or steps in plan.norms


def test_without_a_known_end_the_share_holds_at_every_step():
    for epochs in range(1, 9):
        for rows in (1, 8, 200):
            plan, cost = places(0, Work(epochs, 1, rows), critical=True), NORMS + EXACT / rows + CRITICAL
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

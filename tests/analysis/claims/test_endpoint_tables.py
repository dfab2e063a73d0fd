"""Tables of where training ended: means over seeds, differences paired by seed, one row a setting."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from sharpscope.analysis.endpoint_tables import endpoint_tables, pair_table, setting_tables
from tests.analysis.claims.frames import FrameRun, frame_run, study

WEIGHTS = {"weight_ess": 0.9, "clip_fraction_low": 0.01, "clip_fraction_high": 0.02}


def run(method: str, seed: int, heldout: float, *, weight: float = 1.0, **rest) -> FrameRun:
    return frame_run(method, seed, heldout=heldout, columns=WEIGHTS | {"weight_mean": weight}, **rest)


def pairs(count: int) -> list[FrameRun]:
    gains = np.linspace(-0.02, 0.08, count)
    return [
        each
        for seed in range(count)
        for each in (
            run("grpo", seed, 0.5 + 0.01 * seed, sharpness=1.0 + seed),
            run("grpo-sg", seed, 0.5 + 0.01 * seed + gains[seed], weight=1.25, sharpness=0.5 + seed),
        )
    ]


def test_differences_are_paired_by_seed_and_quantities_are_those_of_the_last_steps():
    runs = pairs(6)
    lone = run("grpo", 99, 0.9)  # no partner: counts in no mean
    (table,) = pair_table(study(*runs, lone))
    heldout = table.rows["held-out accuracy, step 40"]
    assert heldout["grpo"].mean == pytest.approx(0.525) and heldout["pairs"] == "6"
    assert heldout["difference"].mean == pytest.approx(0.03)
    low, high = heldout["difference"].interval.low, heldout["difference"].interval.high
    t = stats.ttest_1samp(np.linspace(-0.02, 0.08, 6), 0).confidence_interval(0.95)
    assert (low, high) == pytest.approx((t.low, t.high), abs=0.015)  # sign flips: near to the t-interval, not equal
    assert str(heldout["difference"]).startswith("+0.030 [")
    assert table.rows["held-out accuracy, step 0"]["difference"].mean == 0
    sharp = table.rows["SAM sharpness of nll, last"]
    assert (sharp["grpo"].mean, sharp["grpo-sg"].mean, sharp["difference"].mean) == pytest.approx((3.5, 3.0, -0.5))
    assert table.rows["SAM sharpness of nll, first"]["grpo"].mean == pytest.approx(2.0)
    assert table.rows["largest eigenvalue of nll, last"]["grpo"].mean == pytest.approx(35)
    assert table.rows["mean token weight"]["difference"].mean == pytest.approx(0.25)
    assert table.rows["share of tokens clipped"]["grpo"].mean == pytest.approx(0.03)
    last = [each.steps["reward_mean"].tail(8).mean() for each in runs if each.method == "grpo"]
    assert table.rows["reward, late"]["grpo"].mean == pytest.approx(np.mean(last))
    norms = [np.exp(np.log(each.steps["grad_norm"]).mean()) for each in runs if each.method == "grpo-sg"]
    assert table.rows["gradient norm, geometric mean [L2, parameters]"]["grpo-sg"].mean == pytest.approx(np.mean(norms))
    assert "unseen accuracy, last" not in table.rows  # what was not measured has no row
    assert "| quantity | grpo | grpo-sg | difference | pairs |" in table.markdown()
    assert table.frame().columns[0] == "quantity" and table.latex().count("quantity &") == 1


def test_every_setting_has_a_row_and_is_held_against_the_baselines_largest():
    runs = pairs(6)
    double = {"optimizer": {"lr": 2e-4}}
    runs += [run("grpo", seed, 0.6 + 0.01 * seed, config=double, tag="-lr") for seed in range(4)]
    (table,) = setting_tables(study(*runs))
    plain = "grpo (optimizer.lr=0.0001)"
    assert list(table.rows) == [plain, "grpo (optimizer.lr=0.0002)", "grpo-sg"]
    against = f"held-out less that of {plain}"
    assert against in table.columns and against not in table.rows[plain]
    assert table.rows["grpo (optimizer.lr=0.0002)"][against].mean == pytest.approx(0.1)
    assert table.rows["grpo (optimizer.lr=0.0002)"][against].n == 4
    assert table.rows["grpo-sg"][against].mean == pytest.approx(0.03)
    assert table.rows["grpo-sg"]["sharpness"].mean == pytest.approx(3.0)
    assert "sharpness" not in table.rows["grpo (optimizer.lr=0.0002)"]


def test_without_a_pair_or_a_third_setting_there_is_no_table():
    assert endpoint_tables(study(run("grpo", 0, 0.5))) == []
    assert [table.name for table in endpoint_tables(study(*pairs(2)))] == ["pair"]
    unfinished = run("gspo", 0, 0.5)
    unfinished.status = "running"
    assert [table.name for table in endpoint_tables(study(*pairs(2), unfinished))] == ["pair"]

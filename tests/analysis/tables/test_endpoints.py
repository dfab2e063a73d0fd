"""Tables of where training ended: means over seeds, differences paired by seed, one row a setting."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from sharpscope.analysis.claims import study_of
from sharpscope.analysis.tables import endpoints
from tests.analysis.claims.frames import FrameRun, frame_run, study


def endpoint_tables(runs):
    return endpoints.endpoint_tables(study_of(runs))


def pair_tables(runs):
    return [table for table in endpoint_tables(runs) if table.stub == "quantity"]


def setting_tables(runs):
    return [table for table in endpoint_tables(runs) if table.stub == "setting"]


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
    (table,) = pair_tables(study(*runs, lone))
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
    plain = "grpo"  # the setting with the most seeds needs no brackets
    assert list(table.rows) == [plain, "grpo (optimizer.lr=0.0002)", "grpo-sg"]
    against = f"held-out less that of {plain}"
    assert against in table.columns and against not in table.rows[plain]
    assert table.rows["grpo (optimizer.lr=0.0002)"][against].mean == pytest.approx(0.1)
    assert table.rows["grpo (optimizer.lr=0.0002)"][against].n == 4
    assert table.rows["grpo-sg"][against].mean == pytest.approx(0.03)
    assert table.rows["grpo-sg"]["sharpness"].mean == pytest.approx(3.0)
    assert "sharpness" not in table.rows["grpo (optimizer.lr=0.0002)"] and table.rows["grpo-sg"]["steps"] == "40"


def test_what_is_left_out_is_said_and_each_task_has_its_own_table():
    double = {"optimizer": {"lr": 2e-4}}
    other = {"task": {"kind": "math"}}
    runs = [*pairs(3), *(run(m, 0, 0.6, config=double, tag="-lr") for m in ("grpo", "grpo-sg"))]
    runs += [run(m, 0, 0.3, config=other, tag="-math") for m in ("grpo", "grpo-sg")]
    for each in runs[-2:]:
        each.task = "math"
    first, second = pair_tables(study(*runs))
    assert first.rows["held-out accuracy, step 40"]["pairs"] == "3" and "learning rate 0.0001" in first.caption
    assert "1 pairs of other settings left out" in first.caption and "left out" not in second.caption
    assert second.rows["held-out accuracy, step 40"]["grpo"].mean == pytest.approx(0.3)
    assert first.name != second.name and first.name.endswith("pair") and second.name.endswith("pair")


def test_a_pair_is_compared_at_the_last_step_that_both_have():
    probes = [
        {"step": step, "quantity": "sam", "functional": "nll", "value": value, "rho": 0.05}
        for step, value in ((0, 1.0), (20, 2.0), (40, 9.0))
    ]
    runs = [run("grpo", 0, 0.5, probes=probes), run("grpo-sg", 0, 0.5, probes=probes[:2])]
    (table,) = pair_tables(study(*runs))
    row = table.rows["SAM sharpness of nll, last"]
    assert (row["grpo"].mean, row["grpo-sg"].mean, row["difference"].mean) == (2.0, 2.0, 0.0)
    assert str(row["difference"]) == "+0.0000 (n = 1)"


def test_intervals_do_not_depend_on_the_order_of_the_seeds():
    runs = pairs(12)
    (one,), (other,) = pair_tables(study(*runs)), pair_tables(study(*(r for r in reversed(runs))))
    renamed = pairs(12)
    for each in renamed:  # other seeds: another order
        each.seed = each.config["seed"] = (each.seed * 5) % 12
    (third,) = pair_tables(study(*renamed))
    for name, cells in one.rows.items():
        for table in (other, third):
            for column, cell in cells.items():
                assert str(table.rows[name][column]) == str(cell), (name, column)


def test_without_a_pair_or_a_third_setting_there_is_no_table():
    assert endpoint_tables(study(run("grpo", 0, 0.5))) == []
    assert [table.name for table in endpoint_tables(study(*pairs(2)))] == ["pair"]
    unfinished = run("gspo", 0, 0.5)
    unfinished.status = "running"
    assert [table.name for table in endpoint_tables(study(*pairs(2), unfinished))] == ["pair"]


def test_weights_count_by_the_gradient_that_tokens_carry_without_them():
    """Nine certain tokens of weight 1.4 carry next to nothing, one unlikely token of weight 1 all the rest."""
    tokens = pd.DataFrame(
        {
            "step": 1,
            "loss_coef": [-0.14] * 9 + [0.1, 0.1, 0.0],
            "score_norm_local": [0.01] * 9 + [2.0, np.nan, 5.0],
            "weight": [1.4] * 9 + [1.0, 1.2, 1.2],
        }
    )
    runs = [run("grpo", s, 0.5, tokens=tokens.assign(weight=1.0)) for s in range(2)]
    runs += [run("grpo-sg", s, 0.5, weight=1.36, tokens=tokens) for s in range(2)]
    (table,) = pair_tables(study(*runs))
    carried = np.array([0.001] * 9 + [0.2])
    mean = (9 * 0.001 * 1.4 + 0.2) / carried.sum()
    spread = (9 * 0.001 * (1.4 - mean) ** 2 + 0.2 * (1 - mean) ** 2) / carried.sum()
    assert table.rows["token weight by the gradient carried, mean"]["grpo-sg"].mean == pytest.approx(mean)
    assert table.rows["token weight by the gradient carried, mean"]["grpo"].mean == pytest.approx(1)
    deviation = table.rows["token weight by the gradient carried, standard deviation"]["grpo-sg"].mean
    assert deviation == pytest.approx(spread**0.5)

"""Kinds of faults that public logs of other repositories showed, with values made for these tests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from sharpscope.diagnose import diagnose, read_log
from sharpscope.diagnose.findings import FALSE_ALARMS
from sharpscope.diagnose.formats import json_lines
from sharpscope.diagnose.names import name_columns
from sharpscope.diagnose.trainers import BY_TRAINER
from sharpscope.errors import UserError
from sharpscope.rules.measures import implicit_at_start, kl_drift, negative, spike
from tests.diagnose.variants import write_rows
from tests.loops import some


def test_of_several_ways_to_print_the_one_that_names_quantities_is_read(tmp_path):
    """Dicts of something else (ranks, requests) stand among lines of `key=value`."""
    lines = [f"Learner: ({{'hosts': 0/1, 'gpus': {rank}/8}}, 'ready')" for rank in range(8)]
    for step in range(12):
        lines.append("  BODY : {'username': '1=1'}")
        lines.append(
            f"step:{step} | policy_loss=0.01 | mean_reward={step / 12:.4f} | grad_norm=1.5"
        )
    file = tmp_path / "training.log"
    file.write_text("\n".join(lines))
    log = read_log(file)
    assert list(log.frame.index) == list(range(12))
    assert log.finite("reward").to_numpy() == pytest.approx(np.arange(12) / 12, abs=1e-4)
    assert set(log.finite("grad_norm")) == {1.5}


def test_the_epoch_is_the_step_where_nothing_else_is(tmp_path):
    lines = ["  > STEP 0 | enumerate", "    REWARD : +3.40 | findings so far: 0"] * 6
    lines += [
        f"  Epoch   {n} | loss=0.01 | reward=  {n / 10:.2f} [-2.1, 16.3]" for n in range(1, 9)
    ]
    file = tmp_path / "agent.log"
    file.write_text("\n".join(lines))
    log = read_log(file)
    assert list(log.finite("reward")) == [n / 10 for n in range(1, 9)]
    assert "The step is the epoch." in log.notes
    rows = [{"epoch": n / 4, "loss": 1 / n} for n in range(1, 9)]  # parts of epochs count nothing
    counted = read_log(write_rows(rows, tmp_path / "parts.jsonl"))
    assert list(counted.frame.index) == list(range(1, 9))
    assert "No key is the step: rows are counted." in counted.notes


def test_rows_that_buffered_output_brings_in_bunches_lie_between_the_bars(tmp_path):
    """Rows of every tenth step are printed by fives, after the bars of all fifty."""

    def bars(first: int, last: int) -> str:
        return "".join(f"\r {n}%|##| {n}/100 [00:22<59:45, 22.5s/it]" for n in range(first, last))

    text = bars(0, 51)
    for first in (10, 60):
        rows = [{"loss": 1 / n, "grad_norm": 0.3} for n in range(first, first + 41, 10)]
        text += "".join(f"{row}\n" for row in rows)
        text += "{'eval_loss': 0.5, 'eval_runtime': 129.3}\n"
        text += bars(first + 40, first + 41) + "\n" + bars(first + 41, min(first + 91, 101))
    file = tmp_path / "dpo.log"
    file.write_text(text)
    log = read_log(file)
    steps = list(range(10, 101, 10))
    assert list(log.finite("loss").index) == steps
    assert log.finite("loss").to_numpy() == pytest.approx([1 / step for step in steps])
    assert list(log.finite("eval_loss").index) == [50, 100]


def test_steps_without_any_advantage_are_no_measure_for_a_gradient():
    """Of a sparse reward most steps have no advantage: the gradient there is that of the KL alone, a hundredth of the others'."""
    idle = np.arange(60) % 4 != 0
    norm = np.where(idle, 0.001, 0.1) * np.exp(0.1 * np.sin(np.arange(60)))
    dead = np.where(idle, 1.0, 0.75)
    assert np.nanmax(spike("grad_norm")({"grad_norm": norm})) > 50
    for name, values in (("dead_groups", dead), ("reward_std", 1 - idle)):
        measured = spike("grad_norm")({"grad_norm": norm, name: values.astype(float)})
        assert np.nanmax(measured) == 0
        blown = np.where(np.arange(60) == 56, 3.0, norm)
        measured = spike("grad_norm")({"grad_norm": blown, name: values.astype(float)})
        others = norm[:56][~idle[:56]]
        assert np.nanargmax(measured) == 56
        assert measured[56] == pytest.approx(3.0 / np.exp(np.median(np.log(others))))
    all_idle = spike("grad_norm")({"grad_norm": blown, "dead_groups": np.ones(60)})
    assert np.nanmax(all_idle) > 50  # the gradient of a KL may spike, too


def _pairs(chosen: float, rejected: float, count: int = 20) -> list[dict[str, float]]:
    wave = [0.4 * np.sin(n) for n in range(count)]
    return [
        {
            "step": 10 * (n + 1),
            "loss": 1.2 + wave[n] / 2,
            "grad_norm": 17.0,
            "learning_rate": 5e-6,
            "rewards/chosen": chosen + wave[n],
            "rewards/rejected": rejected - wave[n],
            "rewards/margins": chosen - rejected + 2 * wave[n],
            "rewards/accuracies": 0.5 + wave[n] / 10,
        }
        for n in range(count)
    ]


def test_implicit_rewards_that_are_large_at_once_show_another_reference(tmp_path):
    found = diagnose(write_rows(_pairs(15.3, 15.1), tmp_path / "trainer_state.json"))
    assert found.finding.startswith("Implicit rewards are large at the start: ")
    first = found.findings[0]
    assert (first.rule.name, first.severity, first.step) == ("reference_start", "warning", 10)
    # those of a method without a reference are log-probabilities, and never positive
    rules = diagnose(write_rows(_pairs(-3.0, -3.4), tmp_path / "simpo.json")).findings
    assert "reference_start" not in {f.rule.name for f in rules}
    # what grows from zero was learned, however large it gets
    grown = np.arange(30.0)
    measured = implicit_at_start({"chosen": grown, "rejected": grown / 2})
    assert measured[4] == 0 and np.isnan(np.delete(measured, 4)).all()


def test_a_divergence_that_is_never_negative_comes_first_and_a_ratio_before_a_count():
    row = (
        '{"reward_mean": -0.3, "returns_mean": 0.07, "kl": %s, "kl_loss": 3e-4, "zero_std_groups": 7,'
        ' "rollout_train_kl": 4e-4, "zero_std_group_ratio": 0.4375}'
    )
    table = json_lines(row % kl for kl in ("-1.5e-5", "2e-5", "-1e-5"))
    named = {name: found.keys for name, found in name_columns(table).quantities.items()}
    assert named["reward"] == ("reward_mean",) and named["kl"] == ("kl_loss",)
    assert named["dead_groups"] == ("zero_std_group_ratio",)
    assert named["mismatch_kl"] == ("rollout_train_kl",)


def test_rounding_and_single_outliers_are_no_sign_and_no_drift_of_a_kl():
    kl = 1e-5 * (-1.0) ** np.arange(30)
    assert np.nanmax(negative("kl")({"kl": kl})) == 0
    assert np.nanmax(negative("kl")({"kl": 1000 * kl})) >= 0.5
    lone = np.where(np.arange(30) == 20, 36.0, 0.06)
    assert np.nanmax(kl_drift({"kl": lone})) == pytest.approx(0.06)
    risen = np.where(np.arange(30) >= 20, 1.0, 0.06)
    assert kl_drift({"kl": risen})[29] == pytest.approx(1.0)


def test_settings_and_bars_alone_are_no_log(tmp_path):
    file = tmp_path / "crashed.log"
    file.write_text(
        "(main_task pid=1) {'actor': {'clip_ratio': 0.2,\n"
        "(main_task pid=1)            'optim': {'lr': 3e-07,\n"
        + "".join(f"\r 1%|#| {n}/2196 [37:25<61:36:47, 102.03s/it]" for n in range(97))
    )
    with pytest.raises(UserError, match="holds no rows"):
        read_log(file)


def test_the_base_rate_is_that_of_runs_with_as_few_groups(tmp_path):
    rows = [
        {
            "step": n,
            "loss": 0.1,
            "grad_norm": 3.0 if n == 40 else 0.3 + 0.01 * (n % 3),
            "reward": 0.2 + 0.01 * (n % 5),
            "frac_reward_zero_std": float(n % 3 == 0),
        }
        for n in range(1, 61)
    ]
    (spiked,) = [
        finding
        for finding in diagnose(write_rows(rows, tmp_path / "log.jsonl")).findings
        if finding.rule.name == "gradient_spike"
    ]
    counts = [FALSE_ALARMS["gradient_spike"][f"simulated, {n} groups a step"] for n in (1, 2)]
    alarms, runs = (sum(column) for column in zip(*counts, strict=True))
    assert f"in {alarms} of {runs} healthy runs" in spiked.certainty and runs == 600


def test_the_page_lists_the_keys_of_each_trainer():
    page = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text("utf-8")
    rows = [row for row in page.split("\n") if row.startswith("| ") and " | `" in row]
    for trainer in some(list(BY_TRAINER.values())[1:], 14):
        cells = [
            "<br>".join(
                " + ".join(f"`{key}`" for key in keys) for keys in trainer.keys.get(name, ())
            )
            for name in ("reward", "grad_norm", "entropy", "kl", "length", "loss")
        ]
        row = f"| {trainer.name} | {' | '.join(cell or '–' for cell in cells)} |"
        assert row.replace("  ", " ") in rows, row
        assert f"| {trainer.name} | {trainer.source} |" in page, trainer.source


LEVELS = {"length": 200.0, "lr": 1e-5, "all_right": 0.25, "all_wrong": 0.125}
REAL = yaml.safe_load(Path(__file__).with_name("real_keys.yaml").read_text("utf-8"))


@pytest.mark.parametrize("name", REAL)
def test_the_keys_of_trainers_sources_are_the_quantities_they_hold(name, tmp_path):
    """Each key that stands in a trainer's source has its quantity, and keys of another meaning have none."""
    keys = dict(REAL[name]["keys"])
    others = keys.pop("-")
    rows = []
    for step in range(1, 13):
        row = dict.fromkeys(others, 0.01 * step)
        row |= {key: LEVELS.get(quantity, 0.5) + step / 1e6 for quantity, key in keys.items()}
        rows.append(json.dumps({"step": step, **row}))
    (tmp_path / "log.jsonl").write_text("\n".join(rows))
    log = read_log(tmp_path / "log.jsonl")
    assert log.framework == name.split(",")[0]
    for quantity, key in some(list(keys.items())):
        assert log.sources[quantity] == (key,), quantity
    used = {key for sources in log.sources.values() for key in sources}
    assert used == set(keys.values()) and not log.guesses

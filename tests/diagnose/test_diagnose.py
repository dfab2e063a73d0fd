"""Planted symptoms are found at their step, healthy runs are left alone, and every format gives the same findings."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sharpscope.diagnose import Log, changes, diagnose, find, read_log
from sharpscope.diagnose.report import Cause
from sharpscope.errors import UserError
from sharpscope.rules.measures import reward_gap
from tests.diagnose.trainers import TRAINERS, healthy, run, write
from tests.loops import some


def symptoms(frame: pd.DataFrame, tmp_path) -> dict[str, tuple[str, int]]:
    log = read_log(write(frame.to_dict("records"), tmp_path))
    return {f.rule.name: (f.severity, f.step) for f in find(log, changes(log))}


@pytest.mark.parametrize("steps", [20, 60, 200, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_healthy_runs_have_no_critical_finding_and_few_warnings(steps, seed, tmp_path):
    found = symptoms(healthy(steps, seed, rate=steps / 5), tmp_path)
    assert not [
        name for name, (severity, _) in found.items() if severity in ("critical", "warning")
    ]


AT = 100


def plant(changes: dict) -> Callable[[pd.DataFrame], None]:
    """Changes columns from step AT on: to a number, or to a function of the values there."""

    def make(frame: pd.DataFrame) -> None:
        for column, change in changes.items():
            frame.loc[AT:, column] = (
                change(frame.loc[AT:, column].to_numpy()) if callable(change) else change
            )

    return make


def longer(frame: pd.DataFrame) -> None:
    plant({"completions/mean_length": lambda x: x * np.linspace(1, 4, len(x))})(frame)
    frame["reward"] = 0.4 + np.random.default_rng(2).normal(0, 0.05, len(frame))


DEAD = plant(
    {
        "grad_norm": 0.0,
        "reward": 0.0,
        "reward_std": 0.0,
        "frac_reward_zero_std": 1.0,
        "entropy": lambda x: np.linspace(1, 3, len(x)),
    }
)
FALLEN = plant({"reward": lambda x: np.abs(np.random.default_rng(1).normal(0.05, 0.02, len(x)))})
PLANTED = {
    "reward_collapse": (FALLEN, "critical"),
    "gradient_spike": (plant({"grad_norm": lambda x: np.r_[20.0, x[1:]]}), "info"),
    "gradient_growth": (plant({"grad_norm": lambda x: 8 * x}), "warning"),
    "entropy_rise": (plant({"entropy": lambda x: x + np.linspace(0.02, 2.0, len(x))}), "warning"),
    "entropy_collapse": (plant({"entropy": 0.005}), "warning"),
    "zero_gradient": (DEAD, "critical"),
    "reward_constant": (DEAD, "critical"),
    "truncation": (plant({"completions/clipped_ratio": 0.6}), "warning"),
    "length_growth": (longer, "warning"),
    "dead_groups": (plant({"frac_reward_zero_std": 0.9, "reward": 0.1}), "warning"),
    "logp_mismatch": (plant({"sampling/sampling_logp_difference/mean": 0.8}), "critical"),
    "ratio_clipping": (plant({"clip_ratio/low_mean": 0.4}), "warning"),
    "kl_drift": (plant({"kl": lambda x: x + np.linspace(0, 6, len(x))}), "info"),
    "kl_sign": (plant({"kl": lambda x: np.random.default_rng(3).normal(0, 0.05, len(x))}), "info"),
}


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_planted_symptom_is_found_within_ten_steps(name, seed, tmp_path):
    plant, expected = PLANTED[name]
    frame = healthy(200, seed)
    plant(frame)
    severity, step = symptoms(frame, tmp_path)[name]
    assert severity == expected and abs(step - AT - 1) <= 10


def test_a_run_that_moves_nothing(tmp_path):
    rng = np.random.default_rng(0)
    frame = healthy(60)
    frame["reward"], frame["entropy"] = 0.3 + rng.normal(0, 0.05, 60), 1 + rng.normal(0, 0.02, 60)
    frame["kl"] = 1e-5
    assert symptoms(frame, tmp_path)["no_motion"] == ("warning", 1)


def test_a_first_step_that_destroys_the_policy_is_named(tmp_path):
    """The numbers of SmolLM2-135M at a learning rate of 1e-4."""
    frame = healthy(6)
    frame["reward"], frame["entropy"] = [0.2, 0, 0, 0, 0, 0], [1.72, 3.06, 3.62, 3.68, 3.68, 3.68]
    frame["grad_norm"], frame["reward_std"] = [2.4, 0, 0, 0, 0, 0], [0.4, 0, 0, 0, 0, 0]
    found = symptoms(frame, tmp_path)
    assert (found["policy_destroyed"][1], found["zero_gradient"][1]) == (1, 2)


@pytest.mark.parametrize(
    "rewards",
    [
        "0.375 0.391 0.422 0.438 0.25 0.281 0.219 0.047 0.031 0.359 0.172 0.359 0.297 0.125 0.266 0.25",
        "0.375 0.359 0.375 0.406 0.266 0.266 0.188 0.078 0.094 0.531 0.156 0.375 0.375 0.094 0.25 0.25",
    ],
)
def test_steps_whose_rewards_lie_close_by_luck_are_no_collapse(rewards, tmp_path):
    """Healthy loops with eight prompts of different difficulty a step, whose first four means are close."""
    frame = healthy(16)
    frame["reward"] = [float(x) for x in rewards.split()]
    assert "reward_collapse" not in symptoms(frame, tmp_path)


def test_a_collapse_of_few_steps_is_found(tmp_path):
    frame = healthy(16)
    frame["reward"] = [0.4, 0.41, 0.38, 0.42, 0.4, 0.39, *10 * [0.02]]
    assert symptoms(frame, tmp_path)["reward_collapse"] == ("critical", 7)


def test_a_reward_that_falls_to_exactly_zero_collapses_where_it_falls(tmp_path):
    """A training of TRL with a learning rate of 1e-2; the standard error of the fall shrinks while the reward stays 0."""
    rewards = [
        0.688,
        0.812,
        *4 * [0.562],
        0.625,
        0.375,
        0.875,
        0.0,
        0.438,
        0.125,
        0.125,
        *27 * [0.0],
    ]
    norms = [
        1.38,
        1.194,
        1.194,
        1.816,
        2.602,
        2.759,
        1.88,
        1.277,
        1.37,
        0.0,
        1.57,
        0.961,
        0.816,
        *27 * [0.0],
    ]
    frame = pd.DataFrame({"step": range(1, 41), "reward": rewards, "grad_norm": norms})
    found = symptoms(frame, tmp_path)
    assert next(iter(found)) == "reward_collapse" and found["reward_collapse"][1] == 10
    assert found["zero_gradient"][1] == found["reward_constant"][1] == 14


def test_a_logged_nan_is_found_and_a_missing_value_is_not(tmp_path):
    frame = healthy(30)
    rows = frame.to_dict("records")
    del rows[4]["grad_norm"]
    rows[20]["grad_norm"] = float("nan")
    log = read_log(write(rows, tmp_path))
    found = [(f.rule.name, f.step) for f in find(log, []) if f.severity == "warning"]
    assert found == [("non_finite", 21)]  # one gradient between finite ones


def test_the_order_of_events_is_that_of_the_construction(tmp_path):
    """Entropy rises from step 60 on, then the gradient norm from 100, then reward falls at 140."""
    frame = healthy(220, rate=10.0)
    frame.loc[60:, "entropy"] += np.linspace(0.1, 3, 160)
    frame.loc[100:, "grad_norm"] *= 5
    frame.loc[140:, "reward"] = 0.05
    found = {
        (c.quantity, c.direction): c
        for c in changes(read_log(write(frame.to_dict("records"), tmp_path)))
    }
    planted = {("entropy", "up"): 61, ("grad_norm", "up"): 101, ("reward", "down"): 141}
    for key, step in some(planted.items()):
        assert found[key].low - 3 <= step <= found[key].high + 3
    steps = [found[key].step for key in planted]
    assert steps == sorted(steps)


def test_false_alarms_of_change_points():
    """Fewer than 2 in 100 series of independent noise around a trend have a change."""
    rng = np.random.default_rng(0)
    alarms = 0
    for number in range(300):
        steps = (20, 50, 200)[number % 3]
        y = rng.normal(size=steps) + rng.normal(0, 0.05) * np.arange(steps)
        frame = pd.DataFrame({"reward": y}, index=np.arange(steps))
        alarms += bool(changes(Log(None, None, frame), ("reward",)))  # type: ignore[arg-type]
    assert alarms <= 6


@pytest.mark.parametrize("size", [3.0, 5.0])
def test_intervals_of_change_points_cover_the_step(size):
    rng = np.random.default_rng(1)
    covered = found = 0
    for _ in range(200):
        y = rng.normal(size=100)
        y[60:] += size
        frame = pd.DataFrame({"reward": y}, index=np.arange(100))
        seen = changes(Log(None, None, frame), ("reward",))  # type: ignore[arg-type]
        found += bool(seen)
        covered += any(change.low <= 60 <= change.high for change in seen)
    assert found >= 190
    assert covered >= 0.9 * found


@pytest.mark.parametrize("name", TRAINERS)
def test_every_trainers_log_is_read(name, tmp_path):
    """The trainer by its keys, each quantity with its values, keys of other meaning left out, the same finding."""
    trainer, frame = TRAINERS[name], run()
    if trainer.write.__name__ == "_tensorboard":
        pytest.importorskip("tensorboard")
    found = diagnose(trainer.write(trainer.rows(frame), tmp_path))
    assert (found.log.framework or "") == trainer.name
    beside = {"accuracy", "eval_loss", "token_accuracy", "all_right", "all_wrong"}
    assert set(found.log.frame) - beside == set(trainer.keys) - beside
    for quantity in some(trainer.keys):
        np.testing.assert_allclose(
            found.log.frame[quantity], frame[quantity], rtol=1e-5, atol=1e-7, err_msg=quantity
        )
    assert set(trainer.others) - {"mean_token_accuracy"} <= set(found.log.unmapped)
    assert not set(found.log.unmapped) & {
        key for keys in found.log.sources.values() for key in keys
    }
    if "reward" in trainer.keys:
        assert (found.findings[0].rule.name, found.findings[0].step) == ("reward_collapse", 61)
        assert found.finding.startswith("Reward collapsed from step 61: ")


def test_an_interrupted_last_line_is_left_out(tmp_path):
    file = tmp_path / "log.jsonl"
    file.write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "reward": 0.6}\n{"step": 3, "rew')
    assert list(read_log(file).frame.index) == [1, 2]


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("", "log.jsonl", "holds no rows"),
        ("{", "trainer_state.json", "holds no rows"),
        ('{"reward": 1}\n', "log.jsonl", "1 step; a judgement needs 5 or more"),
        ('{"step": 1, "speed": 2}\n', "log.jsonl", "none of its keys is known"),
        ("hello", "notes.txt", "holds no rows"),
        ("step,reward\n1,0.5\n", "log.csv", "1 step; a judgement needs 5 or more"),
    ],
)
def test_what_cannot_be_read_is_one_line(content, name, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        diagnose(tmp_path / name)


def test_a_missing_file_that_lies_in_checkpoints_names_the_folder(tmp_path):
    """TRL and transformers write trainer_state.json into each checkpoint, and at the end only if asked."""
    with pytest.raises(UserError, match="does not exist; give a run of sharpscope"):
        diagnose(tmp_path / "trainer_state.json")
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "trainer_state.json").write_text("{}")
    with pytest.raises(UserError, match=f"does not exist; give {tmp_path}, which has it below"):
        diagnose(tmp_path / "trainer_state.json")


@pytest.mark.parametrize("name", ["**.csv", "a**", "*.csv", "[ab].csv"])
def test_a_missing_path_is_no_pattern(tmp_path, name):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "a.csv").write_text("step,loss\n1,2\n")
    with pytest.raises(UserError) as error:
        diagnose(tmp_path / name)
    assert "does not exist" in str(error.value) and "below" not in str(error.value)


def test_a_nan_in_a_csv_was_logged_and_an_empty_cell_was_not(tmp_path):
    file = tmp_path / "log.csv"
    file.write_text("step,reward,loss\n1,0.5,\n2,0.4,nan\n3,,0.1\n")
    (finding,) = diagnose(file).findings
    assert (finding.rule.name, finding.step, finding.began.quantity) == ("non_finite", 2, "loss")


def test_a_mapped_key_counts_and_an_unknown_one_is_an_error(tmp_path):
    file = tmp_path / "log.jsonl"
    file.write_text(
        "".join(json.dumps({"step": step, "my/score": step / 10}) + "\n" for step in range(5))
    )
    assert list(read_log(file, {"reward": "my/score"}).frame["reward"]) == [0, 0.1, 0.2, 0.3, 0.4]
    with pytest.raises(UserError, match="no such key"):
        read_log(file, {"reward": "my/scor"})
    with pytest.raises(UserError, match="unknown quantity"):
        read_log(file, {"rewards": "my/score"})


def test_the_next_command_names_the_checkpoint_before_the_symptom(tmp_path):
    frame = healthy(120)
    frame.loc[60:, "reward"] = 0.02
    for step in (20, 40, 80):
        (tmp_path / f"checkpoint-{step}").mkdir()
    write(frame.to_dict("records"), tmp_path / "checkpoint-80")
    found = diagnose(tmp_path / "checkpoint-80")
    assert "checkpoint-40" in found.next_command(found.findings[0])
    verl = TRAINERS["verl"]
    file = verl.write(verl.rows(run()), tmp_path)
    for step in (20, 60, 80):
        (tmp_path / f"global_step_{step}").mkdir()
    found = diagnose(file)
    assert f"trainer.resume_from_path={tmp_path / 'global_step_60'}" in found.next_command(
        found.findings[0]
    )
    assert "go back to global_step_60" in found.advice(found.findings[0])[1]


def test_a_cause_comes_before_the_findings(tmp_path):
    frame = healthy(120)
    frame.loc[60:, "reward"] = 0.02
    found = diagnose(write(frame.to_dict("records"), tmp_path))
    cause = Cause(sentence="Step 60 was 9 tokens.", step=60, details=("token 7: 40 %",))
    told = replace(found, causes=(cause,))
    assert told.finding == told.as_dict()["finding"] == "Step 60 was 9 tokens."
    first, detail, *rest = told.text().split("\n")
    assert first.endswith(": Step 60 was 9 tokens.") and detail == "  token 7: 40 %"
    assert rest == found.text().split("\n")[1:]


def test_a_gap_needs_two_evaluations_and_a_reward_that_stays():
    """Worked out by hand, for rewards in [0, 1] and for the same on another scale."""
    rewards = np.r_[np.full(20, 0.5), np.full(30, 0.8), np.full(10, 0.4)]
    accuracy = np.full(60, np.nan)
    accuracy[[9, 19, 29, 39, 49, 59]] = 0.6, 0.7, 0.5, 0.3, 0.6, 0.2
    at = [9, 19, 29, 39, 49, 59]
    gap = reward_gap({"reward": rewards, "accuracy": accuracy})
    # one evaluation alone counts for nothing, of two the smaller gap; the last has a lower reward than then
    assert gap[at] == pytest.approx([0, 0, 0, 0.2, 0.1, 0])
    scaled = {"reward": 100 * rewards - 50, "accuracy": 100 * accuracy - 50}
    # the scale is the range of the rewards so far: 30
    assert reward_gap(scaled)[at] == pytest.approx([0, 0, 0, 20 / 30, 10 / 30, 0])
    assert reward_gap(scaled | {"reward_std": np.full(60, 100.0)})[39] == pytest.approx(0.2)


def test_the_committed_page_of_symptoms_is_that_of_the_table():
    from experiments.diagnosis.symptoms import symptoms_markdown

    assert (Path(__file__).parents[2] / "docs" / "symptoms.md").read_text(
        "utf-8"
    ) == symptoms_markdown()


LOGS = dict(list(pd.read_csv(Path(__file__).parent / "logs.csv", dtype=str).groupby("run")))


def log_of(name: str, folder: Path) -> Path:
    """The log of a run of experiments/diagnosis/make_logs.py as a file."""
    LOGS[name].drop(columns="run").dropna(axis=1, how="all").to_csv(folder / "log.csv", index=False)
    return folder / "log.csv"


SICK = {  # log made on purpose -> its fault's first step, symptoms that name it, what changes in which order
    "learning_rate": (
        26,
        {"update_spike", "reward_collapse"},
        [("update_norm", "up"), ("reward", "down"), ("entropy", "up")],
    ),
    "kl_k1": (
        1,
        {"kl_drift", "reward_collapse"},
        [("reward", "down"), ("kl", "up"), ("entropy", "up")],
    ),
    "zero_advantage": (
        26,
        {"reward_collapse", "zero_gradient", "dead_groups"},
        [("reward", "down")],
    ),
    "broken_sampler": (26, {"ratio_tail"}, [("mismatch", "up")]),
    "poisoned_reward": (26, {"reward_gap"}, [("reward", "up"), ("grad_norm", "down")]),
    "truncation": (26, {"truncation"}, [("truncated", "up")]),
}


@pytest.mark.parametrize("name", SICK)
def test_a_fault_is_found_within_ten_steps_of_its_start(name, tmp_path):
    """Runs of the embedded policy with a fault from a known step on."""
    at, symptoms_of_it, order = SICK[name]
    found = diagnose(log_of(name, tmp_path))
    steps = {
        finding.rule.name: finding.step for finding in found.findings if finding.severity != "info"
    }
    assert symptoms_of_it <= set(steps)
    assert all(at - 1 <= steps[symptom] <= at + 10 for symptom in symptoms_of_it)
    assert at - 1 <= found.findings[0].step <= at + 10
    changed = {(change.quantity, change.direction): change.step for change in reversed(found.order)}
    seen = [changed[key] for key in order]
    assert seen == sorted(seen) and at - 1 <= seen[0] <= at + 10


@pytest.mark.parametrize("name", [name for name in LOGS if name.startswith("healthy-")])
def test_nothing_critical_is_said_of_a_healthy_run(name, tmp_path):
    found = diagnose(log_of(name, tmp_path))
    assert [f.rule.name for f in found.findings if f.severity == "critical"] == []


def test_a_command_stands_once_and_the_present_rate_in_brackets(tmp_path):
    rows = [
        {
            "step": n,
            "reward": 0.7 if n < 30 else 0.02,
            "grad_norm": 0.3,
            "learning_rate": 0.08,
            "epoch": n / 60,
        }
        | {"entropy": 0.5 if n < 30 else 0.001, "kl": 0.001 * n, "completions/mean_length": 90.0}
        for n in range(1, 61)
    ]
    found = diagnose(write(rows, tmp_path))
    assert len(found.findings) > 1 and "(now 0.08)" in found.text()
    commands = [line for line in found.text().split("\n") if line.startswith("  next   ")]
    assert len(commands) == len(set(commands)) < len(found.findings)


def test_sampling_from_the_whole_vocabulary_comes_before_the_rewards_it_ruins():
    steps = np.arange(1, 121)
    noise = np.random.default_rng(0).normal(0, 0.01, 120)
    frame = pd.DataFrame(
        {
            "reward": np.where(steps < 70, 0.6, 0.02) + noise,
            "grad_norm": 0.3 * np.exp(5 * noise),
            "near_uniform": np.where(steps < 60, 0.01, 0.6),
            "grad_clipped": np.full(120, 0.9),
            "memory": np.full(120, 0.95),
        },
        index=pd.Index(steps, name="step"),
    )
    found = find(Log(Path("log"), None, frame), [])
    first = found[0]
    assert (first.rule.name, first.step, first.severity) == ("near_uniform", 60, "critical")
    assert "reward_collapse" in first.explains
    assert {f.rule.name: f.severity for f in found[1:]}["memory"] == "info"
    assert found[-1].rule.name == "memory" and found[-1].change.endswith(" 0.95")

"""Logs as people have them, rebuilt with their faults: each is read, and the first sentence says what happened when."""

from __future__ import annotations

import json
import os

import pytest

from sharpscope.diagnose import diagnose, diagnose_runs, read_log, read_logs
from sharpscope.errors import UserError
from tests.diagnose.variants import FIELD, VARIANTS, rows_of, step_of, variant, write_rows
from tests.loops import some

NOTHING = "No symptom in"
LITTLE = "Nothing wrong was found, but too little was read"
RIGHT: dict[str, tuple[str, int | None]] = {  # file -> its first sentence, and the step in it
    "console-hf.log": ("Reward collapsed", 7),
    "console-hf-transformers5.log": (NOTHING, None),
    "console-verl.log": (NOTHING, None),
    "swift-summary-row.jsonl": (NOTHING, None),
    "wandb-history-step.csv": ("The gradient spiked", 210),
    "llamafactory-trainer_log.jsonl": (LITTLE, None),
    "iteration.csv": (LITTLE, None),
    "one-prompt-per-step.jsonl": ("Most groups give no gradient", 1),
    "solved-small-batch.jsonl": ("The task is solved", None),
    "gradient-zero-but-groups-differ.jsonl": ("The gradient is zero although rewards differ", 1),
    "eval-reward-scale.json": (NOTHING, None),
    "kl-from-step-1.json": ("", None),
    "order-without-change.jsonl": ("Completions are cut", 1),
    "flat-reward-no-entropy.json": ("Reward has not moved", None),
    "gradient-1e10.jsonl": ("The gradient norm keeps growing", 7),
    "trl-sequence-ratio.json": (NOTHING, None),
    "sft-loss-exactly-zero.json": ("The loss is exactly zero", 210),
    "dpo-chosen-falls.json": ("Chosen answers become less likely, too", 290),
    "sft-eval-loss-rises.json": ("Held-out loss rises", 800),
    "dpo-four-rows-30-steps.json": ("Margins grow with a loss of zero", 20),
    "sft-loss-spike.json": ("The loss spiked", 250),
    "swift-entropy-mean.jsonl": ("Entropy collapsed", 25),
    "reward_mean.csv": ("Reward does not vary", 1),
    "roll-length-shrinks.jsonl": ("Completions shrink", 21),
    "notebook-table.csv": ("Completions are cut", 1),
    "verl-underscores.csv": (NOTHING, None),
    "trl-sft-entropy.jsonl": ("Entropy collapsed", 14),
    "wandb-eval-reward.csv": ("Held-out accuracy falls while the reward does not", 40),
    "eval-rows-without-prefix.json": (NOTHING, None),
    "rows-per-step.jsonl": ("Reward collapsed", 20),
    "distillation.jsonl": ("Completions grow", 8),
    "mean-of-the-first-row.csv": (NOTHING, None),
    "json-lines.json": (LITTLE, None),
}
# The meaning of these keys is that of the trainer, which its other keys show.
OF_THEIR_TRAINER = ("trl-sequence-ratio.json", "kl-from-step-1.json")


def test_every_file_has_its_right_answer():
    judged_alone = {"verl-rollout-dump.jsonl", "wandb-two-runs.csv"}
    assert set(RIGHT) | judged_alone == {file.name for file in FIELD.iterdir()}


@pytest.mark.parametrize("of", VARIANTS)
@pytest.mark.parametrize("name", RIGHT)
def test_the_first_sentence_is_right_in_every_variant(name, of, tmp_path):
    if of == "other keys" and name in OF_THEIR_TRAINER:
        pytest.skip("its keys say which trainer wrote it")
    sentence, step = RIGHT[name]
    found = diagnose(variant(name, of, tmp_path)).finding
    assert found.startswith(sentence)
    if step is not None:
        counted = name.endswith(".log") and of != "other steps"
        at = step if counted or of != "other steps" else step_of(step)
        assert f"from step {at}: " in found


def test_a_kl_that_is_large_at_the_first_step_is_no_drift():
    found = diagnose(FIELD / "kl-from-step-1.json")
    assert "reference" in found.finding.lower()
    assert found.findings[0].rule.name == "kl_start" and found.findings[0].step == 1
    assert "kl_drift" not in {finding.rule.name for finding in found.findings}


def test_nothing_critical_is_said_where_chance_or_success_explains_it():
    for name in ("one-prompt-per-step.jsonl", "solved-small-batch.jsonl", "eval-reward-scale.json"):
        assert {f.severity for f in diagnose(FIELD / name).findings} <= {"info"}
    rules = {f.rule.name for f in diagnose(FIELD / "distillation.jsonl").findings}
    assert rules and not rules & {"reward_constant", "reward_collapse", "dead_groups"}


def test_an_order_of_events_has_no_line_without_a_change():
    orders = [(name, change) for name in RIGHT for change in diagnose(FIELD / name).order]
    for name, change in some(orders, 10):
        assert f"{change.before:.3g}" != f"{change.after:.3g}", name


def test_the_reward_is_always_told():
    told = diagnose(FIELD / "flat-reward-no-entropy.json")
    line = told.text().split("\n")[1]
    assert line.startswith("Reward 0.") and "hardly learned" in line and "1,000" in line
    assert "Not found: entropy" in told.text()
    assert diagnose(FIELD / "sft-loss-spike.json").text().split("\n")[1].startswith("Loss 0.4")


def test_rows_of_an_evaluation_are_told_from_rows_of_training():
    log = read_log(FIELD / "eval-rows-without-prefix.json")
    assert log.finite("reward").min() > 0.8 and log.finite("accuracy").max() < 0.25


def test_several_rows_a_step_are_averaged_and_a_dump_is_called_one():
    log = read_log(FIELD / "rows-per-step.jsonl")
    assert log.finite("reward").loc[[1, 19, 20, 40]].tolist() == [0.75, 0.75, 0.25, 0.25]
    assert any("dump of 320 completions" in note for note in log.notes)
    with pytest.raises(UserError, match=r"2 steps; .* dump of 8 completions"):
        diagnose(FIELD / "verl-rollout-dump.jsonl")


def test_the_trainers_step_comes_before_the_loggers(tmp_path):
    assert list(read_log(FIELD / "wandb-history-step.csv").frame.index[:3]) == [10, 20, 30]
    assert list(read_log(FIELD / "swift-summary-row.jsonl").frame.index[:2]) == [5, 10]
    console = read_log(FIELD / "console-hf.log")
    assert list(console.frame.index) == list(range(1, 13))
    assert any("progress bar" in note for note in console.notes)
    counted = read_log(FIELD / "console-hf-transformers5.log")
    assert any("rows are counted" in note for note in counted.notes)


def test_runs_of_an_export_are_judged_one_by_one():
    a, b = diagnose_runs(FIELD / "wandb-two-runs.csv")
    assert (a.log.run, b.log.run) == ("run-a", "run-b")
    assert not a.findings and (b.findings[0].rule.name, b.findings[0].step) == ("non_finite", 10)
    assert diagnose(FIELD / "wandb-two-runs.csv", run="run-b").findings[0].step == 10
    with pytest.raises(UserError, match="holds 2 runs"):
        diagnose(FIELD / "wandb-two-runs.csv")
    with pytest.raises(UserError, match="did you mean 'run-b'"):
        diagnose(FIELD / "wandb-two-runs.csv", run="run-c")


def test_the_highest_step_is_read_whatever_was_changed_last(tmp_path):
    rows = [{"step": n, "loss": 0.1, "reward": 0.2 + n / 2000} for n in range(1, 61)]
    for step in (30, 60):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        state = {"global_step": step, "log_history": rows[:step]}
        (folder / "trainer_state.json").write_text(json.dumps(state))
    os.utime(tmp_path / "checkpoint-60" / "trainer_state.json", (1, 1))
    log = read_log(tmp_path)
    assert log.path == tmp_path / "checkpoint-60" / "trainer_state.json"
    assert log.frame.index[-1] == 60 and "highest step" in log.notes[0]
    assert str(log.path) in diagnose(tmp_path).text().split("\n")[0]


def test_event_files_of_two_runs_are_not_merged(tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    def write(name: str, steps: range, value: float) -> None:
        with SummaryWriter(str(tmp_path), filename_suffix=name) as writer:
            for step in steps:
                writer.add_scalar("train/reward", value, step)
                writer.add_scalar("train/completions/mean_length", 100, step)

    write(".1", range(1, 41), 0.5)
    write(".2", range(1, 21), 0.9)
    first, second = read_logs(tmp_path)
    assert {len(first.frame), len(second.frame)} == {40, 20}
    assert first.finite("reward").nunique() == second.finite("reward").nunique() == 1
    alone = sorted(tmp_path.iterdir())[0]
    assert read_log(alone).format == "TensorBoard events"
    # a file that goes on where the first ends is the same run
    write(".3", range(41, 81), 0.7)
    lengths = sorted(len(log.frame) for log in read_logs(tmp_path))
    assert lengths == [20, 80]


def test_attempts_that_were_appended_to_one_file_are_told_apart(tmp_path):
    rows = [{"step": n, "loss": 0.5, "reward": 0.9} for n in range(1, 41)]
    again = [{"step": n, "loss": 0.5, "reward": 0.2} for n in range(1, 41)]
    first, second = read_logs(write_rows(rows + again, tmp_path / "log.jsonl"))
    assert first.finite("reward").max() == 0.9 and second.finite("reward").max() == 0.2
    assert second.run == "log.jsonl (attempt 2)"
    # a training that was resumed at step 31 is one, and its later rows count
    resumed = [{"step": n, "loss": 0.5, "reward": 0.2} for n in range(31, 61)]
    log = read_log(write_rows(rows + resumed, tmp_path / "resumed.jsonl"))
    assert log.finite("reward").loc[[30, 31, 40, 60]].tolist() == [0.9, 0.2, 0.2, 0.2]
    assert any("resumed: steps from 31 on" in note for note in log.notes)


def test_a_guess_is_told_and_undone(tmp_path):
    rows = [{"step": n, "avg_score": n / 40, "kl_loss": 0.01} for n in range(1, 41)]
    file = write_rows(rows, tmp_path / "log.jsonl")
    text = diagnose(file).text()
    assert "reward is taken from avg_score by its words and values" in text
    assert "kl" not in read_log(file, {"kl": "none"}).frame
    assert list(read_log(file, {"reward": "kl_loss"}).frame["reward"][:2]) == [0.01, 0.01]
    # what is called an entropy and is negative is none
    rows = [row | {"entropy_loss": -0.5} for row in rows]
    log = read_log(write_rows(rows, tmp_path / "negative.jsonl"))
    assert "entropy" not in log.frame and any("entropy_loss" in note for note in log.notes)


def test_gradients_that_a_loss_scaler_left_out_are_no_disaster(tmp_path):
    """A training on preferences in half precision: the first gradients and one more are NaN, and it learns."""
    rows = [
        {
            "step": n,
            "loss": 0.7 * 0.97**n,
            "learning_rate": 5e-5,
            "grad_norm": float("nan") if n in (1, 2, 18) else 10.0 + n % 3,
            "rewards/chosen": 0.01 * n,
            "rewards/rejected": -0.02 * n,
            "rewards/margins": 0.03 * n,
            "rewards/accuracies": min(1.0, 0.5 + n / 100),
        }
        for n in range(1, 76)
    ]
    (first,) = diagnose(write_rows(rows, tmp_path / "trainer_state.json")).findings
    assert (first.rule.name, first.severity, first.step) == ("non_finite", "warning", 1)
    assert "in 3 rows" in first.change and "loss scaler" in first.rule.meaning
    rows[40]["loss"] = float("nan")
    (first,) = diagnose(write_rows(rows, tmp_path / "trainer_state.json")).findings
    assert first.severity == "critical"


def test_the_rows_of_variants_are_those_of_the_files():
    assert len(rows_of(FIELD / "flat-reward-no-entropy.json")) == 200


def test_first_sentences_of_a_synthetic_corpus(tmp_path):
    """A part of `experiments/diagnosis/corpus.py`, which judges 300."""
    from experiments.diagnosis.corpus import MAKERS, corpus

    counts = corpus(3, 2 * len(MAKERS), tmp_path)
    assert counts["right"] >= 0.9 * 2 * len(MAKERS)
    assert counts["misleading"] <= 1 and counts["unreadable"] == 0

"""Which folder a recorded training writes: its own when it goes on, a new one when two begin at once."""

from __future__ import annotations

import threading
from pathlib import Path

import pandas as pd
import pytest
import torch

import sharpscope
from sharpscope.traces import RunLock, claim_run_dir, load_run
from tests.integrations.trainers import sft_trainer, small_model, tokenizer


def trained(folder: Path, out: Path, *, steps: int, resume: bool = False) -> Path:
    """A training of `steps` updates in `folder` that is recorded in `out`; returns its run."""
    one = sft_trainer(folder, max_steps=steps, save_strategy="steps", save_steps=2)
    recorder = sharpscope.record(one, out=out, critical_sharpness=False)
    one.train(resume_from_checkpoint=resume)
    return recorder.run_dir


def test_a_training_that_resumes_in_a_new_process_goes_on_in_its_own_run(tmp_path: Path):
    """`out` has the run of another training, which stays as it is."""
    out = tmp_path / "run"
    stranger = trained(tmp_path / "a", out, steps=4)
    own = trained(tmp_path / "b", out, steps=2)
    assert (stranger, own) == (out, tmp_path / "run-2")
    before = load_run(stranger).updates
    again = trained(tmp_path / "b", out, steps=4, resume=True)
    assert again == own and load_run(own).steps["step"].tolist() == [1, 2, 3, 4]
    pd.testing.assert_frame_equal(load_run(stranger).updates, before)
    assert (load_run(own).events["rule"] == "resumed").sum() == 1


def test_a_training_that_resumes_without_a_run_of_its_own_begins_one(tmp_path: Path):
    out = tmp_path / "run"
    trained(tmp_path / "a", out, steps=2)
    one = sft_trainer(tmp_path / "b", max_steps=2, save_strategy="steps", save_steps=2)
    one.train()
    later = trained(tmp_path / "b", out, steps=4, resume=True)
    assert later == tmp_path / "run-2" and len(load_run(out).steps) == 2


def test_runs_that_begin_at_once_take_folders_of_their_own(tmp_path: Path):
    taken, errors, start = [], [], threading.Barrier(6)

    def begin() -> None:
        start.wait()
        try:
            folder, lock = claim_run_dir(tmp_path / "run")
            (folder / "run.json").write_text("{}")
            taken.append((folder, lock))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=begin) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and len({folder for folder, _ in taken}) == 6
    for _, lock in taken:
        lock.__exit__()


def test_a_folder_that_another_process_holds_is_left_to_it(tmp_path: Path):
    held = tmp_path / "run"
    held.mkdir()
    with RunLock(held):
        folder, lock = claim_run_dir(held)
    lock.__exit__()
    assert folder == tmp_path / "run-2"


def test_a_disk_that_is_full_is_one_sentence_and_leaves_nothing(tmp_path: Path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sharpscope.recording.recorded_run.create_run_info", full)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(sharpscope.errors.UserError, match="No space left on device"):
        sharpscope.record(model, optimizer, tokenizer=tokenizer(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rate", [5.0, 1e-3])
def test_a_learning_rate_above_one_and_no_standard_error(tmp_path: Path, monkeypatch, rate: float):
    monkeypatch.setattr("sys.stderr", None)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    recorder = sharpscope.record(model, optimizer, tokenizer=tokenizer(), out=tmp_path / "run")
    recorder.close()
    assert load_run(tmp_path / "run").config["optimizer"]["lr"] == rate

"""`record(trainer, steps=3)` and `on_finding`, on a Trainer whose collator forgets to mask padding from some step on."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import Trainer, TrainingArguments

import sharpscope
from experiments.zoo.bases import END, PAD, demonstrations, policy, untrained
from experiments.zoo.causes import padded
from sharpscope.causes import verdict
from sharpscope.traces import load_run

QUIET = {"recording": {"token_gradients_every": 0}, "critical_sharpness": False}


def trainer(folder, steps, fault_from=None):
    """A trainer of `steps` steps whose labels count padding from step `fault_from` on; None: never."""
    tokenizer, made = policy()[1], []

    def collate(rows):
        made.append(len(rows))
        texts = [row["prompt"] + row["completion"] for row in rows]
        ids = padded([[*tokenizer(text)["input_ids"], END] for text in texts])
        wrong = fault_from is not None and len(made) >= fault_from
        labels = ids.clone() if wrong else ids.masked_fill(ids == PAD, -100)
        return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        use_cpu=True,
        seed=0,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    return Trainer(
        model=untrained(0),
        processing_class=tokenizer,
        train_dataset=demonstrations(0, 48),
        data_collator=collate,
        args=arguments,
    )


def weights_after(folder, steps, fault_from=None):
    plain = trainer(folder, steps, fault_from)
    plain.train()
    return [p.detach().clone() for p in plain.model.parameters()]


def same(model, weights):
    pairs = list(zip(model.parameters(), weights, strict=True))
    return bool(pairs) and all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(("fault_from", "cause"), [(None, None), (2, "padding_in_loss")])
def test_three_steps_end_with_a_page(fault_from, cause, tmp_path, capsys):
    watched = trainer(tmp_path, 6, fault_from)
    recorder = sharpscope.record(watched, out=tmp_path / "run", steps=3, **QUIET)
    watched.train()
    run = load_run(recorder.run_dir)
    assert watched.state.global_step == 3 and run.steps["step"].tolist() == [1, 2, 3]
    found = verdict(run)
    page = capsys.readouterr().out
    checked, hold = map(int, re.search(r"(\d+) identities checked, (\d+) hold", page).groups())
    assert checked == len(found.results) >= 7
    assert checked - hold == len(found.violated) == sum(not r.holds for r in found.results)
    assert [one.name for one in found.causes[:1]] == ([cause] if cause else [])
    assert ("Padding counts in the loss" in page) == (cause is not None)
    assert (hold == checked) == (cause is None)
    assert same(watched.model, weights_after(tmp_path, 3, fault_from))


@pytest.mark.parametrize("fault_from", [1, 3])
def test_stop_ends_after_the_first_step_that_shows_it(fault_from, tmp_path):
    watched = trainer(tmp_path, 6, fault_from)
    sharpscope.record(watched, out=tmp_path / "run", on_finding="stop", **QUIET)
    with pytest.warns(UserWarning, match="Padding counts in the loss"):
        watched.train()
    assert watched.state.global_step == fault_from
    run = load_run(tmp_path / "run")
    assert len(run.steps) == fault_from and "Padding counts" in run.info["end"]
    assert same(watched.model, weights_after(tmp_path, fault_from, fault_from))


def test_a_function_is_called_once_and_changes_no_weight(tmp_path):
    seen = []
    watched = trainer(tmp_path, 4, 2)
    sharpscope.record(watched, out=tmp_path / "run", on_finding=seen.append, **QUIET)
    watched.train()
    assert [(one.name, one.step) for one in seen if one.name == "padding_in_loss"] == [
        ("padding_in_loss", 2)
    ]
    assert watched.state.global_step == 4
    assert same(watched.model, weights_after(tmp_path, 4, 2))

"""Probes of a model on anybody's texts."""

from __future__ import annotations

import json
import math

import pandas as pd
import pytest
import torch

from sharpscope.errors import UserError
from sharpscope.probes import ProbesSpec, read_rows


def test_data_files_are_read_and_mistakes_named(tmp_path):
    rows = [{"prompt": "1", "completion": "b", "reward": 1}, {"prompt": "a", "completion": "c", "truncated": True}]
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    found = read_rows(path)
    assert found[["prompt", "completion", "truncated"]].values.tolist() == [["1", "b", False], ["a", "c", True]]
    assert found["reward"].tolist() == [1.0, pytest.approx(math.nan, nan_ok=True)] and found["meta"].tolist() == [
        {},
        {},
    ]
    pd.DataFrame(rows[:1]).to_parquet(tmp_path / "d.parquet")
    pd.testing.assert_frame_equal(read_rows(tmp_path / "d.parquet"), found[:1])
    for text, message in (
        ("{", "cannot be read as jsonl"),
        ('{"prompt": "a"}', "row 1: needs the texts"),
        ("", "no rows"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            read_rows(path)
    with pytest.raises(UserError, match="no such file"):
        read_rows(tmp_path / "x.jsonl")


def test_texts_are_probed(tiny_policy):
    from sharpscope.policy import PolicySpec, load_policy
    from sharpscope.probes import run, text_batches

    policy = load_policy(PolicySpec(model=str(tiny_policy)))

    def frame(*rows):
        made = pd.DataFrame(rows, columns=["prompt", "completion", "reward"])
        return made.assign(truncated=False, meta=[{}] * len(rows))

    rows = frame(("What is it?", "one", 1.0), ("What is it?", "two words", 0.0), ("Why?", "so", 0.5))
    batches = text_batches(policy, rows, ("nll", "expected_failure"))
    found = [row for one in run(policy.model, batches, ProbesSpec(rho=0.1)) for row in one.estimates]
    loss = {row.functional: row.value for row in found if row.quantity == "loss"}
    assert loss["expected_failure"] == pytest.approx(0.5)
    total, count = 0.0, 0
    for row in rows.itertuples():
        prompt = policy.tokenizer(row.prompt)["input_ids"]
        completion = [*policy.tokenizer(row.completion, add_special_tokens=False)["input_ids"], policy.eos_ids[0]]
        logits = policy.model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0].detach().float()
        logp = torch.log_softmax(logits, -1)
        total -= sum(float(logp[len(prompt) - 1 + t, token]) for t, token in enumerate(completion))
        count += len(completion)
    assert loss["nll"] == pytest.approx(total / count, rel=1e-4)
    with pytest.raises(UserError, match="have no reward"):
        text_batches(policy, frame(("a", "b", None)), ("expected_failure",))
    with pytest.raises(UserError, match="context is"):
        text_batches(policy, frame(("a", "b " * 5000, 1.0)))

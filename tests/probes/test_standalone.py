"""Probes of a model on anybody's texts."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import torch

from sharpscope.errors import UserError
from sharpscope.probes import ProbesSpec, read_rows


def test_data_files_are_read_and_mistakes_named(tmp_path):
    rows = [{"prompt": "a", "completion": "b", "reward": 1}, {"prompt": "a", "completion": "c", "truncated": True}]
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    found = read_rows(path)
    assert [(r.prompt, r.completion, r.reward, r.truncated) for r in found] == [
        ("a", "b", 1.0, False),
        ("a", "c", None, True),
    ]
    pd.DataFrame(rows[:1]).to_parquet(tmp_path / "d.parquet")
    assert read_rows(tmp_path / "d.parquet")[0] == found[0]
    for text, message in (
        ("{", "line 1: not JSON"),
        ('{"prompt": "a"}', "row 1: needs the texts"),
        ("", "holds no rows"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            read_rows(path)
    path.write_text('{"prompt": "a", "completion": "b", "reward": NaN}')
    with pytest.raises(UserError, match="not a finite number"):
        read_rows(path)
    with pytest.raises(UserError, match="no such file"):
        read_rows(tmp_path / "x.jsonl")
    (tmp_path / "d.csv").write_text("a,b")
    with pytest.raises(UserError, match=r"ends in '\.csv'"):
        read_rows(tmp_path / "d.csv")


def test_texts_are_probed(tiny_policy):
    from sharpscope.policy import PolicySpec, load_policy
    from sharpscope.probes import DataRow, run, text_batches

    policy = load_policy(PolicySpec(model=str(tiny_policy)))
    rows = [DataRow("What is it?", "one", 1.0), DataRow("What is it?", "two words", 0.0), DataRow("Why?", "so", 0.5)]
    batches = text_batches(policy, rows, ("nll", "expected_failure"))
    found = [row for one in run(policy.model, batches, ProbesSpec(rho=0.1)) for row in one.estimates]
    loss = {row.functional: row.value for row in found if row.quantity == "loss"}
    assert loss["expected_failure"] == pytest.approx(0.5)
    total, count = 0.0, 0
    for row in rows:
        prompt = policy.tokenizer(row.prompt)["input_ids"]
        completion = [*policy.tokenizer(row.completion, add_special_tokens=False)["input_ids"], policy.eos_ids[0]]
        logits = policy.model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0].detach().float()
        logp = torch.log_softmax(logits, -1)
        total -= sum(float(logp[len(prompt) - 1 + t, token]) for t, token in enumerate(completion))
        count += len(completion)
    assert loss["nll"] == pytest.approx(total / count, rel=1e-4)
    with pytest.raises(UserError, match="have no reward"):
        text_batches(policy, [DataRow("a", "b")], ("expected_failure",))
    with pytest.raises(UserError, match="context is"):
        text_batches(policy, [DataRow("a", "b " * 5000)])

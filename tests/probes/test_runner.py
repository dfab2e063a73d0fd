"""A round of probes leaves no trace, one failing measure leaves the others, and nothing unreliable goes unsaid; texts."""

from __future__ import annotations

import json
import math

import pandas as pd
import pytest
import torch

from sharpscope.errors import UserError
from sharpscope.policy import PolicySpec, load_policy
from sharpscope.probes import (
    ProbeBatch,
    ProbesSpec,
    choose_radius,
    problems,
    read_rows,
    run,
    runner,
    text_batches,
)
from sharpscope.probes.language_model import Objective, completion_batch, token_batch
from tests.models import random_batch, tiny_model
from tests.oracles.token_gradients import row_logp
from tests.probes.test_self_check import assert_same, disturbed, snapshot

SPEC = ProbesSpec(preset="standard", curvature_prompts=3, rho=0.05)


def objective(batch, name: str = "expected_failure") -> Objective:
    tokens = token_batch(batch["input_ids"], batch["attention_mask"], batch["mask"])
    return Objective(name, tokens)


def probed(model, given: Objective, spec: ProbesSpec = SPEC, **options):
    return [*run(model, [ProbeBatch("x", (given,))], spec, **options)]


def rows_of(results):
    return {row.quantity: row for one in results for row in one.estimates}


@pytest.mark.parametrize("nth", [1, 2, 5, 20])
def test_everything_is_as_before_whatever_stops_a_round(nth):
    """The model's last norm is interrupted at its nth call: in the anchors, the graph, at a moved place, …"""
    model, batch = disturbed("qwen2"), random_batch()
    inner, calls = model.model.norm.forward, 0

    def forward(x):
        nonlocal calls
        calls += 1
        if calls == nth:
            raise KeyboardInterrupt
        return inner(x)

    model.model.norm.forward = forward
    before = snapshot(model)
    with pytest.raises(KeyboardInterrupt):
        probed(model, objective(batch))
    assert calls == nth
    assert_same(before, snapshot(model))
    model.model.norm.forward = inner
    probed(model, objective(batch))
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("error", [UserError("rho: below the resolution"), RuntimeError("not enough memory")])
def test_a_measure_that_fails_leaves_the_others_and_says_why(monkeypatch, error):
    model, batch = tiny_model("qwen2", dtype=torch.float32), random_batch()
    inner = runner.sharpness

    def failing(surface, parameters, rho, kind, **options):
        if kind == "asam":
            raise error
        return inner(surface, parameters, rho, kind, **options)

    monkeypatch.setattr(runner, "sharpness", failing)
    rows = rows_of(probed(model, objective(batch, "nll")))
    assert math.isnan(rows["asam"].value) and rows["asam"].why == f"left out: {error}"
    good = {"loss", "gradient_norm", "sam", "largest", "trace"}
    assert all(math.isfinite(rows[name].value) for name in good)
    assert any("nll asam" in line for line in problems(rows.values()))


@pytest.mark.parametrize("name", ["expected_failure", "nll"])
def test_the_radius_is_chosen_once_on_the_model_at_hand(name):
    model, batch = tiny_model("qwen2", dtype=torch.float32), random_batch()
    spec = SPEC.model_copy(update={"rho": "auto", "kinds": ("sam",), "curvature_prompts": 0})
    given = objective(batch, name)
    results = probed(model, given, spec)
    rows, radius = rows_of(results), results[-1].radius
    assert 0.05 <= radius.saturation <= 0.3 and radius.evaluations >= 1
    assert rows["radius"].value == radius.rho == rows["sam"].rho
    if name == "expected_failure":
        assert rows["sam"].saturation == pytest.approx(radius.saturation, rel=1e-3)
    else:  # texts count as successes
        assert math.isnan(rows["sam"].saturation)
    again = probed(model, given, spec, radius=radius)
    assert "radius" not in rows_of(again) and rows_of(again)["sam"].value == rows["sam"].value
    assert choose_radius(model, ProbeBatch("x", (given,)), SPEC).rho == 0.05


def test_without_a_correct_completion_there_is_no_radius_and_the_rest_is_measured():
    texts = [([5, 6], [7, 8]), ([5, 6], [9])]
    given = Objective("expected_failure", completion_batch(texts, reward=torch.zeros(2)))
    rows = rows_of(probed(tiny_model("qwen2"), given, SPEC.model_copy(update={"rho": "auto", "curvature_prompts": 0})))
    assert "no completion is correct" in rows["radius"].why and "sam" not in rows and rows["loss"].value == 1


def test_a_model_that_is_not_finite_gives_reasons_for_every_missing_number():
    model, batch = tiny_model("qwen2", dtype=torch.float32), random_batch()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = math.nan
    rows = rows_of(probed(model, objective(batch, "nll")))
    missing = [row for row in rows.values() if math.isnan(row.value)]
    assert {row.quantity for row in missing} >= {"gradient_norm", "largest", "trace", "sam", "asam"}
    assert not any(row.converged for row in missing) and all(row.why for row in missing)
    assert len(problems(rows.values())) >= len(missing)


def test_data_files_are_read_and_mistakes_named(tmp_path):
    rows = [{"prompt": "1", "completion": "b", "reward": 1}, {"prompt": "a", "completion": "c", "truncated": True}]
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    found = read_rows(path)
    assert found[["prompt", "completion", "truncated"]].values.tolist() == [["1", "b", False], ["a", "c", True]]
    assert found["reward"][0] == 1 and math.isnan(found["reward"][1]) and found["meta"].tolist() == [{}, {}]
    pd.DataFrame(rows[:1]).to_parquet(tmp_path / "d.parquet")
    pd.testing.assert_frame_equal(read_rows(tmp_path / "d.parquet"), found[:1])
    for text, message in (("{", "cannot be read"), ('{"prompt": "a"}', "row 1: needs the texts"), ("", "no rows")):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            read_rows(path)
    with pytest.raises(UserError, match="no such file"):
        read_rows(tmp_path / "x.jsonl")


def test_texts_are_probed(tiny_policy):
    policy = load_policy(PolicySpec(model=str(tiny_policy)))

    def frame(*rows):
        made = pd.DataFrame(rows, columns=["prompt", "completion", "reward"])
        return made.assign(truncated=False, meta=[{}] * len(rows))

    rows = frame(("What is it?", "one", 1.0), ("What is it?", "two words", 0.0), ("Why?", "so", 0.5))
    batches = text_batches(policy, rows, ("nll", "expected_failure"))
    found = [row for one in run(policy.model, batches, ProbesSpec(rho=0.1)) for row in one.estimates]
    loss = {row.functional: row.value for row in found if row.quantity == "loss"}
    assert loss["expected_failure"] == pytest.approx(0.5)
    logp = []
    for row in rows.itertuples():
        prompt = policy.tokenizer(row.prompt)["input_ids"]
        completion = [*policy.tokenizer(row.completion, add_special_tokens=False)["input_ids"], policy.eos_ids[0]]
        logp.append(row_logp(policy.model, (prompt, completion)))
    assert loss["nll"] == pytest.approx(-torch.cat(logp).mean().item(), rel=1e-4)
    with pytest.raises(UserError, match="have no reward"):
        text_batches(policy, frame(("a", "b", None)), ("expected_failure",))
    with pytest.raises(UserError, match="context is"):
        text_batches(policy, frame(("a", "b " * 5000, 1.0)))

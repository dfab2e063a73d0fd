"""Identities while a training goes on: once, at the first step that shows a cause (docs/causes.md)."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import sharpscope
from sharpscope.causes import verdict
from sharpscope.errors import UserError
from sharpscope.packaged import data_path
from sharpscope.recording.live import TrainingStoppedError, frame_of
from sharpscope.traces import load_run

POLICY = data_path("policies", "math")


def train(
    out, steps=3, wrong=1.0, old=None, half="", spoil=None, optimizer=torch.optim.AdamW, **options
):
    """A loop over two prompts with four fixed completions each; the policy term is times `wrong`.

    `spoil` changes the model at step 2; `half`: float16 by "weights" or "autocast".
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(POLICY)
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    optimizer = optimizer(model.parameters(), lr=1e-4)
    prompts = tokenizer(["3 + 4 = ?\n"] * 8 + ["5 + 4 = ?\n"] * 8, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        ids = model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            max_new_tokens=12,
            min_new_tokens=12,
            top_k=0,
            pad_token_id=0,
        )
    mask = torch.zeros_like(ids)
    mask[:, prompts.shape[1] :] = 1
    advantages = torch.tensor([1.0, -1.0] * 8)
    recorder = sharpscope.record(
        model,
        optimizer,
        tokenizer=tokenizer,
        out=out,
        steps=steps,
        critical_sharpness=False,
        recording={"token_gradients_every": 0},
        **options,
    )
    if half == "weights":
        model.half()
    for step in range(1, steps + 1):
        if spoil is not None and step == 2:
            spoil(model)
        with torch.autocast("cpu", torch.float16, enabled=half == "autocast"):
            logits = model(input_ids=ids).logits
        logp = logits[:, :-1].float().log_softmax(-1)
        logp = logp.gather(2, ids[:, 1:, None])[..., 0]
        before = logp.detach().clone() if old is None else old(logp.detach().clone(), mask[:, 1:])
        groups = torch.arange(16) // 8
        recorder.tokens(logp, ids, mask, old_logp=before, advantages=advantages, groups=groups)
        surrogate = (logp - before).exp() * advantages[:, None]
        loss = -wrong * (surrogate * mask[:, 1:]).sum() / mask.sum()
        loss.backward()
        recorder.step(loss)
        optimizer.step()
        optimizer.zero_grad()
    recorder.close()
    return recorder


def found_by(recorder):
    return [cause.name for cause in verdict(load_run(recorder.run_dir)).causes]


def test_a_function_gets_the_cause_once_at_the_first_step(tmp_path):
    seen = []
    recorder = train(tmp_path / "run", wrong=-1.0, on_finding=seen.append)
    assert [cause.name for cause in seen].count("advantage_sign") == 1
    assert recorder.live.found["advantage_sign"].step == 1
    events = load_run(recorder.run_dir).events
    told = events[(events["rule"] == "cause") & events["message"].str.contains("advantage")]
    assert told["step"].tolist() == [1]
    assert "advantage_sign" in found_by(recorder)


def test_warn_warns_and_stop_ends_the_loop(tmp_path):
    with pytest.warns(UserWarning, match="pushes against the advantage"):
        train(tmp_path / "a", wrong=-1.0, on_finding="warn")
    with (
        pytest.warns(UserWarning, match="advantage"),
        pytest.raises(TrainingStoppedError, match="advantage"),
    ):
        train(tmp_path / "b", wrong=-1.0, on_finding="stop")
    run = load_run(tmp_path / "b")
    assert len(run.steps) == 1 and run.status == "interrupted"


def test_the_live_check_sees_what_the_written_run_has(tmp_path):
    recorder = train(tmp_path / "run", on_finding=lambda _: None)
    live = recorder.live.recorded()
    written = load_run(recorder.run_dir)
    tokens = written.tokens(columns=["step", "logp", "loss_coef"])
    assert len(tokens) == len(live.tokens) > 500
    for name in ("logp", "loss_coef"):
        np.testing.assert_allclose(live.tokens[name].astype(float), tokens[name], rtol=1e-6)
    assert live.updates["update_norm"].tolist() == pytest.approx(written.updates["update_norm"])


def test_the_weights_are_the_same_with_and_without_the_check(tmp_path):
    one = train(tmp_path / "a")
    other = train(tmp_path / "b", on_finding=lambda _: None)
    pairs = list(zip(one.model.parameters(), other.model.parameters(), strict=True))
    assert pairs and all(torch.equal(a, b) for a, b in pairs)


def test_an_infinite_value_at_a_masked_position_is_named(tmp_path):
    def spoiled(logp, mask):
        return logp.masked_fill(mask == 0, -math.inf)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorder = train(tmp_path / "run", steps=1, old=spoiled)
    run = load_run(recorder.run_dir)
    told = run.events[run.events["rule"] == "not_finite"]
    assert len(told) == 1 and told["step"].tolist() == [1]
    text = told["message"].iloc[0]
    assert text.startswith("old_logp is -inf at 48 masked positions (first: micro-batch 0, row 0")
    assert found_by(recorder) == ["masked_inf"]


def large_layer(model):
    with torch.no_grad():
        weight = model.model.layers[1].mlp.up_proj.weight
        weight.mul_(30_000 / weight.abs().max())


def large_scores(model):
    model.set_attn_implementation("eager")  # others keep scores in float32
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight.mul_(1000 / projection.weight.abs().max())


@pytest.mark.parametrize("half", ["weights", "autocast"])
@pytest.mark.parametrize(
    ("spoil", "where"),
    [
        (large_layer, "model.layers.1.mlp.up_proj (Linear) gives a value that is not finite"),
        (large_scores, "what enters model.layers.1.self_attn.o_proj (Linear) is not finite"),
    ],
)
def test_float16_overflow_is_named_from_a_training(half, spoil, where, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorder = train(tmp_path / "run", half=half, spoil=spoil, optimizer=torch.optim.SGD)
    run = load_run(recorder.run_dir)
    told = run.events[run.events["rule"] == "not_finite"]
    assert told["step"].tolist() == [2]
    text = told["message"].iloc[0]
    assert text.startswith("micro-batch 0: float16 overflow") and where in text
    assert ("under float16 autocast" in text) == (half == "autocast")
    assert found_by(recorder)[:1] == ["float16_overflow"]


def test_on_finding_is_checked_before_anything_is_made(tmp_path):
    with pytest.raises(UserError, match="on_finding = 'loud'"):
        train(tmp_path / "run", on_finding="loud")
    assert not (tmp_path / "run").exists()


def test_columns_become_a_frame():
    masked = np.ma.masked_array([1, 2], mask=[False, True])
    frame = frame_of({"step": 3, "x": torch.tensor([1.0, 2.0]), "y": masked, "z": None})
    assert frame["step"].tolist() == [3, 3] and frame["x"].tolist() == [1.0, 2.0]
    assert frame["y"].iloc[0] == 1 and math.isnan(frame["y"].iloc[1])
    assert frame_of({"step": 1, "loss": 0.5}).shape == (1, 2)

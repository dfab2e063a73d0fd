"""Whole runs as large models need them: every architecture, bfloat16, adapters, recomputed layers, cut groups, chat templates."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import sharpscope
from sharpscope.policy import PolicySpec, load_policy
from sharpscope.traces import update_run_info
from sharpscope.training import evaluate_model, train
from sharpscope.training.checkpoint import checkpoints
from tests.models import ARCHITECTURES, tiny_model

SHORT = {
    "steps": 2,
    "evaluation__every": 0,
    "recording__token_gradients_every": 1,
    "recording__exact_tokens": 2,
    "seed": 1,
}


def saved(architecture, tiny_policy, folder):
    """A tiny float32 model of an architecture on disk, with the byte-level tokenizer of the toy policy."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy)
    model = tiny_model(architecture, vocab=len(tokenizer), dtype=torch.float32)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_every_architecture_trains_from_disk_with_recording_on(architecture, tiny_policy, toy_config, tmp_path):
    model = saved(architecture, tiny_policy, tmp_path / "model")
    run = sharpscope.load_run(train(toy_config(policy__model=model, **SHORT)).run_dir)
    assert run.info["status"] == "finished"
    tokens = run.tokens()
    assert (run.steps["grad_norm"] > 0).all() and (run.steps["update_norm"] > 0).all()
    refused = "moe" in architecture  # norms of trained experts
    assert (tokens["score_norm_local"].isna() if refused else tokens["score_norm_local"] > 0).all()
    shares = tokens.groupby("step")["attribution"].sum()
    np.testing.assert_allclose(shares, 1.0, atol=2e-3)
    exact = tokens.dropna(subset=["score_norm"])
    assert (
        len(exact) == (0 if refused else 8) and (exact["score_norm"] >= 0.99 * exact["head_grad_norm"].fillna(0)).all()
    )
    again = AutoModelForCausalLM.from_pretrained(checkpoints(run.path)[-1])
    assert any(
        not torch.equal(a, b)
        for a, b in zip(again.parameters(), load_policy(PolicySpec(model=model)).model.parameters(), strict=True)
    )


def test_recomputed_layers_and_cut_groups_change_nothing(toy_config):
    frugal = {"update__gradient_checkpointing": True, "update__microbatch_tokens": 64}
    given = {"policy__dtype": "float64", "steps": 2, "evaluation__every": 0}
    configs = toy_config(name="plain", **given), toy_config(name="frugal", **given, **frugal)
    one, two = (sharpscope.load_run(train(config).run_dir) for config in configs)
    pd.testing.assert_series_equal(one.steps["grad_norm"], two.steps["grad_norm"], rtol=1e-9)
    columns = ["token_id", "logp", "loss_coef", "score_norm_local"]
    pd.testing.assert_frame_equal(one.tokens(columns=columns[:3]), two.tokens(columns=columns[:3]), rtol=1e-6)


def test_bfloat16_trains_float32_weights_and_records(toy_config):
    config = toy_config(
        policy__dtype="bfloat16", steps=2, recording__token_gradients_every=1, evaluation__every=0, optimizer__lr=1e-5
    )
    before = load_policy(config.policy).model.state_dict()
    run = sharpscope.load_run(train(config).run_dir)
    after = AutoModelForCausalLM.from_pretrained(checkpoints(run.path)[-1]).state_dict()
    moved = torch.cat([(after[name] - before[name]).flatten() for name in after])
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    # Two steps of AdamW move a weight by at most 2e-5: far below what bfloat16 weights of this size would keep.
    assert 0 < float(moved.abs().max()) < 3e-5 and float((moved != 0).double().mean()) > 0.5
    tokens = run.tokens()
    gap = (tokens["logp"] - tokens["behavior_logp"]).abs()
    assert gap.max() < 0.2  # sampler and trainer round differently, in bfloat16
    # Shares along the gradient that was computed in bfloat16, of log-probabilities in float32: one up to that rounding.
    assert tokens.groupby("step")["attribution"].sum().between(0.9, 1.1).all()


ADAPTED = {"policy__lora": {"r": 2, "alpha": 4.0}, "method__kl__coef": 0.05, "evaluation__every": 0}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_train_with_recording_and_resume_exactly(toy_config, dtype):
    changes = ADAPTED | {"recording__token_gradients_every": 1, "recording__exact_tokens": 2, "policy__dtype": dtype}
    whole = toy_config(name="whole", steps=4, **changes, checkpoint__every=2)
    run = sharpscope.load_run(train(whole).run_dir)
    assert 0 < run.info["trainable_parameters"] < run.info["parameters"] / 2
    assert run.steps["kl"].iloc[0] == pytest.approx(0, abs=1e-6) and run.steps["kl"].iloc[-1] > 0
    tokens = run.tokens()
    assert tokens["score_norm_local"].gt(0).any()
    shares = tokens.groupby("step")["attribution"].sum()
    np.testing.assert_allclose(shares, 1, atol=0.002 if dtype == "float32" else 0.1)
    folder = checkpoints(run.path)[-1]
    assert (folder / "adapter_model.safetensors").exists() and not (folder / "model.safetensors").exists()
    shutil.rmtree(folder.with_name("step-000004"))
    update_run_info(whole.run_dir, status="interrupted")
    train(whole, resume=True)
    columns = ["logp", "loss_coef", "attribution"]
    again = sharpscope.load_run(run.path).tokens(columns=columns)
    pd.testing.assert_frame_equal(again, tokens[columns], check_exact=True)


def test_saved_adapters_load_with_transformers_and_peft_and_are_evaluated(toy_config, tiny_policy):
    run_dir = train(toy_config(steps=2, **ADAPTED)).run_dir
    folder = checkpoints(run_dir)[-1]
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tiny_policy)
    ids = torch.tensor([[5, 6, 7, 8]])
    ours = load_policy(PolicySpec(model=str(folder))).model(ids).logits
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits
    by_hand = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_policy), folder).eval()(ids).logits
    plain = AutoModelForCausalLM.from_pretrained(tiny_policy).eval()(ids).logits
    assert torch.allclose(ours, theirs, atol=1e-5) and torch.allclose(ours, by_hand, atol=1e-5)
    assert not torch.allclose(ours, plain, atol=1e-4)
    rows = evaluate_model(str(run_dir), splits=("heldout",), temperatures=(0.0,), prompts=2)
    assert rows and rows[0]["step"] == 2

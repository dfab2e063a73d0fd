"""Demonstrations are true, the warm start learns and comes back the same from the same seed, Muon does what it says."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sharpscope.errors import UserError
from sharpscope.policy.embedded import load_tokenizer
from sharpscope.warm_start.__main__ import main
from sharpscope.warm_start.pretraining import Row, WarmStartSpec, _accumulate, schedule, warm_start
from tests.models import tiny_model

TINY = WarmStartSpec(
    layers=2,
    width=32,
    feed_forward=48,
    heads=2,
    vocabulary=600,
    corpus=60,
    weights={2: 0.5, 3: 0.5},
    questions=20,
    steps=25,
    batch=8,
    micro_tokens=300,
    lr=2e-2,
    muon_lr=0.05,
    warmup=5,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    reports = []
    folder = tmp_path_factory.mktemp("policy") / "new"
    summary = warm_start(TINY, folder, lambda *report: reports.append(report))
    return folder, summary, reports


def test_the_loss_falls(made):
    _, summary, reports = made
    assert reports == [(25, summary["loss"])]
    assert 0 < summary["loss"] < 5  # the mean over all updates; ln of the vocabulary of 600 is 6.4


def test_what_is_written_loads_and_says_how_it_was_made(made):
    folder, summary, _ = made
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "qwen2"
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "warm_start.json",
    ]
    written = json.loads((folder / "warm_start.json").read_text())
    assert written["spec"] == json.loads(json.dumps(asdict(TINY)))
    assert written["parameters"] == model.num_parameters() == summary["parameters"]
    tokenizer = load_tokenizer(folder)
    text = "Ava is a knight ≠ 漢字 🙂 <think>x</think>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_the_same_seed_gives_the_same_weights_bit_for_bit(made, tmp_path):
    folder, _, _ = made
    again = tmp_path / "again"
    warm_start(TINY, again)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert (again / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    other = tmp_path / "other"
    warm_start(replace(TINY, seed=1, steps=1), other)
    assert (other / "tokenizer.json").read_bytes() != (folder / "tokenizer.json").read_bytes()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        warm_start(TINY, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("weights", [{}, {1: 1.0}, {8: 1.0}, {3: -1.0}, {3: 0.0}])
def test_impossible_sizes_are_refused(weights):
    with pytest.raises(UserError, match="give shares of at least 0, one above 0, of 2, 3, 4, 5, 6, 7"):
        WarmStartSpec(weights=weights)


def test_the_gradient_is_that_of_the_mean_loss_however_the_batch_is_cut():
    rows = [
        Row([5, 6, 7], [8, 9, 1], [1, 1, 1]),
        Row([5], [6, 1], [1, 1]),
        Row([9, 8, 7, 6], [5, 1], [1, 1]),
        Row([3, 4], [10, 11, 12, 13, 1], [1, 0, 0, 1, 1]),  # 11 and 12 are what an environment said
    ]
    model = tiny_model("qwen2")
    tokens = wanted = 0
    for row in rows:  # one row at a time, no padding
        ids = torch.tensor([row.prompt + row.completion])
        logp = model(ids).logits[0].log_softmax(-1)
        for place in range(len(row.prompt), ids.shape[1]):
            if not row.mask[place - len(row.prompt)]:
                continue
            wanted = wanted - logp[place - 1, ids[0, place]]
            tokens += 1
    (wanted / tokens).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    for most in (1, 12, 100):
        model.zero_grad()
        assert _accumulate(model, rows, most) == pytest.approx(float(wanted.detach() / tokens), rel=1e-12)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-12)


def test_the_schedule_rises_stays_and_falls():
    spec = WarmStartSpec(steps=100, warmup=10, cooldown=0.5)
    shares = [schedule(step, spec) for step in range(1, 101)]
    assert shares[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert set(shares[10:50]) == {1.0}
    assert shares[50:] == pytest.approx([(100 - step) / 50 for step in range(50, 100)])
    assert schedule(1, WarmStartSpec(warmup=0, cooldown=0.0)) == 1.0


def test_the_command(tmp_path, capsys):
    settings = asdict(TINY) | {"steps": 5}
    sets = [part for name, value in settings.items() if name != "policy" for part in ("--set", f"{name}={value}")]
    main(["knights_knaves", "--out", str(tmp_path / "new"), "--threads", "1", *sets])
    assert "update 5 of 5: loss " in capsys.readouterr().out
    for wrong in ("step=3", "steps=many", "weights=3"):
        with pytest.raises(UserError, match=f"--set {wrong}"):
            main(["--set", wrong])

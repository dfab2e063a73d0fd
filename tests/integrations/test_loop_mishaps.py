"""Loops in which an update does not come, several optimizers make it, or its weights are of low precision."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import sharpscope
from sharpscope.recording.checks import Circumstances, reason_of_sum
from sharpscope.traces import load_run
from tests.integrations.trainers import sft_trainer, small_model, tokenizer, trainer

EVERY = {"recording": {"token_gradients_every": 1}, "critical_sharpness": False}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(2, 37, (4, 6), generator=torch.Generator().manual_seed(step))
    mask = torch.zeros_like(ids)
    mask[:, 3:] = 1
    return ids, mask


def told(model, recorder, step: int) -> torch.Tensor:
    """The loss of a batch whose tokens the recorder is told of, after `backward`."""
    ids, mask = batch(step)
    logp = model(ids).logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    recorder.tokens(logp, ids, mask)
    loss = -(logp * mask[:, 1:]).sum() / mask.sum()
    loss.backward()
    return loss


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


@pytest.mark.parametrize("period", [1, 2])
def test_tokens_of_an_update_that_was_not_made_are_in_no_update(tmp_path: Path, period: int):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    options = EVERY | {"tokenizer": tokenizer(), "updates_per_step": period}
    with sharpscope.record(model, optimizer, out=tmp_path / "run", **options) as recorder:
        for step in range(6):
            recorder.step(told(model, recorder, step))
            if step not in (1, 3):  # a guard on the gradient, or an overflow
                optimizer.step()
            optimizer.zero_grad()
    run = load_run(tmp_path / "run")
    assert run.status == "finished" and len(run.updates) == 4
    assert (run.events["rule"] == "skipped_update").sum() == 2
    assert set(run.updates["tokens"]) == {12}
    tokens = run.tokens().dropna(subset=["update"])
    shares = tokens.groupby(["step", "update"])["attribution"].sum()
    assert len(shares) == 4
    np.testing.assert_allclose(shares, 1.0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_update_norm_is_that_of_the_change_of_the_weights(tmp_path: Path, dtype):
    """At a learning rate at which most changes are rounded away in bfloat16."""
    model = small_model().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    sizes = []
    options = {"tokenizer": tokenizer(), "critical_sharpness": False}
    options["recording"] = {"token_gradients_every": 0}
    with sharpscope.record(model, optimizer, out=tmp_path / "run", **options) as recorder:
        for step in range(2):
            recorder.step(told(model, recorder, step))
            before = weights(model)
            optimizer.step()
            optimizer.zero_grad()
            sizes.append(float((weights(model) - before).norm()))
    assert min(sizes) > 0
    np.testing.assert_allclose(load_run(tmp_path / "run").updates["update_norm"], sizes, rtol=2e-2)


def test_two_optimizers_make_one_update(tmp_path: Path):
    model = small_model()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    pair = [torch.optim.AdamW(matrices, lr=1e-2), torch.optim.SGD(others, lr=1.0)]
    sizes = []
    options = EVERY | {"tokenizer": tokenizer()}
    with sharpscope.record(model, pair, out=tmp_path / "run", **options) as recorder:
        for step in range(3):
            recorder.step(told(model, recorder, step))
            before = weights(model)
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
            sizes.append(float((weights(model) - before).norm()))
    run = load_run(tmp_path / "run")
    np.testing.assert_allclose(run.updates["update_norm"], sizes, rtol=1e-5)
    assert len(run.steps) == 3 and "unheld" not in set(run.events["rule"])


def test_parameters_that_no_optimizer_holds_are_named(tmp_path: Path):
    model = small_model()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.ndim > 1], lr=1e-2)
    options = EVERY | {"tokenizer": tokenizer()}
    with sharpscope.record(model, optimizer, out=tmp_path / "run", **options) as recorder:
        recorder.step(told(model, recorder, 0))
        optimizer.step()
    events = load_run(tmp_path / "run").events
    (event,) = events[events["rule"] == "unheld"].to_dict("records")
    assert "norm" in event["message"]


def test_a_value_head_and_layers_that_are_unfrozen_on_the_way(tmp_path: Path):
    model, head = small_model(), torch.nn.Linear(16, 1)
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad_(False)
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    options = EVERY | {"tokenizer": tokenizer()}
    with sharpscope.record(model, optimizer, out=tmp_path / "run", **options) as recorder:
        for step in range(4):
            if step == 2:
                model.requires_grad_(True)
            recorder.step(told(model, recorder, step))
            head(torch.ones(1, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = load_run(tmp_path / "run")
    layers = [set(json.loads(row)) for row in run.updates["update_norm_by_layer"]]
    assert len(layers) == 4
    assert not any(name.startswith("0.") for name in layers[1])
    assert any(name.startswith("0.") for name in layers[2])


@pytest.mark.may_stop
def test_a_step_that_the_recorder_was_not_told_of_and_a_closure_are_named(tmp_path: Path):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    options = {"tokenizer": tokenizer()}
    recorder = sharpscope.record(model, optimizer, out=tmp_path / "run", **options)
    told(model, recorder, 0)
    with pytest.warns(UserWarning, match=r"without recorder\.step\(loss\)"):
        optimizer.step()
    recorder.close()
    recorder = sharpscope.record(model, optimizer, out=tmp_path / "run", **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = told(model, recorder, 0)
        recorder.step(loss)
        return loss

    with pytest.warns(UserWarning, match=r"optimizer\.step\(closure\) computes the gradient"):
        optimizer.step(closure)
    recorder.close()


@pytest.mark.may_stop
def test_where_warnings_are_errors_a_recorder_that_stops_ends_no_training(
    tmp_path: Path, capsys, monkeypatch
):
    def broken(*_: object) -> None:
        raise RuntimeError("a fault of the recorder")

    one = sft_trainer(tmp_path / "t", max_steps=2)
    recorder = sharpscope.record(one, out=tmp_path / "run")
    monkeypatch.setattr(recorder, "gradient_done", broken)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning, message="sharpscope")
        one.train()
    assert one.state.global_step == 2
    assert "stopped recording at step 1 (RuntimeError: a fault" in capsys.readouterr().err


def test_an_empty_text_is_recorded_with_the_others(tmp_path: Path):
    from datasets import Dataset
    from trl import SFTTrainer

    class WithEmpty(SFTTrainer):
        """The first row of each batch has no token."""

        def compute_loss(self, model, inputs, *args, **named):
            inputs["attention_mask"][0], inputs["labels"][0] = 0, -100
            return super().compute_loss(model, inputs, *args, **named)

    plain = sft_trainer(tmp_path / "t", max_steps=2)
    one = WithEmpty(
        model=small_model(),
        args=plain.args,
        processing_class=tokenizer(),
        train_dataset=Dataset.from_dict(
            {"prompt": ["w2", "w3"] * 4, "completion": [" w4 w5", " w6"] * 4}
        ),
    )
    sharpscope.record(one, out=tmp_path / "run", **EVERY)
    one.train()
    run = load_run(tmp_path / "run")
    assert run.status == "finished" and len(run.steps) == 2
    assert (run.rollouts["length"] == 0).sum() == 4 and (run.rollouts["length"] > 0).any()


def test_sys_exit_in_the_middle_is_no_finished_run(tmp_path: Path):
    script = f"""
import sys, torch, sharpscope
from tests.integrations.test_loop_mishaps import told
from tests.integrations.trainers import small_model, tokenizer
model = small_model()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
recorder = sharpscope.record(
    model, optimizer, tokenizer=tokenizer(), out={str(tmp_path / "run")!r}, steps=3)
recorder.step(told(model, recorder, 0))
optimizer.step()
sys.exit(3)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2], check=False
    )
    run = load_run(tmp_path / "run")
    assert done.returncode == 3 and run.status == "interrupted"
    assert run.info["end"] == "the process ended after 1 of 3 steps"


def test_a_subclass_with_a_loss_of_its_own_has_unknown_ratios(tmp_path: Path):
    from trl import GRPOTrainer

    class Own(GRPOTrainer):
        """A loss that clips in another way."""

        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs)

    one = trainer(tmp_path / "t", kind=Own, num_iterations=2, max_steps=2)
    sharpscope.record(one, out=tmp_path / "run", **EVERY)
    one.train()
    run = load_run(tmp_path / "run")
    assert len(run.tokens()) and run.tokens()["ratio"].isna().all()
    assert run.tokens()["loss_coef"].notna().all() and "unknown" in " ".join(run.info["notes"])


def looped(folder: Path, *, scale: float = 1.0, fault: str = "") -> sharpscope.Run:
    """A recorded loop of three updates with a fault in it; a `scale` of the loss is taken away before or after `step`."""
    model = small_model()
    held = list(model.parameters())
    optimizer = torch.optim.SGD(held[3:] if fault == "unheld" else held, lr=1e-2)
    with sharpscope.record(
        model, optimizer, out=folder, tokenizer=tokenizer(), **EVERY
    ) as recorder:
        for step in range(3):
            ids, mask = batch(step)
            logits = model(ids).logits[:, :-1].log_softmax(-1)
            logp = logits.gather(-1, ids[:, 1:, None])[..., 0]
            for _ in range(1 + (fault == "twice")):
                recorder.tokens(logp, ids, mask)
            loss = -(logp * mask[:, 1:]).sum() / mask.sum()
            if fault == "penalty":
                loss = loss + 0.05 * sum(p.square().sum() for p in held)
            (scale * loss).backward()
            if fault == "clipped":
                torch.nn.utils.clip_grad_norm_(held, 0.37)
            if fault == "unscaled before":
                for p in held:
                    p.grad /= scale
            recorder.step(loss)
            if fault == "unscaled after":
                for p in held:
                    p.grad /= scale
            optimizer.step()
            optimizer.zero_grad()
    return load_run(folder)


@pytest.mark.parametrize(
    ("fault", "scale", "reason"),
    [
        ("clipped", 1.0, "was clipped before the recorder saw it (its norm is 0.37)"),
        ("unscaled before", 1024.0, "multiplied by 1024 in backward"),
        ("unheld", 1.0, "parameters that no optimizer holds have the gradients of earlier updates"),
        ("penalty", 1.0, "terms that no token's log-probability has"),
    ],
)
def test_reasons_of_a_wrong_sum_are_told_apart(
    fault: str, scale: float, reason: str, tmp_path: Path
):
    events = looped(tmp_path / "run", scale=scale, fault=fault).events
    told = events[events["rule"] == "attribution_sum"]
    assert len(told) and reason in told["message"].iloc[-1]


def test_rounding_is_told_from_a_penalty():
    known = Circumstances(model=small_model().bfloat16(), norms=[0.7])
    shares = torch.tensor([40.0, -38.9])  # of both signs, each rounded
    assert "rounding of 0.0078" in reason_of_sum(shares, 0, known)
    assert "terms that no token" in reason_of_sum(torch.tensor([0.8, 0.4]), 0, known)


@pytest.mark.parametrize(("fault", "scale"), [("twice", 1.0), ("unscaled after", 4096.0)])
def test_a_second_call_and_a_scaled_loss_change_no_number(fault: str, scale: float, tmp_path: Path):
    right, other = looped(tmp_path / "a"), looped(tmp_path / "b", scale=scale, fault=fault)
    for column in ("grad_norm", "clip_factor", "update_norm"):
        np.testing.assert_allclose(other.updates[column], right.updates[column], rtol=1e-6)
    ours, theirs = right.tokens(), other.tokens()
    for column in ("loss_coef", "attribution", "score_norm_local"):
        np.testing.assert_allclose(theirs[column], ours[column], rtol=1e-4, atol=1e-6)
    assert len(ours) == len(theirs) == 36
    assert ("second_call" in set(other.events["rule"])) == (fault == "twice")
    assert "gradient_clipping" not in set(other.events["rule"])

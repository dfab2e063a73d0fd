"""Token weights in TRL's own loss, and where its clip takes a token's gradient away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sharpscope
from sharpscope.config.methods import parse_method
from sharpscope.errors import UserError
from sharpscope.integrations.record import record
from sharpscope.integrations.trl import WEIGHTABLE, token_loss
from sharpscope.objective import StepTensors, calibrate, gradient_mass, prepare
from sharpscope.seeds import generator
from tests.integrations.trainers import trainer
from tests.oracles.objective import loss_coefficients

pytest.importorskip("trl", reason="TRL is not installed (test extra)")


CALIBRATED = "grpo-sg+weight.preset=calibrated"
QUIET = {"token_gradients_every": 0, "spike_z": None}


def first_step(folder: Path, weights: Any, **arguments: Any) -> Any:
    one = trainer(folder / "t", max_steps=1, **arguments)
    record(one, out=folder / "run", weights=weights, recording=QUIET)
    one.train()
    return sharpscope.load_run(folder / "run")


@pytest.mark.parametrize("loss_type", WEIGHTABLE)
def test_each_coefficient_is_the_weight_times_that_of_the_plain_loss(loss_type, tmp_path: Path):
    """At the first update both runs have the same completions, so that coefficients differ by the weight alone."""
    named = {"vespo": {"importance_sampling_level": "token"}, "cispo": {"epsilon_high": 5.0}}.get(loss_type, {})
    plain = first_step(tmp_path / "a", None, loss_type=loss_type, **named).tokens()
    weighted = first_step(tmp_path / "b", CALIBRATED, loss_type=loss_type, **named).tokens()
    assert (plain["token_id"] == weighted["token_id"]).all()
    assert weighted["weight"].nunique() > 10 and weighted["weight"].between(1, 1.4).all()
    np.testing.assert_allclose(weighted["loss_coef"], weighted["weight"] * plain["loss_coef"], rtol=1e-5, atol=1e-9)
    assert plain["loss_coef"].abs().max() > 1e-3


@pytest.mark.parametrize(
    "name",
    [
        *(
            "grpo-sg",
            CALIBRATED,
            "ar",
            "cov-grpo",
            "grpo-sg-shuffled+weight.of.preset=calibrated",
            "high-entropy",
            "papo",
        ),
        "tests.toy_task:by_probability",
    ],
)
def test_weights_are_those_that_the_objective_prepares(name, tmp_path: Path):
    run = first_step(tmp_path, name)
    tokens = run.tokens().sort_values(["rollout", "position"])
    width = int(tokens["position"].max()) + 1

    def laid_out(column: str) -> torch.Tensor:
        values = torch.zeros(16, width)
        values[tokens["rollout"].to_numpy(), tokens["position"].to_numpy()] = torch.tensor(tokens[column].to_numpy())
        return values

    mask = torch.zeros(16, width, dtype=torch.bool)
    mask[tokens["rollout"].to_numpy(), tokens["position"].to_numpy()] = True
    rollouts = run.rollouts.sort_values("rollout")
    columns = {column: laid_out(column) for column in ("logp", "logit", "entropy", "collision", "polarity")}
    method = parse_method(name)
    advantage = torch.tensor(rollouts["advantage"].to_numpy(), dtype=torch.float32)
    step = StepTensors(
        mask=mask,
        group=torch.tensor(rollouts["group"].to_numpy()),
        behavior_logp=columns["logp"],
        advantage=advantage,
        gradient_mass=gradient_mass(method, mask, advantage, laid_out("logit_grad_norm").float()),
        **columns,
    )
    method = method.model_copy(update={"weight": calibrate(method.weight.with_preset("auto", "paper"), step)})
    plan = prepare(method, step, generator(3, "plan", 1))  # 3: the trainer's seed
    np.testing.assert_allclose(tokens["weight"], plan.weight[mask], rtol=1e-6)
    dropped = ~plan.keep[mask].numpy()
    assert (tokens["loss_coef"].to_numpy()[dropped] == 0).all()
    assert (tokens["loss_coef"].to_numpy()[~dropped] != 0).any()
    if run.info["calibration"] is not None:
        assert run.info["calibration"] == method.weight.model_dump(mode="json")
    assert run.method.startswith(name)


def test_weights_stay_with_their_rows_when_a_batch_is_used_again(tmp_path: Path):
    """With reuse the loss takes other rows in each update; sums of coefficients show any row that got another's weights."""
    settings = {
        "steps_per_generation": 4,
        "num_iterations": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-12,
    }
    plain = trainer(tmp_path / "a", max_steps=4, **settings)
    record(plain, out=tmp_path / "plain", recording=QUIET)
    plain.train()
    weighted = trainer(tmp_path / "b", max_steps=4, **settings)
    record(weighted, out=tmp_path / "weighted", weights=CALIBRATED, recording=QUIET)
    weighted.train()
    one, two = (sharpscope.load_run(tmp_path / name).tokens() for name in ("plain", "weighted"))
    np.testing.assert_allclose(two["loss_coef"], two["weight"] * one["loss_coef"], rtol=1e-5, atol=1e-9)
    assert two["weight"].nunique() > 10


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tr-grpo", {}, "act on the ratio"),
        ("gspo", {}, "more than token weights"),
        ("grpo", {}, "or has none"),
        ("ar-lopti", {}, "more than token weights"),
        ("grpo-sgg", {}, "did you mean"),
        ("grpo-sg", {"loss_type": "luspo", "importance_sampling_level": "sequence"}, "loss_type = 'luspo'"),
    ],
)
def test_weights_that_cannot_be_are_refused(name, options, message, tmp_path: Path):
    one = trainer(tmp_path / "t", **options)
    with pytest.raises(UserError, match=message):
        record(one, out=tmp_path / "run", weights=name)
    assert not (tmp_path / "run").exists() and "train" not in vars(one)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "grpo", "epsilon": 0.2, "epsilon_high": 0.3},
        {"loss_type": "dr_grpo", "delta": 1.5},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02},
        {"loss_type": "sapo"},
        {"loss_type": "cispo", "epsilon_high": 1.2},
    ],
)
def test_a_bound_acts_where_the_loss_has_no_gradient(options, tmp_path: Path):
    one = trainer(tmp_path / "t", **options)
    one.current_gradient_accumulation_steps = 1
    one.model.train()
    g = torch.Generator().manual_seed(1)
    lengths = torch.tensor([6, 3, 6, 5])
    mask = (torch.arange(6) < lengths[:, None]).long()
    old = -torch.rand(4, 6, generator=g)
    logp = old + 0.5 * torch.randn(4, 6, generator=g)
    inputs = {
        "prompt_ids": torch.full((4, 2), 3),
        "prompt_mask": torch.ones(4, 2, dtype=torch.long),
        "completion_ids": torch.full((4, 6), 5),
        "completion_mask": mask,
        "old_per_token_logps": old,
        "advantages": torch.tensor([1.0, -1.0, 2.0, -0.5]),
        "num_items_in_batch": mask.sum(),
    }
    found = token_loss(one, inputs, logp)
    ratio, clipped = found["ratio"], found["clipped"]
    coef = loss_coefficients(one, one._compute_loss, one.model, inputs, logp)
    inside = mask.bool()
    change = logp - old
    if "importance_sampling_level" in options:
        change = ((change * mask).sum(1) / mask.sum(1))[:, None].expand(4, 6)
    torch.testing.assert_close(ratio[inside], change.exp()[inside])
    assert (clipped[~inside] == 0).all() and "kl" not in found
    if options["loss_type"] == "sapo":
        assert (clipped == 0).all() and (coef[inside] != 0).all()
    elif options["loss_type"] == "cispo":
        assert torch.equal(clipped[inside] == 1, ratio[inside] > 1.2)
    else:
        assert torch.equal(clipped[inside] != 0, coef[inside] == 0)
        assert torch.equal(clipped > 0, (clipped != 0) & (ratio > 1))
    assert (clipped != 0).any() or options["loss_type"] == "sapo"

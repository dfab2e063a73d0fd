"""`rotate`: the numbers of a run's trace from its checkpoints, and one batch compared under many methods."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import spearmanr
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import sharpscope
from sharpscope import progress
from sharpscope.analysis import plots
from sharpscope.cli import app
from sharpscope.config import build_config
from sharpscope.errors import UserError
from sharpscope.forks import rotate
from sharpscope.forks.rotating import _Start, _verdicts, weight_curves
from sharpscope.forks.start import as_recorded
from sharpscope.methods import named_method
from sharpscope.methods.method import CurvatureTokens
from sharpscope.training import train
from sharpscope.training.learner import Learner
from tests.conftest import TOY
from tests.loops import some


def start_of(tiny_policy, name="grpo"):
    """A measuring start with warm moments in float64, its batch and the batch's statistics."""
    values = {**TOY, "policy.model": str(tiny_policy), "policy.dtype": "float64"}
    start = _Start(
        build_config(values=values), {name: named_method(name)}, None, measure=True, warm_up=2
    )
    batch = start.draw()
    return start, batch, start.scorer.statistics(batch.rollouts)


ANGLES = ["gradient_rotation", "gradient_scale", "update_rotation", "update_scale"]
FRESH = [f"{path}={value}" for path, value in TOY.items() if not path.startswith("evaluation")]


@pytest.fixture(scope="module")
def folder(tiny_policy, tmp_path_factory):
    """A run whose rotation is recorded at every step, with a checkpoint after each."""
    out = tmp_path_factory.mktemp("rotated")
    values = {
        "method": "grpo-sg",
        "method.weight.preset": "calibrated",
        "checkpoint.every": 1,
        "evaluation.every": 0,
    }
    values |= {
        "recording.rotation_every": 1,
        "recording.token_gradients_every": 0,
        "checkpoint.keep_last": 5,
    }
    train(
        build_config(
            values={**TOY, "policy.model": str(tiny_policy), "out": str(out / "run")} | values
        )
    )
    return out / "run"


@pytest.mark.parametrize("step", [1, 3])
def test_a_checkpoint_gives_the_numbers_of_the_trace(folder, step):
    found = rotate(
        ["own=grpo-sg+weight.preset=calibrated", "grpo"],
        run=folder,
        checkpoint=step - 1,
        batches=1,
    )
    traced = sharpscope.load_run(folder).steps.set_index("step").loc[step]
    own = found.table.set_index("method").loc["own"]
    columns = [*ANGLES, "weight_mean", "weight_mean_gradient", "weight_saturation_high_gradient"]
    np.testing.assert_allclose(own[columns].astype(float), traced[columns].astype(float), rtol=1e-3)
    assert own["gradient_rotation"] > 0.1 and own["rotation_bound"] == pytest.approx(
        9.594, abs=1e-3
    )
    assert found.noise == pytest.approx(traced["noise_rotation"], abs=0.01)
    assert as_recorded(folder, step, ["another"]) is False and as_recorded(folder, 9, []) is None
    assert (
        found.batch["step"] == step
        and found.batch["recorded"] is True
        and found.batch["tokens"] == traced["tokens"]
    )


def test_methods_with_equal_gradients_share_passes_and_the_numbers_are_those_of_each(
    tiny_policy, monkeypatch
):
    names = ["grpo", "gspo", "dapo", "cispo", "bnpo", "grpo-sg", "ar", "high-entropy", "grpo-sam"]
    names += ["bonus=grpo+entropy=0.001"]
    made = []
    compare = Learner.compare
    monkeypatch.setattr(
        Learner,
        "compare",
        lambda self, *a, **k: made.append(k["method"].name) or compare(self, *a, **k),
    )
    shared = rotate(names, model=str(tiny_policy), overrides=FRESH, batches=1).table
    assert sorted(made) == [
        "ar",
        "cispo",
        "dapo",
        "grpo",
        "grpo",
        "grpo-sam",
        "grpo-sg",
        "high-entropy",
    ]
    monkeypatch.setattr("sharpscope.forks.rotating.same_at_one_update", lambda method: None)
    each = rotate(names, model=str(tiny_policy), overrides=FRESH, batches=1).table
    np.testing.assert_allclose(shared[ANGLES], each[ANGLES], rtol=1e-3, atol=0.05)
    ends = [f"{name}_{end}" for name in ANGLES[::2] for end in ("low", "high")]
    np.testing.assert_allclose(shared[ends], each[ends], rtol=1e-3, atol=0.05)
    rounded = [*ANGLES, *ends, "update_difference", "steps_to_pass", "verdict"]
    pd.testing.assert_frame_equal(shared.drop(columns=rounded), each.drop(columns=rounded))


def test_what_an_update_does_is_measured_and_taken_back(tiny_policy):
    """Against the update made on a copy of the model: entropy by bin, and Spearman's correlations of both predictions."""
    before = [p.clone() for p in AutoModelForCausalLM.from_pretrained(tiny_policy).parameters()]
    start, batch, stats = start_of(tiny_policy)
    advantage = batch.advantage
    found = start.measured("grpo", batch, stats)
    for parameter, kept in zip(start.policy.model.parameters(), before, strict=True):
        assert torch.equal(parameter, kept) and parameter.grad is None
    own = start.learner(start.methods["grpo"]).curvature(
        batch.rollouts, advantage, CurvatureTokens()
    )[..., 1]
    start.learner(start.methods["grpo"]).learn(
        batch.rollouts, advantage, start.seed_step, 0.0, method=start.methods["grpo"], stats=stats
    )
    after = start.scorer.statistics(batch.rollouts)
    mask = batch.rollouts.completion_mask.bool()
    peak = stats.logp.exp() >= stats.collision
    change, coefficient = (
        after.entropy - stats.entropy,
        -advantage[:, None] / mask.sum(1, keepdim=True) / len(mask),
    )
    predicted = (coefficient * stats.polarity)[mask]
    for sign, side in (("pos", advantage > 0), ("neg", advantage < 0)):
        for kind, one in (("peak", peak), ("valley", ~peak)):
            chosen = mask & side[:, None] & one
            assert found[f"entropy_measured_{sign}_{kind}"] == pytest.approx(
                float(change[chosen].mean()), rel=1e-3
            )
            share = float((coefficient * stats.polarity)[chosen].sum() / predicted.abs().sum())
            assert found[f"entropy_predicted_{sign}_{kind}"] == pytest.approx(share, abs=1e-4)
    moving = mask & (advantage != 0)[:, None]
    moved = (after.logp - stats.logp).double()
    divergence = (torch.expm1(moved) - moved)[moving]
    assert found["kl_rank"] == pytest.approx(spearmanr(own[moving], divergence).statistic, abs=0.02)
    assert found["gradient_used"] == 1.0 and found["update_difference"] < 1e-3


def test_the_share_of_the_gradient_that_a_selection_keeps(tiny_policy):
    start, batch, stats = start_of(tiny_policy, "high-entropy")
    found = start.measured("high-entropy", batch, stats)
    mask = batch.rollouts.completion_mask.bool()
    mass = (
        batch.advantage.abs()[:, None]
        / mask.sum(1, keepdim=True).clamp(min=1)
        * stats.logit_grad_norm
        * mask
    )
    kept = mask & (
        stats.entropy >= stats.entropy[mask].topk(math.ceil(0.2 * int(mask.sum()))).values.min()
    )
    assert found["gradient_used"] == pytest.approx(float(mass[kept].sum() / mass.sum()), rel=1e-5)
    assert 0.05 < found["gradient_used"] < 0.99
    angle, scale = math.radians(found["update_rotation"]), found["update_scale"]
    wanted = math.hypot(1 - scale * math.cos(angle), scale * math.sin(angle))
    assert found["update_difference"] == pytest.approx(wanted)


def test_how_long_all_batches_take_is_said_from_the_second_method_on(tiny_policy, monkeypatch):
    """A clock on which a method takes 100 s: two methods on three batches take 600 s."""
    lines: list[str] = []
    clock = SimpleNamespace(monotonic=lambda: 100.0 * len([x for x in lines if "/2 " in x]))
    monkeypatch.setattr(progress, "time", clock)
    rotate(
        ["gspo", "dapo"],
        model=str(tiny_policy),
        overrides=FRESH,
        batches=3,
        on_progress=lines.append,
    )
    said = [re.sub("gspo|dapo", "NAME", line) for line in lines if "/2 " in line]
    left = ["", "  about 8 min left", "  about 7 min left", "  about 5 min left"]
    left += ["  about 3 min left", "  about 2 min left"]
    assert said == [f"{n % 2 + 1}/2 NAME{text}" for n, text in enumerate(left)]


def test_all_methods_on_a_fresh_batch(tiny_policy):
    lines = []
    found = rotate(model=str(tiny_policy), overrides=FRESH, batches=1, on_progress=lines.append)
    table = found.table.set_index("method")
    assert (
        set(sharpscope.methods.method_names()) < set(table.index) and len(lines) == len(table) + 1
    )
    assert (
        found.batch["recorded"] is None
        and found.batch["prompts"] == 4
        and found.batch["completions"] == 16
    )
    for name in ("grpo", "gspo", "holder", "sapo", "gmpo", "dppo", "dual-clip"):
        if table.loc[name, "problem"] == "" and table.loc[name, "reference"] == "grpo":
            assert table.loc[name, "gradient_rotation"] < 0.01
            assert table.loc[name, "update_scale"] == pytest.approx(1, abs=1e-3)
    assert (
        table.loc["dr-grpo", "gradient_rotation"] > 0.5
        and table.loc["cov-grpo", "gradient_rotation"] > 0.5
    )
    assert table.loc["grpo-sg", "gradient_rotation"] <= table.loc["grpo-sg", "rotation_bound"] * 1.5
    failed = table[table["problem"] != ""]
    # the toy task has no parts
    assert set(failed.index) <= {"gdpo"} and failed["gradient_rotation"].isna().all()


def test_the_command_prints_and_writes(tiny_policy, tmp_path):
    sets = [part for value in FRESH for part in ("--set", value)]
    command = ["rotate", "--model", str(tiny_policy), "--methods", "grpo-sg,ar,cispo"]
    command += ["--out", str(tmp_path / "out"), "--plot"]
    result = CliRunner().invoke(app, [*command, *sets], env={"COLUMNS": "220"})
    assert result.exit_code == 0, result.output
    assert (
        "4 prompts" in result.output
        and "cispo" in result.output
        and "Noise of a batch" in result.output
    )
    assert "1/3 grpo-sg" in result.stderr
    names = [
        "batches.csv",
        "rotation.csv",
        "rotation.json",
        "rotation.png",
        "rotation.svg",
        "weights.csv",
        "weights.png",
        "weights.svg",
    ]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    curves = plots.weight_functions(str(tmp_path / "out" / "weights.csv")).frame
    assert {"grpo-sg", "ar"} <= set(curves["method"]) and curves["weight"].nunique() > 100
    table = pd.read_csv(tmp_path / "out" / "rotation.csv")
    content = json.loads((tmp_path / "out" / "rotation.json").read_text(encoding="utf-8"))
    assert (
        table["method"].tolist() == ["grpo-sg", "ar", "cispo"] and content["batch"]["prompts"] == 4
    )
    command[4] = "cispo,dapo,gspo,a_label_that_is_far_too_long=ar"
    # what it made is refreshed
    narrow = CliRunner().invoke(app, [*command, *sets], env={"COLUMNS": "80"}).stdout
    assert "…" not in narrow and max(map(len, narrow.splitlines()[:20])) <= 80
    said = " ".join(narrow.split())
    assert (
        "cispo, dapo: token-mean aggregation alone: cispo and dapo are the same at ratio 1" in said
    )
    assert "gspo: the same gradient: every ratio is 1 in a first update" in said
    assert said.index("used: share of plain GRPO's gradient") < said.index("method gradient")
    cells = [line.split(" ")[0] for line in narrow.splitlines()]
    assert "a_label_that_is_far_too_long" in "".join(cells)


def test_numbers_are_means_over_batches_with_their_range(tiny_policy):
    """Against each batch by itself, drawn and measured from one start."""
    found = rotate(["grpo-sg", "dapo", "grpo"], model=str(tiny_policy), overrides=FRESH, batches=3)
    values = {**TOY, "policy.model": str(tiny_policy)}
    methods = {name: named_method(name) for name in ("grpo-sg", "dapo", "grpo")}
    start = _Start(build_config(values=values), methods, None, measure=False, warm_up=0)
    texts = []
    for number in range(3):
        batch = start.draw(number)
        texts.append(batch.rollouts.texts)
        stats = start.scorer.statistics(batch.rollouts)
        each = found.each[found.each["batch"] == number + 1].set_index("method")
        assert list(each.index) == list(methods)
        for name in some(methods):
            row = start.measured(name, batch, stats)
            for column in (*ANGLES, "noise", "gradient_used", "weight_mean"):
                assert each.loc[name, column] == pytest.approx(row[column], rel=1e-3, abs=0.05)
    assert texts[0] != texts[1] != texts[2]
    table = found.table.set_index("method")
    by_method = found.each.groupby("method")
    for name in ("gradient_rotation", "update_rotation", "noise"):
        for end, value in (("", "mean"), ("_low", "min"), ("_high", "max")):
            wanted = getattr(by_method[name], value)()[table.index]
            np.testing.assert_allclose(table[name + end], wanted)
    assert table.loc["dapo", "gradient_rotation_high"] > table.loc["dapo", "gradient_rotation_low"]
    turn, noise = (math.tan(math.radians(table.loc["dapo", c])) for c in (ANGLES[0], "noise"))
    assert table.loc["dapo", "steps_to_pass"] == pytest.approx((noise / turn) ** 2)
    assert found.noise == pytest.approx(table.loc["dapo", "noise"])
    assert (found.batch["batches"], found.batch["range_of"]) == (3, "batches")


def test_of_one_batch_the_range_is_that_of_its_halves(tiny_policy):
    """Against the halves' gradients by autograd from the coefficients of the whole update."""
    start, batch, stats = start_of(tiny_policy, "high-entropy")
    start.halves = True
    found = start.measured("high-entropy", batch, stats)["halves"]
    groups = batch.rollouts.group
    wanted = []
    for number in (0, 1):
        half = torch.isin(groups, groups.unique()[number::2])[:, None]
        gradients = []
        for name in ("high-entropy", "grpo"):
            coef = start.tokens(named_method(name), batch, batch.advantage, stats).loss_coef
            logp = start.scorer.score(batch.rollouts, with_grad=True).logp
            loss = torch.where(half, logp * coef, 0.0).sum()
            grads = torch.autograd.grad(loss, list(start._learner.parameters))
            gradients.append(torch.cat([g.flatten() for g in grads]))
        cosine = torch.nn.functional.cosine_similarity(*gradients, dim=0)
        wanted.append(math.degrees(math.acos(float(cosine))))
    assert found == pytest.approx(wanted, rel=1e-6) and abs(wanted[0] - wanted[1]) > 0.1


def test_a_verdict_says_why_and_after_how_many_steps():
    table = pd.DataFrame(
        [
            ("cispo", 36.2, 1.0, 0.88),
            ("dapo", 36.2, 1.0, 0.88),
            ("grpo-sg", 6.9, 1.3, 31.1),
            ("grpo-sg-constant", 0.01, 2.0, math.inf),
            ("gspo", 0.0, 1.0, math.inf),
            ("dr-grpo", 20.0, 1.0, math.nan),
        ],
        columns=["method", "gradient_rotation", "gradient_scale", "steps_to_pass"],
    ).assign(reference="grpo")
    methods = {name: named_method(name) for name in table["method"]}
    assert _verdicts(table, methods) == [
        "token-mean aggregation alone: cispo and dapo are the same at ratio 1; larger than the noise of a batch",
        "token-mean aggregation alone: cispo and dapo are the same at ratio 1; larger than the noise of a batch",
        "passes the noise after about 31 steps",
        "turns by 0° and makes the gradient 2 times as long: in a run AdamW ignores that",
        "the same gradient: every ratio is 1 in a first update",
        "the noise is not known",
    ]


def test_ones_own_token_weights_are_compared_and_plotted(folder):
    given = "tests.toy_task:by_probability"
    found = rotate(["grpo-sg", given], run=folder, batches=1)
    assert found.table["method"].tolist() == ["grpo-sg", given]
    curves = weight_curves(found.methods)
    own = curves[(curves["method"] == given) & (curves["axis"] == "probability")]
    np.testing.assert_allclose(own["weight"], own["x"] + 0.5)
    constants = found.methods["grpo-sg"].weight
    logit = curves[(curves["method"] == "grpo-sg") & (curves["axis"] == "logit")]
    curve = constants.alpha * (
        1 / (1 + np.exp(-(logit["x"] - constants.u0) / constants.tau)) - constants.mu
    )
    np.testing.assert_allclose(logit["weight"], curve.clip(constants.L, constants.U), rtol=1e-6)


def test_a_run_of_another_trainer_says_why_it_cannot_be_rotated(tmp_path):
    (tmp_path / "run.json").write_text(
        json.dumps({"schema_version": 3, "trainer": {"name": "GRPOTrainer"}})
    )
    with pytest.raises(UserError, match=r"was recorded in another trainer.*--model CHECKPOINT"):
        rotate(["grpo"], run=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"methods": []}, "names nothing"),
        ({"methods": ["ar+weight.alpha=7"]}, r"ar\+weight.alpha=7.*alpha"),
        ({"checkpoint": 3}, "--checkpoint 3: goes with"),
        ({"run": "missing"}, "is not the folder of a run"),
        ({"run": ".", "model": "embedded:math"}, "--model: goes without"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, said):
    with pytest.raises(UserError, match=said):
        rotate(**{"methods": ["grpo"], **arguments})


def test_bad_checkpoints_and_a_batch_without_signal(folder, tiny_policy):
    with pytest.raises(UserError, match="choose from 0, 1, 2, 3"):
        rotate(["grpo"], run=folder, checkpoint="step-000007")
    with pytest.raises(UserError, match="plain GRPO has no gradient"):
        rotate(
            ["grpo"],
            model=str(tiny_policy),
            overrides=[*FRESH, "task.factory=tests.toy_task:equally_rewarded"],
        )
    with pytest.raises(UserError, match="learning rate is 0"):
        rotate(["grpo"], run=folder, overrides=["optimizer.schedule=linear"])


def test_a_weight_of_other_values_is_not_drawn_as_a_function_of_the_logit():
    """0.3 drew weights that depend on the entropy, on the advantage or on the whole step as lines over the logit."""
    names = ["grpo-sg", "grpo-sg-shuffled", "grpo-sg-constant", "stare", "pepo", "cov-grpo", "ar"]
    config = build_config(overrides=["method.name=grpo-sg", "method.weight.preset=paper"])
    methods = {name: named_method(name) for name in names} | {"paper": config.method}
    drawn = weight_curves(methods).groupby(["method", "axis"]).size()
    assert set(drawn.index) == {("paper", "logit"), ("ar", "probability")}

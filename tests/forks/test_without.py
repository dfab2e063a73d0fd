"""A step with and without its leading tokens: from the exact state, and a planted token is found to have done it."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import sharpscope
from sharpscope.analysis.forks import tokens_verdict
from sharpscope.analysis.headline import layer_tokens
from sharpscope.cli.app import main
from sharpscope.config import ForkSpec, build_config
from sharpscope.errors import UserError
from sharpscope.forks import start as start_module
from sharpscope.forks import step_again
from sharpscope.forks.recorded_step import trainer_step
from sharpscope.forks.step_again import run_step
from sharpscope.forks.token_sets import TokenSet
from sharpscope.forks.without import ALL, without_tokens
from sharpscope.policy import PolicySpec, load_policy
from sharpscope.recording.from_checkpoint import probe_trace
from sharpscope.training import loop, train
from sharpscope.training.checkpoint import checkpoint_dir
from tests.conftest import TOY
from tests.loops import some

STEP, PLANTED = 4, (3, 1)
SMALL = {"prompts": 4, "samples": 2}


def planted(draw):
    """`draw_rollouts` whose batch of step STEP has one token with 100 times its advantage, and so its coefficient."""

    def drawn(policy, task, order, method, spec, seed, step, *rest, **named):
        batch = draw(policy, task, order, method, spec, seed, step, *rest, **named)
        if step != STEP:
            return batch
        advantage = batch.advantage[:, None].expand(batch.rollouts.completion_mask.shape).clone()
        row = (
            int(batch.advantage.abs().argmax()) if batch.advantage[PLANTED[0]] == 0 else PLANTED[0]
        )
        assert row == PLANTED[0]
        advantage[PLANTED] *= 100
        return replace(batch, advantage=advantage)

    return drawn


@pytest.fixture(scope="module")
def spiked(tiny_policy, tmp_path_factory):
    """A run with a token at step STEP whose coefficient is 100 times what it was, and only the checkpoint of step 2 and the last."""
    patch = pytest.MonkeyPatch()
    patch.setattr(loop, "draw_rollouts", planted(loop.draw_rollouts))
    patch.setattr(start_module, "draw_rollouts", planted(start_module.draw_rollouts))
    values = {
        **TOY,
        "policy.model": str(tiny_policy),
        "out": str(tmp_path_factory.mktemp("spiked") / "run"),
    }
    changes = {
        "steps": 5,
        "checkpoint.every": 2,
        "checkpoint.keep_last": 9,
        "evaluation.every": 0,
        "seed": 3,
    }
    changes |= {
        "recording.token_gradients_every": 1,
        "recording.group_share": 1.0,
        "optimizer.max_grad_norm": None,
    }
    config = build_config(values=values | changes)
    assert train(config).status == "finished"
    yield config
    patch.undo()


def test_the_state_before_a_step_is_that_of_the_run(spiked):
    """From the checkpoint of step 2, step 3 made again gives step 4 the run's own coefficients, norms and completions."""
    own = run_step(spiked, spiked.run_dir, STEP, ForkSpec(**SMALL, warm_up=0), lambda text: None)
    updates = own.update(None, None)
    row = sharpscope.load_run(spiked.run_dir).updates.query(f"step == {STEP}").iloc[0]
    assert updates[0].grad_norm == row["grad_norm"] and updates[0].update_norm == row["update_norm"]
    named = dict(own.scorer.model.named_parameters())
    saved = load_file(checkpoint_dir(spiked.run_dir, STEP) / "model.safetensors")
    assert all(torch.equal(named[name], value) for name, value in saved.items() if name in named)


def test_from_the_start_the_constants_are_those_that_the_run_calibrated(tiny_policy, tmp_path):
    values = {
        **TOY,
        "policy.model": str(tiny_policy),
        "out": str(tmp_path / "run"),
        "steps": 2,
        "evaluation.every": 0,
    }
    config = build_config(values=values | {"method": "grpo-sg+weight.preset=calibrated"})
    assert train(config).status == "finished"
    updates = run_step(
        config, config.run_dir, 2, ForkSpec(**SMALL, warm_up=0), lambda text: None
    ).update(None, None)
    recorded = sharpscope.load_run(config.run_dir).updates.query("step == 2")["grad_norm"]
    assert [update.grad_norm for update in updates] == recorded.tolist()


def test_without_tokens_the_gradient_is_that_of_the_other_coefficients(spiked):
    """Against the sum of c·∇log π over the other tokens, by autograd."""
    own = run_step(spiked, spiked.run_dir, STEP, ForkSpec(**SMALL, warm_up=0), lambda text: None)
    coefs, gradients = [], []
    own.update(None, lambda update: coefs.append((update.rows, update.loss_coef)))
    own.restore()
    left_out = torch.zeros(own.rollouts.completion_mask.shape, dtype=torch.bool)
    left_out[PLANTED], left_out[0, :2] = True, True
    rows, coef = coefs[0]
    parameters = [p for p in own.scorer.model.parameters() if p.requires_grad]
    logp = own.scorer.score(own.rollouts.rows(rows), with_grad=True).logp
    expected = torch.autograd.grad(
        (logp * torch.where(left_out[rows], 0.0, coef)).sum(), parameters
    )
    own.update(left_out, lambda update: gradients.append([p.grad.clone() for p in parameters]))
    for one, other in zip(gradients[0], expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    with pytest.raises(UserError, match="top:5000"):
        TokenSet.parse("top:5000").chosen(STEP, own.rollouts, torch.ones(left_out.shape))


def test_the_planted_token_is_named_first_by_shares_layers_and_the_counterfactual(spiked, capsys):
    run = sharpscope.load_run(spiked.run_dir)
    tokens = run.tokens(steps=[STEP])
    first = tokens.loc[tokens["attribution"].abs().idxmax()]
    assert (first["rollout"], first["position"]) == PLANTED
    by_layer = layer_tokens(run, STEP)
    assert tuple(by_layer.loc[0, ["rollout", "position"]]) == PLANTED
    assert all(by_layer[name].idxmax() == 0 for name in by_layer.columns[4:])
    forked, name = without_tokens(spiked.run_dir, STEP, ["top:2"], by="share", **SMALL)
    leading = forked.info["forks"][name]["tokens"][0]
    assert (leading["rollout"], leading["position"]) == PLANTED
    rows = forked.forks[forked.forks["fork"] == name].set_index(["outcome", "arm"])
    kl, grad = rows["value"]["kl"], rows["value"]["grad_norm"]
    arms = list(dict.fromkeys(rows.index.get_level_values("arm")))
    assert (
        arms[0] == ALL
        and grad[arms[1]] < 0.5 * grad[ALL]
        and abs(grad[arms[2]] / grad[ALL] - 1) < 0.1
    )
    assert kl[arms[1]] != kl[ALL]
    layers = rows.loc[
        [o for o in rows.index.get_level_values(0).unique() if o.startswith("layer_gradient:")],
        "value",
    ]
    for arm in some(arms):
        assert math.hypot(*layers.xs(arm, level="arm")) == pytest.approx(grad[arm], rel=1e-4)
    assert (
        rows["value"]["accuracy_greedy"].between(0, 1).all()
        and np.isfinite(rows["value"]["entropy"]).all()
    )
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "fork",
                str(spiked.run_dir),
                "--step",
                str(STEP),
                "--without-tokens",
                "top:2",
                "--set",
                "fork.prompts=4",
            ]
        )
    assert ended.value.code == 0 and "leading tokens" in capsys.readouterr().out


@pytest.fixture(scope="module")
def trl_run(tmp_path_factory):
    """(run recorded in TRL with two updates a step, folder of the trainer's checkpoints)."""
    from sharpscope.integrations.record import record
    from tests.integrations.trainers import trainer

    folder = tmp_path_factory.mktemp("trl")
    whole = trainer(
        folder / "t",
        max_steps=4,
        num_iterations=2,
        save_strategy="steps",
        save_steps=1,
        max_grad_norm=0.05,
    )
    record(whole, out=folder / "run", recording={"tokens_every": 1, "token_gradients_every": 1})
    whole.train()
    return sharpscope.load_run(folder / "run"), folder / "t"


def test_a_step_of_another_trainer_is_made_again_from_its_checkpoint(trl_run):
    """Coefficients, moments and clipping of the recorded run give the trainer's next weights."""
    run, folder = trl_run
    step = 2
    done = int((run.updates["step"] < step).sum())
    other = trainer_step(
        run, step, str(folder / f"checkpoint-{done}"), None, ForkSpec(**SMALL), lambda text: None
    )
    made = other.update(None, None)
    recorded = run.updates[run.updates["step"] == step]
    assert [one.grad_norm for one in made] == pytest.approx(list(recorded["grad_norm"]), rel=1e-3)
    assert [one.clip_factor for one in made] == pytest.approx(
        list(recorded["clip_factor"]), rel=1e-3
    )
    saved = load_file(folder / f"checkpoint-{done + len(made)}" / "model.safetensors")
    for name, parameter in some(other.scorer.model.named_parameters()):
        if name in saved:  # the learning rate is 0.01
            torch.testing.assert_close(parameter.detach(), saved[name], rtol=0, atol=1e-4, msg=name)


def test_the_command_takes_a_checkpoint_of_another_trainer(trl_run, capsys):
    run, folder = trl_run
    done = int((run.updates["step"] < 2).sum())
    saved = folder / f"checkpoint-{done}"
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "fork",
                str(run.path),
                "--step",
                "2",
                "--without-tokens",
                "top:3",
                "--model",
                str(saved),
            ]
        )
    assert ended.value.code == 0 and "leading tokens" in capsys.readouterr().out
    bare = shutil.copytree(saved, folder / "bare", ignore=shutil.ignore_patterns("optimizer.pt"))
    with pytest.raises(UserError, match=r"has no optimizer\.pt"):
        without_tokens(run.path, 2, ["top:3"], model=str(bare))


def test_the_verdict_compares_the_step_without_the_tokens_and_without_random_ones():
    arms = ["all", "without", "others"]
    values = pd.DataFrame([(10, 1, 10), (1, 1.2, 1)], index=["grad_norm", "kl"], columns=arms)
    said = tokens_verdict(values, arms, 12)
    assert "the gradient's norm is 90 % smaller (1 in place of 10), without 12 random" in said
    assert "optimizer's moments bound it" in said
    values.loc["kl"] = [1.0, 0.1, 1.0]
    assert "moments" not in tokens_verdict(values, arms, 12)


def test_effects_predict_what_leaving_tokens_out_does(spiked, tmp_path):
    """Several sets from one state: predicted and measured changes of KL and entropy have one sign and size."""
    listed = tmp_path / "tokens.csv"
    listed.write_text("rollout,position\n2,0\n2,1\n3,0\n")
    sets = ["top:3", "prompt:0", "completion:3", f"file:{listed}"]
    forked, name = without_tokens(spiked.run_dir, STEP - 1, sets, on="entropy", **SMALL)
    entry = forked.info["forks"][name]
    table = pd.DataFrame(entry["predictions"]).set_index(["arm", "outcome"])
    assert len(entry["tokens"]) == 3
    arms = ["without top 3", "without 3 others", "without prompt 0", "without completion 3"]
    assert set(table.index.get_level_values("arm")) == {*arms, f"without file:{listed}"}
    kl = table.xs("kl", level="outcome")
    assert (kl["step_change"] > 0).all()
    small = table[(table["measured"] / table["step_change"]).abs() < 0.3]
    small = small[small.index.get_level_values("outcome").isin(["kl", "entropy"])]
    assert len(small) >= 4
    off = (small["predicted"] - small["measured"]).abs() / small["step_change"].abs()
    assert (off < 0.1).all(), pd.DataFrame({**small, "off": off}).to_string()


def test_steps_are_made_again_without_a_prompt_in_each(spiked):
    """With all of its tokens the run ends as it did; without a prompt elsewhere, and each step drew its own rollouts."""
    forked, name = without_tokens(spiked.run_dir, 3, ["prompt:0"], to=5, **SMALL)
    rows = forked.forks[forked.forks["fork"] == name].set_index(["outcome", "arm"])["value"]
    assert rows["kl", ALL] > 0 and rows["kl", ALL] != rows["kl", "without prompt 0"]
    own = run_step(spiked, spiked.run_dir, 3, ForkSpec(**SMALL, warm_up=0), lambda text: None, to=5)
    own.update(None, None)
    saved = load_file(checkpoint_dir(spiked.run_dir, 5) / "model.safetensors")
    named = dict(own.scorer.model.named_parameters())
    assert all(torch.equal(named[key], value) for key, value in saved.items() if key in named)


@pytest.mark.parametrize(
    ("sets", "options", "says"),
    [
        (["top:0"], {}, "--without top:0: give"),
        (["all"], {}, "--without all: give"),
        (["completion:9999"], {}, "completion 9999: step 4 has the numbers"),
        (["top:2"], {"by": "size"}, "--by size: use effect or share"),
        (["top:2"], {"on": "loss"}, "--on loss: use kl"),
        (["top:2"], {"to": 5}, "not a ranking"),
        (["prompt:0"], {"to": 2}, "must not be before"),
    ],
)
def test_mistakes_in_sets_are_told(spiked, sets, options, says):
    with pytest.raises(UserError, match=says):
        without_tokens(spiked.run_dir, STEP, sets, **SMALL, **options)


def test_a_step_that_lacks_memory_is_refused_before_it_is_measured(spiked, monkeypatch):
    monkeypatch.setattr(step_again, "COPIES", 10**12)
    with pytest.raises(UserError, match="memory: leaving tokens out of a step takes about"):
        without_tokens(spiked.run_dir, STEP, ["top:5"], **SMALL)


def test_recorded_effects_are_those_of_the_step_made_again(tiny_policy, tmp_path):
    """Columns of a run against the fork's effects, which take another way: all tokens at once, q after the run's own step."""
    changes = {"steps": 3, "evaluation.every": 0, "update.mini_batches": 1}
    changes |= {"recording.token_gradients_every": 3, "recording.group_share": 1.0}
    changes |= {"policy.model": str(tiny_policy), "out": str(tmp_path / "run")}
    config = build_config(values={**TOY, **changes})
    assert train(config).status == "finished"
    run = sharpscope.load_run(config.run_dir)
    own = run_step(config, config.run_dir, 3, ForkSpec(**SMALL, warm_up=0), lambda text: None)
    own.restore()
    own.measure()
    own.prepare()
    expected, _ = own.scores()
    tokens = run.tokens(steps=[3])
    for name in ("kl", "entropy"):
        recorded = tokens[f"effect_{name}"]
        assert recorded.notna().sum() == len(tokens) > 50
        found = expected[name][tokens["rollout"].to_list(), tokens["position"].to_list()].numpy()
        assert np.abs(found).max() > 0
        np.testing.assert_allclose(recorded, found, rtol=1e-3, atol=1e-4 * np.abs(found).max())
    assert (
        run.tokens(steps=[1])["effect_kl"].isna().all()
    )  # AdamW's first step is the gradient's sign
    share = run.updates.set_index("step")["batch_share"]
    assert share[1] == pytest.approx(1.0) and 0 < share[3] < 1
    with pytest.raises(SystemExit) as ended:
        main(["tokens", str(config.run_dir), "--by", "effect", "--on", "entropy", "--top", "3"])
    assert ended.value.code == 0


def test_probed_effects_are_those_of_the_step_made_again(trl_run, tmp_path):
    """`probe --rollouts` with the trainer's saved AdamW state against the fork's effects, which are of the whole step."""
    run, folder = trl_run
    first = run.updates[run.updates["step"] == 2]["update"].min()
    done = int((run.updates["step"] < 2).sum())
    saved = folder / f"checkpoint-{done}"
    policy = load_policy(PolicySpec(model=str(saved)))
    (probed,) = probe_trace(run, policy, tmp_path / "out", steps=[2])
    assert probed.effects == "effects on kl, effects on entropy"
    tokens = sharpscope.load_run(tmp_path / "out").tokens(steps=[2])
    own = run.tokens(steps=[2])
    assert run.updates["clip_factor"].min() < 1  # the trainer clips
    used = tokens["update"] == first
    assert used.sum() > 20 and tokens.loc[~used, "effect_kl"].isna().all()
    for name in ("kl", "entropy"):
        expected, found = own.loc[used, f"effect_{name}"], tokens.loc[used, f"effect_{name}"]
        assert expected.notna().all() and expected.abs().max() > 0
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3 * expected.abs().max())
    bare = shutil.copytree(saved, tmp_path / "bare", ignore=shutil.ignore_patterns("optimizer.pt"))
    policy = load_policy(PolicySpec(model=str(bare)))
    (probed,) = probe_trace(run, policy, tmp_path / "again", steps=[2])
    assert probed.effects.startswith("no effects: --model ") and "no optimizer.pt" in probed.effects

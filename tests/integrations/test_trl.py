"""Recording a TRL trainer: nothing of the training changes, and what is recorded is what TRL's own loss did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback
from typer.testing import CliRunner

import sharpscope
from sharpscope.cli import app
from sharpscope.errors import UserError
from tests.loops import some
from tests.oracles.objective import loss_coefficients

pytest.importorskip("trl", reason="TRL is not installed (test extra)")

from trl import GRPOTrainer

from sharpscope.integrations import trl as recorded_step
from sharpscope.integrations.record import record
from sharpscope.integrations.trl import ROW, GrpoRecorder
from sharpscope.policy.forward import Scorer
from tests.integrations.trainers import (
    CASES,
    EPOCHS,
    EPS,
    GROUP,
    KL,
    LR,
    PROMPTS,
    batch,
    check_equal,
    evens,
    our_run,
    tokenizer,
    trainer,
)

ALL = {"token_gradients_every": 1, "exact_tokens": 2, "group_share": 1.0}
#: A generation batch for several updates, used twice, in several micro-batches: everything that TRL shuffles and splits.
REUSED = {
    "steps_per_generation": 4,
    "num_iterations": 2,
    "per_device_train_batch_size": 4,
    "max_steps": 6,
}


def weights_of(one: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in one.model.parameters()]


class Watch(TrainerCallback):
    """Keeps, in each update, the gradient before the optimizer's step and the weights around it."""

    def __init__(self) -> None:
        self.gradients: list[list[torch.Tensor]] = []
        self.before: list[list[torch.Tensor]] = []
        self.after: list[list[torch.Tensor]] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        self.gradients.append([p.grad.clone() for p in model.parameters()])
        self.before.append([p.detach().clone() for p in model.parameters()])

    def on_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        self.after.append([p.detach().clone() for p in model.parameters()])


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run with clipping by the ratio, a KL term and reuse, the oracle's coefficients beside it; no gradient clipping."""
    folder = tmp_path_factory.mktemp("watched")
    one = trainer(
        folder / "t",
        **REUSED,
        beta=0.1,
        max_grad_norm=0.0,
        epsilon=0.02,
        loss_type="dapo",
        learning_rate=0.02,
    )
    # Without critical sharpness, which evaluates TRL's loss again and would call the oracle.
    recorder = record(one, out=folder / "run", recording=ALL, critical_sharpness=False)
    watch, oracle, divergence = Watch(), [], []
    one.add_callback(watch)
    compute, logps = (
        recorder._original["_compute_loss"],
        recorder._original["_get_per_token_logps_and_entropies"],
    )

    def with_oracle(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        seen = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with torch.no_grad():
            logp = logps(model, ids, seen, inputs["completion_ids"].shape[1])[0]
        oracle.append(
            (
                len(watch.before),
                inputs[ROW].clone(),
                loss_coefficients(one, compute, model, inputs, logp),
            )
        )
        alone = inputs | {"advantages": torch.zeros_like(inputs["advantages"])}
        divergence.append(
            (
                len(watch.before),
                inputs[ROW].clone(),
                loss_coefficients(one, compute, model, alone, logp),
            )
        )
        return compute(model, inputs)

    uses, used = [], recorded_step.token_loss

    def counted(theirs: Any, inputs: dict[str, Any], logp: torch.Tensor) -> Any:
        found = used(theirs, inputs, logp)
        uses.append((len(watch.before), inputs["completion_mask"].bool(), found))
        return found

    recorder._original["_compute_loss"] = with_oracle
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded_step, "token_loss", counted)
        one.train()
    run = sharpscope.load_run(folder / "run")
    return {
        "run": run,
        "watch": watch,
        "oracle": oracle,
        "trainer": one,
        "uses": uses,
        "divergence": divergence,
    }


def by_token(entries: Any) -> dict[tuple[int, int, int, int], float]:
    """(step, rollout, position, update in the step) -> value, from (update, rows, values) of micro-batches."""
    return {
        (serial, row, at, update % 4): value
        for update, rows, values in entries
        for (serial, row), each in zip(rows.tolist(), values, strict=True)
        for at, value in enumerate(each.tolist())
    }


def test_each_use_of_a_token_has_the_coefficient_of_trls_loss(watched):
    """Joined by the row's number through TRL's shuffle; the KL term's part is that of the loss without advantages."""
    run, index = watched["run"], ["step", "rollout", "position", "update"]
    tokens, uses = run.tokens().set_index(index), run.uses.set_index(index)
    oracle, divergence = by_token(watched["oracle"]), by_token(watched["divergence"])
    for table in (tokens, uses):
        expected = [oracle[at] for at in table.index]
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(table["loss_coef"], expected, rtol=1e-4, atol=1e-8)
    expected = [divergence[at] for at in tokens.index]
    assert np.abs(expected).max() > 1e-5
    np.testing.assert_allclose(tokens["kl_coef"], expected, rtol=1e-3, atol=1e-7)
    # Two updates see a batch first, two more see it again, off policy.
    assert {at[3] for at in tokens.index} == {0, 1} and len(tokens) + len(uses) == run.updates[
        "tokens"
    ].sum()
    assert (
        tokens["ref_logp"].notna().all()
        and (tokens["ratio"] != 1).any()
        and (uses["ratio"] != 1).any()
    )
    assert (tokens["clipped"] == 0).mean() > (uses["clipped"] == 0).mean()


def doubtful(tokens: Any) -> torch.Tensor:
    """Weights 1 − π/2."""
    return 1 - tokens.logp.exp() / 2


def test_the_rotation_by_weights_is_that_of_a_training_with_them(tmp_path: Path):
    """The first update's gradient of two trainings, with weights in TRL's loss and without, a reference away from the policy."""
    gradients = []
    for weighted in (False, True):
        one = trainer(tmp_path / "t", beta=0.5, max_steps=1, max_grad_norm=0.0)
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in one.ref_model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=draw)
        if weighted:
            compute, logps = one._compute_loss, one._get_per_token_logps_and_entropies

            def loss(
                model: Any, inputs: Any, compute: Any = compute, logps: Any = logps
            ) -> torch.Tensor:
                ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
                seen = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
                with torch.no_grad():
                    logp = logps(model, ids, seen, inputs["completion_ids"].shape[1])[0]
                return compute(
                    model,
                    inputs | {"advantages": inputs["advantages"][:, None] * (1 - logp.exp() / 2)},
                )

            one._compute_loss = loss
        else:
            options = {"rotation": f"{__name__}:doubtful", "recording": {"rotation_every": 1}}
            record(one, out=tmp_path / "run", **options)
        watch = Watch()
        one.add_callback(watch)
        one.train()
        gradients.append(torch.cat([g.double().flatten() for g in watch.gradients[0]]))
    plain, turned = gradients
    angle = np.degrees(np.arccos(float(plain @ turned / plain.norm() / turned.norm())))
    (row,) = sharpscope.load_run(tmp_path / "run").updates.itertuples()
    assert angle > 1 and row.gradient_rotation == pytest.approx(angle, rel=1e-3)
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "run")]).output
    assert f"would turn the gradient of run by {angle:.1f}° on average" in " ".join(shown.split())
    assert row.gradient_scale == pytest.approx(float(turned.norm() / plain.norm()), rel=1e-4)


def test_weights_that_turn_nothing_or_cannot_be_compared_are_refused(tmp_path: Path):
    for given, message in (
        ({"rotation": "dapo"}, "has no token weights"),
        (
            {"recording": {"rotation_every": 1}},
            r"recording\.rotation_every: say by which token weights",
        ),
        ({"recording": {"token_gradient_every": 5}}, "token_gradient_every: unknown"),
    ):
        with pytest.raises(UserError, match=message):
            record(trainer(tmp_path / "u"), out=tmp_path / "other", **given)


def test_updates_and_steps_count_every_use_of_a_token(watched):
    """The second pass over a batch is off policy: its tokens count too, in each update and in the step's means."""
    run = watched["run"]
    table = run.updates.set_index(["step", "update"])
    assert len(table) == 6 and not table["skipped"].any()

    def of(updates: Any) -> dict[str, torch.Tensor]:
        parts = [(mask, found) for update, mask, found in watched["uses"] if update in updates]
        return {
            n: torch.cat([found[n][mask].double() for mask, found in parts])
            for n in ("ratio", "log_ratio", "clipped", "kl")
        }

    for update in range(6):
        values, row = of([update]), table.loc[(update // 4 + 1, update % 4)]
        ratio, change, clipped = (values[name] for name in ("ratio", "log_ratio", "clipped"))
        wanted = {
            "tokens": len(ratio),
            "ratio_min": float(ratio.min()),
            "ratio_max": float(ratio.max()),
        }
        wanted |= {"kl_old_k3": float((change.exp() - 1 - change).mean())}
        wanted |= {"clip_fraction_low": float((clipped < 0).double().mean())}
        wanted |= {"clip_fraction_high": float((clipped > 0).double().mean())}
        assert dict(row[list(wanted)]) == pytest.approx(wanted, abs=1e-9)
    assert table["kl_old_k3"].max() > 1e-4 and (table["lr"] == 0.02).all()
    steps = run.steps
    for row, updates in ((0, range(4)), (1, range(4, 6))):
        values = of(updates)
        assert steps["clip_fraction_low"].iloc[row] == float(
            (values["clipped"] < 0).double().mean()
        )
        assert steps["clip_fraction_high"].iloc[row] == float(
            (values["clipped"] > 0).double().mean()
        )
        assert steps["kl"].iloc[row] == pytest.approx(float(values["kl"].mean()), rel=1e-9)
    assert steps["clip_fraction_low"].iloc[0] + steps["clip_fraction_high"].iloc[0] > 0
    assert steps["redrawn_groups"].isna().all()  # TRL draws no group again, and does not say so


def test_norms_of_gradient_and_update_and_shares(watched):
    watch, run = watched["watch"], watched["run"]
    norm = [
        float(sum(g.double().square().sum() for g in gradient)) ** 0.5
        for gradient in watch.gradients
    ]
    moved = [
        float(sum((b.double() - a.double()).square().sum() for a, b in zip(one, two, strict=True)))
        ** 0.5
        for one, two in zip(watch.before, watch.after, strict=True)
    ]
    np.testing.assert_allclose(
        run.steps["grad_norm"], [np.mean(norm[:4]), np.mean(norm[4:])], rtol=1e-5
    )
    np.testing.assert_allclose(
        run.steps["update_norm"], [np.mean(moved[:4]), np.mean(moved[4:])], rtol=1e-4
    )
    assert run.steps["updates"].tolist() == [4, 2]  # the training ended within the second step
    tokens = run.tokens()
    shares = tokens.groupby(["step", "update"])["attribution"].sum()
    np.testing.assert_allclose(shares, 1.0, atol=5e-3)
    assert tokens["score_norm_local"].notna().all()


def test_rows_are_joined_through_the_shuffle(watched):
    """A row's reward, tokens, text, group and prompt belong together, and π_old is the model's at the step's start."""
    run = watched["run"]
    words = tokenizer()
    tokens = run.tokens()
    for (step, rollout), mine in some(tokens.groupby(["step", "rollout"])):
        row = run.rollouts[
            (run.rollouts["step"] == step) & (run.rollouts["rollout"] == rollout)
        ].iloc[0]
        ids = mine.sort_values("position")["token_id"].tolist()
        assert words.decode([i for i in ids if i != 1]) == row["completion"]
        spoken = words.decode(ids, skip_special_tokens=True)
        assert row["reward"] == pytest.approx(
            evens([spoken])[0] - 0.01 * len(spoken.split()), abs=1e-6
        )
        assert row["correct"] is None
        np.testing.assert_allclose(mine["advantage"], row["advantage"], rtol=1e-6)
    assert run.steps["accuracy"].isna().all() and run.steps["reward_mean"].notna().all()
    assert (run.rollouts.groupby(["step", "group"])["prompt"].nunique() == 1).all()
    assert set(run.rollouts["prompt"]) <= set(PROMPTS)
    grouped = run.rollouts.groupby(["step", "group"])["reward"]
    expected = (run.rollouts["reward"] - grouped.transform("mean")) / (
        grouped.transform("std") + 1e-4
    )
    np.testing.assert_allclose(run.rollouts["advantage"], expected, atol=1e-4)


def test_statistics_are_those_of_the_policy_at_the_steps_start(watched):
    run, watch, one = watched["run"], watched["watch"], watched["trainer"]
    with torch.no_grad():
        for parameter, value in zip(one.model.parameters(), watch.before[4], strict=True):
            parameter.copy_(value)  # the second step's first update
        row = run.rollouts[run.rollouts["step"] == 2].iloc[5]
        mine = run.tokens(steps=[2]).query(f"rollout == {row['rollout']}").sort_values("position")
        prompt = tokenizer()(row["prompt"])["input_ids"]
        ids = torch.tensor([prompt + mine["token_id"].tolist()])
        logits = one.model.eval()(input_ids=ids).logits[0, len(prompt) - 1 : -1].double()
    p = logits.softmax(-1)
    chosen = ids[0, len(prompt) :, None]
    np.testing.assert_allclose(mine["logp"], p.log().gather(1, chosen)[:, 0], atol=1e-4)
    np.testing.assert_allclose(mine["logit"], logits.gather(1, chosen)[:, 0], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(mine["entropy"], -(p * p.log()).sum(-1), atol=1e-4)
    np.testing.assert_allclose(mine["collision"], p.square().sum(-1), atol=1e-4)
    assert mine["behavior_logp"].isna().all()  # without a server TRL does not know the sampler's


def test_statistics_from_trls_own_forward_pass_are_those_of_the_recorders(
    tmp_path: Path, monkeypatch
):
    """From the second step on, where the first has shown that both agree; two micro-batches, the second use of a token off policy."""
    measured, statistics = [], Scorer.statistics
    monkeypatch.setattr(
        Scorer,
        "statistics",
        lambda *args, **named: measured.append(1) or statistics(*args, **named),
    )
    monkeypatch.setattr("sharpscope.recording.core.kl_of_step", lambda *_: None)
    runs, weights = [], []
    for same in (recorded_step.SAME, 0.0):
        monkeypatch.setattr(recorded_step, "SAME", same)
        one = trainer(tmp_path / "t", num_iterations=2, max_steps=6, temperature=0.8)
        record(
            one,
            out=tmp_path / f"run-{same}",
            recording={"token_gradients_every": 0},
            critical_sharpness=1,
        )
        one.train()
        runs.append(sharpscope.load_run(tmp_path / f"run-{same}").tokens())
        weights.append(weights_of(one))
        assert len(measured) == (1 if same else 1 + 3)
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    for name in (
        "logp",
        "logit",
        "entropy",
        "collision",
        "polarity",
        "logit_grad_norm",
        "head_grad_norm",
        "loss_coef",
    ):
        np.testing.assert_allclose(runs[0][name], runs[1][name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_statistics_of_completions_that_the_first_update_does_not_use(tmp_path: Path):
    """Two of three micro-batches are an update's: the third is used after it, when TRL's pass no longer has the step's policy."""
    sizes = {
        "steps_per_generation": 3,
        "gradient_accumulation_steps": 2,
        "num_iterations": 2,
        "max_steps": 6,
    }
    one = trainer(tmp_path / "t", **sizes)
    record(one, out=tmp_path / "run", recording={"token_gradients_every": 0})
    one.train()
    tokens = sharpscope.load_run(tmp_path / "run").tokens()
    assert (
        tokens["step"].nunique() > 1
        and (tokens["logp"] < 0).all()
        and (tokens["entropy"] > 0).all()
    )


def test_it_says_where_trls_log_probabilities_are_not_ours(tmp_path: Path):
    """TRL counts the positions of a left-padded prompt from the padding on; a model with absolute positions notices."""
    for name in ("gpt2", "qwen2"):
        one = trainer(
            tmp_path / name, architecture=name, max_steps=1, per_device_train_batch_size=16
        )
        record(one, out=tmp_path / f"{name}-run")
        one.train()
    events = sharpscope.load_run(tmp_path / "gpt2-run").events.set_index("rule")
    assert events.loc["trl_statistics", "value"] > events.loc["trl_statistics", "threshold"] == 0.1
    assert "trl_statistics" not in set(sharpscope.load_run(tmp_path / "qwen2-run").events["rule"])


class Other(GRPOTrainer):
    """A loss that does not call TRL's, as unsloth's."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        return model(input_ids=ids).logits.float().square().mean()


@pytest.mark.may_stop
def test_another_loss_does_not_end_the_training(tmp_path: Path):
    plain = trainer(tmp_path / "a", kind=Other)
    plain.train()
    one = trainer(tmp_path / "b", kind=Other)
    with pytest.warns(UserWarning, match="Other overrides compute_loss"):
        record(one, out=tmp_path / "run", recording=ALL)
    with pytest.warns(
        UserWarning, match="stopped recording at step 1 .*computes it in another way"
    ):
        one.train()
    assert all(torch.equal(a, b) for a, b in zip(weights_of(plain), weights_of(one), strict=True))
    run = sharpscope.load_run(tmp_path / "run")
    assert run.status == "interrupted" and run.events["rule"].tolist() == ["recorder"]
    assert not any(name in vars(one) for name in GrpoRecorder.wrapped)


FAILING = [
    "start",
    "begin",
    "_generated",
    "_use",
    "_keep",
    "_micro_step_done",
    "gradient_done",
    "before_update",
]
FAILING += ["observe_update", "after_update", "close_step", "_finished_step", "_judge"]


@pytest.mark.may_stop
@pytest.mark.parametrize("name", FAILING)
def test_a_recorder_that_fails_leaves_the_training_alone(
    name, tmp_path: Path, monkeypatch, unrecorded
):
    one = trainer(tmp_path / "t", **REUSED)
    recorder = record(one, out=tmp_path / "run", recording=ALL, critical_sharpness=1)
    work, calls = getattr(recorder, name), []

    def fail(*args: Any, **named: Any) -> Any:
        """Fails at its second call, if there is one."""
        calls.append(None)
        if len(calls) == 2 or name in ("start", "begin"):
            raise RuntimeError("a bug")
        return work(*args, **named)

    monkeypatch.setattr(recorder, name, fail)
    with pytest.warns(
        UserWarning,
        match=r"stopped recording at step \d \(RuntimeError: a bug\); the training goes on",
    ):
        one.train()
    assert all(torch.equal(a, b) for a, b in zip(unrecorded, weights_of(one), strict=True))
    if name not in ("start", "begin"):
        run = sharpscope.load_run(tmp_path / "run")
        assert (
            run.status == "interrupted"
            and "recorder" in set(run.events["rule"])
            and not run.verify()
        )
    assert not any(method in vars(one) for method in GrpoRecorder.wrapped)


@pytest.fixture(scope="module")
def unrecorded(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    one = trainer(tmp_path_factory.mktemp("unrecorded"), **REUSED)
    one.train()
    return weights_of(one)


def test_a_second_run_gets_a_name_of_its_own_and_a_resumed_one_goes_on(tmp_path: Path, capsys):
    whole = trainer(
        tmp_path / "t", max_steps=4, save_strategy="steps", save_steps=1, repetition_penalty=1.1
    )
    record(whole, out=tmp_path / "run", recording=ALL)
    whole.train()
    told = capsys.readouterr().err
    assert (
        f"recording to {tmp_path / 'run'} " in told
        and f"try: sharpscope show {tmp_path / 'run'}" in told
    )
    before = sharpscope.load_run(tmp_path / "run")
    assert any("repetition_penalty = 1.1" in note for note in before.info["notes"])
    steps, tokens = before.steps, before.tokens()
    again = trainer(tmp_path / "t", max_steps=4, save_strategy="steps", save_steps=1)
    record(again, out=tmp_path / "run", recording=ALL)
    again.train(resume_from_checkpoint=str(tmp_path / "t" / "checkpoint-2"))
    run = sharpscope.load_run(tmp_path / "run")
    assert run.steps["step"].tolist() == [1, 2, 3, 4] and run.info["status"] == "finished"
    assert run.steps.iloc[:2].equals(steps.iloc[:2]) and "resumed" in set(run.events["rule"])
    assert run.tokens(steps=[1, 2]).equals(tokens[tokens["step"] <= 2])
    third = trainer(tmp_path / "u", max_steps=2, save_strategy="steps", save_steps=1)
    record(third, out=tmp_path / "run")
    third.train()
    assert sharpscope.load_run(tmp_path / "run-2").steps["step"].tolist() == [1, 2]
    # in its own trace, not in `out`
    third.train(resume_from_checkpoint=str(tmp_path / "u" / "checkpoint-1"))
    runs = [sharpscope.load_run(tmp_path / name) for name in ("run", "run-2")]
    assert ["resumed" in set(one.events["rule"]) for one in runs] == [True, True]
    assert [one.steps["step"].tolist() for one in runs] == [[1, 2, 3, 4], [1, 2]]


def test_rewards_that_no_function_gave_are_not_zero(tmp_path: Path):
    def some(completions: list[str], **_: Any) -> list[float | None]:
        return [1.0 if i % 2 else None for i in range(len(completions))]

    one = trainer(tmp_path / "t", rewards=[some], max_steps=1)
    record(one, out=tmp_path / "run", correct=0.5)
    one.train()
    run = sharpscope.load_run(tmp_path / "run")
    assert (
        run.rollouts["reward"].isna().mean() == 0.5 and (run.rollouts["reward"].dropna() == 1).all()
    )
    (event,) = run.events[run.events["rule"] == "nan_reward"].itertuples()
    assert event.value == 0.5 and "8 of 16 completions" in event.message


def test_a_gradient_of_zero_is_the_reason_and_clipped_tokens_are_named(tmp_path: Path, watched):
    one = trainer(
        tmp_path / "t", rewards=[lambda completions, **_: [0.0] * len(completions)], max_steps=1
    )
    record(one, out=tmp_path / "run")
    one.train()
    assert "zero_gradient" in set(sharpscope.load_run(tmp_path / "run").events["rule"])
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "run")]).output
    assert (
        "the gradient was 0 at every step" in " ".join(shown.split())
        and "recorded (recording" not in shown
    )
    listed = CliRunner().invoke(
        app, ["tokens", str(watched["run"].path), "--step", "1", "--by", "clipped"]
    )
    assert listed.exit_code == 0 and "tokens by |clipped|" in listed.output


def test_versions_of_trl(tmp_path: Path, monkeypatch):
    for found in ("1.15.0", "0.29.1"):
        monkeypatch.setattr("sharpscope.integrations.trl.version", lambda _, found=found: found)
        with pytest.raises(UserError, match=f"TRL {found} is not supported"):
            record(trainer(tmp_path / "t"), out=tmp_path / "run")
    monkeypatch.setattr("sharpscope.integrations.trl.version", lambda _: "1.99.0")
    with pytest.warns(UserWarning, match=r"TRL 1\.99\.0 is newer than 1\.16"):
        record(trainer(tmp_path / "v"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_detach_gives_the_trainer_back(tmp_path: Path):
    one = trainer(tmp_path / "t")
    before, callbacks = (
        {name: getattr(one, name) for name in GrpoRecorder.wrapped},
        one.callback_handler.callbacks[:],
    )
    recorder = record(one, out=tmp_path / "run")
    with pytest.raises(UserError, match="recorded already"):
        record(one, out=tmp_path / "other")
    recorder.detach()
    recorder.detach()  # a second time does nothing
    assert all(
        getattr(one, name) == before[name] and name not in vars(one)
        for name in GrpoRecorder.wrapped
    )
    assert one.callback_handler.callbacks == callbacks and not (tmp_path / "run").exists()


class Fail(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == 2:
            raise RuntimeError("no space left")


def test_a_training_that_fails_leaves_a_readable_run(tmp_path: Path):
    one = trainer(tmp_path / "t")
    record(one, out=tmp_path / "run")
    one.add_callback(Fail())
    with pytest.raises(RuntimeError, match="no space left"):
        one.train()
    run = sharpscope.load_run(tmp_path / "run")
    assert run.info["status"] == "failed" and "no space left" in run.info["end"]
    assert run.steps["step"].tolist() == [1, 2] and not (tmp_path / "run" / "lock.json").exists()


def test_the_samplers_correction_is_recorded(tmp_path: Path):
    """TRL's factor comes with the batch and goes through its shuffle: each row and token gets its own."""
    one = trainer(tmp_path / "t", max_steps=1)
    generate = one._generate_and_score_completions

    def with_factor(inputs: Any) -> Any:
        output = generate(inputs)
        rows, columns = output["completion_mask"].shape
        factor = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
        return output | {"importance_sampling_ratio": factor}

    one._generate_and_score_completions = with_factor
    record(one, out=tmp_path / "run")
    one.train()
    tokens = sharpscope.load_run(tmp_path / "run").tokens()
    wide = tokens["correction"] - tokens["position"]
    assert (wide.groupby(tokens["rollout"]).nunique() == 1).all() and tokens[
        "correction"
    ].is_monotonic_increasing


def test_a_run_of_two_steps_has_norms_and_critical_sharpness_in_both(tmp_path: Path, monkeypatch):
    from sharpscope.recording import measurements

    seen: list[tuple[float, float, float]] = []
    search = measurements.critical_sharpness

    def compared(loss_fn: Any, model: Any, direction: Any, **options: Any) -> Any:
        """The slope by a central difference of TRL's own loss, and the losses on both sides of the crossing."""
        parameters, start = (
            list(model.parameters()),
            [p.detach().clone() for p in model.parameters()],
        )

        def at(eta: float) -> float:
            with torch.no_grad():
                for parameter, value, part in zip(parameters, start, direction, strict=True):
                    parameter.copy_(value - eta * part)
                value = loss_fn()
                for parameter, before in zip(parameters, start, strict=True):
                    parameter.copy_(before)
            return value

        found = search(loss_fn, model, direction, **options)
        assert found.converged, found.why
        seen.append((options["slope"], (at(-1e-5) - at(1e-5)) / 2e-5, at(0.0)))
        assert at(0.97 * found.lower) <= seen[-1][2] < at(1.03 * found.upper)
        return found

    monkeypatch.setattr(measurements, "critical_sharpness", compared)
    one = trainer(tmp_path / "t", max_steps=2, max_grad_norm=0.05)
    record(one, out=tmp_path / "run", recording={"token_gradients_every": 1}, critical_sharpness=1)
    one.train()
    for slope, difference, _ in some(seen):
        assert slope == pytest.approx(difference, rel=2e-2)
    run = sharpscope.load_run(tmp_path / "run")
    norms = run.tokens(columns=["step", "score_norm_local", "attribution"]).groupby("step").count()
    assert (norms > 0).all().all() and list(norms.index) == [1, 2]
    critical = run.probes[run.probes["quantity"] == "critical_sharpness"]
    assert (
        list(critical["step"]) == [1, 2]
        and critical["converged"].all()
        and (critical["value"] > 0).all()
    )
    threshold = run.probes[run.probes["quantity"] == "critical_threshold"]
    assert threshold["value"].tolist() == [pytest.approx(2 / 0.01)] * 2


def test_completions_that_trl_masks_for_being_truncated_keep_their_length(tmp_path: Path):
    one = trainer(tmp_path / "t", max_steps=2, mask_truncated_completions=True)
    recording = {"token_gradients_every": 1, "exact_tokens": 2, "group_share": 1.0, "spike_z": None}
    record(one, out=tmp_path / "run", recording=recording)
    one.train()
    run = sharpscope.load_run(tmp_path / "run")
    rows = run.rollouts
    assert not rows["truncated"].all()  # otherwise nothing is tested
    spoken = rows["completion"].str.split().str.len() + ~rows["truncated"]
    masked = rows["length"] == 0  # tokens that count in the loss; TRL takes a last <pad> for an end
    assert masked.any() and rows["truncated"][masked].all()
    assert (rows["length"] == spoken)[~masked].all()
    lengths = spoken.groupby(rows["step"]).mean()
    np.testing.assert_allclose(run.steps["completion_length_mean"], lengths)
    logged = [
        entry["completions/mean_length"]
        for entry in one.state.log_history
        if "completions/mean_length" in entry
    ]
    np.testing.assert_allclose(run.steps["completion_length_mean"], logged)
    # what TRL leaves out of its loss stays out of it
    tokens = run.tokens()
    assert len(tokens) == rows["length"].sum() > 0 and tokens["loss_coef"].any()


@pytest.mark.parametrize("name", CASES)
def test_trl_does_what_our_loop_does(name: str, tmp_path: Path):
    case, given = CASES[name], batch()
    texts = tokenizer().batch_decode(given.prompts)
    left = {text: [i for i, other in enumerate(texts) if other == text] for text in texts}

    def generated(prompts: list[str], _: Any) -> dict[str, Any]:
        rows = [left[text].pop(0) for text in prompts]
        ids = [given.completions[row] for row in rows]
        found = {"prompt_ids": [given.prompts[row] for row in rows], "completion_ids": ids}
        return found | {"logprobs": [[-1.0 - 0.1 * t for t in range(len(row))] for row in ids]}

    def rewarded(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [given.rewards[given.completions.index(list(ids))] for ids in completion_ids]

    options = {
        "beta": KL,
        "loss_type": case.trl_loss,
        "scale_rewards": case.scale,
        "num_iterations": EPOCHS,
    }
    options |= {
        "max_steps": EPOCHS,
        "learning_rate": LR,
        "adam_epsilon": EPS,
        "num_generations": GROUP,
    }
    options |= {"use_bias_correction_kl": False, "prompts": list(left), "rewards": [rewarded]}
    one = trainer(tmp_path / "t", rollout_func=generated, **options)
    record(
        one, out=tmp_path / "run", recording=ALL | {"exact_tokens": 100}, critical_sharpness=False
    )
    one.train()
    columns = [
        "loss_coef",
        "advantage",
        "ratio",
        "logp",
        "score_norm",
        "score_norm_local",
        "attribution",
    ]
    check_equal(our_run(tmp_path, case), sharpscope.load_run(tmp_path / "run"), columns)

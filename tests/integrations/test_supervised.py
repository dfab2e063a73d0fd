"""Recording transformers' Trainer and TRL's SFTTrainer and DPOTrainer: nothing changes, and every number is the loss's own."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

import sharpscope
from sharpscope.analysis import explain_spikes
from sharpscope.analysis.summary import verdict
from sharpscope.errors import UserError
from tests.loops import some
from tests.oracles import token_gradients as oracle

pytest.importorskip("trl", reason="TRL is not installed (test extra)")

from transformers import Trainer

from sharpscope.integrations.record import record
from tests.integrations.test_loop import drawn, logps, surrogate
from tests.integrations.trainers import (
    Weights,
    dpo_trainer,
    evens,
    plain_trainer,
    search_finely,
    sft_trainer,
    small_model,
    tokenizer,
)
from tests.integrations.two_processes import MAKERS, SLOW, fail_in_one, loop_of_two, train_all
from tests.launched import run_ranks

ALL = {"token_gradients_every": 1, "exact_tokens": 2, "group_share": 1.0}


class Halved(Trainer):
    """Half of the model's loss."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) / 2


@pytest.mark.parametrize(
    ("make", "arguments", "loss"),
    [
        (plain_trainer, {}, oracle.nll),
        (plain_trainer, {"kind": Halved}, lambda logp: oracle.nll(logp) / 2),
        (sft_trainer, {}, oracle.nll),
        (sft_trainer, {"loss_type": "dft"}, oracle.dft),
        (dpo_trainer, {"beta": 0.4}, None),
    ],
)
def test_every_number_of_a_token_is_autograds_in_float64(make, arguments, loss, tmp_path: Path):
    one = make(tmp_path / "t", max_grad_norm=0.0, **arguments)
    keep = Weights()
    one.add_callback(keep)
    record(
        one,
        out=tmp_path / "run",
        recording={"token_gradients_every": 1, "exact_tokens": 100, "group_share": 1.0},
    )
    one.train()
    run = sharpscope.load_run(tmp_path / "run")
    # an update of DPO may have no critical learning rate
    assert expected_events(run)
    compare(run, keep.before, small_model(), loss)


def expected_events(run: Any) -> bool:
    """Whether nothing is reported but what could not be measured, and effects that are withheld."""
    effects = run.events["message"].str.contains("effect")
    return bool((run.events["rule"].isin(["probe", "memory"]) | effects).all())


def rows_of(run: Any, step: int) -> tuple[Any, list[tuple[list[int], list[int]]]]:
    """The tokens of a step, and prompt and completion of each row."""
    tokens, rollouts = (
        run.tokens(steps=[step]),
        run.rollouts[run.rollouts["step"] == step].sort_values("rollout"),
    )
    ids = [
        tokens[tokens["rollout"] == row.rollout]["token_id"].tolist()
        for row in rollouts.itertuples()
    ]
    return tokens, list(
        zip((tokenizer()(prompt)["input_ids"] for prompt in rollouts["prompt"]), ids, strict=True)
    )


def compare(
    run: Any, before: list[dict[str, torch.Tensor]], made: Any, loss: Any, beta: float = 0.4
) -> None:
    """Compare each step's tokens and gradient norm with the oracle at the weights `before` it; no `loss`: that of DPO."""
    reference, model = copy.deepcopy(made).double(), copy.deepcopy(made).double()
    for step, weights in enumerate(before, 1):
        model.load_state_dict({name: value.double() for name, value in weights.items()})
        tokens, rows = rows_of(run, step)
        found = oracle.tokens_of(model, rows, loss or oracle.dpo(reference, rows, beta))
        np.testing.assert_allclose(tokens["logp"], found.logp, atol=1e-5)
        if loss is None:
            theirs = torch.cat([oracle.row_logp(reference, row) for row in rows]).detach()
            np.testing.assert_allclose(tokens["ref_logp"], theirs, atol=1e-5)
            assert (tokens["kl_coef"] == 0).all()
        else:
            assert tokens["ref_logp"].isna().all()
        np.testing.assert_allclose(tokens["loss_coef"], found.coef, rtol=1e-5, atol=1e-8)
        np.testing.assert_allclose(tokens["score_norm"], found.score_norm, rtol=1e-5)
        np.testing.assert_allclose(tokens["attribution"], found.attribution, atol=1e-5)
        assert run.steps["grad_norm"].iloc[step - 1] == pytest.approx(found.gradient_norm, rel=1e-5)


def check_critical(
    run: Any, weights: list[dict[str, torch.Tensor]], made: Any, loss: Any, beta: float = 0.4
) -> None:
    """Compare the critical sharpness of each update with a dense line search in float64 along the update that was made.

    `weights` are those before each update and at the end. The loss of DPO (no `loss`) rises above its start several times, so
    the crossing found need not be the first, and its first update, after which it falls to 0, has none.
    """
    reference, model = copy.deepcopy(made).double(), copy.deepcopy(made).double()
    critical = run.probes[run.probes["quantity"] == "critical_sharpness"]
    assert list(critical["step"]) == [*range(1, len(weights))]
    assert critical["converged"].iloc[1 if loss is None else 0 :].all()
    critical, lr = critical[critical["converged"].astype(bool)], 0.01
    for step, found in zip(critical["step"], critical["value"], strict=True):
        _, rows = rows_of(run, step)
        of_logp = loss or oracle.dpo(reference, rows, beta)
        start = {name: value.double() for name, value in weights[step - 1].items()}
        along = {name: (start[name] - value.double()) / lr for name, value in weights[step].items()}

        def total(eta, rows=rows, of_logp=of_logp, start=start, along=along) -> float:
            model.load_state_dict(
                {name: value - eta * along[name] for name, value in start.items()}
            )
            with torch.no_grad():
                return float(of_logp([oracle.row_logp(model, row) for row in rows]))

        base = total(0.0)
        assert total(0.96 * 2 / found) <= base < total(1.04 * 2 / found), step
        if loss is not None:
            grid = lr * np.geomspace(0.5, 500, 100)
            first = next(float(eta) for eta in grid if total(float(eta)) > base)
            assert first / 1.08 <= 2 / found <= first * 1.02, step


@pytest.mark.parametrize(
    ("make", "arguments", "loss"),
    [
        (plain_trainer, {"kind": Halved, "weight_decay": 0.1}, lambda logp: oracle.nll(logp) / 2),
        (sft_trainer, {}, oracle.nll),
        (dpo_trainer, {"beta": 0.4}, None),
    ],
)
def test_the_critical_sharpness_is_that_of_a_dense_line_search(
    make, arguments, loss, tmp_path: Path, monkeypatch
):
    search_finely(monkeypatch)
    one = make(tmp_path / "t", max_grad_norm=0.05, **arguments)
    keep = Weights()
    one.add_callback(keep)
    record(one, out=tmp_path / "run", critical_sharpness=1)
    one.train()
    run = sharpscope.load_run(tmp_path / "run")
    last = {name: value.detach().clone() for name, value in one.model.state_dict().items()}
    check_critical(run, [*keep.before, last], small_model(), loss)
    assert (
        run.probes.loc[run.probes["quantity"] == "critical_threshold", "value"].tolist()
        == [pytest.approx(200)] * 3
    )
    logged = [row for row in one.state.log_history if "loss" in row]
    if "num_tokens" in logged[0]:  # TRL's counter is as if its loss had been computed once
        assert logged[-1]["num_tokens"] == sum(run.rollouts["prompt"].str.split().str.len()) + len(
            run.tokens()
        )


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[Any, Any]]]:
    """The folder of two_processes.py, and for each process the weights before each update and at the end."""
    return _trained(tmp_path_factory.mktemp("ddp"), *(name for name in MAKERS if name not in SLOW))


@pytest.fixture(scope="module")
def two_more(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[Any, Any]]]:
    """As `two_processes`, of the trainings that are slow tests."""
    return _trained(tmp_path_factory.mktemp("more"), *SLOW)


def _trained(folder: Path, *names: str) -> tuple[Path, list[dict[Any, Any]]]:
    run_ranks(folder, train_all, folder, *names)
    return folder, torch.load(folder / "kept.pt", weights_only=True)


@pytest.mark.parametrize(
    ("name", "rows", "loss"),
    [
        ("sft", 8, oracle.nll),
        ("dpo_fsdp2", 16, None),
    ],
)
def test_two_processes_make_one_trace(two_processes, name, rows, loss):
    """DDP and FSDP2: the same weights, and the rows of both processes are compared with one float64 loss over all of them."""
    _check_trace(*two_processes, name, rows, loss)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "loss"), [("dpo", 16, None), ("sft_fsdp2", 8, oracle.nll)]
)
def test_two_processes_make_one_trace_of_the_others(two_more, name, rows, loss):
    _check_trace(*two_more, name, rows, loss)


def _check_trace(folder: Path, every: list[dict[Any, Any]], name: str, rows: int, loss: Any):
    """The same weights with and without the recorder, and numbers as of one float64 loss over the rows of both processes."""
    for kept in some(every):
        for plain, recorded in zip(kept[name, False], kept[name, True], strict=True):
            assert all(torch.equal(plain[key], recorded[key]) for key in plain)
    run = sharpscope.load_run(folder / name)
    assert run.status == "finished" and run.info["processes"] == 2 and expected_events(run)
    assert run.info["sharded"] == name.endswith("fsdp2")
    assert run.rollouts.groupby("step").size().tolist() == [rows] * (len(every[0][name, True]) - 1)
    compare(run, every[0][name, True][:-1], small_model(model={"tie": False}), loss, beta=0.1)
    check_critical(run, every[0][name, True], small_model(model={"tie": False}), loss, beta=0.1)


@pytest.mark.parametrize("name", ["grpo", "grpo_fsdp2"])
def test_two_processes_of_grpo_make_one_trace(two_processes, name):
    """Every number of both processes' completions is that of one float64 loss over all of them; a group is in both processes."""
    from trl import GRPOConfig

    # the default of recent versions
    corrected = getattr(GRPOConfig, "use_bias_correction_kl", False)
    folder, every = two_processes
    for kept in some(every):
        for plain, recorded in zip(kept[name, False], kept[name, True], strict=True):
            assert all(torch.equal(plain[key], recorded[key]) for key in plain)
    run, words = sharpscope.load_run(folder / name), tokenizer()
    assert run.status == "finished" and run.info["processes"] == 2 and run.info["steps_done"] == 2
    first = small_model(model={"tie": False}).double()
    model, reference = copy.deepcopy(first), copy.deepcopy(first)
    for step in (1, 2):
        tokens = run.tokens(steps=[step])
        rollouts = run.rollouts[run.rollouts["step"] == step].sort_values("rollout")
        assert rollouts["group"].tolist() == [group for group in range(3) for _ in range(4)]
        assert (rollouts.groupby("group")["prompt"].nunique() == 1).all()
        reward = torch.tensor(rollouts["reward"].to_numpy(), dtype=torch.float64).view(3, 4)
        advantage = (
            (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
        ).flatten()
        np.testing.assert_allclose(rollouts["advantage"], advantage, atol=1e-5)
        rows = []
        for row in some(rollouts.itertuples()):
            ids = tokens[tokens["rollout"] == row.rollout]["token_id"].tolist()
            spoken = words.decode(ids, skip_special_tokens=True)
            assert row.reward == pytest.approx(
                evens([spoken])[0] - 0.01 * len(spoken.split()), abs=1e-6
            )
            rows.append((words(row.prompt)["input_ids"], ids))

        def at(update: int, step: int = step) -> None:
            weights = every[0][name, True][2 * (step - 1) + update]
            model.load_state_dict({name: value.double() for name, value in weights.items()})

        at(0)
        with torch.no_grad():
            old, base = ([oracle.row_logp(one, row) for row in rows] for one in (model, reference))

        def loss(logp, old=old, base=base, advantage=advantage) -> torch.Tensor:
            total = torch.zeros((), dtype=torch.float64)
            for lp, before, ref, a in zip(logp, old, base, advantage, strict=True):
                ratio, delta = (lp - before).exp(), ref - lp
                clipped = -torch.minimum(a * ratio, a * ratio.clamp(1 - 0.05, 1 + 0.05))
                total = (
                    total
                    + (
                        clipped + 0.1 * (delta.exp() - delta - 1) * (ratio if corrected else 1)
                    ).sum()
                )
            return total / sum(map(len, logp))

        for update in (0, 1):
            at(update)
            found = oracle.tokens_of(model, rows, loss)
            row = run.updates[
                (run.updates["step"] == step) & (run.updates["update"] == update)
            ].iloc[0]
            assert row["grad_norm"] == pytest.approx(found.gradient_norm, rel=1e-5) and row[
                "tokens"
            ] == len(found.logp)
            change = found.logp - torch.cat(old)
            assert row["ratio_max"] == pytest.approx(float(change.exp().max()), rel=1e-5)
            if update == 0:
                np.testing.assert_allclose(tokens["logp"], found.logp, atol=1e-5)
                np.testing.assert_allclose(tokens["loss_coef"], found.coef, rtol=1e-5, atol=1e-8)
                np.testing.assert_allclose(tokens["score_norm"], found.score_norm, rtol=1e-5)
                np.testing.assert_allclose(tokens["attribution"], found.attribution, atol=1e-5)
        # at the second update, of a policy that has moved
        assert row["loss"] == pytest.approx(
            float(loss([oracle.row_logp(model, r).detach() for r in rows])), rel=1e-4
        )
        assert row["clip_fraction_low"] + row["clip_fraction_high"] > 0
    critical = (
        run.probes[run.probes["quantity"] == "critical_sharpness"]
        if "quantity" in run.probes
        else run.probes
    )
    assert len(critical)


def test_a_loop_in_two_processes_makes_one_trace(tmp_path: Path):
    """DDP and FSDP2: equal weights; norm, shares and coefficients are those of the mean of both processes' losses."""
    run_ranks(tmp_path, loop_of_two, tmp_path)
    for kept in some(torch.load(tmp_path / "loop.pt", weights_only=True)):
        for kind in ("ddp", "fsdp2"):
            plain, recorded = kept[kind, False], kept[kind, True]
            assert all(torch.equal(plain[key], recorded[key]) for key in plain), kind
    model = small_model(model={"tie": False})
    coefs = []
    for b in (drawn(model, rank) for rank in range(2)):
        logp = logps(model, b["ids"], b["attention"])
        logp.retain_grad()
        (surrogate(logp, b, slice(0, 16), float(b["mask"].sum())) / 2).backward()
        coefs.append(logp.grad[b["mask"][:, 1:].bool()])
    norm = float(sum(p.grad.double().square().sum() for p in model.parameters())) ** 0.5
    for kind in ("ddp", "fsdp2"):
        run = sharpscope.load_run(tmp_path / kind)
        assert (
            run.status == "finished"
            and run.info["processes"] == 2
            and run.info["sharded"] == (kind == "fsdp2")
        )
        tokens = run.tokens(steps=[1])
        np.testing.assert_allclose(tokens["loss_coef"], torch.cat(coefs), rtol=1e-4, atol=1e-8)
        assert run.updates["grad_norm"][0] == pytest.approx(norm, rel=1e-5)
        np.testing.assert_allclose(run.tokens().groupby("step")["attribution"].sum(), 1, atol=1e-3)
        assert run.rollouts.groupby("step")["group"].nunique().tolist() == [8, 8]
        assert (run.probes["quantity"] == "critical_sharpness").sum() == 2


@pytest.mark.may_stop
def test_a_recorder_that_fails_in_one_process_leaves_the_training_of_both_alone(tmp_path: Path):
    run_ranks(tmp_path, fail_in_one, tmp_path)
    first, second = torch.load(tmp_path / "failed.pt", weights_only=True)
    assert len(first) > 15
    for kind, name in some(first):
        for weights, stopped in (first[kind, name], second[kind, name]):
            plain = first[kind, "None"][0]
            assert all(torch.equal(weights[key], plain[key]) for key in plain), (kind, name)
            assert stopped == (name != "None"), (kind, name)
        if name not in ("None", "start"):
            run = sharpscope.load_run(tmp_path / f"{kind}-{name}")
            assert run.status == "interrupted", (kind, name)
            told = run.events[run.events["rule"] == "recorder"]["message"].tolist()
            assert told == ["process 1: RuntimeError: a bug"], (kind, name)


def test_launches_and_options_of_fsdp_are_refused_by_name(tmp_path: Path, monkeypatch):
    from accelerate.utils import DistributedType

    one = sft_trainer(tmp_path / "t")
    state = one.accelerator.state._shared_state
    fine = {"fsdp_version": 2, "cpu_offload": None, "activation_checkpointing": False}
    for kind, change, message in [
        ("DEEPSPEED", {}, "DeepSpeed"),
        ("MULTI_XPU", {}, "MULTI_XPU"),
        ("FSDP", {"fsdp_version": 1}, "fsdp_version = 1"),
        ("FSDP", {"cpu_offload": type("CPUOffloadPolicy", (), {})()}, "offloaded"),
        ("FSDP", {"activation_checkpointing": True}, "activation_checkpointing"),
        ("FSDP", {"optim": "adafactor"}, "optim = adafactor with FSDP"),
    ]:
        monkeypatch.setitem(state, "distributed_type", DistributedType(kind))
        monkeypatch.setitem(state, "fsdp_plugin", SimpleNamespace(**(fine | change)))
        monkeypatch.setattr(one.args, "optim", change.get("optim", "adamw_torch"))
        with pytest.raises(UserError, match=message):
            record(one, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_pairs_of_dpo_are_groups(tmp_path: Path):
    one = dpo_trainer(tmp_path / "t", max_steps=1)
    record(one, out=tmp_path / "run")
    one.train()
    run = sharpscope.load_run(tmp_path / "run")
    assert run.method == run.task == "dpo" and any(
        "beta = 0.1" in note for note in run.info["notes"]
    )
    rollouts = run.rollouts
    assert rollouts["reward_parts"].tolist() == ['{"chosen": 1.0}', '{"chosen": 0.0}'] * 4
    assert rollouts["group"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (rollouts.groupby("group")["prompt"].nunique() == 1).all()
    assert rollouts["reward"].isna().all() and run.steps["reward_mean"].isna().all()
    sums = run.tokens().groupby("rollout")["loss_coef"].sum()
    assert (sums[::2] < 0).all() and (sums[1::2] > 0).all()  # the chosen are raised


@pytest.mark.parametrize("sums", [False, True], ids=["tokens", "sums"])
def test_the_reference_of_dpo_is_the_adapter_at_the_start(sums: bool, tmp_path: Path):
    """Precomputed sums say nothing of tokens."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(
        small_model(), LoraConfig(r=2, init_lora_weights=False, target_modules="all-linear")
    )
    reference = copy.deepcopy(adapted).double()
    one = dpo_trainer(
        tmp_path / "t",
        model=adapted,
        max_steps=2,
        precompute_ref_log_probs=sums,
        without_reference=True,
    )
    record(one, out=tmp_path / "run", recording=ALL)
    one.train()
    run = sharpscope.load_run(tmp_path / "run")
    assert run.status == "finished" and run.steps["kl"].isna().all()
    first, last = (f"{value:.3g}" for value in run.steps["loss"])
    assert verdict(run).startswith(f"Loss {first} → {last}.")
    for step in (1, 2):
        tokens, rows = rows_of(run, step)
        theirs = torch.cat([oracle.row_logp(reference, row) for row in rows]).detach().numpy()
        assert len(tokens) == len(theirs) > 8 and (tokens["kl_coef"] == 0).all()
        assert (np.abs(tokens["logp"] - theirs).max() > 1e-3) == (step == 2)
        if sums:
            assert tokens["ref_logp"].isna().all()
        else:
            np.testing.assert_allclose(tokens["ref_logp"], theirs, atol=1e-5)


def test_other_trainers_and_mistakes_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="is no trainer"):
        record(object(), out=tmp_path / "run")
    one = sft_trainer(tmp_path / "t")
    with pytest.raises(UserError, match="rotation: SFTTrainer has no surrogate"):
        record(one, out=tmp_path / "run", rotation="grpo-sg")
    with pytest.raises(UserError, match="heldout_influence_every"):
        record(one, out=tmp_path / "run", recording={"heldout_influence_every": 5})
    assert not (tmp_path / "run").exists()


@pytest.mark.may_stop
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batch: batch | {"position_ids": batch["input_ids"]}, "the input 'position_ids'"),
        (
            lambda batch: {
                k: pad(v, (1, 0)) for k, v in (batch | {"labels": batch["input_ids"]}).items()
            },
            "left-padded",
        ),
    ],
)
def test_batches_that_cannot_be_recorded_end_the_recording_alone(change, message, tmp_path: Path):
    one = plain_trainer(tmp_path / "t")
    collate = one.data_collator

    def changed(rows: Any) -> Any:
        found = change(collate(rows))
        return found | {"labels": found["labels"].masked_fill(found["attention_mask"] == 0, -100)}

    one.data_collator = changed
    record(one, out=tmp_path / "run")
    with pytest.warns(UserWarning, match=message):
        one.train()
    run = sharpscope.load_run(tmp_path / "run")
    assert run.status == "interrupted" and message in run.info["end"] and one.state.global_step == 3
    (event,) = run.events.itertuples()
    assert event.rule == "recorder" and message in event.message


def test_several_turns_count_their_own_tokens_only(tmp_path: Path):
    """A conversation: two answers are in the loss, the question between them is context."""
    one = plain_trainer(
        tmp_path / "t", max_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=1
    )
    ids = torch.tensor([[2, 3, 4, 5, 6, 7, 8, 0]])
    counted = torch.tensor([[0, 0, 1, 1, 0, 1, 0, 0]])
    batch = {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": ids.masked_fill(counted == 0, -100),
    }
    one.data_collator = lambda _: batch
    reference = copy.deepcopy(one.model).double().eval()
    record(one, out=tmp_path / "run", recording=ALL)
    one.train()
    tokens = sharpscope.load_run(tmp_path / "run").tokens()
    assert tokens["token_id"].tolist() == [4, 5, 7] and tokens["position"].tolist() == [0, 1, 3]
    logp = oracle.row_logp(reference, ([2, 3], [4, 5, 6, 7]))[[0, 1, 3]]
    np.testing.assert_allclose(tokens["logp"], logp.detach(), atol=1e-5)
    np.testing.assert_allclose(tokens["loss_coef"], -1 / 3, rtol=1e-6)


def test_a_spike_of_fine_tuning_is_explained_by_its_tokens(tmp_path: Path):
    """A gradient norm that jumps on a step with a normal-looking batch: one sequence has tokens that do not belong there."""
    sizes = {"max_steps": 14, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    one = plain_trainer(tmp_path / "t", learning_rate=1e-6, **sizes)
    model, calls, usual, unlikely = one.model, [], [2, 3, *range(4, 14)], 30
    warm = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):  # until the model finds the usual sequence likely
        warm.zero_grad()
        model(input_ids=torch.tensor([usual]), labels=torch.tensor([usual])).loss.backward()
        warm.step()

    def collate(_: Any) -> dict[str, torch.Tensor]:
        calls.append(None)
        ids = torch.tensor(
            [
                usual[: 12 - (len(calls) + row) % 3] + [0] * ((len(calls) + row) % 3)
                for row in range(4)
            ]
        )
        if len(calls) == 13:
            ids[2, 8] = unlikely
        labels = ids.masked_fill(ids == 0, -100)
        labels[:, :3] = -100
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}

    one.data_collator = collate
    record(one, out=tmp_path / "run", recording={"token_gradients_every": 0})
    one.train()
    run = sharpscope.load_run(tmp_path / "run")
    (spike,) = explain_spikes(run)
    assert spike.step == 13 and spike.z > 4 and spike.grad_norm > 5 * spike.typical
    assert spike.tokens is not None
    worst = spike.tokens.head(2)  # the unlikely token, and the next one, whose context it is
    assert (
        set(worst["rollout"]) == {2}
        and set(worst["position"]) == {5, 6}
        and unlikely in set(worst["token_id"])
    )
    assert worst["attribution"].sum() > 0.99
    measured = run.tokens().dropna(subset=["attribution"])
    assert set(measured["step"]) == {13}

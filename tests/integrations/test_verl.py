"""Recording verl's actor in two processes on CPU (FSDP2): the weights do not change, and every number is a float64 loss's own."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import sharpscope
from sharpscope.errors import UserError
from sharpscope.integrations.verl import check_engine
from tests.integrations.trainers import (
    CASES,
    EPOCHS,
    EPS,
    GROUP,
    KL,
    LR,
    batch,
    check_equal,
    our_run,
    small_model,
    tokenizer,
)
from tests.loops import some
from tests.oracles.token_gradients import row_logp, tokens_of

PLUGIN = "sharpscope.integrations.verl_plugin"


def test_the_entry_point_names_a_module_that_loads():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))[
        "project"
    ]
    assert (
        project["entry-points"]["verl.plugins"] == {"sharpscope": PLUGIN}
        and "verl" in project["optional-dependencies"]
    )


def test_without_the_variable_nothing_happens(monkeypatch, capsys):
    monkeypatch.delenv("SHARPSCOPE_VERL", raising=False)
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
    importlib.import_module(PLUGIN)
    assert capsys.readouterr() == ("", "") and "verl" not in sys.modules


def test_a_plugin_that_cannot_record_says_so(monkeypatch, capsys):
    """verl would hide the error."""
    monkeypatch.setenv("SHARPSCOPE_VERL", "runs/x")
    monkeypatch.setitem(sys.modules, "verl", None)  # not installed
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
    with pytest.raises(ImportError):
        importlib.import_module(PLUGIN)
    assert "sharpscope: SHARPSCOPE_VERL=runs/x: not recording" in capsys.readouterr().err


ENGINE = {
    "strategy": "fsdp2",
    "ulysses_sequence_parallel_size": 1,
    "mixed_precision": None,
    "use_fused_kernels": False,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": "megatron"}, "strategy = megatron"),
        ({"use_fused_kernels": True}, "use_fused_kernels = True"),
        ({"ulysses_sequence_parallel_size": 2}, "ulysses_sequence_parallel_size = 2"),
        ({"mixed_precision": {"param_dtype": "fp16"}}, "mixed_precision.param_dtype = fp16"),
    ],
)
def test_what_cannot_be_recorded_is_refused_by_name(change, message):
    with pytest.raises(UserError, match=message):
        check_engine(SimpleNamespace(**(ENGINE | change)))
    check_engine(SimpleNamespace(**(ENGINE | {"mixed_precision": {"param_dtype": "bf16"}})))


# -- verl itself, in two processes

needs_verl = pytest.mark.skipif(
    find_spec("verl") is None, reason="verl is not installed (nox -s verl_recorder)"
)
EPSILON = 0.2  # as in worker.py, and KL


def trained(folder: Path, run: Path | None, plan: dict[str, Any] | None = None) -> dict[str, Any]:
    """What the two processes of worker.py kept."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("SHARPSCOPE_VERL", None)
    if run is not None:
        environment["SHARPSCOPE_VERL"] = str(run)
    out = folder / f"kept-{'plain' if run is None else run.name}.pt"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    arguments = [str(folder / "model"), str(out)]
    if plan is not None:
        torch.save(plan, folder / "plan.pt")
        arguments.append(str(folder / "plan.pt"))
    done = subprocess.run(
        [*command, "-m", "tests.integrations.verl.worker", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    failing = "SHARPSCOPE_TEST_FAIL" in os.environ
    assert ("stopped recording at step" in done.stderr) == failing, done.stderr[-3000:]
    assert failing or ("recording the actor's updates" in done.stderr) == (run is not None)
    kept: dict[str, Any] = torch.load(out, weights_only=True)
    return kept


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """(kept without, kept with the recorder, the run)."""
    folder = tmp_path_factory.mktemp("verl")
    small_model().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    return trained(folder, None), trained(folder, folder / "run"), folder / "run"


FAILING = ("_begin", "_watch", "_updated", "_made", "_write")


@needs_verl
@pytest.mark.parametrize("name", FAILING)
def test_a_recorder_that_fails_in_one_process_leaves_the_training_alone(
    name: str, pair, tmp_path: Path, monkeypatch
):
    plain, _, path = pair
    monkeypatch.setenv("SHARPSCOPE_TEST_FAIL", name)
    (tmp_path / "model").symlink_to(path.parent / "model")
    kept = trained(tmp_path, tmp_path / "run")
    assert all(
        torch.equal(a[key], b[key])
        for a, b in zip(plain["weights"], kept["weights"], strict=True)
        for key in a
    )
    if name == "_write":  # the others fail before the run is made
        run = sharpscope.load_run(tmp_path / "run")
        assert run.status == "interrupted" and "process 1: RuntimeError: a bug" in set(
            run.events["message"]
        )


Row = tuple[tuple[int, ...], tuple[int, ...]]  # prompt, completion


def rows_of(rollouts: pd.DataFrame) -> list[Row]:
    """The completions of a step's rows of the rollouts table."""
    ids = [(json.loads(row.token_ids), row.prompt_tokens) for row in rollouts.itertuples()]
    return [(tuple(row[:prompt]), tuple(row[prompt:])) for row, prompt in ids]


def given_of(kept: dict[str, Any], step: int) -> dict[Row, dict[str, torch.Tensor]]:
    """What both processes' batches of a step gave of each completion."""
    names = ("old_log_probs", "ref_log_prob", "rollout_log_probs", "advantages")
    values = {}
    for own in kept["batches"]:
        batch = own[step - 1]
        for row in range(8):
            key = (tuple(batch["prompts"][row].tolist()), tuple(batch["responses"][row].tolist()))
            values[key] = {name: batch[name][row].double() for name in names}
            values[key]["mask"] = batch["response_mask"][row].bool()
    return values


def loss_of(known: list[dict[str, torch.Tensor]]) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """verl's loss of some completions as a function of their log-probabilities: clip with its dual clip at 3, KL (k3), token mean."""
    count = sum(int(one["mask"].sum()) for one in known)

    def loss(logp: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for one, lp in zip(known, logp, strict=True):
            for t in range(len(lp)):
                if not one["mask"][t]:
                    continue
                a, r = one["advantages"][t], (lp[t] - one["old_log_probs"][t]).exp()
                each = torch.maximum(-a * r, -a * r.clamp(1 - EPSILON, 1 + EPSILON))
                if a < 0:
                    each = torch.minimum(each, -a * 3.0)
                delta = one["ref_log_prob"][t] - lp[t]
                # as verl bounds it
                total = total + each + KL * (delta.exp() - delta - 1).clamp(max=10)
        return total / count

    return loss


@needs_verl
def test_the_same_weights_with_and_without_the_recorder(pair):
    plain, recorded, _ = pair
    # before each of 2 steps × 2 epochs × 2 mini-batches, and at the end
    assert len(plain["weights"]) == 9
    for one, two in zip(plain["weights"], recorded["weights"], strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(
        plain["weights"][0]["lm_head.weight"], plain["weights"][-1]["lm_head.weight"]
    )


@needs_verl
def test_rows_are_those_of_the_batches(pair):
    _, kept, path = pair
    run = sharpscope.load_run(path)
    assert (
        run.status == "finished"
        and run.info["processes"] == 2
        and run.info["method"] == "verl vanilla"
    )
    for step in (1, 2):
        rollouts = run.rollouts[run.rollouts["step"] == step]
        given = {}
        for one in (own[step - 1] for own in kept["batches"]):
            for row in range(8):
                if not one["uid"][row].startswith("pad"):
                    key = (
                        tuple(one["prompts"][row].tolist()),
                        tuple(one["responses"][row].tolist()),
                    )
                    given[key] = one["uid"][row], float(one["rm_scores"][row].sum())
        found = rows_of(rollouts)
        assert len(found) == len(given) == 15 and set(found) == set(given)
        uids = [given[row][0] for row in found]
        numbers = {uid: place for place, uid in enumerate(dict.fromkeys(uids))}
        assert (
            rollouts["group"].tolist()
            == [numbers[uid] for uid in uids]
            == sorted(rollouts["group"])
        )
        np.testing.assert_allclose(rollouts["reward"], [given[row][1] for row in found], rtol=1e-6)


@needs_verl
def test_every_number_of_a_token_is_autograds_in_float64(pair):
    """verl's PPO clip with its dual clip at 3, a KL term (k3) and the token mean, over both processes' rows of an update."""
    _, kept, path = pair
    run, model = sharpscope.load_run(path), small_model().double()
    table = run.updates
    for step in (1, 2):
        tokens, rollouts = run.tokens(steps=[step]), run.rollouts[run.rollouts["step"] == step]
        values, rows = given_of(kept, step), rows_of(rollouts)
        every = pd.concat([tokens, run.uses[run.uses["step"] == step]])  # each use of a token
        assert set(tokens["update"]) == {0, 1} and set(every["update"]) == {0, 1, 2, 3}
        for update in range(4):
            weights = kept["weights"][4 * (step - 1) + update]
            model.load_state_dict({name: value.double() for name, value in weights.items()})
            part = every[every["update"] == update].sort_values(["rollout", "position"])
            mine = sorted(set(part["rollout"]))
            loss = loss_of([values[rows[index]] for index in mine])
            count = sum(int(values[rows[index]]["mask"].sum()) for index in mine)
            found = tokens_of(model, [rows[i] for i in mine], loss)
            inside = torch.cat([values[rows[i]]["mask"] for i in mine])
            np.testing.assert_allclose(part["loss_coef"], found.coef[inside], rtol=1e-4, atol=1e-7)
            old = torch.cat([values[rows[i]]["old_log_probs"] for i in mine])[inside]
            np.testing.assert_allclose(part["ratio"], (found.logp[inside] - old).exp(), rtol=1e-5)
            first = tokens[tokens["rollout"].isin(mine)]
            np.testing.assert_allclose(first["logp"], old, rtol=1e-6)
            sampler = torch.cat([values[rows[i]]["rollout_log_probs"] for i in mine])[inside]
            np.testing.assert_allclose(first["behavior_logp"], sampler, rtol=1e-6)
            row = table[(table["step"] == step) & (table["update"] == update)].iloc[0]
            assert row["grad_norm"] == pytest.approx(found.gradient_norm, rel=1e-5)
            change = found.logp[inside] - old
            with torch.no_grad():
                assert row["loss"] == pytest.approx(
                    float(loss([row_logp(model, rows[i]) for i in mine])), rel=1e-5
                )
            assert row["tokens"] == count == len(change)
            assert row["kl_old_k3"] == pytest.approx(
                float((torch.expm1(change) - change).mean()), rel=1e-3, abs=1e-7
            )
            layers = json.loads(row["grad_norm_by_layer"])
            assert len(layers) > 3
            assert sum(v**2 for v in layers.values()) ** 0.5 == pytest.approx(
                row["grad_norm"], rel=1e-4
            )
            assert row["ratio_max"] == pytest.approx(float(change.exp().max()), rel=1e-5)
        for update in range(4):
            index = 4 * (step - 1) + update
            before, after = (kept["weights"][i] for i in (index, index + 1))
            # without the second name of a tied matrix
            names = dict(small_model().named_parameters())
            size = (
                float(sum((after[n].double() - before[n].double()).square().sum() for n in names))
                ** 0.5
            )
            row = table[(table["step"] == step) & (table["update"] == update)].iloc[0]
            assert row["update_norm"] == pytest.approx(size, rel=1e-4)
    tokens = run.tokens()
    assert (tokens["loss_coef"].abs() > 1e-4).mean() > 0.5 and (
        np.abs(tokens["ratio"] - 1) > 0.2
    ).any()


SETTINGS: dict[str, dict[str, Any]] = {
    "packed": {"packed": True},  # use_remove_padding
    "replicas": {"engine": {"fsdp_size": 1}},  # each process holds the whole model (HSDP)
    "fsdp": {"engine": {"strategy": "fsdp"}},
}


@needs_verl
def test_packing_and_sharding_do_not_change_the_numbers(tmp_path: Path):
    small_model().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    runs = {}
    for name, plan in {"padded": {}, **SETTINGS}.items():
        trained(tmp_path, tmp_path / name, {"data": {"epochs": 1}, **plan})
        runs[name] = sharpscope.load_run(tmp_path / name)
    base = runs.pop("padded")
    for name, run in some(runs.items()):
        columns = ["token_id", "logp", "loss_coef", "ratio", "update"]
        for column in some(columns):
            np.testing.assert_allclose(
                run.tokens()[column],
                base.tokens()[column],
                rtol=1e-4,
                atol=1e-6,
                err_msg=f"{name} {column}",
            )
        for column in ("grad_norm", "update_norm"):
            np.testing.assert_allclose(
                run.updates[column], base.updates[column], rtol=1e-4, err_msg=f"{name} {column}"
            )


@needs_verl
@pytest.mark.parametrize("name", CASES)
def test_verl_does_what_our_loop_does(name: str, tmp_path: Path):
    """One model trained on one batch: the same coefficients, gradient norms and updates; advantages are those of verl's own."""
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    case, given = CASES[name], batch()
    ours = our_run(tmp_path, case)
    count = len(given.completions)
    advantages, _ = compute_grpo_outcome_advantage(
        torch.tensor(given.rewards, dtype=torch.float64)[:, None],
        torch.ones(count, 1),
        np.array([str(row // GROUP) for row in range(count)]),
        epsilon=1e-4,
        norm_adv_by_std_in_grpo=case.verl_std,
    )
    halves = []
    for rows in (range(count // 2), range(count // 2, count)):
        lengths = [len(given.completions[i]) for i in rows]
        half = {"uid": [str(i // GROUP) for i in rows], "reward": [given.rewards[i] for i in rows]}
        half["prompts"] = [torch.tensor(given.prompts[i]) for i in rows]
        half["responses"] = [torch.tensor(given.completions[i]) for i in rows]
        half["response_mask"] = [torch.ones(n, dtype=torch.long) for n in lengths]
        half["advantages"] = [
            advantages[i].float().expand(n).clone() for i, n in zip(rows, lengths, strict=True)
        ]
        half["noise"] = [torch.zeros(n, 2) for n in lengths]
        halves.append(half)
    plan = {
        "batches": [[half] for half in halves],
        "optimizer": {"lr": LR, "weight_decay": 0.0, "override_optimizer_config": {"eps": EPS}},
        "actor": {"loss_agg_mode": case.verl_loss, "kl_loss_coef": KL},
        "data": {"mini_batch_size": count, "global_batch_size": count, "epochs": EPOCHS},
    }
    trained(tmp_path, tmp_path / "run", plan)
    check_equal(
        ours, sharpscope.load_run(tmp_path / "run"), ["loss_coef", "advantage", "ratio", "logp"]
    )

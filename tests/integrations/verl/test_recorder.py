"""Recording verl's actor in two processes on CPU (FSDP2): the weights do not change, and every number is a float64 loss's own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import sharpscope
from sharpscope.errors import UserError
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
from tests.models import keep_double_precision
from tests.oracles.token_gradients import local_token_gradients, row_logp, squared_norms, tokens_of

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed (nox -s verl_recorder)", allow_module_level=True)

EPSILON = 0.2  # as in worker.py, and KL


def trained(folder: Path, run: Path | None, plan: dict[str, Any] | None = None) -> dict[str, Any]:
    """What the two processes of worker.py kept."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("SHARPSCOPE_VERL", None)
    environment |= {"SHARPSCOPE_VERL_NORMS_EVERY": "2", "SHARPSCOPE_VERL_CRITICAL_EVERY": "1"}
    if run is not None:
        environment["SHARPSCOPE_VERL"] = str(run)
    out = folder / f"kept-{'plain' if run is None else run.name}.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
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


FAILING = ("_begin", "_watch", "_before", "_after", "_made", "_critical", "_write")


@pytest.mark.parametrize("name", FAILING)
def test_a_recorder_that_fails_in_one_process_leaves_the_training_alone(name: str, pair, tmp_path: Path, monkeypatch):
    plain, _, path = pair
    monkeypatch.setenv("SHARPSCOPE_TEST_FAIL", name)
    (tmp_path / "model").symlink_to(path.parent / "model")
    kept = trained(tmp_path, tmp_path / "run")
    assert all(torch.equal(a[key], b[key]) for a, b in zip(plain["weights"], kept["weights"], strict=True) for key in a)
    if name == "_write":  # the others fail before the run is made
        run = sharpscope.load_run(tmp_path / "run")
        assert run.status == "interrupted" and "process 1: RuntimeError: a bug" in set(run.events["message"])


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
                total = total + each + KL * (delta.exp() - delta - 1).clamp(max=10)  # as verl bounds it
        return total / count

    return loss


def test_the_same_weights_with_and_without_the_recorder(pair):
    plain, recorded, _ = pair
    assert len(plain["weights"]) == 9  # before each of 2 steps × 2 epochs × 2 mini-batches, and at the end
    for one, two in zip(plain["weights"], recorded["weights"], strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(plain["weights"][0]["lm_head.weight"], plain["weights"][-1]["lm_head.weight"])


def test_rows_are_those_of_the_batches(pair):
    _, kept, path = pair
    run = sharpscope.load_run(path)
    assert run.status == "finished" and run.info["processes"] == 2 and run.info["method"] == "verl vanilla"
    for step in (1, 2):
        rollouts = run.rollouts[run.rollouts["step"] == step]
        given = {}
        for one in (own[step - 1] for own in kept["batches"]):
            for row in range(8):
                if not one["uid"][row].startswith("pad"):
                    key = (tuple(one["prompts"][row].tolist()), tuple(one["responses"][row].tolist()))
                    given[key] = one["uid"][row], float(one["rm_scores"][row].sum())
        found = rows_of(rollouts)
        assert len(found) == len(given) == 15 and set(found) == set(given)
        uids = [given[row][0] for row in found]
        numbers = {uid: place for place, uid in enumerate(dict.fromkeys(uids))}
        assert rollouts["group"].tolist() == [numbers[uid] for uid in uids] == sorted(rollouts["group"])
        np.testing.assert_allclose(rollouts["reward"], [given[row][1] for row in found], rtol=1e-6)


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
                assert row["loss"] == pytest.approx(float(loss([row_logp(model, rows[i]) for i in mine])), rel=1e-5)
            assert row["tokens"] == count == len(change)
            assert row["kl_old_k3"] == pytest.approx(float((torch.expm1(change) - change).mean()), rel=1e-3, abs=1e-7)
            layers = json.loads(row["grad_norm_by_layer"])
            assert (
                sum(v**2 for v in layers.values()) ** 0.5 == pytest.approx(row["grad_norm"], rel=1e-4)
                and len(layers) > 3
            )
            assert row["ratio_max"] == pytest.approx(float(change.exp().max()), rel=1e-5)
        for update in range(4):
            index = 4 * (step - 1) + update
            before, after = (
                torch.cat([v.double().flatten() for v in kept["weights"][i].values()]) for i in (index, index + 1)
            )
            row = table[(table["step"] == step) & (table["update"] == update)].iloc[0]
            size = float((after - before).norm())
            tied = torch.equal(kept["weights"][0]["lm_head.weight"], kept["weights"][0]["model.embed_tokens.weight"])
            if tied:  # the state dict has the tied matrix twice
                twice = (
                    kept["weights"][index + 1]["lm_head.weight"].double()
                    - kept["weights"][index]["lm_head.weight"].double()
                )
                size = float(torch.sqrt(torch.tensor(size**2) - twice.square().sum()))
            assert row["update_norm"] == pytest.approx(size, rel=1e-4)
    tokens = run.tokens()
    assert (tokens["loss_coef"].abs() > 1e-4).mean() > 0.5 and (np.abs(tokens["ratio"] - 1) > 0.2).any()


def test_score_norms_are_autograds_in_float64(pair):
    """Measured through the shards at the start of a step, here of both: loops over tokens at the weights that were kept."""
    _, kept, path = pair
    run, model = sharpscope.load_run(path), small_model().double()
    keep_double_precision(model)
    assert run.events[run.events["rule"] == "self_check"].empty
    for step in (1, 2):
        model.load_state_dict({name: value.double() for name, value in kept["weights"][4 * (step - 1)].items()})
        tokens, rollouts = run.tokens(steps=[step]), run.rollouts[run.rollouts["step"] == step]
        for row in rollouts.itertuples():
            mine = tokens[tokens["rollout"] == row.rollout].sort_values("position")
            ids = torch.tensor([json.loads(row.token_ids)])
            mask = torch.zeros_like(ids)
            mask[0, row.prompt_tokens + mine["position"].to_numpy()] = 1
            squares = squared_norms(local_token_gradients(model, ids, mask), ids.shape)[mask.bool()]
            np.testing.assert_allclose(mine["score_norm_local"], squares.sqrt(), rtol=2e-5)


def test_critical_sharpness_is_that_of_a_dense_line_search(pair):
    """Along the first update of each step, as it was made, in float64 and one process."""
    _, kept, path = pair
    run, model = sharpscope.load_run(path), small_model().double()
    keep_double_precision(model)
    critical = run.probes[run.probes["quantity"] == "critical_sharpness"]
    assert (
        critical["step"].tolist() == [1, 2]
        and critical["converged"].all()
        and (critical["functional"] == "surrogate").all()
    )
    assert run.probes.loc[run.probes["quantity"] == "critical_threshold", "value"].tolist() == pytest.approx(
        [2 / 0.01] * 2
    )
    for step, found in zip(critical["step"], critical["value"], strict=True):
        tokens, rows = run.tokens(steps=[step]), rows_of(run.rollouts[run.rollouts["step"] == step])
        mine = [rows[index] for index in sorted(set(tokens.loc[tokens["update"] == 0, "rollout"]))]
        of_logp = loss_of([given_of(kept, step)[row] for row in mine])
        before, after = kept["weights"][4 * (step - 1) : 4 * (step - 1) + 2]
        start = {name: value.double() for name, value in before.items()}
        along = {name: (start[name] - value.double()) / 0.01 for name, value in after.items()}

        def rise(eta: float, start: Any = start, along: Any = along, of_logp: Any = of_logp, mine: Any = mine) -> float:
            losses = []
            for size in (0.0, eta):
                model.load_state_dict({name: value - size * along[name] for name, value in start.items()})
                with torch.no_grad():
                    losses.append(float(of_logp([row_logp(model, row) for row in mine])))
            return losses[1] - losses[0]

        grid = 0.01 * np.geomspace(0.02, 100, 400)
        first = next(index for index, eta in enumerate(grid) if rise(float(eta)) > 0)
        assert found == pytest.approx(2 / np.sqrt(grid[first - 1] * grid[first]), rel=0.1), step  # within its bracket
        slope = run.probes[(run.probes["step"] == step) & (run.probes["quantity"] == "update_slope")]["value"].item()
        assert -rise(1e-7) / 1e-7 == pytest.approx(slope, rel=1e-4)


SETTINGS: dict[str, dict[str, Any]] = {
    "packed": {"packed": True},  # use_remove_padding
    "replicas": {"engine": {"fsdp_size": 1}},  # each process holds the whole model (HSDP)
    "fsdp": {"engine": {"strategy": "fsdp"}},
}


def test_packing_and_sharding_do_not_change_the_numbers(tmp_path: Path):
    small_model().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    runs = {}
    for name, plan in {"padded": {}, **SETTINGS}.items():
        trained(tmp_path, tmp_path / name, {"data": {"epochs": 1}, **plan})
        runs[name] = sharpscope.load_run(tmp_path / name)
    base = runs.pop("padded")
    for name, run in runs.items():
        columns = ["token_id", "logp", "loss_coef", "ratio", "update"]
        refused = run.events[run.events["rule"] == "self_check"]["message"].tolist()
        if name == "fsdp":
            assert refused == [
                f"{what} is left out from here on: strategy = fsdp: needs fsdp2"
                for what in ("score_norm_local", "critical_sharpness")
            ]
        else:
            assert not refused
            columns.append("score_norm_local")
            one, two = (run.probes.loc[run.probes["quantity"] == "critical_sharpness", "value"] for run in (run, base))
            np.testing.assert_allclose(one, two, rtol=0.05, err_msg=name)
            two = base.probes.loc[base.probes["quantity"] == "update_slope", "value"]
            one = run.probes.loc[run.probes["quantity"] == "update_slope", "value"]
            np.testing.assert_allclose(one, two, rtol=1e-3, err_msg=name)
        for column in columns:
            np.testing.assert_allclose(
                run.tokens()[column], base.tokens()[column], rtol=1e-4, atol=1e-6, err_msg=f"{name} {column}"
            )
        for column in ("grad_norm", "update_norm"):
            np.testing.assert_allclose(run.updates[column], base.updates[column], rtol=1e-4, err_msg=f"{name} {column}")


@pytest.mark.parametrize(
    ("main", "override", "message"),
    [
        ("ppo_megatron_trainer", "actor_rollout_ref.actor.strategy=megatron", "strategy = megatron"),
        ("ppo_trainer", "actor_rollout_ref.model.use_fused_kernels=True", "use_fused_kernels = True"),
        ("ppo_trainer", "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp16", "param_dtype = fp16"),
        ("ppo_trainer", "actor_rollout_ref.actor.strategy=fsdp2", None),
    ],
)
def test_verls_options_are_refused_before_the_actor_is_built(main, override, message, monkeypatch, tmp_path):
    from hydra import compose, initialize_config_module
    from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

    from sharpscope.integrations.verl import install

    built: list[Any] = []
    for owner, name in (
        (TrainingWorker, "train_mini_batch"),
        (TrainingWorker, "train_batch"),
        (TrainingWorker, "_sharpscope"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name, False), raising=False)  # restores it
    monkeypatch.setattr(ActorRolloutRefWorker, "init_model", built.append)
    install(str(tmp_path / "run"))
    sizes = [f"actor_rollout_ref.actor.{name}=4" for name in ("ppo_micro_batch_size_per_gpu", "ppo_mini_batch_size")]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(main, overrides=[override, *sizes, "actor_rollout_ref.rollout.n=1"]).actor_rollout_ref
    worker: Any = SimpleNamespace(role="actor_rollout_ref", config=config)
    if message is None:
        ActorRolloutRefWorker.init_model(worker)
        assert built == [worker]
        return
    with pytest.raises(UserError, match=message):
        ActorRolloutRefWorker.init_model(worker)
    ActorRolloutRefWorker.init_model(SimpleNamespace(role="ref", config=config))  # only the actor is recorded
    assert len(built) == 1 and not (tmp_path / "run").exists()


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
        halves.append(
            {
                "prompts": [torch.tensor(given.prompts[i]) for i in rows],
                "responses": [torch.tensor(given.completions[i]) for i in rows],
                "response_mask": [torch.ones(n, dtype=torch.long) for n in lengths],
                "advantages": [advantages[i].float().expand(n).clone() for i, n in zip(rows, lengths, strict=True)],
                "noise": [torch.zeros(n, 2) for n in lengths],
                "uid": [str(i // GROUP) for i in rows],
                "reward": [given.rewards[i] for i in rows],
            }
        )
    plan = {
        "batches": [[half] for half in halves],
        "optimizer": {"lr": LR, "weight_decay": 0.0, "override_optimizer_config": {"eps": EPS}},
        "actor": {"loss_agg_mode": case.verl_loss, "kl_loss_coef": KL},
        "data": {"mini_batch_size": count, "global_batch_size": count, "epochs": EPOCHS},
    }
    trained(tmp_path, tmp_path / "run", plan)
    check_equal(ours, sharpscope.load_run(tmp_path / "run"), ["loss_coef", "advantage", "ratio", "logp"])

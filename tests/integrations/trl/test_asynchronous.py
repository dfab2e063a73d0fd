"""Ten steps of AsyncGRPOTrainer with a rollout worker of given samples: nothing changes, and every number is a float64 loss's own.

TRL's attention on trees of tokens is a kernel for GPUs; `attention` takes its place here, one segment and head at a time.
"""

from __future__ import annotations

import json
import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import sharpscope
from sharpscope.cli import app
from sharpscope.errors import UserError
from tests.integrations.trainers import Weights, settings, small_model, tokenizer
from tests.oracles.supervised import tokens_of

pytest.importorskip("trl.experimental.async_grpo.packing", reason="TRL has no AsyncGRPOTrainer on trees (1.16)")

from datasets import Dataset
from trl.experimental import async_grpo
from trl.experimental.async_grpo import async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from sharpscope.integrations.trl import record

STEPS, MICRO, SIZE, GROUP, EPSILON, TEMPERATURE = 10, 2, 8, 4, 0.2, 0.8


def attention(query: Any, key: Any, value: Any, starts_q: Any, starts_k: Any, *_: Any, **options: Any) -> torch.Tensor:
    """Causal attention of each segment to its path, whose last positions are the segment's own."""
    out = torch.empty_like(query)
    repeat = query.shape[1] // key.shape[1]
    for s in range(len(starts_q) - 1):
        rows, columns = slice(starts_q[s], starts_q[s + 1]), slice(starts_k[s], starts_k[s + 1])
        q, k, v = query[rows], key[columns].repeat_interleave(repeat, 1), value[columns].repeat_interleave(repeat, 1)
        later = torch.arange(len(k)) > torch.arange(len(q))[:, None] + len(k) - len(q)
        scores = torch.einsum("qhd,khd->hqk", q, k) * options["softmax_scale"]
        out[rows] = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)
    return out


class Worker:
    """Hands out given samples."""

    def __init__(self, samples: list[RolloutSample]) -> None:
        self.rollout_buffer: queue.Queue = queue.Queue()
        self.metrics_queue: queue.Queue = queue.Queue()
        for sample in samples:
            self.rollout_buffer.put(sample)

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def update_model_version(self, version: int) -> None: ...
    def check_health(self, stale_after_s: float) -> None:
        raise RuntimeError("no samples left")


class NoTransfer:
    """Sends no weights."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def send_weights(self, weights: Any) -> None:
        for _ in weights:
            pass

    def resume(self) -> None: ...
    def destroy(self) -> None: ...


def samples() -> list[RolloutSample]:
    """Groups of 4: completions of one prompt that begin alike, one with a tool's tokens, sampled by a policy far away."""
    draw = np.random.default_rng(3)
    made = []
    for group in range(STEPS * MICRO * SIZE // GROUP + SIZE):
        prompt = draw.integers(2, 37, draw.integers(1, 4)).tolist()
        same = draw.integers(2, 37, 2).tolist()
        rewards = draw.normal(size=GROUP) if group % 3 else np.ones(GROUP)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        for row in range(GROUP):
            own = draw.integers(2, 37, draw.integers(1, 5)).tolist()
            completion = [*(same if row < 3 else []), *own, 1]
            mask = np.ones(len(completion), dtype=np.int64)
            mask[1] = row != 2  # from a tool
            sampled = np.minimum(-2.5 + 0.8 * draw.normal(size=len(completion)), -0.01)
            made.append(
                RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=np.array(prompt + completion),
                    completion_mask=np.concatenate([np.zeros(len(prompt), dtype=np.int64), mask]),
                    old_log_probs=np.concatenate([np.zeros(len(prompt)), sampled]).astype(np.float32),
                    advantage=float(advantages[row]),
                    model_version=10**6,  # never stale
                    group_id=group,
                    metrics={"reward": float(rewards[row]), "rewards/own": float(rewards[row]) / 2},
                )
            )
    return made


def trainer(folder: Path, kind: Any = None) -> Any:
    small_model(model={"tie": False}).save_pretrained(folder / "model")
    options = {
        "per_device_train_batch_size": SIZE,
        "gradient_accumulation_steps": MICRO,
        "max_steps": STEPS,
        "num_generations": GROUP,
        "token_budget": 0,
        "temperature": TEMPERATURE,
        "epsilon": EPSILON,
        "dtype": "float32",
        "max_grad_norm": 0.0,
    }
    return (kind or async_grpo.AsyncGRPOTrainer)(
        model=str(folder / "model"),
        args=async_grpo.AsyncGRPOConfig(**settings(folder / "t", **options)),
        train_dataset=Dataset.from_dict({"prompt": ["w2"]}),
        processing_class=tokenizer(),
        reward_funcs=[],
        rollout_worker=Worker(samples()),
        weight_transfer=NoTransfer(),
    )


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)  # asks for the GPU's name
    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=attention))


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """The run, and the weights before each update and at the end; compared with a training without the recorder."""
    kept = []
    for name in ("plain", "recorded"):
        one, keep = trainer(tmp_path / name), Weights()
        one.add_callback(keep)
        if name == "recorded":
            record(
                one,
                out=tmp_path / "run",
                recording={"token_gradients_every": 3, "exact_tokens": 200, "group_share": 1.0},
            )
        one.train()
        kept.append([*keep.before, {k: v.detach().clone() for k, v in one.model.state_dict().items()}])
    assert len(kept[0]) == STEPS + 1 and not torch.equal(*(kept[0][i]["lm_head.weight"] for i in (0, -1)))
    for plain, other in zip(*kept, strict=True):
        assert all(torch.equal(plain[key], other[key]) for key in plain)
    return sharpscope.load_run(tmp_path / "run"), kept[1]


def test_ten_steps(recorded, tmp_path: Path):
    run, weights = recorded
    assert run.status == "finished" and run.info["trainer"]["name"] == "AsyncGRPOTrainer" and len(run.steps) == STEPS
    assert set(run.events["rule"]) <= {"sampler_ratio", "logp_mismatch"}
    given = {tuple(sample.input_ids.tolist()): sample for sample in samples()}
    assert len(given) == len(samples())
    model = small_model(model={"tie": False}).double()
    shared = 0
    for step in (1, 2, 3, 10):
        model.load_state_dict({name: value.double() for name, value in weights[step - 1].items()})
        model.set_output_embeddings(Cooled(model.lm_head))
        tokens = run.tokens(steps=[step])
        rollouts = run.rollouts[run.rollouts["step"] == step].sort_values("rollout")
        assert len(rollouts) == MICRO * SIZE and (rollouts.groupby("group")["prompt"].nunique() == 1).all()
        assert rollouts["group"].nunique() == MICRO * SIZE // GROUP
        mine = []
        for row in rollouts.itertuples():
            prompt = tokenizer()(row.prompt)["input_ids"]
            sample = given[tuple(prompt + tokenizer()(row.completion)["input_ids"])]
            mine.append((prompt, sample))
            assert row.reward == pytest.approx(sample.metrics["reward"], abs=1e-6)
            assert row.advantage == pytest.approx(sample.advantage, abs=1e-6)
            assert json.loads(row.reward_parts) == {"own": sample.metrics["rewards/own"]}
        rows = [(prompt, sample.input_ids[len(prompt) :].tolist()) for prompt, sample in mine]
        masks = [torch.tensor(sample.completion_mask[len(prompt) :]).bool() for prompt, sample in mine]
        old = [torch.tensor(sample.old_log_probs[len(prompt) :]).double() for prompt, sample in mine]

        def loss(logp: list[torch.Tensor], mine=mine, masks=masks, old=old) -> torch.Tensor:
            total = torch.zeros((), dtype=torch.float64)
            for micro in range(MICRO):
                part = range(micro * SIZE, (micro + 1) * SIZE)
                count = sum(int(masks[i].sum()) for i in part)
                for i in part:
                    ratio, a = (logp[i] - old[i]).exp()[masks[i]], mine[i][1].advantage
                    clipped = torch.minimum(a * ratio, a * ratio.clamp(1 - EPSILON, 1 + EPSILON))
                    total = total - clipped.sum() / count / MICRO
            return total

        found = tokens_of(model, rows, loss)
        inside = torch.cat(masks)
        assert len(tokens) == int(inside.sum())
        np.testing.assert_allclose(tokens["loss_coef"], found.coef[inside], rtol=1e-4, atol=1e-8)
        np.testing.assert_allclose(tokens["logp"], found.logp[inside], atol=1e-5)
        np.testing.assert_allclose(tokens["behavior_logp"], torch.cat(old)[inside], rtol=1e-6)
        np.testing.assert_allclose(tokens["ratio"], (found.logp - torch.cat(old)).exp()[inside], rtol=1e-4)
        assert run.steps["grad_norm"].iloc[step - 1] == pytest.approx(found.gradient_norm, rel=1e-5)
        with torch.no_grad():
            total = float(loss([part.detach() for part in found.logp.split([len(m) for m in masks])]))
        assert run.steps["loss"].iloc[step - 1] == pytest.approx(total, rel=1e-5, abs=1e-7)
        if step in (1, 3):  # measured
            np.testing.assert_allclose(tokens["score_norm"], found.score_norm[inside], rtol=1e-4)
            np.testing.assert_allclose(tokens["attribution"], found.attribution[inside], atol=1e-5)
        shared += len({(tuple(p), tuple(c[:1])) for p, c in rows}) < len(rows)
    assert shared  # rows that share trained positions of a tree
    for name in ("show", "tokens"):
        extra = ["--step", "3"] if name == "tokens" else []
        result = CliRunner().invoke(app, [name, str(run.path), *extra])
        assert result.exit_code == 0, (result.output, result.exception)


class Cooled(torch.nn.Module):
    """An output layer whose logits are divided by the temperature."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.weight = inner.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.weight.T / TEMPERATURE


class Doubled(async_grpo.AsyncGRPOTrainer):
    """Another loss."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().compute_loss(*args, **kwargs)


@pytest.mark.may_stop
def test_another_loss_and_other_setups_are_refused(tmp_path: Path, monkeypatch):
    one = trainer(tmp_path / "a", Doubled)
    with pytest.raises(UserError, match="weights: Doubled has no surrogate"):
        record(one, out=tmp_path / "run", weights="grpo-sg")
    for name, value, message in (("aux_loss_enabled", True, "router_aux_loss_coef"),):
        with monkeypatch.context() as patch:
            patch.setattr(one, name, value)
            with pytest.raises(UserError, match=message):
                record(one, out=tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr("sharpscope.distributed.world_size", lambda: 2)
        with pytest.raises(UserError, match="in one process"):
            record(one, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    record(one, out=tmp_path / "run")
    with pytest.warns(UserWarning, match="the loss of Doubled is not the clipped surrogate"):
        one.train()

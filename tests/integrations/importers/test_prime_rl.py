"""prime-rl's token export as a trace."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import sharpscope
from sharpscope.integrations.importers import Coefficients, import_prime_rl
from tests.integrations.importers.records import LABELS, packed, write_lines


def test_prime_rl(export, tmp_path: Path):
    source, records = export
    counts = import_prime_rl(source, tmp_path / "run", LABELS, Coefficients(1.25, 0.01))
    assert counts == {"steps": 2, "rollouts": 8, "tokens": 24}
    run = sharpscope.load_run(tmp_path / "run")
    assert (run.method, run.task, run.seed, run.status, run.info["steps_done"]) == ("grpo", "task", 3, "finished", 2)
    notes = " ".join(run.info["notes"])
    assert "step 2 is not complete" in notes and "one higher than prime-rl's" in notes
    for step, own in ((1, records[0]), (2, records[1])):
        tokens = run.tokens(steps=[step])
        logp = [torch.tensor(r["trainer_logprobs"], dtype=torch.float64, requires_grad=True) for r in own]
        total, loss = sum(sum(r["loss_mask"]) for r in own), torch.zeros(())
        for record, lp in zip(own, logp, strict=True):  # prime-rl's default loss as its documentation writes it
            mu, a, w = (
                torch.tensor(record[n], dtype=torch.float64) for n in ("inference_logprobs", "advantages", "rl_weights")
            )
            inside = torch.tensor(record["loss_mask"])
            free = ~torch.tensor(record["is_masked"])
            each = -1.25 * a * (lp - mu).exp() * free + 0.01 * (lp - mu).square()
            loss = loss + (w * each)[inside].sum() / total
        loss.backward()
        wanted = [place for _ in own for place in (2, 3, 4, 6, 7, 9)]
        taken = [(record, place) for record, place in zip([r for r in own for _ in range(6)], wanted, strict=True)]
        coef = [float(lp.grad[place]) for lp in logp for place in (2, 3, 4, 6, 7, 9)]
        np.testing.assert_allclose(tokens["loss_coef"], coef, rtol=1e-6)
        for ours, theirs in (
            ("token_id", "token_ids"),
            ("logp", "trainer_logprobs"),
            ("behavior_logp", "inference_logprobs"),
            ("entropy", "entropy"),
            ("advantage", "advantages"),
            ("ratio", "importance_ratio"),
            ("clipped", "is_masked_high"),
        ):
            np.testing.assert_allclose(tokens[ours], [record[theirs][place] for record, place in taken], rtol=1e-6)
        assert tokens["rollout"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
        assert tokens["position"].tolist() == [0, 1, 2, 0, 1, 3] * 2
        rollouts = run.rollouts[run.rollouts["step"] == step]
        whole = [r["token_ids"][i : i + 5] for r in own for i in (0, 5)]
        assert [json.loads(ids) for ids in rollouts["token_ids"]] == whole
        assert rollouts["prompt_tokens"].tolist() == [2, 1, 2, 1] and rollouts["length"].tolist() == [3] * 4
        row = run.steps.iloc[step - 1]
        assert row["clip_fraction_high"] == pytest.approx(tokens["clipped"].mean())
        assert row["entropy_mean"] == pytest.approx(tokens["entropy"].mean(), rel=1e-6)
    for table, names in (
        ("steps", ["reward_mean", "grad_norm", "loss", "training_s"]),
        ("rollouts", ["group", "prompt", "reward"]),
    ):
        assert getattr(run, table)[names].isna().all(axis=None)
    assert "grad_norm" in run.info["imported"]["not_recorded"]["steps"]


def test_prime_rl_with_channels_and_without_the_constants(tmp_path: Path):
    """Later exports have loss channels and rewards; without the loss's constants there are no coefficients."""
    rng = np.random.default_rng(1)
    record = packed(rng, 4, rewards=[0.5] * 10, losses=[{"rl": {"advantage": 1.0, "mask": True}}] * 10)
    del record["rl_weights"]
    record["trainer_logprobs"][3] = None  # it was not finite
    folder = tmp_path / "token_exports" / "step_4"
    write_lines(folder / "rank_0.jsonl", [record])
    (folder / "STABLE").touch()
    import_prime_rl(tmp_path / "token_exports", tmp_path / "run", LABELS)
    run = sharpscope.load_run(tmp_path / "run")
    assert run.rollouts["reward"].tolist() == [0.5, 0.5] and run.steps["reward_mean"].tolist() == [0.5]
    assert run.steps["step"].tolist() == [4] and len(run.tokens()) == 5
    assert run.tokens()["loss_coef"].isna().all()
    import_prime_rl(tmp_path / "token_exports", tmp_path / "known", LABELS, Coefficients(1.0, 0.0))
    tokens = sharpscope.load_run(tmp_path / "known").tokens()
    expected = -tokens["advantage"] * tokens["ratio"] * (tokens["clipped"] == 0) / 10
    np.testing.assert_allclose(tokens["loss_coef"], expected, rtol=1e-6)

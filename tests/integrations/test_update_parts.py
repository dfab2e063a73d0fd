"""Reward components, turns and versions of the policy, recorded of trainers and read from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from sharpscope.analysis import token_sections
from sharpscope.analysis.update_parts import KL, step_parts
from sharpscope.errors import UserError
from sharpscope.integrations import verl
from sharpscope.integrations.importers import Options, import_files
from sharpscope.traces import load_run

WEIGHTS = [1.0, 20.0]
EVERY = {"token_gradients_every": 1, "group_share": 1.0}


@pytest.mark.parametrize("how", ["sum_then_normalize", "normalize_then_sum"])
def test_components_of_trl_are_those_of_separate_backward_passes(tmp_path: Path, how: str):
    """TRL's own loss with each component's part of the advantages, and with none for the KL term, in one update of two micro-batches."""
    pytest.importorskip("trl", reason="TRL is not installed (test extra)")
    from sharpscope.integrations.record import record
    from sharpscope.integrations.trl import ROW
    from tests.integrations.trainers import GROUP, trainer

    options = {"multi_objective_aggregation": how, "reward_weights": WEIGHTS, "max_steps": 1}
    one = trainer(tmp_path / "t", beta=0.5, max_grad_norm=0.0, **options)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in one.ref_model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=draw)
    recorder = record(one, out=tmp_path / "r", recording=EVERY, critical_sharpness=False)
    parameters, calls = list(one.model.parameters()), []
    compute = recorder._original["_compute_loss"]

    def parts_of(scored: torch.Tensor) -> torch.Tensor:
        """(N, K) A_k from the rewards by function (N, K)."""
        grouped = scored.double().view(-1, GROUP, len(WEIGHTS))
        weighted = (grouped - grouped.mean(1, keepdim=True)) * torch.tensor(WEIGHTS).double()
        if how == "sum_then_normalize":
            total = (grouped * torch.tensor(WEIGHTS).double()).sum(2, keepdim=True)
            return (weighted / (total.std(1, keepdim=True) + 1e-4)).flatten(0, 1)
        each = (weighted / (grouped.std(1, keepdim=True) + 1e-4)).flatten(0, 1)
        return each / (each.sum(1).std() + 1e-4)

    def with_oracle(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        parts = parts_of(recorder._scored[0])[inputs[ROW][:, 1]].float()
        torch.testing.assert_close(parts.sum(1), inputs["advantages"], atol=1e-4, rtol=1e-4)
        for k in (0, 1, None):
            advantage = torch.zeros(len(parts)) if k is None else parts[:, k]
            gradient = torch.autograd.grad(
                compute(model, inputs | {"advantages": advantage}), parameters
            )
            calls.append((k, torch.cat([g.flatten() for g in gradient]).double()))
        return compute(model, inputs)

    recorder._original["_compute_loss"] = with_oracle
    one.train()
    run = load_run(tmp_path / "r")
    found = step_parts(run, 1)
    kl = sum(g for k, g in calls if k is None)
    expected = {
        name: sum(g for k, g in calls if k == number) - kl
        for number, name in enumerate(["evens", "shortness"])
    }
    whole = sum(expected.values()) + kl
    assert not found.why and list(found.components.index) == [*expected, KL]
    for name, gradient in (expected | {KL: kl}).items():
        share = float(gradient @ whole / (whole @ whole))
        assert abs(share) > 1e-3
        assert found.components.loc[name, "attribution"] == pytest.approx(share, abs=2e-4)
    told = [section.title for section in token_sections(run, 1, "component")]
    assert told == [f"{run.name}, step 1: by reward component"]


def test_tools_tokens_end_a_turn_of_trl(tmp_path: Path):
    """The second token of every completion is a tool's: what follows is the second turn, and the page and `show` have both."""
    pytest.importorskip("trl", reason="TRL is not installed (test extra)")
    from sharpscope.analysis.headline import INSERTED, sentences
    from sharpscope.analysis.update_parts import telling_sections
    from sharpscope.integrations.record import record
    from tests.integrations.test_variants import with_tools

    one = with_tools(tmp_path / "t", max_steps=1)
    record(one, out=tmp_path / "r", recording=EVERY, critical_sharpness=False)
    one.train()
    run = load_run(tmp_path / "r")
    tokens = run.tokens(columns=["rollout", "position", "loss_coef", "attribution", "advantage"])
    (section,) = token_sections(run, 1, "turn")
    table = pd.DataFrame(section.records).set_index("turn")
    for turn, inside in ((1, tokens["position"] == 0), (2, tokens["position"] > 1)):
        row = table.loc[turn]
        assert row["tokens"] == inside.sum() > 0
        assert row["attribution"] == pytest.approx(tokens["attribution"][inside].sum(), abs=1e-6)
        assert row["Σ|c|"] == pytest.approx(tokens["loss_coef"][inside].abs().sum(), rel=1e-5)
    assert table["inserted before"].tolist() == [0, tokens["rollout"].nunique()]
    assert [one.title for one in telling_sections(run)][-1] == section.title
    marked = [sentences(run, 1, tokens.iloc[[at]])[0] for at in (0, 1)]
    assert marked[0].after.startswith(INSERTED) and marked[1].before.endswith(INSERTED)


def test_a_loop_says_components_and_versions(tmp_path: Path):
    """Two updates of a step, of rows that policies 7 and 8 drew; shares of the first against a backward pass for each component."""
    import sharpscope
    from tests.integrations.test_loop import GROUP, drawn, logps
    from tests.integrations.trainers import small_model, tokenizer

    model = small_model("qwen2", None)
    batch = drawn(model, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = sharpscope.record(
        model, optimizer, tokenizer=tokenizer(), out=tmp_path / "r", steps=1, updates_per_step=2,
        recording=EVERY, critical_sharpness=False,
    )  # fmt: skip
    count = len(batch["ids"])
    rewards = {"answer": batch["rewards"].round(), "length": -0.3 * batch["mask"].sum(1)}
    groups, versions = [row // GROUP for row in range(count)], 7 + torch.arange(count) % 2
    grouped = torch.stack(list(rewards.values()), 1).view(-1, GROUP, 2)
    parts = (grouped - grouped.mean(1, keepdim=True)).view(count, 2)

    def gradient(advantage: torch.Tensor, rows: torch.Tensor, told: bool = False) -> torch.Tensor:
        logp = logps(model, batch["ids"][rows], batch["attention"][rows])
        if told:
            given = {name: value[rows] for name, value in rewards.items()}
            recorder.tokens(
                logp, batch["ids"][rows], batch["mask"][rows], advantages=advantage, rewards=given,
                groups=[groups[row] for row in rows], policy_versions=versions[rows],
            )  # fmt: skip
        loss = -(advantage[:, None] * logp * batch["mask"][rows][:, -logp.shape[1] :]).sum()
        if told:
            loss.backward()
            recorder.step(loss)
            return torch.zeros(0)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    halves = torch.arange(count).view(2, -1)
    expected = [gradient(parts[halves[0], k], halves[0]).double() for k in range(2)]
    for rows in halves:
        gradient(parts[rows].sum(1), rows, told=True)
        optimizer.step()
        optimizer.zero_grad()
    recorder.close()
    run = load_run(tmp_path / "r")
    tokens = run.tokens(columns=["rollout", "policy_version", "update", "attribution"])
    assert tokens["policy_version"].tolist() == (7 + tokens["rollout"] % 2).tolist()
    first = run.rollouts.iloc[3]
    assert first["reward"] == pytest.approx(sum(json.loads(first["reward_parts"]).values()))
    whole = sum(expected)
    norms = run.updates["grad_norm"]
    found = step_parts(run, 1)
    assert norms[0] > norms[1]  # shares are those of the larger update
    assert not found.why and list(found.components.index) == ["answer", "length"]
    for name, part in zip(rewards, expected, strict=True):
        share = float(part @ whole / (whole @ whole))
        assert found.components.loc[name, "attribution"] == pytest.approx(share, abs=1e-4)
    (section,) = token_sections(run, 1, "staleness")
    assert sorted(row["age"] for row in section.records) == [0, 1]


def lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


def test_a_file_says_components_versions_and_inserted_tokens(tmp_path: Path):
    rng = np.random.default_rng(0)
    masks = [[0, 1, 1, 0, 1], [0, 1, 0, 1, 1]]
    records = [
        {
            "token_id": rng.integers(2, 30, 5).tolist(),
            "prompt_length": 1,
            "mask": masks[row % 2],
            "logp": (-rng.random(5)).tolist(),
            "loss_coef": [-1.0 if row % 2 else 1.0] * 5,
            "advantage": 1.0 if row % 2 else -1.0,
            "group": f"g{row // 2}",
            "reward": 2.0 * (row % 2) + 0.5,
            "reward_parts": {"answer": row % 2, "format": 0.5},
            "policy_version": 3 if row < 2 else [4, 4, 4, 5, 5],
        }
        for row in range(4)
    ]
    out = tmp_path / "r"
    import_files("jsonl", lines(tmp_path / "a.jsonl", records), out, Options(method="x", seed=0))
    run = load_run(out)
    tokens = run.tokens(columns=["rollout", "position", "policy_version"])
    assert tokens["policy_version"].tolist() == [3] * 6 + [4, 4, 5, 4, 5, 5]
    assert [json.loads(parts)["answer"] for parts in run.rollouts["reward_parts"]] == [0, 1, 0, 1]
    (section,) = token_sections(run, None, "turn")
    table = pd.DataFrame(section.records).set_index("turn")
    assert table["tokens"].to_dict() == {1: 2 + 1 + 2 + 1, 2: 1 + 2 + 1 + 2}
    assert table["inserted before"].to_dict() == {1: 0, 2: 4}
    (section,) = token_sections(run, None, "staleness")
    table = pd.DataFrame(section.records).set_index("age")
    assert table["tokens"].to_dict() == {0: 3, 1: 3, 2: 6}
    for wrong, message in (
        ({"policy_version": -1}, "policy_version = '-1' is not a whole number"),
        ({"policy_version": 1.5}, "policy_version"),
        ({"reward_parts": [1.0]}, "reward_parts is a list, not an object"),
        ({"reward_parts": {"a": "x"}}, "reward_parts = 'x' is not a finite number"),
    ):
        bad = lines(tmp_path / "b.jsonl", [records[0] | wrong])
        with pytest.raises(UserError, match=message):
            import_files("jsonl", bad, tmp_path / "bad", Options(method="x", seed=0))


def test_verls_versions_are_those_of_its_rows():
    """`min_global_steps` of each row, None where the sampler says none; rows that fill the batch are left out."""
    ids = torch.arange(1, 13).view(3, 4)
    ones = torch.ones(3, 2)
    data = {
        "prompts": ids[:, :2],
        "responses": ids[:, 2:],
        "attention_mask": torch.ones(3, 4),
        "response_mask": ones,
        "old_log_probs": -ones,
        "advantages": ones,
        "temperature": [1.0] * 3,
        "uid": ["a", "pad_0", "b"],
        "min_global_steps": [7, 3, None],
    }

    class Words:
        def batch_decode(self, rows: Any, **_: Any) -> list[str]:
            return [str(row) for row in rows]

    tokens = verl._opened(data, Words()).capture.batches[0].tokens
    assert tokens.policy_version[0].tolist() == [7.0, 7.0]
    assert len(tokens.policy_version) == 2 and tokens.policy_version[1].isnan().all()
    del data["min_global_steps"]
    assert verl._opened(data, Words()).capture.batches[0].tokens.policy_version.isnan().all()

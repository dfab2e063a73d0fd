"""A recorded step dumped in the formats of other trainers and replayed at its checkpoint has the numbers of the recording."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from transformers import AutoTokenizer

import sharpscope
from sharpscope.analysis.headline import layer_norms, layer_tokens
from sharpscope.analysis.token_values import entropy_bins
from sharpscope.cli.app import main
from sharpscope.config import build_config
from sharpscope.config.methods import parse_method
from sharpscope.errors import UserError
from sharpscope.integrations.importers import probe_rollouts
from sharpscope.policy import PolicySpec, load_policy
from sharpscope.training import train
from tests.conftest import TOY
from tests.integrations.test_importers import (
    write_lines,
    write_nemo_rl,
    write_open_instruct,
    write_slime,
    write_verifiers,
)


@pytest.fixture(scope="module")
def recorded(tiny_policy, tmp_path_factory):
    """(run of one recorded step, its rows for the writers of dumps)."""
    values = {**TOY, "policy.model": str(tiny_policy), "out": str(tmp_path_factory.mktemp("recorded") / "run")}
    values |= {
        "method": "dapo",
        "steps": 1,
        "evaluation.every": 0,
        "recording.rotation_every": 1,
        "checkpoint.every": 0,
    }
    assert train(build_config(values=values)).status == "finished"
    run = sharpscope.load_run(values["out"])
    assert run.steps["grad_norm"][0] > 0
    return run, rows_of(run, tiny_policy)


def rows_of(run: Any, policy: Path) -> list[dict[str, Any]]:
    """The completions of step 1, twice: as steps 1 and 2 of a dump."""
    tokenizer, tokens = AutoTokenizer.from_pretrained(policy), run.tokens(steps=[1])
    rows = []
    for rollout in run.rollouts.to_dict("records"):
        own = tokens[tokens["rollout"] == rollout["rollout"]]
        row = {"prompt": tokenizer(rollout["prompt"])["input_ids"], "ids": own["token_id"].tolist()}
        row |= {"theta": own["logp"].astype(float).tolist(), "mu": own["behavior_logp"].astype(float).tolist()}
        row |= {"entropy": own["entropy"].astype(float).tolist(), "mask": [1] * len(own)}
        rows.append(row | {"advantage": float(rollout["advantage"]), "reward": float(rollout["reward"])})
    return [row | {"step": step} for step in (1, 2) for row in rows]


def write_table(folder: Path, rows: list[dict[str, Any]]) -> None:
    names = {"prompt": "prompt_ids", "ids": "token_id", "theta": "logp", "mu": "behavior_logp"}
    names |= {name: name for name in ("step", "advantage", "reward")}
    lines = [{ours: row[theirs] for theirs, ours in names.items()} | {"group": str(row["prompt"])} for row in rows]
    write_lines(folder / "batch.jsonl", lines)


def write_prime_rl(folder: Path, rows: list[dict[str, Any]]) -> None:
    """A packed sequence a step, in which the positions begin anew with each sample."""
    for step in (1, 2):
        record: dict[str, Any] = {"schema_version": 1, "step": step, "rank": 0}
        for row in (row for row in rows if row["step"] == step):
            before, n = len(row["prompt"]), len(row["ids"])
            ratio = np.exp(np.subtract(row["theta"], row["mu"])).tolist()
            sample = {"token_ids": row["prompt"] + row["ids"], "position_ids": [*range(before + n)]}
            sample |= {"loss_mask": [False] * before + [True] * n, "advantages": [row["advantage"]] * (before + n)}
            for name, values in (("trainer_logprobs", row["theta"]), ("inference_logprobs", row["mu"])):
                sample[name] = [0.0] * before + values
            sample |= {"importance_ratio": [1.0] * before + ratio, "entropy": [0.0] * before + row["entropy"]}
            for name, values in sample.items():
                record[name] = record.get(name, []) + values
        place = folder / "token_exports" / f"step_{step}"
        write_lines(place / "rank_0.jsonl", [record])
        (place / "STABLE").touch()


WRITERS = [write_table, write_nemo_rl, write_slime, write_verifiers, write_open_instruct, write_prime_rl]


@pytest.mark.parametrize("dump", WRITERS)
def test_a_replayed_batch_has_the_numbers_of_the_recorded_step(recorded, tiny_policy, tmp_path, dump):
    run, rows = recorded
    dump(tmp_path / "dump", rows)
    found = probe_rollouts(
        tmp_path / "dump",
        load_policy(PolicySpec(model=str(tiny_policy))),
        tmp_path / "out",
        method=parse_method("dapo"),
    )
    assert [one.attributed for one in found] == [True, True] and max(one.logp_gap for one in found) < 1e-4
    again = sharpscope.load_run(tmp_path / "out")
    here, there = run.tokens(steps=[1]), again.tokens(steps=[2])
    if dump is write_open_instruct:  # its rows have other groups, and so another order
        here, there = (
            t.sort_values(["score_norm_local", "loss_coef"], key=lambda c: c.round(4)).reset_index(drop=True)
            for t in (here, there)
        )
    for name in ("loss_coef", "attribution", "score_norm_local", "polarity", "entropy", "ratio"):
        np.testing.assert_allclose(there[name], here[name], rtol=2e-3, atol=2e-5, err_msg=name)
    assert (there["clipped"] == here["clipped"]).all()
    ours, theirs = run.steps.iloc[0], again.steps.set_index("step").loc[2]
    assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-3)
    assert theirs["gradient_rotation"] == pytest.approx(ours["gradient_rotation"], abs=0.05)
    if dump in (write_table, write_nemo_rl, write_slime):  # the others' writers make groups of two
        assert theirs["noise_rotation"] == pytest.approx(ours["noise_rotation"], rel=1e-2)
    one, two = (layer_norms(r).query(f"step == {s}").set_index("group")["grad_norm"] for r, s in ((run, 1), (again, 2)))
    pd.testing.assert_series_equal(one, two, rtol=1e-3, check_like=True)
    assert [*layer_tokens(run, 1)["loss_coef"]] == pytest.approx([*layer_tokens(again, 2)["loss_coef"]], rel=1e-3)
    np.testing.assert_allclose(entropy_bins(again)["entropy"], entropy_bins(run)["entropy"], atol=1e-3)


def test_a_planted_token_is_named_first_through_replay(recorded, tiny_policy, tmp_path, capsys):
    """Its advantage, and so its coefficient, is multiplied by 100."""
    _, rows = recorded
    lines = [row | {"advantage": [row["advantage"]] * len(row["ids"])} for row in rows if row["step"] == 1]
    row = next(index for index, line in enumerate(lines) if line["advantage"][0] and len(line["ids"]) > 2)
    lines[row]["advantage"][2] *= 100
    write_table(tmp_path / "dump", lines)
    command = ["probe", str(tiny_policy), "--rollouts", str(tmp_path / "dump"), "--method", "grpo"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--out", str(tmp_path / "out")])
    assert ended.value.code == 0 and "norms and shares" in capsys.readouterr().out
    run = sharpscope.load_run(tmp_path / "out")
    tokens, by_layer = run.tokens(), layer_tokens(run, 1)
    first = tokens.loc[tokens["attribution"].abs().idxmax()]
    assert (first["rollout"], first["position"]) == (row, 2) and first["attribution"] > 0.5
    assert tuple(by_layer.loc[0, ["rollout", "position"]]) == (row, 2)


def test_what_a_replay_lacks_is_named_with_what_writes_it(recorded, tiny_policy, tmp_path):
    _, rows = recorded
    policy, method = load_policy(PolicySpec(model=str(tiny_policy))), parse_method("grpo")
    verl = {"input": "a", "output": "b", "gts": None, "score": 1.0, "step": 1}
    write_lines(tmp_path / "verl" / "1.jsonl", [verl])
    with pytest.raises(UserError, match=r"1 of 1 completions have no token IDs.*text only"):
        probe_rollouts(tmp_path / "verl", policy, tmp_path / "out", method=method)
    lines = [{"prompt_ids": r["prompt"], "token_id": r["ids"], "logp": r["theta"]} for r in rows[:4]]
    write_lines(tmp_path / "no_advantage.jsonl", lines)
    with pytest.raises(UserError, match="neither advantages nor rewards with groups"):
        probe_rollouts(tmp_path / "no_advantage.jsonl", policy, tmp_path / "out", method=method)
    with pytest.raises(UserError, match="give the method that trained on it"):
        probe_rollouts(tmp_path / "no_advantage.jsonl", policy, tmp_path / "out")
    write_lines(
        tmp_path / "shifted.jsonl",
        [line | {"advantage": 1.0, "logp": [x - 0.7 for x in line["logp"]]} for line in lines],
    )
    with pytest.raises(UserError, match=r"differ from the recorded ones by 0\.7 nats"):
        probe_rollouts(tmp_path / "shifted.jsonl", policy, tmp_path / "out", method=method)
    assert not (tmp_path / "out").exists()
    probe_rollouts(tmp_path / "shifted.jsonl", policy, tmp_path / "out", method=method, force=True)
    with pytest.raises(UserError, match="ref_logp"):
        kl = method.model_copy(update={"kl": method.kl.model_copy(update={"coef": 0.1})})
        probe_rollouts(tmp_path / "shifted.jsonl", policy, tmp_path / "kl", method=kl, force=True)
    assert (
        json.loads(sharpscope.load_run(tmp_path / "out").rollouts["token_ids"][0]) == rows[0]["prompt"] + rows[0]["ids"]
    )

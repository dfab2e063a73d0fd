"""Traces from prime-rl's token export, verl's rollout files and any table of tokens: every value, and what is null."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

import sharpscope
from sharpscope.analysis.headline import layer_norms, layer_tokens
from sharpscope.analysis.token_values import entropy_bins
from sharpscope.cli import app
from sharpscope.cli.app import main
from sharpscope.config import build_config
from sharpscope.errors import UserError
from sharpscope.integrations.importers import Options, import_files, probe_rollouts, read, recognize
from sharpscope.methods.named import parse_method
from sharpscope.policy import PolicySpec, load_policy
from sharpscope.recording.from_checkpoint import probe_trace
from sharpscope.tokens import score_norms
from sharpscope.training import train
from tests.conftest import TOY
from tests.integrations.trainers import small_model, tokenizer
from tests.loops import some


def imported(kind: str | None, source: Path, out: Path, **options: Any) -> dict[str, int]:
    return import_files(
        kind, source, out, Options(**({"method": "grpo", "task": "task", "seed": 3} | options))
    )


def write_lines(path: Path, records: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


def packed(rng: np.random.Generator, step: int, **changes: Any) -> dict[str, Any]:
    """A record of prime-rl's export: two samples in one sequence, the second with a gap in its loss mask."""
    mask = [0, 0, 1, 1, 1, 0, 1, 1, 0, 1]
    sampler, trainer = (-rng.uniform(0.1, 3, len(mask)) for _ in range(2))
    high = [bool(x) for x in (trainer > sampler + 1) & (np.array(mask) > 0)]
    record = {
        "schema_version": 1,
        "step": step,
        "rank": 0,
        "env_name": "e",
        "position_ids": [*range(5), *range(5)],
        "token_ids": rng.integers(2, 37, len(mask)).tolist(),
        "loss_mask": [bool(x) for x in mask],
        "advantages": [0.5] * 5 + [-1.5] * 5,
        "inference_logprobs": sampler.tolist(),
        "trainer_logprobs": trainer.tolist(),
        "entropy": rng.uniform(0, 2, len(mask)).tolist(),
        "importance_ratio": np.exp(trainer - sampler).tolist(),
        "is_masked_high": high,
        "is_masked_low": [False] * 10,
        "rl_weights": rng.uniform(0.5, 2, 10).tolist(),
    }
    return record | changes


ROWS = [
    {"s": 1, "ids": [5, 6, 7], "lp": [-0.1, -0.2, -0.3], "m": [1, 0, 1]}
    | {"adv": 0.5, "prompt_ids": [2, 3], "group": "a"},
    {
        "s": 1,
        "ids": [8, 9],
        "lp": [-1.0, -2.0],
        "adv": [0.25, -0.25],
        "m": [1, 1],
        "prompt_ids": [4],
        "group": "b",
    },
    {
        "s": 3,
        "ids": [8, 9],
        "lp": [-1.5, -2.5],
        "adv": 1.0,
        "m": [1, 1],
        "prompt_ids": [4],
        "group": "a",
    },
]


NAMES = {"step": "s", "token_id": "ids", "logp": "lp", "advantage": "adv", "mask": "m"}


@pytest.fixture
def export(tmp_path: Path) -> tuple[Path, dict[int, list[dict[str, Any]]]]:
    """Three steps of two ranks, the last of them not complete; and the records by step."""
    rng = np.random.default_rng(0)
    temperatures = [0.7] * 5 + [1.0] * 5
    records = {
        step: [packed(rng, step, rank=n, temperatures=temperatures) for n in (0, 1)]
        for step in (0, 1, 2)
    }
    for step, own in records.items():
        folder = tmp_path / "outputs" / "token_exports" / f"step_{step}"
        for record in own:
            write_lines(folder / f"rank_{record['rank']}.jsonl", [record])
        if step < 2:
            (folder / "STABLE").touch()
    return tmp_path / "outputs", records


def test_jsonl(tmp_path: Path):
    file = write_lines(tmp_path / "t.jsonl", ROWS)
    tokenizer().save_pretrained(tmp_path / "words")
    options = {"tokenizer": str(tmp_path / "words"), "columns": NAMES}
    assert imported("jsonl", file, tmp_path / "run", **options) == {
        "steps": 2,
        "rollouts": 3,
        "tokens": 6,
    }
    run = sharpscope.load_run(tmp_path / "run")
    tokens = run.tokens()
    assert tokens["token_id"].tolist() == [5, 7, 8, 9, 8, 9] and tokens["position"].tolist() == [
        0,
        2,
        0,
        1,
        0,
        1,
    ]
    np.testing.assert_allclose(tokens["logp"], [-0.1, -0.3, -1, -2, -1.5, -2.5], rtol=1e-6)
    assert tokens["advantage"].tolist() == [0.5, 0.5, 0.25, -0.25, 1, 1]
    assert run.rollouts["advantage"].tolist() == [0.5, 0.0, 1.0] and run.rollouts[
        "group"
    ].tolist() == [0, 1, 0]
    assert json.loads(run.rollouts["token_ids"][0]) == [2, 3, 5, 6, 7]
    assert run.steps["completion_length_mean"].tolist() == [2, 2]
    assert (
        run.rollouts["prompt"].tolist() == ["w2 w3", "w4", "w4"]
        and run.rollouts["completion"][0] == "w5 w6 w7"
    )


def test_a_folder_of_files_with_prompt_and_completion_in_one_list(tmp_path: Path):
    """As trainers dump them: a file a step, the prompt before the mask, curves and norms on each line."""
    for step in (0, 7):
        row = {
            "ids": [5, 6, 7, 8],
            "logp": [0.0, -1.0, -2.0, -3.0],
            "mask": [0, 0, 1, 1],
            "reward": float(step),
        }
        row |= {
            "attribution": [0, 0, 0.5, 0.25],
            "score_norm": [None, None, 2.0, 3.0],
            "clipped": [0, 0, 1, 0],
        }
        row |= {"grad_norm": 1.5, "loss": 0.1 * step, "lr": 1e-3, "mystery": 1}
        write_lines(
            tmp_path / "dump" / f"train_data_step{step}.jsonl", [row, row | {"reward": math.nan}]
        )
    imported("jsonl", tmp_path / "dump", tmp_path / "run", columns={"token_id": "ids"})
    run = sharpscope.load_run(tmp_path / "run")
    assert run.steps["step"].tolist() == [1, 8] and run.steps["grad_norm"].tolist() == [1.5, 1.5]
    assert run.steps["lr"].tolist() == [1e-3] * 2 and run.steps["loss"].tolist() == pytest.approx(
        [0, 0.7]
    )
    tokens = run.tokens(steps=[8])
    assert tokens["token_id"].tolist() == [7, 8] * 2 and tokens["position"].tolist() == [0, 1] * 2
    assert (
        tokens["attribution"].tolist() == [0.5, 0.25] * 2
        and tokens["clipped"].tolist() == [1, 0] * 2
    )
    assert tokens["score_norm"].tolist() == [2, 3] * 2
    assert (
        json.loads(run.rollouts["token_ids"][0]) == [5, 6, 7, 8]
        and run.rollouts["prompt_tokens"][0] == 2
    )
    notes = " ".join(run.info["notes"])
    assert "one higher than the files'" in notes and "mystery" in notes
    assert run.steps["reward_mean"].tolist() == [0, 7] and set(run.events["rule"]) == {"nan_reward"}
    row = {"token_id": [5, 6, 7], "logp": [-1.0, -2.0], "prompt_length": 1, "advantage": 0.5}
    imported("jsonl", write_lines(tmp_path / "t.jsonl", [row]), tmp_path / "length")
    assert sharpscope.load_run(tmp_path / "length").tokens()["token_id"].tolist() == [6, 7]


def test_the_samplers_log_probabilities_are_checked(tmp_path: Path):
    """By the rules of a training, at their defaults."""
    logp = np.linspace(-3, -0.5, 20)
    # 20 % of the ratios are outside [0.9, 1.1]
    some = np.where(np.arange(20) < 4, logp + 0.2, logp)
    line = {"token_id": [5] * 20, "logp": logp.tolist(), "behavior_logp": some.tolist()}
    imported("jsonl", write_lines(tmp_path / "t.jsonl", [line]), tmp_path / "run")
    (event,) = sharpscope.load_run(tmp_path / "run").events.itertuples()
    assert (event.step, event.rule, event.value) == (1, "sampler_ratio", 0.2)


def test_prime_rl(export, tmp_path: Path):
    source, records = export
    counts = imported("prime-rl", source, tmp_path / "run")
    assert counts == {"steps": 2, "rollouts": 8, "tokens": 24}
    run = sharpscope.load_run(tmp_path / "run")
    assert (run.method, run.task, run.seed, run.status, run.info["steps_done"]) == (
        "grpo",
        "task",
        3,
        "finished",
        2,
    )
    notes = " ".join(run.info["notes"])
    assert (
        "step 2 is not complete" in notes
        and "one higher than the files'" in notes
        and "rl_weights" in notes
    )
    for step, own in ((1, records[0]), (2, records[1])):
        tokens = run.tokens(steps=[step])
        wanted = [place for _ in own for place in (2, 3, 4, 6, 7, 9)]
        taken = [
            (record, place)
            for record, place in zip([r for r in own for _ in range(6)], wanted, strict=True)
        ]
        assert tokens["loss_coef"].isna().all()  # the export has not the loss's constants
        for ours, theirs in (
            ("token_id", "token_ids"),
            ("logp", "trainer_logprobs"),
            ("behavior_logp", "inference_logprobs"),
            ("entropy", "entropy"),
            ("advantage", "advantages"),
            ("ratio", "importance_ratio"),
            ("clipped", "is_masked_high"),
            ("temperature", "temperatures"),
        ):
            np.testing.assert_allclose(
                tokens[ours], [record[theirs][place] for record, place in taken], rtol=1e-6
            )
        assert tokens["rollout"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
        assert tokens["position"].tolist() == [0, 1, 2, 0, 1, 3] * 2
        rollouts = run.rollouts[run.rollouts["step"] == step]
        whole = [r["token_ids"][i : i + 5] for r in own for i in (0, 5)]
        assert [json.loads(ids) for ids in rollouts["token_ids"]] == whole
        assert (
            rollouts["prompt_tokens"].tolist() == [2, 1, 2, 1]
            and rollouts["length"].tolist() == [3] * 4
        )
        row = run.steps.iloc[step - 1]
        assert row["clip_fraction_high"] == pytest.approx(tokens["clipped"].mean())
        assert row["entropy_mean"] == pytest.approx(tokens["entropy"].mean(), rel=1e-6)
    for table, names in (
        ("steps", ["reward_mean", "grad_norm", "loss", "training_s"]),
        ("rollouts", ["group", "prompt", "reward"]),
    ):
        assert getattr(run, table)[names].isna().all(axis=None)
    assert "grad_norm" in run.info["imported"]["not_recorded"]["steps"]


def test_rewards_and_values_that_are_not_finite_in_prime_rls_export(tmp_path: Path):
    record = packed(np.random.default_rng(2), 4) | {"rewards": [0.5] * 10}
    record["trainer_logprobs"][9] = None
    write_lines(tmp_path / "step_4" / "rank_0.jsonl", [record])
    (tmp_path / "step_4" / "STABLE").touch()
    imported("prime-rl", tmp_path, tmp_path / "run")
    run = sharpscope.load_run(tmp_path / "run")
    assert (
        len(run.tokens()) == 5
        and run.steps["step"].tolist() == [4]
        and (run.rollouts["env"] == "e").all()
    )
    assert run.rollouts["reward"].tolist() == [0.5, 0.5] and run.steps["reward_mean"].tolist() == [
        0.5
    ]


def truth(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Two steps of two groups with two completions, one of them with a tool's tokens in between."""
    made = []
    for step in (1, 2):
        for row in range(4):
            prompt = [3, 4, 5][: 2 + row // 2]
            ids = rng.integers(6, 37, 4 + row).tolist()
            mask = [1, 0, 0, 1, *[1] * row] if row == 2 else [1] * (4 + row)
            theta, mu, entropy = (-rng.uniform(0.1, 3, 4 + row).round(4) for _ in range(3))
            made.append(
                {"step": step, "prompt": prompt, "ids": ids, "mask": mask, "theta": theta.tolist()}
            )
            made[-1] |= {"mu": mu.tolist(), "entropy": (-entropy).tolist()}
            made[-1] |= {"advantage": float(row - 1.5), "reward": 0.5 * row}
    return made


def write_nemo_rl(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    """As `log_batched_dict_as_jsonl` of slices of one row: each value in a list of length 1, rows padded to one width."""
    for step in (1, 2):
        lines = []
        for index, row in enumerate(r for r in rows if r["step"] == step):
            start, size = len(row["prompt"]), len(row["prompt"]) + len(row["ids"])

            def wide(values: list[Any], start: int = start, size: int = size) -> list[list[Any]]:
                return [[0] * start + values + [0] * (12 - size)]

            # dynamic sampling
            line = {
                "content": ["text"],
                "rewards": [9.0],
                "filtered_rewards": [row["reward"]],
            }
            line |= {"input_lengths": [size], "sample_loss_mask": [1.0]}
            line |= {"token_ids": [row["prompt"] + row["ids"] + [0] * (12 - size)], "idx": index}
            line |= {
                "token_loss_mask": wide(row["mask"]),
                "advantages": wide([row["advantage"]] * len(row["ids"])),
            }
            lines.append(
                line | {"generation_logprobs": wide(row["mu"]), "prev_logprobs": wide(row["theta"])}
            )
        write_lines(folder / f"train_data_step{step}.jsonl", lines)
    return []


def write_slime(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    (folder / "train_data").mkdir(parents=True)
    for step in (1, 2):
        own = [row for row in rows if row["step"] == step]
        samples = [
            {
                "data_parallel_rank": 0,
                "rollout_position": index,
                "sample_index": index,
                "tokens": torch.tensor(row["prompt"] + row["ids"]),
                "response_lengths": len(row["ids"]),
                "total_lengths": len(row["prompt"]) + len(row["ids"]),
                "loss_masks": torch.tensor(row["mask"]),
                "log_probs": torch.tensor(row["theta"]),
                "rollout_log_probs": torch.tensor(row["mu"]),
                "entropy": torch.tensor(row["entropy"]),
                "advantages": torch.full((len(row["ids"]),), row["advantage"]),
                "rewards": -1.0,  # normalized; the raw ones are of the whole batch
            }
            for index, row in enumerate(own)
        ]
        whole = {"format_version": 2, "rollout_id": step - 1, "samples": samples}
        whole["raw_reward"] = [r["reward"] for r in own]
        torch.save(whole, folder / "train_data" / f"{step - 1}.pt")
    return ["entropy"]


def write_open_instruct(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for index, row in enumerate(rows):
        line = {
            "prompt_tokens": row["prompt"],
            "response_tokens": row["ids"],
            "logprobs": row["mu"],
        }
        line |= {
            "sample_idx": index % 4,
            "prompt_idx": index % 4 // 2,
            "finish_reason": "stop",
            "dataset": "math",
        }
        lines.append(line | {name: row[name] for name in ("step", "reward", "advantage")})
    write_lines(folder / "run_rollouts_000000.jsonl", lines[:5])
    write_lines(folder / "run_rollouts_000001.jsonl", lines[5:])
    return []


def write_verifiers(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    """Compact streams: one value for each True of the mask; a tool's message between two of the model's."""
    for step in (1, 2):
        episodes = []
        for index, row in enumerate(r for r in rows if r["step"] == step):
            nodes: list[dict[str, Any]] = [
                {"parent": None, "token_ids": row["prompt"], "mask": [False] * len(row["prompt"])}
            ]
            cuts = [0, 1, 3, len(row["ids"])] if 0 in row["mask"] else [0, len(row["ids"])]
            for part, (a, b) in enumerate(itertools.pairwise(cuts)):
                sampled = row["mask"][a] == 1
                node = {"parent": part, "token_ids": row["ids"][a:b], "mask": [sampled] * (b - a)}
                if sampled:
                    node |= {"logprobs": row["mu"][a:b], "trainer_logprobs": row["theta"][a:b]}
                    node |= {
                        "entropies": row["entropy"][a:b],
                        "advantages": [row["advantage"]] * (b - a),
                    }
                nodes.append(node)
            trace = {"nodes": nodes, "rewards": {"a": row["reward"] - 1, "b": 1.0}}
            episodes.append(
                {"id": "x", "env": {"id": "math"}, "group": f"g{index // 2}", "traces": [trace]}
            )
        write_lines(
            folder / "rollouts" / f"step_{step}" / "train" / "all" / "traces.jsonl", episodes
        )
    return ["entropy", "env"]


@pytest.mark.parametrize(
    ("kind", "dump"),
    [
        ("nemo-rl", write_nemo_rl),
        ("slime", write_slime),
        ("open-instruct", write_open_instruct),
        ("verifiers", write_verifiers),
    ],
)
def test_dumps_of_trainers(kind, dump, tmp_path: Path):
    """Every format gives the completions that were written to it, and is recognized."""
    rows = truth(np.random.default_rng(3))
    more = dump(tmp_path / "dump", rows)
    assert recognize(tmp_path / "dump") == kind
    imported(None, tmp_path / "dump", tmp_path / "run")
    run = sharpscope.load_run(tmp_path / "run")
    sampler_only = kind == "open-instruct"
    for step in (1, 2):
        own = [row for row in rows if row["step"] == step]
        tokens, rollouts = run.tokens(steps=[step]), run.rollouts[run.rollouts["step"] == step]
        for ours, theirs in (
            ("token_id", "ids"),
            ("logp", "mu" if sampler_only else "theta"),
            ("behavior_logp", "mu"),
            ("entropy", "entropy"),
        ):
            if (ours == "entropy" and "entropy" not in more) or (
                ours == "behavior_logp" and sampler_only
            ):
                assert tokens[ours].isna().all()
                continue
            kept = [
                v
                for r in own
                for v, m in zip(r[theirs], r["mask"], strict=True)
                if m or sampler_only
            ]
            np.testing.assert_allclose(tokens[ours], kept, rtol=1e-5)
        masks = [r["mask"] if not sampler_only else [1] * len(r["mask"]) for r in own]
        assert tokens["position"].tolist() == [i for m in masks for i, keep in enumerate(m) if keep]
        np.testing.assert_allclose(
            tokens["advantage"],
            [r["advantage"] for r, m in zip(own, masks, strict=True) for k in m if k],
        )
        assert [json.loads(ids) for ids in rollouts["token_ids"]] == [
            r["prompt"] + r["ids"] for r in own
        ]
        assert rollouts["prompt_tokens"].tolist() == [len(r["prompt"]) for r in own]
        np.testing.assert_allclose(rollouts["reward"], [r["reward"] for r in own])
        assert rollouts["group"].tolist() == [0, 0, 1, 1]
    assert (
        any("those of the sampler stand in their place" in note for note in run.info["notes"])
        == sampler_only
    )
    assert (run.rollouts["env"] == "math").all() == (kind in ("verifiers", "open-instruct"))
    shown = CliRunner().invoke(
        app, ["import", "auto", str(tmp_path / "dump"), "--out", str(tmp_path / "again")]
    )
    assert shown.exit_code == 0 and "sharpscope probe --rollouts" in shown.output


def test_a_message_in_two_branches_counts_once(tmp_path: Path):
    """Verifiers' messages form a tree: two continuations of one assistant's message."""
    nodes = [{"parent": None, "token_ids": [3, 4], "mask": [False, False]}]
    for parent, ids in ((0, [5, 6]), (1, [7]), (1, [8, 9])):
        nodes.append(
            {
                "parent": parent,
                "token_ids": ids,
                "mask": [True] * len(ids),
                "logprobs": [-0.1 * i for i in ids],
            }
        )
    write_lines(tmp_path / "traces.jsonl", [{"traces": [{"nodes": nodes, "rewards": {}}]}])
    ((step, completions),) = read(tmp_path / "traces.jsonl", "verifiers", Options(), {})
    assert step == 1 and [c.ids for c in completions] == [[3, 4, 5, 6, 7], [3, 4, 5, 6, 8, 9]]
    assert [c.tokens["token_id"] for c in completions] == [[5, 6, 7], [8, 9]]
    assert (
        completions[1].tokens["logp"] == pytest.approx([-0.8, -0.9])
        and completions[1].prompt_length == 4
    )
    del nodes[1]["token_ids"]
    write_lines(tmp_path / "traces.jsonl", [{"traces": [{"nodes": nodes}]}])
    with pytest.raises(
        UserError, match="line 1: a message has no token_ids; run with verifiers' TrainClient"
    ):
        list(read(tmp_path / "traces.jsonl", "verifiers", Options(), {}))


def test_the_temperature_is_that_of_probes(tmp_path: Path):
    """Log-probabilities at another temperature: a checkpoint measured at it agrees with them, at 1 it would not."""
    small_model().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    ids, prompt = [5, 6, 7], [2, 3]
    logits = (
        small_model().double()(input_ids=torch.tensor([prompt + ids])).logits[0, 1:-1].detach()
        / 0.7
    )
    logp = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
    file = write_lines(
        tmp_path / "t.jsonl", [{"token_id": ids, "logp": logp, "prompt_ids": prompt}]
    )
    imported("jsonl", file, tmp_path / "run", temperature=0.7)
    run, policy = (
        sharpscope.load_run(tmp_path / "run"),
        load_policy(PolicySpec(model=str(tmp_path / "model"))),
    )
    assert run.config == {"rollout": {"temperature": 0.7}}
    (found,) = probe_trace(run, policy, tmp_path / "probed")
    assert found.logp_gap < 1e-4 and sharpscope.load_run(tmp_path / "probed").events.empty
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    norms = score_norms(policy.model, torch.tensor([prompt + ids]), mask, temperature=0.7).values[
        0, 2:
    ]
    np.testing.assert_allclose(
        sharpscope.load_run(tmp_path / "probed").tokens()["score_norm_local"], norms, rtol=1e-5
    )
    with pytest.raises(UserError, match="must be above 0"):
        imported("jsonl", file, tmp_path / "no", temperature=0.0)


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        (
            {"logp": [-1.0]},
            {},
            "line 1: no column 'token_id'; name the file's column: --columns token_id=NAME",
        ),
        ({"logp": [-1.0], "token_id": [1, 2]}, {}, "logp has 1 values, token_id 2"),
        ({"logp": [None], "token_id": [1]}, {}, "logp is null on a token in the loss"),
        ({"logp": [-math.inf], "token_id": [1]}, {}, "logp = '-inf' is not a finite number"),
        ({"logp": [-1.0], "token_id": [2**31]}, {}, "token_id is not made of whole numbers from 0"),
        (
            {"logp": -1.0, "token_id": 1},
            {},
            "token_id is not made of whole numbers from 0; write a list of them",
        ),
        ({"logp": [-1.0], "token_id": [1], "mask": [1, 1]}, {}, "mask has not one value"),
        (
            {"logp": [-1.0], "token_id": [1], "position": [2]},
            {},
            "position leaves out tokens; give all of the sequence",
        ),
        (
            {"logp": [-1.0], "token_id": [1], "step": -1},
            {},
            "step = '-1' is not a whole number from 0",
        ),
        ({"logp": [-1.0], "token_id": [1], "prompt": 3}, {}, "prompt is a int; write a text"),
        (
            {"logp": [-1.0], "token_id": [1]},
            {"lopg": "x"},
            "--columns lopg: unknown; did you mean 'logp'",
        ),
        (
            {"logp": [0.4], "token_id": [1]},
            {},
            "logp = 0.4 is above 0, so it is no log-probability",
        ),
        (
            {"logp": [-1.0], "token_id": [1], "score_norm": [-2.0]},
            {},
            "tokens.score_norm has -2, outside 0 to inf; correct the file",
        ),
    ],
)
def test_a_bad_table_is_refused_and_nothing_is_left(row, columns, message, tmp_path: Path):
    with pytest.raises(UserError) as raised:
        imported(
            "jsonl", write_lines(tmp_path / "t.jsonl", [row]), tmp_path / "run", columns=columns
        )
    assert message in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_other_mistakes(export, tmp_path: Path):
    source, records = export
    bad = source / "token_exports" / "step_0" / "rank_0.jsonl"
    for change, message in (
        ({"schema_version": 2}, "schema_version 2"),
        ({"loss_mask": [1]}, "loss_mask is no list of 10 values"),
    ):
        write_lines(bad, [records[0][0] | change])
        with pytest.raises(UserError, match=message):
            imported("prime-rl", source, tmp_path / "run")
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / "step_1").mkdir()
    for kind, options, message in (
        ("slime", {}, "has no files of slime"),
        ("verl", {}, "verl: unknown format"),
        ("nemo-rl", {"tokenizer": "nowhere"}, "--tokenizer nowhere: cannot be loaded"),
    ):
        with pytest.raises(UserError, match=message):
            imported(kind, tmp_path / "v", tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


# -- A dumped batch measured at a checkpoint has the numbers of the recorded step.


@pytest.fixture(scope="module")
def recorded(tiny_policy, tmp_path_factory):
    """(run of one recorded step, its rows for the writers of dumps)."""
    values = {
        **TOY,
        "policy.model": str(tiny_policy),
        "out": str(tmp_path_factory.mktemp("recorded") / "run"),
    }
    values |= {"method": "dapo", "steps": 1, "recording.rotation_every": 1}
    values |= {"evaluation.every": 0, "checkpoint.every": 0}
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
        row |= {
            "theta": own["logp"].astype(float).tolist(),
            "mu": own["behavior_logp"].astype(float).tolist(),
        }
        row |= {"entropy": own["entropy"].astype(float).tolist(), "mask": [1] * len(own)}
        rows.append(
            row | {"advantage": float(rollout["advantage"]), "reward": float(rollout["reward"])}
        )
    return [row | {"step": step} for step in (1, 2) for row in rows]


def write_table(folder: Path, rows: list[dict[str, Any]]) -> None:
    names = {"prompt": "prompt_ids", "ids": "token_id", "theta": "logp", "mu": "behavior_logp"}
    names |= {name: name for name in ("step", "advantage", "reward")}
    lines = [
        {ours: row[theirs] for theirs, ours in names.items()} | {"group": str(row["prompt"])}
        for row in rows
    ]
    write_lines(folder / "batch.jsonl", lines)


def write_prime_rl(folder: Path, rows: list[dict[str, Any]]) -> None:
    """A packed sequence a step, in which the positions begin anew with each sample."""
    for step in (1, 2):
        record: dict[str, Any] = {"schema_version": 1, "step": step, "rank": 0}
        for row in (row for row in rows if row["step"] == step):
            before, n = len(row["prompt"]), len(row["ids"])
            ratio = np.exp(np.subtract(row["theta"], row["mu"])).tolist()
            sample = {"token_ids": row["prompt"] + row["ids"], "position_ids": [*range(before + n)]}
            sample |= {
                "loss_mask": [False] * before + [True] * n,
                "advantages": [row["advantage"]] * (before + n),
            }
            for name, values in (
                ("trainer_logprobs", row["theta"]),
                ("inference_logprobs", row["mu"]),
            ):
                sample[name] = [0.0] * before + values
            sample |= {
                "importance_ratio": [1.0] * before + ratio,
                "entropy": [0.0] * before + row["entropy"],
            }
            for name, values in sample.items():
                record[name] = record.get(name, []) + values
        place = folder / "token_exports" / f"step_{step}"
        write_lines(place / "rank_0.jsonl", [record])
        (place / "STABLE").touch()


WRITERS = [
    write_table,
    write_nemo_rl,
    write_slime,
    write_verifiers,
    write_open_instruct,
    write_prime_rl,
]


@pytest.mark.parametrize("dump", WRITERS)
def test_a_replayed_batch_has_the_numbers_of_the_recorded_step(
    recorded, tiny_policy, tmp_path, dump
):
    run, rows = recorded
    dump(tmp_path / "dump", rows)
    policy = load_policy(PolicySpec(model=str(tiny_policy)))
    found = probe_rollouts(tmp_path / "dump", policy, tmp_path / "out", method=parse_method("dapo"))
    assert [one.attributed for one in found] == [True, True] and max(
        one.logp_gap for one in found
    ) < 1e-4
    again = sharpscope.load_run(tmp_path / "out")
    here, there = run.tokens(steps=[1]), again.tokens(steps=[2])
    if dump is write_open_instruct:  # its rows have other groups, and so another order
        here, there = (
            t.sort_values(["score_norm_local", "loss_coef"], key=lambda c: c.round(4)).reset_index(
                drop=True
            )
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
    one, two = (
        layer_norms(r).query(f"step == {s}").set_index("group")["grad_norm"]
        for r, s in ((run, 1), (again, 2))
    )
    pd.testing.assert_series_equal(one, two, rtol=1e-3, check_like=True)
    assert [*layer_tokens(run, 1)["loss_coef"]] == pytest.approx(
        [*layer_tokens(again, 2)["loss_coef"]], rel=1e-3
    )
    np.testing.assert_allclose(
        entropy_bins(again)["entropy"], entropy_bins(run)["entropy"], atol=1e-3
    )


def test_a_planted_token_is_named_first_through_replay(recorded, tiny_policy, tmp_path, capsys):
    """Its advantage, and so its coefficient, is multiplied by 100."""
    _, rows = recorded
    lines = [
        row | {"advantage": [row["advantage"]] * len(row["ids"])}
        for row in rows
        if row["step"] == 1
    ]
    row = next(
        index for index, line in enumerate(lines) if line["advantage"][0] and len(line["ids"]) > 2
    )
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
    lines = [
        {"prompt_ids": r["prompt"], "token_id": r["ids"], "logp": r["theta"]} for r in rows[:4]
    ]
    write_lines(tmp_path / "no_prompt.jsonl", [{"token_id": [5], "logp": [-1.0]}, *lines])
    with pytest.raises(
        UserError, match=r"1 of 5 completions have no token IDs of the prompt; write `prompt_ids`"
    ):
        probe_rollouts(tmp_path / "no_prompt.jsonl", policy, tmp_path / "out", method=method)
    write_lines(tmp_path / "no_advantage.jsonl", lines)
    with pytest.raises(UserError, match="neither advantages nor rewards with groups"):
        probe_rollouts(tmp_path / "no_advantage.jsonl", policy, tmp_path / "out", method=method)
    with pytest.raises(UserError, match="give the method that trained on it"):
        probe_rollouts(tmp_path / "no_advantage.jsonl", policy, tmp_path / "out")
    shifted = [line | {"advantage": 1.0, "logp": [x - 0.7 for x in line["logp"]]} for line in lines]
    write_lines(tmp_path / "shifted.jsonl", shifted)
    with pytest.raises(UserError, match=r"differ from the recorded ones by 0\.7 nats"):
        probe_rollouts(tmp_path / "shifted.jsonl", policy, tmp_path / "out", method=method)
    assert not (tmp_path / "out").exists()
    probe_rollouts(tmp_path / "shifted.jsonl", policy, tmp_path / "out", method=method, force=True)
    ids = json.loads(sharpscope.load_run(tmp_path / "out").rollouts["token_ids"][0])
    assert ids == rows[0]["prompt"] + rows[0]["ids"]


# -- Dumps with values that no trainer writes

WRONG = [None, True, -1, 2**31, 10**400, 1e308, math.inf, "x", "\ud800", [], [[1]], {}, {"a": 1}]


def places_of(value: Any, place: tuple = ()):
    """Places of values in a record."""
    yield from [place] if place else []
    items = value.items() if isinstance(value, dict) else enumerate(value[:2])
    for key, inner in items if isinstance(value, dict | list) else ():
        yield from (
            places_of(inner, (*place, key)) if isinstance(inner, dict | list) else [(*place, key)]
        )


def changed(record: Any, place: tuple, wrong: Any) -> Any:
    record = json.loads(json.dumps(record))
    inner = record
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = wrong
    return record


def small_rows() -> list[dict[str, Any]]:
    values = {"theta": [-1.0, -2.0], "mu": [-1.1, -1.9], "entropy": [0.5, 0.6], "mask": [1, 1]}
    row = {"prompt": [3, 4], "ids": [5, 6], "advantage": 0.5, "reward": 1.0}
    return [{"step": step, **row, **values} for step in (1, 2)]


@pytest.mark.parametrize("dump", WRITERS)
def test_a_wrong_value_anywhere_in_a_dump_is_read_or_named(tmp_path, dump):
    dump(tmp_path / "sound", small_rows())
    kind = recognize(tmp_path / "sound")
    options = {"columns": {}} if kind == "jsonl" else {}
    assert list(read(tmp_path / "sound", kind, Options(**options), {}))
    file, *_ = sorted(f for f in (tmp_path / "sound").rglob("*") if f.suffix in (".jsonl", ".pt"))
    if file.suffix == ".pt":
        whole = torch.load(file, weights_only=True)
        lists = {
            k: [
                {n: v.tolist() if hasattr(v, "tolist") else v for n, v in s.items()}
                for s in whole[k]
            ]
            for k in ("samples",)
        }
        sound: Any = whole | lists
    else:
        sound = json.loads(file.read_text().splitlines()[0])
    tried = refused = 0
    for place in some(places_of(sound)):
        for wrong in WRONG:
            record = changed(sound, place, wrong)
            if file.suffix == ".pt":
                torch.save(record, file)
            else:
                file.write_text(json.dumps(record), "utf-8")
            tried += 1
            try:
                list(read(tmp_path / "sound", kind, Options(**options), {}))
            except UserError as error:
                refused += 1
                assert "\n" not in str(error) and len(str(error)) < 500
    assert tried > 100 and refused > 20


@pytest.mark.parametrize("parents", [[1, 0], [None, 2, 1], [0]])
def test_messages_whose_parents_form_a_circle_are_named(tmp_path, parents):
    nodes = [
        {"parent": parent, "token_ids": [1], "mask": [True], "logprobs": [-1.0]}
        for parent in parents
    ]
    write_lines(tmp_path / "traces.jsonl", [{"traces": [{"nodes": nodes}]}])
    with pytest.raises(UserError, match=r"line 1: the parents of [123] messages form a circle"):
        list(read(tmp_path / "traces.jsonl", "verifiers", Options(), {}))


def test_messages_in_very_many_completions_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARPSCOPE_BOUNDS", "0.001")
    chain = [{"parent": i - 1 if i else None, "token_ids": [1]} for i in range(50)]
    leaves = [{"parent": 49, "token_ids": [1]} for _ in range(50)]
    write_lines(tmp_path / "traces.jsonl", [{"traces": [{"nodes": chain + leaves}]}])
    with pytest.raises(UserError, match="more than 1,000 messages"):
        list(read(tmp_path / "traces.jsonl", "verifiers", Options(), {}))

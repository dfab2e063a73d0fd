"""Traces from prime-rl's token export, verl's rollout files and any table of tokens: every value, and what is null."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import sharpscope
from sharpscope.cli import app
from sharpscope.errors import UserError
from sharpscope.integrations.importers import Coefficients, Labels, import_jsonl, import_prime_rl, import_verl
from tests.integrations.trainers import tokenizer

LABELS = Labels("grpo", "task", 3)


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
        "is_masked": high,
        "is_masked_high": high,
        "is_masked_low": [False] * 10,
        "rl_weights": rng.uniform(0.5, 2, 10).tolist(),
    }
    return record | changes


@pytest.fixture
def export(tmp_path: Path) -> tuple[Path, dict[int, list[dict[str, Any]]]]:
    """Three steps of two ranks, the last of them not complete; and the records by step."""
    rng = np.random.default_rng(0)
    records = {step: [packed(rng, step, rank=rank) for rank in (0, 1)] for step in (0, 1, 2)}
    for step, own in records.items():
        folder = tmp_path / "outputs" / "token_exports" / f"step_{step}"
        for record in own:
            write_lines(folder / f"rank_{record['rank']}.jsonl", [record])
        if step < 2:
            (folder / "STABLE").touch()
    return tmp_path / "outputs", records


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


def test_verl(tmp_path: Path):
    def line(step: int, prompt: str, index: int, score: float, **more: Any) -> dict[str, Any]:
        return {"input": prompt, "output": f"a{index}", "gts": "1", "score": score, "step": step} | more

    keyed = [line(1, f"q{p}", i, float(p == i), uid=f"u{p}_{i}_0") for i in range(2) for p in range(2)]
    write_lines(tmp_path / "rollouts" / "1.jsonl", keyed)
    by_text = [line(2, "same", i, i / 4, acc=float(i > 1), format=0.5) for i in range(3)]
    write_lines(tmp_path / "rollouts" / "2.jsonl", by_text)
    (tmp_path / "rollouts" / "notes.jsonl").write_text("not a step")
    assert import_verl(tmp_path / "rollouts", tmp_path / "run", LABELS) == {"steps": 2, "rollouts": 7, "tokens": 0}
    run = sharpscope.load_run(tmp_path / "run")
    first, second = (run.rollouts[run.rollouts["step"] == step] for step in (1, 2))
    assert first["group"].tolist() == [0, 0, 1, 1] and first["prompt"].tolist() == ["q0", "q0", "q1", "q1"]
    assert first["completion"].tolist() == ["a0", "a1", "a0", "a1"] and first["reward"].tolist() == [1, 0, 0, 1]
    assert first["correct"].isna().all() and second["correct"].tolist() == [False, False, True]
    assert json.loads(second["reward_parts"].iloc[0]) == {"acc": 0.0, "format": 0.5}
    assert run.steps["reward_mean"].tolist() == [0.5, 0.25] and run.steps["zero_std_groups"].tolist() == [0, 0]
    assert math.isnan(run.steps["accuracy"][0]) and run.steps["accuracy"][1] == pytest.approx(1 / 3)
    assert run.steps["tokens"].isna().all() and run.tokens().empty


ROWS = [
    {
        "s": 1,
        "ids": [5, 6, 7],
        "lp": [-0.1, -0.2, -0.3],
        "adv": 0.5,
        "m": [1, 0, 1],
        "prompt_ids": [2, 3],
        "group": "a",
    },
    {"s": 1, "ids": [8, 9], "lp": [-1.0, -2.0], "adv": [0.25, -0.25], "m": [1, 1], "prompt_ids": [4], "group": "b"},
    {"s": 3, "ids": [8, 9], "lp": [-1.5, -2.5], "adv": 1.0, "m": [1, 1], "prompt_ids": [4], "group": "a"},
]
NAMES = {"step": "s", "token_id": "ids", "logp": "lp", "advantage": "adv", "mask": "m"}


def test_jsonl_with_a_sequence_on_each_line(tmp_path: Path):
    file = write_lines(tmp_path / "t.jsonl", ROWS)
    assert import_jsonl(file, tmp_path / "run", LABELS, NAMES) == {"steps": 2, "rollouts": 3, "tokens": 6}
    run = sharpscope.load_run(tmp_path / "run")
    tokens = run.tokens()
    assert tokens["token_id"].tolist() == [5, 7, 8, 9, 8, 9] and tokens["position"].tolist() == [0, 2, 0, 1, 0, 1]
    np.testing.assert_allclose(tokens["logp"], [-0.1, -0.3, -1, -2, -1.5, -2.5], rtol=1e-6)
    assert tokens["advantage"].tolist() == [0.5, 0.5, 0.25, -0.25, 1, 1]
    assert run.rollouts["advantage"].tolist() == [0.5, 0.0, 1.0] and run.rollouts["group"].tolist() == [0, 1, 0]
    assert json.loads(run.rollouts["token_ids"][0]) == [2, 3, 5, 6, 7]
    assert run.steps["completion_length_mean"].tolist() == [2, 2]


def test_jsonl_with_a_token_on_each_line(tmp_path: Path):
    rows = [
        {"step": row["s"], "rollout": index, "token_id": token, "logp": lp, "mask": keep}
        for index, row in enumerate(ROWS)
        for token, lp, keep in zip(row["ids"], row["lp"], row["m"], strict=True)
    ]
    rows[2] |= {"reward": 0.5, "entropy": 1.5}  # known of the last token only
    import_jsonl(write_lines(tmp_path / "t.jsonl", rows), tmp_path / "run", LABELS)
    run = sharpscope.load_run(tmp_path / "run")
    tokens = run.tokens()
    assert tokens["token_id"].tolist() == [5, 7, 8, 9, 8, 9] and tokens["position"].tolist() == [0, 2, 0, 1, 0, 1]
    np.testing.assert_equal(tokens["entropy"].to_numpy()[:3], [math.nan, 1.5, math.nan])
    np.testing.assert_equal(run.rollouts["reward"].to_numpy(), [0.5, math.nan, math.nan])
    assert tokens["rollout"].tolist() == [0, 0, 1, 1, 0, 0] and tokens["advantage"].isna().all()


def test_texts_with_a_tokenizer(tmp_path: Path):
    tokenizer().save_pretrained(tmp_path / "words")
    file = write_lines(tmp_path / "t.jsonl", ROWS)
    import_jsonl(file, tmp_path / "run", Labels(tokenizer=str(tmp_path / "words")), NAMES)
    rollouts = sharpscope.load_run(tmp_path / "run").rollouts
    assert rollouts["prompt"].tolist() == ["w2 w3", "w4", "w4"] and rollouts["completion"][0] == "w5 w6 w7"


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"logp": [-1.0]}, {}, "line 1: no column 'token_id'; name the file's column: --columns token_id=NAME"),
        ({"logp": [-1.0], "token_id": [1]}, {"advantage": "adv"}, "no column 'adv'"),
        ({"logp": [-1.0], "token_id": [1, 2]}, {}, "logp has 1 values, token_id 2"),
        ({"logp": [None], "token_id": [1]}, {}, "logp is null on a token in the loss"),
        ({"logp": ["x"], "token_id": [1]}, {}, "logp = 'x' is not a finite number"),
        ({"logp": [-math.inf], "token_id": [1]}, {}, "logp = '-inf' is not a finite number"),
        ({"logp": [-1.0], "token_id": [1], "reward": 10**400}, {}, "is not a finite number"),
        ({"logp": [-1.0], "token_id": [2**31]}, {}, "token_id is not made of whole numbers from 0"),
        ({"logp": [-1.0], "token_id": [1], "position": 0}, {}, "position is not made of whole numbers from 0"),
        ({"logp": [-1.0], "token_id": [1], "position": [0, 1]}, {}, "position has 2 values, token_id 1"),
        ({"logp": [-1.0], "token_id": [1], "prompt_ids": "ab"}, {}, "prompt_ids is not made of whole numbers from 0"),
        ({"logp": [-1.0], "token_id": [1], "weight": 2.0}, {}, "weight has no list of values, token_id 1"),
        ({"logp": -1.0, "token_id": 1, "rollout": [1]}, {}, "a line is a token, so 'rollout'"),
        ({"logp": [-1.0], "token_id": [1], "mask": [None]}, {}, "mask has not one value"),
        ({"logp": [-1.0], "token_id": [-1]}, {}, "token_id is not made of whole numbers from 0"),
        ({"logp": [-1.0], "token_id": [1], "step": 0}, {}, "step = '0' is not a whole number from 1"),
        ({"logp": [-1.0], "token_id": [1], "mask": [1, 1]}, {}, "mask has not one value"),
        ({"logp": [-1.0], "token_id": [1], "prompt": 3}, {}, "prompt is a int; write a text"),
        ({"logp": -1.0, "token_id": 1}, {}, "a line is a token, so 'rollout'"),
        ({"logp": [-1.0], "token_id": [1], "mask": [0]}, {"lopg": "x"}, "--columns lopg: unknown; did you mean 'logp'"),
        ([1], {}, "a list, not a JSON object"),
    ],
)
def test_a_bad_table_is_refused_and_nothing_is_left(row, columns, message, tmp_path: Path):
    with pytest.raises(UserError) as raised:
        import_jsonl(write_lines(tmp_path / "t.jsonl", [row]), tmp_path / "run", LABELS, columns)
    assert message in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_other_mistakes(export, tmp_path: Path):
    source, records = export
    for importer in (import_prime_rl, import_verl):
        with pytest.raises(UserError, match="has no"):
            importer(tmp_path / "nothing", tmp_path / "run", LABELS)
    bad = source / "token_exports" / "step_0" / "rank_0.jsonl"
    for change, message in (
        ({"schema_version": 2}, "schema_version 2"),
        ({"loss_mask": [1]}, "loss_mask is no list of 10 values"),
        ({"token_ids": "x"}, "token_ids is no list of integers"),
    ):
        write_lines(bad, [records[0][0] | change])
        with pytest.raises(UserError, match=message):
            import_prime_rl(source, tmp_path / "run", LABELS)
    bad.write_text("{not json")
    with pytest.raises(UserError, match="line 1: not JSON"):
        import_prime_rl(source, tmp_path / "run", LABELS)
    write_lines(tmp_path / "v" / "1.jsonl", [{"input": "q"}])
    with pytest.raises(UserError, match="output is no text"):
        import_verl(tmp_path / "v", tmp_path / "run", LABELS)
    with pytest.raises(UserError, match="--tokenizer nowhere: cannot be loaded"):
        import_jsonl(write_lines(tmp_path / "t.jsonl", ROWS), tmp_path / "run", Labels(tokenizer="nowhere"), NAMES)
    assert not (tmp_path / "run").exists()


def said(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if code:
        return str(result.exception)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_every_command_reads_imports(export, tmp_path: Path):
    source, _ = export
    write_lines(tmp_path / "v" / "1.jsonl", [{"input": "q", "output": "a<b>", "score": 1.0}] * 2)
    write_lines(tmp_path / "t.jsonl", ROWS)
    runs = tmp_path / "runs"
    constants = ("--adv-tau", "1", "--kl-tau", "0.001")
    assert "2 steps, 8 completions, 24 tokens" in said(
        "import", "prime-rl", str(source), "--out", str(runs / "p"), *constants
    )
    said("import", "verl", str(tmp_path / "v"), "--out", str(runs / "v"))
    columns = ",".join(f"{ours}={theirs}" for ours, theirs in NAMES.items())
    said("import", "jsonl", str(tmp_path / "t.jsonl"), "--columns", columns, "--out", str(runs / "j"))
    assert "give both" in said("import", "prime-rl", str(source), "--adv-tau", "1", code=2)
    assert "from prime-rl" in said("show", str(runs / "p")) and "tokens: all" in said("show", str(runs / "v"))
    assert "▸⟨" in said("tokens", str(runs / "p"), "--step", "2", "--by", "loss_coef")
    assert "never recorded in this run" in said("tokens", str(runs / "v"), "--step", "1", code=2)
    for run in ("p", "v", "j"):
        assert "no gradient norm" in said("spikes", str(runs / run))
    said("analyze", str(runs), "--out", str(tmp_path / "report"))
    text = (tmp_path / "report" / "report.html").read_text("utf-8")
    assert "not a number" not in text and "a<b>" not in text
    said("report", str(runs / "j"), "--out", str(tmp_path / "j.html"))

"""Traces from prime-rl's token export, verl's rollout files and any table of tokens: every value, and what is null."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import sharpscope
from sharpscope.cli import app
from sharpscope.errors import UserError
from sharpscope.integrations.importers import Labels, import_jsonl, import_prime_rl, import_verl
from sharpscope.policy import PolicySpec, load_policy
from sharpscope.probes import score_norms
from sharpscope.recording.from_checkpoint import probe_trace
from tests.integrations.importers.records import LABELS, NAMES, ROWS, write_lines
from tests.integrations.trainers import small_model, tokenizer


def test_the_temperature_is_that_of_probes(tmp_path: Path):
    """Log-probabilities at another temperature: a checkpoint measured at it agrees with them, at 1 it would not."""
    small_model().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    ids, prompt = [5, 6, 7], [2, 3]
    logits = small_model().double()(input_ids=torch.tensor([prompt + ids])).logits[0, 1:-1].detach() / 0.7
    logp = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
    file = write_lines(tmp_path / "t.jsonl", [{"token_id": ids, "logp": logp, "prompt_ids": prompt}])
    said("import", "jsonl", str(file), "--out", str(tmp_path / "run"), "--temperature", "0.7")
    run, policy = sharpscope.load_run(tmp_path / "run"), load_policy(PolicySpec(model=str(tmp_path / "model")))
    assert run.config == {"rollout": {"temperature": 0.7}}
    (found,) = probe_trace(run, policy, tmp_path / "probed")
    assert found.logp_gap < 1e-4 and sharpscope.load_run(tmp_path / "probed").events.empty
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    norms = score_norms(policy.model, torch.tensor([prompt + ids]), mask, temperature=0.7).values[0, 2:]
    np.testing.assert_allclose(sharpscope.load_run(tmp_path / "probed").tokens()["score_norm_local"], norms, rtol=1e-5)
    for wrong in ("0", "-1", "inf"):
        message = said("import", "jsonl", str(file), "--out", str(tmp_path / "no"), f"--temperature={wrong}", code=2)
        assert "must be above 0" in message and not (tmp_path / "no").exists()


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


def test_every_command_reads_imports(export, tmp_path: Path, quick):
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
    assert "Imported from prime-rl" in said("show", str(runs / "p")) and "tokens: all" in said("show", str(runs / "v"))
    assert "[⟨" in said("tokens", str(runs / "p"), "--step", "2", "--by", "loss_coef")
    unknown = "attribution: not recorded at step 1; never recorded in this run"
    for run in ("v", "j"):
        assert unknown in said("tokens", str(runs / run), "--step", "1", code=2)
    for run in ("p", "v", "j"):
        assert "No step has a gradient norm" in said("tokens", str(runs / run), "--spikes")
    said("analyze", str(runs), "--out", str(tmp_path / "report"))
    text = (tmp_path / "report" / "report.html").read_text("utf-8")
    assert "not a number" not in text and "a<b>" not in text

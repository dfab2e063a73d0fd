"""Score norms and attribution of an imported trace at a checkpoint, against autograd in float64."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sharpscope
from sharpscope.errors import UserError
from sharpscope.integrations.importers import Options, import_files
from sharpscope.policy import PolicySpec, load_policy
from sharpscope.recording import from_checkpoint
from sharpscope.recording.from_checkpoint import STATISTICS, probe_trace, step_rows
from tests.integrations.trainers import small_model, tokenizer
from tests.oracles.token_gradients import row_logp, tokens_of

ROWS = [([2, 3], [4, 5, 6]), ([7], [8, 9]), ([2, 3, 4], [10])]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    small_model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def trace(folder: Path, coef: list[list[float]] | None, shift: float = 0.0) -> Path:
    model = small_model().double()
    with torch.no_grad():
        logp = [(row_logp(model, row) + shift).tolist() for row in ROWS]
    lines = [
        {"step": step, "prompt_ids": prompt, "token_id": ids, "logp": logp[i]}
        | ({"loss_coef": coef[i]} if coef else {})
        for step in (1, 2)
        for i, (prompt, ids) in enumerate(ROWS)
    ]
    file = folder / "t.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    import_files("jsonl", file, folder / "imported", Options())
    return folder / "imported"


def test_norms_and_shares_are_autograds(checkpoint: Path, tmp_path: Path):
    rng = np.random.default_rng(0)
    coef = [rng.normal(size=len(ids)).tolist() for _, ids in ROWS]
    source = sharpscope.load_run(trace(tmp_path, coef))
    found = probe_trace(
        source, load_policy(PolicySpec(model=str(checkpoint))), tmp_path / "out", steps=[2]
    )
    assert [(one.step, one.tokens, one.attributed) for one in found] == [(2, 6, True)] and found[
        0
    ].logp_gap < 1e-5
    run = sharpscope.load_run(tmp_path / "out")
    tokens, model = run.tokens(steps=[2]), small_model().double()
    given = [torch.tensor(row, dtype=torch.float64) for row in coef]
    expected = tokens_of(
        model, ROWS, lambda logp: sum((c * one).sum() for c, one in zip(given, logp, strict=True))
    )
    np.testing.assert_allclose(tokens["attribution"], expected.attribution, atol=1e-5)
    assert tokens["attribution"].sum() == pytest.approx(1, abs=1e-5)
    assert run.steps["grad_norm"][1] == pytest.approx(expected.gradient_norm, rel=1e-5)
    # The local tier leaves out the terms through other positions.
    local, exact = tokens["score_norm_local"].to_numpy(), expected.score_norm.numpy()
    assert (local <= exact * (1 + 1e-5)).all() and (local > 0.3 * exact).all()
    assert run.tokens(steps=[1])["attribution"].isna().all() and np.isnan(run.steps["grad_norm"][0])
    assert run.events.empty and "measured afterwards" in run.info["notes"][-1]
    old, new = source.tokens(), run.tokens()
    # The text is by the checkpoint's tokenizer.
    measured = ("attribution", "score_norm_local", "score_norm_by_layer", "text", *STATISTICS)
    columns = [name for name in old.columns if name not in measured]
    assert old[columns].equals(new[columns]) and source.rollouts.equals(run.rollouts)


@pytest.mark.parametrize("shift", [0.3, 0.6])
def test_another_checkpoint_is_reported_or_an_error_unless_forced_and_shares_need_coefficients(
    checkpoint: Path, tmp_path: Path, shift: float
):
    source, policy = (
        sharpscope.load_run(trace(tmp_path, None, -shift)),
        load_policy(PolicySpec(model=str(checkpoint))),
    )
    if shift > 0.5:
        with pytest.raises(UserError, match=r"differ from the recorded ones by 0\.6 nats"):
            probe_trace(source, policy, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    found = probe_trace(source, policy, tmp_path / "out", force=shift > 0.5)
    run = sharpscope.load_run(tmp_path / "out")
    assert run.events["rule"].tolist() == ["checkpoint_mismatch"] * 2
    np.testing.assert_allclose(run.events["value"], shift, atol=1e-5)
    assert not found[0].attributed and run.tokens()["attribution"].isna().all()
    assert run.tokens()["score_norm_local"].notna().all()


def test_a_sample_of_a_steps_tokens_has_norms_and_no_shares(
    checkpoint: Path, tmp_path: Path, monkeypatch
):
    def sampled(*given: Any) -> Any:
        rows = step_rows(*given)
        return replace(rows, frame=rows.frame.assign(row_probability=0.5))

    monkeypatch.setattr(from_checkpoint, "step_rows", sampled)
    source = sharpscope.load_run(trace(tmp_path, [[0.5] * len(ids) for _, ids in ROWS]))
    found = probe_trace(source, load_policy(PolicySpec(model=str(checkpoint))), tmp_path / "out")
    tokens = sharpscope.load_run(tmp_path / "out").tokens()
    assert (
        not found[0].attributed
        and tokens["attribution"].isna().all()
        and tokens["score_norm_local"].notna().all()
    )


def test_what_cannot_be_probed_is_refused(checkpoint: Path, tmp_path: Path):
    policy = load_policy(PolicySpec(model=str(checkpoint)))
    run = sharpscope.load_run(trace(tmp_path, None))
    with pytest.raises(UserError, match="--steps 5: the trace has tokens at steps 1, 2"):
        probe_trace(run, policy, tmp_path / "out", steps=[5])
    run.rollouts.loc[run.rollouts["step"] == 2, "token_ids"] = None
    with pytest.raises(UserError, match="step 2: no completion has token IDs; leave the step out"):
        probe_trace(run, policy, tmp_path / "out")
    run.rollouts["token_ids"] = None
    with pytest.raises(UserError, match="add `prompt_ids`"):
        probe_trace(run, policy, tmp_path / "out")
    for name, line, words in (
        (
            "unknown",
            {"token_id": [99], "logp": [-1.0]},
            "token ID 99 of step 1 is not among its 37",
        ),
        (
            "several",
            {"token_id": [9, 8], "logp": [-1.0, -1.0], "temperature": [0.7, 1.0]},
            r"step 1: has several temperatures \(0\.7 to 1\)",
        ),
    ):
        (tmp_path / "u.jsonl").write_text(json.dumps({"prompt_ids": [2]} | line))
        import_files("jsonl", tmp_path / "u.jsonl", tmp_path / name, Options())
        with pytest.raises(UserError, match=words):
            probe_trace(sharpscope.load_run(tmp_path / name), policy, tmp_path / "out")
    assert not (tmp_path / "out").exists()

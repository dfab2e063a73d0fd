"""The reading commands on the example traces: what they print and write is what the traces hold."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import sharpscope
from sharpscope.analysis.spikes import explain_spikes
from sharpscope.cli import app
from sharpscope.errors import UserError
from tests.cli.invoking import EXAMPLE, GRPO, GRPO_SG, invoke


def test_tokens_lists_the_largest_with_their_numbers():
    output = invoke("tokens", GRPO_SG, "--step", "8", "--by", "attribution", "--top", "5")
    tokens = sharpscope.load_run(GRPO_SG).tokens(steps=[8])
    for row in tokens.loc[tokens["attribution"].abs().nlargest(5).index].itertuples():
        assert f"{row.rollout}:{row.position}" in output and f"{row.attribution:.3g}" in output
    with pytest.raises(UserError, match="recorded at steps 1, 4, 8, 12"):
        invoke("tokens", GRPO_SG, "--step", "3")
    with pytest.raises(UserError, match="did you mean 'weight'"):
        invoke("tokens", GRPO_SG, "--step", "8", "--by", "wieght")
    with pytest.raises(UserError, match="steps 1 to 12"):
        invoke("tokens", GRPO_SG, "--step", "99")
    assert CliRunner().invoke(app, ["tokens", GRPO_SG, "--step", "8", "--top", "0"]).exit_code == 2
    exact = tokens.dropna(subset=["score_norm"]).nlargest(1, "score_norm").iloc[0]
    listed = invoke("tokens", GRPO_SG, "--step", "8", "--by", "score_norm", "--top", "1")
    assert f"{exact.score_norm:.3g}" in listed and "~" not in listed  # ~ marks the local tier's norm
    local = tokens.loc[tokens["attribution"].abs().nlargest(5).index]
    assert all(f"~{row.score_norm_local:.3g}" in output for row in local.itertuples() if np.isnan(row.score_norm))


def test_tokens_says_if_they_are_those_of_a_sample(monkeypatch):
    run = sharpscope.load_run(GRPO_SG)
    tokens = run.tokens(steps=[8])
    drawn = tokens["rollout"] < tokens["rollout"].median()
    sample = tokens.assign(
        inclusion_probability=np.where(drawn, np.float32(0.5), np.nan), attribution=tokens["attribution"].where(drawn)
    )
    monkeypatch.setattr(type(run), "tokens", lambda self, *args, **kwargs: sample)
    wanted = "among the tokens of a random 50 % of each update's groups"
    assert wanted in invoke("tokens", GRPO_SG, "--step", "8", "--by", "attribution")
    assert wanted not in invoke("tokens", GRPO_SG, "--step", "8", "--by", "weight")  # of all tokens


def test_tokens_are_cut_as_the_runs_own_tokenizer_cuts_them():
    """The shipped policies' words hold spaces; the class that transformers prefers for Qwen2 would print bytes."""
    assert "is a knave⏎" in invoke("tokens", GRPO_SG, "--step", "8", "--top", "20")


def test_spikes_names_tokens_prompts_and_probabilities():
    output = invoke("spikes", GRPO)
    assert "no spike at z = 4" in output and "probability ranges" in output
    run = sharpscope.load_run(GRPO)
    (spike,) = explain_spikes(run, largest=1)
    assert spike.probabilities["share"].sum() == pytest.approx(1.0, abs=1e-2)
    assert spike.probabilities["tokens"].sum() == pytest.approx(1.0)
    assert spike.step == run.steps.set_index("step").loc[[4, 8, 12], "grad_norm"].idxmax()


def test_claims_and_figures_and_analyze_agree(tmp_path: Path, quick):
    output = invoke("claims", str(EXAMPLE), "--out", str(tmp_path / "claims"))
    assert f"{tmp_path / 'claims'}/claims.md" in output
    lines = [line for line in output.splitlines() if line.startswith("C")]
    assert [line.split()[0] for line in lines] == [f"C{i}" for i in range(1, 15)]
    output = invoke("analyze", str(EXAMPLE), "--out", str(tmp_path / "report"))
    assert f"{tmp_path / 'report'}/report.md" in output
    verdicts = json.loads((tmp_path / "report" / "claims.json").read_text())
    assert [(v["claim"], v["verdict"]) for v in verdicts] == [tuple(line.split()[:2]) for line in lines]
    invoke("figures", "--from", str(EXAMPLE), "--out", str(tmp_path / "figures"))
    pictures = {path.name for path in (tmp_path / "figures").rglob("*.*g")}
    assert pictures == {path.name for path in (tmp_path / "report").iterdir() if path.suffix in (".png", ".svg")}
    assert "C7" in invoke("claims", GRPO, "--claim", "C7", "--details")
    written = sorted(path.name for path in (tmp_path / "claims").iterdir())
    tables = [f"table_{name}.{kind}" for name in ("accuracy", "pair") for kind in ("csv", "md", "tex")]
    assert written == ["claims.json", "claims.md", *tables]
    for name in written:
        assert (tmp_path / "claims" / name).read_bytes() == (tmp_path / "report" / name).read_bytes()


def test_claims_of_no_runs_is_an_error_in_place_of_thirteen_untestable_ones(tmp_path: Path):
    result = CliRunner().invoke(app, ["claims", str(tmp_path)])
    assert isinstance(result.exception, UserError) and "no run below" in str(result.exception)


def test_show_and_compare_say_what_stands_in_the_traces():
    run = sharpscope.load_run(GRPO_SG)
    assert "grpo-sg" in invoke("show", GRPO_SG) and "finished" in invoke("show", GRPO_SG)
    assert "method" in invoke("compare", GRPO, GRPO_SG)
    assert run.info["calibration"]["kind"] == "sigmoid"

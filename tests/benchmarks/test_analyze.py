"""The synthetic run of `bench analyze`: columns filled as promised, statistics in their bounds, size on disk."""

from __future__ import annotations

import pytest

from experiments.benchmarks.analyze import EXACT, METHOD, REQUIRED_BYTES_PER_ROW, write_big_run
from sharpscope.analysis.claims import test_claims as claims_of
from sharpscope.traces import TABLES, load_runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("big")
    write_big_run(folder / "big", 45_000, 50)
    return load_runs(folder)


def test_always_on_columns_are_filled_and_probes_come_at_the_default_rate(runs):
    (run,) = runs
    tokens = run.tokens()
    assert len(tokens) == run.rows("tokens") == 80_000  # rounded up to whole groups: 2 × 8 × 100 tokens in 50 steps
    always = [c.name for c in TABLES["tokens"].columns if not c.probe]
    assert tokens[always].notna().all().all()
    recorded = {c: set(tokens.loc[tokens[c].notna(), "step"]) for c in ("score_norm_local", "heldout_influence")}
    assert recorded == {"score_norm_local": {10, 20, 30, 40, 50}, "heldout_influence": {50}}
    exact = tokens[tokens["score_norm"].notna()].groupby("step").size()
    assert exact.between(EXACT // 2, EXACT).all() and (tokens["score_norm_method"].dropna() == "exact").all()


def test_no_compression_by_luck_and_within_the_size_required(runs):
    (run,) = runs
    size = sum(part.stat().st_size for part in (run.path / "traces" / "tokens").glob("*.parquet"))
    assert size / run.rows("tokens") <= REQUIRED_BYTES_PER_ROW
    noise = run.tokens(columns=["logp", "logit", "entropy", "polarity", "logit_grad_norm"])
    assert (noise.nunique() > 0.8 * len(noise)).all()


def test_the_claims_about_tokens_are_tested_on_it(runs):
    found = {v.claim: v for v in claims_of(runs, baseline=METHOD, treatment="grpo")}
    assert found["C1"].verdict == "supported" and found["C1"].n == 80_000
    assert found["C3"].n == 5 and found["C9"].beside.n == 1
    assert found["C12"].verdict == "untestable" and "no run has entropy at the fixed tokens" in found["C12"].reason

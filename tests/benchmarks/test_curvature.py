"""The curvature benchmark counts both sides alike, and keeps the parts that were measured before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from experiments.benchmarks import __main__ as main
from experiments.benchmarks import curvature, curvature_report
from experiments.benchmarks.curvature_memory import _measure_peak
from sharpscope.errors import UserError
from sharpscope.probes.hessian import eigenpairs
from sharpscope.probes.hessian.causal_lm import lm_surface
from sharpscope.probes.objectives import Objective, token_batch
from tests.models import random_batch, tiny_model


@pytest.fixture
def tiny(monkeypatch):
    """The benchmark on a model of 500 parameters and nine rows."""
    model = tiny_model("qwen2", vocab=13, dtype=torch.float32, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    batch = random_batch(vocab=13, rows=9)
    objective = Objective("nll", token_batch(batch["input_ids"], batch["attention_mask"], batch["mask"]))

    class Policy:
        pass

    policy = Policy()
    policy.model = model
    monkeypatch.setattr(curvature, "load_policy", lambda spec: policy)
    monkeypatch.setattr(curvature, "probed", lambda policy, batch: objective)
    return model, objective


def test_products_and_gradients_are_counted_alike(tiny):
    model, objective = tiny
    found = curvature.eigenvalue(curvature.BATCHES[0], seeds=2)
    with lm_surface(model, objective, mode="graph", microbatch_tokens=10**9) as surface:
        exact = eigenpairs(
            surface.hessian(), tolerance=1e-5, generator=torch.Generator().manual_seed(0)
        )  # from a random start
        surface.start()
        lengths, tokens = surface.objective.batch.lengths, surface.start_tokens
    layer, head = model.model.layers[0], model.get_output_embeddings()
    last = sum(p.numel() for p in [*layer.parameters(), *head.parameters()])
    passes = 1 + last / sum(
        p.numel() for p in model.parameters()
    )  # forward; backward in activations, of the last layer
    for row in range(9):
        places = [t for own, t in tokens if own == row]
        passes += (1 + 2 * len(places)) * (max(places) + 1) / int(lengths.sum()) if places else 0
    assert found["reference"] == pytest.approx(max(exact.values, key=abs), rel=1e-4)
    for ours, theirs in zip(found["ours"], found["pyhessian"], strict=True):
        assert theirs["gradients"] == 1 and ours["gradients"] == pytest.approx(1 + passes / 3)
        assert ours["error"] <= max(theirs["error"], 1e-6)
    mean = found["mean"]
    whole = {side: mean[side]["products"] + mean[side]["gradients"] / 2 for side in mean}
    assert found["ratio"] == pytest.approx(mean["ours"]["products"] / mean["pyhessian"]["products"])
    assert found["ratio_with_gradients"] == pytest.approx(whole["ours"] / whole["pyhessian"])


def test_products_agree_with_curvlinops_to_float64s_rounding(tiny):
    pytest.importorskip("curvlinops", reason="curvlinops-for-pytorch is not installed (pip install --no-deps)")
    exact = curvature.product(repeats=1)["float64"]
    assert exact["difference"] < 1e-10 and exact["streamed_difference"] < 1e-10
    assert 1e-9 < max(exact["float32_error"].values()) < 1e-4


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
def test_memory_beside_parameters_and_vectors_is_less_than_the_logits(capsys):
    given = {"vocabulary": 600_000, "width": 14, "tokens": 64, "layers": 1, "head_mb": 1.0}
    _measure_peak(json.dumps(given))
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["parameters"] == pytest.approx(600_000 * 14, rel=0.1)
    assert found["logits_mb"] == pytest.approx(64 * 600_000 * 4 / 2**20)
    assert found["ratio"] == pytest.approx(found["extra_mb"] / found["logits_mb"]) and found["ratio"] < 0.9


def test_parts_measured_before_stay_and_missing_ones_are_named(tmp_path):
    side = {"products": 4.0, "gradients": 2.0, "error": 1e-3}
    eigen = {
        "prompts": 12,
        "samples": 2,
        "split": "train",
        "rows": 24,
        "tokens": 2602,
        "seeds": 1,
        "reference": 3.0,
        "reference_converged": True,
        "ours": [side],
        "pyhessian": [side | {"products": 8.0, "gradients": 1.0}],
        "mean": {"ours": side, "pyhessian": side | {"products": 8.0, "gradients": 1.0}},
        "ratio": 0.5,
        "ratio_with_gradients": 0.588,
    }
    rounds = {
        "cheap": {
            "prompts": 8,
            "heldout_prompts": 8,
            "samples": 2,
            "functionals": ["nll"],
            "seconds": 6.0,
            "processor_seconds": 9.0,
            "estimates": 20,
            "not_converged": 0,
        },
        "full": {
            "prompts": 64,
            "heldout_prompts": 64,
            "samples": 8,
            "functionals": ["nll", "surrogate"],
            "product_s": 2.0,
            "products_at_most": 1800.0,
            "seconds_at_most": 3600.0,
        },
    }
    when = {"day": "2026-01-01", "threads": 2, "torch": "2", "seconds": 1.0}
    curvature_report.write({"eigenvalue": {"found": [eigen], **when}}, tmp_path)
    text, numbers = curvature_report.write({"rounds": {"found": rounds, **when}}, tmp_path)
    written = text.read_text(encoding="utf-8")
    assert "| 4 | 8 | 0.50 | ≤ 0.5 | ≤ 0.25 |" in written and "24 completions (12 train prompts)" in written
    assert "gradients (2 and 1) at half a product each | 5 | 8.5 | 0.59 |" in written
    assert "Not measured: product, trace, memory." in written and "GPU numbers are missing" in written
    assert "| `cheap` | 8 + 8, 2 completions each | nll | 6 | 9 | 20 | 0 |" in written
    assert "of the order of 4 hours" in written and "not run: at most 1,800 products" in written
    assert list(json.loads(numbers.read_text(encoding="utf-8"))) == ["rounds", "eigenvalue"]
    # A second draw of the same prompts: one row, of all runs together.
    other = eigen | {"draw": 1, "ratio": 0.25, "tokens": 2000, "ours": [side | {"products": 2.0}]}
    again, _ = curvature_report.write({"eigenvalue": {"found": [eigen, other], **when}}, tmp_path)
    written = again.read_text(encoding="utf-8")
    assert "all 2 batches below together, 2 runs a side; median" in written
    assert "| 24 completions (12 train prompts), 2 draws, 2,000 to 2,602 tokens; median" in written
    assert "| 3 | 8 | 0.38 | ≤ 0.5 | ≤ 0.25 |" in written
    assert "order of the rows: 0.50, 0.25; their\ngeometric mean is 0.35, and 0 of 2 are above 0.5." in written


def test_an_unknown_part_is_named(tmp_path):
    with pytest.raises(UserError, match="did you mean 'memory'"):
        main.curvature(out=tmp_path, part=["memry"])
    assert not list(tmp_path.iterdir())

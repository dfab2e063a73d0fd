"""The token benchmark compares like with like, and writes what it found."""

from __future__ import annotations

import json

import pytest
import torch

from experiments.benchmarks import growth, tokens, tokens_report
from sharpscope.probes import score_norms

SMALL = {"layers": 2, "width": 16, "heads": 2, "key_heads": 2, "feed_forward": 24, "vocabulary": 31}


def test_the_baseline_computes_what_the_exact_tier_computes():
    model = tokens.random_model(**SMALL)
    ids = tokens.sampled_rows(model, 1, 12)
    assert ids.shape == (1, 12) and int(ids.min()) >= 2
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    ours = score_norms(model, ids, mask, "exact").values[0, 1:].tolist()
    assert tokens.loop_norms(model, ids, range(1, 12)) == pytest.approx(ours, rel=1e-4)


def test_directions_needed_grow_as_the_square_of_the_precision_asked_for():
    model = tokens.random_model(**SMALL)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim == 2 else 1)
    ids = tokens.sampled_rows(model, 2, 12)
    coarse, fine = tokens.directions_needed(model, ids, 0.02), tokens.directions_needed(model, ids, 0.01)
    assert coarse > 2 and 3 < fine / coarse < 5


def test_the_sketchs_error_is_measured_against_exact_norms():
    model = tokens.random_model(**SMALL)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim == 2 else 1)
    ids = tokens.sampled_rows(model, 2, 12)
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    exact = score_norms(model, ids, mask, "exact").values
    sketches = [score_norms(model, ids, mask, "sketch", directions=3, seed=seed).values for seed in (0, 1)]
    columns = [2, 4, 8, 10]  # four, spread over twelve
    errors = torch.stack([(sketch / exact - 1).abs()[:, columns] for sketch in sketches])
    assert tokens.sketch_error(model, ids, 3, 4, seeds=2) == pytest.approx(float(errors.flatten().median()), rel=1e-3)


def test_report_names_requirements_and_a_missing_gpu(tmp_path, capsys):
    row = tokens.Row("local, all tokens", "2 x 8 tokens", 0.5, 60.0, 120.0, 100, 250, "x faster")
    found = {
        "threads": 1,
        "quick": True,
        "repeats": 1,
        "torch": "2",
        "batched": "rule",
        "embedded policy": [vars(row)],
        "gpu": "GPU numbers are missing: none was at hand",
    }
    paths = tokens_report.write(found, tmp_path)
    assert [path.name for path in paths] == ["tokens.json", "tokens.md"]
    text = (tmp_path / "tokens.md").read_text(encoding="utf-8")
    assert "| local, all tokens | 2 x 8 tokens | 0.500 | 60.000 | 120.00 x faster | >= 100 | >= 250 |" in text
    assert "GPU numbers are missing" in text and "smoke run" in text and "`vmap`'s public rule" in text
    assert json.loads((tmp_path / "tokens.json").read_text(encoding="utf-8")) == found
    tokens_report.show(found)
    assert "120.00" in capsys.readouterr().out


def test_slopes_of_growth_are_fitted_at_the_largest_sizes(tmp_path):
    sizes = growth.AXES["batch"].values
    linear = growth.Curve("batch", "local norms", tuple(0.5 + 2.0 * size for size in sizes))
    square = growth.Curve("batch", "forward and backward", (9.0, 9.0, *(1e-3 * size**2 for size in sizes[2:])))
    assert square.slope == pytest.approx(2.0)
    assert 0.9 < linear.slope < 1.0
    text = growth.table([linear, square])
    assert "| 2.00 | ≤ 1.1: missed |" in text and text.count("missed") == 1
    growth.picture([linear, square], tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 10_000


def test_growth_runs_every_measure(monkeypatch):
    monkeypatch.setitem(growth.AXES, "length", growth.Axis("length", (8, 12, 16), 2.0))
    curves = growth.measure("length", repeats=1)
    assert {curve.measure for curve in curves} == set(growth.MEASURES) - {"report"}
    assert all(len(curve.seconds) == 3 and min(curve.seconds) > 0 for curve in curves)

"""Token tables and what is computed from them: values, layers, sampler against trainer, selections, the gradient gap's step."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import sharpscope
from experiments.gradient_gap import gap_of_run
from sharpscope.analysis.curves import study_values, varying
from sharpscope.analysis.headline import growth_text, layer_growth
from sharpscope.analysis.study import Study, recorded_steps
from sharpscope.analysis.token_values import (
    entropy_bins,
    left_out,
    mismatch_by_step,
    mismatch_sums,
    sampler_section,
    selection_section,
    with_values,
)
from sharpscope.analysis.token_view import largest_rollouts
from sharpscope.analysis.tokens import sampling_error
from sharpscope.integrations.importers import Options, import_files
from sharpscope.traces import TraceWriter, load_run
from tests.loops import some
from tests.traces.synthetic import new_run, rows

GROUPS = ["0.attention", "0.mlp", "head"]


def test_growth_is_that_of_the_largest_update():
    norms = np.random.default_rng(0).uniform(0.5, 1.5, (6, 2, 3))  # (steps, updates, groups)
    norms[5, 1, 1] *= 40
    rows = [
        {
            "step": s + 1,
            "update": u,
            "grad_norm_by_layer": json.dumps(dict(zip(GROUPS, norms[s, u], strict=True))),
        }
        for s, u in np.ndindex(6, 2)
    ]
    found = layer_growth(
        SimpleNamespace(updates=pd.DataFrame(rows).assign(update_norm_by_layer=None)), 6
    )
    typical = np.median(norms[:5].reshape(10, 3), axis=0)
    table = found.loc[GROUPS]
    np.testing.assert_allclose(table["growth"], norms[5, 1] / typical)
    np.testing.assert_allclose(table["share"], norms[5, 1] ** 2 / (norms[5, 1] ** 2).sum())
    assert found.index[0] == "0.mlp" and growth_text(found).startswith(
        "0.mlp has the most of ‖∇L‖², "
    )
    assert f"{norms[5, 1, 1] / typical[1]:.3g} × its typical norm" in growth_text(found)


def _softmax(z: np.ndarray) -> np.ndarray:
    p = np.exp(z - z.max())
    return p / p.sum()


def _entropy(p: np.ndarray) -> float:
    return float(-(p * np.log(p)).sum())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropy_change_is_that_of_a_small_step_on_the_tokens_logits(temperature):
    """δ(z/T) = −η·c·(e_y − p) changes H by η·c·polarity, by central differences in float64; so does Σπ² by 2·(…)."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        z, y, c, eta = (
            3 * rng.normal(size=40) / temperature,
            int(rng.integers(40)),
            float(rng.normal()),
            1e-6,
        )
        p = _softmax(z)
        push = -c * (np.eye(40)[y] - p)
        measured = (_entropy(_softmax(z + eta * push)) - _entropy(_softmax(z - eta * push))) / (
            2 * eta
        )
        h = _entropy(p)
        polarity = p[y] * (np.log(p[y]) + h) - (p**2 * (np.log(p) + h)).sum()
        tokens = pd.DataFrame({"loss_coef": [c], "polarity": [polarity]})
        assert with_values(tokens)["entropy_change"].iloc[0] == pytest.approx(
            measured, rel=1e-5, abs=1e-9
        )


def test_kl_mismatch_and_the_policy_term_follow_from_their_columns():
    tokens = pd.DataFrame(
        {
            "logp": [-1.0, -2.0],
            "behavior_logp": [-1.5, np.nan],
            "ref_logp": [-1.0, -3.0],
            "loss_coef": [0.5, 1.0],
        }
    ).assign(kl_coef=[0.2, np.nan])
    made = with_values(tokens)
    np.testing.assert_allclose(made["mismatch"], [0.5, np.nan])
    np.testing.assert_allclose(made["kl"], [0.0, np.exp(-1.0) + 1 - 1])
    np.testing.assert_allclose(made["policy_coef"], [0.3, np.nan])
    assert "entropy_change" not in made  # no polarity


def test_bins_hold_the_shares_that_were_planted(tmp_path: Path):
    """Four tokens of each kind with known c·polarity and shares; the fifth kind has no advantage."""
    run = new_run(tmp_path / "a")
    peak = np.array([True, False, True, False, True])
    advantage = np.array([1.0, 1.0, -1.0, -1.0, 0.0])
    share = np.array([0.4, 0.3, 0.2, 0.1, 0.0])
    columns = {
        "step": 1,
        "rollout": 0,
        "update": 0,
        "position": np.arange(5),
        "token_id": np.arange(5),
    }
    columns |= {
        "logp": np.log(np.where(peak, 0.6, 0.05)),
        "collision": 0.4,
        "polarity": np.where(peak, 0.2, -0.1),
    }
    columns |= {"advantage": advantage, "loss_coef": -advantage / 4, "attribution": share}
    columns |= {"inclusion_probability": 0.25}
    with TraceWriter(run) as writer:
        writer.append("tokens", columns)
    found = entropy_bins(load_run(run))
    np.testing.assert_allclose(found["tokens"], 0.2)
    np.testing.assert_allclose(found["gradient"], share, atol=1e-7)
    np.testing.assert_allclose(found["entropy"], np.array([-2, 1, 2, -1, 0]) / 6, atol=1e-6)


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """Three steps of sequences of 40 tokens whose rare tokens the sampler gets wrong."""
    folder, rng = tmp_path_factory.mktemp("mismatch"), np.random.default_rng(0)
    rows = []
    for step in (1, 2, 3):
        for _ in range(4):
            sampler = -rng.exponential(1.5, 40)
            noise = rng.normal(0, np.where(sampler < math.log(0.1), 0.3, 0.01))
            logp = np.minimum(sampler + noise, 0.0).tolist()
            rows.append(
                {
                    "step": step,
                    "token_id": [5] * 40,
                    "logp": logp,
                    "behavior_logp": sampler.tolist(),
                }
            )
    file = folder / "t.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    import_files("jsonl", file, folder / "run", Options())
    return folder / "run", rows


def test_the_numbers_are_a_loop_over_the_tokens(imported):
    path, rows = imported
    run, expected = sharpscope.load_run(path), {1: [], 2: [], 3: []}
    for row in some(rows):
        for p, q in zip(
            np.float32(row["logp"]).tolist(), np.float32(row["behavior_logp"]).tolist(), strict=True
        ):
            r = math.exp(p - q)
            expected[row["step"]].append(
                (float(not 0.9 <= r <= 1.1), q - p, (p - q) ** 2 / 2, r - 1 - (p - q))
            )
    sums = mismatch_sums(run)
    for step, values in some(expected.items()):
        np.testing.assert_allclose(
            sums.loc[step, ["outside", "k1", "k2", "k3"]], np.sum(values, axis=0), rtol=1e-6
        )
        assert sums.loc[step, "tokens"] == len(values)
        assert mismatch_by_step(run)[step] == pytest.approx(np.mean(values, axis=0)[3])
    drawn = varying(study_values(Study({"run": run})))["quantity"]
    assert drawn.str.startswith("mismatch of sampler and trainer").any()
    (row,) = sampler_section(sharpscope.load_runs([path])).content.to_dict("records")
    means = np.mean([one for values in expected.values() for one in values], axis=0)
    assert (row["run"], row["tokens"]) == ("run", "480") and row["k1 [nats]"] == pytest.approx(
        means[1]
    )
    assert row["ratios outside [0.9, 1.1]"] == f"{100 * means[0]:.2f} %"


# -- What a selection left out, and the critical step of the gradient gap


def append(writer: TraceWriter, name: str, step: int, count: int, **columns) -> None:
    writer.append(name, rows(name, step, count) | columns)


def test_tokens_are_left_out_if_neither_a_clip_nor_a_missing_advantage_explains_their_zero(
    tmp_path,
):
    tokens = {"kind": "curvature"}
    folder = new_run(tmp_path / "run", config={"seed": 0, "steps": 2, "method": {"tokens": tokens}})
    with TraceWriter(folder) as writer:
        columns = {
            "rollout": np.arange(6),
            "position": np.zeros(6, int),
            "update": np.zeros(6, int),
        }
        columns |= {"kl_coef": [0.0, 0.0, 0.0, 0.0, 0.0, 0.25]}  # the last has the KL term only
        columns |= {"advantage": [-1.0, 1.0, -1.0, 1.0, 0.0, 1.0], "clipped": [0, 1, 0, 0, 0, 0]}
        columns |= {
            "logp": np.log([0.1, 0.5, 0.9, 0.7, 0.5, 0.3]),
            "entropy": [2.0, 1.0, 0.1, 0.3, 1.0, 1.0],
        }
        for step, first in ((1, 0.0), (2, 0.3)):
            append(
                writer, "tokens", step, 6, loss_coef=[first, 0.0, 0.5, -0.5, 0.0, 0.25], **columns
            )
    run = load_run(folder)
    found = left_out(run).set_index("step")
    assert found["out"].tolist() == pytest.approx([2 / 5, 1 / 5])
    assert found.loc[1, "probability_out"] == pytest.approx(0.2)
    assert found.loc[1, "probability_kept"] == pytest.approx(0.7)
    assert found.loc[1, "negative_out"] == 0.5 and found.loc[2, "negative_out"] == 0.0
    shown = selection_section(run)
    assert shown.content["left out"].tolist() == ["40.0 %", "40.0 %", "20.0 %"]
    plain = new_run(tmp_path / "plain")
    assert selection_section(load_run(plain)) is None


@pytest.mark.parametrize("standardized", [True, False])
def test_the_critical_step_of_the_gradient_gap_by_its_definition(tmp_path, standardized):
    """Completions of two tokens with orthogonal score vectors in 40 dimensions, one prompt, rewards 0 and 1, any direction."""
    g = np.random.default_rng(3)
    count, dimension, lr = 6, 40, 0.01
    basis = np.linalg.qr(g.normal(size=(dimension, dimension)))[0].T
    tokens = basis[: 2 * count] * g.uniform(0.5, 3.0, size=(2 * count, 1))
    scores = tokens.reshape(count, 2, dimension).sum(1)  # ∇ ln π of a completion
    correct = np.array([1, 1, 0, 0, 0, 0], bool)
    advantage = correct - correct.mean()
    if standardized:
        advantage /= correct.std(ddof=1)
    coefficient = -advantage / count / 2  # mean over tokens, then over completions
    gradient = (coefficient[:, None] * scores).sum(0)
    # the optimizer's direction: θ ← θ − lr·descent
    descent = gradient + 0.3 * g.normal(size=dimension)
    gap = scores[correct].mean(0) - scores[~correct].mean(0)
    w = -descent / np.linalg.norm(descent)
    eta = max(w @ gap, 0.0) / (2 * 8 * max((scores**2).sum(1)))
    folder = new_run(tmp_path / "run")
    with TraceWriter(folder) as writer:
        columns = {"rollout": np.arange(count), "loss_coef": coefficient, "advantage": advantage}
        columns = {name: np.repeat(values, 2) for name, values in columns.items()}
        columns |= {"position": np.tile([0, 1], count), "update": np.zeros(2 * count, int)}
        append(
            writer,
            "tokens",
            1,
            2 * count,
            score_norm_local=np.linalg.norm(tokens, axis=1),
            **columns,
        )
        reward = correct.astype(float)
        append(
            writer, "rollouts", 1, count, rollout=np.arange(count), correct=correct, reward=reward
        )
        length = lr * np.linalg.norm(descent)
        append(writer, "updates", 1, 1, update=[0], lr=[lr], update_norm=[length], skipped=[False])
        quantities = ["critical_sharpness", "update_slope"]
        values = [4.0, float(descent @ gradient)]
        append(writer, "probes", 1, 2, probe=["critical"] * 2, quantity=quantities, value=values)
    run = load_run(folder)
    (row,) = gap_of_run(run).to_dict("records")
    assert row["gap_lr"] * np.linalg.norm(descent) == pytest.approx(eta, rel=1e-5)
    assert row["success"] == pytest.approx(1 / 3) and row["critical_lr"] == 0.5


@pytest.mark.parametrize("known", ["effect_kl", "attribution", None])
def test_the_completion_that_the_page_shows_has_the_largest_effect_share_or_pull(tmp_path, known):
    folder, none = new_run(tmp_path / "run"), [math.nan] * 4
    columns = {"effect_kl": none, "attribution": none} | (
        {} if known is None else {known: [0.1, -3.0, 0.2, math.nan]}
    )
    if known == "effect_kl":  # leads also where shares were recorded
        columns["attribution"] = [0.9, 0.0, 0.0, 0.1]
    with TraceWriter(folder) as writer:
        places = {"rollout": [0, 1, 2, 3], "position": [0] * 4}
        pulls = {"loss_coef": [0.0, 0.1, 0.1, -4.0], "logp": [-1.0] * 4}
        append(writer, "tokens", 3, 4, **places, **pulls, **columns)
        append(writer, "rollouts", 3, 4, rollout=[0, 1, 2, 3])
    run = load_run(folder)
    assert largest_rollouts(run, [3]) == {3: 3 if known is None else 1}
    assert recorded_steps(run, "effect_kl") == ([3] if known == "effect_kl" else [])


def test_the_standard_error_of_a_sampled_sum_is_that_over_all_samples():
    """Over every sample of 3 of 7 completions the squared errors average to the variance of the estimated sums."""
    draw = np.random.default_rng(0)
    units = pd.Series(np.sort(draw.integers(0, 7, 40)))
    values, share = draw.normal(size=40), 3 / units.nunique()
    sums, squares = [], []
    for sample in itertools.combinations(sorted(units.unique()), 3):
        inside = units.isin(sample)
        sums.append(values[inside].sum() / share)
        chance = np.full(int(inside.sum()), share)
        squares.append(sampling_error(values[inside], units[inside], chance) ** 2)
    assert np.mean(sums) == pytest.approx(values.sum())
    assert np.mean(squares) == pytest.approx(np.var(sums))
    one = units == units.iloc[0]
    assert math.isnan(sampling_error(values[one], units[one], np.full(int(one.sum()), share)))

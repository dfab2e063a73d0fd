"""What a selection left out, with planted tokens; the critical step of the gradient gap against vectors of its definition."""

from __future__ import annotations

import numpy as np
import pytest

from sharpscope.analysis.token_values import gap_section, gradient_gap, left_out, selection_section
from sharpscope.traces import TraceWriter, load_run
from tests.traces.rows import new_run, rows


def table(writer: TraceWriter, name: str, step: int, count: int, **columns) -> None:
    writer.append(name, rows(name, step, count) | columns)


def test_tokens_are_left_out_if_neither_a_clip_nor_a_missing_advantage_explains_their_zero(tmp_path):
    tokens = {"kind": "curvature"}
    folder = new_run(tmp_path / "run", config={"seed": 0, "steps": 2, "method": {"tokens": tokens}})
    with TraceWriter(folder) as writer:
        columns = {"rollout": np.arange(6), "position": np.zeros(6, int), "update": np.zeros(6, int)}
        columns |= {"kl_coef": [0.0, 0.0, 0.0, 0.0, 0.0, 0.25]}  # the last has the KL term only
        columns |= {"advantage": [-1.0, 1.0, -1.0, 1.0, 0.0, 1.0], "clipped": [0, 1, 0, 0, 0, 0]}
        columns |= {"logp": np.log([0.1, 0.5, 0.9, 0.7, 0.5, 0.3]), "entropy": [2.0, 1.0, 0.1, 0.3, 1.0, 1.0]}
        for step, first in ((1, 0.0), (2, 0.3)):
            table(writer, "tokens", step, 6, loss_coef=[first, 0.0, 0.5, -0.5, 0.0, 0.25], **columns)
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
    descent = gradient + 0.3 * g.normal(size=dimension)  # the optimizer's direction: θ ← θ − lr·descent
    gap = scores[correct].mean(0) - scores[~correct].mean(0)
    w = -descent / np.linalg.norm(descent)
    eta = max(w @ gap, 0.0) / (2 * 8 * max((scores**2).sum(1)))
    folder = new_run(tmp_path / "run")
    with TraceWriter(folder) as writer:
        columns = {"rollout": np.arange(count), "loss_coef": coefficient, "advantage": advantage}
        columns = {name: np.repeat(values, 2) for name, values in columns.items()}
        columns |= {"position": np.tile([0, 1], count), "update": np.zeros(2 * count, int)}
        table(writer, "tokens", 1, 2 * count, score_norm_local=np.linalg.norm(tokens, axis=1), **columns)
        reward = correct.astype(float)
        table(writer, "rollouts", 1, count, rollout=np.arange(count), correct=correct, reward=reward)
        length = lr * np.linalg.norm(descent)
        table(writer, "updates", 1, 1, update=[0], lr=[lr], update_norm=[length], skipped=[False])
        quantities = ["critical_sharpness", "critical_lr", "update_slope"]
        values = [4.0, 0.5, float(descent @ gradient)]
        table(writer, "probes", 1, 3, probe=["critical"] * 3, quantity=quantities, value=values)
    run = load_run(folder)
    (row,) = gradient_gap(run).to_dict("records")
    assert row["gap_lr"] * np.linalg.norm(descent) == pytest.approx(eta, rel=1e-5)
    assert row["success"] == pytest.approx(1 / 3) and row["critical_lr"] == 0.5
    assert gap_section(run).content["λ_c"].tolist() == ["4"]

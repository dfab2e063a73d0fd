"""One run in the terminal, and two side by side: what is printed is what an independent computation finds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sharpscope.analysis import compare, largest_recorded_step, show
from sharpscope.analysis.comparison import mean_over_steps
from sharpscope.analysis.statistics import accuracy_interval
from sharpscope.analysis.terminal import sparkline
from sharpscope.errors import UserError
from sharpscope.traces import TraceWriter, load_run, update_run_info
from tests.analysis.drawn import printed
from tests.oracles.analysis import eval_by_step
from tests.traces.rows import new_run, rows


def test_sparkline_scales_from_smallest_to_largest():
    assert sparkline(np.array([0.0, 1.0, 7.0])) == "▁▂█"
    assert sparkline(np.array([1.0, math.nan, 2.0])) == "▁·█"
    assert sparkline(np.array([3.0, 3.0])) == "▄▄"
    assert sparkline(np.arange(80.0), width=8) == "▁▂▃▄▅▆▇█"
    assert sparkline(np.array([])) == "" and sparkline(np.full(3, math.nan)) == "···"


def test_show_prints_setting_curves_evaluation_weights_events_and_cost(two_runs):
    _, run = two_runs
    text = printed(show(run))
    rewards = run.steps["reward_mean"].to_numpy()
    for words in (
        "b · finished",
        "grpo-sg",
        "12 of 12",
        "knights_knaves",
        "entropy [nats]",
        "1.00 s a step",
        "generation 50%",
        f"{rewards[-4:].mean():.3g}",
        sparkline(rewards),
        "weights (sigmoid): mean",
        "weight_saturation × 1, last at step 12",
    ):
        assert words in text, words
    (accuracy,) = eval_by_step([run], "heldout", 0.0)[12]
    assert f"{accuracy:.1%}" in text
    for row in run.eval[run.eval["step"] == 12].itertuples():
        ends = accuracy_interval(row.accuracy, row.std_error, row.n, row.k)
        assert f"{row.accuracy:.1%} [{100 * ends.low:.1f}, {100 * ends.high:.1f}]" in text


def test_no_accuracy_is_certain(tmp_path):
    """0 of 40 prompts: the upper end is z²/(n + z²) = 8.8 %, also where each prompt has 16 completions."""
    matches = []
    for name, k in (("a", 1), ("b", 16)):
        folder = new_run(tmp_path / name)
        row = {
            "step": 1,
            "task": "knights_knaves",
            "split": "heldout",
            "level": "3",
            "n": 40,
            "k": k,
            "accuracy": 0.0,
            "std_error": 0.0,
            "pass_at_k": 0.0,
            "reward_mean": 0.0,
            "heldout_loss": None,
            "temperature": 1.0,
        }
        with TraceWriter(folder) as writer:
            writer.append("steps", rows("steps", 1, 1))
            writer.append("eval", row)
        matches.append(load_run(folder))
        assert "0.0% [0.0, 8.8]" in printed(show(matches[-1]))
    upper = 1.959964**2 / (40 + 1.959964**2)
    row = compare(*matches).results.set_index("quantity").loc["accuracy heldout, T = 1, step 1"]
    assert row["a_half"] == row["b_half"] == pytest.approx(upper)
    assert row["difference_half"] == pytest.approx(math.sqrt(2) * upper)


def test_show_says_how_far_updates_went(tmp_path):
    """Of the last step's updates the farthest; nothing with one update a step, whose ratios are 1."""
    for count, said in ((2, True), (1, False)):
        run = new_run(tmp_path / f"{count}")
        values = {
            "ratio_min": 0.7,
            "ratio_max": 1.25,
            "kl_old_k3": 0.002,
            "clip_fraction_low": 0.01,
            "clip_fraction_high": 0.02,
        }
        with TraceWriter(run) as writer:
            writer.append("steps", rows("steps", 1, 1))
            writer.append("updates", rows("updates", 1, count) | values)
        text = printed(show(load_run(run)))
        line = f"updates of step 1: {count}, ratio 0.7 to 1.25, KL(π_old‖π) up to 0.002 nats, clipped 1.0% below and 2.0% above"
        assert (line in " ".join(text.split())) == said


@pytest.mark.parametrize(("tokens", "gradient", "said"), [(0.96, None, True), (0.1, 0.96, True), (0.96, 0.5, False)])
def test_show_says_when_a_method_is_grpo_in_disguise(tmp_path, tokens, gradient, said):
    """By the share of the gradient, and of the tokens where a trace has no more."""
    run = new_run(tmp_path / "a", calibration={"kind": "sigmoid"})
    shares = {"": tokens, "_gradient": gradient}
    columns = {f"weight_saturation_low{suffix}": share for suffix, share in shares.items()}
    columns |= {f"weight_saturation_high{suffix}": None if share is None else 0.0 for suffix, share in shares.items()}
    with TraceWriter(run) as writer:
        writer.append("steps", rows("steps", 1, 1) | columns)
    assert ("this is GRPO up to the gradient's scale" in printed(show(load_run(run)))) is said


def test_show_of_a_run_without_steps_and_with_hostile_text(tmp_path):
    run = new_run(tmp_path / "a", method="[bold red]x[/] \x1b[31m", config={"policy": {"model": "[link=evil]y"}})
    text = printed(show(load_run(run)))
    assert "[bold red]x[/] ?[31m" in text and "[link=evil]y" in text and "No step is recorded yet" in text
    update_run_info(run, status="running")
    event = {
        "step": 1,
        "rule": "[b]r",
        "severity": "error",
        "value": None,
        "threshold": None,
        "action": "stop",
        "message": "\x1b]0;evil\x07 [red]",
    }
    with TraceWriter(run) as writer:
        writer.append("events", event)
    assert "[b]r × 1, last at step 1: ?]0;evil? [red]" in printed(show(load_run(run)))
    assert "died" in printed(show(load_run(run)))


def test_show_names_damaged_parts(tmp_path):
    run = new_run(tmp_path / "a")
    (run / "traces/steps").mkdir()
    (run / "traces/steps/part-000000-00000000.parquet").write_bytes(b"x")
    loaded = load_run(run)
    with pytest.warns(UserWarning, match="set aside"):
        text = printed(show(loaded))
    assert "set aside: traces/steps/part-000000-00000000.parquet" in text


def test_mean_over_steps_corrects_for_autocorrelation():
    rng = np.random.default_rng(0)
    means, errors = [], []
    for _ in range(400):
        x = np.zeros(300)
        for t in range(1, 300):
            x[t] = 0.6 * x[t - 1] + rng.normal()
        mean, error = mean_over_steps(x)
        means.append(mean)
        errors.append(error)
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.12)
    white = rng.normal(size=50)
    mean, error = mean_over_steps(white)
    assert error >= white.std(ddof=1) / np.sqrt(50) * 0.999
    assert math.isnan(mean_over_steps(np.array([1.0, 2.0]))[1]) and math.isnan(
        mean_over_steps(np.array([1.0, math.nan] * 4))[0]
    )


def test_the_default_step_of_tokens_has_the_largest_gradient_norm_among_the_recorded(tmp_path):
    run = new_run(tmp_path / "a")
    with TraceWriter(run) as writer:
        for step, norm in ((1, 2.0), (2, 5.0), (3, 9.0)):
            writer.append("steps", rows("steps", step, 1) | {"grad_norm": [norm]})
            if step < 3:
                writer.append(
                    "tokens",
                    rows("tokens", step, 4)
                    | {"heldout_influence": None, "attribution": np.ones(4) if step == 1 else None},
                )
    loaded = load_run(run)
    assert largest_recorded_step(loaded, "probability") == 2
    assert largest_recorded_step(loaded, "attribution") == 1
    with pytest.raises(UserError, match="--by heldout_influence: never recorded"):
        largest_recorded_step(loaded, "heldout_influence")
    with pytest.raises(UserError, match="no such column; did you mean"):
        largest_recorded_step(loaded, "atribution")

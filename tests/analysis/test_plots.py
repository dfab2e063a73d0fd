"""Figures by the numbers in their frames, and that what is drawn are these numbers, in one color for each setting."""

from __future__ import annotations

import json
import math
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from scipy import stats
from typer.testing import CliRunner

from sharpscope.analysis import plots
from sharpscope.analysis.pairs import compare_runs
from sharpscope.analysis.plots.style import DARK_COLORS, color_of, plain, setting_text
from sharpscope.analysis.plots.token_figures import GRID
from sharpscope.analysis.tokens import held_by_largest
from sharpscope.cli import app
from sharpscope.errors import UserError
from sharpscope.traces import TraceWriter
from sharpscope.views import load_run, load_runs
from tests.analysis.conftest import write_report_run
from tests.traces.synthetic import new_run, rows

PAIR, EXAMPLE, LOG = "tests/data/pair", "data/example/sums", "tests/diagnose/logs.csv"


@pytest.fixture(scope="module")
def pair():
    return load_runs(PAIR)


def test_the_band_of_the_bound_holds_every_exact_norm(pair):
    axes, frame = plots.gradient_norm(pair)
    logits = frame[frame["over"] == "over the logits"]
    assert len(logits) > 3_000 and len(axes) == 2
    slack = 2e-6 + 1e-5 * logits["norm"]
    assert (logits["norm"] >= logits["low"] - slack).all()
    assert (logits["norm"] <= logits["high"] + slack).all()
    np.testing.assert_allclose(logits["low"], 1 - logits["probability"], atol=1e-12)
    np.testing.assert_allclose(logits["high"], math.sqrt(2) * logits["low"])
    drawn = np.concatenate([np.asarray(part.get_offsets()) for part in axes[0].collections[1:]])
    assert sorted(drawn[:, 1]) == pytest.approx(sorted(logits["norm"]))


def test_the_lorenz_curve_is_the_share_of_the_largest_tokens(pair):
    rng = np.random.default_rng(0)
    size = rng.lognormal(0, 2, 5_000)
    curve = held_by_largest(size, np.ones(5_000), GRID)
    slow = [np.sort(size)[::-1][: round(share * 5_000)].sum() / size.sum() for share in GRID]
    np.testing.assert_allclose(curve, slow, atol=0.02)
    exact = np.isclose(GRID, 0.01)
    assert curve[exact] == pytest.approx(np.sort(size)[-50:].sum() / size.sum())
    equal = held_by_largest(np.ones(400), np.ones(400), GRID)
    np.testing.assert_allclose(equal, GRID, atol=1e-12)
    counts = rng.integers(1, 5, 400)  # a member that stands for several is as many members
    repeated = np.repeat(size[:400], counts)
    np.testing.assert_allclose(
        held_by_largest(size[:400], counts, GRID),
        held_by_largest(repeated, np.ones(len(repeated)), GRID),
        atol=1e-12,
    )
    frame = plots.lorenz(pair).frame
    ends = frame.groupby(["run", "step"])["gradient"]
    assert len(ends) > 2 and (ends.last() == 1).all() and (ends.first() == 0).all()
    assert (ends.diff().dropna() >= -1e-12).all()


def test_binned_weights_are_medians_and_their_shares_sum_to_one(pair):
    frame = plots.weights(pair).frame
    parts = frame.groupby(["setting", "axis"])
    assert len(parts) == 4
    np.testing.assert_allclose(parts[["tokens", "gradient"]].sum(), 1.0)
    chosen = frame.query("setting == 'grpo-sg' and axis == 'logit'")
    run = next(run for run in pair if run.method == "grpo-sg")
    tokens = run.tokens(columns=["logit", "weight"]).astype(float)
    middle = chosen.loc[chosen["tokens"].idxmax()]
    edges = middle["x"] - middle["width"] / 2, middle["x"] + middle["width"] / 2
    inside = tokens[tokens["logit"].between(*edges, inclusive="left")]
    assert middle["weight"] == pytest.approx(inside["weight"].median(), abs=1e-6)
    assert middle["tokens"] == pytest.approx(len(inside) / len(tokens), abs=1e-3)


def test_trajectories_are_means_with_t_intervals_in_one_color_a_setting(study):
    axes, frame = plots.trajectories(load_runs_of(study))
    reward = frame[(frame["quantity"] == "reward") & (frame["setting"] == "grpo")]
    means = reward.groupby("step")["value"].mean()
    (axis,) = [one for one in axes if one.get_title(loc="left") == "reward"]
    line = next(one for one in axis.lines if one.get_label() == "grpo")
    np.testing.assert_allclose(line.get_ydata(), means)
    palette = {}
    for one in axes:
        for drawn in one.lines:
            if not drawn.get_label().startswith("_"):
                palette.setdefault(drawn.get_label(), set()).add(str(drawn.get_color()))
    assert len(palette) == 2 and all(len(found) == 1 for found in palette.values())
    (legend,) = axes[0].figure.legends
    shown = dict(zip([t.get_text() for t in legend.texts], legend.legend_handles, strict=True))
    assert {name: {str(h.get_color())} for name, h in shown.items()} == palette
    values = reward[reward["step"] == means.index[0]]["value"]
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    band = axis.collections[0].get_paths()[0].vertices
    first = band[band[:, 0] == means.index[0]][:, 1]
    assert (first.min(), first.max()) == pytest.approx((values.mean() - half, values.mean() + half))


def load_runs_of(study):
    from sharpscope.traces import Runs

    return Runs(".", dict(study.runs), {})


def test_the_forest_holds_every_paired_difference(study):
    runs = load_runs_of(study)
    axes, frame = plots.forest(runs, treatment="grpo-sg")
    wanted = compare_runs(study.runs)
    wanted = wanted[(wanted["treatment"] == "grpo-sg") & wanted["difference"].notna()]
    assert list(frame["quantity"]) == list(wanted["quantity"]) and len(frame) > 8
    for made, row in zip(frame.to_dict("records"), wanted.to_dict("records"), strict=True):
        scale = 100 if row["unit"] == "share" else 100 / abs(row["baseline_value"])
        assert made["difference"] == pytest.approx(scale * row["difference"])
        assert made["low"] == pytest.approx(scale * row["low"])
    filled = [
        line for axis in axes for line in axis.lines if line.get_label() == "interval without 0"
    ]
    count = sum(len(line.get_xdata()) for line in filled)
    assert count == int(((frame["low"] > 0) | (frame["high"] < 0)).sum())
    differences = plots.paired(runs, treatment="grpo-sg").frame
    rewards = {run: of.steps.set_index("step")["reward_mean"] for run, of in study.runs.items()}
    row = differences[differences["quantity"] == "reward"].iloc[3]
    names = {run.method: name for name, run in study.runs.items() if run.seed == row["seed"]}
    step = row["step"]
    by_hand = rewards[names["grpo-sg"]][step] - rewards[names["grpo"]][step]
    assert row["value"] == pytest.approx(by_hand)


def test_heat_maps_hold_sums_of_shares_and_norms_over_the_layers_median():
    run = load_run(EXAMPLE)
    frame = run.plot.token_steps().frame
    tokens = run.tokens(columns=["step", "text", "attribution"]).dropna()
    largest = frame.loc[frame["share"].abs().idxmax()]
    same = tokens[(tokens["step"] == largest["step"]) & (tokens["text"] == largest["token"])]
    assert largest["share"] == pytest.approx(same["attribution"].astype(float).sum())
    layers = run.plot.layer_steps().frame
    assert layers.groupby("layer")["times"].median().to_numpy() == pytest.approx(1.0)
    squares = layers.assign(square=layers["grad_norm"] ** 2).groupby("step")["square"].sum()
    largest = run.updates.groupby("step")["grad_norm"].max()
    np.testing.assert_array_less(largest.to_numpy() * 0.999, np.sqrt(squares.to_numpy()) * 1.001)


def test_a_density_is_drawn_with_its_band(tmp_path):
    place = {"quantity": "density", "functional": "nll", "probe_set": "a/train@1", "samples": 4}
    place |= {"parameters": "all", "prompts": 12, "seed": 0, "converged": None}
    with TraceWriter(new_run(tmp_path)) as writer:
        for node, value, error in ((-1.0, 0.1, 0.2), (0.0, 0.7, 0.1)):
            known = place | {"rho": node, "value": value, "std_error": error}
            writer.append("probes", rows("probes", 0, 1) | known)
    axes, frame = plots.spectrum(str(tmp_path))
    assert frame["eigenvalue"].tolist() == [-1, 0] and frame["density"].tolist() == [0.1, 0.7]
    half = 3.1824463 * 0.1  # Student's t of 3 degrees of freedom
    assert frame["low"].tolist() == pytest.approx([0.0, 0.7 - half])
    assert frame["high"].tolist() == pytest.approx([0.1 + 2 * half, 0.7 + half])
    assert list(axes[0].lines[0].get_xdata()) == [-1, 0] and len(axes[0].collections) == 1


def test_a_plane_is_drawn_from_its_table_with_the_path(tmp_path):
    at = np.linspace(-1, 1, 7)
    grid = pd.DataFrame([(x, y, x**2 + 3 * y**2) for x in at for y in at])
    grid = grid.set_axis(["first", "second", "loss"], axis=1).assign(kind="grid")
    path = pd.DataFrame({"first": [0.9, 0.4, 0.0], "second": [0.5, 0.1, 0.0], "kind": "path"})
    axes, frame = plots.plane(pd.concat([grid, path.assign(loss=0.0)], ignore_index=True))
    line, here = axes[0].lines
    assert list(line.get_xdata()) == [0.9, 0.4, 0.0] and list(here.get_xdata()) == [0]
    assert len(frame) == 52 and len(axes) == 2


def test_tables_of_a_probe_are_drawn_from_their_parquet_files_by_checkpoint(tmp_path):
    at = np.linspace(-1, 1, 5)
    rows = pd.DataFrame({"direction": "gradient", "distance": at, "std_error": 0.1})
    parts = [rows.assign(loss=k * at**2, checkpoint=f"step {k}") for k in (4, 8)]
    pd.concat(parts).to_parquet(tmp_path / "slices.parquet")
    (axis,) = plots.slices(str(tmp_path / "slices.parquet")).axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in axis.lines[:2]}
    assert drawn == {f"step {k}": pytest.approx(list(k * at**2)) for k in (4, 8)}
    band = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert band.max() == pytest.approx(4 + 0.196) and band.min() == pytest.approx(-0.196)


def test_effects_against_removal_name_their_rank_correlation(tmp_path):
    rng = np.random.default_rng(1)
    effect = rng.normal(size=40)
    frame = pd.DataFrame(
        {"outcome": "KL", "effect": effect, "removal": effect + rng.normal(size=40)}
    )
    axes, kept = plots.removal(frame)
    rank = stats.spearmanr(frame["effect"], frame["removal"]).statistic
    assert f"{rank:.2f}" in axes[0].get_title(loc="left") and kept is frame
    np.testing.assert_allclose(axes[0].collections[0].get_offsets()[:, 1], effect)


def test_the_removal_table_is_what_the_leaderboard_measured():
    lines = Path("experiments/attribution/math.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    axes, frame = plots.removal("experiments/attribution/removal_math.csv")
    tops = [
        (-100 * predicted, -100 * measured)
        for row in rows
        for _, score, predicted, measured in row["tops"]
        if score == "effect"
    ]
    assert len(tops) == 3 * len(rows) and len(axes) == 3
    np.testing.assert_allclose(frame[["effect", "removal"]], tops, atol=1e-4)


def test_rotations_have_one_row_a_method_and_the_map_every_policy():
    frame = pd.DataFrame({"method": ["a", "b"], "gradient_rotation": [3.0, 40.0]})
    frame = frame.assign(update_rotation=[2.0, 15.0], noise=20.0)
    (axis,) = plots.rotation(frame).axes
    drawn = {line.get_label(): list(line.get_xdata()) for line in axis.lines}
    assert drawn["gradient"] == [40.0, 3.0] and drawn["optimizer's step"] == [15.0, 2.0]
    assert [t.get_text() for t in axis.get_yticklabels()] == ["b", "a"]
    both = pd.concat([frame.assign(policy="p"), frame.assign(policy="q", gradient_rotation=1.0)])
    left, right, *_ = plots.rotation_map(both).axes
    values = [float(text.get_text()) for text in left.texts]
    assert values == [40.0, 1.0, 3.0, 1.0] and len(right.lines) == 3


def test_weight_functions_are_the_published_formula_with_the_runs_constants():
    left, right = plots.weight_functions("docs/data/weights.csv").axes
    drawn = {line.get_label(): (line.get_xdata(), line.get_ydata()) for line in left.lines}
    logit, weight = drawn["grpo-sg"]
    # of the run that `sharpscope rotate RUN --plot` read
    sigmoid = 1 / (1 + np.exp(-(logit - 8.425024541367424) / 3.075354731421594))
    expected = np.clip(2.0 * (sigmoid - 0.25), 1.0, 1.4)
    np.testing.assert_allclose(weight, expected, atol=1e-6)
    np.testing.assert_allclose(drawn["grpo-sg-reverse"][1], 2.4 - expected, atol=1e-6)
    (ar,) = right.lines
    np.testing.assert_allclose(ar.get_ydata(), 0.8 + 0.2 * ar.get_xdata(), atol=1e-6)


def test_a_log_marks_where_its_findings_begin(tmp_path):
    from sharpscope.diagnose import diagnose

    of_runs = pd.read_csv(LOG, dtype=str)
    one = of_runs[of_runs["run"] == "learning_rate"].drop(columns="run")
    one.dropna(axis=1, how="all").to_csv(tmp_path / "log.csv", index=False)
    axes, frame = plots.log(str(tmp_path / "log.csv"))
    found = diagnose(tmp_path / "log.csv").findings
    onsets = frame.dropna(subset=["onset"]).groupby("quantity")["onset"].first()
    assert set(onsets) <= {f.step for f in found} and found[0].step in set(onsets)
    marked = {int(line.get_xdata()[0]) for axis in axes for line in axis.lines[1:]}
    assert marked == set(map(int, onsets)) and len(axes) == frame["quantity"].nunique()


def test_every_figure_is_found_by_name_style_and_width(pair, tmp_path):
    run = pair[0]
    assert set(dir(run.plot)) == set(plots.PLOTS) and "steps" in dir(run) and "plot" in dir(run)
    with pytest.raises(AttributeError, match="did you mean 'lorenz'"):
        run.plot.lorens  # noqa: B018
    before = mpl.rcParams["axes.facecolor"]
    drawn = run.plot.lorenz(style="dark", width="one")
    assert drawn.figure.get_figwidth() == plots.WIDTHS["one"]
    assert mpl.colors.to_hex(drawn.axes[0].get_facecolor()) == "#14171a"
    assert mpl.rcParams["axes.facecolor"] == before and drawn._repr_png_()[:4] == b"\x89PNG"
    first, second = (run.plot.lorenz().save(tmp_path / name) for name in ("a.svg", "b.svg"))
    assert first[0].read_bytes() == second[0].read_bytes()
    np.testing.assert_allclose(pd.read_csv(first[1])["gradient"], drawn.frame["gradient"])
    again = plots.lorenz([first[1]])  # from the frame that it wrote
    np.testing.assert_allclose(again.frame["gradient"], drawn.frame["gradient"])
    for wrong in (lambda: plots.lorenz(run, style="drak"), lambda: plots.lorenz(run, width="3")):
        with pytest.raises(UserError, match=r"style drak.*dark|width 3"):
            wrong()
    with pytest.raises(UserError, match=r"no choice colum.*column"):
        plots.distribution(run, colum="weight")
    with pytest.raises(UserError, match="has no column"):
        plots.forest(pd.DataFrame({"a": [1]}))


def test_the_command_lists_draws_and_explains(tmp_path):
    runner = CliRunner()
    listed = runner.invoke(app, ["plot", "--list"]).output
    assert all(f"{name} " in listed for name in plots.PLOTS)
    assert max(map(len, listed.splitlines())) <= 80
    out = tmp_path / "d.pdf"
    result = runner.invoke(
        app, ["plot", EXAMPLE, "distribution", "--choose", "column=entropy", "--out", str(out)]
    )
    assert isinstance(result.exception, UserError) and "column entropy: unknown" in str(
        result.exception
    )
    chosen = ["--choose", "column=logit_grad_norm", "--out", str(out), "--width", "one"]
    result = runner.invoke(app, ["plot", EXAMPLE, "distribution", *chosen])
    assert result.exit_code == 0, result.output
    assert out.read_bytes()[:4] == b"%PDF" and out.with_suffix(".csv").exists()
    for arguments, said in (
        ([EXAMPLE, "lorens"], "did you mean 'lorenz'"),
        ([EXAMPLE], "give runs and a figure's name"),
        ([EXAMPLE, "plane"], "nothing to show"),
        ([EXAMPLE, "lorenz", "--out", "x.jpg"], "a figure is one of .png, .svg, .pdf"),
    ):
        result = runner.invoke(app, ["plot", *arguments])
        assert said in str(result.exception), result.exception


def test_hostile_labels_are_text_and_a_figure_has_no_markup(tmp_path):
    assert plain("_hidden") == "\u200b_hidden" and plain("a\x1b[31m\n") == "a�[31m⏎"
    assert plain("$x$") == r"\$x\$"
    long = "grpo (optimizer.lr=1e-4, rollout.group_size=4)"
    assert setting_text(long) == "grpo (lr=1e-4, group_size=4)"
    name = "$\\frac{ <script> \x1b_a"
    folder = new_run(tmp_path / "run", method=name)
    with TraceWriter(folder) as writer:
        for step in (1, 2, 3):
            writer.append("steps", rows("steps", step, 1) | {"grad_norm": 1.0 * step})
    drawn = load_run(folder).plot.trajectories()
    file, _ = drawn.save(tmp_path / "a.svg")
    assert b"<script>" not in file.read_bytes()


def test_the_palette_of_a_label_does_not_depend_on_its_panel_and_dark_colors_can_be_read():
    assert color_of(["b", "grpo"])["grpo"] == color_of(["grpo"])["grpo"]

    def luminance(color):
        parts = np.array(mpl.colors.to_rgb(color))
        linear = np.where(parts <= 0.03928, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    page = luminance("#14171a")
    assert len(DARK_COLORS) == 10
    assert all((luminance(color) + 0.05) / (page + 0.05) > 4.5 for color in DARK_COLORS)


def test_an_ablation_without_a_heldout_accuracy_says_what_it_needs(tmp_path):
    for method in ("grpo", "grpo-sg"):
        write_report_run(tmp_path / method, method)  # two methods, nothing evaluated
    with pytest.raises(UserError, match=r"ablation: nothing to show; it needs .*accuracy"):
        plots.ablation(load_runs(tmp_path))
    assert not [name for name, _ in plots.all_figures(load_runs(tmp_path)) if name == "ablation"]


def test_pairs_of_one_run_say_that_two_settings_are_needed(tmp_path):
    write_report_run(tmp_path / "alone", "grpo")
    with pytest.raises(UserError, match="paired: nothing to show; it needs Runs of two settings"):
        plots.paired(load_runs(tmp_path))

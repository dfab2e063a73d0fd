"""The reading commands on the example traces: what they print and write is what the traces hold."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import sharpscope
from sharpscope.analysis.spikes import explain_spikes, find_spikes
from sharpscope.cli import app
from sharpscope.cli.weight_curves import function_curves, observed, step_of
from sharpscope.errors import UserError
from sharpscope.objective import named_method
from sharpscope.traces.spike_rule import robust_z

EXAMPLE = Path(__file__).resolve().parents[2] / "data" / "example"
GRPO, GRPO_SG = str(EXAMPLE / "grpo-s0"), str(EXAMPLE / "grpo-sg-s0")


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "220"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


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


def test_tokens_are_cut_as_the_runs_own_tokenizer_cuts_them():
    """The shipped policies' words hold spaces; the class that transformers prefers for Qwen2 would print bytes."""
    assert "is a knave⏎" in invoke("tokens", GRPO_SG, "--step", "8", "--top", "20")


def test_prompts_are_shown_where_they_differ():
    from sharpscope.analysis.text import told_apart

    start = "An island of knights and knaves, where all are one or the other. "
    assert told_apart([start + "Ann says so.", start + "Amy says no."]) == ["… Ann says so.", "… Amy says no."]
    assert told_apart([start] * 2) == [start] * 2
    assert told_apart(["a" * 200, "b"]) == ["a" * 99 + "…", "b"]
    assert told_apart([]) == []


def test_spikes_names_tokens_prompts_and_probabilities():
    output = invoke("spikes", GRPO)
    assert "no spike at z = 4" in output and "probability ranges" in output
    run = sharpscope.load_run(GRPO)
    (spike,) = explain_spikes(run, largest=1)
    assert spike.probabilities["share"].sum() == pytest.approx(1.0, abs=1e-2)
    assert spike.probabilities["tokens"].sum() == pytest.approx(1.0)
    assert spike.step == run.steps.set_index("step").loc[[4, 8, 12], "grad_norm"].idxmax()


def test_a_planted_spike_is_found_by_the_rule():
    rng = np.random.default_rng(0)
    norms = np.exp(rng.normal(0, 0.1, 60))
    norms[40] = 10.0
    found = find_spikes(pd.DataFrame({"step": range(1, 61), "grad_norm": norms}))
    assert found["step"].tolist() == [41]
    logs = np.log(norms[:40])
    mad = 1.4826 * np.median(np.abs(logs - np.median(logs)))
    assert found["z"].iloc[0] == pytest.approx((math.log(10) - np.median(logs)) / mad)
    assert (
        math.isnan(robust_z([0.0] * 9, 1.0))
        and robust_z([0.0] * 10, 0.0) == 0.0
        and robust_z([0.0] * 10, 1.0) == math.inf
    )


def test_weights_on_the_tokens_of_a_run(tmp_path: Path):
    picture = tmp_path / "weights.png"
    output = invoke("weights", "grpo-sg", "tr-grpo", "--run", GRPO, "--out", str(picture))
    assert picture.stat().st_size > 10_000
    _, shares = observed([named_method("grpo-sg"), named_method("tr-grpo")], sharpscope.load_run(GRPO), 1)
    sg, tr = shares.to_dict("records")
    # calibrated: the 10th and 90th percentile over the gradient land on the bounds
    data = step_of(sharpscope.load_run(GRPO), 1)
    weight, mass = observed([named_method("grpo-sg")], sharpscope.load_run(GRPO), 1)[0]["weight"], data.mass[data.mask]
    for bound, at in ((1.0, "at L"), (1.4, "at U")):
        on = np.isclose(weight, bound, atol=1e-6)
        assert sg[at] == pytest.approx(on.mean())
        share = float(mass[on].sum() / mass.sum())
        assert sg[f"gradient {at}"] == pytest.approx(share)
        assert 0.1 <= share <= 0.1 + float(mass.max() / mass.sum())
    assert sg["bound [°]"] == pytest.approx(9.594, abs=1e-3) and "9.594" in output
    assert math.isnan(tr["bound [°]"])  # its weights act inside the clip
    assert math.isnan(sg["killed"]) and f"{tr['killed']:.3f}" in output
    # TR-GRPO: at ratio 1 a positive token with w > 1.2 has no gradient
    tokens, _ = observed([named_method("tr-grpo")], sharpscope.load_run(GRPO), 1)
    positive = (data.token_advantage[data.mask] > 0).numpy()
    assert tr["killed"] == pytest.approx((positive & (tokens["weight"].to_numpy() > 1.2)).mean())


def test_methods_print_the_largest_rotation_that_their_weights_allow():
    rows = {line.split("│")[1].strip(): line for line in invoke("methods").splitlines() if line.count("│") > 4}
    bounds = {
        name: rows[name].split("│")[4].strip() for name in ("grpo", "grpo-sg", "ar", "papo", "cov-grpo", "ar-lopti")
    }
    assert bounds == {"grpo": "", "grpo-sg": "9.6°", "ar": "6.4°", "papo": "30.0°", "cov-grpo": "", "ar-lopti": ""}
    assert "9.6°" in invoke("methods", "grpo-sg") and "largest rotation" not in invoke("methods", "gspo")


def test_weights_names_what_a_run_does_not_have(tmp_path: Path):
    out = ["--out", str(tmp_path / "weights.png")]
    reduced = EXAMPLE.parent / "reference" / "grpo-s0"
    with pytest.raises(UserError, match=r"is a reduced run .* give the full run"):
        invoke("weights", "--run", str(reduced), *out)
    shutil.copytree(GRPO, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "traces" / "rollouts")
    with pytest.raises(UserError, match=r"--step 4: .* but no rollouts"):
        invoke("shapings", "--run", str(tmp_path / "run"), "--step", "4", *out)
    assert not (tmp_path / "weights.png").exists()


def test_curves_are_the_published_function():
    curves = function_curves([named_method("grpo-sg"), named_method("ar"), named_method("grpo-sg-reverse")])
    sg = curves[curves["method"] == "grpo-sg"]
    assert set(sg["axis"]) == {"logit"}
    expected = (2 * (1 / (1 + np.exp(-sg["x"] / 9)) - 0.25)).clip(1.0, 1.4)
    np.testing.assert_allclose(sg["weight"], expected, rtol=1e-9)
    reverse = curves[curves["method"] == "grpo-sg-reverse"]
    np.testing.assert_allclose(reverse["weight"].to_numpy(), 2.4 - expected.to_numpy(), rtol=1e-9)
    ar = curves[(curves["method"] == "ar") & (curves["axis"] == "probability")]
    np.testing.assert_allclose(ar["weight"], 0.2 * ar["x"] + 0.8, rtol=1e-9)


def test_claims_and_figures_and_analyze_agree(tmp_path: Path):
    lines = [line for line in invoke("claims", str(EXAMPLE)).splitlines() if line.startswith("C")]
    assert [line.split()[0] for line in lines] == [f"C{i}" for i in range(1, 15)]
    output = invoke("analyze", str(EXAMPLE), "--out", str(tmp_path / "report"))
    assert f"{tmp_path / 'report'}/report.md" in output
    verdicts = json.loads((tmp_path / "report" / "claims.json").read_text())
    assert [(v["claim"], v["verdict"]) for v in verdicts] == [tuple(line.split()[:2]) for line in lines]
    invoke("figures", "--from", str(EXAMPLE), "--out", str(tmp_path / "figures"))
    pictures = {path.name for path in (tmp_path / "figures").rglob("*.*g")}
    assert pictures == {path.name for path in (tmp_path / "report").iterdir() if path.suffix in (".png", ".svg")}
    assert "C7" in invoke("claims", GRPO, "--claim", "C7", "--details")
    assert f"{tmp_path / 'claims'}/claims.md" in invoke("claims", str(EXAMPLE), "--out", str(tmp_path / "claims"))
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


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example run's first completions as a data file."""
    rows = sharpscope.load_run(GRPO).rollouts.head(4)
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    lines = [
        json.dumps(
            {
                "prompt": r.prompt[-150:],
                "completion": r.completion[:80],
                "reward": float(r.correct),
                "truncated": bool(r.truncated),
            }
        )
        for r in rows.itertuples()
    ]
    path.write_text("\n".join(lines))
    return path


QUICK = [
    part
    for value in (
        "preset=cheap",
        "max_products=12",
        "rhos=[0.05]",
        "kinds=[sam]",
        "density_samples=1",
        "density_steps=4",
        "trace_probes=2",
    )
    for part in ("--set", value)
]


def test_probe_measures_a_model_on_a_file(tiny_policy: Path, texts: Path, tmp_path: Path):
    out = tmp_path / "probe"
    place = ["--model", str(tiny_policy), "--data", str(texts), "--out", str(out), "--threads", "1"]
    output = invoke("probe", *place, *QUICK)
    frame = pd.read_parquet(out / "probes.parquet")
    assert {"largest", "sam"} <= set(frame["quantity"]) and (frame["functional"] == "nll").all()
    tokens = pd.read_parquet(out / "tokens.parquet")
    assert (
        (tokens["score_norm_local"] > 0).all() and (out / "rho_curves.png").exists() and (out / "spectrum.png").exists()
    )
    assert "sam" in output and "95 % (t, 1 d.f.)" in output
    with pytest.raises(UserError, match="not empty"):
        invoke("probe", "--model", str(tiny_policy), "--data", str(texts), "--out", str(out))


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--set", "functionals=[expected_failure]"], {"expected_failure"}),
        (["--set", "functionals=[surrogate]", "--functional", "expected_failure"], {"expected_failure"}),
    ],
)
def test_probe_measures_the_functionals_that_are_given(tiny_policy: Path, texts: Path, tmp_path: Path, options, wanted):
    place = ["--model", str(tiny_policy), "--data", str(texts), "--out", str(tmp_path / "probe"), "--threads", "1"]
    invoke("probe", *place, *QUICK, "--probes", "perturbation", *options)
    assert set(pd.read_parquet(tmp_path / "probe" / "probes.parquet")["functional"]) == wanted


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "x"], "needs --data"),
        ([], "give a run's folder"),
        (["--model", "x", "--data", "y", "--probes", "curvatur"], "did you mean 'curvature'"),
        (["--model", "x", "--data", "y", "--functional", "nlll"], "did you mean 'nll'"),
        (["--model", "x", "--data", "y", "--set", "rho=1"], "did you mean 'rhos'"),
        (["--model", "/no/such", "--data", "none.jsonl"], "no such file"),
        (["--model", "x", "--data", "y", "--set", "functionals=[]"], "names nothing"),
        ([GRPO, "--probes", "tokens"], "a run's token gradients are in its tokens table"),
        ([GRPO, "--probes", "curvature,tokens"], "leave tokens out"),
        ([GRPO], "has no checkpoint to probe"),  # without --probes tokens are not asked for
    ],
)
def test_a_mistake_with_probe_is_named(arguments, says, tmp_path: Path):
    with pytest.raises(UserError, match=says):
        invoke("probe", *arguments, "--out", str(tmp_path / "probe"))
    assert not (tmp_path / "probe").exists()


def test_probe_measures_a_runs_checkpoints(toy_config, tmp_path: Path):
    from sharpscope.training import train

    config = toy_config(
        checkpoint__every=1, checkpoint__keep_last=3, steps=2, probes__prompts=3, probes__heldout_prompts=3
    )
    train(config)
    out = tmp_path / "probe"
    sets = [*QUICK, "--set", "functionals=[expected_failure]", "--set", "samples=2"]
    invoke("probe", str(config.run_dir), "--all-checkpoints", "--probes", "perturbation", "--out", str(out), *sets)
    frame = pd.read_parquet(out / "probes.parquet")
    assert sorted(frame["step"].unique()) == [1, 2] and set(frame["functional"]) == {"expected_failure"}

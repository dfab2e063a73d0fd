"""`sharpscope probe`: models on a file, a run's checkpoints, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

import sharpscope
from sharpscope.errors import UserError
from tests.cli.invoking import GRPO, invoke


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
    loss = frame[frame["quantity"] == "loss"].iloc[0]
    assert loss["value"] == pytest.approx(-float(tokens["logp"].mean()), rel=1e-4)
    (line,) = [line.split() for line in output.splitlines() if line.split()[:1] == ["loss"]]
    assert line[2] == f"{loss['value']:.4g}" and loss["prompts"] == 1  # so it has no error over prompts
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

"""`sharpscope probe`: models on a file, a run's checkpoints, and mistakes."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pandas as pd
import pytest
import scipy.stats
import torch
from typer.testing import CliRunner

import sharpscope
from sharpscope.analysis.measures import critical_sentence, critical_text
from sharpscope.analysis.text import UNSURE, interval_text, value_text
from sharpscope.cli import app, probing
from sharpscope.errors import UserError
from sharpscope.policy import PolicySpec, load_policy
from sharpscope.surface import Estimate, Measured, compare, spectrum
from tests.cli.test_reading import GRPO, invoke


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example run's first completions as a data file."""
    rows = sharpscope.load_run(GRPO).rollouts.head(4)
    rows = rows.assign(prompt=rows["prompt"].str[-150:], completion=rows["completion"].str[:80])
    rows = rows.assign(
        reward=rows["correct"].astype(float), truncated=rows["truncated"].astype(bool)
    )
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    rows[["prompt", "completion", "reward", "truncated"]].to_json(
        path, orient="records", lines=True
    )
    return path


@pytest.fixture(scope="module")
def prompts(texts: Path) -> Path:
    """The same completions, each of a prompt of its own."""
    rows = pd.read_json(texts, lines=True)
    rows["prompt"] = [f"{n}. {prompt}" for n, prompt in enumerate(rows["prompt"])]
    path = texts.with_name("prompts.jsonl")
    rows.to_json(path, orient="records", lines=True)
    return path


SETTINGS = ("rho=0.05", "kinds=[sam]")
QUICK = [part for value in SETTINGS for part in ("--set", value)]


def test_probe_measures_models_on_a_file_side_by_side(
    tiny_policy: Path, texts: Path, tmp_path: Path
):
    out = tmp_path / "probe"
    one, two = str(tiny_policy), "embedded:knights_knaves"
    place = ["--model", one, "--data", str(texts), "--out", str(out)]
    output = invoke("probe", *place, *QUICK)
    frame = pd.read_parquet(out / "probes.parquet")
    assert {"largest", "sam"} <= set(frame["quantity"]) and (frame["functional"] == "nll").all()
    assert (
        output.index("sharpest direction")
        < output.index("quantity")
        < output.index(f"written to {out}/: ")
    )
    assert "SAM sharpness at radius 0.05" in output
    assert "probes.parquet" in output
    with pytest.raises(UserError, match="not empty"):
        invoke("probe", "--model", one, "--data", str(texts), "--out", str(out))
    both = ["--model", one, "--model", two, "--data", str(texts), "--out", str(tmp_path / "both")]
    asked = (
        "--set",
        "rho=auto",
        "--set",
        "functionals=[expected_failure]",
        "--set",
        "curvature_prompts=0",
        "--json",
    )
    result = CliRunner().invoke(app, ["probe", *both, *QUICK, *asked])
    frame = pd.read_parquet(tmp_path / "both" / "probes.parquet")
    printed = pd.DataFrame(json.loads(result.stdout)["rows"])
    for name in ("quantity", "value", "rho"):
        assert printed[name].isna().equals(frame[name].isna())
        assert list(printed[name].dropna()) == list(frame[name].dropna())
    rises = frame[frame["quantity"] == "sam"]
    assert list(rises["checkpoint"]) == [Path(one).name, two] and rises["rho"].nunique() == 1
    assert (frame["quantity"] == "radius").sum() == 1 and 0.05 <= rises["saturation"].iloc[0] <= 0.3


def test_a_probe_that_is_interrupted_leaves_what_it_found(
    tiny_policy: Path, texts: Path, tmp_path: Path, monkeypatch
):
    from sharpscope.surface import runner

    def interrupted(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "curvature", interrupted)
    out = tmp_path / "probe"
    with pytest.raises(KeyboardInterrupt):
        probing.probe(model=[str(tiny_policy)], data=texts, set_=list(SETTINGS), out=out)
    assert {"loss", "sam"} <= set(pd.read_parquet(out / "probes.parquet")["quantity"])


def row(quantity: str, value: float, **rest) -> dict:
    unknown = dict.fromkeys(("prompt_std_error", "std_error", "saturation", "residual"), math.nan)
    names = {
        "checkpoint": "m",
        "functional": "expected_failure",
        "probe_set": "t/train@x",
        "step": 4,
    }
    return (
        unknown
        | names
        | {"quantity": quantity, "value": value, "converged": True, "why": "", "rho": 0.1}
        | rest
    )


def test_the_sentences_say_what_the_numbers_mean():
    rows = [
        row("largest", 100.0, prompt_std_error=5.0, prompts=12, residual=0.1),
        row("sam", 0.2, prompt_std_error=0.01, saturation=0.5),
        row("asam", 0.05, saturation=0.125),
    ]
    found = probing.sentences(pd.DataFrame(rows))
    assert "eigenvalue 100.0 ± 9.8 over 12 prompts" in found[0]
    assert "SATURATED: 50%" in found[1] and "12.5% of the largest possible rise" in found[2]
    both = [*rows, *(other | {"checkpoint": "n", "value": 3 * other["value"]} for other in rows)]
    compared = probing.sentences(pd.DataFrame(both))  # the saturated SAM sharpness is not compared
    assert (
        compared[0]
        == "expected_failure, sharpest direction: n 300.0 ± 9.8, 3 times that of m 100.0 ± 9.8"
        != compared[1]
    )
    assert "could be 14 times longer" in critical_sentence(10.0, 140.0)
    assert "was 2 times too long" in critical_sentence(280.0, 140.0)


def test_a_value_whose_error_exceeds_it_is_not_printed():
    rows = [
        row("largest", 2144.0, prompt_std_error=4945.0, prompts=12, residual=0.1),
        row("sam", 0.21, prompt_std_error=0.11, saturation=0.2, prompts=12),
        row("asam", 0.33, prompt_std_error=0.1, saturation=0.125, prompts=12),
    ]
    found = probing.sentences(pd.DataFrame(rows))
    assert found[0].count(UNSURE) == found[1].count(UNSURE) == 1 and "± 0.20" in found[2]
    assert not any(number in " ".join(found) for number in ("2144", "0.21", "4945", "9691", "lr ="))
    both = [*rows, *(each | {"checkpoint": "n", "value": 6 * each["value"]} for each in rows)]
    compared = probing.sentences(pd.DataFrame(both))
    assert "n 1.26 ± 0.22; m not measured" in compared[0]  # apart, but 6 times of what?
    assert compared[1].endswith("not distinguishable")


def test_the_table_has_each_checkpoints_values_with_their_errors():
    """Random draws by Student's t, prompts by the normal distribution, both where both are known."""
    rows = [
        row("trace", 50.0, std_error=2.0, samples=4),
        row("largest", 100.0, prompt_std_error=5.0),
        row("average", 0.5, std_error=0.01, samples=8, prompt_std_error=0.02),
        row("sam", 0.2, prompt_std_error=0.3),
        row("gradient_norm", 1.5),
    ]
    table = probing._table(pd.DataFrame(rows)).set_index("quantity")["m"]
    assert table["trace"] == interval_text(50.0, 2 * scipy.stats.t.ppf(0.975, 3))
    assert table["largest"] == "100.0 ± 9.8" and table["gradient_norm"] == "1.5"
    half = math.hypot(1.96 * 0.02, 0.01 * scipy.stats.t.ppf(0.975, 7))
    assert table["average"] == interval_text(0.5, half) and table["sam"] == "error > value"


def test_the_newest_critical_sharpness_is_judged_without_an_error_of_its_own_prompts():
    columns = {
        "step": [1, 1, 2, 2, 3, 3],
        "quantity": ["critical_sharpness", "critical_threshold"] * 3,
    }
    columns |= {"value": [50.0, 140.0, 70.0, 140.0, 60.0, 140.0]}
    columns |= {"converged": [True, None, True, None, False, None]}
    frame = pd.DataFrame(
        columns | {"prompt_std_error": [1.0, math.nan, 10.0, math.nan, 1.0, math.nan]}
    )
    assert critical_text(frame).startswith("step 2, critical sharpness 70, threshold")


def test_probe_says_which_models_it_cannot_tell_apart(
    tiny_policy: Path, texts: Path, prompts: Path, tmp_path: Path
):
    """A copy is as sharp as its original."""
    shutil.copytree(tiny_policy, tmp_path / "again")
    copies = ["--model", str(tiny_policy), "--model", str(tmp_path / "again")]
    out = tmp_path / "probe"
    few = ("--set", "curvature_prompts=0", "--data", str(prompts), "--out", str(out))
    output = invoke("probe", *copies, *QUICK, *few)
    frame = pd.read_parquet(out / "probes.parquet").set_index("quantity").loc["sam"]
    assert len(frame) == 2 and frame["value"].nunique() == 1 and set(frame["prompts"]) == {4}
    (line,) = (line for line in output.splitlines() if line.startswith("nll, SAM sharpness"))
    assert line.startswith("nll, SAM sharpness: again ") and line.endswith("not distinguishable")
    half = interval_text(frame["value"].iloc[0], 1.96 * frame["prompt_std_error"].iloc[0])
    assert line.count(half) == 2
    one = ["--data", str(texts), "--out", str(tmp_path / "one"), "--set", "curvature_prompts=0"]
    assert "not compared without an error" in invoke("probe", *copies, *QUICK, *one)


def test_prompts_are_read_as_in_the_training(tiny_policy: Path, prompts: Path, tmp_path: Path):
    """With a chat template the loss is that of the prompts in it, or of the plain ones."""
    chat = tmp_path / "chat"
    shutil.copytree(tiny_policy, chat)
    text = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    (chat / "chat_template.jinja").write_text(text)
    losses = {}
    for model, given in ((tiny_policy, "auto"), (chat, "auto"), (chat, "plain"), (chat, "chat")):
        out = tmp_path / f"{model.name}-{given}"
        place = ["--model", str(model), "--data", str(prompts), "--out", str(out)]
        few = ("--set", "curvature_prompts=0", "--prompt-format", given)
        invoke("probe", *place, *QUICK, *few)
        frame = pd.read_parquet(out / "probes.parquet").set_index("quantity")
        losses[model, given] = frame.loc["loss", "value"]
    assert losses[chat, "plain"] == losses[tiny_policy, "auto"]
    assert losses[chat, "auto"] == losses[chat, "chat"] != losses[chat, "plain"]
    with pytest.raises(UserError, match="prompt_format"):
        invoke("probe", *place[:4], *few[:2], "--prompt-format", "plane")


def test_probe_does_not_compare_across_numbers_of_prompts(tmp_path: Path, capsys):
    def measured(prompts: int) -> Measured:
        return Measured(
            [
                Estimate(
                    "perturbation",
                    "sam",
                    prompts / 100,
                    rho=0.1,
                    functional="nll",
                    prompts=prompts,
                    prompt_std_error=0.01,
                )
            ]
        )

    found = iter((name, 0, measured(prompts)) for name, prompts in (("a", 24), ("b", 200)))
    probing._report(found, tmp_path / "probe", json=True)
    said = json.loads(capsys.readouterr().out)["sentences"]
    assert said[0] == "nll, SAM sharpness: not compared, on 200 and 24 prompts"
    assert not any("times that of" in line for line in said)


def test_compare_measures_what_was_changed(tiny_policy: Path, prompts: Path, tmp_path: Path):
    """The last layer's weights times 1.5: its row of the weights, the norm said, and no other layer."""
    tuned, out = tmp_path / "tuned", tmp_path / "compare"
    shutil.copytree(tiny_policy, tuned)
    policy = load_policy(PolicySpec(model=str(tiny_policy)))
    weight = next(
        p for name, p in policy.model.named_parameters() if name.endswith("1.mlp.down_proj.weight")
    )
    norm = 0.5 * float(weight.detach().norm())
    with torch.no_grad():
        weight *= 1.5
    policy.model.save_pretrained(tuned)
    given = [str(tiny_policy), str(tuned), "--data", str(prompts), "--out", str(out), "--json"]
    result = CliRunner().invoke(app, ["compare", *given])
    said = json.loads(result.stdout)["sentences"]
    assert "sharpness and curvature take at most about" in result.stderr
    weights = pd.read_parquet(out / "weights.parquet").set_index("name")["norm"]
    changed = weights[weights > 0]
    assert list(changed.index) == [name for name in weights.index if "1.mlp.down_proj" in name]
    assert changed.iloc[0] == pytest.approx(norm, rel=1e-5)
    assert any(f"the change has the norm {norm:.3g}," in line for line in said)
    probes = pd.read_parquet(out / "probes.parquet")
    loss = probes[probes["quantity"] == "loss"].set_index("checkpoint").loc[tiny_policy.name]
    text = value_text(loss["value"], 1.96 * loss["prompt_std_error"])
    tokens = pd.read_parquet(out / "tokens.parquet")
    assert (tokens["logp_tuned"] - tokens["logp_base"]).abs().max() > 1e-4
    assert any(line.startswith(f"nll: {tiny_policy.name} {text}, tuned") for line in said)
    assert any("accuracy and the swap test: not measured" in line for line in said)


def test_compare_refuses_what_it_cannot_compare(
    tiny_policy: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = ("--out", str(tmp_path / "compare"))
    for data, tuned, says in (
        (tmp_path / "none.jsonl", str(tiny_policy), "no such file"),
        (texts, str(tiny_policy), "have the same weights"),
        (texts, "embedded:math", "two checkpoints of one architecture"),
    ):
        with pytest.raises(UserError, match=says):
            invoke("compare", str(tiny_policy), tuned, "--data", str(data), *out)

    def none_free(needed: float, device: object, what: str, advice: str) -> None:
        raise UserError(f"memory: {what}")

    monkeypatch.setattr(spectrum, "require_memory", none_free)
    monkeypatch.setattr(compare, "token_changes", None)  # not called
    with pytest.raises(UserError, match="memory: curvature of"):
        invoke("compare", *[str(tiny_policy)] * 2, "--data", str(texts), *out)
    assert not (tmp_path / "compare").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "x"], "needs --data"),
        ([], "give a run's folder"),
        (["--model", "x", "--data", "y", "--set", "rhos=1"], "did you mean 'rho'"),
        (["--model", "x", "--data", "y", "--backend", "pyhesian"], "did you mean 'pyhessian'"),
        (["--model", "x", "--data", "y", "--force"], "go with --rollouts"),
        (["--model", "x", "--data", "y", "--temperature", "0"], "go with --rollouts"),
        (
            ["--model", "x", "--rollouts", "y", "--temperature", "0"],
            "--temperature 0: must be above 0",
        ),
        (["--model", "/no/such", "--data", "none.jsonl"], "no such file"),
        (["--model", "x", "--data", "y", "--set", "functionals=[]"], "names nothing"),
        ([GRPO], "has no checkpoint to probe"),
        ([GRPO, "--prompt-format", "plain"], "a run has its own"),
    ],
)
def test_a_mistake_with_probe_is_named(arguments, says, tmp_path: Path):
    with pytest.raises(UserError, match=says):
        invoke("probe", *arguments, "--out", str(tmp_path / "probe"))
    assert not (tmp_path / "probe").exists()


def test_probe_measures_a_runs_checkpoints(toy_config, tmp_path: Path):
    from sharpscope.training import train

    config = toy_config(
        checkpoint__every=1,
        checkpoint__keep_last=3,
        steps=2,
        probes__prompts=3,
        probes__heldout_prompts=3,
    )
    train(config)
    out = tmp_path / "probe"
    sets = [*QUICK, "--set", "functionals=[expected_failure]", "--set", "samples=2"]
    invoke(
        "probe",
        str(config.run_dir),
        "--all-checkpoints",
        "--set",
        "curvature_prompts=0",
        "--out",
        str(out),
        *sets,
    )
    frame = pd.read_parquet(out / "probes.parquet")
    assert sorted(frame["step"].unique()) == [1, 2] and set(frame["functional"]) == {
        "expected_failure"
    }

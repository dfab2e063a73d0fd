"""The first screen: each number is that of a plain loop over the tables, and what was not recorded is said."""

from __future__ import annotations

import io
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from sharpscope.analysis import overview as module
from sharpscope.analysis import show, watch
from sharpscope.analysis.overview import Measure, Z, interval_text, overview, pair_difference, verdict_line
from sharpscope.analysis.report import sampler_part
from sharpscope.analysis.spikes import explain_spikes
from sharpscope.analysis.statistics import Interval
from sharpscope.analysis.study import Study
from sharpscope.traces import TraceWriter, create_run_dir, create_run_info, load_run, load_runs, update_run_info
from tests.analysis.html.runs import SPIKE, WORDS, ids_of, write_report_run
from tests.cli.invoking import invoke
from tests.traces.rows import INFO, rows

STEPS, PROMPTS = 6, 5
ROTATION = {1: 10.0, 3: 20.0, 6: 33.0}


def _values(method: str, step: int) -> np.ndarray:
    """SAM sharpness of each prompt: falls by 0.1 a step with grpo-sg, with noise that both methods share."""
    base = np.random.default_rng(step).normal(1.0, 0.3, PROMPTS)
    return base - (0.1 * step if method == "grpo-sg" else 0.0)


def _write(path: Path, method: str, seed: int = 0, recorded: bool = True, verl: bool = False) -> Path:
    folder = create_run_dir(path)
    config = {"seed": seed, "steps": STEPS, "method": {"name": method}, "optimizer": {"lr": 1e-4}}
    config |= {} if verl else {"recording": {}, "probes": {}}
    trainer = {"trainer": {"name": "verl"}} if verl else {}
    create_run_info(folder, INFO | {"method": method, "seed": seed, "config": config} | trainer)
    blank = {"parameters": "all", "rho": 0.5, "seed": 0, "functional": "nll", "probe_set": "set/train@1"}
    with TraceWriter(folder) as writer:
        for step in range(STEPS + 1):
            if step:
                turned = ROTATION.get(step) if recorded else None
                angles = {
                    "gradient_rotation": turned,
                    "update_rotation": turned and 2 * turned,
                    "noise_rotation": turned and 45.0,
                }
                writer.append("steps", rows("steps", step, 1, seed) | {"reward_mean": 0.1 * step + seed} | angles)
            if recorded and step in (0, STEPS):
                values = _values(method, step)
                error = values.std(ddof=1) / math.sqrt(PROMPTS)
                writer.append(
                    "probe_prompts",
                    blank | {"step": step, "quantity": "sam", "prompt": np.arange(PROMPTS), "value": values},
                )
                for rho in (0.1, 0.5, 0.9):  # the middle radius is shown
                    row = rows("probes", step, 1) | blank | {"quantity": "sam", "converged": None, "rho": rho}
                    writer.append(
                        "probes", row | {"value": values.mean() if rho == 0.5 else -1.0, "prompt_std_error": error}
                    )
            if recorded and step in (1, STEPS):  # of an update, on prompts of its own
                row = rows("probes", step, 1) | blank | {"quantity": "critical_sharpness", "converged": True}
                place = {"probe_set": "", "functional": "surrogate", "rho": None, "seed": None}
                writer.append("probes", row | place | {"value": 100.0 * step, "prompt_std_error": 10.0})
            if step in (1, STEPS):
                row = {
                    "step": step,
                    "task": INFO["task"],
                    "split": "heldout",
                    "n": 40,
                    "k": 1,
                    "std_error": 0.07,
                    "pass_at_k": 0.5,
                    "reward_mean": 0.0,
                    "heldout_loss": None,
                    "temperature": 1.0,
                }
                for level, accuracy in (("2", 0.2), ("3", 0.4)):
                    writer.append("eval", row | {"level": level, "accuracy": accuracy + 0.05 * step})
    update_run_info(folder, status="finished", steps_done=STEPS)
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("pair")
    for method in ("grpo", "grpo-sg"):
        _write(root / method, method)
    return overview(Study(load_runs(root).by_name))


def _rows(part) -> dict[tuple[str, str], tuple[str, ...]]:
    found, name = {}, ""
    for row in part.grid.rows:
        name = row[0] or name  # stands in the first row of its quantity only
        found[name, row[1]] = row[2:]
    return found


def test_rotation_is_the_mean_over_recorded_steps(pair):
    cells = dict(zip(pair.rotation.grid.columns, pair.rotation.grid.rows[1], strict=True))
    assert cells == {"setting": "grpo-sg", "gradient [°]": "21.0", "optimizer's step [°]": "42.0", "noise [°]": "45.0"}
    assert "grpo-sg turns the optimizer's step by 42.0° from the reference objective's" in pair.finding


def test_sharpness_is_paired_by_prompt(pair):
    found = _rows(pair.sharpness)
    for method in ("grpo", "grpo-sg"):
        first, last = _values(method, 0), _values(method, STEPS)
        change = [b - a for a, b in zip(first, last, strict=True)]
        error = math.sqrt(sum((c - sum(change) / PROMPTS) ** 2 for c in change) / (PROMPTS - 1) / PROMPTS)
        wanted = [
            interval_text(first.mean(), Z * first.std(ddof=1) / math.sqrt(PROMPTS)),
            interval_text(last.mean(), Z * last.std(ddof=1) / math.sqrt(PROMPTS)),
            interval_text(sum(change) / PROMPTS, Z * error),
        ]
        assert list(found["SAM sharpness", method]) == wanted
    # All prompts differ by the same amount, so the difference has no error although the means have.
    assert found["SAM sharpness", "grpo-sg − grpo, 1 pair"][1].startswith("-0.6")


def test_the_prompts_of_updates_are_independent(pair):
    start, end, change = _rows(pair.sharpness)["critical sharpness", "grpo"]
    assert (start, end) == (interval_text(100.0, Z * 10), interval_text(100.0 * STEPS, Z * 10))
    assert change == interval_text(100.0 * (STEPS - 1), Z * math.hypot(10, 10))


def test_the_finding_tells_clear_differences_from_unclear_ones(pair):
    clear, unclear = pair.finding.split("grpo-sg − grpo: no other difference")
    assert "larger than their 95 % interval: SAM sharpness (-0.6" in clear
    assert "held-out accuracy, T = 1 (0.00" in unclear and "One seed each" in unclear


def test_results_are_pooled_over_levels(pair):
    found = _rows(pair.result)
    start, end, change = found["held-out accuracy, T = 1", "grpo"]
    assert start.startswith("0.35 ±") and end.startswith("0.60 ±") and change.startswith("0.25 ±")
    assert [cell.split(" ± ")[0] for cell in found["reward", "grpo"]] == ["0.15", "0.55", "0.4"]


def test_several_seeds_have_intervals_over_seeds(tmp_path: Path):
    for seed in range(3):
        for method in ("grpo", "grpo-sg"):
            _write(tmp_path / f"{method}-s{seed}", method, seed)
    screen = overview(Study(load_runs(tmp_path).by_name))
    rewards = np.array([0.55 + seed for seed in range(3)])
    half = 4.30265272975 * rewards.std(ddof=1) / math.sqrt(3)  # t, two degrees of freedom
    assert _rows(screen.result)["reward", "grpo"][1] == interval_text(rewards.mean(), half)
    assert ("reward", "grpo-sg − grpo, 3 pairs") in _rows(screen.result) and "over seeds" in screen.result.grid.note
    assert "One seed" not in screen.finding


@pytest.mark.parametrize("sign", [1, -1])
def test_a_difference_is_clear_if_and_only_if_its_interval_leaves_out_zero(tmp_path: Path, monkeypatch, sign: int):
    for seed in range(2):
        for method in ("grpo", "grpo-sg"):
            _write(tmp_path / f"{method}-{seed}", method, seed, recorded=False)
    study = Study(load_runs(tmp_path).by_name)
    measure = Measure("x", lambda run: None, lambda a, b: (float(sign), math.nan))
    for near, clear in ((0.1, True), (-0.1, False)):  # the other arm, of length 2, must not count
        low, high = sorted((sign * near, 3.0 * sign))
        monkeypatch.setattr(module, "contrast_interval", lambda _, ends=(low, high): Interval(*ends, "sign-flip", 0.95))
        _, (mean, arm), pairs = pair_difference(study, measure)
        assert (mean, pairs) == (sign, 2) and arm == pytest.approx(1 - near) and (abs(mean) > arm) == clear


def test_what_was_not_recorded_is_said_in_one_line(tmp_path: Path):
    screen = overview(Study({"a": load_run(_write(tmp_path / "a", "grpo-sg", recorded=False))}))
    assert screen.rotation.grid is None and screen.rotation.text == "not recorded (recording.rotation_every)"
    assert screen.sharpness.grid is None and screen.sharpness.text == "not recorded (probes.preset)"
    assert screen.moved == ()
    assert screen.moved_text == "No token's share of the gradient was recorded (recording.token_gradients_every)."
    assert screen.finding.startswith("Reward went from 0.15 to 0.55. Held-out accuracy")


def test_of_a_verl_trace_what_records_it_there_is_named(tmp_path: Path):
    run = load_run(_write(tmp_path / "a", "grpo", recorded=False, verl=True))
    screen = overview(Study({"a": run}))
    probe = "(sharpscope probe --tokens RUN --model CHECKPOINT)"
    assert screen.moved_text == f"No token's share of the gradient was recorded {probe}."
    assert screen.rotation.text == "not recorded"
    assert screen.sharpness.text == "not recorded (SHARPSCOPE_VERL_CRITICAL_EVERY)"
    run.steps = pd.DataFrame({"step": range(1, 21), "grad_norm": [1.0, 1.1] * 9 + [1.0, 9.0]})
    spike = explain_spikes(run)[-1]
    assert spike.step == 20 and spike.tokens is None
    assert spike.missing == f"no attribution was recorded at this step {probe}"


@pytest.mark.parametrize("share", [0.21, -0.06])
def test_a_share_below_zero_is_not_said_to_be_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float):
    spot = module.Spot(share, 0.05, 0, 0, "", "word", "")
    moved = module.Moved("a", 3, "", (spot,), ())
    monkeypatch.setattr(module, "_moved", lambda *_: (moved,))
    finding = overview(Study({"a": load_run(_write(tmp_path / "a", "grpo", recorded=False))})).finding
    where = "of the squared gradient norm of a at step 3"
    said = {
        0.21: f"holds 21% {where}.",
        -0.06: f"points against the gradient of the others: its share {where} is -6%.",
    }
    assert finding.startswith(f"One token, “word” (π = 0.05), {said[share]}")


def test_the_largest_tokens_stand_in_their_sentences(tmp_path: Path):
    run = load_run(write_report_run(tmp_path / "a"))
    (moved,) = overview(Study({"a": run})).moved
    tokens = run.tokens(steps=[SPIKE])
    largest = tokens.loc[tokens["attribution"].abs().idxmax()]
    spot = moved.spots[0]
    assert moved.step == SPIKE and (spot.rollout, spot.position) == (largest["rollout"], largest["position"])
    ids = ids_of(SPIKE, spot.rollout)
    assert spot.token == WORDS[ids[spot.position]][:80] and spot.share == pytest.approx(largest["attribution"])
    shares = (
        tokens.merge(run.rollouts[run.rollouts["step"] == SPIKE], on="rollout").groupby("group")["attribution"].sum()
    )
    assert sorted(share for share, _ in moved.prompts) == pytest.approx(sorted(shares))


def test_without_rewards_the_loss_is_the_result(tmp_path: Path):
    folder = create_run_dir(tmp_path / "a")
    create_run_info(folder, INFO | {"method": "sft"})
    losses = [3.0, 2.0, 2.5, 1.5, 1.0, 0.5]
    with TraceWriter(folder) as writer:
        for step, loss in enumerate(losses, 1):
            writer.append("steps", rows("steps", step, 1) | {"reward_mean": None, "loss": loss})
    screen = overview(Study({"a": load_run(folder)}))
    assert _rows(screen.result) == {("training loss", "sft"): ("2.5", "0.75", "-1.75")}


def test_no_step_no_screen(tmp_path: Path):
    create_run_info(create_run_dir(tmp_path / "a"), INFO)
    assert overview(Study({"a": load_run(tmp_path / "a")})) is None


def test_one_line_of_verdicts():
    class Verdict:
        def __init__(self, claim: str, verdict: str) -> None:
            self.claim, self.verdict = claim, verdict

    verdicts = [
        Verdict("C1", "supported"),
        Verdict("C2", "untestable"),
        Verdict("C3", "supported"),
        Verdict("C4", "refuted"),
    ]
    assert verdict_line(verdicts, "runs") == (
        "3 of 4 claims can be judged (supported: C1, C3; refuted: C4); the others need more seeds or settings: see `sharpscope power runs`."
    )
    assert verdict_line(verdicts[:1]) == "1 of 1 claims can be judged (supported: C1)."
    assert verdict_line([]) == ""


def test_only_samplers_that_differ_have_a_row(tmp_path: Path):
    def write(name: str, gap: float) -> None:
        folder = write_report_run(tmp_path / name, tokens=False, steps=1)
        logp = np.full(8, -1.0, dtype=np.float32)
        with TraceWriter(folder) as writer:
            writer.append(
                "tokens",
                rows("tokens", 1, 8)
                | {"rollout": 0, "position": np.arange(8), "logp": logp, "behavior_logp": logp - np.float32(gap)},
            )

    write("a", 0.0)
    assert "agree in the 1 run: no ratio is outside" in sampler_part(load_runs(tmp_path))
    write("b", 0.2)
    grid = sampler_part(load_runs(tmp_path))
    (row,) = grid.rows
    assert (
        row[:3] == ("b", "8", "100.00%")
        and float(row[3]) == pytest.approx(-0.2, rel=1e-2)
        and "other 1 of 2 runs" in grid.note
    )


def test_show_draws_rotation_and_sharpness_after_the_gradient(tmp_path: Path):
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(show(load_run(_write(tmp_path / "a", "grpo-sg"))))
    text = console.export_text()
    names = [
        "reward ",
        "gradient norm",
        "gradient turned by",
        "update turned by",
        "SAM sharpness",
        "How far the method",
        "Result",
    ]
    places = [text.index(name) for name in names]
    assert places == sorted(places)
    line = next(line for line in text.splitlines() if line.startswith("update turned by"))
    assert line.split()[4:] == ["20", "▁▄█", "66"]  # of the three steps that have it


def test_watch_shows_a_run_in_the_same_order(tmp_path: Path):
    folder = _write(tmp_path / "a", "grpo-sg")
    texts = []
    for view in (
        lambda console: console.print(show(load_run(folder))),
        lambda console: watch(folder, console, once=True),
    ):
        console = Console(width=140, record=True, file=io.StringIO())
        view(console)
        texts.append(console.export_text())
    assert texts[0] == texts[1]


def test_the_demo_closes_with_what_it_found(tmp_path: Path, monkeypatch):
    """Its last line has the numbers of the runs: here 42° on average, and SAM sharpness that differs by 0.1 a step."""
    made = []

    def train(config, display):
        made.append((config.method.name, config.steps))
        folder = _write(Path(config.run_dir), config.method.name)
        return SimpleNamespace(status="finished", run_dir=folder)

    def analyze(paths, out, on_progress):
        content = SimpleNamespace(overview=overview(Study(load_runs(*paths).by_name)))
        return SimpleNamespace(content=content, html=out / "report.html")

    monkeypatch.setattr("sharpscope.training.train", train)
    monkeypatch.setattr("sharpscope.analysis.analyze", analyze)
    lines = invoke("demo", "--out", str(tmp_path / "demo"), "--steps", str(STEPS)).splitlines()
    assert made == [("grpo", STEPS), ("grpo-sg", STEPS)]
    assert lines[-1].startswith("found:  ") and "by 42.0° from the reference objective's" in lines[-1]
    assert f"SAM sharpness (-{0.1 * STEPS:.1f}" in lines[-1] and "One seed each" in lines[-1]


@pytest.mark.parametrize(
    ("value", "half", "text"),
    [
        (0.043_21, 0.001_23, "0.0432 ± 0.0012"),
        (1234.5, 67.0, "1234 ± 67"),
        (0.5, math.nan, "0.5"),
        (math.nan, 1.0, "–"),
        (2.0, 0.0, "2"),
        (1386.4, math.nan, "1,386"),
    ],
)
def test_as_many_digits_as_the_interval_needs(value: float, half: float, text: str):
    assert interval_text(value, half) == text

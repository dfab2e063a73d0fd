"""Forks: exact restoration, the run's own steps, equal arms, and what a repeated or a wrong call does."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import sharpscope
from sharpscope.analysis import analyze
from sharpscope.analysis import forks as fork_analysis
from sharpscope.cli import forking, main
from sharpscope.config import ForkSpec, build_config
from sharpscope.distributed import Launch
from sharpscope.errors import UserError
from sharpscope.forks import experiment
from sharpscope.forks import start as start_module
from sharpscope.forks.experiment import FixedRollouts, Measure, matching_scale
from sharpscope.forks.start import Snapshot, Start
from sharpscope.methods.named import parse_method
from sharpscope.policy import Rollouts, render_prompts
from sharpscope.policy.forward import Scorer
from sharpscope.traces import RunLock
from sharpscope.training.checkpoint import OPTIMIZER, checkpoint_dir
from tests.conftest import TOY
from tests.forks.conftest import SMALL, arm_method, rows_of, start_of
from tests.loops import some
from tests.models import tiny_model


def call(arguments, code=0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == code


def state_of(start: Start) -> list[torch.Tensor]:
    """Everything that a snapshot must restore, as tensors."""
    found = [*start.policy.model.state_dict().values()]
    for parameter in start.snapshot.parameters:
        found += [
            torch.as_tensor(value) for value in start.optimizer.state.get(parameter, {}).values()
        ]
    return copy.deepcopy(found)


def moved(start: Start) -> list[torch.Tensor]:
    """The change of the weights by an update."""
    start.update("own", 0)
    return start.snapshot.displacement()


def equal(one, two) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("step", [0, 3])
def test_restoring_is_bitwise(trained, step):
    start = start_of(trained, step)
    before, lr = state_of(start), [group["lr"] for group in start.optimizer.param_groups]
    expected = torch.rand(3)
    start.update("own", 0)
    start.policy.model.train()
    assert not equal(state_of(start), before)
    start.snapshot.restore()
    assert equal(state_of(start), before)
    assert [group["lr"] for group in start.optimizer.param_groups] == lr
    assert not start.policy.model.training and all(
        p.grad is None for p in start.policy.model.parameters()
    )
    assert torch.equal(torch.rand(3), expected)


def test_an_optimizer_without_a_state_is_warmed_up_at_the_same_weights(trained):
    """AdamW's moments after two steps at a learning rate of 0 are the averages of their gradients; the weights do not move."""
    cold, warm = (start_of(trained, warm_up=steps) for steps in (0, 2))
    assert (cold.warmed, warm.warmed) == (0, 2) and not cold.optimizer.state
    for one, other in zip(
        cold.policy.model.parameters(), warm.policy.model.parameters(), strict=True
    ):
        assert torch.equal(one, other)
    steps = {int(state["step"]) for state in warm.optimizer.state.values()}
    assert steps == {2 * trained.update.mini_batches}
    assert all(float(state["exp_avg_sq"].sum()) > 0 for state in warm.optimizer.state.values())
    assert {group["lr"] for group in warm.optimizer.param_groups} == {cold.lr}
    first = [torch.cat([p.flatten() for p in moved(one)]) for one in (cold, warm)]
    assert torch.nn.functional.cosine_similarity(*first, dim=0) < 0.999
    assert start_of(trained, 3).warmed == 0  # stored


def test_weights_are_calibrated_on_the_first_batch_with_a_gradient(trained, monkeypatch):
    arm = arm_method("grpo-sg+weight.preset=calibrated+weight.percentiles=gradient", trained)
    draw = Start.rollouts

    def second(start, method, batch, *args, **options):
        return draw(start, method, 1, *args, **options)

    def idle(start, method, batch, *args, **options):
        found = draw(start, method, batch, *args, **options)
        return replace(found, advantage=torch.zeros_like(found.advantage)) if batch == 0 else found

    def never(start, method, batch, *args, **options):
        return idle(start, method, 0, *args, **options)

    weights = []
    for patched in (second, idle, never):
        monkeypatch.setattr(Start, "rollouts", patched)
        weights.append(start_of(trained, sg=arm).methods["sg"].weight)
    assert (
        weights[0].kind == "sigmoid" and weights[1] == weights[0] and weights[2].kind == "uniform"
    )


def test_adapters_are_forked_and_nothing_else_moves(tiny_policy, tmp_path):
    pytest.importorskip("peft")
    config = build_config(
        values={
            **TOY,
            "policy.model": str(tiny_policy),
            "policy.lora": {"r": 2, "alpha": 4},
            "method.kl.coef": 0.01,
        }
    )
    start = start_of(config)
    before = state_of(start)
    frozen = [p.clone() for p in start.policy.model.parameters() if not p.requires_grad]
    change = moved(start)
    assert any(part.abs().max() > 0 for part in change)
    assert len(change) == sum(p.requires_grad for p in start.policy.model.parameters())
    assert equal(frozen, [p for p in start.policy.model.parameters() if not p.requires_grad])
    value = {(r["comparison"], r["outcome"]): r["value"] for r in rows_of(start)}
    assert value["step", "update_norm"] > 0 and value["kl", "kl"] > 0
    start.snapshot.restore()
    assert equal(state_of(start), before)


@pytest.mark.parametrize(("step", "updates"), [(0, 1), (2, 3)])
def test_one_arm_equals_the_run_to_the_last_bit(trained, step, updates):
    start = start_of(trained, step, warm_up=0)
    start.advance(updates - 1, lambda text: None)
    # measuring must not change what the arm does
    Measure(start, ForkSpec(**SMALL), None).fixed("heldout", 0)
    start.update("own", 0)
    folder = checkpoint_dir(trained.run_dir, step + updates)
    saved, moments = load_file(folder / "model.safetensors"), load_file(folder / OPTIMIZER)
    named = dict(start.policy.model.named_parameters())
    assert all(torch.equal(named[name], value) for name, value in saved.items() if name in named)
    for key, value in some(moments.items()):
        name, entry = key.rsplit("::", 1)
        assert torch.equal(torch.as_tensor(start.optimizer.state[named[name]][entry]), value), key


def test_equal_arms_differ_by_exactly_zero_and_their_order_does_not_matter(trained):
    spec = ForkSpec(prompts=2, samples=1, outcomes=("failure", "entropy", "sharpness"))
    arms = {"a": "grpo", "b": "ar", "c": "grpo"}

    def values(names):
        start = start_of(trained, 2, **{name: arm_method(arms[name], trained) for name in names})
        return {
            (row["arm"], row["comparison"], row["outcome"]): row["value"]
            for row in rows_of(start, spec, 1)
        }

    found = values("abc")
    names = {key[1:] for key in found}
    for key in some(names):
        assert found[("a", *key)] == found[("c", *key)]
        assert found[("a", *key)] != found[("b", *key)]
    assert values("acb") == found


def test_rows_that_cannot_be_believed_are_not_valid(trained, monkeypatch):
    """Far updates, a matched scale that was not found, a saturated sharpness."""
    start = start_of(trained, 2, **{name: arm_method(name, trained) for name in ("grpo", "ar")})
    spec = ForkSpec(**SMALL, outcomes=("failure", "entropy", "sharpness"))
    for share, saturation in ((1e-6, 1.0), (1.0, 0.0)):
        monkeypatch.setattr(experiment, "EFFECTIVE_SHARE", share)
        monkeypatch.setattr(experiment, "MAX_SATURATION", saturation)
        for row in some(rows_of(start, spec)):
            doubtful = row["outcome"].endswith("_failure") or row["outcome"] == "sam_sharpness"
            assert row["valid"] == (share < 1 or not doubtful)
    monkeypatch.setattr(
        experiment, "matching_scale", lambda divergence, *_: (divergence(0.5) and 0.5, False)
    )
    rows = [row for row in rows_of(start) if row["comparison"] == "kl" and row["arm"] == "ar"]
    assert not any(row["valid"] for row in rows)


def test_matched_comparisons_match(trained):
    arms = {name: arm_method(name, trained) for name in ("grpo", "ar", "lopti", "high-entropy")}
    rows = rows_of(start_of(trained, 2, **arms))
    value = {(r["arm"], r["comparison"], r["outcome"]): r["value"] for r in rows}
    for row in some(rows):
        assert row["scale"] == 1.0 or row["comparison"] != "step"
        if row["comparison"] == "kl":
            assert value[row["arm"], "kl", "kl"] == pytest.approx(
                value["grpo", "step", "kl"], rel=0.01
            )


def test_a_model_without_a_run_gets_a_folder_of_its_own(tiny_policy, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "set_threads", lambda *_: 7)
    options = {"methods": ["grpo"], "prompts": 2, "batches": 1}
    small = ["rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=6"]
    options |= {
        "model": str(tiny_policy),
        "task": "tests.toy_task:vowels",
        "out": tmp_path / "forks",
    }
    run = sharpscope.fork(overrides=small, **options)
    assert run.status == "finished" and run.info["threads"] == 7
    assert len(run.steps) == 0 and set(run.forks["step"]) == {0}
    with pytest.raises(UserError, match="seed 0"):
        sharpscope.fork(overrides=[*small, "seed=1"], **options)


def test_the_command_keeps_what_a_stopped_fork_has_measured_and_the_report_has_a_section(
    trained, tmp_path, monkeypatch, capsys, quick
):
    options = [
        "fork",
        str(trained.run_dir),
        "--checkpoint",
        "2",
        "--methods",
        "grpo,<b>=ar",
        "--batches",
        "3",
    ]
    options += ["--set", "fork.prompts=3", "--set", "optimizer.lr=0.001", "--outcomes", "failure"]
    call([*options, "--out", str(tmp_path / "whole")])
    shown = capsys.readouterr()
    assert "scaled to the KL of the reference's step" in shown.out and "batch 3 of 3" in shown.err
    whole = Measure.batch_rows

    def stopping(measure, name, batch):
        for number, row in enumerate(whole(measure, name, batch)):
            if (batch, number) == (1, 2):  # some rows of the batch are there
                raise KeyboardInterrupt
            yield row

    with monkeypatch.context() as patch:
        patch.setattr(Measure, "batch_rows", stopping)
        call([*options, "--out", str(tmp_path / "stopped")], code=130)
    assert "repeat the command" in capsys.readouterr().err
    assert set(sharpscope.load_run(tmp_path / "stopped").forks["batch"]) == {0}
    for _ in range(2):
        call([*options, "--out", str(tmp_path / "stopped")])
    assert "all 3 batches are there" in capsys.readouterr().err
    one, two = (
        sharpscope.load_run(tmp_path / name).forks.drop(columns="seconds")
        for name in ("whole", "stopped")
    )
    pd.testing.assert_frame_equal(one, two, check_exact=True)
    assert set(one["outcome"]) >= {"heldout_failure", "kl", "update_norm"}
    page = analyze(tmp_path / "whole", tmp_path / "report").page.read_text()
    assert ">Counterfactual updates</h2>" in page and "&lt;b&gt;" in page and "<b>" not in page


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"methods": ["grpo", "grpo"]}, "grpo: given twice"),
        ({"methods": ["nope"]}, "nope"),
        ({"checkpoint": [77]}, "choose from 0, 1"),
        ({"checkpoint": [6], "overrides": ["optimizer.schedule=linear"]}, "learning rate is 0"),
        ({"batch": 3}, "batches"),
        ({"task": "math"}, "--task"),
        ({"model": "embedded:math"}, "a run's folder, or --model"),
    ],
)
def test_a_mistake_is_one_line(trained, change, words):
    with pytest.raises(UserError, match=words) as error:
        sharpscope.fork(trained.run_dir, **{"prompts": 2, "batches": 1, "checkpoint": [2]} | change)
    assert "\n" not in str(error.value)


def test_several_processes_and_a_run_that_is_written_are_refused(trained, monkeypatch):
    with RunLock(trained.run_dir), pytest.raises(UserError, match="process"):
        sharpscope.fork(trained.run_dir, checkpoint=[2], methods=["grpo"], prompts=2, batches=1)
    monkeypatch.setattr(start_module.distributed, "start", lambda device="auto": Launch(2))
    with pytest.raises(UserError, match="one process"):
        sharpscope.fork(trained.run_dir)


def test_a_repeated_call_adds_what_is_missing_and_reads_the_same(trained, tmp_path):
    options = {
        "checkpoint": [2],
        "methods": ["grpo", "ar"],
        "prompts": 3,
        "out": tmp_path / "forks",
    }
    once = sharpscope.fork(trained.run_dir, batches=1, **options).forks
    more = sharpscope.fork(trained.run_dir, batches=2, **options).forks
    assert len(more) == 2 * len(once)
    kept = more.iloc[: len(once)].reset_index(drop=True)
    assert kept.equals(once)
    run = sharpscope.fork(trained.run_dir, batches=2, **options)
    assert len(run.forks) == len(more)
    ((name, settings),) = run.info["forks"].items()
    assert set(run.forks["fork"]) == {name} and settings["batches"] == 2
    assert list(settings["arms"]["2"]) == ["grpo", "ar"]
    other = sharpscope.fork(trained.run_dir, batches=1, **options | {"prompts": 4}).forks
    assert other["fork"].nunique() == 2


# -- Outcomes against exact values: a bandit whose completions are enumerated, and drawn completions


@pytest.mark.parametrize("start", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize(
    "divergence",
    [
        lambda s: s**2 / (1 + s),
        lambda s: math.expm1(s) - s,
        lambda s: math.inf if s > 3 else s**4 + s**2,
    ],
)
def test_a_divergence_is_matched_from_any_start(divergence, start):
    for target in (1e-3, 0.3, 2.0):
        scale, reached = matching_scale(divergence, target, start, 1e-3, 40)
        assert reached and divergence(scale) == pytest.approx(target, rel=1e-3)
    assert not matching_scale(lambda s: s / (1 + s), 2.0, start)[1]  # which never reaches it


PROMPTS, WORDS = 3, 11


@pytest.fixture
def bandit():
    """(scorer, completions, success): a policy that is uniform at the start, with every completion of one token once."""
    model = tiny_model(vocab=WORDS, tie=False)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    prompts = torch.randint(2, WORDS, (PROMPTS, 4), generator=torch.Generator().manual_seed(1))
    words = torch.arange(WORDS).repeat(PROMPTS)[:, None]
    ids = torch.cat([prompts.repeat_interleave(WORDS, 0), words], 1)
    ones = torch.ones_like(ids)
    rollouts = Rollouts(
        input_ids=ids,
        attention_mask=ones,
        completion_ids=words,
        completion_mask=ones[:, :1],
        behavior_logp=torch.full(words.shape, -math.log(WORDS)),
        sampler_logp=None,
        group=torch.arange(PROMPTS).repeat_interleave(WORDS),
        truncated=torch.zeros(len(ids), dtype=torch.bool),
        texts=[""] * len(ids),
        reward=torch.zeros(len(ids)),
    )
    success = (torch.rand(len(ids), generator=torch.Generator().manual_seed(2)) < 0.4).float()
    return Scorer(model, 1.0, 4096, True), rollouts, success


def exact(scorer: Scorer, rollouts: Rollouts, success: torch.Tensor) -> dict[str, torch.Tensor]:
    """Expected failure, KL(π₀‖π), entropy and the probabilities of all completions, by enumeration."""
    first = torch.arange(0, len(rollouts), WORDS)
    logits = scorer.model(input_ids=rollouts.input_ids[first, :-1]).logits[:, -1].double()
    logp = logits.log_softmax(-1)  # (prompts, words)
    return {
        "failure": (logp.exp() * (1 - success.double().view(PROMPTS, WORDS))).sum(1).mean(),
        "kl": -(logp.mean() + math.log(WORDS)),
        "entropy": -(logp.exp() * logp).sum(1).mean(),
    }


def test_on_an_enumerated_bandit_every_outcome_is_exact(bandit):
    scorer, rollouts, success = bandit
    fixed = FixedRollouts(rollouts, success, scorer.statistics(rollouts))
    before = exact(scorer, rollouts, success)
    slope = torch.autograd.grad(
        before["failure"], list(scorer.model.parameters()), allow_unused=True
    )
    slope = [
        torch.zeros_like(p) if g is None else g
        for g, p in zip(slope, scorer.model.parameters(), strict=True)
    ]
    optimizer = torch.optim.AdamW(scorer.model.parameters(), lr=0.05)
    snapshot = Snapshot(scorer.model, optimizer)
    optimizer.zero_grad()
    exact(scorer, rollouts, success)["failure"].backward()
    for parameter in scorer.model.parameters():
        if parameter.grad is not None:
            parameter.grad += 0.01 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64
            )
    optimizer.step()
    step = snapshot.displacement()
    for scale in (1.0, 0.3, 1e-5):
        snapshot.place(step, scale)
        stats, now = scorer.statistics(rollouts), exact(scorer, rollouts, success)
        reading = fixed.failure(stats.logp)
        assert reading.value == pytest.approx(now["failure"].item(), rel=1e-10)
        assert fixed.kl(stats.logp) == pytest.approx(now["kl"].item(), rel=1e-8)
        assert fixed.entropy(stats) == pytest.approx(now["entropy"].item(), rel=1e-6)
        weight = (stats.logp.double()[:, 0] + math.log(WORDS)).exp()
        share = float(weight.sum() ** 2 / weight.square().sum() / len(weight))
        assert reading.effective_share == pytest.approx(share, rel=1e-10)
    # at the smallest scale the linear prediction is all there is
    change = (now["failure"] - before["failure"]).item()
    along = sum(float((a.double() * b.double()).sum()) for a, b in zip(slope, step, strict=True))
    assert 1e-5 * along == pytest.approx(change, rel=1e-3)


@pytest.mark.parametrize("moved", [False, True])
def test_sharpness_equals_that_of_the_loss_written_out(toy_config, moved):
    config = toy_config(
        optimizer__lr=1e-3, task__factory="tests.toy_task:even_start", policy__dtype="float64"
    )
    spec = ForkSpec(prompts=3, samples=2, batches=1, rho=0.02, outcomes=("failure", "sharpness"))
    start = Start(config, {"grpo": config.method}, None)
    measure = Measure(start, spec, spec.rho)
    fixed = measure.fixed("train", 0)
    if moved:
        start.update("grpo", 0)
    rows, mask, parameters = fixed.rollouts, fixed.mask, start.snapshot.parameters

    def logp() -> torch.Tensor:
        ids, width = rows.input_ids, rows.completion_ids.shape[1]
        position = (rows.attention_mask.cumsum(1) - 1).clamp(min=0)
        logits = start.policy.model(
            input_ids=ids, attention_mask=rows.attention_mask, position_ids=position
        ).logits
        every = (
            logits[:, -width - 1 : -1]
            .log_softmax(-1)
            .gather(2, rows.completion_ids[..., None])[..., 0]
        )
        return torch.where(mask, every, 0.0)

    anchor = fixed.start.logp

    def loss() -> torch.Tensor:
        return (1 - fixed.success.double() * (logp() - anchor).sum(1).exp()).mean()

    before = loss()
    gradient = torch.autograd.grad(before, parameters)
    norm = math.sqrt(sum(float(part.double().square().sum()) for part in gradient))
    kept = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for parameter, part in zip(parameters, gradient, strict=True):
            parameter += spec.rho / norm * part
        rise = loss() - before
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
    found = measure.sharpness(fixed, start.scorer.statistics(rows))
    assert found["saturation"].value == pytest.approx(rise.item() / (1 - before.item()), rel=1e-5)
    assert found["sam_sharpness"].value == pytest.approx(rise.item(), rel=1e-5)
    assert [torch.equal(p, value) for p, value in zip(parameters, kept, strict=True)] == [
        True
    ] * len(kept)


def test_greedy_accuracy_is_that_of_the_most_likely_tokens_at_each_scale(toy_config):
    changes = {
        "task__factory": "tests.toy_task:even_start",
        "rollout__max_new_tokens": 2,
        "policy__dtype": "float64",
    }
    config = toy_config(optimizer__lr=2e-2, **changes)
    spec = ForkSpec(prompts=10, samples=2, batches=1, outcomes=("greedy",))
    start = Start(config, {name: parse_method(name) for name in ("grpo", "lopti")}, None, warm_up=4)
    measure = Measure(start, spec, None)
    found = [row for row in measure.batch_rows("x", 0) if row["outcome"] == "accuracy_greedy"]

    @torch.no_grad()
    def accuracy() -> float:
        right = 0
        for example, prompt in zip(
            measure.asked(0), render_prompts(measure.asked(0), start.policy), strict=True
        ):
            drawn: list[int] = []
            while len(drawn) < 2 and not set(drawn) & set(start.policy.eos_ids):
                logits = start.policy.model(input_ids=torch.tensor([[*prompt, *drawn]])).logits[
                    0, -1
                ]
                drawn.append(int(logits.argmax()))
            right += start.task.score(
                example, start.policy.tokenizer.decode(drawn, skip_special_tokens=True)
            ).correct
        return right / spec.prompts

    start.restore()
    before, values = accuracy(), set()
    for row in some(found):
        start.update(row["arm"], 0)
        start.snapshot.place(start.snapshot.displacement(), row["scale"])
        assert (row["start"], row["value"]) == (before, pytest.approx(accuracy()))
        values.add(row["value"])
    assert len(found) == 4 and values != {before}


def test_importance_weighting_of_drawn_completions_is_unbiased_within_its_standard_error(
    toy_config,
):
    changes = {
        "task__factory": "tests.toy_task:even_start",
        "rollout__max_new_tokens": 1,
        "policy__dtype": "float64",
    }
    config = toy_config(optimizer__lr=3e-3, **changes)
    spec = ForkSpec(prompts=10, samples=12, batches=1)  # all held-out prompts in every batch
    start = Start(config, {"grpo": config.method}, None, warm_up=4)
    measure = Measure(start, spec, None)

    def exact_failure() -> float:
        task, examples = start.task, start.task.splits()["heldout"]
        total = 0.0
        size = start.policy.head.weight.shape[0]
        words = [[word] for word in range(size)]
        texts = start.policy.tokenizer.batch_decode(words, skip_special_tokens=True)
        for example, prompt in zip(examples, render_prompts(examples, start.policy), strict=True):
            with torch.no_grad():
                p = (
                    start.policy.model(input_ids=torch.tensor([prompt]))
                    .logits[0, -1]
                    .double()
                    .softmax(0)
                )
            failed = torch.tensor(
                [not task.score(example, text).correct for text in texts], dtype=torch.float64
            )
            total += float(p @ failed)
        return total / len(examples)

    before = exact_failure()
    start.update("grpo", 0)
    moved = start.snapshot.displacement()
    change = exact_failure() - before
    estimates, errors = [], []
    for batch in range(60):
        start.snapshot.restore()
        fixed = measure.fixed("heldout", batch)
        start.snapshot.place(moved, 1.0)
        reading = fixed.failure(start.scorer.statistics(fixed.rollouts).logp)
        estimates.append(reading.value - (1 - float(fixed.success.double().mean())))
        errors.append(reading.std_error)
    found = torch.tensor(estimates, dtype=torch.float64)
    error = float(found.std()) / math.sqrt(len(found))
    assert abs(change) > 4 * error  # there is something to see
    assert abs(float(found.mean()) - change) < 3.5 * error
    assert 0.6 < float(torch.tensor(errors).square().mean().sqrt()) / float(found.std()) < 1.6


def test_a_repeated_call_prints_the_fork_that_was_asked_for(monkeypatch, capsys, tmp_path):
    """A folder holds two forks; the one asked for is the first of the table, not that of its last row."""
    frame = pd.DataFrame({"fork": ["asked", "asked", "other"], "value": [1.0, 2.0, 3.0]})
    made = SimpleNamespace(forks=frame, path=tmp_path)
    monkeypatch.setattr(experiment, "measure_fork", lambda *_, **__: (made, "asked"))
    seen = []

    def differences(rows):
        seen.append(rows["value"].tolist())
        return rows

    monkeypatch.setattr(fork_analysis, "fork_differences", differences)
    monkeypatch.setattr(fork_analysis, "fork_sections", lambda rows, most: [])
    forking._methods(None, model="x")
    assert seen == [[1.0, 2.0]] and "Written: " in capsys.readouterr().out

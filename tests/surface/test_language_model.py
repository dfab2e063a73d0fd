"""The loss surface of causal models against dense float64 Hessians of at most 3,000 parameters; probe sets; rounds of probes."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from sharpscope import progress
from sharpscope.config.run import ProbesSpec
from sharpscope.errors import UserError
from sharpscope.policy import PolicySpec, completions_of, load_policy
from sharpscope.surface import (
    Drawn,
    ProbeBatch,
    ProbeSet,
    build_probe_set,
    choose_radius,
    columns,
    curvature,
    probe_set_batches,
    problems,
    read_rows,
    run,
    runner,
    text_batches,
)
from sharpscope.surface.language_model import (
    Objective,
    completion_batch,
    lm_surface,
    rollout_batch,
    token_batch,
)
from sharpscope.surface.perturbation import FORWARD
from sharpscope.tasks.base import Example
from tests.loops import some
from tests.models import (
    OBJECTIVES,
    SMALL,
    TEMPERATURE,
    VOCAB,
    OpaqueCube,
    all_scored,
    generator,
    objective,
    random_batch,
    rewards,
    small_model,
    tiny_model,
)
from tests.oracles.token_gradients import (
    all_completions,
    dense_hessian,
    flat,
    functional_value,
    logp_of,
    row_logp,
)
from tests.tokens.test_self_check import assert_same, disturbed, snapshot


@functools.cache
def oracle(name: str):
    """Model, batch and the dense Hessian, gradient and value of an objective."""
    model, batch = small_model(), random_batch(vocab=VOCAB, rows=3, prompt=3, completion=4)
    parameters = list(model.parameters())
    theta = flat(parameters)
    reward = rewards()
    anchor = logp_of(model, theta, parameters, batch, TEMPERATURE).detach()

    def loss(at):
        return functional_value(
            name, logp_of(model, at, parameters, batch, TEMPERATURE), batch["mask"], reward, anchor
        )

    return (
        model,
        batch,
        dense_hessian(loss, theta),
        torch.func.grad(loss)(theta),
        float(loss(theta)),
    )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_value_gradient_and_eigenvalues_are_those_of_the_dense_hessian(name):
    model, batch, dense, gradient, value = oracle(name)
    exact = np.linalg.eigvalsh(dense.numpy())
    with lm_surface(model, objective(name, batch), microbatch_tokens=8) as surface:
        assert surface.value() == pytest.approx(value, abs=1e-12)
        torch.testing.assert_close(surface.gradient()[1], gradient, rtol=1e-9, atol=1e-12)
        settings = {"top": 3, "tolerance": 1e-8, "max_products": 300, "trace_probes": 40}
        found = curvature(surface, None, 1, **settings)
    assert found.converged, found.why
    np.testing.assert_allclose(found.top, exact[::-1][:3], rtol=1e-6)
    assert found.smallest == pytest.approx(exact[0], rel=1e-6, abs=1e-9)
    for value, vector, residual in zip(found.top, found.vectors, found.residuals, strict=True):
        assert float((dense @ vector - value * vector).norm()) == pytest.approx(residual, abs=1e-8)
        assert float(vector.norm()) == pytest.approx(1)
    assert abs(found.trace - float(dense.trace())) <= 3.5 * found.trace_std_error + 1e-9


@pytest.mark.parametrize("name", OBJECTIVES)
def test_products_do_not_depend_on_microbatches_nor_on_the_graphs_kept(name):
    model, batch, dense, _, _ = oracle(name)
    vector = torch.randn(len(dense), generator=generator(), dtype=torch.float64)
    for tokens, memory in ((1, 1024.0), (10_000, 1024.0), (10, 1e-6), (10, 0.2)):
        with lm_surface(
            model, objective(name, batch), microbatch_tokens=tokens, memory_mb=memory
        ) as surface:
            torch.testing.assert_close(
                surface.hessian() @ vector, dense @ vector, rtol=1e-9, atol=1e-11
            )


def test_values_by_prompt_of_eigenvalues_are_quadratic_forms_of_each_prompts_rows():
    model, batch, dense, _, _ = oracle("nll")
    settings = {
        "top": 2,
        "tolerance": 1e-9,
        "max_products": 300,
        "trace_probes": 0,
        "by_prompt": True,
    }
    with lm_surface(model, objective("nll", batch)) as surface:
        found = curvature(surface, None, **settings)
        prompts, weight = (
            torch.tensor(surface.objective.batch.prompts),
            surface.objective.prompt_weight,
        )
        parts = [
            surface.over(surface.objective.rows((prompts == i).nonzero()[:, 0]))
            for i in range(len(weight))
        ]
        vectors = torch.linalg.eigh(dense).eigenvectors[:, [-1, -2, 0]].T
        for row, vector in zip(found.estimates(), vectors, strict=True):
            alone = torch.tensor([float(vector @ (part.hessian() @ vector)) for part in parts])
            exact = row.value + len(weight) * weight * (alone - row.value)
            np.testing.assert_allclose(row.prompt_values, exact, rtol=1e-4, atol=1e-6)
            assert row.prompt_std_error == pytest.approx(
                float(exact.std()) / len(weight) ** 0.5, rel=1e-4
            )
    assert len(weight) > 1


def test_a_language_model_whose_products_are_wrong_is_refused_by_name(monkeypatch):
    settings = {"trace_probes": 0}
    ids = torch.randint(2, VOCAB, (2, 7), generator=generator())
    model = small_model()
    with lm_surface(model, all_scored(ids)) as surface:
        assert curvature(surface, None, **settings).checked < 1e-4
    monkeypatch.setattr(model.model.layers[0].mlp.act_fn, "forward", OpaqueCube.apply)
    with lm_surface(model, all_scored(ids), check="always") as surface:
        with pytest.raises(
            UserError, match=r"Qwen2ForCausalLM: .*finite difference.*differ by \d+%"
        ):
            curvature(surface, None, **settings)
        assert curvature(surface, None, check="off", **settings).checked is None


def test_expected_failure_has_the_hessian_of_the_exact_expectation_over_all_completions():
    vocabulary, length = 4, 2
    model = tiny_model("qwen2", vocab=vocabulary, **SMALL)
    model.get_input_embeddings().padding_idx = None  # every token is a token here
    parameters, theta = list(model.parameters()), flat(list(model.parameters()))
    completions = all_completions(vocabulary, length)
    rows = len(completions)
    prompt = torch.tensor([2, 3]).expand(rows, 2)
    batch = {
        "input_ids": torch.cat([prompt, completions], 1),
        "attention_mask": torch.ones(rows, 4, dtype=torch.long),
    }
    batch["mask"] = torch.tensor([0, 0, 1, 1]).expand(rows, 4)
    success = torch.rand(rows, generator=generator(), dtype=torch.float64)

    def failure(at):
        """1 − Σ_y π(y) R(y), exactly."""
        return 1 - (logp_of(model, at, parameters, batch, 1.0)[:, 2:].sum(1).exp() * success).sum()

    probability = logp_of(model, theta, parameters, batch, 1.0)[:, 2:].sum(1).exp().detach()
    assert float(probability.sum()) == pytest.approx(1)
    dense = dense_hessian(failure, theta)
    # Every completion once, weighted by its probability: the mean over draws becomes the exact expectation.
    scale = 0.5 / float((probability * rows).max())
    tokens = token_batch(
        batch["input_ids"],
        batch["attention_mask"],
        batch["mask"],
        reward=success * probability * rows * scale,
    )
    vector = torch.randn(len(theta), generator=generator(1), dtype=torch.float64)
    with lm_surface(model, Objective("expected_failure", tokens)) as surface:
        torch.testing.assert_close(
            (surface.hessian() @ vector) / scale, dense @ vector, rtol=1e-8, atol=1e-10
        )
        assert (1 - surface.value()) / scale == pytest.approx(1 - float(failure(theta)))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_shares_of_any_partition_sum_to_the_functional_written_token_by_token(name):
    batch, draw = random_batch(rows=4), generator(1)
    reward = torch.rand(4, generator=draw, dtype=torch.float64)
    anchor, logp = -torch.rand(2, *batch["mask"].shape, generator=draw, dtype=torch.float64)
    present = torch.ones_like(batch["mask"])
    tokens = token_batch(
        batch["input_ids"], present, batch["mask"], anchor_logp=anchor, reward=reward
    )
    expected = float(functional_value(name, logp, batch["mask"], reward, anchor))
    for partition in ([[0, 1, 2, 3]], [[0], [3, 1], [2]]):
        parts = [
            Objective(name, tokens).row_shares(torch.tensor(index), logp[index])
            for index in partition
        ]
        assert sum(float(part.sum()) for part in parts) == pytest.approx(expected, abs=1e-12)


def test_rollouts_become_rows_with_their_loss_tokens():
    rollouts = SimpleNamespace(
        input_ids=torch.tensor([[0, 5, 6, 7, 8], [4, 5, 9, 0, 0]]),
        attention_mask=torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
        completion_mask=torch.tensor([[1, 0, 1], [1, 0, 0]]),  # the middle token came from a tool
        behavior_logp=torch.tensor([[-1.0, 0.0, -2.0], [-3.0, 0.0, 0.0]]),
        reward=torch.tensor([1.0, 0.0]),
    )
    batch = rollout_batch(rollouts)
    assert batch.input_ids[0].tolist() == [5, 6, 7, 8] and batch.lengths.tolist() == [4, 3]
    assert batch.scored.tolist() == [[False, True, False, True], [False, False, True, False]]
    assert batch.anchor_logp.tolist() == [[0, -1, 0, -2], [0, 0, -3, 0]]
    assert batch.reward.tolist() == [1, 0]


class Toy:
    """Prompts 'p0'…; a completion is correct if its first token is even."""

    name = "toy"

    def splits(self):
        meta = {"level": 1, "people": ["A", "B"]}
        return {
            "train": [Example(f"p{i}", str(i), {"id": f"t{i}"} | meta) for i in range(10)],
            "heldout": [Example(f"h{i}", str(i), {"id": f"h{i}"} | meta) for i in range(4)],
        }


def encode(examples):
    return [[2 + ord(c) % 30 for c in example.prompt] for example in examples]


def draw(examples, samples, seed):
    """Random completions of 2 to 4 tokens, as `Drawn`."""
    draws = generator(seed)
    prompts = [ids for ids in encode(examples) for _ in range(samples)]
    lengths = torch.randint(2, 5, (len(prompts),), generator=draws)
    tokens = torch.randint(2, 37, (len(prompts), 4), generator=draws)
    correct = (tokens[:, 0] % 2 == 0).float()
    made = completions_of(
        prompts, [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]
    )
    group = torch.arange(len(examples)).repeat_interleave(samples)
    zeros = torch.zeros_like(made.behavior_logp)
    made = replace(made, behavior_logp=zeros, group=group, truncated=lengths == 4)
    return Drawn(made.with_reward(correct * 3 - 1), correct)


def built():
    return build_probe_set(
        Toy(), draw, encode, name="toy", policy="embedded:toy", seed=5, train=6, heldout=3, tries=4
    )


def test_solutions_are_correct_whole_and_scored():
    found = built()
    solved = [item for item in found.items if item.solution]
    assert solved and all(
        item.solution[0] % 2 == 0 and 2 <= len(item.solution) < 4 for item in solved
    )
    batch = found.solutions("train")
    rows = [item for item in found.split("train") if item.solution]
    assert len(batch) == len(rows)
    for row, item in some(enumerate(rows)):
        length = int(batch.lengths[row])
        assert batch.input_ids[row, :length].tolist() == [*item.prompt_ids, *item.solution]
        scored = batch.scored[row]
        assert int(scored.sum()) == len(item.solution) and not scored[: len(item.prompt_ids)].any()


def test_a_file_comes_back_equal_and_a_changed_one_is_refused(tmp_path):
    found = built()
    path = found.save(tmp_path / "deep" / "set.parquet")
    back = ProbeSet.load(path)
    assert back == found and back.content_hash == found.content_hash
    assert list(tmp_path.rglob("*.tmp")) == []
    table = pq.read_table(path)
    assert table.column_names == ["split", "prompt", "answer", "meta", "prompt_ids", "solution"]
    changed = table.set_column(
        1, "prompt", table.column("prompt").cast("string").take(list(range(8, -1, -1)))
    )
    pq.write_table(changed.replace_schema_metadata(table.schema.metadata), path)
    with pytest.raises(UserError, match="changed or damaged"):
        ProbeSet.load(path)
    (tmp_path / "no.parquet").write_bytes(b"nothing")
    for name in ("no.parquet", "missing.parquet"):
        with pytest.raises(UserError, match="cannot be read"):
            ProbeSet.load(tmp_path / name)


def test_a_round_of_probes_fills_the_tables_columns_and_is_repeated_to_the_digit():
    model = tiny_model(
        "qwen2", dtype=torch.float32, hidden_size=8, intermediate_size=8, num_hidden_layers=1
    )
    limits = {"curvature_prompts": 6, "samples": 2}
    spec = ProbesSpec(
        functionals=("nll", "expected_failure"), rho=0.2, kinds=("sam", "asam"), **limits
    )
    found = built()

    def measured():
        batches = probe_set_batches(found, spec, draw, seed=lambda part: 1)
        return [row for one in run(model, batches, spec) for row in one.estimates]

    rows = measured()
    frame = pd.DataFrame(columns(rows)).assign(step=3)
    for _, own in some(frame.groupby("functional")):
        assert {"loss", "gradient_norm", "sam", "asam", "largest", "smallest", "trace"} <= set(
            own["quantity"]
        )
    assert set(frame["probe_set"]) == {found.name("train")} and frame["functional"].nunique() == 2
    assert not frame.duplicated(["probe", "functional", "quantity", "rho", "seed"]).any()
    assert [(e.quantity, e.value) for e in rows] == [(e.quantity, e.value) for e in measured()]


def test_presets_give_way_to_what_is_set():
    assert ProbesSpec(preset="off").every == 0 and ProbesSpec(preset="off").interval(200) == 0
    assert ProbesSpec().interval(100) == 25 and ProbesSpec(every=30).interval(100) == 30
    spec = ProbesSpec(preset="standard", samples=2, every=10, rho=0.1)
    assert (spec.samples, spec.every, spec.rho, spec.prompts) == (2, 10, 0.1, 200)
    # a resolved configuration says the same again
    assert ProbesSpec.model_validate(spec.model_dump()) == spec


# -- A round leaves no trace, one failing measure leaves the others, and nothing unreliable goes unsaid

SPEC = ProbesSpec(preset="standard", curvature_prompts=3, rho=0.05)


def completions_objective(batch, name: str = "expected_failure") -> Objective:
    tokens = token_batch(batch["input_ids"], batch["attention_mask"], batch["mask"])
    return Objective(name, tokens)


def probed(model, given: Objective, spec: ProbesSpec = SPEC, **options):
    return [*run(model, [ProbeBatch("x", (given,))], spec, **options)]


def rows_of(results):
    return {row.quantity: row for one in results for row in one.estimates}


@pytest.mark.parametrize("nth", [1, 2, 5, 20])
def test_everything_is_as_before_whatever_stops_a_round(nth):
    """The model's last norm is interrupted at its nth call: in the anchors, the graph, at a moved place, …"""
    model, batch = disturbed("qwen2"), random_batch()
    inner, calls = model.model.norm.forward, 0

    def forward(x):
        nonlocal calls
        calls += 1
        if calls == nth:
            raise KeyboardInterrupt
        return inner(x)

    model.model.norm.forward = forward
    before = snapshot(model)
    with pytest.raises(KeyboardInterrupt):
        probed(model, completions_objective(batch))
    assert calls == nth
    assert_same(before, snapshot(model))
    model.model.norm.forward = inner
    probed(model, completions_objective(batch))
    assert_same(before, snapshot(model))


@pytest.mark.parametrize(
    "error", [UserError("rho: below the resolution"), RuntimeError("not enough memory")]
)
def test_a_measure_that_fails_leaves_the_others_and_says_why(monkeypatch, error):
    model, batch = tiny_model("qwen2", dtype=torch.float32), random_batch()
    inner = runner.sharpness

    def failing(surface, parameters, rho, kind, **options):
        if kind == "asam":
            raise error
        return inner(surface, parameters, rho, kind, **options)

    monkeypatch.setattr(runner, "sharpness", failing)
    rows = rows_of(probed(model, completions_objective(batch, "nll")))
    assert math.isnan(rows["asam"].value) and rows["asam"].why == f"left out: {error}"
    good = {"loss", "gradient_norm", "sam", "largest", "trace"}
    assert all(math.isfinite(rows[name].value) for name in good)
    assert any("nll asam" in line for line in problems(rows.values()))


@pytest.mark.parametrize("name", ["expected_failure", "nll"])
def test_the_radius_is_chosen_once_on_the_model_at_hand(name):
    model, batch = tiny_model("qwen2", dtype=torch.float32), random_batch()
    spec = SPEC.model_copy(update={"rho": "auto", "kinds": ("sam",), "curvature_prompts": 0})
    given = completions_objective(batch, name)
    results = probed(model, given, spec)
    rows, radius = rows_of(results), results[-1].radius
    assert 0.05 <= radius.saturation <= 0.3 and radius.evaluations >= 1
    assert rows["radius"].value == radius.rho == rows["sam"].rho
    if name == "expected_failure":
        assert rows["sam"].saturation == pytest.approx(radius.saturation, rel=1e-3)
    else:  # texts count as successes
        assert math.isnan(rows["sam"].saturation)
    again = probed(model, given, spec, radius=radius)
    assert "radius" not in rows_of(again) and rows_of(again)["sam"].value == rows["sam"].value
    assert choose_radius(model, ProbeBatch("x", (given,)), SPEC).rho == 0.05


@pytest.mark.parametrize("kinds", [("sam",), ("asam",), ("average",), ("sam", "asam", "average")])
def test_the_passes_of_perturbations_are_counted(kinds, monkeypatch):
    """The price that is told is the first pass times those that follow."""
    batch = random_batch(rows=4, prompt=3)
    spec = SPEC.model_copy(update={"kinds": kinds, "curvature_prompts": 0, "check": "off"})
    made, told = [0.0], []
    shares = Objective.row_shares

    def counted(self, index, logp):
        made[0] += (
            len(index) / len(batch["input_ids"]) * (1 if torch.is_grad_enabled() else FORWARD)
        )
        return shares(self, index, logp)

    monkeypatch.setattr(Objective, "row_shares", counted)
    monkeypatch.setattr(progress, "WORTH_SAYING", 0.0)
    probed(tiny_model("qwen2"), objective("nll", batch), spec, tell=told.append)
    assert made[0] == pytest.approx(1 + runner.passes(spec, 4))
    assert len(told) == 1 and told[0].startswith("nll of x, 4 prompts: at most about ")
    with_curvature = spec.model_copy(update={"curvature_prompts": 2, "density_probes": 3})
    eigenvalues = runner.MAX_PRODUCTS + 2 * (runner.TOP + 1)
    more = (eigenvalues + runner.TRACE_PROBES + 3 * 40) * 3.5 / 2
    assert runner.passes(with_curvature, 4) == pytest.approx(runner.passes(spec, 4) + more)


def test_without_a_correct_completion_there_is_no_radius_and_the_rest_is_measured():
    texts = [([5, 6], [7, 8]), ([5, 6], [9])]
    given = Objective("expected_failure", completion_batch(texts, reward=torch.zeros(2)))
    rows = rows_of(
        probed(
            tiny_model("qwen2"),
            given,
            SPEC.model_copy(update={"rho": "auto", "curvature_prompts": 0}),
        )
    )
    assert (
        "no completion is correct" in rows["radius"].why
        and "sam" not in rows
        and rows["loss"].value == 1
    )


def test_a_model_that_is_not_finite_gives_reasons_for_every_missing_number():
    model, batch = tiny_model("qwen2", dtype=torch.float32), random_batch()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = math.nan
    rows = rows_of(probed(model, completions_objective(batch, "nll")))
    missing = [row for row in rows.values() if math.isnan(row.value)]
    assert {row.quantity for row in missing} >= {"gradient_norm", "largest", "trace", "sam", "asam"}
    assert not any(row.converged for row in missing) and all(row.why for row in missing)
    assert len(problems(rows.values())) >= len(missing)


def test_data_files_are_read_and_mistakes_named(tmp_path):
    rows = [
        {"prompt": "1", "completion": "b", "reward": 1},
        {"prompt": "a", "completion": "c", "truncated": True},
    ]
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    found = read_rows(path)
    assert found[["prompt", "completion", "truncated"]].values.tolist() == [
        ["1", "b", False],
        ["a", "c", True],
    ]
    assert (
        found["reward"][0] == 1
        and math.isnan(found["reward"][1])
        and found["meta"].tolist() == [{}, {}]
    )
    pd.DataFrame(rows[:1]).to_parquet(tmp_path / "d.parquet")
    pd.testing.assert_frame_equal(read_rows(tmp_path / "d.parquet"), found[:1])
    for text, message in (
        ("{", "cannot be read"),
        ('{"prompt": "a"}', "row 1: needs the texts"),
        ("", "no rows"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            read_rows(path)
    with pytest.raises(UserError, match="no such file"):
        read_rows(tmp_path / "x.jsonl")


def test_texts_are_probed(tiny_policy):
    policy = load_policy(PolicySpec(model=str(tiny_policy)))

    def frame(*rows):
        made = pd.DataFrame(rows, columns=["prompt", "completion", "reward"])
        return made.assign(truncated=False, meta=[{}] * len(rows))

    rows = frame(
        ("What is it?", "one", 1.0), ("What is it?", "two words", 0.0), ("Why?", "so", 0.5)
    )
    batches = text_batches(policy, rows, ("nll", "expected_failure"))
    found = [
        row for one in run(policy.model, batches, ProbesSpec(rho=0.1)) for row in one.estimates
    ]
    loss = {row.functional: row.value for row in found if row.quantity == "loss"}
    assert loss["expected_failure"] == pytest.approx(0.5)
    logp = []
    for row in rows.itertuples():
        prompt = policy.tokenizer(row.prompt)["input_ids"]
        completion = [
            *policy.tokenizer(row.completion, add_special_tokens=False)["input_ids"],
            policy.eos_ids[0],
        ]
        logp.append(row_logp(policy.model, (prompt, completion)))
    assert loss["nll"] == pytest.approx(-torch.cat(logp).mean().item(), rel=1e-4)
    with pytest.raises(UserError, match="have no reward"):
        text_batches(policy, frame(("a", "b", None)), ("expected_failure",))
    with pytest.raises(UserError, match="context is"):
        text_batches(policy, frame(("a", "b " * 5000, 1.0)))

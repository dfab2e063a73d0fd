"""Probe sets: the same prompts for everyone, verified solutions, a tamper-proof file; specs; standalone."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from pydantic import ValidationError

from sharpscope.errors import UserError
from sharpscope.probes import ProbesSpec, build_probe_set, measure, probe_set_objectives, rollout_objective
from sharpscope.probes.estimate import columns, problems
from sharpscope.probes.probe_set import Drawn, ProbeSet
from sharpscope.probes.runner import measured_cost
from sharpscope.tasks.base import Example
from tests.models import tiny_model


class Toy:
    """Prompts 'p0'…; a completion is correct if its first token is even."""

    name = "toy"

    def splits(self):
        return {
            "train": [
                Example(f"p{i}", str(i), {"id": f"t{i}", "level": i % 3, "people": ["A", "B"]}) for i in range(10)
            ],
            "heldout": [Example(f"h{i}", str(i), {"id": f"h{i}", "level": 1}) for i in range(4)],
        }

    def score(self, example, completion):
        raise AssertionError("the caller of `draw` scores")


def encode(examples):
    return [[2 + ord(c) % 30 for c in example.prompt] for example in examples]


def draw(examples, samples, seed):
    """Random completions of 2 to 4 tokens, as `Drawn`."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [ids for ids in encode(examples) for _ in range(samples)]
    rows, width, longest = len(prompts), max(map(len, prompts)), 4
    ids, attention = (
        torch.zeros(rows, width + longest, dtype=torch.long),
        torch.zeros(rows, width + longest, dtype=torch.long),
    )
    mask = torch.zeros(rows, longest, dtype=torch.long)
    lengths = torch.randint(2, longest + 1, (rows,), generator=generator)
    tokens = torch.randint(2, 37, (rows, longest), generator=generator)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) : width] = torch.tensor(prompt)
        ids[row, width : width + lengths[row]] = tokens[row, : lengths[row]]
        attention[row, width - len(prompt) : width + lengths[row]] = 1
        mask[row, : lengths[row]] = 1
    correct = (tokens[:, 0] % 2 == 0).float()
    rollouts = SimpleNamespace(
        input_ids=ids,
        attention_mask=attention,
        completion_ids=ids[:, width:],
        completion_mask=mask,
        behavior_logp=torch.zeros(rows, longest),
        group=torch.arange(len(examples)).repeat_interleave(samples),
        truncated=lengths == longest,
        reward=correct * 3 - 1,
    )
    return Drawn(rollouts, correct)


def built(**rest):
    return build_probe_set(
        Toy(), draw, encode, **{"policy": "embedded:toy", "seed": 5, "train": 6, "heldout": 3, "tries": 4} | rest
    )


def test_the_same_key_gives_the_same_set_and_another_seed_another():
    one, two = built(), built()
    assert one == two and one.content_hash == two.content_hash
    assert built(seed=6).content_hash != one.content_hash and built(policy="other").content_hash != one.content_hash
    assert [len(one.split(s)) for s in one.splits] == [6, 3]
    assert one.name("heldout") == f"toy/heldout@{one.content_hash}"


def test_solutions_are_correct_whole_and_scored():
    found = built()
    solved = [item for item in found.items if item.solution]
    assert solved and all(item.solution[0] % 2 == 0 and 2 <= len(item.solution) < 4 for item in solved)
    batch = found.solutions("train")
    rows = [item for item in found.split("train") if item.solution]
    assert len(batch) == len(rows)
    for row, item in enumerate(rows):
        length = int(batch.lengths[row])
        assert batch.input_ids[row, :length].tolist() == [*item.prompt_ids, *item.solution]
        assert int(batch.scored[row].sum()) == len(item.solution) and not bool(
            batch.scored[row, : len(item.prompt_ids)].any()
        )


def test_a_file_comes_back_equal_and_a_changed_one_is_refused(tmp_path):
    found = built()
    path = found.save(tmp_path / "deep" / "set.parquet")
    back = ProbeSet.load(path)
    assert back.content_hash == found.content_hash and back.splits == found.splits
    assert (
        back.items[0].prompt_ids == found.items[0].prompt_ids
        and back.items[0].example.prompt == found.items[0].example.prompt
    )
    assert dict(back.items[0].example.meta) == dict(found.items[0].example.meta)
    assert list(tmp_path.rglob("*.tmp")) == []
    frame = pd.read_parquet(path)
    assert list(frame.columns) == ["split", "prompt", "answer", "meta", "prompt_ids", "solution"]
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    changed = table.set_column(1, "prompt", table.column("prompt").cast("string").take(list(range(8, -1, -1))))
    pq.write_table(changed.replace_schema_metadata(table.schema.metadata), path)
    with pytest.raises(UserError, match="changed or damaged"):
        ProbeSet.load(path)
    (tmp_path / "no.parquet").write_bytes(b"nothing")
    with pytest.raises(UserError, match="cannot be read"):
        ProbeSet.load(tmp_path / "no.parquet")
    with pytest.raises(UserError, match="cannot be read"):
        ProbeSet.load(tmp_path / "missing.parquet")


def test_a_round_of_probes_fills_the_tables_columns_and_leaves_the_model_alone():
    model = tiny_model("qwen2", dtype=torch.float32, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(input_ids=torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss.backward()
    optimizer.step()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    grads = {name: p.grad for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    spec = ProbesSpec(
        preset="cheap",
        functionals=("nll", "expected_failure"),
        groups=True,
        preconditioned=True,
        gauss_newton=True,
        slices=True,
        m=2,
        rhos=(0.05, 0.2),
        kinds=("sam", "average"),
        average_samples=2,
        trace_probes=4,
        density_samples=2,
        density_steps=4,
        max_products=12,
    )
    found = built()
    parts = {
        name: measure(model, objective, spec, probe_set=found.name("train"), optimizer=optimizer, seed=1)
        for name, objective in probe_set_objectives(found, "train", spec, draw).items()
    }
    assert set(parts) == {"nll", "expected_failure"}
    for name, part in parts.items():
        quantities = {e.quantity for e in part.estimates}
        assert quantities >= {
            "largest",
            "smallest",
            "trace",
            "density",
            "gradient_norm",
            "sam",
            "sam_first_order",
            "sam_ratio",
            "average",
            "m2_sam",
            "preconditioned_largest",
            "gauss_newton_trace",
            "slice_gradient",
            "slice_random_0",
        }
        assert {e.parameters for e in part.estimates} == {"all", "embedding", "attention", "mlp", "norm"}
        assert {e.functional for e in part.estimates} == {name} and {e.probe_set for e in part.estimates} == {
            found.name("train")
        }
        assert problems(part.estimates) == part.problems
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before[n]) and p.grad is grads[n] for n, p in model.named_parameters())
    table = columns(parts["nll"].estimates)
    frame = pd.DataFrame(table).assign(step=3)
    assert not frame.duplicated(
        ["step", "probe", "probe_set", "functional", "parameters", "quantity", "rho", "seed"]
    ).any()
    check_rows(frame, spec)
    again = measure(
        model, next(iter(probe_set_objectives(found, "train", spec, draw).values())), spec, optimizer=optimizer, seed=1
    )
    values = [(e.quantity, e.value) for e in parts["nll"].estimates]
    assert values == [(e.quantity, e.value) for e in again.estimates]  # the same seed, the same numbers


def check_rows(frame, spec):
    """Every kind of row at every radius, its ratio, the density's mass, and slices that pass through L(θ)."""
    for name in ("value", "rho"):
        frame[name] = frame[name].astype(float)
    assert frame.loc[frame["quantity"] == "density", "value"].sum() == pytest.approx(1)
    for kind in ("sam", "average", "m2_sam"):
        value, first = (
            frame[frame["quantity"] == kind + end].set_index("rho")["value"] for end in ("", "_first_order")
        )
        assert list(value.index) == list(spec.rhos)
        if kind != "m2_sam":
            ratio = frame[frame["quantity"] == f"{kind}_ratio"].set_index("rho")["value"]
            np.testing.assert_allclose(value / first, ratio)
    slices = frame[frame["probe"] == "slice"]
    assert slices.groupby("quantity").size().eq(11).all()
    assert slices.loc[slices["rho"] == 0, "value"].nunique() == 1
    uphill = slices[slices["quantity"] == "slice_gradient"].sort_values("rho")["value"].to_numpy()
    assert uphill[6] > uphill[5] > uphill[4]


def test_surrogate_advantage_is_normalised_within_prompts():
    drawn = draw(Toy().splits()["train"][:3], 4, 0)
    objective = rollout_objective("surrogate", drawn)
    success = drawn.correct.double().view(3, 4)
    spread = success.std(1, keepdim=True)
    expected = torch.where(spread > 0, (success - success.mean(1, keepdim=True)) / (spread + 1e-4), 0.0).flatten()
    scored = objective.batch.scored
    torch.testing.assert_close(objective.batch.advantage, scored * expected[:, None])


def test_presets_give_way_to_what_is_set_and_budgets_thin_to_multiples():
    assert ProbesSpec(preset="off").every == 0 and ProbesSpec(preset="cheap").rhos == (0.05,)
    light = ProbesSpec()
    assert light.preset == "light" and light.every is None and not light.curvature and light.critical_sharpness
    assert [light.interval(steps) for steps in (1, 7, 9, 10, 100, 400)] == [1, 1, 1, 2, 12, 45]
    spec = ProbesSpec(preset="full", top=2, every=10)
    assert (spec.top, spec.every, spec.slices) == (2, 10, True)
    assert ProbesSpec.model_validate(spec.model_dump()) == spec  # a resolved configuration says the same again
    costs = [ProbesSpec(preset=name).cost() for name in ("cheap", "standard", "full")]
    assert costs == sorted(costs) and costs[0] < costs[1] < costs[2]
    assert ProbesSpec(preset="cheap", every=50, budget=1.0).interval(200, 120.0) == 150
    assert ProbesSpec(preset="cheap", every=50, budget=100.0).interval(200, 120.0) == 50
    assert ProbesSpec(preset="cheap", every=50).interval(200, 1e9) == 50
    assert ProbesSpec(preset="off").interval(200, 5.0) == 0
    for wrong in ({"rhos": (0.2, 0.1)}, {"rhos": ()}, {"trace_probes": 1}, {"preset": "cheapest"}, {"unknown": 1}):
        with pytest.raises(ValidationError):
            ProbesSpec(**wrong)
    for off in ({"every": 25, "preset": "off"}, {"every": 25, "preset": False}):
        with pytest.raises(ValidationError, match="preset off probes nothing"):
            ProbesSpec(**off)


def test_costs_are_measured():
    model = tiny_model("qwen2", dtype=torch.float32)
    objective = probe_set_objectives(built(), "train", ProbesSpec(preset="cheap"), draw)["nll"]
    found = measured_cost(model, objective, ProbesSpec(preset="cheap"))
    assert set(found) == {"product_s", "gradient_s", "value_s"} and all(seconds > 0 for seconds in found.values())

"""Rows of steps: statistics of weights by the gradient that tokens carry."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sharpscope
from sharpscope.config.run import OptimizerSpec
from sharpscope.policy import load_policy
from sharpscope.policy.sharding import ModelView
from sharpscope.recording import norms as norms_module
from sharpscope.recording.norms import gradient_norms, layer_groups, update_norms
from sharpscope.recording.probe_sets import (
    Drawer,
    SurfaceProbes,
    affordable_prompts,
    run_probe_set,
)
from sharpscope.recording.rows import steps_row, unweighted_gradient
from sharpscope.recording.schedule import Timetable
from sharpscope.recording.step import StepTokens
from sharpscope.surface import Objective, limited_surface
from sharpscope.surface.operators import unflatten
from sharpscope.surface.surface import moved
from sharpscope.tasks import make_task
from sharpscope.training import train
from sharpscope.training.learner import build_optimizer
from tests.loops import some
from tests.models import tiny_model
from tests.training.test_learner import learn, learner_of, method_of, world  # noqa: F401 - a fixture


def tokens_of(coef, weight, advantage=1.0, ratio=1.0) -> StepTokens:
    """Tokens with these values (N, T) and ‖p − e_y‖ of 1, 2, 3, …"""
    from sharpscope.policy.token_stats import STAT_NAMES, TokenStats

    shape = coef.shape
    norms = torch.arange(1.0, coef.numel() + 1, dtype=torch.float64).view(shape)
    tokens = StepTokens.unused(TokenStats(**dict.fromkeys(STAT_NAMES, norms)))
    tokens.loss_coef, tokens.weight = coef, weight
    tokens.advantage, tokens.ratio = (
        torch.full(shape, advantage).double(),
        torch.full(shape, ratio).double(),
    )
    return tokens


def test_the_gradient_carried_is_the_coefficient_without_the_weight():
    """c = −w·A·r/n with completions of 3 and 2 tokens, of which the second of each has weight 0."""
    weight = torch.tensor([[1.0, 0.0, 1.4], [0.5, 0.0, 9.0]], dtype=torch.float64)
    used = torch.tensor([[True, True, True], [True, True, False]])
    # |A|·r/n with A = −2, r = 1
    plain = torch.tensor([[2 / 3] * 3, [1.0] * 3], dtype=torch.float64)
    tokens = tokens_of(plain * weight, weight, advantage=-2.0)
    torch.testing.assert_close(unweighted_gradient(tokens, used), torch.where(used, plain, 0.0))
    # without a gradient at any weight
    tokens.clipped = torch.tensor([[0, 1, 0], [0, 0, 0]], dtype=torch.int8)
    plain[0, 1] = 0.0
    torch.testing.assert_close(unweighted_gradient(tokens, used), torch.where(used, plain, 0.0))
    nothing = tokens_of(torch.zeros(1, 2).double(), torch.ones(1, 2).double(), advantage=0.0)
    assert not unweighted_gradient(nothing, torch.ones(1, 2, dtype=torch.bool)).any()


def test_weight_statistics_count_tokens_by_the_gradient_they_carry(world):  # noqa: F811
    policy, drawn = world
    method = method_of("grpo-sg")
    learned = learn(learner_of(policy, mini_batches=2), drawn, "grpo-sg")
    tokens, mask = learned.tokens, drawn.rollouts.completion_mask.bool()
    row = steps_row(1, drawn, learned, method, 0.0, 1e-3)
    w, coef, norm = (
        x[mask].double().numpy()
        for x in (tokens.weight, tokens.loss_coef, tokens.stats.logit_grad_norm)
    )
    mass = np.abs(coef) / w * norm
    for name, part in {
        "mean": w,
        "saturation_low": w <= 0.1 + 1e-6,
        "saturation_high": w >= 1.4 - 1e-6,
    }.items():
        expected = (mass * part).sum() / mass.sum()
        assert row[f"weight_{name}_gradient"] == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert abs(row["weight_mean_gradient"] - row["weight_mean"]) > 1e-3
    assert row["gradient_rotation"] is None


# -- Completions for probes: draws from softmax(z/T) of the policy itself, whatever the run samples with


def drawn(config):
    policy, task = load_policy(config.policy), make_task(config.task)
    return Drawer(config, policy, task)(task.splits()["train"][:3], 5, seed=7).rollouts


def same(one, other) -> bool:
    return torch.equal(one.input_ids, other.input_ids) and torch.equal(
        one.behavior_logp, other.behavior_logp
    )


def test_probes_draw_from_the_whole_distribution_of_the_policy_itself(toy_config):
    plain, found = (
        drawn(toy_config(rollout__temperature=1.0)),
        drawn(toy_config(rollout__top_p=1e-6)),
    )
    assert same(found, plain) and found.sampler_logp is None
    # top_p = 1e-6 would draw one text
    assert len({tuple(row) for row in plain.completion_ids[:5].tolist()}) > 1
    assert not same(drawn(toy_config(rollout__temperature=0.7)), plain)


# -- Probes of the loss surface in a run: what is recorded, the radius of the run, and an event for what is not reliable

SMALL = {
    "probes__preset": "light",
    "probes__every": 2,
    "probes__prompts": 3,
    "probes__heldout_prompts": 2,
    "probes__curvature_prompts": 3,
    "evaluation__every": 0,
    "recording__token_gradients_every": 0,
    "recording__heldout_influence_every": 0,
    "steps": 2,
}


def probes_of(config):
    task, policy = make_task(config.task), load_policy(config.policy)
    optimizer = torch.optim.AdamW(policy.model.parameters())
    view = ModelView(policy.model, list(policy.model.parameters()), optimizer)
    probes = SurfaceProbes(
        config,
        lambda: view,
        Drawer(config, policy, task),
        Timetable(name="surface", every=config.probes.every),
    )
    return probes, run_probe_set(config, task), policy.model


def test_the_radius_of_a_run_is_found_once_and_kept(toy_config):
    config = toy_config(
        **SMALL, probes__functionals=["expected_failure"], probes__kinds=["sam"], probes__samples=4
    )
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "run.json").write_text('{"status": "running", "schema_version": 3}')
    probes, probe_set, _ = probes_of(config)
    (few,) = probes.start(probe_set, {})  # it says on how few prompts
    assert (few.severity, few.value) == ("info", 3) and "the probe set has 3" in few.message
    tables, _ = probes.rows(0)
    rows = dict(zip(tables["probes"]["quantity"], tables["probes"]["value"], strict=True))
    kept = json.loads((config.run_dir / "run.json").read_text())["probe_radius"]
    if probes.radius is None:  # no completion of this draw is correct
        assert rows["radius"] is None
        pytest.skip("the tiny policy drew no correct completion")
    assert kept["rho"] == probes.radius.rho == rows["radius"] and 0.05 <= kept["saturation"] <= 0.3
    again, probe_set, _ = probes_of(config)  # as a resumed run
    again.start(probe_set, {"probe_radius": kept})
    tables, _ = again.rows(2)
    assert "radius" not in tables["probes"]["quantity"] and again.radius == probes.radius
    used = dict(zip(tables["probes"]["quantity"], tables["probes"]["rho"], strict=True))
    assert used["sam"] == probes.radius.rho


@pytest.mark.parametrize("broken", [False, True])
def test_every_estimate_that_is_not_to_be_believed_has_its_event(toy_config, broken, monkeypatch):
    monkeypatch.setattr("sharpscope.surface.runner.MAX_PRODUCTS", 4)
    config = toy_config(**SMALL, probes__functionals=["expected_failure"], probes__rho=1e-4)
    probes, probes.probe_set, model = probes_of(config)
    if broken:
        with torch.no_grad():
            next(p for name, p in model.named_parameters() if "down_proj" in name)[0, 0] = math.nan
    tables, events = probes.rows(2)
    rows = tables["probes"]
    named = zip(rows["quantity"], rows["value"], rows["converged"], strict=True)
    bad = [quantity for quantity, value, converged in named if converged is False or value is None]
    assert "largest" in bad and (not broken or {"gradient_norm", "sam"} <= set(bad))
    assert len(events) == len(bad) and all(
        event.rule == "probe" and event.step == 2 for event in events
    )
    for quantity, event in zip(bad, events, strict=True):
        assert f" {quantity}" in event.message and event.message.split(": ", 1)[1]


def test_along_an_update_the_nll_of_solutions_has_its_curvature_and_critical_sharpness(toy_config):
    """Along the gradient of that nll itself, from products and a line search of the same surface."""
    config = toy_config(**SMALL, policy__dtype="float64")
    probes, probes.probe_set, model = probes_of(config)
    parameters = [p for p in model.parameters() if p.requires_grad]
    nll = Objective("nll", probes.probe_set.solutions("train"))
    with limited_surface(model, nll, probes.spec) as surface:
        _, slope = surface.gradient()
        curved = float(slope @ (surface.hessian() @ slope)) / float(slope @ slope)
    direction = [
        part.view_as(p) for part, p in zip(unflatten(slope, parameters), parameters, strict=True)
    ]
    rows = {row.quantity: row for row in probes.along_update(model, direction, guess=1.0)}
    assert rows["along_update"].value == pytest.approx(curved, rel=1e-6)
    assert rows["along_update"].prompts == len(nll.prompt_weight)
    found = rows["relative_critical_sharpness"]
    assert found.converged and found.prompts == len(nll.prompt_weight)
    assert found.low < found.value < found.high
    with limited_surface(model, nll, probes.spec) as surface:
        start, step = surface.value(), slope * (2 / found.value)
        with moved(surface.parameters, -step * 0.8):
            assert surface.value() < start
        with moved(surface.parameters, -step * 1.25):
            assert surface.value() > start
    uphill = probes.along_update(model, [-part for part in direction], guess=1.0)[0]
    assert uphill.quantity == "relative_critical_sharpness" and math.isnan(uphill.value)
    assert f"slope Δᵀg = {-float(slope @ slope):.2g} is not positive" in uphill.why
    assert uphill.samples == 0  # no search


@pytest.mark.parametrize(
    ("steps", "every", "prompts"), [(1, None, 24), (10_000, None, 200), (1, 1, 200)]
)
def test_prompts_of_the_default_points_are_as_many_as_their_price_allows(
    toy_config, steps, every, prompts
):
    config = toy_config(steps=steps, probes__preset="light", probes__every=every)
    assert affordable_prompts(config) == prompts


def test_without_solutions_the_expected_failure_is_probed(toy_config):
    """No completion of the policy ends by itself within four tokens, so none is a solution."""
    config = toy_config(
        **SMALL, probes__rho=0.05, rollout__max_new_tokens=4, probes__critical_sharpness=False
    )
    train(config)
    run = sharpscope.load_run(config.run_dir)
    assert set(run.probes["functional"]) == {"expected_failure"} and set(run.probes["step"]) == {
        0,
        2,
    }
    assert "info" in set(run.events.loc[run.events["step"] == 0, "severity"])


# -- Norms of gradients and of AdamW's steps, against the parameters themselves


KINDS = {"norm": "norm", "attn": "attention", "mlp": "mlp", "embed": "embedding", "lm_": "head"}


@pytest.mark.parametrize(("tie", "decay"), [(False, 0.3), (True, 0.3), (True, 0.0)])
def test_norms_by_layer_are_those_of_the_parameters_of_each_name(tie, decay):
    """Against a loop over names, in three steps; the squares sum to the total. A shared embedding counts once."""
    model = tiny_model("qwen2", tie=tie)
    optimizer, groups = (
        build_optimizer(model, OptimizerSpec(lr=0.01, weight_decay=decay)),
        layer_groups(model),
    )
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn(
                parameter.shape, generator=generator, dtype=parameter.dtype
            )
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        gradient = gradient_norms(model.parameters(), groups)
        optimizer.step()
        moved = update_norms(optimizer, groups)
        expected: dict[str, list[float]] = {}
        for name, p in some(model.named_parameters()):
            kind = next(kind for word, kind in KINDS.items() if word in name)
            group = f"{name.split('.')[2]}.{kind}" if ".layers." in name else kind
            squares = expected.setdefault(group, [0.0, 0.0])
            assert p.grad is not None
            squares[0] += float(p.grad.square().sum())
            squares[1] += float((p.detach() - before[name]).square().sum())
        assert gradient.layers == pytest.approx(
            {group: math.sqrt(s) for group, (s, _) in expected.items()}, rel=1e-9
        )
        assert moved.layers == pytest.approx(
            {group: math.sqrt(s) for group, (_, s) in expected.items()}, rel=1e-6
        )
        assert gradient.total == pytest.approx(math.hypot(*gradient.layers.values()), rel=1e-12)
        assert (
            update_norms(optimizer, {}).total
            == moved.total
            == pytest.approx(math.hypot(*moved.layers.values()), rel=1e-12)
        )


def test_parts_that_several_processes_hold_count_once(monkeypatch):
    """Four processes, of which pairs hold the same half of a matrix (HSDP): its norm is that of the whole matrix."""
    whole = torch.arange(1.0, 9.0, dtype=torch.float64).reshape(4, 2)
    halves = [whole[:2], whole[2:]]

    class Part:
        """This process's half, which one other process holds too."""

        device_mesh = SimpleNamespace(size=lambda axis: (2, 2)[axis])
        placements = (
            SimpleNamespace(is_replicate=lambda: True),
            SimpleNamespace(is_replicate=lambda: False),
        )

        def to_local(self) -> torch.Tensor:
            return halves[0]

    def gathered(own: list[float]) -> list[list[float]]:
        squares = [float(half.square().sum()) / 2 for half in halves]
        assert own == [squares[0]]
        return [[square] for square in (squares[0], squares[1], squares[0], squares[1])]

    monkeypatch.setattr(norms_module.distributed, "gather", gathered)
    found = norms_module.squares([Part(), None, torch.full((3,), 2.0)])
    assert found == pytest.approx([float(whole.square().sum()), 0.0, 12.0], rel=1e-12)

"""Rotation of gradients and updates, against gradients and AdamW steps made by plain loops in float64."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

import sharpscope
from sharpscope.config.method import GroupAdvantage
from sharpscope.objective import Method, estimate_advantages, named_method, reference_method
from sharpscope.recording.health import rotation_event
from sharpscope.recording.norms import clip_factor
from sharpscope.training import train
from tests.models import keep_double_precision
from tests.training.test_learner import learn, learner_of, method_of, world  # noqa: F401 - a fixture

LOPTI = named_method("lopti").model_copy(update={"name": "two passes", "passes": 0.01})


def plain_gradient(model, rollouts, rows, counted, advantage, old_logp, reference) -> np.ndarray:
    """∇ of the clipped surrogate with all weights 1, over the rows `rows` of which only `counted` contribute."""
    parameters = list(model.parameters())
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    tokens = sum(int(rollouts.lengths[row]) for row in rows)
    low, high = reference.clip.low, reference.clip.high  # no ratio comes near the bound of a dual clip
    for row in counted:
        length, first = int(rollouts.lengths[row]), int(rollouts.prompt_lengths[row])
        ids = rollouts.input_ids[row][rollouts.attention_mask[row].bool()][None]
        logp = torch.log_softmax(model(input_ids=ids).logits[0], -1)
        loss = torch.zeros((), dtype=torch.float64)
        for place in range(length):
            ratio = (logp[first + place - 1, ids[0, first + place]] - old_logp[row, place]).exp()
            share = 1 / tokens if reference.aggregate == "token_mean" else 1 / (len(rows) * length)
            a = float(advantage[row])
            loss = loss - share * torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
        gradient = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        total += torch.cat([g.flatten() for g in gradient])
    return total.numpy()


def plain_step(model, optimizer, gradient: np.ndarray, limit: float | None) -> np.ndarray:
    """Δθ of AdamW in the state of `optimizer`, by making the step on a copy."""
    copied = copy.deepcopy(model)
    before = flat(copied)
    groups, members = [], dict(zip(model.parameters(), copied.parameters(), strict=True))
    for group in optimizer.param_groups:
        groups.append({**group, "params": [members[p] for p in group["params"]]})
    other = torch.optim.AdamW(groups)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    factor = 1.0 if limit is None else min(1.0, limit / (np.linalg.norm(gradient) + 1e-6))
    parts = torch.from_numpy(gradient * factor).split([p.numel() for p in copied.parameters()])
    for parameter, part in zip(copied.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter)
    other.step()
    return flat(copied) - before


def flat(model) -> np.ndarray:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().copy()


def compared(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Angle [degrees] and ratio of lengths; a zero vector has no angle."""
    lengths = np.linalg.norm(a), np.linalg.norm(b)
    if lengths[0] == 0:
        return math.nan, 0.0
    return math.degrees(math.acos(np.clip(a @ b / (lengths[0] * lengths[1]), -1, 1))), lengths[0] / lengths[1]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("grpo-sg", {}),
        ("grpo-sg", {"mini_batches": 2, "inner_epochs": 2, "microbatch_tokens": 64, "max_grad_norm": 0.05}),
        ("cov-grpo", {"share_prompt": False, "microbatch_tokens": 64}),
        ("high-entropy", {"inner_epochs": 2}),
        ("dapo", {"mini_batches": 2, "inner_epochs": 2}),
        ("dapo", {"mini_batches": 3}),
        ("gspo", {"inner_epochs": 3}),
        ("lopti", {}),  # every token is in the first pass: the second has no gradient
        (LOPTI, {"inner_epochs": 2}),
        ("grpo-sam", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name if isinstance(value, Method) else "-".join(value),
)
def test_rotations_are_those_of_explicit_vectors(world, name, changes):  # noqa: F811
    policy, drawn = world
    keep_double_precision(policy.model)
    learner, model, rollouts = learner_of(policy, **changes), policy.model, drawn.rollouts
    rows_of, wanted, old = [], [], policy_logp(policy, drawn)
    plain = reference_method(method_of(name))

    def before(*_):
        rows = rows_of[-1][0].tolist()
        own = torch.cat([p.grad.flatten() for p in model.parameters()]).numpy() / rows_of[-1][1]  # unclipped
        groups = sorted({int(rollouts.group[row]) for row in rows})
        inside = [[r for r in rows if int(rollouts.group[r]) in half] for half in (groups[::2], groups[1::2])]
        halves = [plain_gradient(model, rollouts, rows, half, drawn.advantage, old, plain) for half in inside]
        reference = sum(halves)
        share = len(groups[::2]) / len(groups)
        noise = math.nan
        if len(groups) > 1:
            squared = max(halves[0] @ halves[1], 0.0) / (share * (1 - share) * (reference @ reference))
            noise = math.degrees(math.acos(math.sqrt(min(squared, 1.0))))
        steps = [plain_step(model, learner.optimizer, g, learner.max_grad_norm) for g in (own, reference)]
        wanted.append((*compared(own, reference), *compared(*steps), noise))

    learner.optimizer.register_step_pre_hook(before)
    learned = learn(
        learner,
        drawn,
        name,
        before_step=lambda update: rows_of.append((update.rows, clip_factor(update.grad_norm, learner.max_grad_norm))),
        rotations=True,
    )
    assert len(learned.updates) == len(wanted) > 0
    for update, (angle, scale, step_angle, step_scale, noise) in zip(learned.updates, wanted, strict=True):
        found = update.rotation
        assert found.gradient.angle == pytest.approx(angle, abs=1e-5, nan_ok=True)
        assert found.gradient.scale == pytest.approx(scale, rel=1e-7)
        assert found.update.angle == pytest.approx(step_angle, abs=1e-3)
        assert found.update.scale == pytest.approx(step_scale, rel=1e-5)
        assert found.noise == pytest.approx(noise, abs=1e-4, nan_ok=True)
    turned = {"dapo": 1.0, "high-entropy": 1.0, "grpo-sam": 1e-3, "grpo-sg": 0.1, "cov-grpo": 0.1, LOPTI: 1.0}
    assert np.nanmax([u.rotation.gradient.angle for u in learned.updates]) >= turned.get(name, 0.0)
    if name == "gspo":  # ratio 1 at the first update
        assert learned.updates[0].rotation.gradient.angle < 1e-4


def policy_logp(policy, drawn) -> torch.Tensor:
    return learner_of(policy).scorer.statistics(drawn.rollouts).logp


@pytest.mark.parametrize("name", ["grpo-sg", "lopti", "grpo-gnp"])
def test_measuring_changes_nothing(world, name):  # noqa: F811
    policy, drawn = world
    first = flat(policy.model)
    results = []
    for rotations in (False, True):
        learned = learn(learner_of(policy, inner_epochs=2, microbatch_tokens=64), drawn, name, rotations=rotations)
        results.append((flat(policy.model), [u.grad_norm for u in learned.updates], learned.tokens.loss_coef))
        assert all((u.rotation is not None) is rotations for u in learned.updates)
        torch.nn.utils.vector_to_parameters(torch.from_numpy(first), policy.model.parameters())
    assert np.array_equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]
    assert torch.equal(results[0][2], results[1][2])


def test_a_reward_that_is_not_finite_leaves_its_group_out_of_the_reference(world):  # noqa: F811
    policy, drawn = world
    drawn.rollouts.reward[1] = math.nan
    drawn.advantage[:] = 0.0
    fine = drawn.rollouts.group != drawn.rollouts.group[1]
    given = (drawn.rollouts.reward[fine].double(), drawn.rollouts.group[fine], drawn.rollouts.completion_mask[fine])
    drawn.advantage[fine] = estimate_advantages(GroupAdvantage(), *given)
    learned = learn(learner_of(policy), drawn, "gspo", rotations=True)  # its reference has advantages of its own
    assert learned.updates[0].rotation.gradient.angle < 1e-3


def test_a_run_records_rotations_on_schedule_and_says_once_how_close_the_bound_is(toy_config):
    config = toy_config(
        method="grpo-sg",
        method__weight__preset="calibrated",
        steps=5,
        recording__rotation_every=2,
        recording__token_gradients_every=4,
        evaluation__every=0,
        update__mini_batches=2,
    )
    train(config)
    run = sharpscope.load_run(config.run_dir)
    steps = run.steps.set_index("step")
    for name in ("gradient_rotation", "gradient_scale", "update_rotation", "update_scale", "noise_rotation"):
        assert steps.index[steps[name].notna()].tolist() == [1, 2, 4]
    assert (steps["gradient_rotation"].dropna() > 0.1).all() and steps["gradient_scale"].dropna().between(1, 1.4).all()
    assert steps["weight_mean_gradient"].notna().all()
    measured = run.updates.dropna(subset="gradient_rotation")
    assert measured[["step", "update"]].to_numpy().tolist() == [[s, u] for s in (1, 2, 4) for u in (0, 1)]
    means = measured.groupby("step")[["gradient_rotation", "update_scale"]].mean()
    np.testing.assert_allclose(means, steps.loc[[1, 2, 4], means.columns], rtol=1e-12)
    (event,) = run.events.query("rule == 'rotation'").to_dict("records")
    assert event["step"] == 1 and event["severity"] == "info" and event["threshold"] == pytest.approx(9.594, abs=1e-3)
    assert event["value"] == steps.loc[1, "gradient_rotation"]
    assert f"{event['value'] / event['threshold']:.0%}" in event["message"] and "[1, 1.4]" in event["message"]


def test_the_event_has_a_bound_for_weights_alone_and_plain_grpo_has_no_event():
    row = {"gradient_rotation": 3.0, "update_rotation": None, "noise_rotation": None}
    assert rotation_event(1, row, method_of("grpo"), 0.0) is None
    assert rotation_event(1, row | {"gradient_rotation": None}, method_of("dapo"), 0.0) is None
    assert math.isnan(rotation_event(1, row, method_of("dapo"), 0.0).threshold)
    assert math.isnan(rotation_event(1, row, method_of("ar-lopti"), 0.0).threshold)  # the first pass is a mask
    assert math.isnan(rotation_event(1, row, method_of("cov-grpo"), 0.0).threshold)
    assert rotation_event(1, row, method_of("ar"), 0.0).threshold == pytest.approx(6.379, abs=1e-3)

"""A step's gradient: whatever the microbatches and whoever shares prompts; against a loop over tokens."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import sharpscope
from sharpscope import distributed
from sharpscope.config.run import OptimizerSpec
from sharpscope.errors import UserError
from sharpscope.methods import Method, named_method
from sharpscope.methods.loss import MethodState, policy_loss
from sharpscope.methods.method import AveragedProximal, Kl, Sharpness, TruncatedCorrection
from sharpscope.policy import load_policy
from sharpscope.policy.forward import Scorer
from sharpscope.recording.rows import update_columns
from sharpscope.recording.step import PendingUpdate
from sharpscope.tasks import make_task
from sharpscope.training import updates as updates_module
from sharpscope.training.learner import Learner, build_optimizer, set_learning_rate
from sharpscope.training.rollouts import DataOrder, draw_rollouts
from tests.launched import run_ranks
from tests.loops import some


@pytest.fixture
def world(toy_config):
    """(policy in float64, its first round of rollouts)."""
    config = toy_config(policy__dtype="float64")
    policy, task = load_policy(config.policy), make_task(config.task)
    order = DataOrder(task.splits()["train"], 0)
    return policy, draw_rollouts(policy, task, order, config.method, config.rollout, seed=0, step=1)


def method_of(name) -> Method:
    """A method by name; its sigmoid weight with constants that do not saturate here, as the published ones would."""
    value = named_method(name) if isinstance(name, str) else name
    if value.weight.kind == "sigmoid":
        weight = value.weight.model_copy(
            update={
                "preset": "paper",
                "tau": 2.0,
                "alpha": 2.0,
                "mu": 0.1,
                "L": 0.1,
                "U": 1.4,
                "u0": 0.0,
            }
        )
        value = value.model_copy(update={"weight": weight})
    return value


def learner_of(
    policy, *, lr=1e-3, microbatch_tokens=10_000, share_prompt=True, **changes
) -> Learner:
    settings = {
        "max_new_tokens": 8,
        "mini_batches": 1,
        "inner_epochs": 1,
        "max_grad_norm": None,
        "seed": 0,
    }
    scorer = Scorer(policy.model, 1.0, microbatch_tokens, share_prompt)
    optimizer = build_optimizer(policy.model, OptimizerSpec(lr=max(lr, 1e-9)))
    set_learning_rate(optimizer, lr)
    return Learner(scorer, optimizer, **(settings | changes))


def learn(observed: Learner, drawn, method="grpo", **callbacks):
    return observed.learn(
        drawn.rollouts, drawn.advantage, 1, 0.0, method=method_of(method), **callbacks
    )


def gradient(policy, drawn, method="grpo", **changes):
    """(flat gradient of each update as the optimizer gets it, result of the step); the policy is put back."""
    before, found = copy.deepcopy(policy.model.state_dict()), []
    observed = learner_of(policy, **changes)
    observed.optimizer.register_step_pre_hook(
        lambda *_: found.append(torch.cat([p.grad.flatten().clone() for p in observed.parameters]))
    )
    learned = learn(observed, drawn, method)
    policy.model.load_state_dict(before)
    return found, learned


NEW = [
    "wapo",
    "delight",
    "stare",
    "rsi-s",
    "pepo",
    "tp-schedule",
    "forking-schedule",
    "entropy-schedule",
    "capo",
]
"""Methods of 2026 whose update depends on its tokens; `aggc` is tested by itself."""


def warmed(observed: Learner, seed=0) -> Learner:
    """With moments in the optimizer, as after one update."""
    g, model = torch.Generator().manual_seed(seed), observed.scorer.model
    kept = copy.deepcopy(model.state_dict())
    for parameter in observed.parameters:
        parameter.grad = 1e-3 * torch.randn(parameter.shape, generator=g, dtype=parameter.dtype)
    observed.optimizer.step()
    observed.optimizer.zero_grad()
    model.load_state_dict(kept)
    return observed


@pytest.mark.parametrize(
    "method", ["grpo", "grpo-sg", "tr-grpo", "dapo", "gspo", "cov-grpo", "high-entropy", *NEW]
)
def test_gradient_does_not_depend_on_microbatches_or_shared_prompts(world, method):
    policy, drawn = world
    reference, learned = gradient(policy, drawn, method)
    for changes in (
        {"microbatch_tokens": 64},
        {"share_prompt": False},
        {"share_prompt": False, "microbatch_tokens": 64},
    ):
        other, again = gradient(policy, drawn, method, **changes)
        torch.testing.assert_close(
            other[0], reference[0], rtol=1e-4, atol=1e-6 * float(reference[0].abs().max())
        )
        assert again.updates[0].loss == pytest.approx(learned.updates[0].loss, abs=1e-6)
        torch.testing.assert_close(
            again.tokens.loss_coef, learned.tokens.loss_coef, rtol=1e-5, atol=1e-7
        )


def test_gradient_is_the_sum_of_loss_coef_times_score(world):
    """∇L = Σ_t c_t ∇log π_t, by a loop over tokens without any of the training's machinery."""
    policy, drawn = world
    found, learned = gradient(policy, drawn, "grpo-sg")
    rollouts, model = drawn.rollouts, policy.model
    total = torch.zeros_like(found[0])
    for row in range(len(rollouts)):
        keep = rollouts.attention_mask[row].bool()
        ids = rollouts.input_ids[row][keep][None]
        first = int(rollouts.prompt_lengths[row])
        logp = torch.log_softmax(model(input_ids=ids).logits[0], dim=-1)
        for place in range(int(rollouts.lengths[row])):
            score = torch.autograd.grad(
                logp[first + place - 1, ids[0, first + place]],
                list(model.parameters()),
                retain_graph=True,
            )
            total += float(learned.tokens.loss_coef[row, place]) * torch.cat(
                [g.flatten() for g in score]
            )
    torch.testing.assert_close(found[0], total, rtol=1e-4, atol=1e-6 * float(total.abs().max()))


def test_weights_by_effect_are_those_of_the_update_that_is_weighted(world):
    """Against `sharpscope.effects` on the step's rows with GRPO's own coefficients; what raises KL weighs less, the mass stays."""
    policy, drawn = world
    before = copy.deepcopy(policy.model.state_dict())
    observed = learner_of(policy, max_grad_norm=0.1)
    first = observed.learn(
        drawn.rollouts, drawn.advantage, 1, 0.0, method=named_method("grpo-flat-kl")
    )
    mask = drawn.rollouts.completion_mask.bool()
    assert torch.equal(
        first.tokens.weight[mask], torch.ones(int(mask.sum())).double()
    )  # no moments
    policy.model.load_state_dict(before)
    plain = learner_of(policy, lr=0.0)
    coef = plain.learn(
        drawn.rollouts, drawn.advantage, 2, 0.0, method=named_method("grpo")
    ).tokens.loss_coef
    stats = observed.scorer.statistics(drawn.rollouts)
    width = drawn.rollouts.input_ids.shape[1] - mask.shape[1]
    effect = sharpscope.effects(
        policy.model,
        drawn.rollouts.input_ids,
        torch.nn.functional.pad(drawn.rollouts.completion_mask, (width, 0)),
        torch.nn.functional.pad(coef.double(), (width, 0)),
        observed.optimizer,
        "kl",
        drawn.rollouts.attention_mask,
        max_grad_norm=0.1,
        check="off",
    )["kl"][:, width:]
    size = effect[mask].square().mean().sqrt()
    raw = 1 - 0.5 * torch.tanh(effect / size)
    mass = coef.abs().double() * stats.logit_grad_norm
    wanted = raw / ((mass * raw)[mask].sum() / mass[mask].sum())
    second = observed.learn(
        drawn.rollouts, drawn.advantage, 2, 0.0, method=named_method("grpo-flat-kl")
    )
    torch.testing.assert_close(
        second.tokens.weight[mask].double(), wanted[mask], rtol=1e-6, atol=1e-9
    )
    assert wanted[mask].std() > 0.05
    policy.model.load_state_dict(before)


def weights_of(policy) -> torch.Tensor:
    return parameters_to_vector(policy.model.parameters()).detach().clone()


@pytest.mark.parametrize("every", ["step", "update"])
@pytest.mark.parametrize("decay", [0.0, 0.6])
def test_ppo_ewma_token_by_token(world, decay, every):
    """Three steps of two epochs of two updates, the last by a learner that goes on from the kept state.

    Every coefficient, from the weights at all earlier starts; at first the average is the policy. With decay 0 it is GRPO, bit for bit.
    """
    policy, drawn = world
    before, parameters = copy.deepcopy(policy.model.state_dict()), list(policy.model.parameters())
    method = named_method("ppo-ewma").model_copy(
        update={"proximal": AveragedProximal(decay=decay, every=every)}
    )
    rows_of = drawn.rollouts.completion_mask.bool().tolist()
    starts, old, flags = [], [], []

    def under(weights: torch.Tensor) -> list[list[float]]:
        now = weights_of(policy)
        with torch.no_grad():
            vector_to_parameters(weights, parameters)
            found = observed.scorer.log_probabilities(drawn.rollouts).tolist()
            vector_to_parameters(now, parameters)
        return found

    def check(update: PendingUpdate) -> None:
        now = under(weights_of(policy))
        if update.index == 0:
            old[:] = now
        if update.index == 0 or every == "update":
            starts.append(weights_of(policy))
        factors = [decay ** (len(starts) - 1 - i) for i in range(len(starts))]
        mean = sum(f * w for f, w in zip(factors, starts, strict=True)) / sum(factors)
        center = under(mean)
        for row, found in zip(update.rows.tolist(), update.loss_coef.tolist(), strict=True):
            a = float(drawn.advantage[row])
            for t, used in enumerate(rows_of[row]):
                ratio = math.exp(now[row][t] - center[row][t])
                flag = a * (ratio - 1) > 0.2 * abs(a)
                flags.append(used and flag)
                moved = -a * math.exp(now[row][t] - old[row][t])
                wanted = moved / (len(update.rows) * sum(rows_of[row])) if used else 0.0
                assert found[t] == pytest.approx(0.0 if flag else wanted, abs=1e-9)

    observed = learner_of(policy, mini_batches=2, inner_epochs=2, lr=1e-2)
    for step in range(1, 4):
        if step == 3:
            state = MethodState(**copy.deepcopy(vars(observed.state)))
            observed = replace(observed, state=state)
        observed.learn(drawn.rollouts, drawn.advantage, step, 0.0, method=method, before_step=check)
    assert len(starts) == (12 if every == "update" else 3)
    assert any(flags) == (decay > 0 or every == "step") and not all(flags)
    end = weights_of(policy)
    policy.model.load_state_dict(before)
    plain = learner_of(policy, mini_batches=2, inner_epochs=2, lr=1e-2)
    for step in range(1, 4):
        plain.learn(drawn.rollouts, drawn.advantage, step, 0.0, method=named_method("grpo"))
    assert torch.equal(weights_of(policy), end) == (decay == 0.0 and every == "step")
    policy.model.load_state_dict(before)


def test_mini_batches_and_lopti_use_every_token_once(world):
    policy, drawn = world
    mask = drawn.rollouts.completion_mask.bool()
    for method, changes, updates in (
        ("grpo", {"mini_batches": 3}, 3),
        ("lopti", {}, 2),
        ("lopti", {"mini_batches": 2}, 4),
    ):
        found, learned = gradient(policy, drawn, method, **changes)
        assert len(learned.updates) == len(found) == updates
        assert set(learned.tokens.update[mask].tolist()) <= set(range(updates))
        assert (learned.tokens.update[mask] >= 0).all() and (
            learned.tokens.update[~mask] == -1
        ).all()
    _, learned = gradient(policy, drawn, "lopti")
    rare = learned.tokens.stats.logp.exp() < named_method("lopti").passes
    assert torch.equal(learned.tokens.update[mask] == 0, rare[mask])


def test_the_samplers_log_probabilities_enter_the_loss(world):
    """A sampler whose log-probabilities are 0.5 lower, and one whose are 2 lower: factors e^0.5 and the bound 2."""
    policy, drawn = world
    shift = torch.tensor([0.5, 2.0]).repeat(len(drawn.rollouts))[: len(drawn.rollouts), None]
    other = replace(
        drawn, rollouts=replace(drawn.rollouts, behavior_logp=drawn.rollouts.behavior_logp - shift)
    )
    method = named_method("grpo").model_copy(update={"correction": TruncatedCorrection()})
    _, plain = gradient(policy, other, "grpo", mini_batches=2)
    _, learned = gradient(policy, other, method, mini_batches=2)
    # ratio 1; what comes after an update differs in more than the factor
    first = plain.tokens.update == 0
    wanted = plain.tokens.loss_coef * torch.where(shift < 1, math.exp(0.5), 2.0)
    torch.testing.assert_close(
        learned.tokens.loss_coef[first], wanted[first], rtol=1e-5, atol=1e-12, check_dtype=False
    )
    assert wanted[first].abs().max() > 0


@pytest.mark.parametrize(
    "changes", [{}, {"microbatch_tokens": 64}, {"inner_epochs": 2}], ids=["one", "micro", "epochs"]
)
def test_the_entropy_bonus_is_the_remainder(world, changes):
    """∇L = Σ_t c_t ∇log π_t − coef·∇(mean entropy): the coefficients are plain GRPO's, the remainder is the bonus's own."""
    policy, drawn = world
    method = named_method("grpo").model_copy(update={"entropy": 0.3})
    plain, before = gradient(policy, drawn, "grpo", **changes)
    found, learned = gradient(policy, drawn, method, **changes)
    torch.testing.assert_close(learned.tokens.loss_coef, before.tokens.loss_coef, rtol=0, atol=0)
    rollouts, model = drawn.rollouts, policy.model
    entropies = []
    for row in range(len(rollouts)):
        ids = rollouts.input_ids[row][rollouts.attention_mask[row].bool()]
        first = int(rollouts.prompt_lengths[row])
        p = model(input_ids=ids[None]).logits[0, first - 1 : -1].softmax(-1)
        entropies.append(
            -(p * p.log()).sum(-1)[
                rollouts.completion_mask[row, : int(rollouts.lengths[row])].bool()
            ]
        )
    mean = torch.cat(entropies).mean()
    bonus = torch.cat([g.flatten() for g in torch.autograd.grad(mean, list(model.parameters()))])
    scale = float(bonus.abs().max())
    torch.testing.assert_close(found[0] - plain[0], -0.3 * bonus, rtol=1e-3, atol=1e-5 * scale)
    assert learned.updates[0].loss == pytest.approx(
        before.updates[0].loss - 0.3 * float(mean.detach()), abs=1e-5
    )
    _, without = gradient(policy, drawn, method.model_copy(update={"entropy": 0.0}), **changes)
    # of a coefficient of 0, too
    assert without.updates[0].entropy == pytest.approx(float(mean.detach()), rel=1e-4)


def gradient_at(policy, drawn, shift):
    """Flat gradient of GRPO's loss at θ + shift, with π_old at θ: by autograd over the whole batch in one piece."""
    model, rollouts, mask = policy.model, drawn.rollouts, drawn.rollouts.completion_mask

    def logp() -> torch.Tensor:
        positions = (rollouts.attention_mask.cumsum(1) - 1).clamp_min(0)
        out = model(
            input_ids=rollouts.input_ids,
            attention_mask=rollouts.attention_mask,
            position_ids=positions,
        ).logits
        out = torch.log_softmax(out[:, rollouts.prompt_width - 1 : -1], dim=-1)
        return out.gather(2, rollouts.completion_ids[:, :, None])[:, :, 0]

    start, old = copy.deepcopy(model.state_dict()), logp().detach()
    parameters = list(model.parameters())
    vector_to_parameters(parameters_to_vector(parameters).detach() + shift, parameters)
    ratio, advantage = torch.exp(logp() - old), drawn.advantage[:, None]
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    loss = -((surrogate * mask).sum(1) / mask.sum(1)).mean()
    value = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    model.load_state_dict(start)
    return value


def test_gradients_at_an_ascended_point_by_hand(world):
    policy, drawn = world
    plain, _ = gradient(policy, drawn, "grpo")
    g, rho = plain[0], 0.05
    torch.testing.assert_close(
        g, gradient_at(policy, drawn, torch.zeros_like(g)), rtol=1e-4, atol=1e-7
    )
    ascended = gradient_at(policy, drawn, rho * g / g.norm())
    base = named_method("grpo")
    sam, _ = gradient(
        policy, drawn, base.model_copy(update={"sharpness": Sharpness(kind="sam", rho=rho)})
    )
    torch.testing.assert_close(sam[0], ascended, rtol=1e-4, atol=1e-7)
    penalty = Sharpness(kind="gradient_norm_penalty", rho=rho)
    gnp, _ = gradient(policy, drawn, base.model_copy(update={"sharpness": penalty}))
    torch.testing.assert_close(gnp[0], 0.2 * g + 0.8 * ascended, rtol=1e-4, atol=1e-7)
    assert not torch.allclose(sam[0], g, rtol=1e-2)
    # gradient regularization ascends by the gradient itself, and reaches g + rho·Hg
    spec = Sharpness(kind="squared_gradient_norm", rho=0.01)
    regular, _ = gradient(policy, drawn, base.model_copy(update={"sharpness": spec}))
    ascended = gradient_at(policy, drawn, 0.001 * g)
    torch.testing.assert_close(regular[0], g + 10.0 * (ascended - g), rtol=1e-3, atol=1e-6)
    assert float((regular[0] - g).norm() / g.norm()) > 1e-3


def test_probes_see_the_gradient_that_the_coefficients_belong_to(world):
    """Under SAM the optimizer gets the gradient at θ + rho·g/‖g‖; c = ∂L/∂log π is that of g = ∇L(θ)."""
    policy, drawn = world
    (plain,), _ = gradient(policy, drawn, "grpo")
    sharp = named_method("grpo").model_copy(update={"sharpness": Sharpness(kind="sam", rho=0.5)})
    (ascended,), _ = gradient(policy, drawn, sharp)
    observed, seen = learner_of(policy), []

    def look(update):
        seen.append(
            (update.grad_norm, torch.cat([p.grad.flatten().clone() for p in observed.parameters]))
        )

    (record,) = learn(observed, drawn, sharp, before_step=look).updates
    ((norm, found),) = seen
    torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-9)
    assert norm == record.plain_norm == pytest.approx(float(plain.norm()))
    assert (
        record.grad_norm
        == pytest.approx(float(ascended.norm()))
        != pytest.approx(record.plain_norm, rel=0.01)
    )


IDLE = [
    *("grpo", "grpo-sg", "ar-lopti", "gspo", "dapo", "cov-grpo", "stapo", "lp-reg", "rloo"),
    named_method("grpo").model_copy(update={"entropy": 0.1}),
    named_method("grpo").model_copy(update={"kl": Kl(coef=0.1)}),
    named_method("grpo").model_copy(update={"sharpness": Sharpness(kind="sam", rho=0.5)}),
]


@pytest.mark.parametrize(
    "method", IDLE, ids=lambda method: method if isinstance(method, str) else "changed"
)
def test_leaving_out_groups_without_an_advantage_changes_nothing(world, method, monkeypatch):
    """Against a backward pass over all groups: gradients, losses and all that is recorded about tokens are equal."""
    policy, drawn = world
    idle = drawn.rollouts.group == drawn.rollouts.group[0]
    drawn = replace(
        drawn,
        advantage=torch.where(idle, 0.0, torch.linspace(-1, 1, len(idle), dtype=torch.float64)),
    )
    value, changes = method_of(method), {"microbatch_tokens": 40}
    if value.needs_reference:
        changes["reference"] = copy.deepcopy(policy.model)
    found, learned = gradient(policy, drawn, value, **changes)
    monkeypatch.setattr(
        updates_module.Updates,
        "_moving",
        lambda self, rows: torch.ones(len(rows), dtype=torch.bool),
    )
    wanted, all_learned = gradient(policy, drawn, value, **changes)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-13)
    for one, other in zip(learned.updates, all_learned.updates, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-9, abs=1e-13)
        assert one.summary == pytest.approx(other.summary, rel=1e-9, abs=1e-13, nan_ok=True)
    one, other = learned.tokens, all_learned.tokens
    names = vars(one).keys() - {"stats"}
    assert len(names) > 10
    for name in some(names):
        mine, theirs = getattr(one, name), getattr(other, name)
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize("name", ["grpo", "dapo", "gmpo", "entropy"])
def test_the_loss_by_prompt_has_the_updates_loss_as_mean(world, name):
    policy, drawn = world
    method = named_method("grpo" if name == "entropy" else name)
    if name == "entropy":
        method = method.model_copy(update={"entropy": 0.1})
    start = copy.deepcopy(policy.model.state_dict())

    def values(drawn, **changes):
        """The loss by prompt at weights 1 % larger, where the ratios are no longer 1; none without a gradient."""
        found = []

        def before(loss_fn, _):
            with torch.no_grad():
                for parameter in policy.model.parameters():
                    parameter.mul_(1.01)
            found.append(loss_fn())

        policy.model.load_state_dict(start)
        learn(learner_of(policy, **changes), drawn, method, before_optimizer=before)
        return found

    (found,) = values(drawn, microbatch_tokens=40)
    prompts = drawn.rollouts.group.unique()
    assert found.shape == prompts.shape and found.dtype == torch.float64 and float(found.std()) > 0
    (whole,) = values(drawn)
    assert float(found.mean()) == pytest.approx(float(whole.mean()), rel=1e-9)
    for prompt, value in zip(prompts, found, strict=True) if name == "grpo" else ():
        # Each completion weighs the same, so a prompt's value is the loss of its completions alone.
        rows = (drawn.rollouts.group == prompt).nonzero()[:, 0]
        part = replace(
            drawn, rollouts=drawn.rollouts.rows(rows), advantage=drawn.advantage[rows], stats=None
        )
        for alone in some(values(part)):
            assert float(value) == pytest.approx(float(alone), rel=1e-6)


def test_clipping_scales_the_step_and_a_bad_loss_is_left_out(world):
    policy, drawn = world
    _, learned = gradient(policy, drawn, "grpo", max_grad_norm=1e-3)
    record = learned.updates[0]
    assert record.clip_factor == pytest.approx(1e-3 / record.grad_norm, rel=1e-3)
    advantage = drawn.advantage.clone()
    advantage[0] = math.nan
    spoilt = type(drawn)(drawn.examples, drawn.rollouts, drawn.rewards, advantage, 0)
    before = parameters_to_vector(policy.model.parameters()).detach()
    assert learn(learner_of(policy), spoilt).updates[0].skipped
    assert torch.equal(before, parameters_to_vector(policy.model.parameters()))


# -- the table of updates ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo", "gspo", "lopti"])
def test_every_update_is_described_by_its_own_tokens(world, monkeypatch, name):
    """Ratios, divergence from π_old and clipped shares, from the log-probabilities of each update in Python floats."""
    policy, drawn = world
    # by update: (ln r of the token, the method's ratio, clipped)
    seen: list[list[tuple[float, float, int]]] = []

    def watched(method, plan, logp, normalizer, *, pass_index=0, **others):
        out = policy_loss(method, plan, logp, normalizer, pass_index=pass_index, **others)
        for place in (plan.mask & (plan.pass_index == pass_index)).nonzero().tolist():
            own = [t for t, on in enumerate(plan.mask[place[0]].tolist()) if on]
            change = {
                t: float(logp[place[0], t].detach() - plan.behavior_logp[place[0], t]) for t in own
            }
            ratio = math.exp(
                sum(change.values()) / len(own) if name == "gspo" else change[place[1]]
            )
            seen[-1].append((change[place[1]], ratio, int(out.clipped[tuple(place)])))
        return out

    monkeypatch.setattr(updates_module, "policy_loss", watched)
    backward = updates_module.Updates.gradient
    monkeypatch.setattr(
        updates_module.Updates, "gradient", lambda *args: (seen.append([]), backward(*args))[1]
    )
    # so far that clips act
    observed = learner_of(policy, lr=0.03, mini_batches=2, inner_epochs=2, microbatch_tokens=64)
    learned = learn(observed, drawn, name)
    table = pd.DataFrame(update_columns(7, learned.updates))
    assert len(table) == len(seen) == (8 if name == "lopti" else 4)
    for row, tokens in zip(table.to_dict("records"), seen, strict=True):
        if not tokens:  # no token of this policy is likely enough for Lopti's second pass
            assert (
                row["tokens"] == 0 and math.isnan(row["ratio_max"]) and math.isnan(row["kl_old_k3"])
            )
            continue
        changes, ratios, flags = zip(*tokens, strict=True)
        assert (row["step"], row["tokens"], row["lr"], row["skipped"]) == (
            7,
            len(tokens),
            0.03,
            False,
        )
        wanted = {
            "kl_old_k3": math.fsum(math.exp(x) - 1 - x for x in changes) / len(tokens),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "clip_fraction_low": sum(f < 0 for f in flags) / len(tokens),
            "clip_fraction_high": sum(f > 0 for f in flags) / len(tokens),
        }
        assert {key: row[key] for key in wanted} == pytest.approx(wanted, abs=1e-12)
    assert table["update"].tolist() == list(range(len(seen)))
    assert table["ratio_max"][0] == pytest.approx(1, abs=1e-12) and table["kl_old_k3"].max() > 1e-3
    assert table["clip_fraction_high"].max() > 0 and table["clip_fraction_low"].max() > 0
    for column in ("loss", "grad_norm", "update_norm"):
        assert table[column].tolist() == [getattr(update, column) for update in learned.updates]


def test_the_coefficient_splits_into_policy_kl_and_entropy_terms(world):
    """Each term's coefficients are those of a run whose loss has that term alone, in float64; the split is exact."""
    policy, drawn = world
    reference = copy.deepcopy(policy.model)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, dtype=parameter.dtype))
    plain = method_of("grpo")
    whole = plain.model_copy(update={"kl": Kl(coef=0.3), "entropy": 0.02})
    mask = drawn.rollouts.completion_mask.bool()
    _, learned = gradient(policy, drawn, whole, reference=reference)
    _, without = gradient(policy, drawn, plain)
    tokens = learned.tokens
    torch.testing.assert_close(
        (tokens.loss_coef - tokens.kl_coef)[mask],
        without.tokens.loss_coef[mask],
        rtol=1e-9,
        atol=1e-12,
    )
    assert not without.tokens.kl_coef[mask].any() and not without.tokens.entropy_coef[mask].any()
    assert bool(without.tokens.ref_logp[mask].isnan().all())
    # k3 = e^(ref − logp) − (ref − logp) − 1 has the derivative 1 − e^(ref − logp); each token's normalizer is 1/(n·length)
    scale = 0.3 / (mask.sum(1, keepdim=True) * len(mask)).expand(mask.shape)[mask]
    expected = scale * -torch.expm1(tokens.ref_logp - tokens.stats.logp)[mask]
    torch.testing.assert_close(tokens.kl_coef[mask], expected, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(
        tokens.entropy_coef[mask].numpy(), -0.02 / int(mask.sum()), rtol=1e-12
    )


def sampled(drawn):
    """The rollouts with log-probabilities of a sampler that differs from the policy."""
    logp = drawn.rollouts.behavior_logp
    noise = 0.1 * torch.randn(
        logp.shape, generator=torch.Generator().manual_seed(1), dtype=logp.dtype
    )
    return replace(drawn, rollouts=replace(drawn.rollouts, behavior_logp=logp + noise))


def test_capo_rejects_by_the_optimizers_own_moments_and_the_rest_divide(world):
    """Thresholds at the medians of m_H and m_F; with them out of reach it is GRPO, and a layer that is not trained is an error."""
    policy, drawn = world
    method, mask = named_method("capo"), drawn.rollouts.completion_mask.bool()
    observed = warmed(learner_of(policy))
    values = observed.curvature(drawn.rollouts, drawn.advantage, method.tokens)
    moving = mask & (drawn.advantage != 0)[:, None]
    assert (values[moving][:, 1] > 0).all() and not values[mask & ~moving][:, 1].any()
    bounds = values[moving].median(0).values.tolist()
    tokens = method.tokens.model_copy(update={"max_objective": bounds[0], "max_kl": bounds[1]})
    learned = learn(observed, drawn, method.model_copy(update={"tokens": tokens}))
    keep = mask & (values[..., 0].abs() < bounds[0]) & (values[..., 1] < bounds[1])
    wanted = -drawn.advantage[:, None] * keep / keep.sum(1, keepdim=True).clamp(min=1) / len(mask)
    torch.testing.assert_close(learned.tokens.loss_coef, wanted, rtol=1e-9, atol=1e-15)
    assert 0.1 < float(keep[moving].double().mean()) < 0.9
    far = method.tokens.model_copy(update={"max_objective": 1e9, "max_kl": 1e9})
    free, _ = gradient(policy, drawn, method.model_copy(update={"tokens": far}))
    torch.testing.assert_close(free[0], gradient(policy, drawn)[0][0])
    head = policy.model.get_output_embeddings().weight
    for group in observed.optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p is not head]
    with pytest.raises(UserError, match="output layer is not trained"):
        observed.curvature(drawn.rollouts, drawn.advantage, method.tokens)


def test_the_clip_by_module_bounds_a_spike_where_it_is(world):
    """Two updates: the first sets the averages, the second has one module's gradient ten times as large; by hand."""
    policy, drawn = world
    method = named_method("aggc")
    observed = learner_of(policy, max_grad_norm=None)
    first = learn(observed, drawn, method)
    assert first.updates[0].clip_factor == 1.0
    averages = dict(observed.state.norms)
    names = {id(p): name for name, p in policy.model.named_parameters()}
    spiked = [p for p in observed.parameters if "down_proj" in names[id(p)]]
    hooks = [p.register_hook(lambda g: 10.0 * g) for p in spiked]
    before, after = {}, {}

    def watch(into):
        into.update({id(p): p.grad.clone() for p in observed.parameters})

    hooks.append(observed.optimizer.register_step_pre_hook(lambda *_: watch(after)))
    second = learn(observed, drawn, method, before_step=lambda _: watch(before))
    for hook in hooks:
        hook.remove()
    groups = {}
    for parameter in observed.parameters:
        groups.setdefault(names[id(parameter)].split(".")[-2], []).append(id(parameter))
    assert set(groups) == set(averages) and len(groups) > 5
    squares = 0.0
    for kind, members in some(groups.items()):
        norm = math.sqrt(sum(float(before[i].square().sum()) for i in members))
        factor = min(1.0, 2.0 * averages[kind] / norm)
        for i in some(members):
            torch.testing.assert_close(after[i], factor * before[i])
        squares += (factor * norm) ** 2
        assert observed.state.norms[kind] == pytest.approx(
            0.95 * averages[kind] + 0.05 * factor * norm
        )
        assert (factor < 0.9) == (kind == "down_proj")
    whole = math.sqrt(sum(float(g.square().sum()) for g in before.values()))
    assert second.updates[0].clip_factor == pytest.approx(math.sqrt(squares) / whole)


def gradients_of(path, target):
    """Gradient and coefficients of the first update of each new method, from a saved world; run by every process."""
    policy, drawn = torch.load(path, weights_only=False)
    found = {}
    for name in [*NEW, "dr-capo", "rein-capo", "aggc", "cov-grpo", "ppo-ewma"]:
        observed = warmed(learner_of(policy, microbatch_tokens=64, max_grad_norm=1e-3))
        observed.state.norms = dict.fromkeys(observed._module_types.values(), 1e-4)
        observed.state.average = [0.95 * p.detach() for p in observed.parameters]
        observed.state.average_sum = 1.0
        kept = parameters_to_vector(observed.parameters).detach()
        learned = learn(observed, drawn, name)
        moved = parameters_to_vector(observed.parameters).detach() - kept
        found[name] = moved, learned.tokens.loss_coef, observed.state.norms
        vector_to_parameters(kept, observed.parameters)
    if distributed.is_rank_zero():
        torch.save(found, target)


def in_a_group(path, target):
    distributed.start("cpu")
    gradients_of(path, target)


def test_two_processes_make_the_update_of_one(world, tmp_path):
    policy, drawn = world
    torch.save((policy, sampled(drawn)), tmp_path / "world")
    gradients_of(tmp_path / "world", tmp_path / "one")
    run_ranks(tmp_path, in_a_group, tmp_path / "world", tmp_path / "two")
    one, two = (torch.load(tmp_path / name) for name in ("one", "two"))
    for name in some(one):
        for first, second in zip(one[name][:2], two[name][:2], strict=True):
            torch.testing.assert_close(
                first, second, rtol=1e-5, atol=1e-6 * float(first.abs().max()), msg=name
            )
        assert one[name][2] == pytest.approx(two[name][2], rel=1e-6)
        assert float(one[name][0].abs().max()) > 0

"""What must hold of the methods whatever the data: properties over seeded random steps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sharpscope.methods import Method, method_names, named_method, same_at_one_update
from sharpscope.methods.clips import FiberClip, RatioTerms
from sharpscope.methods.loss import (
    MethodState,
    clipped_norm,
    policy_loss,
    token_normalizer,
)
from sharpscope.methods.method import (
    BinTokens,
    Kl,
)
from sharpscope.methods.plan import Plan, calibrate, prepare, token_bins, token_weights
from sharpscope.methods.token_weights import (
    ConstantWeight,
    LinearWeight,
    PepoWeight,
    PowerWeight,
    ShuffledWeight,
    StareWeight,
    UniformWeight,
)
from tests.loops import some
from tests.methods.data import LIMIT, Case, make_case, plain_step, step_of
from tests.methods.test_objective import ORACLES, TOY

laws = settings(max_examples=12, deadline=None, derandomize=True)
seeds = st.integers(0, 10_000)


def ready(name: str, case: Case) -> Method:
    """The named method at toy shares, with a KL term, calibrated on the case."""
    method = named_method(name)
    method = method.model_copy(
        update=TOY.get(name, {}) | {"kl": method.kl.model_copy(update={"coef": 0.05})}
    )
    return method.model_copy(update={"weight": calibrate(method.weight, case.step)})


def normalizer_of(method: Method, case: Case, plan: Plan) -> Tensor:
    """`token_normalizer` of the whole case as one update."""
    return token_normalizer(
        method, case.mask, LIMIT, keep=plan.keep, group=case.step.group, dtype=torch.float64
    )


def loss_and_gradient(
    method: Method,
    case: Case,
    now: Tensor | None = None,
    seed: int = 0,
    split: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss and gradient summed over the passes, in one piece or in the microbatches `split`."""
    plan = prepare(method, case.step, torch.Generator().manual_seed(seed))
    normalizer = normalizer_of(method, case, plan)
    logp = (case.now if now is None else now).clone().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for index in range(method.pass_count):
        for rows in split or [torch.arange(len(logp))]:
            options = {"reference_logp": case.reference[rows], "pass_index": index}
            loss = (
                loss
                + policy_loss(method, plan.rows(rows), logp[rows], normalizer[rows], **options).loss
            )
    return loss.detach(), torch.autograd.grad(loss, logp)[0]


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a[0], b[0], rtol=0, atol=tolerance)
    torch.testing.assert_close(a[1], b[1], rtol=0, atol=tolerance)


@laws
@given(seeds)
def test_weight_one_is_grpo_exactly(seed: int):
    case = make_case(named_method("grpo"), seed)
    grpo = ready("grpo", case)
    plain = loss_and_gradient(grpo, case)
    for weight in (LinearWeight(alpha=0.0), PowerWeight(gamma=0.0), UniformWeight()):
        for weight_on in ("surrogate", "ratio"):
            for weighted in (False, True):
                kl = grpo.kl.model_copy(update={"weighted": weighted})
                other = grpo.model_copy(update={"weight": weight, "weight_on": weight_on, "kl": kl})
                got = loss_and_gradient(other, case)
                assert torch.equal(got[0], plain[0])
                assert torch.equal(got[1], plain[1])


def weights(name: str, case: Case, seed: int = 0) -> Tensor:
    method = ready(name, case)
    return token_weights(method.weight, case.step, torch.Generator().manual_seed(seed))


@laws
@given(seeds, st.sampled_from(["grpo-sg", "ar", "cov-grpo"]))
def test_controls_keep_what_they_promise(seed: int, base: str):
    case = make_case(named_method(base), seed)
    plain, mask = weights(base, case), case.mask
    inner = ready(base, case).weight
    permuted = ShuffledWeight(of=inner, matched="tokens")
    shuffled = token_weights(permuted, case.step, torch.Generator().manual_seed(seed))
    for row in range(len(plain)):
        assert torch.equal(
            shuffled[row][mask[row]].sort().values, plain[row][mask[row]].sort().values
        )
    assert not shuffled[~mask].any()
    constant = weights(f"{base}-constant", case)[mask]
    assert constant.unique().numel() == 1
    mass = case.step.gradient_mass[mask]
    mean = (mass * plain[mask]).sum() / mass.sum()
    torch.testing.assert_close(constant[0], mean, rtol=1e-14, atol=0)
    by_tokens = token_weights(ConstantWeight(of=inner, matched="tokens"), case.step)[mask]
    torch.testing.assert_close(by_tokens[0], plain[mask].mean(), rtol=1e-14, atol=0)
    one = weights(f"{base}-mean-one", case)[mask]
    torch.testing.assert_close(
        (mass * one).sum() / mass.sum(), torch.ones((), dtype=torch.float64), rtol=1e-14, atol=0
    )
    torch.testing.assert_close(one / one[0], plain[mask] / plain[mask][0])
    if base != "cov-grpo":
        low, high = ready(base, case).weight.bounds
        torch.testing.assert_close(
            weights(f"{base}-reverse", case)[mask], low + high - plain[mask], rtol=1e-14, atol=0
        )


@laws
@given(seeds)
def test_covariance_weights_have_mean_one_in_every_group(seed: int):
    case = make_case(named_method("cov-grpo"), seed)
    weight, mask = token_weights(named_method("cov-grpo").weight, case.step), case.mask
    c = case.step.covariance
    raw = (-(c**2) / (2 * c[mask].var(correction=0))).exp()
    rows = [case.step.group == label for label in case.step.group.unique()]
    assert len(rows) == 3
    for row in some(rows):
        inside = weight[row][mask[row]]
        assert inside.mean().item() == pytest.approx(1.0, abs=1e-14)
        torch.testing.assert_close(inside, raw[row][mask[row]] / raw[row][mask[row]].mean())
    assert not weight[~mask].any()


def test_a_group_of_extreme_tokens_alone_keeps_its_mass():
    """One of 4,000 tokens, 60 σ from the others, alone in its group: exp(−1800) is 0, its share of the group is 1."""
    logp = torch.full((2, 4000), -1e-3, dtype=torch.float64)
    logp[0, 0], mask = -40.0, torch.ones(2, 4000, dtype=torch.bool)
    mask[0, 1:] = False
    advantage = torch.tensor([1.0, -1.0], dtype=torch.float64)
    step = plain_step(mask, torch.tensor([0, 1]), advantage, logp)
    weight = token_weights(named_method("cov-grpo").weight, step)
    assert weight[0, 0] == 1.0 and weight[1].mean().item() == pytest.approx(1.0, abs=1e-12)
    flat = plain_step(mask, torch.tensor([0, 1]), advantage, torch.full_like(logp, -0.1))
    assert torch.equal(token_weights(named_method("cov-grpo").weight, flat), mask.double())


@laws
@given(seeds, st.sampled_from(["logp", "advantage"]), st.floats(-3.0, -0.01))
def test_covariance_weights_are_one_where_nothing_varies(seed: int, field: str, value: float):
    """The mean of equal numbers differs from them by rounding, which is no covariance."""
    case = make_case(named_method("cov-grpo"), seed)
    flat = torch.full_like(getattr(case.step, field), value)
    step = replace(case.step, **{field: flat})
    assert not step.covariance.any()
    assert torch.equal(token_weights(named_method("cov-grpo").weight, step), case.mask.double())


@pytest.mark.parametrize("name", sorted(ORACLES))
def test_no_gradient_flows_through_a_weight_or_any_other_decision(name: str):
    case = make_case(named_method(name), 3)
    fields = ("logp", "logit", "entropy", "polarity", "behavior_logp")
    step = replace(
        case.step, **{field: getattr(case.step, field).clone().requires_grad_() for field in fields}
    )
    plan = prepare(ready(name, case), step, torch.Generator().manual_seed(0))
    assert not any(
        value.requires_grad for value in vars(plan).values() if isinstance(value, Tensor)
    )


def test_tr_grpo_trap():
    """ε = 0.2, r = 1, w > 1.2: a positive token loses its whole gradient, a negative one keeps it; grpo-sg keeps both."""
    case = make_case(named_method("tr-grpo"), 0)
    now, steady = case.step.behavior_logp, ready("grpo-sg", case).model_copy(update={"kl": Kl()})
    kills = named_method("tr-grpo").model_copy(update={"weight": steady.weight})
    plan = prepare(kills, case.step)
    logp = now.clone().requires_grad_()
    out = policy_loss(
        kills, plan, logp, token_normalizer(kills, case.mask, LIMIT, dtype=torch.float64)
    )
    gradient = torch.autograd.grad(out.loss, logp)[0]
    positive = case.mask & (plan.advantage > 0)
    trapped = positive & (plan.weight > 1.2)
    assert 3 <= int(trapped.sum()) < int(positive.sum())
    assert not gradient[trapped].any()
    assert bool((gradient[positive & ~trapped] != 0).all())
    assert bool((gradient[case.mask & (plan.advantage < 0)] != 0).all())
    assert torch.equal(out.clipped == 1, trapped)
    _, sg = loss_and_gradient(steady, case, now)
    assert bool((sg[positive] != 0).all())


@laws
@given(
    seeds,
    st.sampled_from(sorted(ORACLES)),
    st.permutations(list(range(8))),
    st.integers(1, 8),
    st.integers(0, 3),
)
def test_padding_row_order_and_microbatches_change_nothing(
    seed: int, name: str, order: list[int], size: int, extra: int
):
    case = make_case(named_method(name), seed)
    method = ready(name, case)
    plain = loss_and_gradient(method, case)
    if name != "clip-cov":  # its draw numbers the tokens
        index = torch.tensor(order)
        moved = Case(
            case.reward[index], case.step.rows(index), case.now[index], case.reference[index]
        )
        loss, gradient = loss_and_gradient(method, moved)
        same((loss, gradient), (plain[0], plain[1][index]))
    same(loss_and_gradient(method, case, split=list(torch.tensor(order).split(size))), plain)
    padded = pad(case, extra)
    loss, gradient = loss_and_gradient(method, padded)
    same((loss, gradient[:, : case.now.shape[1]]), plain)
    assert not gradient[:, case.now.shape[1] :].any()


def pad(case: Case, extra: int) -> Case:
    """`extra` more token places, with NaN in them."""

    def widen(value: Tensor) -> Tensor:
        fill = False if value.dtype == torch.bool else torch.nan
        return torch.cat(
            [value, torch.full((len(value), extra, *value.shape[2:]), fill, dtype=value.dtype)],
            dim=1,
        )

    wide = {
        n: widen(v) for n, v in vars(case.step).items() if isinstance(v, Tensor) and v.dim() >= 2
    }
    step = type(case.step)(**(vars(case.step) | wide))
    return Case(case.reward, step, widen(case.now), widen(case.reference))


def fiber_value(low: float, high: float, token: float, ratios: list[float]) -> list[float]:
    """Gated ratios of one completion with advantage 1."""
    x = torch.tensor([ratios], dtype=torch.float64).log()
    mask = torch.ones(1, len(ratios), dtype=torch.bool)
    clip = FiberClip(low=low, high=high, token=token)
    ones = torch.ones_like(x)
    at = RatioTerms(ratio=x.exp(), log_ratio=x, logp=x, advantage=ones, mask=mask, correction=ones)
    return clip.surrogate(at, torch)[0].flatten().tolist()


def test_fiberpo_is_the_ratio_until_a_gate_acts_and_pulls_back_beyond_a_budget():
    ratios = [1.1, 0.95, 1.02, 0.9]
    assert fiber_value(1.0, 1.0, 1.0, ratios) == pytest.approx(ratios, abs=1e-14)
    # four tokens with the same drift of x: the residual is 0, the base g(x, C) with n = 4
    for drift, wanted in ((0.08, 0.08), (0.1, 0.1), (0.11, 5 * 0.1 - 4 * 0.11), (0.125, 0.0)):
        assert fiber_value(1.0, 0.1, 1.0, [math.exp(drift)] * 4) == pytest.approx(
            [math.exp(wanted)] * 4
        )
        assert fiber_value(0.1, 1.0, 1.0, [math.exp(-drift)] * 4) == pytest.approx(
            [math.exp(-wanted)] * 4
        )
    # one token 0.4 above a mean rise of 0.1 in four: its residual is bounded by 0.05
    spike = fiber_value(1.0, 1.0, 0.05, [math.exp(0.4), 1.0, 1.0, 1.0])
    assert spike == pytest.approx([math.exp(0.1 + 0.05), *[math.exp(0.1 - 0.05)] * 3])


# -- one update per step -----------------------------------------------------------------------------------------------


def on_policy(name: str, seed: int, kl: Kl | None = None) -> tuple[Method, Case]:
    """The named method, calibrated, and a step in which the policy is still the one that drew it."""
    method = named_method(name)
    method = method.model_copy(update=TOY.get(name, {}) | ({} if kl is None else {"kl": kl}))
    case = make_case(method, seed)
    old = case.step.logp
    same = {"behavior_logp": old, "sampler_logp": old}
    case = replace(case, step=replace(case.step, **same), now=old.clone())
    return method.model_copy(update={"weight": calibrate(method.weight, case.step)}), case


@pytest.mark.parametrize("kl", [None, Kl(coef=0.1)], ids=["no KL", "k3"])
@pytest.mark.parametrize("name", method_names())
def test_methods_that_equal_another_at_one_update_are_known(name: str, kl: Kl | None):
    """Their gradient is that of the method named, bit for bit but rounding; no other method's gradient is GRPO's or BNPO's."""
    if kl is not None and named_method(name).kl.weighted:
        kl = kl.model_copy(update={"weighted": True})
    method, case = on_policy(name, 3, kl)
    named = same_at_one_update(named_method(name))
    gradient = loss_and_gradient(method, case)[1]
    assert gradient.abs().max() > 1e-3
    equal = set()
    for other in ("grpo", "bnpo"):
        plain, same_case = on_policy(other, 3, method.kl)
        difference = float((gradient - loss_and_gradient(plain, same_case)[1]).abs().max())
        if difference < 1e-12:
            equal.add(other)
        else:
            assert difference > 1e-6
    # These differ outside the loss: in where the gradient is taken, in the number of updates, in the completions drawn.
    elsewhere = dict.fromkeys(("grpo", "grpo-sam", "grpo-gnp", "grpo-gr", "aggc"), "grpo")
    elsewhere |= dict.fromkeys(("bnpo", "lopti", "dapo"), "bnpo")
    assert equal == {elsewhere.get(name, named)} - {None}


def test_the_adaptive_form_of_stare_moves_within_its_bounds_and_is_remembered():
    state, weight = MethodState(), StareWeight(M=0.9, step=0.1)
    low, high = torch.tensor([0.1]), torch.tensor([0.9])
    seen = [state.moved(weight, entropy) for entropy in (low, low, low, low, low, low, high, high)]
    assert [round(w.W, 9) for w in seen] == [1.2, 1.3, 1.4, 1.5, 1.5, 1.5, 1.4, 1.3]
    assert [round(w.M, 9) for w in seen] == [0.8, 0.7, 0.6, 0.5, 0.5, 0.5, 0.6, 0.7]
    resumed = MethodState(**vars(state))
    assert pytest.approx(1.4) == resumed.moved(weight, low).W
    assert MethodState().moved(StareWeight(), low) == StareWeight()  # off by default


@laws
@given(seeds, st.floats(-3.0, 3.0), st.integers(1, 9))
def test_pepo_has_mean_one_and_ignores_a_shift_of_all_entropies(
    seed: int, shift: float, window: int
):
    step = make_case(named_method("grpo"), seed, garbage=False).step
    weight = token_weights(PepoWeight(window=window), step)
    shifted = token_weights(PepoWeight(window=window), replace(step, entropy=step.entropy + shift))
    torch.testing.assert_close(weight, shifted, rtol=1e-12, atol=0)
    count = step.mask.sum(1)
    torch.testing.assert_close(
        weight.sum(1)[count > 0], count[count > 0].double(), rtol=1e-12, atol=0
    )


def test_bins_and_what_they_do_to_the_entropy():
    """Peak and valley by Σ π²; raising the logit of a peak lowers −ln Σ π², of a valley raises it."""
    logits = (
        torch.randn(300, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    )
    p = logits.softmax(-1)
    chosen = torch.arange(300) % 12
    logp, collision = p.log()[torch.arange(300), chosen], (p**2).sum(-1)
    step = step_of(logp=logp.tolist(), collision=collision.tolist(), advantage=[1.0] * 300)
    bins = token_bins(step)
    raised = logits.clone()
    raised[torch.arange(300), chosen] += 1e-6
    rises = -(raised.softmax(-1) ** 2).sum(-1).log() > -collision.log()
    assert torch.equal(bins["pos_valley"][:, 0], rises) and torch.equal(
        bins["pos_peak"][:, 0], ~rises
    )
    assert 30 < int(rises.sum()) < 270
    signs = replace(step, advantage=torch.tensor([1.0, -1.0, 0.0] * 100, dtype=torch.float64))
    keep = prepare(
        Method(name="bins", tokens=BinTokens(include=("pos_peak", "neg_valley"))), signs
    ).keep[:, 0]
    assert torch.equal(keep, torch.where(rises, signs.advantage < 0, signs.advantage > 0))


@laws
@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=12), st.floats(1.1, 4.0))
def test_the_clip_by_module_bounds_a_norm_by_its_own_history(norms: list[float], high: float):
    average = None
    for norm in some(norms):
        factor, after = clipped_norm(high, norm, average)
        if average is not None:
            assert norm * factor == pytest.approx(min(norm, high * average))
            assert after == pytest.approx(0.95 * average + 0.05 * min(norm, high * average))
        average = after
    same = clipped_norm(high, norms[0], norms[0])
    assert same == (1.0, pytest.approx(norms[0]))  # a norm that does not change is not clipped

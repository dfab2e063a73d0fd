"""Loss and ∂loss/∂ln π of every method against its equation in Python floats, to 1e-9."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal, localcontext
from functools import partial

import pytest
import torch
from torch import Tensor

from sharpscope.methods import Method, method_names, named_method
from sharpscope.methods.advantages import estimate_advantages
from sharpscope.methods.clips import (
    CispoClip,
    DelightGate,
    DppoMask,
    DualClip,
    FiberClip,
    GmpoClip,
    PpoClip,
    RatioClip,
    RatioTerms,
    SapoClip,
    VespoClip,
)
from sharpscope.methods.loss import (
    importance_ratio,
    policy_loss,
    token_normalizer,
)
from sharpscope.methods.method import (
    AdvantageTokens,
    ClipCovTokens,
    Correction,
    CurvatureTokens,
    HighEntropyTokens,
    HolderRatio,
    Kl,
    KlCovPenalty,
    LpRegPenalty,
    MaskedCorrection,
    ProbabilityTokens,
    SpuriousTokens,
    TruncatedCorrection,
)
from sharpscope.methods.plan import StepTensors, calibrate, prepare, summarize_weights
from sharpscope.methods.token_weights import (
    PepoWeight,
    PolarityWeight,
    SigmoidWeight,
    StareWeight,
    percentile,
)
from tests.loops import some
from tests.methods.data import LIMIT, Case, as_batch, make_case, plain_step, step_of
from tests.oracles import objective as oracle
from tests.oracles.objective import clipped


class ToySpurious(SpuriousTokens):
    probability, quantile = 0.5, 0.6


class ToyStare(StareWeight):
    share = 0.3


#: Shares and bands at which a toy batch exercises the selections; the published ones pick one token or none.
TOY = {
    "clip-cov": {"tokens": ClipCovTokens(share=0.2, low=-0.2, high=1.0)},
    "kl-cov": {"penalty": KlCovPenalty(share=0.2)},
    "papo": {"weight": PolarityWeight(target=1.7)},
    "dual-clip": {"clip": DualClip(bound=1.3)},
    **{
        name: {"clip": DualClip(low=0.2, high=0.24, bound=1.3)}
        for name in ("ar", "lopti", "ar-lopti")
    },
    "mipu": {"clip": DualClip(bound=1.3)},
    "fiberpo": {"clip": FiberClip(low=0.02, high=0.05, token=0.1)},
    "stapo": {"tokens": ToySpurious()},
    "lp-reg": {"penalty": LpRegPenalty(share=0.5)},
    "stare": {"weight": ToyStare(M=0.9, target=1.2)},
    "pepo": {"weight": PepoWeight(window=3)},
    "dr-capo": {"tokens": CurvatureTokens()},
    "rein-capo": {"tokens": CurvatureTokens()},
}


def lopti(b: oracle.Batch, eta: float, second: bool, alpha: float = 0.0) -> Tensor:
    only, weight = oracle.lopti_tokens(b, eta, second), oracle.ar_weight(b, alpha)
    return clipped(b, "token", weight=weight, only=only, high=0.24, bound=1.3)


ORACLES: dict[str, list[Callable[[oracle.Batch], Tensor]]] = {
    "grpo": [oracle.grpo],
    "grpo-sg": [lambda b: clipped(b, weight=oracle.sg_weights(b, "calibrated"))],
    "tr-grpo": [oracle.tr_grpo],
    "ar": [lambda b: clipped(b, "token", weight=oracle.ar_weight(b, 0.2), high=0.24, bound=1.3)],
    "lopti": [partial(lopti, eta=0.4, second=second) for second in (False, True)],
    "ar-lopti": [partial(lopti, eta=0.5, second=second, alpha=0.3) for second in (False, True)],
    "cov-grpo": [lambda b: clipped(b, weight=oracle.covariance_weights(b))],
    "cov-grpo-centered": [lambda b: clipped(b, weight=oracle.gaussian(oracle.covariances(b)))],
    "cov-grpo-completion": [oracle.cov_grpo_completion],
    "stapo": [lambda b: oracle.stapo(b, 0.5, 0.6)],
    "lp-reg": [lambda b: oracle.lp_reg(b, 0.5)],
    "clip-cov": [lambda b: oracle.clip_cov(b, 0.2, -0.2, 1.0)],
    "kl-cov": [lambda b: oracle.kl_cov(b, 0.2)],
    "gspo": [oracle.gspo],
    "holder": [oracle.holder],
    "dapo": [lambda b: clipped(b, "token", high=0.28)],
    "dr-grpo": [lambda b: clipped(b, "constant", adv=oracle.advantages(b, divide=False))],
    "cispo": [oracle.cispo],
    "bnpo": [lambda b: clipped(b, "token")],
    "dual-clip": [lambda b: clipped(b, bound=1.3)],
    "sapo": [oracle.sapo],
    "gmpo": [oracle.gmpo],
    "dppo": [lambda b: oracle.dppo(b, False, 0.15)],
    "dppo-kl": [lambda b: oracle.dppo(b, True, 0.05)],
    "luspo": [oracle.luspo],
    "vespo": [oracle.vespo],
    "ppo-ewma": [oracle.ppo_ewma],
    "grpo-flat": [lambda b: oracle.grpo_flat(b, 0.5)],
    "grpo-flat-kl": [lambda b: oracle.grpo_flat(b, 0.5)],
    "mipu": [lambda b: oracle.mipu(b, 1.3)],
    "fiberpo": [lambda b: oracle.fiberpo(b, 0.02, 0.05, 0.1)],
    "papo": [lambda b: oracle.papo(b, 1.7)],
    "high-entropy": [oracle.high_entropy],
    "grpo-sam": [oracle.grpo],
    "grpo-gnp": [oracle.grpo],
    "grpo-gr": [oracle.grpo],
    "lite-ppo": [lambda b: clipped(b, "token", adv=oracle.batch_scaled(b))],
    "rloo": [lambda b: clipped(b, "sequence_sum", adv=oracle.leave_one_out(b))],
    "reinforce-pp": [lambda b: clipped(b, "token", adv=oracle.whitened(b, False))],
    "reinforce-pp-baseline": [lambda b: clipped(b, "token", adv=oracle.whitened(b, True))],
    "opo": [lambda b: clipped(b, "token", adv=oracle.length_baseline(b))],
    "otb": [lambda b: clipped(b, "token", adv=oracle.token_baseline(b))],
    "gdpo": [lambda b: clipped(b, adv=oracle.decoupled(b, {"answer": 1.0, "format": 1.0}))],
    "maxrl": [oracle.maxrl],
    "wapo": [oracle.wapo],
    "delight": [oracle.delight],
    "stare": [lambda b: oracle.stare(b, 0.3, 1.1, 0.9, 1.2)],
    "rsi-s": [oracle.rsi_s],
    "pepo": [lambda b: oracle.pepo(b, 3)],
    "tp-schedule": [oracle.tp_schedule],
    "forking-schedule": [oracle.forking_schedule],
    "entropy-schedule": [oracle.entropy_schedule],
    "capo": [oracle.capo],
    "dr-capo": [lambda b: oracle.capo(b, adv=oracle.advantages(b, divide=False))],
    "rein-capo": [lambda b: oracle.capo(b, adv=oracle.leave_one_out(b), clipped=False)],
    "aggc": [oracle.grpo],
}


def test_every_named_method_has_an_oracle():
    assert set(ORACLES) == set(method_names())


def compare(method: Method, case: Case, expected: Tensor, pass_index: int, seed: int) -> None:
    plan = prepare(method, case.step, torch.Generator().manual_seed(seed))
    normalizer = token_normalizer(
        method, case.mask, LIMIT, keep=plan.keep, group=case.step.group, dtype=torch.float64
    )
    logp = case.now.clone().requires_grad_()
    out = policy_loss(
        method, plan, logp, normalizer, reference_logp=case.reference, pass_index=pass_index
    )
    (gradient,) = torch.autograd.grad(out.loss, logp)
    (wanted,) = torch.autograd.grad(expected, case.leaf)
    assert abs(out.loss.item() - expected.item()) < 1e-9
    assert float((gradient - wanted).abs().max()) < 1e-9
    assert wanted.abs().max() > 1e-3  # the comparison is about something


@pytest.mark.parametrize("beta", [0.0, 0.07])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", sorted(ORACLES))
def test_loss_and_gradient_equal_the_equation(name: str, seed: int, beta: float):
    method = named_method(name)
    method = method.model_copy(
        update=TOY.get(name, {}) | {"kl": method.kl.model_copy(update={"coef": beta})}
    )
    case = make_case(method, seed)
    method = method.model_copy(update={"weight": calibrate(method.weight, case.step)})

    def choose(candidates: int, count: int) -> list[int]:
        return torch.randperm(candidates, generator=torch.Generator().manual_seed(seed))[
            :count
        ].tolist()

    assert method.pass_count == len(ORACLES[name])
    for index, equation in enumerate(ORACLES[name]):
        compare(method, case, equation(as_batch(case, beta=beta, choose=choose)), index, seed)


Y, N = True, False
EDGES: dict[str, tuple[list[list[bool]], list[float], list[int]]] = {
    "a group of one token": ([[Y, N, N], [Y, Y, Y], [Y, Y, N]], [1.0, 0.0, 1.0], [0, 1, 1]),
    "groups of different lengths": (
        [[Y, Y, Y, Y], [Y, Y, Y, N], [Y, N, N, N], [Y, Y, N, N]],
        [1.0, 0.0, 0.2, 0.7],
        [3, 3, 1, 1],
    ),
    "holes": ([[Y, N, Y, Y], [N, Y, N, Y], [Y, Y, Y, N]], [1.0, 0.3, 0.0], [2, 2, 2]),
    "a completion without tokens": ([[N, N], [Y, Y], [Y, N]], [1.0, 0.0, 1.0], [0, 0, 0]),
    "all advantages 0": ([[Y, Y], [Y, N], [Y, Y]], [1.0, 1.0, 0.5], [0, 0, 1]),
    "σ = 0": ([[Y, Y, N], [Y, N, Y]], [1.0, 0.0], [0, 0]),
}
"""Masks, rewards and groups of steps at the edges of covariance-aware GRPO and of PPO-EWMA."""


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", ["cov-grpo", "ppo-ewma", "both"])
def test_covariance_weights_and_averaged_policies_at_their_edges(name: str, edge: str, seed: int):
    """Values outside the mask are NaN; `both` has the weights and the averaged policy."""
    rows, reward, group = EDGES[edge]
    mask, rewards, groups = torch.tensor(rows), torch.tensor(reward).double(), torch.tensor(group)
    g = torch.Generator().manual_seed(seed)
    old, near, far = torch.randn(3, *mask.shape, generator=g, dtype=torch.float64)
    old = -0.3 * torch.ones_like(old) if edge == "σ = 0" else -old.abs() - 0.01
    old, center, now = (
        torch.where(mask, value, torch.nan) for value in (old, old + 0.3 * near, old + 0.3 * far)
    )
    method = named_method("cov-grpo" if name == "both" else name)
    if name == "both":
        method = method.model_copy(update={"proximal": named_method("ppo-ewma").proximal})
    advantage = estimate_advantages(method.advantage, rewards, groups, mask)
    step = plain_step(mask, groups, advantage, old, proximal_logp=center)
    case = Case(rewards, step, now, torch.full_like(now, torch.nan))
    batch = as_batch(case)
    weight = oracle.covariance_weights(batch) if name != "ppo-ewma" else None
    if name == "cov-grpo":
        expected = clipped(batch, weight=weight)
    else:
        expected = oracle.ppo_ewma(batch, weight)
    normalizer = token_normalizer(method, mask, LIMIT, dtype=torch.float64)
    logp = now.clone().requires_grad_()
    out = policy_loss(method, prepare(method, step), logp, normalizer)
    (gradient,) = torch.autograd.grad(out.loss, logp)
    (wanted,) = torch.autograd.grad(expected, case.leaf, allow_unused=True)
    wanted = torch.zeros_like(gradient) if wanted is None else wanted
    assert abs(out.loss.item() - expected.item()) < 1e-9
    assert float((gradient - wanted).abs().max()) < 1e-9
    assert bool(wanted.any()) == (edge != "all advantages 0")


@pytest.mark.parametrize("name", ["grpo-sg", "tr-grpo"])
def test_published_constants(name: str):
    method = named_method(name).with_preset("auto", "paper")
    case = make_case(method, 5)
    batch = as_batch(case)
    paper = clipped(batch, weight=oracle.sg_weights(batch, "paper"))
    compare(method, case, paper if name == "grpo-sg" else oracle.tr_grpo(batch, "paper"), 0, 0)


@pytest.mark.parametrize("progress", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("name", ["holder", "tp-schedule", "forking-schedule", "entropy-schedule"])
def test_schedules_equal_the_equation_from_their_start_to_their_end(name: str, progress: float):
    """Hölder's exponent passes its limit 0 at one half; the others end at four fifths."""
    method = named_method(name)
    case = make_case(method, 1, progress=progress)
    compare(method, case, ORACLES[name][0](as_batch(case)), 0, 0)


@pytest.mark.parametrize("target", [0.4, 0.9, 1.7])
def test_polarity_weighs_what_moves_the_entropy_to_the_target(target: float):
    """The mean entropy is about 1: above the target, so far above that the phase is cut at −1, and below it."""
    method = named_method("papo").model_copy(update={"weight": PolarityWeight(target=target)})
    case = make_case(method, 0)
    compare(method, case, oracle.papo(as_batch(case), target), 0, 0)


@pytest.mark.parametrize("name", ["dual-clip", "gmpo", "dppo", "dppo-kl"])
def test_the_toy_steps_exercise_both_bounds(name: str):
    """Otherwise the comparison above would say nothing about them; for dual clip, its own bound as well."""
    flags, beyond = set(), 0
    for seed in range(3):
        method = named_method(name).model_copy(update=TOY.get(name, {}))
        case = make_case(method, seed)
        plan = prepare(method, case.step)
        out = policy_loss(
            method, plan, case.now, token_normalizer(method, case.mask, LIMIT, dtype=torch.float64)
        )
        flags |= set(out.clipped.flatten().tolist())
        beyond += int(((out.clipped == 1) & (plan.advantage < 0)).sum())
    assert flags == {-1, 0, 1}
    assert (beyond > 0) == (name == "dual-clip")


# -- divergence and correction -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo", "tr-grpo"])
def test_the_divergence_by_k1(name: str):
    method = named_method(name).with_preset("auto", "paper")
    method = method.model_copy(
        update={"kl": method.kl.model_copy(update={"coef": 0.07, "estimator": "k1"})}
    )
    case = make_case(method, 4)
    batch = as_batch(case)
    plain = {"grpo": oracle.grpo, "tr-grpo": lambda b: oracle.tr_grpo(b, "paper")}[name](batch)
    weight = oracle.sg_weights(batch, "paper") if name == "tr-grpo" else None

    def term(i: int, t: int) -> Tensor:
        return (
            -0.07
            * (1.0 if weight is None else weight[i, t])
            * (batch.now[i][t] - batch.reference[i][t])
        )

    compare(method, case, plain + oracle.total(batch, term), 0, 0)


CORRECTIONS: list[tuple[str, Correction]] = [
    ("token", TruncatedCorrection(high=1.1)),
    ("sequence", TruncatedCorrection(level="sequence", high=1.1)),
    ("token", MaskedCorrection(low=0.8, high=1.3)),
    ("sequence", MaskedCorrection(level="sequence", low=0.6, high=1.5)),
]


def correction_factor(batch: oracle.Batch, level: str, spec: Correction, i: int, t: int) -> float:
    """By the definitions, with products of probabilities."""
    rho = {s: math.exp(batch.behavior[i][s]) / math.exp(batch.sampler[i][s]) for s in batch.row(i)}
    value = rho[t] if level == "token" else math.prod(rho.values())
    if isinstance(spec, TruncatedCorrection):
        return min(value, spec.high)
    return value if spec.low <= value <= spec.high else 0.0


@pytest.mark.parametrize(("level", "spec"), CORRECTIONS)
@pytest.mark.parametrize("name", ["grpo", "vespo"])
def test_corrections_for_the_sampler(name: str, level: str, spec: Correction):
    """The factor multiplies the surrogate and not the KL term; in VESPO it enters the product of ratios."""
    given = named_method(name).model_dump() | {"correction": spec, "kl": Kl(coef=0.07)}
    if name == "vespo" and level != "token":
        with pytest.raises(ValueError, match=r"clip\.kind=vespo needs correction"):
            Method.model_validate(given)
        return
    method, seen = Method.model_validate(given), set()
    for seed in range(3):
        case = make_case(method, seed)
        batch = as_batch(case, beta=0.07)
        factor = {k: correction_factor(batch, level, spec, *k) for k in batch.tokens()}
        seen |= {round(f, 6) for f in factor.values()}
        weighted = (
            oracle.vespo(batch, lambda i, t, f=factor: f[i, t])
            if name == "vespo"
            else clipped(batch, weight=factor)
        )
        compare(method, case, weighted, 0, seed)
    assert len(seen) > 1
    # something is masked, something is not
    assert (0.0 in seen) != isinstance(spec, TruncatedCorrection)


def test_loss_output_reports_ratio_flags_and_kl():
    case = make_case(named_method("grpo"), 1)
    method = named_method("grpo").model_copy(
        update={"kl": named_method("grpo").kl.model_copy(update={"coef": 0.1})}
    )
    plan = prepare(method, case.step)
    normalizer = token_normalizer(method, case.mask, LIMIT, dtype=torch.float64)
    out = policy_loss(method, plan, case.now, normalizer, reference_logp=case.reference)
    batch = as_batch(case)
    for i, t in some(batch.tokens()):
        ratio, a = oracle.ratio(batch, i, t).item(), plan.advantage[i, t]
        assert float(out.ratio[i, t]) == pytest.approx(ratio, rel=1e-12)
        assert int(out.clipped[i, t]) == (
            1 if ratio > 1.2 and a > 0 else -1 if ratio < 0.8 and a < 0 else 0
        )
        assert float(out.kl[i, t]) == pytest.approx(oracle.k3(batch, i, t).item(), abs=1e-12)
    assert out.clipped.dtype == torch.int8
    assert {-1, 0, 1} == set(out.clipped.flatten().tolist())
    outside = ~case.mask
    assert out.ratio[outside].unique().tolist() == [1.0]
    assert not out.kl[outside].any()
    assert not out.clipped[outside].any()
    beside = 0.1 * float((out.kl * normalizer).sum())
    assert float(out.divergence) == pytest.approx(beside, abs=1e-12)


@pytest.mark.parametrize("name", ["grpo", "gspo", "holder", "gmpo"])
def test_a_row_without_tokens_has_no_gradient_and_breaks_nothing(name: str):
    method, case = named_method(name), make_case(named_method(name), 0)
    mask = case.mask.clone()
    mask[4] = False
    logp = case.now.clone().requires_grad_()
    normalizer = token_normalizer(method, mask, LIMIT, dtype=torch.float64)
    policy_loss(
        method, prepare(method, replace(case.step, mask=mask)), logp, normalizer
    ).loss.backward()
    assert (
        bool(torch.isfinite(logp.grad).all())
        and not logp.grad[4].any()
        and logp.grad.abs().max() > 1e-3
    )


def test_missing_log_probabilities_and_wrong_shapes_are_refused():
    method = named_method("grpo")
    case, given = make_case(method, 0), method.model_copy(update={"kl": Kl(coef=0.1)})
    normalizer = token_normalizer(method, case.mask, LIMIT)
    with pytest.raises(ValueError, match="reference_logp"):
        policy_loss(given, prepare(given, case.step), case.now, normalizer)
    with pytest.raises(ValueError, match="must agree"):
        policy_loss(method, prepare(method, case.step), case.now[:, :-1], normalizer)
    with pytest.raises(ValueError, match="must be"):
        replace(case.step, group=case.step.group[:-1])


def test_a_ratio_beyond_the_range_of_float32_does_not_poison_the_gradient():
    """A token that became certain since it was drawn: positive ones are clipped, so the gradient must be 0, not NaN."""
    case = make_case(named_method("grpo"), 0, dtype=torch.float32)
    step = type(case.step)(
        **(vars(case.step) | {"behavior_logp": torch.full_like(case.now, -100.0)})
    )
    method = named_method("grpo")
    logp = torch.zeros_like(case.now).requires_grad_()
    plan = prepare(method, step)
    out = policy_loss(method, plan, logp, token_normalizer(method, case.mask, LIMIT))
    out.loss.backward()
    positive = case.mask & (plan.advantage > 0)
    assert not logp.grad[positive].any()
    assert bool((out.clipped[positive] == 1).all())


# -- Ratios of sequences, their power means, and gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("p", [-50.0, -2.0, -1e-3, -1e-9, 1e-9, 1e-3, 1.0, 2.0, 50.0])
def test_power_mean_and_its_gradient_against_fifty_digits(p: float, dtype: torch.dtype):
    """Rows of 7, 1 and 0 tokens; p·x reaches ±3,000, far beyond where exp overflows."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4, 7, generator=g, dtype=dtype) * torch.tensor(
        [[0.2], [30.0], [60.0], [1.0]], dtype=dtype
    )
    x = x.clamp(-60, 60)
    mask = torch.tensor([[True] * 7, [True] * 7, [False] * 3 + [True] + [False] * 3, [False] * 7])
    x = torch.where(mask, x, torch.nan).requires_grad_()
    got = importance_ratio(HolderRatio(p=p), x, mask)
    (slope,) = torch.autograd.grad(got[:, 0].log().sum(), x)
    wanted, wanted_slope = (
        torch.ones(4, dtype=torch.float64),
        torch.zeros(4, 7, dtype=torch.float64),
    )
    with localcontext() as context:
        context.prec = 50
        power = Decimal(p)
        for i in range(3):
            places = mask[i].nonzero()[:, 0].tolist()
            terms = {t: (power * Decimal(x[i, t].item())).exp() for t in places}
            mean = sum(terms.values()) / len(terms)
            wanted[i] = float((mean.ln() / power).exp())
            for t in places:
                wanted_slope[i, t] = float(terms[t] / sum(terms.values()))
    tight = dtype == torch.float64
    torch.testing.assert_close(
        got.double(),
        wanted[:, None].expand_as(got),
        rtol=1e-12 if tight else 2e-5,
        atol=0,
        check_dtype=False,
    )
    torch.testing.assert_close(
        slope.double(), wanted_slope, rtol=1e-9 if tight else 1e-6, atol=1e-12
    )


# -- Selections of tokens and passes by value


def kept(method: Method, step: StepTensors, seed: int = 0) -> list[bool]:
    return prepare(method, step, torch.Generator().manual_seed(seed)).keep.flatten().tolist()


def test_selections_by_value():
    """High entropy keeps ties; probability and advantage split the tokens in two."""
    entropy = step_of(entropy=[0.1, 0.5, 0.9, 0.5, 0.2], logp=[-1.0] * 5)
    logp = [math.log(p) for p in (0.1, 0.49, 0.5, 0.9, 0.2)]
    split = step_of(logp=logp, advantage=[1.0, -1.0, 1.0, -1.0, 0.0])
    for step, tokens, expected in (
        (entropy, HighEntropyTokens(share=0.2), "00100"),
        (entropy, HighEntropyTokens(share=0.4), "01110"),
        (entropy, HighEntropyTokens(share=0.61), "01111"),
        (entropy, HighEntropyTokens(share=1.0), "11111"),
        (split, ProbabilityTokens(), "11001"),
        (split, ProbabilityTokens(side="high"), "00110"),
        (split, AdvantageTokens(), "10100"),
    ):
        assert kept(Method(name="x", tokens=tokens), step) == [c == "1" for c in expected], tokens


def test_clip_cov_draws_the_share_inside_the_band_and_says_when_that_is_less_than_one_token():
    # c = (ln π + 2)·(A − 0) = ±2: tokens 0 and 3 have +2, the others −2
    step = step_of(logp=[0.0, 0.0, -4.0, -4.0], advantage=[1.0, -1.0, 1.0, -1.0])
    method = named_method("clip-cov")
    assert {tuple(kept(method, step, seed)).index(False) for seed in range(20)} == {0, 3}
    assert sum(kept(method, step)) == 3
    assert "less than one token" in prepare(method, step, torch.Generator()).warnings[0]
    half = method.model_copy(update={"tokens": ClipCovTokens(share=0.75)})
    assert kept(half, step) == [False, True, True, False]  # three wanted, two in the band
    with pytest.raises(ValueError, match="generator"):
        prepare(method, step)


# -- Summaries of weights by value


def test_weight_summary_by_value():
    weight = torch.tensor([[1.0, 1.0, 1.2, 1.4, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    got = summarize_weights(SigmoidWeight(), weight, mask)
    assert (got.saturation_low, got.saturation_high, got.mean) == (0.5, 0.25, pytest.approx(1.15))
    massed = summarize_weights(
        SigmoidWeight(), weight, mask, mass=torch.tensor([[1.0, 0.0, 1.0, 2.0, 9.0]])
    )
    assert (massed.saturation_low, massed.saturation_high, massed.mean) == (
        0.25,
        0.5,
        pytest.approx(1.25),
    )
    assert summarize_weights(named_method("cov-grpo").weight, weight, mask).saturation_low is None
    assert math.isnan(summarize_weights(SigmoidWeight(), weight, torch.zeros_like(mask)).mean)


@pytest.mark.parametrize("seed", range(5))
def test_weighted_percentiles_against_brute_force(seed: int):
    """The smallest value with at least q % of the mass at or below it."""
    g = torch.Generator().manual_seed(seed)
    value = torch.randint(0, 12, (4, 9), generator=g).double()  # ties
    mass = torch.rand(4, 9, generator=g, dtype=torch.float64) * (
        torch.rand(4, 9, generator=g) < 0.7
    )
    mask = torch.rand(4, 9, generator=g) < 0.8
    value[~mask] = torch.nan
    inside, masses = value[mask].tolist(), mass[mask].tolist()
    for q in (0.5, 10, 37, 50, 90, 100):
        assert percentile(value, mask, q, mass) == oracle.mass_percentile(inside, masses, q / 100)


ASYMMETRIC = {
    "ppo": lambda high, low: [high, 0, 0, -low],
    "dual": lambda high, low: [high, 0, 0, -low],
    "cispo": lambda high, low: [high, high, -low, -low],
    "gmpo": lambda high, low: [high, 0, 0, -low],
    "dppo": lambda high, low: [high, 0, 0, -low],
}


@pytest.mark.parametrize(("low", "high"), [(0.1, 0.3), (0.3, 0.1)])
@pytest.mark.parametrize("kind", ASYMMETRIC)
def test_the_sides_of_an_asymmetric_clip_are_not_exchanged(kind, low, high):
    """Where a bound acts on ratios of 1.2 and 0.8 with both signs of the advantage, against the cases written out."""
    ratio = torch.tensor([[1.2, 1.2, 0.8, 0.8]], dtype=torch.float64)
    advantage = torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)
    base = "gmpo" if kind == "gmpo" else "grpo"
    settings = {"clip": {"kind": kind, "low": low, "high": high}}
    clip = Method.model_validate(named_method(base).model_dump() | settings).clip
    ones = torch.ones_like(ratio)
    at = RatioTerms(  # π = 1, so that dppo's |π − π_old| is |1 − 1/r|
        ratio=ratio,
        log_ratio=ratio.log(),
        logp=0 * ratio,
        advantage=advantage,
        mask=ones.bool(),
        correction=ones,
    )
    _, flags = clip.surrogate(at, torch)
    assert flags.tolist() == [ASYMMETRIC[kind](int(high < 0.2), int(low < 0.2))]


CLIPS = (
    PpoClip(),
    CispoClip(high=0.2),
    DualClip(),
    GmpoClip(),
    DppoMask(),
    SapoClip(),
    VespoClip(),
    FiberClip(low=2.0, high=2.0, token=0.01),
    DelightGate(),
)


@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: clip.kind)
def test_a_clip_says_whether_its_gradient_is_the_derivative_of_its_value(clip: RatioClip):
    random = torch.Generator().manual_seed(3)
    drawn = torch.rand(3, 2, 4, dtype=torch.float64, generator=random)
    behavior, advantage = -0.2 - drawn[0], drawn[1] - 0.5
    mask = torch.ones(2, 4, dtype=torch.bool)

    def value(logp: Tensor) -> Tensor:
        x = logp - behavior
        ratio = x.mean(-1, keepdim=True).exp().expand_as(x) if clip.kind == "gmpo" else x.exp()
        at = RatioTerms(
            ratio=ratio,
            log_ratio=x,
            logp=logp,
            advantage=advantage,
            mask=mask,
            correction=torch.ones_like(x),
        )
        return clip.surrogate(at, torch)[0].sum()

    logp = (behavior + 0.3 * (drawn[2] - 0.5)).requires_grad_()
    (gradient,) = torch.autograd.grad(value(logp), logp)
    differences = torch.zeros_like(gradient)
    with torch.no_grad():
        for place in [(row, column) for row in range(2) for column in range(4)]:
            step = torch.zeros_like(logp)
            step[place] = 1e-6
            differences[place] = (value(logp + step) - value(logp - step)) / 2e-6
    agrees = torch.allclose(gradient, differences, rtol=1e-5, atol=1e-8)
    assert gradient.abs().max() > 0.01 and agrees is clip.gradient_flows

"""Loss and ∂loss/∂ln π of every method against its equation in Python floats, to 1e-9."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sharpscope.config.method import (
    ClipCovTokens,
    Correction,
    CurvatureTokens,
    DualClip,
    Kl,
    KlCovPenalty,
    LpRegPenalty,
    MaskedCorrection,
    SpuriousTokens,
    TruncatedCorrection,
)
from sharpscope.config.token_weights import PepoWeight, PolarityWeight, StareWeight
from sharpscope.objective import (
    Method,
    calibrate,
    method_names,
    named_method,
    policy_loss,
    prepare,
    token_normalizer,
)
from tests.objective.data import LIMIT, Case, as_batch, make_case
from tests.oracles import objective as oracle


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
    **{name: {"clip": DualClip(low=0.2, high=0.24, bound=1.3)} for name in ("ar", "lopti", "ar-lopti")},
    "stapo": {"tokens": ToySpurious()},
    "lp-reg": {"penalty": LpRegPenalty(share=0.5)},
    "stare": {"weight": ToyStare(M=0.9, target=1.2)},
    "pepo": {"weight": PepoWeight(window=3)},
    "dr-capo": {"tokens": CurvatureTokens()},
    "rein-capo": {"tokens": CurvatureTokens()},
}
ORACLES: dict[str, list[Callable[[oracle.Batch], Tensor]]] = {
    "grpo": [oracle.grpo],
    "grpo-sg": [oracle.grpo_sg],
    "tr-grpo": [oracle.tr_grpo],
    "ar": [lambda b: oracle.ar(b, 1.3)],
    "lopti": [lambda b: oracle.lopti(b, False, 1.3), lambda b: oracle.lopti(b, True, 1.3)],
    "ar-lopti": [lambda b: oracle.ar_lopti(b, False, 1.3), lambda b: oracle.ar_lopti(b, True, 1.3)],
    "cov-grpo": [oracle.cov_grpo],
    "cov-grpo-completion": [oracle.cov_grpo_completion],
    "stapo": [lambda b: oracle.stapo(b, 0.5, 0.6)],
    "lp-reg": [lambda b: oracle.lp_reg(b, 0.5)],
    "clip-cov": [lambda b: oracle.clip_cov(b, 0.2, -0.2, 1.0)],
    "kl-cov": [lambda b: oracle.kl_cov(b, 0.2)],
    "gspo": [oracle.gspo],
    "holder": [oracle.holder],
    "dapo": [oracle.dapo],
    "dr-grpo": [oracle.dr_grpo],
    "cispo": [oracle.cispo],
    "bnpo": [oracle.bnpo],
    "dual-clip": [lambda b: oracle.dual_clip(b, 1.3)],
    "sapo": [oracle.sapo],
    "gmpo": [oracle.gmpo],
    "dppo": [lambda b: oracle.dppo(b, False, 0.15)],
    "dppo-kl": [lambda b: oracle.dppo(b, True, 0.05)],
    "luspo": [oracle.luspo],
    "vespo": [oracle.vespo],
    "papo": [lambda b: oracle.papo(b, 1.7)],
    "high-entropy": [oracle.high_entropy],
    "grpo-sam": [oracle.grpo],
    "grpo-gnp": [oracle.grpo],
    "lite-ppo": [oracle.lite_ppo],
    "rloo": [oracle.rloo],
    "reinforce-pp": [oracle.reinforce_pp],
    "reinforce-pp-baseline": [lambda b: oracle.reinforce_pp(b, baseline=True)],
    "opo": [oracle.opo],
    "otb": [oracle.otb],
    "gdpo": [oracle.gdpo],
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
    normalizer = token_normalizer(method, case.mask, LIMIT, keep=plan.keep, group=case.step.group, dtype=torch.float64)
    logp = case.now.clone().requires_grad_()
    out = policy_loss(method, plan, logp, normalizer, reference_logp=case.reference, pass_index=pass_index)
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
    method = method.model_copy(update=TOY.get(name, {}) | {"kl": method.kl.model_copy(update={"coef": beta})})
    case = make_case(method, seed)
    method = method.model_copy(update={"weight": calibrate(method.weight, case.step)})

    def choose(candidates: int, count: int) -> list[int]:
        return torch.randperm(candidates, generator=torch.Generator().manual_seed(seed))[:count].tolist()

    assert method.pass_count == len(ORACLES[name])
    for index, equation in enumerate(ORACLES[name]):
        compare(method, case, equation(as_batch(case, beta=beta, choose=choose)), index, seed)


@pytest.mark.parametrize("name", ["grpo-sg", "tr-grpo"])
def test_published_constants(name: str):
    method = named_method(name).with_preset("auto", "paper")
    case = make_case(method, 5)
    equation = {"grpo-sg": oracle.grpo_sg, "tr-grpo": oracle.tr_grpo}[name]
    compare(method, case, equation(as_batch(case), "paper"), 0, 0)


@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_holder_is_annealed_through_its_limit(progress: float):
    """p = 2, 0 (the limit) and −2."""
    method = named_method("holder")
    case = make_case(method, 1, progress=progress)
    compare(method, case, oracle.holder(as_batch(case)), 0, 0)


def test_lp_reg_protects_some_chosen_tokens_only():
    """Some are left out by the filtered policy, some are likely enough by now; others have a penalty."""
    method = named_method("lp-reg").model_copy(update=TOY["lp-reg"])
    outcomes = set()
    for seed in range(6):
        case = make_case(method, seed)
        plan = prepare(method, case.step)
        negative = case.mask & (case.step.token_advantage < 0)
        kept = torch.isfinite(case.step.proxy_logp) & negative
        assert not (plan.penalty > 0)[~kept].any()
        for i, t in (plan.penalty > 0).nonzero().tolist():
            outcomes.add(bool(case.now[i, t] < case.step.proxy_logp[i, t]))
        outcomes.add(bool((negative & ~kept).any()) or None)
    assert outcomes >= {True, False}
    with pytest.raises(ValueError, match="needs proxy_logp"):
        prepare(method, replace(case.step, proxy_logp=None))


@pytest.mark.parametrize("name", ["dual-clip", "gmpo", "dppo", "dppo-kl"])
def test_the_toy_steps_exercise_both_bounds(name: str):
    """Otherwise the comparison above would say nothing about them; for dual clip, its own bound as well."""
    flags, beyond = set(), 0
    for seed in range(3):
        method = named_method(name).model_copy(update=TOY.get(name, {}))
        case = make_case(method, seed)
        plan = prepare(method, case.step)
        out = policy_loss(method, plan, case.now, token_normalizer(method, case.mask, LIMIT, dtype=torch.float64))
        flags |= set(out.clipped.flatten().tolist())
        beyond += int(((out.clipped == 1) & (plan.advantage < 0)).sum())
    assert flags == {-1, 0, 1}
    assert (beyond > 0) == (name == "dual-clip")


# -- divergence and correction -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo", "tr-grpo"])
def test_the_divergence_by_k1(name: str):
    method = named_method(name).with_preset("auto", "paper")
    method = method.model_copy(update={"kl": method.kl.model_copy(update={"coef": 0.07, "estimator": "k1"})})
    case = make_case(method, 4)
    batch = as_batch(case)
    plain = {"grpo": oracle.grpo, "tr-grpo": lambda b: oracle.tr_grpo(b, "paper")}[name](batch)
    weight = oracle.sg_weights(batch, "paper") if name == "tr-grpo" else None

    def term(i: int, t: int) -> Tensor:
        return -0.07 * (1.0 if weight is None else weight[i, t]) * (batch.now[i][t] - batch.reference[i][t])

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
@pytest.mark.parametrize("name", ["dapo", "gspo", "vespo"])
def test_corrections_for_the_sampler(name: str, level: str, spec: Correction):
    """The factor multiplies the surrogate and not the KL term; in VESPO it enters the product of ratios."""
    if name == "vespo" and level != "token":
        with pytest.raises(ValueError, match=r"clip\.kind=vespo needs correction"):
            Method.model_validate(named_method(name).model_dump() | {"correction": spec})
        return
    method = named_method(name)
    method = method.model_copy(update={"correction": spec, "kl": Kl(coef=0.07)})
    seen = set()
    for seed in range(3):
        case = make_case(method, seed)
        batch = as_batch(case, beta=0.07)
        adv = oracle.advantages(batch)
        factor = {k: correction_factor(batch, level, spec, *k) for k in batch.tokens()}
        seen |= {round(f, 6) for f in factor.values()}
        if name == "vespo":
            wanted = oracle.vespo(batch, lambda i, t, factor=factor: factor[i, t])
        elif name == "dapo":
            wanted = oracle.total(
                batch,
                lambda i, t, f=factor, a=adv, b=batch: f[i, t] * oracle.ppo(oracle.ratio(b, i, t), a[i], 0.2, 0.28),
                how="token",
            )
        else:
            wanted = oracle.total(
                batch,
                lambda i, t, f=factor, a=adv, b=batch: (
                    f[i, t] * oracle.ppo(oracle.sequence_ratio(b, i), a[i], 3e-4, 4e-4)
                ),
            )
        compare(method, case, wanted, 0, seed)
    assert len(seen) > 1
    assert (0.0 in seen) != isinstance(spec, TruncatedCorrection)  # something is masked, something is not

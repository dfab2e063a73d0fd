"""Loss and ∂loss/∂ln π of every method against its equation in Python floats, to 1e-9."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sharpscope.config.method import ClipCovTokens, KlCovPenalty
from sharpscope.config.token_weights import PolarityWeight
from sharpscope.objective import (
    Method,
    calibrate,
    choose_preset,
    method_names,
    named_method,
    passes_of,
    policy_loss,
    prepare,
    token_normalizer,
)
from tests.objective.data import LIMIT, Case, as_batch, make_case
from tests.oracles import objective as oracle

#: Shares and bands at which a toy batch exercises the selections; the published ones pick one token or none.
TOY = {
    "clip-cov": {"tokens": ClipCovTokens(share=0.2, low=-0.2, high=1.0)},
    "kl-cov": {"penalty": KlCovPenalty(share=0.2)},
    "papo": {"weight": PolarityWeight(target=1.7)},
}
ORACLES: dict[str, list[Callable[[oracle.Batch], oracle.Dual]]] = {
    "grpo": [oracle.grpo],
    "grpo-sg": [oracle.grpo_sg],
    "tr-grpo": [oracle.tr_grpo],
    "ar": [oracle.ar],
    "lopti": [lambda b: oracle.lopti(b, False), lambda b: oracle.lopti(b, True)],
    "ar-lopti": [lambda b: oracle.ar_lopti(b, False), lambda b: oracle.ar_lopti(b, True)],
    "cov-grpo": [oracle.cov_grpo],
    "clip-cov": [lambda b: oracle.clip_cov(b, 0.2, -0.2, 1.0)],
    "kl-cov": [lambda b: oracle.kl_cov(b, 0.2)],
    "gspo": [oracle.gspo],
    "holder": [oracle.holder],
    "dapo": [oracle.dapo],
    "dr-grpo": [oracle.dr_grpo],
    "cispo": [oracle.cispo],
    "papo": [lambda b: oracle.papo(b, 1.7)],
    "ppo-ewma": [oracle.ppo_ewma],
    "high-entropy": [oracle.high_entropy],
    "grpo-sam": [oracle.grpo],
    "grpo-gnp": [oracle.grpo],
}


def test_every_named_method_has_an_oracle():
    assert set(ORACLES) == set(method_names())


def compare(method: Method, case: Case, expected: oracle.Dual, pass_index: int, seed: int) -> None:
    plan = prepare(method, case.step, torch.Generator().manual_seed(seed))
    normalizer = token_normalizer(method, case.mask, LIMIT, dtype=torch.float64)
    logp = case.now.clone().requires_grad_()
    out = policy_loss(
        method,
        plan,
        logp,
        normalizer,
        reference_logp=case.reference,
        proximal_logp=case.proximal,
        pass_index=pass_index,
    )
    (gradient,) = torch.autograd.grad(out.loss, logp)
    wanted = torch.zeros_like(gradient)
    for (i, t), slope in expected.slope.items():
        wanted[i, t] = slope
    assert abs(float(out.loss.detach()) - expected.value) < 1e-9
    assert float((gradient - wanted).abs().max()) < 1e-9
    assert wanted.abs().max() > 1e-3  # the comparison is about something


@pytest.mark.parametrize("beta", [0.0, 0.07])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", sorted(ORACLES))
def test_loss_and_gradient_equal_the_equation(name: str, seed: int, beta: float):
    method = named_method(name)
    method = method.model_copy(update=TOY.get(name, {}) | {"kl": method.kl.model_copy(update={"coef": beta})})
    case = make_case(method, seed)
    method = method.model_copy(update={"weight": calibrate(method.weight, case.step)})

    def choose(candidates: int, count: int) -> list[int]:
        return torch.randperm(candidates, generator=torch.Generator().manual_seed(seed))[:count].tolist()

    assert passes_of(method) == len(ORACLES[name])
    for index, equation in enumerate(ORACLES[name]):
        compare(method, case, equation(as_batch(case, beta=beta, choose=choose)), index, seed)


@pytest.mark.parametrize("name", ["grpo-sg", "tr-grpo"])
def test_published_constants(name: str):
    method = named_method(name)
    method = method.model_copy(update={"weight": choose_preset(method.weight, "paper")})
    case = make_case(method, 5)
    equation = {"grpo-sg": oracle.grpo_sg, "tr-grpo": oracle.tr_grpo}[name]
    compare(method, case, equation(as_batch(case), "paper"), 0, 0)


@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_holder_is_annealed_through_its_limit(progress: float):
    """p = 2, 0 (the limit) and −2."""
    method = named_method("holder")
    case = make_case(method, 1, progress=progress)
    compare(method, case, oracle.holder(as_batch(case)), 0, 0)


def test_negative_eta_reverses_lopti():
    method = named_method("lopti")
    method = method.model_copy(update={"passes": method.passes.model_copy(update={"eta": -0.4})})
    case = make_case(method, 2)
    compare(method, case, oracle.lopti(as_batch(case), True), 0, 0)
    compare(method, case, oracle.lopti(as_batch(case), False), 1, 0)


def test_kl_cov_with_the_unbiased_estimator():
    """r − 1 − ln r on every token."""
    method = named_method("kl-cov").model_copy(update={"penalty": KlCovPenalty(share=1.0, coef=0.3, estimator="k3")})
    case = make_case(method, 3)
    batch = as_batch(case)
    adv = oracle.advantages(batch)

    def objective(i: int, t: int) -> oracle.Dual:
        r = oracle.ratio(batch, i, t)
        return r * adv[i] - 0.3 * (r - 1.0 - (batch.now[i][t] - batch.behavior[i][t]))

    compare(method, case, oracle.total(batch, objective), 0, 0)

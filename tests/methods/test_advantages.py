"""Advantage estimators against loops in Python floats, their laws, and the configurations that choose them."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from sharpscope.errors import UserError
from sharpscope.methods import advantages
from sharpscope.methods.advantages import estimate_advantages, informative_groups, overlong_penalty
from sharpscope.methods.method import (
    Advantage,
    BaselineAdvantage,
    DecoupledAdvantage,
    GroupAdvantage,
    WhitenedAdvantage,
)
from tests.oracles import objective as oracle

laws = settings(max_examples=12, deadline=None, derandomize=True)
seeds = st.integers(0, 10_000)
# sizes 4, 3, 2, 1 in mixed order; group 2 has equal rewards
GROUP = torch.tensor([4, 0, 7, 4, 0, 4, 2, 0, 2, 4])
FLAT, SINGLE = GROUP == 2, GROUP == 7


class Outcomes:
    """Rewards, masks with holes and padding, and statistics of 10 completions of at most 6 tokens."""

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.reward = torch.randn(10, generator=g, dtype=torch.float64)
        self.reward[FLAT] = 0.1  # the mean of two 0.1 may round
        self.form = torch.randint(0, 2, (10,), generator=g).double() * 0.7
        self.form[FLAT] = 0.7
        lengths = torch.randint(1, 7, (10,), generator=g)
        lengths[0] = 6
        self.mask = torch.arange(6) < lengths[:, None]
        self.mask[0, 1] = False  # text that a tool returned
        self.logp = -3 * torch.rand(10, 6, generator=g, dtype=torch.float64) - 1e-3
        pi = self.logp.exp()
        self.collision = pi**2 + (1 - pi) ** 2 * torch.rand(10, 6, generator=g, dtype=torch.float64)
        self.logp[~self.mask] = torch.nan
        self.collision[~self.mask] = torch.inf

    def estimate(
        self, spec: Advantage, reward: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        given = self.reward if reward is None else reward
        return estimate_advantages(
            spec,
            given,
            GROUP,
            self.mask if mask is None else mask,
            parts={"answer": given, "format": self.form},
            correct=given > 0,
            logp=self.logp,
            collision=self.collision,
        )

    def batch(self) -> oracle.Batch:
        return oracle.Batch(
            self.reward.tolist(),
            GROUP.tolist(),
            self.mask.tolist(),
            old=self.logp.tolist(),
            collision=self.collision.tolist(),
            parts={"answer": self.reward.tolist(), "format": self.form.tolist()},
        )


LEAVE_ONE_OUT, LENGTH, TOKEN = (
    BaselineAdvantage(kind=kind) for kind in ("leave_one_out", "length_baseline", "token_baseline")
)
ESTIMATORS = {
    "group": (GroupAdvantage(), oracle.advantages),
    "centered": (GroupAdvantage(scale="none"), lambda b: oracle.advantages(b, divide=False)),
    "batch": (GroupAdvantage(scale="batch"), oracle.batch_scaled),
    "rloo": (LEAVE_ONE_OUT, oracle.leave_one_out),
    "whitened": (WhitenedAdvantage(), lambda b: oracle.whitened(b, baseline=False)),
    "whitened, baseline": (
        WhitenedAdvantage(baseline="group"),
        lambda b: oracle.whitened(b, baseline=True),
    ),
    "length baseline": (LENGTH, oracle.length_baseline),
    "token baseline": (TOKEN, oracle.token_baseline),
    "decoupled": (
        DecoupledAdvantage(weights={"answer": 2.0, "format": -0.5, "absent": 0.0}),
        lambda b: oracle.decoupled(b, {"answer": 2.0, "format": -0.5}),
    ),
    "mean scaled": (
        BaselineAdvantage(kind="mean_scaled"),
        lambda b: oracle.mean_scaled(b, [float(r > 0) for r in b.reward]),
    ),
}


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("seed", range(2))
def test_estimators_equal_their_equations(name: str, seed: int):
    spec, equation = ESTIMATORS[name]
    case = Outcomes(seed)
    found, wanted = case.estimate(spec), equation(case.batch())
    if isinstance(wanted, dict):
        assert found.shape == case.mask.shape and not found[~case.mask].any()
        wanted = [wanted[i, t] for i, t in torch.nonzero(case.mask).tolist()]
        found = found[case.mask]
    assert found.tolist() == pytest.approx(wanted, abs=1e-9)
    assert found.dtype == torch.float64 and float(found.abs().max()) > 0.1


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if not name.startswith("whitened")])
def test_groups_of_one_or_with_equal_rewards_have_exactly_zero(name: str):
    """But for the optimal token baseline where one completion of the group is left, which has its reward as in verl."""
    for seed in range(4):
        case = Outcomes(seed)
        found = case.estimate(ESTIMATORS[name][0])
        if name != "token baseline":
            assert not found[FLAT | SINGLE].any()
            continue
        lengths = case.mask.sum(1)
        shared = int(lengths[FLAT].min())
        assert not found[FLAT, :shared].any()
        beyond = case.mask & SINGLE[:, None] | case.mask & FLAT[:, None] & (
            torch.arange(6) >= shared
        )
        assert torch.equal(found[beyond], case.reward[:, None].expand(10, 6)[beyond])


@pytest.mark.parametrize(
    "spec",
    [
        WhitenedAdvantage(),
        WhitenedAdvantage(baseline="group"),
        DecoupledAdvantage(),
        GroupAdvantage(scale="batch"),
    ],
)
def test_a_step_without_variance_has_exactly_zero(spec: Advantage):
    case = Outcomes(0)
    case.form = torch.full_like(case.form, 0.3)
    for reward in (torch.full_like(case.reward, 0.1), torch.zeros_like(case.reward)):
        assert not exact(case, spec, reward).any()
    assert not case.estimate(
        spec, torch.full_like(case.reward, 0.1), torch.zeros_like(case.mask)
    ).any()


def exact(case: Outcomes, spec: Advantage, reward: Tensor | None = None) -> Tensor:
    """The estimate without the small constants that avoid divisions by 0, and 0 for tokens without another to compare with."""
    with (
        patch.object(advantages, "STD_EPSILON", 0.0),
        patch.object(advantages, "SQUARE_EPSILON", 0.0),
    ):
        found = case.estimate(spec, reward)
    if spec == TOKEN:
        places = torch.where(case.mask, case.mask.cumsum(1), 0)  # the t-th loss token
        same = (GROUP[:, None, None, None] == GROUP[:, None]) & (places[:, :, None, None] == places)
        found = torch.where(same.sum((2, 3)) > 1, found, 0.0)
    return found


@laws
@given(seeds, st.floats(-3, 3), st.floats(0.1, 10))
def test_shifts_cancel_and_scales_cancel_or_carry_over(seed: int, shift: float, scale: float):
    case = Outcomes(seed)
    other = case.reward * scale + shift
    for spec, factor in (
        (LEAVE_ONE_OUT, scale),
        (LENGTH, scale),
        (TOKEN, scale),
        (GroupAdvantage(scale="batch"), 1.0),
        (WhitenedAdvantage(), 1.0),
        (WhitenedAdvantage(baseline="group"), 1.0),
        (DecoupledAdvantage(), 1.0),
    ):
        torch.testing.assert_close(
            exact(case, spec, other), factor * exact(case, spec), rtol=1e-9, atol=1e-9
        )


def test_mistakes():
    case = Outcomes(0)
    with pytest.raises(UserError, match=r"weights\.style = 1.*its parts: answer, format; set"):
        case.estimate(DecoupledAdvantage(weights={"style": 1.0}))
    with pytest.raises(ValidationError, match="at least one part"):
        DecoupledAdvantage(weights={"answer": 0.0})
    with pytest.raises(ValueError, match="not finite"):
        case.estimate(LEAVE_ONE_OUT, torch.where(SINGLE, torch.nan, case.reward))


def test_float32_groups_without_variance_give_exactly_zero():
    """The float32 mean of three 0.1 is not 0.1."""
    reward, group = torch.tensor([0.1, 0.1, 0.1, 1e30, -1e30]), torch.tensor([7, 7, 7, 2, 2])
    got = estimate_advantages(GroupAdvantage(), reward, group, torch.ones(5, 1))
    assert got[:3].tolist() == [0.0] * 3 and got[3:].tolist() == pytest.approx(
        [0.5**0.5, -(0.5**0.5)]
    )
    assert informative_groups(reward, group).tolist() == [False] * 3 + [True] * 2


def test_overlong_penalty_is_dapos():
    """Limit 100, buffer 20: 0 up to 80 tokens, then linear to −1 at 100."""
    length = torch.tensor([0, 80, 81, 90, 100, 120])
    got = overlong_penalty(0.2, length, 100)
    assert got.tolist() == pytest.approx([0.0, 0.0, -0.05, -0.5, -1.0, -1.0])

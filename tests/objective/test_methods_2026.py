"""Laws and published examples of the methods of 2026; their losses are compared with oracles in `test_objective.py`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpscope.config.method import BinTokens, RelativeSurpriseTokens, SuffixTokens
from sharpscope.config.token_weights import EntropyAdvantageWeight, PepoWeight, StareWeight
from sharpscope.objective import (
    Method,
    MethodState,
    StepTensors,
    clipped_norm,
    named_method,
    policy_loss,
    prepare,
    token_weights,
)
from sharpscope.objective.plan import token_bins
from tests.objective.data import make_case, tokens_step

laws = settings(max_examples=25, deadline=None, derandomize=True)


def one_row(**columns: list[float]) -> StepTensors:
    """One completion of all tokens given."""
    values = {name: torch.tensor([value], dtype=torch.float64) for name, value in columns.items()}
    like = next(iter(values.values()))
    advantage = values.pop("advantage", torch.ones_like(like))
    zero = {
        name: torch.zeros_like(like) for name in ("behavior_logp", "logp", "logit", "entropy", "collision", "polarity")
    }
    return StepTensors(mask=torch.ones_like(like), group=torch.zeros(1), advantage=advantage, **(zero | values))


def gate(advantage: float, logp: float) -> float:
    """The factor of A in the coefficient of one token."""
    method = named_method("delight")
    step = tokens_step([0.0], [logp], [advantage])
    now = torch.tensor([[logp]], requires_grad=True)
    loss = policy_loss(method, prepare(method, step), now, torch.ones(1, 1)).loss
    return float(torch.autograd.grad(loss, now)[0]) / -advantage


def test_the_delightful_gate_is_one_half_at_no_delight_and_sees_the_sign():
    """Published examples: A = ±1/2 and surprise 0 or 10."""
    assert gate(0.5, 0.0) == gate(-0.5, 0.0) == pytest.approx(0.5)
    assert gate(0.5, -10.0) == pytest.approx(0.9933, abs=1e-4)
    assert gate(-0.5, -10.0) == pytest.approx(0.0067, abs=1e-4)
    assert gate(1e-6, -5.0) == pytest.approx(0.5, abs=1e-5)  # no advantage, no delight


def test_stare_takes_quantiles_over_the_step(monkeypatch):
    """The example of the authors' microbatches: only the least likely of four tokens has W."""
    monkeypatch.setattr(StareWeight, "share", 0.25)
    step = tokens_step([0.1] * 4, [-0.1, -2.0, -0.3, -5.0], [1.0] * 4)
    assert token_weights(StareWeight(), step).flatten().tolist() == pytest.approx([1, 1, 1, 1.1])
    assert (token_weights(StareWeight(target=0.05), step) == 1).all()  # the entropy is not low
    signs = tokens_step([0.1] * 4, [-0.1, -2.0, -0.3, -5.0], [1.0, -1.0, 1.0, -1.0])
    monkeypatch.setattr(StareWeight, "share", 0.5)
    found = token_weights(StareWeight(M=0.9), signs).flatten().tolist()
    assert found == pytest.approx([1, 1, 1.1, 0.9])


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
@given(st.integers(0, 10_000), st.floats(-3.0, 3.0), st.integers(1, 9))
def test_pepo_has_mean_one_and_ignores_a_shift_of_all_entropies(seed: int, shift: float, window: int):
    step = make_case(named_method("grpo"), seed, garbage=False).step
    weight = token_weights(PepoWeight(window=window), step)
    shifted = token_weights(PepoWeight(window=window), replace(step, entropy=step.entropy + shift))
    torch.testing.assert_close(weight, shifted, rtol=1e-12, atol=0)
    count = step.mask.sum(1)
    torch.testing.assert_close(weight.sum(1)[count > 0], count[count > 0].double(), rtol=1e-12, atol=0)


def test_pepo_with_constant_entropy():
    """1 where every window has all tokens; at truncated windows up to twice the weight."""
    assert token_weights(PepoWeight(), one_row(entropy=[0.7] * 50)).flatten().tolist() == pytest.approx([1.0] * 50)
    weight = token_weights(PepoWeight(window=5), one_row(entropy=[0.7] * 20))[0]
    assert weight[0] / weight[10] == pytest.approx(5 / 3)
    negative = one_row(entropy=[0.1, 2.0, 0.3], advantage=[-1.0] * 3)
    assert (token_weights(PepoWeight(window=1), negative) == 1).all()


@laws
@given(st.floats(-3, 3), st.floats(0, 8), st.floats(0, 1))
def test_the_entropy_term_of_the_advantage(advantage: float, entropy: float, strength: float):
    weight = float(
        token_weights(EntropyAdvantageWeight(strength=strength), one_row(entropy=[entropy], advantage=[advantage]))
    )
    wanted = advantage + strength * min(0.4 * entropy, abs(advantage) / 2)
    assert advantage * weight == pytest.approx(wanted, abs=1e-12)
    assert weight >= 0.5


def test_bins_and_what_they_do_to_the_entropy():
    """Peak and valley by Σ π²; raising the logit of a peak lowers −ln Σ π², of a valley raises it."""
    logits = torch.randn(300, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    p = logits.softmax(-1)
    chosen = torch.arange(300) % 12
    logp, collision = p.log()[torch.arange(300), chosen], (p**2).sum(-1)
    step = replace(one_row(logp=logp.tolist(), advantage=[1.0] * 300), collision=collision[None])
    bins = token_bins(step)
    raised = logits.clone()
    raised[torch.arange(300), chosen] += 1e-6
    rises = -(raised.softmax(-1) ** 2).sum(-1).log() > -collision.log()
    assert torch.equal(bins["pos_valley"][0], rises) and torch.equal(bins["pos_peak"][0], ~rises)
    assert 30 < int(rises.sum()) < 270
    signs = replace(step, advantage=torch.tensor([[1.0, -1.0, 0.0] * 100], dtype=torch.float64))
    for spec in (BinTokens(include=("pos_peak", "neg_valley")), BinTokens(exclude=("pos_valley", "neg_peak"))):
        keep = prepare(Method(name="bins", tokens=spec), signs).keep[0]
        peak, sign = ~rises, signs.advantage[0]
        wanted = (peak & (sign > 0)) | (~peak & (sign < 0))
        assert torch.equal(keep[sign != 0], wanted[sign != 0])
    with pytest.raises(ValueError, match="needs include or exclude"):
        BinTokens()


def test_relative_surprise_is_one_where_all_words_are_alike_and_zero_where_the_policy_is_certain():
    for words in (2, 50):
        step = one_row(logp=[-math.log(words), 0.0], entropy=[math.log(words), 0.0])
        spec = RelativeSurpriseTokens(low=1 - 1e-6, high=1 + 1e-6)
        assert prepare(Method(name="x", tokens=spec), step).keep.tolist() == [[True, False]]


@pytest.mark.parametrize(("context", "left"), [(0.0, 4), (0.25, 3), (0.3, 3), (0.74, 2), (0.99, 1), (1.0, 1)])
def test_the_last_token_of_a_completion_is_always_in_the_loss(context: float, left: int):
    keep = prepare(Method(name="x", tokens=SuffixTokens(context=context)), one_row(logp=[-1.0] * 4)).keep
    assert keep.tolist() == [[False] * (4 - left) + [True] * left]


def test_the_schedules_reach_plain_selection_at_four_fifths():
    for name in ("tp-schedule", "forking-schedule"):
        method = named_method(name)
        shares = []
        for progress in (0.0, 0.4, 0.8, 1.0):
            case = make_case(method, 0, progress=progress)
            shares.append(int(prepare(method, case.step).keep.sum()) / int(case.mask.sum()))
        assert shares[0] < shares[1] < shares[2] == shares[3] == 1.0
    assert named_method("entropy-schedule").weight.at(0.4).strength == pytest.approx(0.495)


@laws
@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=12), st.floats(1.1, 4.0))
def test_the_clip_by_module_bounds_a_norm_by_its_own_history(norms: list[float], high: float):
    average = None
    for norm in norms:
        factor, after = clipped_norm(high, norm, average)
        if average is not None:
            assert norm * factor == pytest.approx(min(norm, high * average))
            assert after == pytest.approx(0.95 * average + 0.05 * min(norm, high * average))
        average = after
    same = clipped_norm(high, norms[0], norms[0])
    assert same == (1.0, pytest.approx(norms[0]))  # a norm that does not change is not clipped

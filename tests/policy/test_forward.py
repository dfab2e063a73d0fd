"""Log-probabilities of finished completions: against one forward pass per token, and against themselves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpscope.policy import cache, forward, head, load_policy
from sharpscope.policy.cache import take_rows
from sharpscope.policy.forward import Scorer, length_buckets, microbatches, score_completions
from sharpscope.policy.head import layers_of
from sharpscope.policy.token_stats import flat_entropy, flat_logp
from tests.loops import some
from tests.models import ARCHITECTURES, tiny_model
from tests.oracles.generation import completion_logp
from tests.policy.conftest import (
    COMPLETIONS,
    PROMPTS,
    completions_by_hand,
    random_prompts,
    rows,
    score_gradients,
    spec,
    tiny_policy,
    weighted,
)


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    found = torch.autograd.grad(
        loss, list(model.parameters()), allow_unused=True, retain_graph=True
    )
    return [
        torch.zeros_like(p) if g is None else g
        for p, g in zip(model.parameters(), found, strict=True)
    ]


def assert_gradients_equal(
    model: torch.nn.Module, a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-6
) -> None:
    for (name, _), x, y in zip(
        model.named_parameters(), gradients(model, a), gradients(model, b), strict=True
    ):
        assert float((x - y).abs().max()) <= tolerance * (1 + float(x.abs().max())), name


# Some kernels compute in single precision whatever the model's type: routing of experts, eager attention's softmax.
TOLERANCE = {"gemma2": 1e-6, "qwen2_moe": 1e-6}


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_values_and_gradients_equal_one_forward_pass_per_token(architecture, apart, monkeypatch):
    """Also with more padding, in another order, and in as many buckets as there are lengths."""
    model, temperature, order = tiny_model(architecture), 1.3, torch.arange(7)
    batch = rows()
    if apart:
        monkeypatch.setattr(forward, "BUCKET_TOKENS", {"cpu": 0, "cuda": 0})
        order = torch.tensor([5, 0, 3, 6, 1, 4, 2])
        batch = rows(left=5, right=4).rows(order)
    flat = [(p, c) for p, group in zip(PROMPTS, COMPLETIONS, strict=True) for c in group]
    slow = torch.zeros(batch.completion_ids.shape, dtype=torch.float64)
    for n, place in enumerate(order.tolist()):
        prompt, completion = flat[place]
        slow[n, : len(completion)] = completion_logp(model, prompt, completion, temperature)
    tolerance = TOLERANCE.get(architecture, 1e-11)
    for share in (False, True):
        scored = score_completions(model, batch, temperature, share_prompt=share, with_grad=True)
        assert float((scored.logp - slow).detach().abs().max()) < tolerance
        assert_gradients_equal(model, weighted(scored.logp), weighted(slow), max(tolerance, 1e-9))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", ["qwen2", "gemma2", "gpt2"])
def test_a_beginning_that_all_prompts_share_is_run_once(architecture, checkpointing, monkeypatch):
    """With beginnings longer than the sliding window, and one prompt that is the beginning of another."""
    model, (start,) = tiny_model(architecture), random_prompts((11,), seed=5)
    prompts = [[*start, 3, 5, 4], [*start, 3], [*start, 3, 5, 7, 9]]
    batch = completions_by_hand(prompts, COMPLETIONS)
    options = {"share_prompt": True, "with_grad": True, "gradient_checkpointing": checkpointing}
    plain = score_completions(model, batch, 1.3, **options).logp
    passes = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, given, out: passes.append(tuple(given[0].shape))
    )
    monkeypatch.setattr(cache, "WORTH_A_PASS", 1)
    shared = score_completions(model, batch, 1.3, **options).logp
    assert passes[:2] == [(1, 11), (3, 4)]
    tolerance = TOLERANCE.get(architecture, 1e-11)
    assert float((shared - plain).detach().abs().max()) < tolerance
    assert_gradients_equal(model, weighted(shared), weighted(plain), max(tolerance, 1e-9))


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("architecture", ["qwen2", "gemma2"])
def test_the_differentiable_entropy(architecture, share, monkeypatch):
    """Values and gradients of Σ a_t·H_t against a plain forward pass; with a soft cap (gemma2) and in several chunks."""
    model, batch, temperature = tiny_model(architecture), rows(), 1.3
    monkeypatch.setattr("sharpscope.policy.token_stats.LOGIT_BYTES", {"cpu": 4096, "cuda": 4096})
    options = {"share_prompt": share, "with_grad": True, "stats": True, "function": flat_entropy}
    scored = score_completions(model, batch, temperature, **options)
    slow = torch.zeros(batch.completion_ids.shape, dtype=torch.float64)
    flat = [(p, c) for p, group in zip(PROMPTS, COMPLETIONS, strict=True) for c in group]
    for n, (prompt, completion) in enumerate(flat):
        z = (
            model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
            / temperature
        )
        p = z.softmax(-1)
        slow[n, : len(completion)] = -(p * p.log()).sum(-1)
    tolerance = TOLERANCE.get(architecture, 1e-9)
    assert float((scored.values - slow).detach().abs().max()) < tolerance
    assert float((scored.values - scored.stats.entropy).detach().abs().max()) < tolerance
    assert_gradients_equal(model, weighted(scored.values), weighted(slow), tolerance)


def test_different_prompts_in_one_group_cannot_be_shared():
    batch = rows()
    object.__setattr__(batch, "group", torch.zeros(len(batch), dtype=torch.long))
    with pytest.raises(ValueError, match="different prompts"):
        score_completions(tiny_model(), batch, 1.0, share_prompt=True, with_grad=False)
    with pytest.raises(ValueError, match="temperature 0"):
        score_completions(tiny_model(), batch, 0.0, share_prompt=False, with_grad=False)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(0, 40))
def test_buckets_waste_the_least(lengths, cost):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "BUCKET_TOKENS", {"cpu": cost, "cuda": cost})
        buckets = [
            bucket.tolist() for bucket in length_buckets(np.array(lengths), torch.device("cpu"))
        ]
    assert sorted(itertools.chain(*buckets)) == list(range(len(lengths)))

    def total(parts: list[list[int]]) -> int:
        return sum(cost + len(part) * max(part) for part in parts)

    # Some best split keeps rows in order of length, so all splits of the sorted lengths are enough to compare with.
    ordered, totals = sorted(lengths), []
    for cuts in itertools.product([False, True], repeat=len(lengths) - 1):
        bounds = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(lengths)]
        totals.append(total([ordered[a:b] for a, b in itertools.pairwise(bounds)]))
    assert total([[lengths[i] for i in bucket] for bucket in buckets]) == min(totals)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 4), st.integers(1, 120), st.booleans(), st.integers(0, 999)
)
def test_microbatches_hold_every_row_once_and_keep_groups_together(
    groups, size, budget, shared, seed
):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 40, (groups * size,), generator=g)
    prompt = torch.randint(1, 20, (groups,), generator=g).repeat_interleave(size)
    group = torch.randperm(groups, generator=g).repeat_interleave(size) if shared else None
    batches = microbatches(lengths, budget, prompt_lengths=prompt, group=group)
    assert sorted(torch.cat(batches).tolist()) == list(range(groups * size))
    for batch in some(batches):
        assert batch.tolist() == sorted(batch.tolist())
        units = batch.tolist() if group is None else group[batch].unique().tolist()
        work = int(lengths[batch].sum())
        for unit in some(units):
            members = torch.tensor([unit]) if group is None else (group == unit).nonzero()[:, 0]
            whole = int(lengths[members].sum() + prompt[members[0]])
            # a group that fits is in one piece
            assert whole > budget or torch.isin(members, batch).all()
            work += int(prompt[members[0]])
        assert work <= budget or len(batch) == 1


def test_taking_rows_has_the_gradients_of_indexing():
    states = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([3, 0, 0, 3, 3])
    assert torch.equal(take_rows(states, rows), states[rows])
    assert torch.autograd.gradcheck(lambda x: take_rows(x, rows), states)
    assert torch.autograd.gradgradcheck(lambda x: take_rows(x, rows), states)


# -- Statistics of rollouts in microbatches, against one plain forward pass of each row

SCORED = [[[3, 4, 5, 1], [6, 1]], [[7, 8, 9], [10, 11, 12, 13, 1]], [[2, 1], [14, 15, 16]]]


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("microbatch_tokens", [1, 12, 10_000])
def test_statistics_are_those_of_each_row_alone(share_prompt, microbatch_tokens):
    policy, temperature = tiny_policy(dtype=torch.float64), 0.7
    rollouts = completions_by_hand(random_prompts((3, 6, 4)), SCORED, left=2, right=1).with_reward(
        torch.zeros(6)
    )
    found = Scorer(policy.model, temperature, microbatch_tokens, share_prompt).statistics(rollouts)
    P = rollouts.prompt_width
    for row in range(len(rollouts)):
        ids = rollouts.input_ids[row][rollouts.attention_mask[row].bool()].tolist()
        first, length = int(rollouts.prompt_lengths[row]), int(rollouts.lengths[row])
        logp = completion_logp(policy.model, ids[:first], ids[first:], temperature).detach()
        assert rollouts.input_ids[row, P : P + length].tolist() == ids[first:]
        torch.testing.assert_close(found.logp[row, :length], logp, rtol=1e-9, atol=1e-9)
        assert not found.logp[row, length:].any()


# -- Layers computed twice, one pass for all rows, and bfloat16


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layers_computed_again_give_the_same_gradient(architecture, share):
    model = tiny_model(architecture)
    kept = score_gradients(model, share_prompt=share)
    again = score_gradients(model, share_prompt=share, gradient_checkpointing=True)
    for one, other in zip(kept, again, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, rtol=1e-9, atol=1e-12)
    # the layers' own code is back
    assert all("forward" not in vars(layer) for layer in layers_of(model))


def test_one_pass_gives_what_buckets_give():
    model = tiny_model()
    apart, together = (
        score_gradients(model, share_prompt=False, one_pass=one) for one in (False, True)
    )
    for one, other in zip(apart, together, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="one_pass"):
        score_completions(model, rows(), 1.0, share_prompt=True, with_grad=False, one_pass=True)


@pytest.mark.parametrize("share", [False, True])
def test_bfloat16_computes_in_it_and_keeps_weights_gradients_and_logits_in_float32(saved, share):
    policy = load_policy(spec(saved, dtype="bfloat16"))
    assert policy.compute == torch.bfloat16
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    seen, norms = set(), set()
    for name, module in policy.model.named_modules():
        kept = norms if "norm" in name else seen
        if name.endswith(("q_proj", "down_proj")) or "norm" in name:
            module.register_forward_hook(lambda m, i, out, kept=kept: kept.add(out.dtype))
    found = score_gradients(policy.model, share_prompt=share, compute=torch.bfloat16)
    assert seen == {torch.bfloat16} and norms == {torch.float32}
    assert {g.dtype for g in found} == {torch.float32}
    exact = score_gradients(policy.model, share_prompt=share)
    one, other = (torch.cat([g.flatten() for g in part]) for part in (found, exact))
    # it is rounded, and no more than that
    assert 1e-5 < float((one - other).norm() / other.norm()) < 0.05
    scored = score_completions(
        policy.model,
        rows(),
        1.0,
        share_prompt=share,
        with_grad=False,
        compute=policy.compute,
        stats=True,
    )
    assert scored.logp.dtype == scored.stats.entropy.dtype == torch.float32


@pytest.mark.parametrize("keep", [None, True])
def test_a_hidden_state_is_pulled_through_a_layer_in_bfloat16_in_float32(keep, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 3, generator=generator).requires_grad_()
    weight, bias = (torch.randn(shape, generator=generator).bfloat16() for shape in ((7, 3), (7,)))
    monkeypatch.setattr(head, "BLOCK_BYTES", {"cpu": 2 * 3 * 4, "cuda": 1})  # two words at once
    targets = torch.tensor([0, 6, 2, 3])
    logp, _ = flat_logp(
        hidden, head.Head(weight, bias), targets, 0.5, stats=False, keep_logits=keep
    )
    logp.sum().backward()
    p = torch.softmax((hidden.detach() @ weight.float().T + bias.float()) / 0.5, 1)
    torch.testing.assert_close(
        logp.detach(), p.gather(1, targets[:, None])[:, 0].log(), rtol=1e-5, atol=1e-5
    )
    expected = (torch.nn.functional.one_hot(targets, 7) - p) @ weight.float() / 0.5
    torch.testing.assert_close(hidden.grad, expected, rtol=1e-5, atol=1e-5)

"""What large models need: computing in bfloat16 over float32 weights, layers computed twice, adapters, a budget of tokens."""

from __future__ import annotations

import pytest
import torch

from sharpscope.config.policy import LoraSpec
from sharpscope.policy import (
    head,
    load_policy,
    score_completions,
)
from sharpscope.policy.token_stats import flat_logp
from tests.models import tiny_model
from tests.policy.helpers import adapted, rows, score_gradients, spec, stir


def test_one_pass_gives_what_buckets_give():
    model = tiny_model()
    for one, other in zip(
        score_gradients(model, share_prompt=False),
        score_gradients(model, share_prompt=False, one_pass=True),
        strict=True,
    ):
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
        if name.endswith(("q_proj", "down_proj")):
            module.register_forward_hook(lambda m, i, out: seen.add(out.dtype))
        if "norm" in name:
            module.register_forward_hook(lambda m, i, out: norms.add(out.dtype))
    found = score_gradients(policy.model, share_prompt=share, compute=torch.bfloat16)
    assert seen == {torch.bfloat16} and norms == {torch.float32}
    assert {g.dtype for g in found} == {torch.float32}
    exact = score_gradients(policy.model, share_prompt=share)
    one, other = (torch.cat([g.flatten() for g in part]) for part in (found, exact))
    assert 1e-5 < float((one - other).norm() / other.norm()) < 0.05  # it is rounded, and no more than that
    scored = score_completions(
        policy.model, rows(), 1.0, share_prompt=share, with_grad=False, compute=policy.compute, stats=True
    )
    assert scored.logp.dtype == scored.stats.entropy.dtype == torch.float32


def test_frozen_weights_under_bfloat16_are_held_in_it(saved):
    policy = load_policy(spec(saved, dtype="bfloat16", lora=LoraSpec(r=2, alpha=4.0)))
    kinds = {(p.requires_grad, p.dtype) for p in policy.model.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    stir(policy)
    found = score_gradients(policy.model, share_prompt=True, compute=policy.compute, gradient_checkpointing=True)
    assert {g.dtype for g in found} == {torch.float32}
    exact = adapted(saved)
    stir(exact)
    one, other = (
        torch.cat([g.flatten() for g in part]) for part in (found, score_gradients(exact.model, share_prompt=True))
    )
    assert float((one - other).norm() / other.norm()) < 0.1


@pytest.mark.parametrize("keep", [None, True])
def test_a_hidden_state_is_pulled_through_a_layer_in_bfloat16_in_float32(keep, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 3, generator=generator).requires_grad_()
    weight, bias = (torch.randn(shape, generator=generator).bfloat16() for shape in ((7, 3), (7,)))
    monkeypatch.setattr(head, "BLOCK_BYTES", {"cpu": 2 * 3 * 4, "cuda": 1})  # two words at once
    targets = torch.tensor([0, 6, 2, 3])
    logp, _ = flat_logp(hidden, head.Head(weight, bias), targets, 0.5, stats=False, keep_logits=keep)
    logp.sum().backward()
    p = torch.softmax((hidden.detach() @ weight.float().T + bias.float()) / 0.5, 1)
    torch.testing.assert_close(logp.detach(), p.gather(1, targets[:, None])[:, 0].log(), rtol=1e-5, atol=1e-5)
    expected = (torch.nn.functional.one_hot(targets, 7) - p) @ weight.float() / 0.5
    torch.testing.assert_close(hidden.grad, expected, rtol=1e-5, atol=1e-5)

"""Log-probabilities in chunks of tokens: gradients, and what is held in memory."""

from __future__ import annotations

import pytest
import torch

from sharpscope.policy import chunked_logp
from sharpscope.policy.chunked_logp import flat_logp
from sharpscope.policy.forward import score_completions
from sharpscope.policy.head import Head
from sharpscope.policy.token_stats import STAT_NAMES
from tests.models import tiny_model
from tests.policy.helpers import rows, weighted
from tests.policy.test_forward import assert_gradients_equal


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    "kind", [{}, {"bias": True}, {"soft_cap": 2.0, "bias": True}, {"scale": 0.3}, {"soft_cap": 1.5, "scale": 2.0}]
)
def test_chunked_backward_pass_equals_the_one_that_keeps_all_logits(kind, temperature, monkeypatch):
    g = torch.Generator().manual_seed(3)
    shapes = ((11, 5), (29, 5), (29,))
    leaves = [torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_() for shape in shapes]
    hidden, weight, bias = leaves if kind.get("bias") else (*leaves[:2], None)
    head = Head(weight, bias, kind.get("soft_cap"), kind.get("scale", 1.0))
    targets = torch.randint(0, 29, (11,), generator=g)
    monkeypatch.setattr(chunked_logp, "LOGIT_BYTES", {"cpu": 29 * 8 * 3, "cuda": 1})
    found = {}
    for keep in (True, False):
        logp, stats = flat_logp(hidden, head, targets, temperature, stats=True, keep_logits=keep)
        wanted = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
        found[keep] = (logp, torch.autograd.grad((logp * torch.arange(1.0, 12.0)).sum(), wanted), stats)
    assert torch.allclose(found[True][0], found[False][0], atol=1e-12)
    for kept, chunked in zip(found[True][1], found[False][1], strict=True):
        assert torch.allclose(kept, chunked, atol=1e-11)
    for name in STAT_NAMES:
        assert torch.allclose(found[True][2][name], found[False][2][name], atol=1e-12), name


def test_chunked_backward_pass_with_a_frozen_output_layer():
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(7, 3)
    logp, _ = flat_logp(hidden, Head(weight), torch.tensor([0, 6, 2, 3]), 1.0, stats=False, keep_logits=False)
    logp.sum().backward()
    expected = torch.nn.functional.one_hot(torch.tensor([0, 6, 2, 3]), 7) - torch.softmax(hidden.detach() @ weight.T, 1)
    assert torch.allclose(hidden.grad, expected @ weight, atol=1e-5)


def test_a_large_vocabulary_is_never_held_whole(monkeypatch):
    monkeypatch.setattr(chunked_logp, "KEEP_BYTES", {"cpu": 0, "cuda": 0})
    model, batch = tiny_model("qwen3", tie=True), rows()
    lean = score_completions(model, batch, 1.0, share_prompt=True, with_grad=True, stats=True)
    monkeypatch.undo()
    kept = score_completions(model, batch, 1.0, share_prompt=True, with_grad=True, stats=True)
    assert_gradients_equal(model, weighted(lean.logp), weighted(kept.logp), 1e-10)
    assert torch.allclose(lean.stats.polarity, kept.stats.polarity, atol=1e-12)

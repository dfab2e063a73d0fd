"""Attribution against a loop of autograd: shares, ways, directions, held-out influence."""

from __future__ import annotations

import pytest
import torch

from sharpscope.errors import UserError
from sharpscope.probes import attribute, attribution, failure_coefficients, logp_gradient
from sharpscope.probes.token_gradients import rows
from tests.models import ARCHITECTURES, random_batch, tiny_model
from tests.oracles.token_gradients import (
    aligned,
    along,
    gradient_shares,
    log_probabilities,
    token_gradients,
)

T = 1.3


def coefficients(batch, dtype=torch.float64, seed=1):
    return torch.randn(batch["mask"].shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) * batch["mask"]


def tokens(model, batch):
    return token_gradients(model, batch["input_ids"], batch["mask"], batch["attention_mask"], T)


def shares(model, batch, coef):
    return gradient_shares(tokens(model, batch), coef)


def run(model, batch, coef, direction=None):
    return attribute(model, batch["input_ids"], batch["mask"], coef, direction, batch["attention_mask"], T)


def off(found, expected):
    """Largest error relative to Σ|share|."""
    return float((found.double() - expected).abs().max() / expected.abs().sum())


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_shares_match_a_loop(architecture, tie):
    model, batch = tiny_model(architecture, tie=tie), random_batch()
    coef = coefficients(batch)
    expected = shares(model, batch, coef)
    found = run(model, batch, coef)
    assert off(found, expected) < 1e-6
    assert float(found.sum()) == pytest.approx(1.0, abs=1e-6)
    assert not found[batch["mask"] == 0].any()
    single = tiny_model(architecture, tie=tie, dtype=torch.float32)
    assert off(run(single, batch, coef.float()), expected) < 1e-5


def test_along_any_direction_without_normalising():
    model, batch = tiny_model("qwen2"), random_batch()
    coef = coefficients(batch)
    generator = torch.Generator().manual_seed(2)
    direction = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in model.parameters()]
    expected = along(tokens(model, batch), coef, direction)
    torch.testing.assert_close(run(model, batch, coef, direction), expected, rtol=1e-9, atol=1e-10)


def test_influence_is_positive_where_a_token_lowers_the_heldout_loss():
    """A small step of descent on each token alone, and the loss before and after."""
    model, batch, heldout = tiny_model("qwen2"), random_batch(), random_batch(seed=9)
    coef, mask = coefficients(batch), heldout["mask"]
    nll = -mask.double() / mask.sum()
    found = run(model, batch, coef, logp_gradient(model, heldout["input_ids"], mask, nll, heldout["attention_mask"]))

    @torch.no_grad()
    def loss(of):
        parts = []
        for row in range(3):
            ids, columns = aligned(heldout["input_ids"], heldout["attention_mask"], row)
            parts.append(log_probabilities(of, ids, 1.0)[mask[row, columns].bool()])
        return -torch.cat(parts).mean()

    rate = 1e-6
    for place, gradient in list(tokens(model, batch).items())[:4]:
        moved = tiny_model("qwen2")
        with torch.no_grad():
            for parameter, part in zip(moved.parameters(), gradient, strict=True):
                parameter -= rate * coef[place] * part
        assert float(found[place]) == pytest.approx(float(loss(model) - loss(moved)) / rate, rel=1e-2)


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2"])
def test_what_a_gradient_keeps_changes_no_share(architecture, monkeypatch):
    model, batch = tiny_model(architecture), random_batch()
    coef = coefficients(batch)
    coef[1] = 0.0
    expected = shares(model, batch, coef)
    monkeypatch.setitem(rows.CHUNK_TOKENS, "cpu", 1)  # a row at a time
    run(model, batch, coef)  # with the checks of a first call
    passes, derivative = [], attribution.logp_derivative
    monkeypatch.setattr(attribution, "logp_derivative", lambda *given: (passes.append(given[5]), derivative(*given))[1])

    def kept(room):
        """Numbers of outputs that were kept of each row."""
        monkeypatch.setitem(attribution.KEPT_BYTES, "cpu", room)
        assert off(run(model, batch, coef), expected) < 1e-6
        return [len(known) for known in passes[-1]]

    count = sum(isinstance(module, torch.nn.Linear) for module in model.base_model.modules())
    assert kept(2**30) == [count, count]
    assert kept(sum(x.nbytes for x in passes[-1][0]) + 1) == [count, 0]
    assert kept(0) == [0, 0]


def test_only_the_adapters_count():
    peft = pytest.importorskip("peft")
    model, batch = tiny_model("qwen2"), random_batch()
    lora = peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(model, lora).eval().double()
    coef = coefficients(batch)
    assert off(run(model, batch, coef), shares(model, batch, coef)) < 1e-7


def test_no_gradient_no_shares():
    model, batch = tiny_model("qwen2"), random_batch()
    found = run(model, batch, torch.zeros(batch["mask"].shape))
    assert torch.equal(found.isnan(), batch["mask"].bool())


def test_failure_and_nll_coefficients_give_their_gradients():
    model, batch = tiny_model("qwen2"), random_batch()
    success = torch.tensor([1.0, 0.25, 0.5], dtype=torch.float64)
    parameters = list(model.parameters())
    rows = []
    for row in range(3):
        ids, columns = aligned(batch["input_ids"], batch["attention_mask"], row)
        rows.append(log_probabilities(model, ids, T)[batch["mask"][row, columns].bool()])
    failure = torch.stack(
        [1 - r * (logp - logp.detach()).sum().exp() for r, logp in zip(success, rows, strict=True)]
    ).mean()
    nll = -torch.cat(rows).mean()
    for scalar, coef in (
        (failure, failure_coefficients(batch["mask"], success)),
        (nll, -batch["mask"].double() / batch["mask"].sum()),
    ):
        expected = list(torch.autograd.grad(scalar, parameters, retain_graph=True))
        found = logp_gradient(model, batch["input_ids"], batch["mask"], coef, batch["attention_mask"], T)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_mistakes_are_told():
    model, batch = tiny_model("qwen2"), random_batch()
    coef = coefficients(batch)
    with pytest.raises(UserError, match="coef"):
        run(model, batch, coef[:, 1:])
    with pytest.raises(UserError, match="direction"):
        run(model, batch, coef, [torch.zeros(3) for _ in model.parameters()])

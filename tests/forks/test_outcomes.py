"""Outcomes against exact values: a quadratic, a bandit whose completions are enumerated, and drawn completions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sharpscope.config import ForkSpec
from sharpscope.config.methods import parse_method
from sharpscope.forks.experiment import FixedRollouts, Measure, matching_scale
from sharpscope.forks.start import Snapshot, Start
from sharpscope.policy import Rollouts, render_prompts
from sharpscope.policy.forward import Scorer
from tests.models import tiny_model


class Quadratic(nn.Module):
    """½ θᵀHθ with H symmetric."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        root = torch.randn(6, 6, generator=generator, dtype=torch.float64)
        self.H = root @ root.T
        self.theta = nn.Parameter(torch.randn(6, generator=generator, dtype=torch.float64))

    def forward(self) -> torch.Tensor:
        return 0.5 * self.theta @ self.H @ self.theta


def test_on_a_quadratic_changes_predictions_and_scales_are_exact():
    model = Quadratic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.01)
    for _ in range(3):  # moments that are not zero
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    snapshot = Snapshot(model, optimizer)
    start, before = model.theta.detach().clone(), model().item()
    slope = model.H @ start
    moves = {}
    for name, factor in (("plain", 1.0), ("weighted", torch.linspace(0.2, 3, 6, dtype=torch.float64))):
        snapshot.restore()
        optimizer.zero_grad()
        model().backward()
        model.theta.grad *= factor
        optimizer.step()
        moves[name] = snapshot.displacement()
    snapshot.restore()
    assert torch.equal(model.theta, start)
    (plain,), (weighted,) = moves["plain"], moves["weighted"]
    for scale in (0.5, 1.0, 2.0):
        snapshot.place(moves["weighted"], scale)
        exact = scale * float(slope @ weighted) + scale**2 / 2 * float(weighted @ model.H @ weighted)
        assert model().item() - before == pytest.approx(exact, rel=1e-12)
    scale, reached = matching_scale(
        lambda s: s**2 / 2 * float(weighted @ model.H @ weighted), float(plain @ model.H @ plain) / 2, 1.0, 1e-9
    )
    exact = math.sqrt(float(plain @ model.H @ plain) / float(weighted @ model.H @ weighted))
    assert reached and scale == pytest.approx(exact, rel=1e-8)


@pytest.mark.parametrize("start", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize(
    "divergence", [lambda s: s**2 / (1 + s), lambda s: math.expm1(s) - s, lambda s: math.inf if s > 3 else s**4 + s**2]
)
def test_a_divergence_is_matched_from_any_start(divergence, start):
    for target in (1e-3, 0.3, 2.0):
        scale, reached = matching_scale(divergence, target, start, 1e-3, 40)
        assert reached and divergence(scale) == pytest.approx(target, rel=1e-3)
    assert not matching_scale(lambda s: s / (1 + s), 2.0, start)[1]  # which never reaches it


PROMPTS, WORDS = 3, 11


@pytest.fixture
def bandit():
    """(scorer, completions, success): a policy that is uniform at the start, with every completion of one token once."""
    model = tiny_model(vocab=WORDS, tie=False)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    prompts = torch.randint(2, WORDS, (PROMPTS, 4), generator=torch.Generator().manual_seed(1))
    words = torch.arange(WORDS).repeat(PROMPTS)[:, None]
    ids = torch.cat([prompts.repeat_interleave(WORDS, 0), words], 1)
    ones = torch.ones_like(ids)
    rollouts = Rollouts(
        input_ids=ids,
        attention_mask=ones,
        completion_ids=words,
        completion_mask=ones[:, :1],
        behavior_logp=torch.full(words.shape, -math.log(WORDS)),
        sampler_logp=None,
        group=torch.arange(PROMPTS).repeat_interleave(WORDS),
        truncated=torch.zeros(len(ids), dtype=torch.bool),
        texts=[""] * len(ids),
        reward=torch.zeros(len(ids)),
    )
    success = (torch.rand(len(ids), generator=torch.Generator().manual_seed(2)) < 0.4).float()
    return Scorer(model, 1.0, 4096, True), rollouts, success


def exact(scorer: Scorer, rollouts: Rollouts, success: torch.Tensor) -> dict[str, torch.Tensor]:
    """Expected failure, KL(π₀‖π), entropy and the probabilities of all completions, by enumeration."""
    first = torch.arange(0, len(rollouts), WORDS)
    logits = scorer.model(input_ids=rollouts.input_ids[first, :-1]).logits[:, -1].double()
    logp = logits.log_softmax(-1)  # (prompts, words)
    return {
        "failure": (logp.exp() * (1 - success.double().view(PROMPTS, WORDS))).sum(1).mean(),
        "kl": -(logp.mean() + math.log(WORDS)),
        "entropy": -(logp.exp() * logp).sum(1).mean(),
    }


def test_on_an_enumerated_bandit_every_outcome_is_exact(bandit):
    scorer, rollouts, success = bandit
    fixed = FixedRollouts(rollouts, success, scorer.statistics(rollouts))
    before = exact(scorer, rollouts, success)
    slope = torch.autograd.grad(before["failure"], list(scorer.model.parameters()), allow_unused=True)
    slope = [torch.zeros_like(p) if g is None else g for g, p in zip(slope, scorer.model.parameters(), strict=True)]
    optimizer = torch.optim.AdamW(scorer.model.parameters(), lr=0.05)
    snapshot = Snapshot(scorer.model, optimizer)
    optimizer.zero_grad()
    exact(scorer, rollouts, success)["failure"].backward()
    for parameter in scorer.model.parameters():
        if parameter.grad is not None:
            parameter.grad += 0.01 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64
            )
    optimizer.step()
    step = snapshot.displacement()
    for scale in (1.0, 0.3, 1e-5):
        snapshot.place(step, scale)
        stats, now = scorer.statistics(rollouts), exact(scorer, rollouts, success)
        reading = fixed.failure(stats.logp)
        assert reading.value == pytest.approx(now["failure"].item(), rel=1e-10)
        assert fixed.kl(stats.logp) == pytest.approx(now["kl"].item(), rel=1e-8)
        assert fixed.entropy(stats) == pytest.approx(now["entropy"].item(), rel=1e-6)
        weight = (stats.logp.double()[:, 0] + math.log(WORDS)).exp()
        share = float(weight.sum() ** 2 / weight.square().sum() / len(weight))
        assert reading.effective_share == pytest.approx(share, rel=1e-10)
    change = (now["failure"] - before["failure"]).item()  # at the smallest scale the linear prediction is all there is
    along = sum(float((a.double() * b.double()).sum()) for a, b in zip(slope, step, strict=True))
    assert 1e-5 * along == pytest.approx(change, rel=1e-3)


@pytest.mark.parametrize("moved", [False, True])
def test_sharpness_equals_that_of_the_loss_written_out(toy_config, moved):
    config = toy_config(optimizer__lr=1e-3, task__factory="tests.toy_task:even_start", policy__dtype="float64")
    spec = ForkSpec(prompts=3, samples=2, batches=1, rho=0.02, outcomes=("failure", "sharpness"))
    start = Start(config, {"grpo": config.method}, None)
    measure = Measure(start, spec, spec.rho)
    fixed = measure.fixed("train", 0)
    if moved:
        start.update("grpo", 0)
    rows, mask, parameters = fixed.rollouts, fixed.mask, start.snapshot.parameters

    def logp() -> torch.Tensor:
        ids, width = rows.input_ids, rows.completion_ids.shape[1]
        position = (rows.attention_mask.cumsum(1) - 1).clamp(min=0)
        logits = start.policy.model(input_ids=ids, attention_mask=rows.attention_mask, position_ids=position).logits
        every = logits[:, -width - 1 : -1].log_softmax(-1).gather(2, rows.completion_ids[..., None])[..., 0]
        return torch.where(mask, every, 0.0)

    anchor = fixed.start.logp

    def loss() -> torch.Tensor:
        return (1 - fixed.success.double() * (logp() - anchor).sum(1).exp()).mean()

    before = loss()
    gradient = torch.autograd.grad(before, parameters)
    norm = math.sqrt(sum(float(part.double().square().sum()) for part in gradient))
    kept = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for parameter, part in zip(parameters, gradient, strict=True):
            parameter += spec.rho / norm * part
        rise = loss() - before
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
    found = measure.sharpness(fixed, start.scorer.statistics(rows))
    assert found["saturation"].value == pytest.approx(rise.item() / (1 - before.item()), rel=1e-5)
    assert found["sam_sharpness"].value == pytest.approx(rise.item(), rel=1e-5)
    assert [torch.equal(p, value) for p, value in zip(parameters, kept, strict=True)] == [True] * len(kept)


def test_greedy_accuracy_is_that_of_the_most_likely_tokens_at_each_scale(toy_config):
    changes = {"task__factory": "tests.toy_task:even_start", "rollout__max_new_tokens": 2, "policy__dtype": "float64"}
    config = toy_config(optimizer__lr=2e-2, **changes)
    spec = ForkSpec(prompts=10, samples=2, batches=1, outcomes=("greedy",))
    start = Start(config, {name: parse_method(name) for name in ("grpo", "lopti")}, None, warm_up=4)
    measure = Measure(start, spec, None)
    found = [row for row in measure.batch_rows("x", 0) if row["outcome"] == "accuracy_greedy"]

    @torch.no_grad()
    def accuracy() -> float:
        right = 0
        for example, prompt in zip(measure.asked(0), render_prompts(measure.asked(0), start.policy), strict=True):
            drawn: list[int] = []
            while len(drawn) < 2 and not set(drawn) & set(start.policy.eos_ids):
                logits = start.policy.model(input_ids=torch.tensor([[*prompt, *drawn]])).logits[0, -1]
                drawn.append(int(logits.argmax()))
            right += start.task.score(example, start.policy.tokenizer.decode(drawn, skip_special_tokens=True)).correct
        return right / spec.prompts

    start.restore()
    before, values = accuracy(), set()
    for row in found:
        start.update(row["arm"], 0)
        start.snapshot.place(start.snapshot.displacement(), row["scale"])
        assert (row["start"], row["value"]) == (before, pytest.approx(accuracy()))
        values.add(row["value"])
    assert len(found) == 4 and values != {before}


def test_importance_weighting_of_drawn_completions_is_unbiased_within_its_standard_error(toy_config):
    changes = {"task__factory": "tests.toy_task:even_start", "rollout__max_new_tokens": 1, "policy__dtype": "float64"}
    config = toy_config(optimizer__lr=3e-3, **changes)
    spec = ForkSpec(prompts=10, samples=12, batches=1)  # all held-out prompts in every batch
    start = Start(config, {"grpo": config.method}, None, warm_up=4)
    measure = Measure(start, spec, None)

    def exact_failure() -> float:
        task, examples = start.task, start.task.splits()["heldout"]
        total = 0.0
        size = start.policy.head.weight.shape[0]
        words = [[word] for word in range(size)]
        texts = start.policy.tokenizer.batch_decode(words, skip_special_tokens=True)
        for example, prompt in zip(examples, render_prompts(examples, start.policy), strict=True):
            with torch.no_grad():
                p = start.policy.model(input_ids=torch.tensor([prompt])).logits[0, -1].double().softmax(0)
            failed = torch.tensor([not task.score(example, text).correct for text in texts], dtype=torch.float64)
            total += float(p @ failed)
        return total / len(examples)

    before = exact_failure()
    start.update("grpo", 0)
    moved = start.snapshot.displacement()
    change = exact_failure() - before
    estimates, errors = [], []
    for batch in range(60):
        start.snapshot.restore()
        fixed = measure.fixed("heldout", batch)
        start.snapshot.place(moved, 1.0)
        reading = fixed.failure(start.scorer.statistics(fixed.rollouts).logp)
        estimates.append(reading.value - (1 - float(fixed.success.double().mean())))
        errors.append(reading.std_error)
    found = torch.tensor(estimates, dtype=torch.float64)
    error = float(found.std()) / math.sqrt(len(found))
    assert abs(change) > 4 * error  # there is something to see
    assert abs(float(found.mean()) - change) < 3.5 * error
    assert 0.6 < float(torch.tensor(errors).square().mean().sqrt()) / float(found.std()) < 1.6

"""Effects against central differences of the whole update, and coming steps against the optimizers' own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import sharpscope
from sharpscope.errors import CheckError, UserError
from sharpscope.policy.guard import moved_by
from sharpscope.tokens import attribution, optimizer_steps
from sharpscope.tokens.optimizer_steps import Clip, ComingStep, batch_share
from sharpscope.tokens.outcomes import Outcome
from sharpscope.tokens.rows import make_rows
from sharpscope.tokens.update_effects import UpdateEffects
from tests.loops import some
from tests.models import random_batch, tiny_model
from tests.oracles.token_gradients import aligned

peft = pytest.importorskip("peft")

T = 1.3
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(
        [{"params": p[::2], "lr": 0.02}, {"params": p[1::2], "weight_decay": 0.3}],
        lr=0.01,
        betas=(0.8, 0.9),
        eps=1e-3,
    ),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, maximize=True, eps=1e-3),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, eps=1e-3, betas=(0.8, 0.5)),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.7, dampening=0.2, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.7, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.003, momentum=0.5, eps=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, eps=1e-2),
}


class Centered(torch.optim.Optimizer):
    """An optimizer that may mix the numbers of a gradient."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.02})


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def warmed(model, make, steps=3):
    """An optimizer with moments; the weights are those before."""
    optimizer = make(trained(model))
    start = [p.detach().clone() for p in trained(model)]
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        for p in trained(model):
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.grad = (0.3 * noise).to(p)
        optimizer.step()
    with torch.no_grad():
        for p, weights in zip(trained(model), start, strict=True):
            p.copy_(weights)
            p.grad = None
    return optimizer


def coefficients(batch, seed=1, dtype=torch.float64):
    noise = torch.randn(batch["mask"].shape, generator=torch.Generator().manual_seed(seed))
    return (noise * batch["mask"]).to(dtype)


def word_logits(model, rows):
    """(N, S, V) log-probabilities of all words at each token given its prefix, row by row; 0 on padding and first tokens."""
    out = []
    for row in range(len(rows["input_ids"])):
        ids, columns = aligned(rows["input_ids"], rows["attention_mask"], row)
        logp = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1] / T, -1)
        whole = logp.new_zeros(rows["input_ids"].shape[1], logp.shape[-1])
        out.append(whole.index_copy(0, columns[1:], logp))
    return torch.stack(out)


def log_probabilities(model, rows):
    """(N, S) log π of each token."""
    return word_logits(model, rows).gather(2, rows["input_ids"][..., None])[..., 0]


def plain_gradient(model, batch, coef):
    """∇ Σ c log π by autograd through the model's own forward pass."""
    total = (log_probabilities(model, batch) * coef).sum()
    options = {"materialize_grads": True, "allow_unused": True}
    return list(torch.autograd.grad(total, trained(model), **options))


def plain_clip(gradients, limit):
    """Clipping by the global norm, as torch.nn.utils does."""
    holders = [nn.Parameter(g.clone()) for g in gradients]
    for holder, g in zip(holders, gradients, strict=True):
        holder.grad = g.clone()
    if limit is not None:
        torch.nn.utils.clip_grad_norm_(holders, limit)
    return [holder.grad for holder in holders]


def other_rows():
    batch = random_batch(rows=2, seed=9)
    return {name: batch[name] for name in ("input_ids", "mask", "attention_mask")}


def outcomes(model):
    reference = tiny_model("qwen2", seed=3)
    reward = torch.tensor([1.0, 0.4, 0.0], dtype=torch.float64)
    return {
        "kl": Outcome(kind="kl"),
        "entropy": Outcome(kind="entropy", **other_rows()),
        "heldout": Outcome(kind="heldout", **other_rows()),
        "failure": Outcome(kind="heldout", reward=reward),
        "sharpness": Outcome(kind="sharpness", radius=0.1, **other_rows()),
        "failure_sharpness": Outcome(kind="sharpness", radius=0.1, reward=reward),
        "gradient_norm": Outcome(kind="gradient_norm", **other_rows()),
        "kl_base": Outcome(kind="kl_base", reference=reference),
        "own": lambda m: sum(p.square().sum() for p in m.parameters() if p.requires_grad).sqrt(),
    }


def plain_outcome(name, outcome, start, model, batch):
    """The outcome of the present weights by loops over the model's own logits, `start` a copy of the model before the update."""

    def loss(m):
        rows = other_rows() if outcome.reward is None else batch
        logp = log_probabilities(m, rows)
        if outcome.reward is None:
            return -(logp * rows["mask"]).sum() / rows["mask"].sum()
        before = log_probabilities(start, rows).detach()
        ratio = ((logp - before) * rows["mask"]).sum(1).exp()
        return (1 - outcome.reward * ratio).mean()

    if name == "own":
        return outcome(model)
    if outcome.kind in ("kl", "kl_base", "entropy"):
        rows = other_rows() if outcome.kind == "entropy" else batch
        mask = rows["mask"].bool()
        now = word_logits(model, rows)[mask]
        if outcome.kind == "entropy":
            return -(now.exp() * now).sum(-1).mean()
        other = word_logits(outcome.reference or start, rows)[mask]
        p, q = (other, now) if outcome.kind == "kl" else (now, other)
        return (p.exp() * (p - q)).sum(-1).mean()
    if outcome.kind == "heldout":
        return loss(model)
    first = loss(model)
    gradient = torch.autograd.grad(first, trained(model), materialize_grads=True, allow_unused=True)
    size = math.sqrt(sum(float(g.square().sum()) for g in gradient))
    if outcome.kind == "gradient_norm":
        return size
    with moved_by(trained(model), [outcome.radius * g / size for g in gradient]):
        return loss(model) - first


def differences(name, outcome, model, batch, coef, optimizer, limit, token, step=3e-4):
    """The central difference of Q(θ + Δ(g + s·c∇log π)) in s at 0, with the optimizer's own step on a copy and PyTorch's clipping."""
    start = tiny_copy(model)
    gradient = plain_gradient(model, batch, coef)
    only = torch.zeros_like(coef)
    only[token] = coef[token]
    part = plain_gradient(model, batch, only)

    def at(s):
        clipped = plain_clip([g + s * p for g, p in zip(gradient, part, strict=True)], limit)
        moves = optimizer_steps.step_of_copy(optimizer, trained(model), clipped)
        with moved_by(trained(model), moves):
            value = plain_outcome(name, outcome, start, model, batch)
            return value if isinstance(value, float) else float(value.detach())

    # Richardson: the error is of the fourth order
    half = (at(step / 2) - at(-step / 2)) / step
    whole = (at(step) - at(-step)) / (2 * step)
    return (4 * half - whole) / 3


def tiny_copy(model):
    import copy

    made = copy.deepcopy(model)
    from tests.models import keep_double_precision

    keep_double_precision(made)
    return made


def adapted(model):
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.0)
    made = peft.get_peft_model(model, config).double().eval()
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "lora_" in name:
                noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)))
                p.copy_(0.2 * noise)
    return made


MODELS = {
    "qwen2": lambda: tiny_model("qwen2"),
    "llama": lambda: tiny_model("llama", tie=False),
    "gpt2": lambda: tiny_model("gpt2"),
    "lora": lambda: adapted(tiny_model("qwen2", tie=False)),
}
CASES = [
    ("qwen2", "adamw", None),
    ("qwen2", "adamw", 0.5),
    ("llama", "adam", 0.5),
    ("gpt2", "amsgrad", 0.5),
    ("lora", "adamw", 0.05),
    ("qwen2", "sgd", 0.5),
    ("llama", "nesterov", None),
    ("gpt2", "rmsprop", 0.5),
    ("qwen2", "adagrad", None),
]


@pytest.mark.parametrize(("architecture", "kind", "limit"), CASES)
def test_effects_are_the_derivatives_of_the_update(architecture, kind, limit):
    model, batch = MODELS[architecture](), random_batch(seed=2)
    coef, optimizer = coefficients(batch), warmed(model, OPTIMIZERS[kind])
    given = (model, batch["input_ids"], batch["mask"], coef, optimizer)
    asked = outcomes(model)
    found = sharpscope.effects(
        *given, asked, batch["attention_mask"], T, max_grad_norm=limit, check="off"
    )
    assert set(found.values) == set(asked)
    gradient = plain_gradient(model, batch, coef)
    if limit is not None:
        assert math.sqrt(sum(float(g.square().sum()) for g in gradient)) > limit  # it clips
    for name, outcome in some(asked.items()):
        values = found[name]
        assert float(values.sum()) == pytest.approx(found.total[name], rel=1e-8)
        token = divmod(int(values.abs().argmax()), values.shape[1])
        expected = differences(name, outcome, model, batch, coef, optimizer, limit, token)
        assert float(values[token]) == pytest.approx(expected, rel=1e-6), name


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_coming_step_is_the_optimizers_own_and_its_jacobian_that_of_differences(kind):
    model = tiny_model("qwen2")
    optimizer = warmed(model, OPTIMIZERS[kind])
    generator = torch.Generator().manual_seed(3)
    gradients, q, along = (
        [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in trained(model)]
        for _ in range(3)
    )
    gradients[2] = None  # the optimizer leaves this parameter alone
    # one part of the parameters, whose limit binds, then all
    clips = [Clip(limit=1.5, parameters=(0, 3, 4), slack=0.0), Clip(limit=4.0)]

    def step(scale=0.0):
        moved = [
            None if g is None else g + scale * d for g, d in zip(gradients, along, strict=True)
        ]
        return ComingStep(optimizer, trained(model), moved, clips)

    pulled = step().pull(q)
    predicted = sum(
        float((u * d).sum())
        for u, d, g in zip(pulled, along, gradients, strict=True)
        if g is not None
    )
    ends = [
        sum(
            float((a * b).sum())
            for a, b in zip(step(sign * 1e-4).steps(), q, strict=True)
            if a is not None
        )
        for sign in (1, -1)
    ]
    assert predicted == pytest.approx((ends[0] - ends[1]) / 2e-4, rel=1e-6)
    coming = step().steps()
    before = [p.detach().clone() for p in trained(model)]
    kept = [g for g in gradients if g is not None]
    for p, g in zip(trained(model), gradients, strict=True):
        p.grad = None if g is None else g.clone()
    chosen = [trained(model)[place].grad for place in (0, 3, 4)]
    size = math.sqrt(sum(float(g.square().sum()) for g in chosen))
    assert size > 1.5
    for g in chosen:
        g.mul_(1.5 / size)
    assert float(torch.nn.utils.clip_grad_norm_(trained(model), 4.0)) > 4.0
    optimizer.step()
    assert len(kept) == len(before) - 1
    for p, start, found in zip(trained(model), before, coming, strict=True):
        moved = p.detach() - start
        assert torch.allclose(
            torch.zeros_like(p) if found is None else found, moved, rtol=1e-9, atol=1e-13
        )


def test_an_optimizer_of_ones_own_is_refused_by_name():
    model, batch = tiny_model("qwen2"), random_batch(seed=2)
    given = (model, batch["input_ids"], batch["mask"], coefficients(batch))
    with pytest.raises(UserError, match="optimizer, Centered: effects go through"):
        sharpscope.effects(*given, Centered(trained(model)), "entropy", batch["attention_mask"])


def small_update(dtype=torch.float64, kind="adamw"):
    model, batch = tiny_model("qwen2", dtype=dtype), random_batch(seed=2)
    optimizer = warmed(model, OPTIMIZERS[kind])
    coef = coefficients(batch, dtype=dtype)
    return model, batch["input_ids"], batch["mask"], coef, optimizer, batch["attention_mask"]


def test_nothing_of_the_training_changes():
    model, ids, mask, coef, optimizer, attention = small_update()
    weights = [p.detach().clone() for p in model.parameters()]
    moments = [s["exp_avg"].clone() for s in optimizer.state.values()]
    trained(model)[0].grad = torch.ones_like(trained(model)[0])
    sharpscope.effects(model, ids, mask, coef, optimizer, ["kl", "sharpness"], attention)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert all(
        torch.equal(a, s["exp_avg"]) for a, s in zip(moments, optimizer.state.values(), strict=True)
    )
    assert torch.equal(trained(model)[0].grad, torch.ones_like(trained(model)[0]))


def test_the_self_check_passes_right_effects_and_withholds_wrong_ones(monkeypatch):
    *given, attention = small_update()
    asked = ["kl", "entropy", "sharpness", "gradient_norm"]
    found = sharpscope.effects(*given, asked, attention, check="always")
    assert set(found.checked) == set(found.values) == set(asked)
    assert all(error < 0.1 for error in found.checked.values())
    whole = ComingStep.pull
    monkeypatch.setattr(ComingStep, "pull", lambda self, q: [1.5 * u for u in whole(self, q)])
    wrong = sharpscope.effects(*given, asked, attention, check="always")
    assert set(wrong.withheld) == set(asked) and not wrong.values
    with pytest.raises(CheckError, match="two tokens are left out"):
        wrong["kl"]


def test_half_precision_weights_are_read_as_float32():
    wide = tiny_model("qwen2", dtype=torch.bfloat16).float()
    batch = random_batch(seed=2)
    coef = coefficients(batch, dtype=torch.float32)
    values = []
    for model in (tiny_model("qwen2", dtype=torch.bfloat16), wide):
        optimizer = torch.optim.SGD(trained(model), lr=0.01)
        given = (model, batch["input_ids"], batch["mask"], coef, optimizer, ["kl", "sharpness"])
        values.append(sharpscope.effects(*given, batch["attention_mask"], check="off").values)
        assert next(model.parameters()).dtype == (
            torch.float32 if model is wide else torch.bfloat16
        )
    for name, expected in some(values[1].items()):
        assert torch.allclose(
            values[0][name], expected, rtol=1e-4, atol=1e-7 * float(expected.abs().max())
        )


def test_a_completion_that_undoes_a_change_leads():
    """Two rows with the same tokens and opposite coefficients: the larger moves the policy, the other moves it back."""
    model = tiny_model("qwen2")
    one = random_batch(rows=1, seed=4)
    batch = {name: torch.cat([values, values]) for name, values in one.items()}
    coef = batch["mask"] * torch.tensor([[-1.0], [0.4]], dtype=torch.float64)
    given = (
        model,
        batch["input_ids"],
        batch["mask"],
        coef,
        torch.optim.SGD(trained(model), lr=0.01),
    )
    kl = sharpscope.effects(*given, "kl", batch["attention_mask"])["kl"].sum(1)
    # the first-order effect of a quadratic: KL ∝ (1 − 0.4)², so that E = 2·(1, −0.4)/(1 − 0.4) of it
    assert float(kl[0] / kl[1]) == pytest.approx(-1 / 0.4, rel=1e-6)
    assert float(kl[0]) > 0


def test_a_token_that_only_turns_the_direction_is_seen_by_the_turn():
    """L = a² + b·x with the step along x: q without the turn is 0 there, since the rise depends on x through ĝ alone."""
    model, ids, mask, coef, optimizer, attention = small_update(kind="sgd")
    rows = make_rows(model, ids, mask, attention, 1.0)
    update = UpdateEffects(model, rows, coef, optimizer, (), 1.0)
    found = {}
    for turn in (True, False):
        one = update.prepare("sharpness", Outcome(kind="sharpness", radius=0.1, turn=turn))
        found[turn] = update.outcome_gradients([one])[0][1]
    difference = [a - b for a, b in zip(found[True], found[False], strict=True)]
    # a direction in which the rise at a fixed ĝ has no slope
    along = sum(float((d * f).sum()) for d, f in zip(difference, found[False], strict=True))
    square = sum(float(f.square().sum()) for f in found[False])
    direction = [d - along / square * f for d, f in zip(difference, found[False], strict=True)]
    size = math.sqrt(sum(float(d.square().sum()) for d in direction))
    one = update.prepare("sharpness", Outcome(kind="sharpness", radius=0.1))
    step = [1e-4 * d / size for d in direction]
    moves = update.step.steps()
    ends = []
    for sign in (1, -1):
        with moved_by(trained(model), [m + sign * s for m, s in zip(moves, step, strict=True)]):
            ends.append(one.value())
    slope = (ends[0] - ends[1]) / 2e-4
    unit = [d / size for d in direction]
    assert sum(
        float((f * d).sum()) for f, d in zip(found[False], unit, strict=True)
    ) == pytest.approx(0, abs=1e-12)
    assert sum(
        float((f * d).sum()) for f, d in zip(found[True], unit, strict=True)
    ) == pytest.approx(slope, rel=1e-5)
    assert abs(slope) > 1e-3


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam])
def test_the_batchs_part_of_a_step(make):
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    optimizer = make([weight], lr=0.1, betas=(0.9, 0.99), weight_decay=0.0)
    history = [torch.tensor(g, dtype=torch.float64) for g in ([1.0, 2.0, -1.0], [0.5, -1.0, -2.0])]
    for g in history:
        weight.grad = g
        optimizer.step()
    m = 0.9 * 0.1 * history[0] + 0.1 * history[1]
    v = 0.99 * 0.01 * history[0] ** 2 + 0.01 * history[1] ** 2
    s = (v / (1 - 0.99**2)).sqrt() + 1e-8
    expected = float((0.1 * history[1] * m / s).sum() / (m * m / s).sum())
    assert batch_share(optimizer) == pytest.approx(expected, rel=1e-12)


def test_mistakes_in_outcomes_are_told():
    *given, attention = small_update()
    for outcome, says in [
        ("kll", "outcome, 'kll': unknown"),
        ("heldout", "heldout: needs input_ids"),
        ("kl_base", "kl_base: needs a reference"),
        ([], "outcome, none"),
        (["kl", "kl"], "kl: is there twice"),
        (lambda model: 3.0, "must return a scalar tensor"),
    ]:
        with pytest.raises(UserError, match=says):
            sharpscope.effects(*given, outcome, attention, check="off")


def test_cached_values_change_no_effect(monkeypatch):
    *given, attention = small_update()
    expected = sharpscope.effects(*given, "kl", attention, check="off")["kl"]
    monkeypatch.setitem(attribution.KEPT_BYTES, "cpu", 0)
    assert torch.allclose(
        sharpscope.effects(*given, "kl", attention, check="off")["kl"], expected, rtol=1e-9
    )

"""Critical sharpness against closed forms and a dense line search; rotations against explicit float64 vectors; AdamW's coming step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from scipy import stats
from scipy.stats import t as student
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from sharpscope import distributed
from sharpscope.errors import UserError
from sharpscope.policy.directions import inner, noise_rotation, rotation
from sharpscope.recording.norms import total_norm
from sharpscope.surface import critical_sharpness, update_direction, update_slope
from tests.loops import some
from tests.models import generator, sloped, tiny_model


def along(form, guess, **options):
    """The critical sharpness of a form of one number from 0 upward."""
    x = torch.zeros(1, dtype=torch.float64)
    return critical_sharpness(
        lambda: form(x).sum(), [x], [-torch.ones_like(x)], guess=guess, **options
    )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("guess", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize("known", [True, False])
def test_on_a_quadratic_it_is_the_directional_curvature(seed, guess, known):
    draws = generator(seed)
    root = torch.randn(7, 7, generator=draws, dtype=torch.float64)
    slope, start = torch.randn(2, 7, generator=draws, dtype=torch.float64)
    direction = slope * (0.5 + torch.rand(7, generator=draws, dtype=torch.float64))
    matrix = root @ root.T / 7
    theta, loss = sloped(matrix, slope, start)
    exact = float(direction @ matrix @ direction) / float(direction @ slope)
    before = theta.detach().clone()
    given = float(direction @ slope) if known else None
    found = critical_sharpness(loss, [theta], [direction], guess=guess, slope=given)
    assert found.outcome == "found" and found.converged and not found.why
    assert found.value == pytest.approx(exact, rel=1e-6) and found.lr == pytest.approx(
        2 / exact, rel=1e-6
    )
    assert found.lower < found.lr <= found.upper and 1 - found.lower / found.upper <= 1 / 16
    assert found.evaluations <= (6 if known and guess == 1.0 else 14), found
    assert torch.equal(theta, before) and found.loss == 2.0
    top = float(torch.linalg.eigvalsh(matrix)[-1])
    assert critical_sharpness(loss, [theta], [slope], guess=guess).value <= top * (1 + 1e-9)


@pytest.mark.parametrize(
    "form",
    [
        lambda t: t**4 + 0.2 * t**3 + 0.1 * t,
        lambda t: torch.nn.functional.softplus(6 * t) - 2 * t,
        lambda t: t.square() + torch.exp(-8 * t),
    ],
)
def test_on_curved_losses_it_is_the_crossing_of_a_dense_line_search(form):
    x = torch.tensor([1.3], dtype=torch.float64, requires_grad=True)
    gradient = torch.autograd.grad(form(x), x)[0]
    size = float(gradient.abs())
    etas = torch.linspace(0, 10 / size, 20001, dtype=torch.float64)
    values = form(x.detach() - etas * gradient)
    exact = float(etas[(values > values[0]).nonzero()[0]])

    def search(guess, **options):
        return critical_sharpness(lambda: form(x), [x], [gradient], guess=guess, **options)

    found = search(0.01 / size)
    assert found.outcome == "found" and found.lr == pytest.approx(exact, rel=0.04)
    assert found.lower <= exact * (1 + 1e-3) and exact <= found.upper * (1 + 1e-3)
    wide = search(1.3 * exact, tolerance=0.25)  # as in runs
    assert wide.lr == pytest.approx(exact, rel=0.05) and wide.evaluations <= 5
    narrow = search(1.0, tolerance=1e-4)
    assert narrow.lr == pytest.approx(exact, rel=2e-3) and narrow.evaluations <= 20


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_guess_at_the_crossing_is_not_taken_for_a_rising_loss(noise):
    """As in a run, where a search starts at the step size that the one before found."""
    options = {"slope": 1.0, "noise": noise, "tolerance": 0.25, "max_evaluations": 12}
    for guess in (1.0, 16.0, 1 + noise / 2):  # x² − x: falls by 0.25 at most and crosses at 1
        found = along(lambda x: x.square() - x, guess, **options)
        assert (
            found.outcome == "found"
            and found.lr == pytest.approx(1, abs=noise + 1e-9)
            and found.depth >= 0.24
        )
    # Rises from the start and falls only near 1: still refused, whatever the guess.
    for guess in (1.0, 0.5):
        rising = along(lambda x: x * (1 - x).square(), guess, **options)
        assert rising.outcome == "not descent" and rising.lower < rising.upper


@pytest.mark.parametrize("guess", [0.01, 0.1, 0.5, 0.9, 1.2])
def test_of_two_crossings_the_first_is_found(guess):
    """The loss is above its start for η from 1 to 1.6 and again from 6, below it between."""
    for tolerance in (1 / 16, 0.25):
        found = along(
            lambda x: x * (x - 1) * (x - 1.6) * (x - 6), guess, slope=9.6, tolerance=tolerance
        )
        assert found.outcome == "found" and found.lower <= 1 <= found.upper < 1.6
        assert found.lr == pytest.approx(1, abs=0.05)


def hall(values: np.ndarray) -> float:
    """Hall's transformation of Student's t of a mean, from its definition by scipy's moments."""
    size, skewness = values.mean() / values.std(ddof=1), stats.skew(values)
    skewness *= (1 - 1 / len(values)) ** 1.5  # the variance with n − 1
    cube = ((1 + skewness * size / 3) ** 3 - 1) / skewness
    return math.sqrt(len(values)) * (cube + skewness / (6 * len(values)))


def test_the_interval_over_prompts_inverts_a_test_and_covers_over_redraws():
    """L_i = a_i·η²/2 − b_i·η crosses at η_c = 2·mean b/mean a; η is inside where |Hall's t of a_i·η/2 − b_i| is below its quantile."""
    draws, count, inside, above, open_ended = np.random.default_rng(0), 24, 0, 0, 0
    x, bound = torch.zeros(1, dtype=torch.float64), student.ppf(0.975, count - 1)
    for number in range(200):
        a, b = draws.exponential(size=count), 1 + draws.normal(size=count)
        both = [torch.from_numpy(part) for part in (a, b)]
        found = critical_sharpness(
            lambda a=both[0], b=both[1]: a * x**2 / 2 - b * x, [x], [-torch.ones_like(x)], guess=1.0
        )
        assert found.value == pytest.approx(a.mean() / b.mean(), rel=1e-6)
        assert found.prompts == count
        row = found.estimates()[0]
        inside += row.low <= 1 <= row.high
        above += row.high < 1
        open_ended += math.isinf(row.high)
        for end, sign in ((row.low, 1), (row.high, -1)) if number < 10 else ():
            if 0 < end < math.inf:
                assert hall(a / end - b) == pytest.approx(sign * bound, abs=0.05)
    assert 184 <= inside <= 198 and above <= 14 and open_ended < 20


def test_an_interval_has_no_upper_end_where_the_slope_is_not_shown():
    x = torch.zeros(1, dtype=torch.float64)
    a, b = torch.ones(4, dtype=torch.float64), torch.tensor([3.0, -1.0, 2.5, -0.5]).double()
    found = critical_sharpness(lambda: a * x**2 / 2 - b * x, [x], [-torch.ones_like(x)], guess=1.0)
    row, _ = found.estimates()
    assert found.value == pytest.approx(1) and row.high == math.inf and 0 < row.low < 1
    assert found.interval == (0, pytest.approx(2 / row.low))
    alone = critical_sharpness(lambda: (a * x**2 / 2 - b * x)[:1], [x], [-x - 1], guess=1.0)
    assert np.isnan(alone.interval).all()


def form(square=0.0, slope=0.0, constant=0.0):
    return lambda x: square * x.square() + slope * x + constant


@pytest.mark.parametrize(
    ("loss", "options", "outcome", "says"),
    [
        (form(1, 5), {}, "not descent", "raises the loss at once"),
        (form(1, 5), {"slope": -5.0}, "not descent", "raises the loss at once"),
        (
            form(1, -2e-3),
            {"slope": 2e-3, "noise": 1e-4},
            "not descent",
            "although its slope Δᵀg = 0.002 is positive",
        ),
        (form(0, -2), {}, "no crossing", "no bracket"),
        (form(constant=1.7), {}, "flat", "as a clipped surrogate does"),
        (form(1, -1, math.nan), {}, "not finite", "the loss is nan"),
        (form(1, -1), {"max_evaluations": 4}, "unresolved", "needs more evaluations"),
    ],
)
def test_it_says_why_there_is_no_crossing(loss, options, outcome, says):
    found = along(loss, 0.3, **options)
    assert (
        found.outcome == outcome
        and says in found.why
        and math.isnan(found.value)
        and not found.converged
    )
    assert found.evaluations <= {"not finite": 1, "unresolved": 4}.get(outcome, 40)
    rows = found.estimates()
    assert [row.quantity for row in rows] == ["critical_sharpness", "update_slope"]
    assert rows[0].converged is False and rows[0].why == found.why and math.isnan(rows[0].value)


@pytest.mark.parametrize("kind", ["adamw", "adam", "plain"])
def test_direction_and_slope_are_those_of_the_next_step(kind):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(3, 2)), torch.nn.Parameter(torch.randn(4))]
    unused = torch.nn.Parameter(torch.randn(2))
    groups = [
        {"params": parameters[:1], "lr": 0.02, "weight_decay": 0.3},
        {"params": [parameters[1], unused]},
    ]
    if kind == "adam":
        groups[0]["weight_decay"] = 0.0
    make = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
    optimizer = make(
        groups, lr=0.05, betas=(0.8, 0.95), weight_decay=0.1 if kind == "adamw" else 0.0
    )
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        direction = update_direction(optimizer, [*parameters, unused], clip_factor=0.5)
        slope = update_slope(parameters, direction[:2])
        by_hand = sum(
            float((p.grad.double() * d.double()).sum())
            for p, d in zip(parameters, direction, strict=False)
        )
        assert direction[2] is None and slope == pytest.approx(by_hand)
        before = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            parameter.grad.mul_(0.5)
        optimizer.step()
        for old, new, along in zip(before, parameters, direction, strict=False):
            torch.testing.assert_close(old - 0.05 * along, new.detach(), rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match="RMSprop"):
        update_direction(torch.optim.RMSprop(parameters, lr=0.1), parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_restored_bitwise_also_if_the_loss_raises(dtype):
    model = tiny_model("qwen2", vocab=13).to(dtype)
    ids = torch.arange(12).view(2, 6) % 13
    model.train()  # dropout: each evaluation starts from the same random state

    def loss():
        logits = torch.nn.functional.dropout(model(input_ids=ids).logits, 0.3)
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
        )

    torch.manual_seed(3)
    state = torch.get_rng_state()
    loss().backward()
    torch.set_rng_state(state)
    direction = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = critical_sharpness(loss, model, direction, guess=0.1)
    assert found.outcome == "found" and found.rounding < (1e-3 if dtype == torch.float32 else 0.5)
    assert (
        found.converged == (found.rounding <= 0.05)
        and ("measure in float32" in found.why) != found.converged
    )
    calls = []

    def raising():
        calls.append(0)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return loss()

    with pytest.raises(RuntimeError, match="out of memory"):
        critical_sharpness(raising, model, direction, guess=0.1)
    for name, tensor in some(model.state_dict().items()):
        assert torch.equal(tensor, before[name]), name
    assert all(p.grad is not None for p in model.parameters()) and torch.equal(
        torch.get_rng_state(), state
    )


def test_wrong_arguments_are_named():
    x = torch.ones(2, requires_grad=True)
    for words, loss, direction, guess in (
        ("guess", x.sum, [x.detach()], 0.0),
        ("direction, 2 tensors", x.sum, [x.detach()] * 2, 0.1),
        ("shape", x.sum, [torch.ones(3)], 0.1),
        ("one floating-point number", lambda: x[None], [x.detach()], 0.1),
    ):
        with pytest.raises(UserError, match=words):
            critical_sharpness(loss, [x], direction, guess=guess)
    # start not by prompt
    found = critical_sharpness(lambda: 1.5 * x**2, [x], [3 * x.detach()], guess=0.1, start=1.5)
    assert found.prompts == 2 and math.isnan(found.interval[0])


SHAPES = [(7, 3), (5,), (2, 2, 4), ()]


def parts(seed: int, dtype=torch.float64) -> list[torch.Tensor]:
    draws = generator(seed)
    return [torch.randn(shape, generator=draws, dtype=torch.float64).to(dtype) for shape in SHAPES]


def flat(tensors) -> np.ndarray:
    return np.concatenate([t.detach().double().numpy().ravel() for t in tensors])


def angle(a: np.ndarray, b: np.ndarray) -> float:
    return math.degrees(math.acos(np.clip(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)), -1, 1)))


@pytest.mark.parametrize("mix", [0.0, 0.1, 1.0, -3.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rotation_is_the_angle_between_the_flat_vectors(mix, dtype):
    a, other = parts(0, dtype), parts(1, dtype)
    b = [mix * x + y for x, y in zip(a, other, strict=True)]
    found = rotation(iter(a), iter(b))
    assert found.angle == pytest.approx(angle(flat(a), flat(b)), abs=1e-6)
    assert found.scale == pytest.approx(
        np.linalg.norm(flat(a)) / np.linalg.norm(flat(b)), rel=1e-12
    )


def test_angles_near_0_and_180_are_exact():
    a = parts(0)
    assert rotation(a, a).angle == 0.0 and rotation(a, [-x for x in a]).angle == 180.0
    assert rotation([1.4 * x for x in a], a).angle < 1e-5
    assert rotation([1.4 * x for x in a], a).scale == pytest.approx(1.4)
    first, second = np.linalg.qr(np.stack([flat(a), flat(parts(1))], 1))[0].T  # orthonormal
    for small in (1e-6, 1e-3):  # [rad]
        turned = torch.from_numpy(math.cos(small) * first + math.sin(small) * second)
        assert math.radians(rotation([turned], [torch.from_numpy(first)]).angle) == pytest.approx(
            small, rel=1e-8
        )


def test_a_missing_gradient_counts_as_zeros():
    a, b = parts(0), parts(1)
    zeros = [torch.zeros_like(x) for x in a]
    assert rotation([a[0], None, a[2], None], b) == rotation([a[0], zeros[1], a[2], zeros[3]], b)
    assert math.isnan(rotation(zeros, b).angle) and rotation(zeros, b).scale == 0.0
    assert math.isnan(rotation(a, zeros).scale)
    with pytest.raises(ValueError, match="zip"):
        rotation(a, b[:2])


def test_noise_rotation_is_the_formula_on_flat_vectors():
    a, b = parts(0), [0.4 * x + y for x, y in zip(parts(0), parts(1), strict=True)]
    x, y = flat(a), flat(b)
    assert math.tan(math.radians(noise_rotation(a, b))) == pytest.approx(
        np.linalg.norm(x - y) / (2 * math.sqrt(x @ y)), rel=1e-9
    )
    assert noise_rotation(a, a) == pytest.approx(0.0, abs=1e-5)
    assert noise_rotation(a, [-0.5 * t for t in a]) == 90.0
    assert noise_rotation([t / 3 for t in a], [t * 2 / 3 for t in a], share=1 / 3) == pytest.approx(
        0.0, abs=1e-5
    )
    assert math.isnan(noise_rotation(a, [-t for t in a]))


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_noise_rotation_estimates_the_angle_to_the_expected_gradient(share):
    """Batches of 40 prompts with a known expected gradient: the true angle is arctan of noise over signal."""
    generator = np.random.default_rng(0)
    size, prompts, sd = 400, 40, 0.5
    mean = generator.normal(size=size)
    mean /= np.linalg.norm(mean)
    true = math.degrees(math.atan(sd * math.sqrt(size / prompts)))  # 57.7 degrees
    count = round(share * prompts)
    found, actual, naive = [], [], []
    for _ in range(200):
        each = (mean + sd * generator.normal(size=(prompts, size))) / prompts
        first, second = each[:count].sum(0), each[count:].sum(0)
        found.append(noise_rotation([torch.from_numpy(first)], [torch.from_numpy(second)], share))
        actual.append(angle(first + second, mean))
        naive.append(angle(first, second))
    assert np.mean(actual) == pytest.approx(true, abs=0.5)
    assert np.mean(found) == pytest.approx(true, abs=1.0)
    assert np.mean(naive) > true + 10  # what the debiasing corrects


@pytest.fixture
def four_processes(monkeypatch):
    """The first of four processes, as if the parts of the others were like its own."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    monkeypatch.setattr(distributed, "gather", lambda value: [value] * 4)
    yield init_device_mesh("cpu", (2, 2))
    dist.destroy_process_group()


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_part_of_a_sharded_gradient_counts_once(four_processes, replicas):
    """In four parts, or in two that two groups of processes hold (HSDP); with a tensor that is not sharded."""
    mesh, (x, y, plain, other) = (
        four_processes,
        (torch.randn(6, dtype=torch.float64) for _ in range(4)),
    )
    placements = [Replicate() if replicas == 2 else Shard(0), Shard(0)]
    a, b = (
        [DTensor.from_local(part, mesh, placements), rest]
        for part, rest in ((x, plain), (y, other))
    )
    one, two = (
        torch.cat([part] * (4 // replicas) + [rest]) for part, rest in ((x, plain), (y, other))
    )
    expected = float(one @ two)
    assert inner(a, b) == pytest.approx(expected, rel=1e-12)
    assert rotation(a, b).angle == pytest.approx(angle(one.numpy(), two.numpy()), abs=1e-9)
    assert rotation(a, b).scale == pytest.approx(float(one.norm() / two.norm()), rel=1e-12)
    assert total_norm(a) == pytest.approx(float(one.norm()), rel=1e-12)
    weights = [torch.nn.Parameter(torch.ones_like(part)) for part in a]
    for weight, gradient in zip(weights, a, strict=True):
        weight.grad = gradient
    assert update_slope(weights, b, 0.5) == pytest.approx(2 * expected, rel=1e-12)

"""Which steps of a training are measured, and what measuring costs.

Measuring a trainer that is recorded costs a bounded share of its training, by count of passes. The unit is a forward pass over the
completions of a step. A pass of training over them costs three (forward and backward), drawing them about one. What a measurement
costs was measured on SmolLM2 and on the embedded policy (docs/trainers/index.md).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sharpscope.config import RunConfig

MOST_SPIKES = 8
"""Steps of a run at which a spike is measured."""
FEWEST_PLACES = 5
MOST_PLACES = 7
PLANNED_SPIKES = 3
"""Steps of a training at which tokens' shares are measured by default: at least, if it has ten or more, and at most; and
spikes besides."""
MOST_SHARE = 0.12
"""Largest share of the training's passes that measuring costs by default."""
TRAINING, GENERATION = 3, 1
SHARES = 3
NORMS = 2.5
EXACT = 4
"""Passes of shares and of local norms over all completions; of the exact norms of one large and one random token, divided by the
completions of an update."""
OUTCOMES, EFFECTS = 8.5, 6.5
"""Passes of effects on KL and entropy: of the outcomes' gradients over all completions, and of the effects of all tokens."""
CRITICAL, ROTATION = 12, 3
"""Passes of a critical sharpness, at most, divided by the updates of an epoch; of a rotation."""
ALL_EFFECTS, SMALL = 33, 5_000_000
"""Passes of effects on the four outcomes of a run; parameters up to which a model of ours has them whatever they cost."""
OVERHEAD = 0.15
CHECK = 0.8
EFFECTS_CHECK = 8
"""Passes that shares cost however few completions are measured; of the first comparison with autograd, and of that of effects."""


@dataclass(kw_only=True)
class Timetable:
    """The steps at which something is measured, and the time that it has taken so far."""

    name: str  # under which run.json lists the time
    every: int = 0  # interval [steps]; 0: only at the steps of `also`
    also: tuple[int, ...] = ()
    places: frozenset[int] | None = None  # the steps, in place of the interval
    at_spikes: bool = True
    seconds: float = 0.0

    def due(self, step: int) -> bool:
        """Whether it is measured in `step` (0: before training)."""
        if self.places is not None:
            return step in self.places
        return step in self.also or (self.every > 0 and step % self.every == 0)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Context whose time is counted, unless it ends with an error."""
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started


@dataclass(frozen=True, kw_only=True)
class RowSample:
    """At measured steps other than `whole`, a random `share` of an update's rows is measured, at least one."""

    share: float
    whole: frozenset[int]


@dataclass(kw_only=True)
class StepBudget:
    """Steps at which something is measured; at most `most` of them, None: any number."""

    most: int | None
    steps: list[int] = field(default_factory=list)

    def take(self, step: int) -> bool:
        """Whether `step` is measured; counts it."""
        if step not in self.steps and (self.most is None or len(self.steps) < self.most):
            self.steps.append(step)
        return step in self.steps


class MeasurementSchedule:
    """The timetables of a run, made from its configuration."""

    def __init__(self, config: RunConfig) -> None:
        spec, probes = config.recording, config.probes
        tokens = spec.interval(config.steps)
        surface = probes.interval(config.steps)
        self.norms = _interval("norms", tokens, 1)
        self.shares = _interval("shares", tokens, 1)
        # the first step of AdamW is the gradient's sign, on which single tokens have no effect
        rare = 50 if spec.token_gradients_every is None else tokens
        self.effects = _interval("effects", rare if tokens else 0, 2)
        self.influence = _interval("influence", spec.heldout_influence_every)
        self.rotation = _interval("rotation", spec.rotation_every, 1)
        self.surface = _interval("surface", surface, 0, config.steps)
        self.critical = Timetable(name="critical sharpness")
        if probes.critical_sharpness:  # in step 1 and those whose surface is probed
            self.critical = _interval("critical sharpness", surface, 1)
        self.entropy = Timetable(name="entropy", every=spec.probe_entropy_every)
        self.tables = Timetable(name="tables")
        self.spikes = StepBudget(most=MOST_SPIKES)
        self.with_effects = StepBudget(most=None)
        self.sample: RowSample | None = None  # of a recorded trainer; else groups are drawn
        self.training = 0.0  # time of generation and training so far [s]

    @property
    def timetables(self) -> list[Timetable]:
        """All of them."""
        return [each for each in vars(self).values() if isinstance(each, Timetable)]

    def end_step(self, *, training: float, tables: float) -> None:
        """Count a step's time of generation and training, and that of its tables [s]."""
        self.training += training
        self.tables.seconds += tables

    @property
    def seconds(self) -> dict[str, float]:
        """Time spent so far by name [s]."""
        return {each.name: each.seconds for each in self.timetables if each.seconds}

    def state(self) -> dict[str, object]:
        """What a checkpoint stores, as JSON."""
        steps = {"spikes": self.spikes.steps, "with_effects": self.with_effects.steps}
        return {"seconds": self.seconds, "training": self.training, **steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        for each in self.timetables:
            each.seconds = state["seconds"].get(each.name, 0.0)
        self.training, self.spikes.steps = float(state["training"]), list(state["spikes"])
        self.with_effects.steps = list(state.get("with_effects", ()))

    def summary(self) -> dict[str, object]:
        """Share of the run's time spent on measuring (without evaluation), and seconds by name, for run.json."""
        spent = self.seconds
        total = sum(spent.values())
        share = total / (total + self.training) if total else 0.0
        seconds = {name: round(value, 3) for name, value in spent.items()}
        return {"share": round(share, 4), "seconds": seconds}


def affordable_effects(config: RunConfig, parameters: int) -> int | None:
    """Updates of a run of ours whose tokens get effects; None: any number."""
    update, choice = config.update, config.recording.effects
    if choice == "never":
        return 0
    if choice == "always" or parameters <= SMALL:
        return None
    passes = (TRAINING + (config.method.kl is not None)) * update.inner_epochs + GENERATION
    checked = EFFECTS_CHECK / update.mini_batches
    price = ALL_EFFECTS / update.mini_batches
    return max(0, int((MOST_SHARE * passes * config.steps - checked) / price))


def _interval(name: str, every: int, *also: int) -> Timetable:
    """Every so many steps, and at the steps of `also`; never if `every` is 0."""
    return Timetable(name=name, every=every, also=also if every else ())


# -- default places of a recorded training -----------------------------------------------------------------------------


@dataclass(frozen=True)
class StepCost:
    """What a step of a training does, for the price of measuring it."""

    epochs: int = 1  # how often it trains on its completions
    parts: int = 1  # updates in an epoch
    rows: int = 8  # completions of an update
    generated: bool = False  # whether it draws the completions
    reference: bool = False  # whether the loss runs a reference model too


@dataclass(frozen=True, kw_only=True)
class MeasurementPlan:
    """What of a training is measured by default, and where."""

    shares: frozenset[int]  # steps of tokens' shares
    whole: frozenset[int]  # those of them with all completions, and with norms
    effects: frozenset[int]
    critical: frozenset[int]
    spikes: int  # how many spikes may be measured besides
    spikes_with: frozenset[str]  # of norms and effects, what is measured at spikes too
    sample: (
        float  # share of an update's completions that is measured at the steps that are not whole
    )
    price: float  # share of the training's passes; NaN where its length is not known

    @property
    def sentence(self) -> str:
        """Where tokens are measured, and what it costs."""
        first = sorted(self.shares)
        rest = [", …"] if len(first) > MOST_PLACES else []
        steps = "".join([", ".join(map(str, first[:MOST_PLACES])), *rest])
        spikes = " and at spikes" if self.spikes else ""
        price = f"about {self.price:.0%} of the training's passes"
        if math.isnan(self.price):
            price = f"at most {MOST_SHARE:.0%} of the passes of a long training"
        without = "" if self.effects else "; no effects (every=1 measures them)"
        return f"tokens at steps {steps}{spikes}; {price}{without}"


@dataclass
class _Budget:
    """Passes that are left."""

    left: float

    def pays(self, price: float) -> bool:
        """Whether a price can be paid, which it is then."""
        if price > self.left:
            return False
        self.left -= price
        return True


@dataclass(frozen=True, kw_only=True)
class _Prices:
    """Prices in passes over the completions of a step."""

    training: int
    sampled: float  # shares of one completion of each update
    norms: float
    critical: float

    @property
    def rich(self) -> float:
        """Shares, norms and effects of all tokens, and critical sharpness."""
        return OVERHEAD + SHARES + self.norms + OUTCOMES + EFFECTS + self.critical


def measurement_plan(
    steps: int, cost: StepCost, *, critical: bool, rotation: bool = False, exact: int = 1
) -> MeasurementPlan:
    """Plan the measurements of a training of `steps` steps (0: not known); `exact` is recording.exact_tokens.

    Shares of at least one completion are measured at `FEWEST_PLACES` steps (of fewer than ten steps: at every other one), whatever
    they cost. What is left of the budget pays, in this order and several times: a spike, effects, norms and shares of all
    completions, the critical sharpness, another place; and then more completions.
    """
    rows = max(cost.rows, 1)
    prices = _Prices(
        training=(TRAINING + cost.reference) * cost.epochs + GENERATION * cost.generated,
        sampled=OVERHEAD + SHARES / rows + ROTATION * rotation,
        norms=NORMS + EXACT * exact / rows,
        critical=critical * CRITICAL * (1 + cost.reference) / cost.parts,
    )
    if not steps:
        return _open_plan(prices, rows)
    allowed = MOST_SHARE * prices.training * steps
    places = min(FEWEST_PLACES, (steps + 1) // 2)
    budget = _Budget(allowed - CHECK - places * prices.sampled)
    bought = {"spike": 0, "effects": 0, "whole": 0, "critical": 0}
    count = 1  # completions of an update in a sample
    for number in range(min(MOST_PLACES, steps)):
        if number >= places:
            another = prices.sampled + (count - 1) * SHARES / rows
            if bought["whole"] < number or not budget.pays(another):
                break
            places = number + 1
        if number < PLANNED_SPIKES:
            bought["spike"] += budget.pays(OVERHEAD + SHARES)
        if number == 0:
            quarter = max(min(2, rows), rows // 4)
            if budget.pays((quarter - 1) * places * SHARES / rows):
                count = quarter
        first = EFFECTS_CHECK * (bought["effects"] == 0)
        part = 1 if bought["whole"] > bought["effects"] else count / rows
        bought["effects"] += budget.pays(OUTCOMES + EFFECTS * part + first)
        more = (1 - count / rows) * (SHARES + EFFECTS * (bought["effects"] > bought["whole"]))
        bought["whole"] += budget.pays(more + prices.norms)
        bought["critical"] += budget.pays(prices.critical)
    spikes_with = set()
    for name, price in (("norms", prices.norms), ("effects", OUTCOMES + EFFECTS)):
        if bought["whole"] and budget.pays(bought["spike"] * price):
            spikes_with.add(name)
    sampled = places - bought["whole"]
    each = sampled * SHARES + max(0, bought["effects"] - bought["whole"]) * EFFECTS
    while sampled and count < rows and budget.pays(each / rows):
        count += 1
    order = _places(steps, places)
    return MeasurementPlan(
        shares=frozenset(order),
        whole=frozenset(order[: bought["whole"]]),
        effects=frozenset(order[: bought["effects"]]),
        critical=frozenset(order[: bought["critical"]]) if critical else frozenset(),
        spikes=bought["spike"],
        spikes_with=frozenset(spikes_with),
        sample=count / rows,
        price=(allowed - budget.left) / (prices.training * steps),
    )


def _places(steps: int, count: int) -> list[int]:
    """So many of the steps 1, …, `steps`, evenly spread; in the order in which more is measured at them.

    The first comes last: the first step of AdamW is the gradient's sign, on which single tokens have no effect.
    """
    spread = [1 + round(i * (steps - 1) / max(count - 1, 1)) for i in range(count)]
    return [*spread[1:2], *spread[:1:-1], *spread[:1]]


def _open_plan(prices: _Prices, rows: int) -> MeasurementPlan:
    """Five of the first ten steps and then ever fewer, of which those that pay for it are measured wholly."""
    doubling = [10 * 2**power for power in range(MOST_PLACES + PLANNED_SPIKES)]
    early = (1, 3, 5, 7)
    spent = CHECK + EFFECTS_CHECK + (len(early) + len(doubling)) * prices.sampled
    spent += PLANNED_SPIKES * (OVERHEAD + SHARES)
    rich = set[int]()
    for step in doubling:
        if spent + prices.rich <= MOST_SHARE * prices.training * step:
            spent += prices.rich
            rich.add(step)
    return MeasurementPlan(
        shares=frozenset([*early, *doubling]),
        whole=frozenset(rich),
        effects=frozenset(rich),
        critical=frozenset(rich) if prices.critical else frozenset(),
        spikes=PLANNED_SPIKES,
        spikes_with=frozenset(),
        sample=1 / rows,
        price=math.nan,
    )

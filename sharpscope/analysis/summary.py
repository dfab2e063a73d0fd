"""A run in one sentence and four numbers: the head of the page, of the card, and what `show` says first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from sharpscope.analysis.cause_sections import checked
from sharpscope.analysis.curves import run_values
from sharpscope.analysis.effects import leading_effects
from sharpscope.analysis.events import MACHINE
from sharpscope.analysis.headline import largest_update, leading_step, moved_tokens
from sharpscope.analysis.measures import STEPS
from sharpscope.analysis.sections import Marked
from sharpscope.analysis.study import flat, last_step, per_run
from sharpscope.analysis.text import (
    listed,
    method_label,
    model_label,
    number,
    percent,
    printable,
)
from sharpscope.diagnose import diagnose
from sharpscope.errors import UserError
from sharpscope.traces import Run

if TYPE_CHECKING:
    from sharpscope.analysis.report import Page

WANTED = (
    "reward",
    "held-out accuracy, greedy [%]",
    "held-out accuracy, T = 1 [%]",
    STEPS["grad_norm"].name,
    STEPS["entropy_mean"].name,
    STEPS["kl_step"].name,
    STEPS["completion_length_mean"].name,
)
"""Quantities of the numbers at the head, the first four that were recorded at two steps or more."""
NUMBERS = 4
POINTS = 40
FINDINGS = 2
"""Findings of `sharpscope diagnose` that a verdict names, none of the machine: `show` lists those among the events."""


@dataclass(frozen=True)
class Number:
    """A quantity at the head of a page: its value at the end, from where it came, and its course.

    Attributes:
        title: of the quantity, with its unit.
        first, last: means of the first and the last tenth of the steps, as text; of several runs a difference.
        values: at most POINTS means over the course, for a sparkline.
        detail: what stands beside it.
    """

    title: str
    first: str
    last: str
    values: Sequence[float]
    detail: str

    def path(self) -> str:
        """The course as the path of an SVG element of 120 by 28."""
        data = np.asarray(self.values)
        x = np.linspace(1.0, 119.0, len(data))
        y = 26.0 - 24.0 * (data - data.min()) / (np.ptp(data) or 1.0)
        return "M" + "L".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))


def numbers(run: Run) -> list[Number]:
    """The first NUMBERS of WANTED that the run recorded."""
    values = run_values(run).dropna(subset=["value"])
    made: list[Number] = []
    for name in WANTED:
        data = values[values["quantity"] == name].sort_values("step")["value"].to_numpy(float)
        accuracy_known = "accuracy" in name and any("accuracy" in one.title for one in made)
        if len(data) < 2 or accuracy_known:
            continue
        tenth = -(-len(data) // 10)
        first = number(data[:tenth].mean())
        last = number(data[-tenth:].mean())
        parts = np.array_split(data, min(POINTS, len(data)))
        course = [float(part.mean()) for part in parts]
        made.append(Number(name, first, last, course, f"from {first}"))
    return made[:NUMBERS]


def facts_of(run: Run) -> str:
    """What was trained, on one line; of an imported trace a second line says what it lacks."""
    config = flat(run.config)
    info = run.info
    model = config.get("policy.model") or info.get("model")
    size = info.get("parameters")
    rate = config.get("optimizer.lr", config.get("learning_rate"))
    sized = f" ({size / 1e6:,.3g} M parameters)" if size else ""
    facts = {
        f"method {method_label(run.method)}, task {run.task}, seed {run.seed}": True,
        f"model {model_label(str(model))}{sized}": model,
        f"{last_step(run)} of {config.get('steps') or config.get('max_steps') or '?'} steps": True,
        f"learning rate {rate}": rate,
        f"group size {config.get('rollout.group_size')}": config.get("rollout.group_size"),
        f"started {str(info.get('started'))[:16].replace('T', ' ')}": info.get("started"),
        f"on {info.get('device')}": info.get("device"),
    }
    said = ", ".join(fact for fact, is_known in facts.items() if is_known)
    imported = info.get("imported")
    if not isinstance(imported, dict):
        return said
    absent = (imported.get("not_recorded") or {}).items()
    lacks = [
        f"{table}: {', '.join(names) if run.rows(table) else 'all'}"
        for table, names in absent
        if names
    ]
    return f"{said}\nImported from {imported.get('from')}; not recorded: {'; '.join(lacks) or 'nothing is missing'}."


@per_run
def verdict(run: Run) -> str:
    """What happened, in one paragraph: `verdict_parts`."""
    return " ".join(filter(None, verdict_parts(run)))


@per_run
def verdict_parts(run: Run) -> tuple[str, str]:
    """The cause that a run shows, or else what was learned; and what else is to say: what `diagnose` found, the leading tokens."""
    learned = " ".join(_learned(run))
    named = " ".join(cause(run))
    more = [*findings(run), *_leading_tokens(run)]
    if named:
        return named, " ".join(filter(None, [learned, *more]))
    return learned or _recorded(run), " ".join(more)


def _learned(run: Run) -> Iterator[str]:
    """Reward and accuracy at the start and the end of training."""
    for one in numbers(run)[:2]:
        if one.title == "reward" or "accuracy" in one.title:
            name = one.title.removesuffix(" [%]")
            unit = " %" if "[%]" in one.title else ""
            yield f"{name[0].upper()}{name[1:]} {one.first} → {one.last}{unit}."


def _recorded(run: Run) -> str:
    """The loss at the start and the end of a training without a reward, else how many steps there are."""
    count = len(run.steps)
    loss = run.steps["loss"].dropna().to_numpy(float)
    if not count:
        return "No step is recorded yet."
    if len(loss) < 2:
        return "1 step is recorded." if count == 1 else f"{count:,} steps are recorded."
    tenth = -(-len(loss) // 10)
    return f"Loss {number(loss[:tenth].mean())} → {number(loss[-tenth:].mean())}."


def _leading_tokens(run: Run) -> Iterator[str]:
    """What the tokens of the leading step did, and which of them its gradient is made of, as far as either was recorded."""
    for one, effect in leading_effects(run, 1):
        yield f"Step {one.step}: {_pushed(one)} has the largest effect on its KL ({effect})."
    spike = largest_update(run)
    leading = [] if spike is None else moved_tokens(run, spike.step, 1)
    if spike is not None and leading:
        token, share = _pushed(leading[0].sentence), percent(leading[0].share)
        yield f"Largest gradient with tokens at step {spike.step}: {token} has the largest share ({share})."


def _pushed(one: Marked) -> str:
    """A token and the direction in which its loss pushes it."""
    way = {1: ", made more likely,", -1: ", made less likely,"}.get(one.direction, "")
    return f"“{printable(one.token.strip() or one.token, 24)}”{way}"


def cause(run: Run) -> list[str]:
    """The sentence of the first cause that a run shows."""
    return [one.sentence for one in checked(run).causes[:1]]


def findings(run: Run) -> list[str]:
    """What `sharpscope diagnose` says first of a run without a cause; of a packed or very short run nothing."""
    if cause(run) or not run.path.is_dir():
        return []
    try:
        found = diagnose(run.path, causes=False)
    except UserError:
        return []
    told = [one for one in found.findings if one.rule.name not in MACHINE]
    return [f"{one.rule.title} from step {one.step}." for one in told[:FINDINGS]]


@dataclass(frozen=True)
class Head:
    """The first screen of a page.

    Attributes:
        name, facts: of the run, the facts in a line.
        verdict, details: what happened, and what else is to say of it.
        step: the one whose tokens say most of it.
        link: what leads to them.
        numbers: at most four.
    """

    name: str
    facts: str
    verdict: str = ""
    details: str = ""
    step: int | None = None
    link: str = ""
    numbers: Sequence[Number] = ()


def head_of(page: Page) -> Head:
    """The head of a page: of one run its verdict and numbers, of several their main differences."""
    runs = page.runs
    names = list(runs.by_name)
    if not page.sections:  # the tokens of one step
        return Head(", ".join(names), "completions, token by token")
    if len(runs) == 1:
        run = runs[0]
        facts = facts_of(run).split("\n")[0]
        step = leading_step(run)
        link = f"Tokens of step {step}" + (", which shows the cause" if cause(run) else "")
        return Head(names[0], facts, *verdict_parts(run), step, link, numbers(run))
    tables = {
        one.title: one.content
        for one in page.sections
        if isinstance(one.content, pd.DataFrame) and "difference" in one.content
    }
    said = [title for title in list(tables)[:1] if title.startswith("Did ")]
    # the main differences first, then those of the first comparison
    rows: dict[object, Any] = {}
    for table in list(tables.values())[:2]:
        rows |= {row["quantity"]: row for row in table.to_dict("records")}
    made: list[Number] = []
    for row in list(rows.values())[:NUMBERS]:
        shows = row["shows"]
        one = Number(
            title=f"{row['quantity']}, difference",
            first="",
            last=row["difference"],
            values=(),
            detail=shows,
        )
        made.append(one)
        if len(made) <= 2:
            text = f"{row['difference']}, {shows}" if shows else row["difference"]
            said.append(f"{row['quantity']}: {text}.")
    told = " ".join(said) or verdict(runs[0])
    return Head(f"{len(names)} runs", listed(names, 4), told, numbers=made)

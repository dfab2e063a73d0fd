"""Findings: the rules of `sharpscope.rules` judged in a log, and which of them is the earliest that explains the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from sharpscope.diagnose.changes import ORDERED, ORDERED_SUPERVISED, Change
from sharpscope.diagnose.logs import Log
from sharpscope.diagnose.onsets import Course, Stretch, stretch_of
from sharpscope.diagnose.quantities import BY_NAME
from sharpscope.packaged import package_yaml
from sharpscope.rules.measures import (
    EARLY,
    WINDOW,
    History,
    Values,
    few_groups,
    finite,
    solved,
    step_noise,
)
from sharpscope.rules.table import RULES, SEVERITIES, Rule, Severity


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A rule that applied."""

    rule: Rule
    severity: Severity  # by what the reward does afterwards
    began: Change  # of the quantity that shows it best
    change: str  # how the quantity changed, and what the reward did afterwards
    measured: str  # what the rule measured, with its threshold
    certainty: str  # where it applies, and how often it does in healthy runs
    seen: int  # the step from which on the rule applied; means over several steps do so later than it began
    explains: tuple[str, ...] = ()  # rules of the findings that may follow from it

    @property
    def step(self) -> int:
        """The step at which it began."""
        return self.began.step

    @property
    def text(self) -> str:
        """The numbers on one line."""
        return f"{self.change}; {self.measured}" if self.measured else self.change


ASIDE = ("gradient_clipping", "memory")
"""Rules of settings and of the machine: what they say comes after what is learned."""
FALSE_ALARMS: dict[str, dict[str, list[int]]] = package_yaml(
    "sharpscope.diagnose", "false_alarms.json"
)
"""Rule -> kind of healthy runs -> [runs in which it applied, runs that it could judge]."""
FEW = ("simulated, 1 groups a step", "simulated, 2 groups a step")
"""Kinds of healthy runs to which those with few groups in a step are compared."""


def find(log: Log, changes: Sequence[Change]) -> list[Finding]:
    """The rules that apply in a log: the earliest that explains the worst comes first, then by severity and step.

    Args:
        log: the run.
        changes: of its quantities (`changes`), by which slow beginnings are dated.

    Returns:
        The findings; the first one names in `explains` which of the others may follow from it.
    """
    history: dict[str, Values] = {str(name): log.frame[name].to_numpy(float) for name in log.frame}
    steps = log.frame.index.to_numpy()
    groups = groups_in_a_step(log.frame)
    if groups is not None:
        history["groups"] = np.full(len(steps), float(groups))
    course = Course(
        history=history,
        steps=steps,
        changes=changes,
    )
    seen: dict[str, Stretch] = {}
    for rule in judged(log):
        stretch = stretch_of(rule, course)
        if stretch is not None:
            seen[rule.name] = stretch
    fallen = None
    fall = seen.get("reward_collapse")
    if fall is not None and fall.last >= len(steps) - WINDOW:
        fallen = fall.began.step
    findings = [
        _finding(
            RULES[name],
            stretch,
            course,
            fallen,
        )
        for name, stretch in seen.items()
    ]
    return _ranked(_without_repetitions(findings))


def groups_in_a_step(frame: pd.DataFrame) -> int | None:
    """How many groups a step has: the shares of them with equal rewards are multiples of one over it. None if it is not known.

    Args:
        frame: canonical quantities by step.

    Returns:
        The smallest number of at most 64 that fits all steps.
    """
    if "dead_groups" not in frame:
        return None
    shares = frame["dead_groups"].to_numpy(float)
    shares = shares[np.isfinite(shares)]
    if len(shares) < 5 or np.ptp(shares) == 0:
        return None
    for groups in range(1, 65):
        counts = shares * groups
        if np.abs(counts - np.round(counts)).max() < 0.01:
            return groups
    return None


def judged(log: Log) -> list[Rule]:
    """The rules that a log of this kind can show something of."""
    return [
        rule
        for rule in RULES.values()
        if log.training in rule.trainings and set(rule.quantities) & set(log.frame)
    ]


def _without_repetitions(findings: Sequence[Finding]) -> list[Finding]:
    """Findings without those that say of a whole run what another says better."""
    names = {finding.rule.name for finding in findings}
    left_out = set()
    if names & {"no_motion", "reward_constant", "reward_collapse", "lost_gradient", "lr_zero"}:
        left_out.add("reward_flat")
    if names & {"loss_zero", "loss_growth", "lr_zero", "margin_runaway"}:
        left_out.add("loss_flat")
    if "lost_gradient" in names:
        left_out |= {"zero_gradient", "no_motion"}
    if "gradient_growth" in names:
        left_out.add("no_motion")
    return [finding for finding in findings if finding.rule.name not in left_out]


def _ranked(findings: Sequence[Finding]) -> list[Finding]:
    """Findings by severity and step, those of a whole run last; before the first one comes what may have caused it."""
    ordered = sorted(
        findings,
        key=lambda f: (
            SEVERITIES.index(f.severity),
            f.rule.name in ASIDE,
            f.rule.window == 0,
            f.step,
        ),
    )
    if not ordered:
        return []
    first = ordered[0]
    while causes := [f for f in ordered if _may_have_caused(f, first)]:
        first = min(causes, key=lambda f: f.step)
    later = [f.rule.name for f in ordered if f.step >= first.step]
    follow = tuple(name for name in later if name in first.rule.explains)
    others = [f for f in ordered if f is not first]
    return [replace(first, explains=follow), *others]


def _may_have_caused(cause: Finding, effect: Finding) -> bool:
    """Whether one finding may follow from another and began no earlier, and not the other way round as well."""
    if cause.severity == "info" or cause.rule.window == 0:
        return False
    if effect.rule.name not in cause.rule.explains or cause.rule.name in effect.rule.explains:
        return False
    # a spike has an exact step, the beginning of a slower change is known less well
    spike = cause.rule.measured_by[0] == "spike"
    other = cause.began.quantity != effect.began.quantity
    latest = effect.seen if spike and other else effect.step
    return cause.step <= latest


def order_of(findings: Sequence[Finding], changes: Sequence[Change]) -> list[Change]:
    """All changes by step: those given, and the beginnings of findings whose quantity has none nearby.

    Args:
        findings: those of a log.
        changes: of its quantities.
    """
    known = list(changes)
    for finding in filter(_begins_in_order, findings):
        began = finding.began
        near = (c for c in known if c.quantity == began.quantity)
        if not any(abs(c.step - began.step) <= WINDOW for c in near):
            known.append(began)
    return sorted(known, key=lambda change: (change.step, change.quantity))


def _begins_in_order(finding: Finding) -> bool:
    """Whether the beginning of a finding is an event: of a step, of a quantity that is listed, with ends that differ as printed."""
    began = finding.began
    if finding.severity == "info" or not finding.rule.window:
        return False
    if began.quantity not in ORDERED + ORDERED_SUPERVISED:
        return False
    ends_known = bool(np.isfinite([began.before, began.after]).all())
    return ends_known and f"{began.before:.3g}" != f"{began.after:.3g}"


def _finding(rule: Rule, stretch: Stretch, course: Course, fallen: int | None) -> Finding:
    """A rule's finding; `fallen`: the step from which on the reward falls for good."""
    history = course.history
    harmed = fallen is not None and _before_fall(
        rule,
        stretch,
        course.steps,
        fallen,
    )
    rose = fallen is None and _rose(history)
    over = _is_over(rule, stretch, course)
    helped = rose or bool(solved(history)[-1:].any())
    change, measured = _evidence(rule, stretch, course)
    if harmed and rule.name != "reward_collapse":
        change += f"; reward falls from step {fallen}"
    elif rose and rule.severity[2] != rule.severity[1]:
        change += "; reward rose"
    return Finding(
        rule=rule,
        severity=_severity(rule, stretch, harmed, helped, over),
        began=stretch.began,
        change=change,
        measured=measured,
        certainty=_certainty(rule, stretch, over, history),
        seen=int(course.steps[stretch.first]),
    )


def _before_fall(rule: Rule, stretch: Stretch, steps: Values, fallen: int) -> bool:
    """Whether a stretch began before the reward fell for good; one of a single step soon before."""
    soon = int(steps[-1])
    if rule.window == 1:
        soon = stretch.began.step + max(20, len(steps) // 5)
    return stretch.began.step - WINDOW <= fallen <= soon


def _is_over(rule: Rule, stretch: Stretch, course: Course) -> bool:
    """Whether what a rule says does not hold at the end any more."""
    if rule.name == "non_finite":
        return _skipped_updates(stretch, course.history)
    count = len(course.steps)
    return rule.window > 1 and stretch.last < count - max(WINDOW, count // 10)


def _severity(
    rule: Rule,
    stretch: Stretch,
    harmed: bool,
    helped: bool,
    over: bool,
) -> Severity:
    """How bad a finding is by what the reward does after it; a step milder if it is over."""
    worst = float(np.nanmax(_inside(stretch)))
    outcome = 0 if harmed else 2 if helped else 1
    severity = rule.level(worst, outcome)
    if over and severity != "info":
        return SEVERITIES[SEVERITIES.index(severity) + 1]
    return severity


def _inside(stretch: Stretch) -> Values:
    """What was measured from the first step of a stretch to its last."""
    return stretch.measured[stretch.first : stretch.last + 1]


def _skipped_updates(stretch: Stretch, history: History) -> bool:
    """Whether only a few gradients were not finite, and later ones are: a loss scaler leaves out such updates, and nothing is lost."""
    for name in RULES["non_finite"].quantities:
        if name != "grad_norm" and name in history and np.isinf(history[name]).any():
            return False
    norms = history.get("grad_norm", np.empty(0))
    known = norms[~np.isnan(norms)]
    few = stretch.count <= max(3, len(known) // 10)
    return few and len(known) > 3 and bool(np.isfinite(known[-3:]).all())


def _evidence(rule: Rule, stretch: Stretch, course: Course) -> tuple[str, str]:
    """How the quantity of a finding changed, and what the rule measured."""
    quantity = BY_NAME[stretch.began.quantity]
    if rule.name == "non_finite":
        rows = "1 row" if stretch.count == 1 else f"{stretch.count} rows"
        return f"{quantity.title} is not a finite number in {rows}", ""
    unit = f" {quantity.unit}" if quantity.unit else ""
    now = f"{_course(rule, stretch, course)}{unit}"
    worst = _inside(stretch)
    value = float(np.nanmin(worst) if rule.below else np.nanmax(worst))
    limit = f"reported {'to' if rule.below else 'from'} {rule.threshold:g}"
    return f"{quantity.title} {now}", f"measured: {value:.3g} ({rule.statistic}; {limit})"


def _course(rule: Rule, stretch: Stretch, course: Course) -> str:
    """The level of a quantity before a stretch and in it; over a whole run in its first third and in its last."""
    began = stretch.began
    steps = course.steps
    values = course.history[began.quantity]
    inside = values[(steps >= began.step) & (steps <= steps[stretch.last])]
    inside = inside[np.isfinite(inside)]
    if rule.window == 0:
        third = max(1, len(inside) // 3)
        return f"{inside[:third].mean():.3g} → {inside[-third:].mean():.3g}"
    level = inside[0] if rule.window == 1 else inside[-WINDOW:].mean()
    before = f"{began.before:.3g}"
    now = f"{level:.3g}"
    known = np.isfinite(began.before) and before != now and (steps < began.step).any()
    return f"{before} → {now}" if known else now


def _certainty(rule: Rule, stretch: Stretch, over: bool, history: History) -> str:
    """Where a rule applies, when it began, and how often it applies in healthy runs."""
    rows = int(np.isfinite(stretch.measured[stretch.first :]).sum())
    began = stretch.began
    parts = []
    if rule.window > 1 and began.high > began.low:
        parts.append(f"began between steps {began.low} and {began.high}")
    if rule.window != 0 and rows > 1:
        since = ", and over since" if over else ""
        parts.append(f"at {stretch.count} of the {rows} rows from then on{since}")
    counts = FALSE_ALARMS.get(rule.name, {})
    if few_groups(history)[-1]:
        counts = {kind: counts[kind] for kind in FEW if kind in counts} or counts
    runs = sum(judged for _, judged in counts.values())
    if runs:
        alarms = sum(alarmed for alarmed, _ in counts.values())
        parts.append(f"in {alarms} of {runs} healthy runs")
    return "; ".join(parts) or "certain"


def _rose(history: History) -> bool:
    """Whether the reward's last tenth is above its first by three standard errors."""
    y = finite(history, "reward")
    if len(y) < 2 * EARLY:
        return False
    n = max(EARLY, len(y) // 10)
    rise = y[-n:].mean() - y[:n].mean()
    error = step_noise(y)[-1] * np.sqrt(2 / n)
    return bool(rise > 3 * error)

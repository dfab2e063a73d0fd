"""Findings: the rules of `sharpscope.rules` judged in a log, and which of them is the earliest that explains the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from sharpscope.diagnose.changes import ORDERED, ORDERED_SUPERVISED, Change
from sharpscope.diagnose.logs import Log
from sharpscope.diagnose.quantities import BY_NAME
from sharpscope.diagnose.tables import Positions
from sharpscope.packaged import package_yaml
from sharpscope.rules.judging import applies
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


@dataclass(frozen=True, kw_only=True)
class _Stretch:
    """Where a rule applies."""

    began: Change  # with which it began
    first: int  # position of the first step of the first stretch
    last: int  # position of the last step at which it applies
    count: int  # steps at which it applies
    measured: Values


EXACT = ("zero_gradient", "reward_constant", "lost_gradient", "loss_zero", "lr_zero")
"""Rules of a quantity that stays exactly the same; they begin where it begins to."""
SINCE_BEST = ("overfitting", "reward_gap")
"""Rules that begin at the first evaluation after the best one."""
FROM_THE_FIRST = ("kl_start", "reference_start", "dead_groups")
"""Rules of what is so from the first step on: of the KL there, and of groups where a step has one."""
PERSISTENT = 3
"""Steps for which a rule must apply if its measure is over several: a mean of the first row alone says nothing."""
FEWEST_ROWS = 5
"""Rows from which on a mean of several steps is judged."""

_POLICY = ("reward_collapse", "reward_constant", "zero_gradient", "drift", "dead_groups")
_OUTCOMES = ("entropy_rise", "entropy_collapse", "kl_drift", "length_growth", "length_shrink")
EXPLAINS: dict[str, tuple[str, ...]] = {
    "non_finite": (*_POLICY, "loss_zero", "loss_growth"),
    "lr_zero": ("no_motion", "reward_flat", "loss_flat"),
    "lost_gradient": ("zero_gradient", "no_motion", "reward_flat", "reward_constant"),
    "policy_destroyed": (*_POLICY, *_OUTCOMES, "truncation", "gradient_growth"),
    "update_spike": (*_POLICY, *_OUTCOMES, "truncation", "policy_destroyed", "non_finite"),
    "gradient_spike": (*_POLICY, *_OUTCOMES, "truncation", "policy_destroyed", "non_finite"),
    "gradient_growth": (*_POLICY, *_OUTCOMES, "truncation", "non_finite", "gradient_spike"),
    "sampler_logp": (*_POLICY, *_OUTCOMES, "mismatch_kl", "logp_mismatch", "ratio_tail"),
    "logp_mismatch": (*_POLICY, *_OUTCOMES, "gradient_growth", "gradient_spike", "ratio_tail"),
    "mismatch_kl": (*_POLICY, *_OUTCOMES, "gradient_growth", "gradient_spike", "ratio_tail"),
    "kl_sign": (*_POLICY, *_OUTCOMES, "gradient_growth"),
    "entropy_rise": (*_POLICY, "kl_drift", "length_growth", "length_shrink", "truncation"),
    "entropy_collapse": (*_POLICY, "reward_flat", "truncation", "length_growth", "length_shrink"),
    "kl_drift": (*_POLICY, "length_growth", "length_shrink", "truncation"),
    "length_growth": ("truncation", *_POLICY),
    "truncation": (*_POLICY, "reward_flat"),
    "length_shrink": _POLICY,
    "reward_gap": (),
    "reward_collapse": ("reward_constant", "zero_gradient", "drift", "dead_groups"),
    "reward_constant": ("zero_gradient", "drift", "dead_groups", "no_motion"),
    "dead_groups": ("zero_gradient", "reward_constant", "reward_flat"),
    "zero_gradient": ("drift", "reward_flat", "no_motion", "loss_flat"),
    "no_motion": ("reward_flat",),
    "loss_spike": ("loss_growth", "overfitting"),
    "loss_growth": ("overfitting",),
    "loss_zero": ("loss_flat", "zero_gradient", "gradient_growth"),
    "reference_start": ("pairs_not_learned", "margin_runaway", "chosen_falls", "loss_zero"),
    "margin_runaway": ("chosen_falls", "gradient_growth", "zero_gradient"),
}
"""Rule -> rules whose findings may follow from it, if it applied before them."""

FALSE_ALARMS: dict[str, dict[str, list[int]]] = package_yaml(
    "sharpscope.diagnose", "false_alarms.json"
)
"""Rule -> kind of healthy runs -> [runs in which it applied, runs that it could judge]."""
FEW = ("simulated, 1 groups a step", "simulated, 2 groups a step")
"""Kinds of healthy runs to which those with few groups in a step are compared."""


def find(log: Log, changes: Sequence[Change]) -> list[Finding]:
    """The rules that apply in a log: the earliest that explains the worst comes first, then by severity and step."""
    history: dict[str, Values] = {str(name): log.frame[name].to_numpy(float) for name in log.frame}
    steps = log.frame.index.to_numpy()
    groups = groups_in_a_step(log.frame)
    if groups is not None:
        history["groups"] = np.full(len(steps), float(groups))
    seen: dict[str, _Stretch] = {}
    for rule in judged(log):
        stretch = _stretch(rule, history, steps, changes)
        if stretch is not None:
            seen[rule.name] = stretch
    fall = seen.get("reward_collapse")
    fallen = fall.began.step if fall is not None and fall.last >= len(steps) - WINDOW else None
    findings = [
        _finding(RULES[name], stretch, history, steps, fallen) for name, stretch in seen.items()
    ]
    return _ranked(_without_repetitions(findings))


def groups_in_a_step(frame: pd.DataFrame) -> int | None:
    """How many groups a step has: the shares of them with equal rewards are multiples of one over it. None if it is not known."""
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
    if names & {"gradient_growth"}:
        left_out.add("no_motion")
    return [finding for finding in findings if finding.rule.name not in left_out]


def _ranked(findings: Sequence[Finding]) -> list[Finding]:
    """Findings by severity and step, those of a whole run last; before the first one comes what may have caused it."""
    ordered = sorted(
        findings,
        key=lambda f: (SEVERITIES.index(f.severity), f.rule.window == 0, f.step),
    )
    if not ordered:
        return []
    first = ordered[0]
    while causes := [f for f in ordered if _may_have_caused(f, first)]:
        first = min(causes, key=lambda f: f.step)
    effects = _effects(first)
    follow = tuple(f.rule.name for f in ordered if f.rule.name in effects and f.step >= first.step)
    others = [f for f in ordered if f is not first]
    return [replace(first, explains=follow), *others]


def _effects(finding: Finding) -> tuple[str, ...]:
    """The rules whose findings may follow from a finding."""
    return EXPLAINS.get(finding.rule.name, ())


def _may_have_caused(cause: Finding, effect: Finding) -> bool:
    """Whether one finding may follow from another and began no earlier, and not the other way round as well."""
    if cause.severity == "info" or cause.rule.window == 0:
        return False
    if effect.rule.name not in _effects(cause) or cause.rule.name in _effects(effect):
        return False
    # a spike has an exact step, the beginning of a slower change is known less well
    spike = cause.rule.measured_by[0] == "spike"
    other = cause.began.quantity != effect.began.quantity
    latest = effect.seen if spike and other else effect.step
    return cause.step <= latest


def order_of(findings: Sequence[Finding], changes: Sequence[Change]) -> list[Change]:
    """All changes by step: those given, and the beginnings of findings whose quantity has none nearby."""
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


def _stretch(
    rule: Rule, history: History, steps: Values, changes: Sequence[Change]
) -> _Stretch | None:
    """The first stretch of steps at which a rule applies, without gaps of more than WINDOW steps; None without any."""
    with np.errstate(all="ignore"):
        measured = rule.measure(history)
    holds = np.flatnonzero(applies(rule, measured))
    if rule.worse is not None:
        severe = np.flatnonzero(applies(rule, measured, rule.worse[0]))
        holds = severe if len(severe) else holds
    part = _first_part(rule, holds, history, len(steps))
    if part is None:
        return None
    first = int(part[0])
    last = int(holds[-1])
    name = next(
        name
        for name in _shown(rule, history)
        if rule.name != "non_finite" or np.isinf(history[name][first])
    )
    if rule.window == 0:
        began = _of_whole_run(name, int(steps[0]))
    else:
        began = _beginning(rule, name, first, history, steps, changes)
    return _Stretch(began=began, first=first, last=last, count=len(holds), measured=measured)


def _of_whole_run(name: str, first: int) -> Change:
    """What stands for a beginning where a rule is of a whole run."""
    return Change(
        quantity=name,
        step=first,
        low=first,
        high=first,
        direction="flat",
        before=np.nan,
        after=np.nan,
    )


def _first_part(rule: Rule, holds: Positions, history: History, count: int) -> Positions | None:
    """The positions of the first stretch that lasts long enough; of a reward that recovered, of the last stretch."""
    if not len(holds):
        return None
    parts = np.split(holds, np.flatnonzero(np.diff(holds) > WINDOW) + 1)
    if rule.window > 1 or rule.name == "entropy_collapse":
        if count < FEWEST_ROWS:
            return None
        parts = [part for part in parts if len(part) >= PERSISTENT or part[-1] >= count - 1]
    if not parts:
        return None
    return _last_fall(parts, history["reward"]) if rule.name == "reward_collapse" else parts[0]


def _last_fall(parts: Sequence[Positions], reward: Values) -> Positions:
    """The stretches of the last collapse of the reward: those between which it did not recover by half."""
    found = parts[-1]
    best = float(np.nanmax(np.where(np.isfinite(reward), reward, np.nan)[: found[0] + 1]))
    for part in reversed(parts[:-1]):
        between = reward[part[-1] : found[0] + 1]
        between = between[np.isfinite(between)]
        low = float(np.nanmean(reward[found]))
        if len(between) and between.mean() > (low + best) / 2:
            break
        found = np.concatenate([part, found])
    return found


def _beginning(
    rule: Rule,
    name: str,
    first: int,
    history: History,
    steps: Values,
    changes: Sequence[Change],
) -> Change:
    """The change with which a stretch began whose first step is at position `first`."""
    values = history[name]
    before, inside, start = _onset(values, first, rule.window)
    if rule.name in SINCE_BEST:
        best, start = _best_before(values, first, highest=rule.name == "reward_gap")
        before = float(values[best])
    elif rule.name in EXACT:
        alike = values[first::-1] == values[first]
        start = first + 1 - int(np.argmin(np.append(alike, False)))
    elif rule.name in FROM_THE_FIRST and (rule.name != "dead_groups" or few_groups(history)[-1]):
        start = int(np.flatnonzero(np.isfinite(values))[0])
    began = Change(
        quantity=name,
        step=int(steps[start]),
        low=int(steps[start]),
        high=int(steps[first]),
        direction="down" if inside < before else "up",
        before=before,
        after=inside,
    )
    if rule.window <= 1 or rule.name in EXACT + SINCE_BEST or start == 0:
        return began
    return _first_of_its_way(began, changes)


def _first_of_its_way(began: Change, changes: Sequence[Change]) -> Change:
    """The first of the last changes of a quantity that go as a beginning goes; the beginning itself without any."""
    found = began
    for change in reversed(changes):
        if change.quantity != began.quantity or change.low > began.high:
            continue
        rises = change.after > change.before
        if change.direction == began.direction and rises == (began.direction == "up"):
            found = change
        elif change.direction != "flat" or found is not began:
            break
    return found


def _best_before(values: Values, at: int, highest: bool) -> tuple[int, int]:
    """Position of the best value up to `at`, and from which on values are worse by a quarter of what the one at `at` is."""
    known = np.flatnonzero(np.isfinite(values[: at + 1]))
    of_known = values[known] if highest else -values[known]
    best = len(known) - 1 - int(np.argmax(of_known[::-1]))
    loss = of_known[best] - of_known
    start = len(known) - 1
    while start - 1 > best and loss[start - 1] >= loss[-1] / 4:
        start -= 1
    return int(known[best]), int(known[start])


def _onset(values: Values, at: int, window: int) -> tuple[float, float, int]:
    """Level before a measure's window that ends at `at`, level at its end, and the position from which on most are nearer to the latter."""
    known = np.flatnonzero(np.isfinite(values[: at + 1]))
    recent = known[-window:]
    earlier = known[:-window]
    if not len(recent):
        return np.nan, np.nan, at
    before = float(np.median(values[earlier[-WINDOW:] if len(earlier) else recent[:1]]))
    inside = float(values[recent[-min(3, window) :]].mean())
    if window == 1:
        return before, inside, at
    near = np.abs(values[recent] - inside) <= np.abs(values[recent] - before)
    shares = np.cumsum(near[::-1])[::-1] / np.arange(len(near), 0, -1)  # of the steps from each on
    return before, inside, int(recent[int(np.argmax(near & (shares >= 0.6)))])


def _shown(rule: Rule, history: History) -> list[str]:
    """The quantities of a rule that a history has, those with a finite value first."""
    there = (name for name in rule.quantities if name in history)
    return sorted(there, key=lambda name: not len(finite(history, name)))


def _finding(
    rule: Rule, stretch: _Stretch, history: History, steps: Values, fallen: int | None
) -> Finding:
    """A rule's finding; `fallen`: the step from which on the reward falls for good."""
    harmed = fallen is not None and _before_fall(rule, stretch, steps, fallen)
    rose = fallen is None and _rose(history)
    over = _is_over(rule, stretch, history, len(steps))
    severity = _severity(rule, stretch, harmed, rose or bool(solved(history)[-1:].any()), over)
    change, measured = _evidence(rule, stretch, history, steps)
    if harmed and rule.name != "reward_collapse":
        change += f"; reward falls from step {fallen}"
    elif rose and rule.severity[2] != rule.severity[1]:
        change += "; reward rose"
    return Finding(
        rule=rule,
        severity=severity,
        began=stretch.began,
        change=change,
        measured=measured,
        certainty=_certainty(rule, stretch, over, history),
        seen=int(steps[stretch.first]),
    )


def _before_fall(rule: Rule, stretch: _Stretch, steps: Values, fallen: int) -> bool:
    """Whether a stretch began before the reward fell for good; one of a single step soon before."""
    soon = int(steps[-1])
    if rule.window == 1:
        soon = stretch.began.step + max(20, len(steps) // 5)
    return stretch.began.step - WINDOW <= fallen <= soon


def _is_over(rule: Rule, stretch: _Stretch, history: History, count: int) -> bool:
    """Whether what a rule says does not hold at the end any more."""
    if rule.name == "non_finite":
        return _skipped_updates(stretch, history)
    return rule.window > 1 and stretch.last < count - max(WINDOW, count // 10)


def _severity(rule: Rule, stretch: _Stretch, harmed: bool, helped: bool, over: bool) -> Severity:
    """How bad a finding is by what the reward does after it; a step milder if it is over."""
    worst = float(np.nanmax(stretch.measured[stretch.first : stretch.last + 1]))
    severity = rule.level(worst, 0 if harmed else 2 if helped else 1)
    if over and severity != "info":
        return SEVERITIES[SEVERITIES.index(severity) + 1]
    return severity


def _skipped_updates(stretch: _Stretch, history: History) -> bool:
    """Whether only a few gradients were not finite, and later ones are: a loss scaler leaves out such updates, and nothing is lost."""
    others = (name for name in RULES["non_finite"].quantities if name != "grad_norm")
    clean = not any(np.isinf(history[name]).any() for name in others if name in history)
    norms = history.get("grad_norm", np.empty(0))
    known = norms[~np.isnan(norms)]
    few = stretch.count <= max(3, len(known) // 10)
    return clean and few and len(known) > 3 and bool(np.isfinite(known[-3:]).all())


def _evidence(rule: Rule, stretch: _Stretch, history: History, steps: Values) -> tuple[str, str]:
    """How the quantity of a finding changed, and what the rule measured."""
    began = stretch.began
    quantity = BY_NAME[began.quantity]
    values = history[began.quantity]
    if rule.name == "non_finite":
        rows = "1 row" if stretch.count == 1 else f"{stretch.count} rows"
        return f"{quantity.title} is not a finite number in {rows}", ""
    unit = f" {quantity.unit}" if quantity.unit else ""
    now = f"{_course(rule, stretch, values, steps)}{unit}"
    worst = stretch.measured[stretch.first : stretch.last + 1]
    value = float(np.nanmin(worst) if rule.below else np.nanmax(worst))
    limit = f"reported {'to' if rule.below else 'from'} {rule.threshold:g}"
    return f"{quantity.title} {now}", f"measured: {value:.3g} ({rule.statistic}; {limit})"


def _course(rule: Rule, stretch: _Stretch, values: Values, steps: Values) -> str:
    """The level of a quantity before a stretch and in it; over a whole run in its first third and in its last."""
    began = stretch.began
    inside = values[(steps >= began.step) & (steps <= steps[stretch.last])]
    inside = inside[np.isfinite(inside)]
    if rule.window == 0:
        third = max(1, len(inside) // 3)
        return f"{inside[:third].mean():.3g} → {inside[-third:].mean():.3g}"
    level = inside[0] if rule.window == 1 else inside[-WINDOW:].mean()
    if np.isfinite(began.before) and (steps < began.step).any():
        return f"{began.before:.3g} → {level:.3g}"
    return f"{level:.3g}"


def _certainty(rule: Rule, stretch: _Stretch, passed: bool, history: History) -> str:
    """Where a rule applies, when it began, and how often it applies in healthy runs."""
    rows = int(np.isfinite(stretch.measured[stretch.first :]).sum())
    parts = []
    if rule.window > 1 and stretch.began.high > stretch.began.low:
        parts.append(f"began between steps {stretch.began.low} and {stretch.began.high}")
    if rule.window != 0 and rows > 1:
        over = ", and over since" if passed else ""
        parts.append(f"at {stretch.count} of the {rows} rows from then on{over}")
    counts = FALSE_ALARMS.get(rule.name, {})
    if few_groups(history)[-1]:
        counts = {kind: counts[kind] for kind in FEW if kind in counts} or counts
    alarms = sum(alarmed for alarmed, _ in counts.values())
    runs = sum(judged for _, judged in counts.values())
    if runs:
        parts.append(f"in {alarms} of {runs} healthy runs")
    return "; ".join(parts) or "certain"


def _rose(history: History) -> bool:
    """Whether the reward's last tenth is above its first by three standard errors."""
    y = finite(history, "reward")
    if len(y) < 2 * EARLY:
        return False
    n = max(EARLY, len(y) // 10)
    return bool(y[-n:].mean() - y[:n].mean() > 3 * step_noise(y)[-1] * np.sqrt(2 / n))

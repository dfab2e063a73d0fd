"""What is said of every log: whether the reward rose, what was read, under which keys, and what could not be judged."""

from __future__ import annotations

import numpy as np

from sharpscope.diagnose.logs import Log
from sharpscope.diagnose.quantities import BY_NAME
from sharpscope.rules.measures import EARLY, Values, step_noise
from sharpscope.rules.table import RULES

_LISTED = 12
"""Keys that are listed."""
_ALSO_HEALTHY = {
    "rewards": ("entropy", "kl", "length"),
    "distillation": ("entropy", "teacher_kl", "length"),
    "preference": ("margin", "chosen", "preference_accuracy"),
    "reward model": ("margin", "preference_accuracy"),
    "supervised": ("entropy", "eval_loss", "token_accuracy"),
}
"""Kind of training -> quantities of which one must have been read before a log is said to show no symptom."""
_ELSEWHERE = (
    "If the training does not run any more, nothing in this log explains why it ended. That stands elsewhere: the process's exit "
    "code (137: killed, mostly for memory), the trainer's stderr (a traceback, CUDA out of memory), the scheduler's time limit, a full disk."
)
_SHOWN = {
    "rewards": ("reward", "accuracy"),
    "distillation": ("teacher_kl", "loss"),
    "preference": ("loss", "margin", "preference_accuracy", "eval_loss"),
    "reward model": ("loss", "margin", "preference_accuracy", "eval_loss"),
    "supervised": ("loss", "eval_loss"),
}
_KINDS = {
    "rewards": "a training by rewards",
    "distillation": "a distillation (rewards are not judged)",
    "preference": "a training on preferences",
    "reward model": "a training of a reward model",
    "supervised": "a supervised training",
}


def learned(log: Log) -> str:
    """What became of the reward (of a supervised training: of the loss), with its standard error; one sentence for each quantity."""
    names = [name for name in _SHOWN[log.training] if len(log.finite(name))]
    if not names:
        wanted = BY_NAME[_SHOWN[log.training][0]].title
        return f"No {wanted} was read: whether anything was learned is not known."
    return " ".join(_course(log, name) for name in names)


def _course(log: Log, name: str) -> str:
    """A quantity's first and last level, and whether it changed."""
    quantity = BY_NAME[name]
    series = log.finite(name)
    y = series.to_numpy(float)
    title = quantity.title[0].upper() + quantity.title[1:]
    span = f"steps {series.index[0]:,} to {series.index[-1]:,}"
    if len(y) < 2 * EARLY:
        if len(y) == 1:
            return f"{title} {y[0]:.3g} at step {series.index[0]:,}."
        return f"{title} {y[0]:.3g} → {y[-1]:.3g} in {len(y)} rows ({span})."
    n = max(EARLY, len(y) // 10)
    first = float(y[:n].mean())
    last = float(y[-n:].mean())
    error = float(step_noise(y)[-1]) * float(np.sqrt(2 / n))
    verdict = _verdict(name, y, last - first, error)
    return f"{title} {first:.3g} → {last:.3g} ± {error:.2g} in {len(y):,} rows ({span}): {verdict}."


def _verdict(name: str, y: Values, change: float, error: float) -> str:
    """A rise or fall in words; `error`: standard error of the difference."""
    if np.ptp(y) == 0:
        return "constant"
    if abs(change) < 2 * error:
        return "hardly learned" if name == "reward" else "hardly changed"
    return "rose" if change > 0 else "fell"


def too_little(log: Log) -> str:
    """The quantities without which a log is not said to show no symptom, in words; empty if they were read."""
    names = set(log.frame.columns)
    missing = []
    if not names & {"reward", "loss", "teacher_kl"}:
        missing.append("reward or loss")
    if "grad_norm" not in names:
        missing.append("gradient norm")
    also = _ALSO_HEALTHY[log.training]
    if not names & set(also):
        missing.append(" or ".join(BY_NAME[name].title for name in also))
    return ", no ".join(missing)


def not_judged(log: Log) -> list[str]:
    """Rules of this kind of training whose quantities the log lacks."""
    return [
        rule.name
        for rule in RULES.values()
        if log.training in rule.trainings and not set(rule.quantities) & set(log.frame)
    ]


def what_was_read(log: Log) -> list[str]:
    """The lines that end a report."""
    frame = log.frame
    writer = "keys of no known trainer" if log.framework is None else f"written by {log.framework}"
    first = frame.index[0]
    last = frame.index[-1]
    rows = f"{log.rows:,} rows, {len(frame):,} steps ({first:,} to {last:,})"
    lines = [
        f"Read {rows} of {_KINDS[log.training]}; {log.format or 'log'}, {writer}.",
        f"Quantities: {', '.join(_source(log, name) for name in frame.columns)}.",
    ]
    for name, reason in log.guesses.items():
        if name in frame:
            key = ", ".join(log.sources[name])
            other = f"--map {name}=KEY names another, --map {name}=none leaves it out"
            lines.append(f"  {name} is taken from {key} {reason}; {other}")
    lines.extend(_what_was_not(log))
    lines.extend(log.notes)
    return lines


def ending(log: Log, explained: bool) -> str:
    """How a log ends that ends early: where, with which error, and what would say why; empty of another one.

    Args:
        log: the run.
        explained: whether a finding may be why it ended.
    """
    last = int(log.frame.index[-1])
    gaps = np.diff(log.frame.index)
    usual_gap = int(np.median(gaps)) if len(gaps) else 1
    early = log.announced > last + usual_gap
    if not early and not log.error:
        return ""
    where = f" of {log.announced:,}" if early else ""
    said = f"The log ends at step {last:,}{where}"
    if log.error:
        return f"{said}; the last error after it: {log.error}"
    if explained:
        return f"{said}."
    return f"{said}. {_ELSEWHERE}"


def _what_was_not(log: Log) -> list[str]:
    """The quantities that a log lacks, what could not be judged without them, and the keys that may be theirs."""
    missing = [name for name in _wanted(log) if name not in log.frame]
    if not missing:
        return []
    lines = [f"Not found: {', '.join(missing)}."]
    blind = [RULES[name].title.lower() for name in not_judged(log)]
    if blind:
        lines.append(f"Not judged without them: {'; '.join(blind[:6])}.")
    if log.unmapped:
        unused = ", ".join(log.unmapped[:_LISTED])
        more = len(log.unmapped) - _LISTED
        if more > 0:
            unused += f" and {more} more"
        lines.append(f"Keys not used: {unused}; --map {missing[0]}=KEY")
    return lines


def _source(log: Log, name: str) -> str:
    keys = " + ".join(log.sources.get(name, (name,)))
    return name if keys == name else f"{name} ({keys})"


def _wanted(log: Log) -> tuple[str, ...]:
    """Quantities that a log of this kind should have."""
    if log.training in ("rewards", "distillation"):
        first = "reward" if log.training == "rewards" else "teacher_kl"
        return first, "grad_norm", "entropy", "kl", "length", "truncated", "dead_groups"
    return "loss", "grad_norm", *_ALSO_HEALTHY[log.training]

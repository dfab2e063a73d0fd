"""The table of rules: what each symptom is, how it shows in a log, what it usually means and what to change.

A rule compares a run with its own early steps where an absolute threshold would misfire: entropy is 0.03 to 0.2 nats in
healthy runs on mathematics, and 7.5 % of the ratios of a healthy bfloat16 run lie outside [0.9, 1.1].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import pandas as pd

from sharpscope.diagnose.changes import Change
from sharpscope.diagnose.logs import Log
from sharpscope.diagnose.quantities import BY_NAME
from sharpscope.traces.rules import robust_z

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")


@dataclass(frozen=True)
class Evidence:
    """What a rule saw.

    Attributes:
        severity: how bad it is.
        step: the step at which it began.
        text: the numbers, in a sentence.
        certainty: how sure the rule is and why, in a few words.
        quantity: the quantity that shows it best.
    """

    severity: Severity
    step: int
    text: str
    certainty: str
    quantity: str


@dataclass(frozen=True)
class Rule:
    """A symptom.

    Attributes:
        name: its name in JSON and in the documentation.
        title: the finding in a few words.
        needs: quantities without which it cannot be judged.
        detect: from a log and its changes to what was seen, or None.
        meaning: what it usually means.
        advice: what to change.
        source: where its numbers come from.
    """

    name: str
    title: str
    needs: tuple[str, ...]
    detect: Callable[[Log, Sequence[Change]], Evidence | None]
    meaning: str
    advice: str
    source: str


@dataclass(frozen=True)
class Finding:
    """A rule that fired, and what it saw."""

    rule: Rule
    evidence: Evidence


def find(log: Log, changes: Sequence[Change]) -> list[Finding]:
    """The rules that fire on a log, most severe first, then by the step at which they began."""
    found = []
    for rule in RULES:
        if log.has(*rule.needs) and (evidence := rule.detect(log, changes)) is not None:
            found.append(Finding(rule, evidence))
    order = {severity: rank for rank, severity in enumerate(SEVERITIES)}
    return sorted(found, key=lambda finding: (order[finding.evidence.severity], finding.evidence.step))


def early_and_late(series: pd.Series) -> tuple[pd.Series, pd.Series]:
    """The first and the last tenth of a series, at least five values and at most half of it."""
    n = max(1, min(len(series) // 2, max(5, round(len(series) / 10))))
    return series.iloc[:n], series.iloc[-n:]


def noise(series: pd.Series) -> float:
    """Standard deviation of one step's value around its trend, from the differences of adjacent steps."""
    differences = np.diff(series.to_numpy(float))
    if len(differences) < 2:
        return 0.0
    return float(1.4826 * np.median(np.abs(differences - np.median(differences))) / np.sqrt(2))


def begins(series: pd.Series, past: pd.Series, fallback: int) -> int:
    """First step at which `past` holds, of the last stretch in which it holds for at least half of every five steps."""
    steps, holds = series.index.to_numpy(), past.to_numpy(bool)
    if not holds.any():
        return fallback
    mostly = past.rolling(5, min_periods=1, center=True).mean().to_numpy() >= 0.5
    broken = np.flatnonzero(~mostly)
    start = 0 if not mostly[-1] or not len(broken) else int(broken[-1]) + 1
    return int(steps[start + int(np.argmax(holds[start:]))])


def changed(changes: Sequence[Change], quantity: str, direction: str, until: int | None = None) -> Change | None:
    """The last change of a quantity in a direction, at or before a step."""
    found = [
        change
        for change in changes
        if change.quantity == quantity and change.direction == direction and (until is None or change.step <= until)
    ]
    return found[-1] if found else None


def _number(value: float) -> str:
    return f"{value:.3g}"


def _percent(value: float) -> str:
    return f"{value:.0%}" if value >= 0.01 or value == 0 else f"{value:.1%}"


def _smoothed(series: pd.Series) -> pd.Series:
    window = max(3, min(25, len(series) // 10))
    return series.rolling(window, min_periods=max(1, window // 2), center=True).mean()


def _falls(log: Log, name: str = "reward") -> tuple[float, float, int, float] | None:
    """(best, late value, step of the fall, its size in standard errors) if a series ends well below its best part."""
    series = log.finite(name)
    if len(series) < 10:
        return None
    smooth, (_, late) = _smoothed(series), early_and_late(series)
    peak = int(np.argmax(smooth.to_numpy()))
    best, now = float(smooth.iloc[peak]), float(late.mean())
    span = best - float(smooth.min())
    spread = noise(series)
    error = spread * np.sqrt(1 / len(late) + 1 / max(3, min(25, len(series) // 10)))
    drop = best - now
    if drop <= 0 or span <= 0 or drop < 0.3 * max(span, 0.3 * abs(best)) or drop < 0.15 * abs(best):
        return None
    z = drop / error if error > 0 else np.inf
    if z < 6:
        return None
    below = series.iloc[peak:] < best - drop / 2
    return best, now, begins(series.iloc[peak:], below, int(series.index[peak])), float(z)


def _not_finite(log: Log, changes: Sequence[Change]) -> Evidence | None:
    for name in ("grad_norm", "loss", "reward", "kl", "entropy"):
        series = log.series(name)
        bad = series.index[~np.isfinite(series)]
        if len(bad):
            text = f"{BY_NAME[name].title} is not a finite number at step {bad[0]} ({len(bad)} of {len(series)} steps)"
            return Evidence("critical", int(bad[0]), text, "certain: it stands in the log", name)
    return None


def _destroyed(log: Log, changes: Sequence[Change]) -> Evidence | None:
    kl, reward = log.finite("kl_step"), log.finite("reward")
    large = kl[kl > 1.0]
    if len(large):
        step = int(large.index[0])
        text = f"the updates of step {step} moved the policy by {_number(large.iloc[0])} nats per token (a healthy step: below 0.1)"
        return Evidence("critical", step, text, "measured on the step's own completions", "kl_step")
    entropy = log.finite("entropy")
    both = reward.index.intersection(entropy.index)
    for before, at in pairwise(both):
        if before >= both[0] + 10:
            break
        was, now = float(reward[:before].mean()), float(reward[at:].mean())
        moved = abs(float(entropy[at]) - float(entropy[before])) > 0.5 * abs(float(entropy[before]))
        if was > 0 and now <= 0.05 * was and moved:
            text = (
                f"reward went from {_number(was)} to {_number(now)} at step {at} and stays there; entropy went from "
                f"{_number(entropy[before])} to {_number(entropy[at])} nats in one step"
            )
            return Evidence("critical", int(before), text, "sure: reward and entropy break at the same step", "reward")
    return None


def _reward_falls(log: Log, changes: Sequence[Change]) -> Evidence | None:
    fall = _falls(log)
    if fall is None:
        return None
    best, now, step, z = fall
    text = f"reward fell from {_number(best)} at its best to {_number(now)} over the last steps"
    lost = best - now >= 0.5 * max(best - float(log.finite("reward").min()), abs(best) * 0.3)
    return Evidence(
        "critical" if lost else "warning", step, text, f"the fall is {min(z, 99):.0f} standard errors", "reward"
    )


def _no_reward(log: Log, changes: Sequence[Change]) -> Evidence | None:
    series = log.finite("reward")
    late = series.iloc[-max(5, len(series) // 5) :]
    if len(series) < 5 or float(late.max()) != float(late.min()):
        return None
    same = series == float(late.iloc[-1])
    step = begins(series, same, int(series.index[0]))
    text = f"reward is exactly {_number(late.iloc[-1])} at every step from {step} to {series.index[-1]}"
    severity: Severity = "critical" if float(late.iloc[-1]) <= float(series.min()) else "info"
    return Evidence(severity, step, text, "certain: the values are equal", "reward")


def _plateau(log: Log, changes: Sequence[Change]) -> Evidence | None:
    from scipy.stats import kendalltau

    series = log.finite("reward")
    if len(series) < 30 or series.nunique() == 1:
        return None
    early, late = early_and_late(series)
    spread = noise(series) / np.sqrt(len(late))
    tau = kendalltau(np.arange(len(series)), series.to_numpy())
    if tau.pvalue < 0.05 or abs(float(late.mean() - early.mean())) > 3 * spread:
        return None
    text = (
        f"reward is {_number(early.mean())} over the first {len(early)} steps and {_number(late.mean())} over the last"
    )
    return Evidence(
        "info", int(series.index[0]), text, f"no trend in {len(series)} steps (Kendall p {tau.pvalue:.2f})", "reward"
    )


def _spikes(log: Log, changes: Sequence[Change], name: str) -> Evidence | None:
    series = log.finite(name)
    series = series[series > 0]
    logs = np.log(series.to_numpy(float))
    found = []
    for at in range(len(logs)):
        before = logs[:at]
        z = robust_z(before.tolist(), float(logs[at]))
        ratio = float(np.exp(logs[at] - np.median(before[-50:]))) if at >= 10 else 0.0
        if np.isfinite(z) and z > 4 and ratio > 3:
            found.append((int(series.index[at]), z, ratio))
    if not found:
        return None
    step, z, ratio = found[0]
    largest = max(found, key=lambda spike: spike[2])
    others = (
        f"; {len(found)} such steps, the largest {largest[2]:.1f} times at step {largest[0]}" if len(found) > 1 else ""
    )
    text = f"{BY_NAME[name].title} {_number(series[step])} at step {step} is {ratio:.1f} times the typical one{others}"
    fall = _falls(log) if log.has("reward") else None
    critical = fall is not None and step <= fall[2] <= step + max(20, len(series) // 5)
    return Evidence(
        "critical" if critical else "warning",
        step,
        text + ("; reward falls after it" if critical else ""),
        f"{min(z, 99):.1f} robust standard deviations above the steps before",
        name,
    )


def _level_of_gradient(log: Log, changes: Sequence[Change]) -> Evidence | None:
    """A gradient norm that stays high, which no rule for single spikes sees."""
    series = log.finite("grad_norm")
    if len(series) < 12:
        return None
    early, late = early_and_late(series)
    ratio = float(late.median() / early.median()) if float(early.median()) > 0 else np.nan
    change = changed(changes, "grad_norm", "up")
    if not ratio > 4 or change is None:
        return None
    text = f"gradient norm rose from {_number(early.median())} to {_number(late.median())}, {ratio:.1f} times"
    fall = _falls(log) if log.has("reward") else None
    severity: Severity = "critical" if fall is not None and fall[2] >= change.low else "warning"
    return Evidence(severity, change.step, text, f"begins between steps {change.low} and {change.high}", "grad_norm")


def _zero_gradient(log: Log, changes: Sequence[Change]) -> Evidence | None:
    series = log.finite("grad_norm")
    zero = series == 0
    if len(series) < 5 or float(zero.iloc[-max(5, len(series) // 5) :].mean()) < 0.5:
        return None
    step = begins(series, zero, int(series.index[0]))
    moving = ""
    entropy = log.finite("entropy")[step:]
    if len(entropy) > 2 and float(np.ptp(entropy)) > 0.1 * max(abs(float(entropy.iloc[0])), 0.01):
        moving = f"; entropy still goes from {_number(entropy.iloc[0])} to {_number(entropy.iloc[-1])} nats, by the momentum of AdamW"
    text = f"gradient norm is exactly 0 in {_percent(float(zero[step:].mean()))} of the steps from {step} on{moving}"
    return Evidence("critical", step, text, "certain: the values are 0", "grad_norm")


def _entropy_falls(log: Log, changes: Sequence[Change]) -> Evidence | None:
    series = log.finite("entropy")
    if len(series) < 12:
        return None
    early, late = early_and_late(series)
    level = float(early.median())
    if level <= 0 or float(late.median()) > 0.1 * level:
        return None
    step = begins(series, series < 0.1 * level, int(series.index[-1]))
    text = f"entropy fell from {_number(level)} to {_number(late.median())} nats, {_percent(float(late.median()) / level)} of its early value"
    reward = log.finite("reward")
    dead = log.finite("dead_groups")
    stuck = len(dead) > 0 and float(early_and_late(dead)[1].median()) >= 0.75
    low = len(reward) > 0 and float(early_and_late(reward)[1].mean()) < 0.5 * float(reward.max())
    if stuck and low:
        return Evidence(
            "critical",
            step,
            text + "; most groups have equal rewards and reward is below half of its best",
            "sure",
            "entropy",
        )
    return Evidence("warning", step, text, "sure of the fall; whether it hurts shows in held-out accuracy", "entropy")


def _entropy_rises(log: Log, changes: Sequence[Change]) -> Evidence | None:
    series = log.finite("entropy")
    if len(series) < 12:
        return None
    early, late = early_and_late(series)
    change, end = changed(changes, "entropy", "up"), float(late.median())
    before = float(early.median()) if change is None else change.before
    if end < max(1.5 * before, before + 0.3):
        return None
    if change is None:  # it rises from the start
        step, sure = begins(series, series > (before + end) / 2, int(series.index[0])), "half of the rise by then"
    else:
        step, sure = change.step, f"begins between steps {change.low} and {change.high}"
    text = f"entropy rises from {_number(before)} to {_number(end)} nats"
    fall = _falls(log) if log.has("reward") else None
    if fall is not None and fall[2] >= (step if change is None else change.low):
        return Evidence("critical", step, f"{text}; reward falls at step {fall[2]}", sure, "entropy")
    return Evidence("warning", step, text, sure, "entropy")


def _kl_drifts(log: Log, changes: Sequence[Change]) -> Evidence | None:
    series = log.finite("kl")
    if len(series) < 12:
        return None
    late = float(early_and_late(series)[1].median())
    half = series.iloc[len(series) // 2 :]
    middle = float(early_and_late(half)[0].median())
    accelerates = late > max(2 * middle, 0.5)
    if late < 2.0 and not accelerates:
        return None
    change = changed(changes, "kl", "up")
    step = change.step if change else begins(series, series > 0.5 * late, int(series.index[0]))
    text = f"KL to the reference is {_number(late)} nats per token at the end" + (
        f", {_number(middle)} half-way" if accelerates else ""
    )
    fall = _falls(log) if log.has("reward") else None
    severity: Severity = "critical" if fall is not None and fall[2] >= step else "warning"
    return Evidence(
        severity, step, text + ("; reward falls" if severity == "critical" else ""), "the level is measured", "kl"
    )


def _kl_sign(log: Log, changes: Sequence[Change]) -> Evidence | None:
    series = log.finite("kl")
    negative = float((series < 0).mean())
    if len(series) < 12 or negative < 0.2 or float(series.abs().median()) < 1e-4:
        return None
    text = f"the estimate of KL is negative in {_percent(negative)} of the steps, which a KL cannot be"
    first = int(series.index[(series < 0).to_numpy()][0])
    return Evidence("warning", first, text, "certain: the values are negative", "kl")


def _dead_groups(log: Log, changes: Sequence[Change]) -> Evidence | None:
    series = log.finite("dead_groups")
    late = series.iloc[-max(5, len(series) // 4) :]
    if len(series) < 5 or float(late.median()) < 0.5:
        return None
    step = begins(series, series >= 0.5, int(series.index[0]))
    estimated = " (estimated)" if "estimated" in log.sources.get("dead_groups", ("",))[0] else ""
    text = f"{_percent(float(late.median()))} of the groups have equal rewards{estimated} and give no gradient"
    reward, accuracy = log.finite("reward"), log.finite("accuracy")
    level = float(reward[late.index[0] :].mean()) if len(reward) else np.nan
    best = max(float(reward.max()) if len(reward) else np.nan, float(accuracy.max()) if len(accuracy) else -np.inf)
    solved = len(reward) > 0 and level >= 0.8 * best and level > float(early_and_late(reward)[0].mean())
    if solved:
        return Evidence(
            "info",
            step,
            text + f"; reward is {_number(level)}, near its best: most prompts are solved",
            "counted",
            "dead_groups",
        )
    return Evidence("warning", step, text, "counted" if not estimated else "a rough estimate", "dead_groups")


def _truncation(log: Log, changes: Sequence[Change]) -> Evidence | None:
    series = log.finite("truncated")
    if len(series) < 5:
        return None
    early, late = early_and_late(series)
    share = float(late.mean())
    if share < 0.15 and not (share >= 0.05 and share > 2 * float(early.mean()) + 0.02):
        return None
    step = begins(series, series >= 0.5 * share, int(series.index[0]))
    text = f"{_percent(share)} of the completions are cut at the length limit ({_percent(float(early.mean()))} at the start)"
    fall = _falls(log) if log.has("reward") else None
    rises = share > 2 * float(early.mean()) + 0.02
    if fall is not None and rises:
        return Evidence("critical", step, text + "; reward falls", "counted", "truncated")
    return Evidence("warning", step, text, "counted", "truncated")


def _length(log: Log, changes: Sequence[Change]) -> Evidence | None:
    from scipy.stats import spearmanr

    series = log.finite("length")
    if len(series) < 20:
        return None
    early, late = early_and_late(series)
    ratio = float(late.median() / early.median()) if float(early.median()) > 0 else 1.0
    rank = float(spearmanr(np.arange(len(series)), series.to_numpy()).statistic)
    if ratio < 1.5 or rank < 0.6:
        return None
    change = changed(changes, "length", "up")
    step = change.step if change else int(series.index[len(early)])
    text = f"completions grew from {_number(early.median())} to {_number(late.median())} tokens"
    reward = log.finite("reward")
    if len(reward) >= 20:
        first, last = early_and_late(reward)
        if float(last.mean() - first.mean()) > 3 * noise(reward) / np.sqrt(len(last)):
            return Evidence(
                "info", step, text + "; reward rose, too", f"rank correlation with the step {rank:.2f}", "length"
            )
    return Evidence(
        "warning", step, text + "; reward did not rise", f"rank correlation with the step {rank:.2f}", "length"
    )


def _mismatch(log: Log, changes: Sequence[Change]) -> Evidence | None:
    # mean |ln ratio| of a healthy bfloat16 trainer: 0.04 (standard deviation 0.05 nats); float32: 0.03
    for name, limit, severe in (("mismatch", 0.1, 0.5), ("mismatch_kl", 0.02, 0.2)):
        series = log.finite(name)
        if len(series) < 5:
            continue
        early, late = early_and_late(series)
        level = float(late.median())
        grows = level > 3 * float(early.median()) and level > limit / 4
        if level < limit and not grows:
            continue
        step = begins(series, series >= min(limit, 0.5 * level), int(series.index[0]))
        text = f"{BY_NAME[name].title}: {_number(level)} nats ({_number(early.median())} at the start)"
        return Evidence(
            "critical" if level > severe else "warning", step, text, "healthy bfloat16: 0.04 nats, KL 0.001", name
        )
    return None


def _clipping(log: Log, changes: Sequence[Change]) -> Evidence | None:
    series = log.finite("clipped")
    if len(series) < 5:
        return None
    late = series.iloc[-max(5, len(series) // 4) :]
    share = float(late.median())
    if share < 0.2:
        return None
    step = begins(series, series >= 0.2, int(series.index[0]))
    text = f"{_percent(share)} of the tokens are at the ratio's bounds"
    return Evidence("warning", step, text, "counted by the trainer", "clipped")


def _gradient_clipping(log: Log, changes: Sequence[Change]) -> Evidence | None:
    series = log.finite("grad_clipped")
    if len(series) < 5 or float(series.mean()) < 0.5:
        return None
    text = f"clipping of the gradient norm binds in {_percent(float(series.mean()))} of the updates"
    return Evidence("info", int(series.index[(series > 0).to_numpy()][0]), text, "counted", "grad_clipped")


def _no_motion(log: Log, changes: Sequence[Change]) -> Evidence | None:
    reward, entropy = log.finite("reward"), log.finite("entropy")
    if min(len(reward), len(entropy)) < 30:
        return None
    kl = log.finite("kl")
    flat_kl = len(kl) == 0 or float(kl.abs().max()) < 1e-3
    still = all(
        abs(float(late.mean() - early.mean())) < 2 * noise(series) / np.sqrt(len(early))
        for series in (reward, entropy)
        for early, late in [early_and_late(series)]
    )
    moved = any(change.quantity in ("reward", "entropy", "length") for change in changes)
    if not (flat_kl and still) or moved or reward.nunique() == 1:
        return None
    rate = log.finite("lr")
    text = f"reward and entropy are where they began after {len(reward)} steps" + (
        f"; KL to the reference is at most {_number(kl.abs().max())} nats" if len(kl) else ""
    )
    text += f"; learning rate {_number(rate.max())}" if len(rate) else ""
    return Evidence("warning", int(reward.index[0]), text, "neither differs from its start beyond its noise", "entropy")


RULES: tuple[Rule, ...] = (
    Rule(
        "not_finite",
        "A number stopped being finite",
        (),
        _not_finite,
        "An overflow in a low-precision format, a ratio of probabilities that exploded, or a loss over no token.",
        "Go back to the last checkpoint; lower the learning rate, clip the gradient norm, compute log-probabilities in float32, and check "
        "for groups without tokens in the loss.",
        "a definition",
    ),
    Rule(
        "policy_destroyed",
        "An update destroyed the policy",
        ("reward",),
        _destroyed,
        "The step was far too long for this model: the learning rate suits smaller models or adapters (AdamW's first steps have "
        "the length of the learning rate in every parameter, whatever the gradient is).",
        "Restart from the checkpoint before it with a learning rate ten times lower (1e-6 is usual for full fine-tuning, 1e-5 to "
        "1e-4 for LoRA) and a warm-up.",
        "SmolLM2-135M at 1e-4: reward 0 from step 2 on, entropy 1.7 to 3.7 nats",
    ),
    Rule(
        "reward_collapse",
        "Reward collapsed",
        ("reward",),
        _reward_falls,
        "The policy left the region where it was good: usually after a few very large updates, a drift of entropy, or a reward that pays for "
        "something else. The order of events says which came first.",
        "Look at the tokens of the steps just before the fall; go back to a checkpoint before it, and lower the learning rate or "
        "repair what came first.",
        "a fall of six standard errors and 30 % of the run's range",
    ),
    Rule(
        "reward_constant",
        "Reward does not vary",
        ("reward",),
        _no_reward,
        "Nothing can be learned: every completion gets the same reward. The reward function fails, no answer is parsed, the task is "
        "far too hard, or the policy is dead.",
        "Score a few completions by hand; check the answer's format and the length limit.",
        "a definition",
    ),
    Rule(
        "zero_gradient",
        "The gradient is zero",
        ("grad_norm",),
        _zero_gradient,
        "All groups have equal rewards, or the loss has no token. AdamW goes on moving the weights by its momentum.",
        "Stop: nothing is learned. See the rewards of single completions; go back to the checkpoint before.",
        "a definition",
    ),
    Rule(
        "gradient_spike",
        "The gradient spiked",
        ("grad_norm",),
        lambda log, changes: _spikes(log, changes, "grad_norm"),
        "A few tokens, often unlikely ones in wrong completions, carry most of an update.",
        "Name the tokens of that step; lower the learning rate, clip the gradient norm, or give such tokens less weight.",
        "4 robust standard deviations of the logarithm over the 50 steps before, and 3 times their median",
    ),
    Rule(
        "update_spike",
        "The update spiked",
        ("update_norm",),
        lambda log, changes: _spikes(log, changes, "update_norm"),
        "The optimizer's step itself was long: its second moments were too small for this gradient.",
        "Raise AdamW's epsilon or lower beta2, warm up longer, lower the learning rate.",
        "as for gradient_spike",
    ),
    Rule(
        "gradient_growth",
        "The gradient norm keeps growing",
        ("grad_norm",),
        _level_of_gradient,
        "The loss gets sharper where the policy goes, or the ratios' tails grow: updates act on a policy that is no longer the sampler's.",
        "Lower the learning rate, do fewer updates per batch, check the sampler's log-probabilities.",
        "4 times its early median, with a change point",
    ),
    Rule(
        "entropy_collapse",
        "Entropy collapsed",
        ("entropy",),
        _entropy_falls,
        "The policy became nearly deterministic: completions of a group no longer differ, so that groups give no gradient.",
        "Raise the upper clip bound, add an entropy bonus or KL, lower the learning rate, or use harder prompts.",
        "a tenth of the run's own early entropy (rldoctor uses the same floor); absolute floors misfire",
    ),
    Rule(
        "entropy_rise",
        "Entropy rises",
        ("entropy",),
        _entropy_rises,
        "Unlikely tokens are pushed up or likely ones down: too large a learning rate, negative advantages on likely tokens, a k1 KL term as "
        "a loss with top-p sampling, or an entropy bonus that is too large.",
        "Look at the tokens with the highest entropy (`sharpscope tokens --by entropy`); lower the learning rate; use the k3 estimator for KL.",
        "1.5 times and 0.3 nats above its level before the change",
    ),
    Rule(
        "kl_drift",
        "The policy drifts away from the reference",
        ("kl",),
        _kl_drifts,
        "Each step goes further than the KL term pulls back.",
        "Raise the KL coefficient or lower the learning rate; if accuracy still rises, it need not be a problem.",
        "2 nats per token (rldoctor), or doubled over the second half to above 0.5",
    ),
    Rule(
        "kl_sign",
        "The KL estimate changes sign",
        ("kl",),
        _kl_sign,
        "The k1 estimate (the mean log ratio) is logged or used as a loss. As a loss its gradient does not pull to the reference.",
        "Use the k3 estimator in the loss.",
        "a fifth of the steps negative",
    ),
    Rule(
        "dead_groups",
        "Most groups give no gradient",
        ("dead_groups",),
        _dead_groups,
        "All completions of a prompt get the same reward: the prompts are too easy or too hard for this policy.",
        "Filter prompts by pass rate, draw again (dynamic sampling), raise the group size or the temperature.",
        "half of the groups in the last quarter",
    ),
    Rule(
        "truncation",
        "Completions are cut",
        ("truncated",),
        _truncation,
        "Cut completions are scored as wrong whatever they were about to say, and can push the policy to be short or to give up.",
        "Raise the length limit, or leave cut completions out of the loss.",
        "15 % at the end, or 5 % and twice the start",
    ),
    Rule(
        "length_growth",
        "Completions grow",
        ("length",),
        _length,
        "The loss or the reward pays for length (a mean over each completion's tokens punishes long wrong answers less).",
        "Average the loss over all tokens, or penalize overlong completions.",
        "1.5 times with a rank correlation of 0.6 (rldoctor)",
    ),
    Rule(
        "mismatch",
        "Sampler and trainer disagree",
        (),
        _mismatch,
        "The sampler's log-probabilities are not those of the policy that is trained: other weights, precision, temperature or kernels.",
        "Check that weights are synchronized and the temperature is applied on both sides; correct with truncated importance sampling.",
        "trl 6789: mean 0.04 nats in healthy bfloat16 (7.5 % of the ratios outside [0.9, 1.1]); the rule asks for 0.1",
    ),
    Rule(
        "clipping",
        "Many tokens are at the ratio's bounds",
        ("clipped",),
        _clipping,
        "Updates of a batch go so far that the clip stops a large part of its tokens.",
        "Fewer updates per batch, a lower learning rate, or wider bounds.",
        "20 % (rldoctor)",
    ),
    Rule(
        "gradient_clipping",
        "Gradient clipping sets the step size",
        ("grad_clipped",),
        _gradient_clipping,
        "Two runs whose gradients are clipped in different shares of the updates do not take steps of the same size.",
        "Compare methods with clipping off, or compare their update norms.",
        "half of the updates",
    ),
    Rule(
        "no_motion",
        "The learning rate moves nothing",
        ("reward", "entropy"),
        _no_motion,
        "The updates are too small to see, or the optimizer does not train the weights that are sampled.",
        "Raise the learning rate by 3 to 10 times; check that the sampler gets the new weights.",
        "no change beyond noise in 30 steps and KL below 0.001",
    ),
    Rule(
        "reward_plateau",
        "Reward did not move",
        ("reward",),
        _plateau,
        "Nothing was learned yet: too few steps, too small a learning rate, or groups without advantage.",
        "Look at dead groups and at the update's size first.",
        "no trend by Kendall's test in 30 steps",
    ),
)
"""All rules, in the order of the documentation."""

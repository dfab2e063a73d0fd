"""The table of rules: what each symptom is, from which value on it is reported, what it means and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from sharpscope.packaged import package_yaml

if TYPE_CHECKING:
    from sharpscope.rules.measures import Measure

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")
Severities = tuple[Severity, Severity, Severity]
"""When the reward falls afterwards, when it does neither, and when it has risen."""

_SEVERITIES: Mapping[str, Severities] = {
    "fatal": ("critical", "critical", "critical"),
    "harmful": ("critical", "warning", "warning"),
    "mixed": ("critical", "warning", "info"),
    "notice": ("warning", "warning", "warning"),
    "slight": ("warning", "info", "info"),
    "remark": ("info", "info", "info"),
}
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "<policy>": ("reward_collapse", "reward_constant", "zero_gradient", "drift", "dead_groups"),
    "<outcomes>": (
        *("entropy_rise", "near_uniform", "entropy_collapse", "kl_drift"),
        *("length_growth", "length_shrink"),
    ),
}
_TRAININGS: Mapping[str, tuple[str, ...]] = {
    "policies": ("rewards", "distillation"),
    "preference": ("preference", "reward model"),
    "supervised": ("supervised", "preference", "reward model"),
    "generating": ("rewards", "distillation", "supervised"),
    "all": ("rewards", "distillation", "supervised", "preference", "reward model"),
}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A row of the table."""

    name: str  # its setting is `health.<name>`, its section in the documentation has it as anchor
    title: str  # the finding in a few words
    quantities: tuple[str, ...]  # canonical ones that it judges; the first one shows it best
    # name of a function of `rules.measures`, then its arguments
    measured_by: tuple[str | int, ...]
    threshold: float  # it applies at or above this (`below`: at or below)
    statistic: str  # what the measure is, in words and units
    meaning: str  # what it usually means
    advice: str  # what to change; names in braces are settings as the trainer calls them (FIELDS), or `restart`
    source: str  # where the threshold comes from
    severity: Severities
    # a value from which on the symptom is at least so bad
    worse: tuple[float, Severity] | None = None
    below: bool = False  # whether small values are the problem
    window: int = 1  # steps that the measure averages; 0: it is of the whole run
    # When it can be judged: before a step's updates, after them, at an evaluation, or from a log only.
    known: Literal["before", "after", "evaluation", "log"] = "before"
    command: str = "show {run}"  # shows more in a recorded run
    explains: tuple[str, ...] = ()  # rules whose findings may follow from it
    # Where it begins: at a change, where a quantity becomes exactly constant, after the best evaluation, or at the first step.
    begins: Literal["change", "exact", "best", "first"] = "change"
    trainings: tuple[str, ...] = ("rewards",)  # whose logs it judges

    @cached_property
    def measure(self) -> Measure:
        """Number that is compared with the threshold, of each step from the values up to it."""
        from sharpscope.rules import measures  # imports NumPy, which the table does not need

        name, *arguments = self.measured_by
        found = getattr(measures, str(name))
        measure: Measure = found(*arguments) if name in measures.PARAMETRIC else found
        return measure

    def level(self, value: float, outcome: int = 1) -> Severity:
        """How bad a value beyond the threshold is; `outcome`: position in `severity`."""
        level = self.severity[outcome]
        if self.worse is not None and value >= self.worse[0]:
            level = min(level, self.worse[1], key=SEVERITIES.index)
        return level


FIELDS: Mapping[str, Mapping[str, str]] = package_yaml("sharpscope.rules", "settings.yaml")
"""What trainers call the settings that advice names; "": in words."""


def _rule(name: str, row: dict[str, Any]) -> Rule:
    """A rule from its row of rules.yaml, whose lists and names of sets become tuples."""
    if isinstance(row["severity"], str):
        row["severity"] = _SEVERITIES[row["severity"]]
    if "trainings" in row:
        row["trainings"] = _TRAININGS[row["trainings"]]
    if "explains" in row:
        row["explains"] = [each for one in row["explains"] for each in _GROUPS.get(one, (one,))]
    for key, value in row.items():
        if isinstance(value, list):
            row[key] = tuple(value)
    return Rule(name=name, **row)


RULES: Mapping[str, Rule] = {
    name: _rule(name, row) for name, row in package_yaml("sharpscope.rules", "rules.yaml").items()
}
"""Rules by name."""

OF_ROLLOUTS = (
    *("reward_collapse", "reward_constant", "entropy_collapse", "entropy_rise", "near_uniform"),
    *("drift", "dead_groups", "truncation", "length_growth"),
)
"""Rules that judge completions a policy drew and their rewards, which supervised training has not."""

"""The table of rules: what each symptom is, from which value on it is reported, what it means and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from sharpscope.packaged import package_yaml

if TYPE_CHECKING:
    from sharpscope.rules.judging import Measure

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")
Severities = tuple[Severity, Severity, Severity]

SEVERITY: Mapping[str, Severities] = {
    "fatal": ("critical", "critical", "critical"),
    "harmful": ("critical", "warning", "warning"),
    "mixed": ("critical", "warning", "info"),
    "notice": ("warning", "warning", "warning"),
    "remark": ("info", "info", "info"),
}


@dataclass(frozen=True)
class Rule:
    """A row of the table."""

    name: str  # its setting is `health.<name>`, its section in the documentation has it as anchor
    title: str  # the finding in a few words
    quantities: tuple[str, ...]  # canonical ones that it judges; the first one shows it best
    # function of `rules.judging` with its arguments: `drift`, `relative(entropy, 1)`
    measured_by: str
    threshold: float  # it applies at or above this (`below`: at or below)
    statistic: str  # what the measure is, in words and units
    meaning: str  # what it usually means
    advice: str  # what to change; names in braces are settings as the trainer calls them (FIELDS), or `restart`
    source: str  # where the threshold comes from
    # when the reward falls afterwards, when it does neither, and when it has risen
    severity: Severities
    # a value from which on the symptom is at least so bad
    worse: tuple[float, Severity] | None = None
    below: bool = False  # whether small values are the problem
    window: int = 1  # steps that the measure averages
    # When it can be judged: before a step's updates, after them, at an evaluation, or from a log only.
    known: Literal["before", "after", "evaluation", "log"] = "before"
    command: str = "show {run}"  # shows more in a recorded run

    @cached_property
    def measure(self) -> Measure:
        """Number that is compared with the threshold, of each step from the values up to it."""
        name, _, rest = self.measured_by.removesuffix(")").partition("(")
        function = getattr(import_module("sharpscope.rules.judging"), name)
        arguments = [int(part) if part.isdecimal() else part for part in rest.split(", ")]
        measure: Measure = function(*arguments) if rest else function
        return measure

    def level(self, value: float, outcome: int = 1) -> Severity:
        """How bad a value beyond the threshold is; `outcome`: position in `severity`."""
        level = self.severity[outcome]
        if self.worse is not None and value >= self.worse[0]:
            level = min(level, self.worse[1], key=SEVERITIES.index)
        return level


def _rule(name: str, entry: Mapping[str, Any]) -> Rule:
    """A rule from its entry in table.yaml."""
    severity = entry.get("severity", "harmful")
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()
    }
    values |= {"severity": SEVERITY[severity] if isinstance(severity, str) else tuple(severity)}
    return Rule(name, measured_by=values.pop("measure"), **values)


_ENTRIES = package_yaml("sharpscope.rules", "table.yaml")
FIELDS: Mapping[str, Mapping[str, str]] = _ENTRIES.pop("fields")
"""What trainers call the settings that advice names; "": in words."""
RULES: Mapping[str, Rule] = {name: _rule(name, entry) for name, entry in _ENTRIES.items()}

OF_ROLLOUTS = (
    *(
        "reward_collapse",
        "reward_constant",
        "entropy_collapse",
        "entropy_rise",
        "near_uniform",
        "drift",
    ),
    *("dead_groups", "truncation", "length_growth"),
)
"""Rules that judge completions a policy drew and their rewards, which supervised training has not."""

"""A verdict: the identities that were checked, and the causes that they show."""

from __future__ import annotations

from dataclasses import dataclass

from sharpscope.causes.identity import Result, check_recorded
from sharpscope.causes.named import Cause, name_causes
from sharpscope.causes.recorded import Recorded


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the identities of a training say."""

    results: list[Result]
    causes: list[Cause]  # the first to look at first
    note: str = ""  # what could not be checked

    @classmethod
    def of(cls, recorded: Recorded) -> Verdict:
        """Check the identities of a training and name the causes."""
        results = check_recorded(recorded)
        causes, unread = name_causes(results, recorded), recorded.words.unread
        note = f"Special tokens are not known and not checked: {unread}" if unread else ""
        return cls(results=list(results.values()), causes=causes, note=note)

    @property
    def violated(self) -> list[Result]:
        """The results that do not hold."""
        return [result for result in self.results if not result.holds]

    @property
    def count(self) -> str:
        """How many identities hold, such as "23 identities checked, 22 hold"."""
        checked = len(self.results)
        return f"{checked} identities checked, {checked - len(self.violated)} hold"

    def lines(self) -> list[str]:
        """The verdict as a page of text: causes first, then what is violated without a cause, then what holds."""
        lines = [self.count]
        for cause in self.causes:
            lines += ["", cause.sentence, *(f"  {line}" for line in cause.details)]
        shown = {cause.identity for cause in self.causes}
        for result in self.violated:
            if result.identity.name not in shown:
                lines += ["", open_text(result)]
        held = [result for result in self.results if result.holds]
        lines += ["", "Hold:" if held else "None holds."]
        lines += [f"  {r.identity.statement} ({r.value:.2g} {r.identity.unit})" for r in held]
        return lines


def open_text(result: Result) -> str:
    """A violated identity, in one line."""
    one = result.identity
    unit = "" if one.unit == "1" else f" {one.unit}"
    return f"This does not hold: {one.statement} (found {result.value:.3g}{unit}, limit {one.threshold:g})"

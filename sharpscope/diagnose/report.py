"""A diagnosis: the finding first, then findings by severity, the order of events, what was read, and the next command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sharpscope.diagnose.causes import checked_identities, recorded_verdict, shown_causes
from sharpscope.diagnose.changes import Change, changes
from sharpscope.diagnose.findings import Finding, find, judged, order_of
from sharpscope.diagnose.logs import Log, read_log, read_logs
from sharpscope.diagnose.quantities import BY_NAME
from sharpscope.diagnose.reading import ending, learned, not_judged, too_little, what_was_read
from sharpscope.errors import UserError
from sharpscope.rules.judging import advise
from sharpscope.rules.measures import Values
from sharpscope.rules.table import RULES

MOST = 5
"""Findings that are shown."""
FEWEST = 5
"""Steps without a finding from which on a log is said to show none."""

WITHOUT_DATE = frozenset(
    {*(rule.name for rule in RULES.values() if rule.window == 0), "kl_start", "reference_start"}
)
"""Rules whose title says when."""

_BARS = "▁▂▃▄▅▆▇█"
_NAMES = {
    **dict.fromkeys(("TRL", "TRL reward", "HF Trainer", "LLaMA-Factory"), "trl"),
    "verl": "verl",
    "sharpscope": "sharpscope",
}
_WORDS = {"up": "rises", "down": "falls", "flat": "levels off"}


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause that a recorded run shows and a log cannot, such as the tokens behind a spike."""

    sentence: str  # what happened and when, as the first line of a report
    step: int | None = None  # the first step that shows it
    details: tuple[str, ...] = ()  # lines of evidence below the sentence


@dataclass(frozen=True)
class Diagnosis:
    """What a log shows."""

    log: Log
    findings: list[
        Finding
    ]  # rules that applied, the likeliest cause first; the text shows `MOST` of them
    order: list[Change]  # of the quantities, by step
    causes: tuple[Cause, ...] = ()  # come before the findings
    checked: str = ""  # what the identities of a recorded run say that is too short for its curves

    @property
    def finding(self) -> str:
        """The main finding in one sentence: the first cause, else the first finding."""
        if self.causes:
            return self.causes[0].sentence
        if not self.findings:
            return self._nothing()
        first = self.findings[0]
        since = "" if first.rule.name in WITHOUT_DATE else f" from step {first.step}"
        return f"{first.rule.title}{since}: {first.change}."

    def _nothing(self) -> str:
        """What is said of a log without findings."""
        if self.checked:
            count = _steps(self.log)
            return f"No cause is seen in {count}: {self.checked}. The curves need {FEWEST} steps or more."
        names = ", ".join(BY_NAME[name].title for name in list(self.log.frame.columns)[:6])
        missing = too_little(self.log)
        if missing:
            return (
                f"Nothing wrong was found, but too little was read to say that nothing is: {names}, "
                f"and no {missing}."
            )
        return f"No symptom in {len(self.log.frame):,} steps; looked at {names}."

    @property
    def ending(self) -> str:
        """How a log ends that ends early; empty of another one."""
        grave = any(f.severity == "critical" or f.rule.name == "memory" for f in self.findings)
        return ending(self.log, grave or bool(self.causes))

    def advice(self, finding: Finding) -> tuple[str, str]:
        """What a finding usually means and what to change, with the trainer's names of the settings."""
        log = self.log
        rates = log.finite("lr").loc[: finding.step]
        before = _checkpoint_before(log.path, finding.step)
        return advise(
            finding.rule,
            _NAMES.get(log.framework or "", ""),
            float(rates.iloc[-1]) if len(rates) else None,
            "a checkpoint before it" if before is None else before.name,
        )

    def next_command(self, finding: Finding) -> str:
        """The command or line of code that looks closer at a finding."""
        log, step = self.log, finding.step
        checkpoint = _checkpoint_before(log.path, step)
        if log.framework == "sharpscope":
            return "sharpscope " + finding.rule.command.format(
                run=shlex.quote(str(log.path)), step=step
            )
        none = "" if checkpoint else "  (no checkpoint before it was found: from the start)"
        if _NAMES.get(log.framework or "") == "trl":
            start = f"resume_from_checkpoint={str(checkpoint)!r}" if checkpoint else ""
            return f'sharpscope.record(trainer, out="runs/again"); trainer.train({start}){none}'
        if log.framework == "verl":
            path = shlex.quote(str(checkpoint))
            resume = (
                f"trainer.resume_mode=resume_path trainer.resume_from_path={path}"
                if checkpoint
                else ""
            )
            return (
                f"SHARPSCOPE_VERL=runs/again python -m verl.trainer.main_ppo ... {resume}".rstrip()
                + none
            )
        if log.framework in _DUMPS:
            return _DUMPS[log.framework].format(
                step=step, start=checkpoint or f"a checkpoint before step {step}"
            )
        record = 'rec = sharpscope.record(model, optimizer, tokenizer=tokenizer, out="runs/again")'
        return f"{record}  (from a checkpoint before step {step})"

    def as_dict(self) -> dict[str, Any]:
        """The content of the JSON output; see docs/diagnose.md."""
        log = self.log
        return {
            "finding": self.finding,
            "causes": [asdict(cause) for cause in self.causes],
            "path": str(log.path),
            "run": log.run,
            "framework": log.framework,
            "training": log.training,
            "steps": [int(log.frame.index[0]), int(log.frame.index[-1])],
            "rows": log.rows,
            "learned": learned(log),
            "ending": self.ending,
            "findings": [self._finding_dict(finding) for finding in self.findings],
            "order": [
                vars(change) | {"interval": [change.low, change.high]} for change in self.order
            ],
            "quantities": {name: list(keys) for name, keys in log.sources.items()},
            "guesses": log.guesses,
            "not_judged": not_judged(log),
            "notes": list(log.notes),
            "unmapped": list(log.unmapped[:1000]),
        }

    def _finding_dict(self, finding: Finding) -> dict[str, Any]:
        meaning, advice = self.advice(finding)
        return {
            "symptom": finding.rule.name,
            "severity": finding.severity,
            "first_step": finding.step,
            "evidence": finding.text,
            "certainty": finding.certainty,
            "explains": list(finding.explains),
            "meaning": meaning,
            "advice": advice,
            "next": self.next_command(finding),
        }

    def text(self) -> str:
        """The diagnosis for a terminal: the file and the main finding in the first line."""
        run = f" ({self.log.run})" if self.log.run else ""
        lines = [f"{self.log.path}{run}: {self.finding}"]
        for number, cause in enumerate(self.causes):
            if number:
                lines.append(cause.sentence)
            lines.extend(f"  {detail}" for detail in cause.details)
        lines.append(learned(self.log))
        if self.ending:
            lines.append(self.ending)
        lines.append("")
        said = ""
        for finding in self.findings[:MOST]:
            lines.extend(self._finding_lines(finding))
            command = self.next_command(finding)
            if command != said:  # the same stands once
                lines.append(f"  next   {command}")
            lines.append("")
            said = command
        more = len(self.findings) - MOST
        if more > 0:
            plural = "s" if more > 1 else ""
            lines.extend(
                [f"{more} further finding{plural} of lower severity: --json lists them", ""]
            )
        if self.order:
            lines.extend(["Order of events", *map(_order_line, self.order), ""])
        lines.extend(what_was_read(self.log))
        return "\n".join(lines)

    def _finding_lines(self, finding: Finding) -> list[str]:
        quantity, (meaning, advice) = BY_NAME[finding.began.quantity], self.advice(finding)
        values = self.log.finite(finding.began.quantity).to_numpy(float)
        since = "" if finding.rule.name in WITHOUT_DATE else f", from step {finding.step}"
        lines = [
            f"{finding.severity.upper():<8} {finding.rule.title}{since}",
            f"         {finding.text}",
            f"         {quantity.title} {sparkline(values, log=quantity.log)}   ({finding.certainty})",
        ]
        follow = [RULES[name].title.lower() for name in finding.explains]
        if follow:
            lines.append(f"         may explain what came later: {'; '.join(follow)}")
        lines.append(f"  means  {meaning}")
        lines.append(f"  change {advice}")
        return lines


def _order_line(change: Change) -> str:
    span = "" if change.low == change.high else f" ({change.low} to {change.high})"
    word = _WORDS[change.direction]
    if change.direction != "flat" and (change.after > change.before) != (change.direction == "up"):
        word = f"turns {change.direction}"
    return (
        f"  step {change.step}{span}: {BY_NAME[change.quantity].title} {word}, "
        f"{change.before:.3g} → {change.after:.3g}"
    )


def diagnose(
    path: str | Path,
    mapping: Mapping[str, str] | None = None,
    *,
    run: str | None = None,
    causes: bool = True,
) -> Diagnosis:
    """Find what went wrong in a run from its log.

    Args:
        path: a run of sharpscope, trainer_state.json, JSON lines, a table, printed text, a notebook, TensorBoard events, or a
            folder with one of them.
        mapping: canonical quantity -> key of the log, for keys that are not recognized; "none" leaves a quantity out.
        run: name of the run, where the path holds several.
        causes: whether to look for causes too, in the tokens of a recorded run.

    Raises:
        UserError: The log cannot be read, has no known quantity, holds several runs and none is named, or is too short to say that
            nothing is wrong.
    """
    return _judged(read_log(path, mapping, run), causes)


def diagnose_runs(
    path: str | Path,
    mapping: Mapping[str, str] | None = None,
    *,
    run: str | None = None,
) -> list[Diagnosis]:
    """The diagnoses of all runs of a path, or of one of them; as `diagnose`. Runs that are too short are left out beside others."""
    found: list[Diagnosis] = []
    problems: list[UserError] = []
    for log in read_logs(path, mapping, run):
        try:
            found.append(_judged(log))
        except UserError as error:
            problems.append(error)
    if not found:
        raise problems[0]
    return found


def _judged(log: Log, look: bool = True) -> Diagnosis:
    if not judged(log):
        raise UserError(
            f"{log.path}: nothing of it can be judged: {', '.join(map(str, log.frame))}; name a key, such as --map reward=KEY"
        )
    found = changes(log)
    findings = find(log, found)
    told = recorded_verdict(log) if look else None
    causes = shown_causes(log, findings, told) if look else []
    if told is not None and told.note:
        log = replace(log, notes=(*log.notes, told.note))
    checked = ""
    if not findings and not causes and len(log.frame) < FEWEST:
        checked = checked_identities(told)
        if not checked:
            known = " ".join((learned(log), *log.notes))
            raise UserError(
                f"{log.path}: {_steps(log)}; a judgement needs {FEWEST} or more. {known}"
            )
    shown = tuple(Cause(sentence=c.sentence, step=c.step, details=c.details) for c in causes)
    return Diagnosis(log, findings, order_of(findings, found), shown, checked)


def _steps(log: Log) -> str:
    count = len(log.frame)
    return "1 step" if count == 1 else f"{count:,} steps"


def sparkline(values: Values, width: int = 40, log: bool = False) -> str:
    """Values as at most `width` bars from the smallest to the largest, each a mean; a dot for what is not a number.

    Args:
        values: (n,); NaN and infinite ones are dots if a bar has no other.
        width: most bars.
        log: whether the heights are those of logarithms.
    """
    if log and (values > 0).any():
        values = np.log(np.maximum(values, values[values > 0].min()))
    parts = np.array_split(np.asarray(values, dtype=float), max(1, min(width, len(values))))
    means = np.array(
        [part[np.isfinite(part)].mean() if np.isfinite(part).any() else np.nan for part in parts]
    )
    if not np.isfinite(means).any():
        return "·" * len(values[:width])
    low, high = np.nanmin(means), np.nanmax(means)
    height = (len(_BARS) - 1) * ((means - low) / (high - low) if high > low else 0 * means + 3 / 7)
    return "".join("·" if np.isnan(h) else _BARS[round(h)] for h in height)


_DUMPS = {
    "NeMo-RL": "sharpscope probe CHECKPOINT --rollouts LOG_DIR/train_data_step{step}.jsonl --method grpo --out runs/again",
    "slime": "--save-debug-train-data FILE from {start}, then sharpscope probe CHECKPOINT --rollouts FILE --method grpo --out runs/again",
    "open-instruct": "--save_traces from {start}, then sharpscope probe CHECKPOINT --rollouts FILE --method grpo --out runs/again",
    "prime-rl": "enable_token_export = true from {start}, then sharpscope import prime-rl outputs --out runs/again",
}
"""Trainer -> what gives the tokens of a step, where they can be read from its files."""


def _checkpoint_before(path: Path, step: int) -> Path | None:
    """The newest checkpoint-N (transformers) or global_step_N (verl) with N < step near a log, or step-N of a run."""
    folder = path if path.is_dir() else path.parent
    places = [
        folder,
        folder / "checkpoints",
        *([folder.parent] if folder.name.startswith("checkpoint-") else []),
    ]
    found = {
        int(match[1]): child
        for place in places
        if place.is_dir()
        for child in place.iterdir()
        if (match := re.fullmatch(r"(?:checkpoint-|global_step_|step-)(\d+)", child.name))
        and int(match[1]) < step
    }
    return found[max(found)] if found else None

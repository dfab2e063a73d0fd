"""A diagnosis: the finding first, then findings by severity, the order of events and the next command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sharpscope.diagnose.causes import shown_causes
from sharpscope.diagnose.findings import Change, Finding, changes, find, order_of
from sharpscope.diagnose.logs import BY_NAME, Log, read_log
from sharpscope.errors import UserError
from sharpscope.rules.judging import advise

MOST = 5
"""Findings that are shown."""
FEWEST = 5
"""Steps without a finding from which on a log is said to show none."""

_BARS = "▁▂▃▄▅▆▇█"
_NAMES = {"TRL": "trl", "HF Trainer": "trl", "verl": "verl", "sharpscope": "sharpscope"}
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
    findings: list[Finding]  # rules that applied, most severe first; the text shows `MOST` of them
    order: list[Change]  # of the quantities, by step
    causes: tuple[Cause, ...] = ()  # come before the findings

    def with_causes(self, causes: Sequence[Cause]) -> Diagnosis:
        """The same diagnosis with causes in front of its findings, the likeliest cause first."""
        return replace(self, causes=tuple(causes))

    @property
    def finding(self) -> str:
        """The main finding in one sentence: the first cause, else the first finding."""
        if self.causes:
            return self.causes[0].sentence
        frame = self.log.frame
        if not self.findings:
            names = ", ".join(BY_NAME[name].title for name in frame.columns[:6])
            return f"No symptom in {len(frame)} steps; looked at {names}."
        first = self.findings[0]
        return f"{first.rule.title} from step {first.step}: {first.change}."

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
        if log.framework in ("TRL", "HF Trainer"):
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
        return {
            "finding": self.finding,
            "causes": [asdict(cause) for cause in self.causes],
            "framework": self.log.framework,
            "steps": [int(self.log.frame.index[0]), int(self.log.frame.index[-1])],
            "findings": [
                {
                    "symptom": finding.rule.name,
                    "severity": finding.severity,
                    "first_step": finding.step,
                    "evidence": finding.text,
                    "certainty": finding.certainty,
                    "meaning": self.advice(finding)[0],
                    "advice": self.advice(finding)[1],
                    "next": self.next_command(finding),
                }
                for finding in self.findings
            ],
            "order": [
                vars(change) | {"interval": [change.low, change.high]} for change in self.order
            ],
            "quantities": {name: list(keys) for name, keys in self.log.sources.items()},
            "unmapped": list(self.log.unmapped),
        }

    def text(self) -> str:
        """The diagnosis for a terminal."""
        log, more = self.log, len(self.findings) - MOST
        lines = [self.finding]
        for number, cause in enumerate(self.causes):
            if number:
                lines.append(cause.sentence)
            lines.extend(f"  {detail}" for detail in cause.details)
        lines.append("")
        for finding in self.findings[:MOST]:
            quantity, (meaning, advice) = BY_NAME[finding.began.quantity], self.advice(finding)
            line = sparkline(log.finite(finding.began.quantity).to_numpy(float), log=quantity.log)
            lines.append(
                f"{finding.severity.upper():<8} {finding.rule.title}, from step {finding.step}"
            )
            lines.append(f"         {finding.text}")
            lines.append(f"         {quantity.title} {line}   ({finding.certainty})")
            lines.append(f"  means  {meaning}")
            lines.append(f"  change {advice}")
            lines.append(f"  next   {self.next_command(finding)}")
            lines.append("")
        if more > 0:
            lines += [
                f"{more} further finding{'s' * (more > 1)} of lower severity: --json lists them",
                "",
            ]
        if self.order:
            lines.append("Order of events")
            for change in self.order:
                span = "" if change.low == change.high else f" ({change.low} to {change.high})"
                lines.append(
                    f"  step {change.step}{span}: {BY_NAME[change.quantity].title} {_WORDS[change.direction]}, "
                    f"{change.before:.3g} → {change.after:.3g}"
                )
            lines.append("")
        frame = log.frame
        lines.append(
            f"Read {len(frame)} steps ({frame.index[0]} to {frame.index[-1]}), "
            + (
                "keys of no known trainer"
                if log.framework is None
                else f"written by {log.framework}"
            )
            + f": {', '.join(log.sources)}"
        )
        missing = [
            name for name in ("reward", "grad_norm", "entropy", "length") if name not in log.sources
        ]
        if missing and log.unmapped:
            unused = ", ".join(log.unmapped[:12])
            lines.append(
                f"Not found: {', '.join(missing)}. Keys not used: {unused}; --map {missing[0]}=KEY"
            )
        return "\n".join(lines)


def diagnose(path: str | Path, mapping: Mapping[str, str] | None = None) -> Diagnosis:
    """Find what went wrong in a run from its log.

    Args:
        path: a run of sharpscope, trainer_state.json, JSON lines, CSV, TensorBoard events, or a folder with one of them.
        mapping: canonical quantity -> key of the log, for keys that are not recognized.

    Raises:
        UserError: The log cannot be read, has no known quantity, or is too short to say that nothing is wrong.
    """
    log = read_log(path, mapping)
    found = changes(log)
    findings = find(log, found)
    causes = shown_causes(log)
    if not findings and not causes and len(log.frame) < FEWEST:
        raise UserError(
            f"{path}: {len(log.frame)} step{'s'[: len(log.frame) > 1]}; a judgement needs {FEWEST} or more"
        )
    return Diagnosis(log, findings, order_of(findings, found)).with_causes(
        [Cause(sentence=c.sentence, step=c.step, details=c.details) for c in causes]
    )


def sparkline(values: np.ndarray, width: int = 40, log: bool = False) -> str:
    """Values as at most `width` bars from the smallest to the largest, each a mean; a dot for what is not a number."""
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

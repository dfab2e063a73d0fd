"""The documentation's page of symptoms, made from the table of rules: `python -m experiments.diagnosis.symptoms > docs/symptoms.md`."""

from __future__ import annotations

from sharpscope.diagnose.findings import FALSE_ALARMS
from sharpscope.diagnose.logs import BY_NAME
from sharpscope.rules.judging import advise
from sharpscope.rules.table import FIELDS, RULES, Rule

_KINDS = {
    "reference": "reference runs",
    "study": "runs of plain GRPO in the second study",
    "embedded": "short runs of the embedded policy",
    "smollm2": "runs of SmolLM2-135M",
    "simulated": "simulated logs",
}
_TITLES = {"trl": "TRL, unsloth", "verl": "verl", "sharpscope": "sharpscope", "": "here"}


def symptoms_markdown() -> str:
    """A section for each rule: what it looks like, what it means, the command, what to change, and how often it is wrong."""
    lines = [
        "# Symptoms",
        "",
        "What `sharpscope diagnose LOG` looks for, and what `sharpscope run` and the recorders check after each step: one table of "
        "rules, made into this page. Each rule compares one number with a threshold. The number of a step is made of the steps up to "
        "it, so that a log says afterwards what the run said at that step. How bad a symptom is depends on what the reward does after "
        "it; [My run failed](diagnose.md) says how to read a diagnosis.",
        "",
        "What trainers call the settings that the advice names:",
        "",
        "| " + " | ".join(_TITLES[name] for name in ("", "sharpscope", "trl", "verl")) + " |",
        "|---|---|---|---|",
    ]
    for word in FIELDS[""]:
        names = (f"`{FIELDS[trainer][word]}`" for trainer in ("sharpscope", "trl", "verl"))
        lines.append(f"| {FIELDS[''][word]} | " + " | ".join(names) + " |")
    for rule in RULES.values():
        lines += ["", *_section(rule)]
    return "\n".join(lines) + "\n"


def _section(rule: Rule) -> list[str]:
    meaning, advice = advise(rule, checkpoint="a checkpoint before it")
    side = "at most" if rule.below else "at least"
    lines = [f"## {rule.title} {{ #{rule.name} }}", ""]
    lines += [
        f"*What it looks like.* {_sentence(rule.statistic)} This is {side} {rule.threshold:g}.",
        "",
    ]
    rows = []
    for name in rule.quantities:
        keys = BY_NAME[name].keys
        cells = [
            ", ".join(f"`{_escaped(key)}`" for key in keys.get(trainer, ()))
            for trainer in ("TRL", "verl", "sharpscope")
        ]
        if any(cells):
            rows.append(
                f"| {BY_NAME[name].title} | "
                + " | ".join(cell or "not logged" for cell in cells)
                + " |"
            )
    lines += ["| | TRL | verl | sharpscope |", "|---|---|---|---|", *rows, ""]
    lines += [f"*What it means.* {_sentence(meaning)}", ""]
    lines += [
        f"*The command.* `sharpscope {rule.command.format(run='RUN', step='STEP')}` on a recorded run; see [record](trainers/index.md).",
        "",
    ]
    lines += [f"*What to change.* {_sentence(advice)}", ""]
    if rule.known != "log":
        lines += [
            f"*In a running training.* `health.{rule.name}.threshold` and `health.{rule.name}.action`.",
            "",
        ]
    counts = [
        f"{alarms} of {runs} {_KINDS[kind]}"
        for kind, (alarms, runs) in FALSE_ALARMS.get(rule.name, {}).items()
        if runs
    ]
    lines += [
        f"*False alarms.* It applies in {', '.join(counts) if counts else 'no healthy run that has the quantity'}.",
        "",
    ]
    lines += [f"*Where the number comes from.* {_sentence(rule.source)}"]
    return lines


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _escaped(key: str) -> str:
    """A regular expression of keys as a reader may know it, safe in a table."""
    return key.replace("(?:", "(").replace("[^/]+", "…").replace("|", ",")


if __name__ == "__main__":
    print(symptoms_markdown(), end="")

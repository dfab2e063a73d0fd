"""The documentation's page of symptoms, made from the table of rules: `python -m experiments.diagnosis.symptoms > docs/symptoms.md`."""

from __future__ import annotations

from experiments.diagnosis.simulated import GROUPS
from sharpscope.diagnose.findings import FALSE_ALARMS
from sharpscope.diagnose.quantities import BY_NAME
from sharpscope.diagnose.trainers import BY_TRAINER
from sharpscope.rules.judging import advise
from sharpscope.rules.table import FIELDS, RULES, Rule

_KINDS = {
    "reference": "reference runs",
    "study": "runs of plain GRPO in the second study",
    "embedded": "short runs of the embedded policy",
    "smollm2": "runs of SmolLM2-135M",
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
    lines += ["", *_rates()]
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
        cells = [_keys(trainer, name) for trainer in ("TRL", "verl", "sharpscope")]
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
        if runs and kind in _KINDS
    ]
    counts += _of_simulated(rule.name)
    lines += [
        f"*False alarms.* It applies in {', '.join(counts) if counts else 'no healthy run that has the quantity'}.",
        "",
    ]
    lines += [f"*Where the number comes from.* {_sentence(rule.source)}"]
    return lines


def _of_simulated(rule: str) -> list[str]:
    """How often a rule applies in simulated runs, all numbers of groups together."""
    counts = [FALSE_ALARMS.get(rule, {}).get(_simulated(groups), [0, 0]) for groups in GROUPS]
    alarms, runs = (sum(column) for column in zip(*counts, strict=True))
    return [f"{alarms} of {runs} simulated ones ([by groups in a step](#rates))"] if runs else []


def _simulated(groups: int) -> str:
    return f"simulated, {groups} groups a step"


def _rates() -> list[str]:
    """The table of false alarms by rule and number of groups."""
    lines = [
        "## False alarms by the number of groups in a step { #rates }",
        "",
        "Of 300 simulated healthy runs of 60, 200 and 1,000 steps each, half of which have few right answers (3 % at first), with 8 "
        "completions in a group (`experiments/diagnosis/simulated.py`). The simulation draws every completion, so that with one group "
        "in a step the reward, the gradient and the lengths jump as chance has it. A rule that says so is a false alarm, except that "
        "most groups give no gradient, which is true of these runs. Rules that never apply are left out. An alarm says what a log "
        "shows; none of these rules was found to warn of a failure early.",
        "",
        "| | " + " | ".join(str(groups) for groups in GROUPS) + " |",
        "|---|" + "---|" * len(GROUPS),
    ]
    for rule in RULES.values():
        counts = [FALSE_ALARMS.get(rule.name, {}).get(_simulated(groups)) for groups in GROUPS]
        if any(count and count[0] for count in counts):
            cells = [f"{count[0] / count[1]:.1%}" if count else "–" for count in counts]
            lines.append(f"| [{rule.title}](#{rule.name}) | " + " | ".join(cells) + " |")
    return lines


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _keys(trainer: str, quantity: str) -> str:
    """The keys of a trainer for a quantity, as a cell; empty if it does not log it."""
    alternatives = BY_TRAINER[trainer].keys.get(quantity, ())
    written = (" + ".join(f"`{key}`" for key in keys) for keys in alternatives)
    return ", ".join(written).replace("*", "…")


if __name__ == "__main__":
    print(symptoms_markdown(), end="")

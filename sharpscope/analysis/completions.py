"""Selection of the completions that a report shows, by a rule that the report states."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import pandas as pd

from sharpscope.analysis.spikes import Spike, explain_spikes, share_steps
from sharpscope.analysis.study import ground_of
from sharpscope.traces import Run

SPIKES = 4
"""Spikes of a run that are shown, the largest first."""
SPIKE_TOKENS = 8
SPIKE_COMPLETIONS = 4
OTHERS = 2
"""Completions of a spike's prompt taken from each other run of the study."""
PROMPTS = 2
PER_PROMPT = 4
LARGEST = 2
"""Completions of a chosen step taken for their largest tokens."""

RULE = (
    f"Which completions are here: of each run, for its spikes of the gradient norm (at most {SPIKES}, the largest; without a "
    f"spike, its largest gradient with attribution) the {SPIKE_COMPLETIONS} completions that hold the largest shares of the "
    f"squared gradient norm; up to {OTHERS} completions of those completions' prompts from every other run that was asked them "
    "at that step; then, of the first, the middle and the last step with token rows (of those with attribution, where there are "
    f"any; of those that all runs of a study have, where there are any), up to {PER_PROMPT} completions of the first {PROMPTS} "
    f"prompts and the {LARGEST} with the largest tokens; in this order until the run's part of the file is full."
)


@dataclass
class Choice:
    """The completions selected from one run: (step, rollout) → why, in the order of the rule; and its spikes.

    Without a spike, the largest gradient with attribution takes its place; its z is NaN.
    """

    run: Run
    wanted: dict[tuple[int, int], str] = field(default_factory=dict)
    spikes: list[Spike] = field(default_factory=list)

    def add(self, step: int, rollouts: Iterable[int], why: str) -> None:
        """Take completions that were not taken yet."""
        for rollout in rollouts:
            self.wanted.setdefault((int(step), int(rollout)), why)


def completions_dropped(run: Run) -> bool:
    """Whether the run recorded completions that `export --to reduced` did not keep."""
    recorded = (run.config.get("recording") or {}).get("rollouts_every", 1) != 0
    return run.reduced is not None and recorded and not len(run.rollouts)


def choose(runs: Mapping[str, Run]) -> dict[str, Choice]:
    """RULE applied to every run that has completions."""
    choices = {name: Choice(run) for name, run in runs.items() if len(run.rollouts)}
    for name, choice in choices.items():
        choice.spikes = _spikes(choice.run)
        for spike in choice.spikes:
            held = [] if spike.tokens is None else [int(rollout) for rollout in spike.tokens["rollout"]]
            taken = list(dict.fromkeys(held))[:SPIKE_COMPLETIONS]
            what = "largest gradient" if math.isnan(spike.z) else "spike"
            choice.add(spike.step, taken, what)
            asked = _at(choice.run, spike.step)
            prompts = dict.fromkeys(asked.loc[asked["rollout"].isin(taken), "prompt"].dropna())
            for other_name, other in choices.items():
                if other_name != name and ground_of(other.run) == ground_of(choice.run):
                    rows = _at(other.run, spike.step)
                    for prompt in prompts:
                        same = rows.loc[rows["prompt"] == prompt, "rollout"].head(OTHERS)
                        other.add(spike.step, same, f"prompt of the {what} of {name}")
    grounds: dict[str, list[Choice]] = {}
    for choice in choices.values():
        grounds.setdefault(ground_of(choice.run), []).append(choice)
    for members in grounds.values():
        candidates = [_candidates(choice.run) for choice in members]
        common = sorted(set.intersection(*map(set, candidates)))
        for choice, own in zip(members, candidates, strict=True):
            steps = common or own
            # a small budget is spent on the end of training first
            for step in dict.fromkeys([steps[-1], steps[0], steps[len(steps) // 2]] if steps else []):
                _add_step(choice, step)
    return choices


def _spikes(run: Run) -> list[Spike]:
    result = explain_spikes(run, top=SPIKE_TOKENS, largest=1)
    largest = sorted(result, key=lambda spike: -spike.z)[:SPIKES] if len(result) > 1 else result
    return sorted(largest, key=lambda spike: spike.step)


def _candidates(run: Run) -> list[int]:
    """Steps with shares, else with token rows, else with completions."""
    with_text = set(map(int, run.rollouts["step"].unique()))
    steps = set(run.token_steps) & with_text
    return sorted(set(share_steps(run)) & steps or steps or with_text)


def _add_step(choice: Choice, step: int) -> None:
    rows = _at(choice.run, step)
    first = sorted(rows["group"].dropna().unique())[:PROMPTS]
    choice.add(step, _largest(choice.run, step), "largest tokens")
    if not first:  # an imported run does not know its groups
        choice.add(step, rows["rollout"].head(PROMPTS * PER_PROMPT), "first completions")
    for group in first:
        choice.add(step, rows.loc[rows["group"] == group, "rollout"].head(PER_PROMPT), "first prompts")


def _largest(run: Run, step: int) -> list[int]:
    tokens = run.tokens(steps=[step], columns=["rollout", "attribution", "loss_coef"])
    for column in ("attribution", "loss_coef"):
        sizes = tokens.groupby("rollout")[column].apply(lambda values: values.abs().max()).dropna()
        if len(sizes):
            return [int(rollout) for rollout in sizes.nlargest(LARGEST).index]
    return []


def _at(run: Run, step: int) -> pd.DataFrame:
    return run.rollouts[run.rollouts["step"] == step].sort_values("rollout")

"""Selection of the completions that a report shows, by a rule that the report states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import pandas as pd

from sharpscope.analysis.spikes import SPIKE_Z, Spike, explain_largest, explain_spikes, share_steps
from sharpscope.analysis.study import ground_of
from sharpscope.analysis.tokens import complement
from sharpscope.traces import Run

SPIKES = 4
"""Spikes of a run that are shown: those that are the most times the typical gradient."""
SPIKE_TOKENS = 8
SPIKE_PROMPTS = 2
GROUP = 16
"""Completions of a prompt that are taken, at most."""
FEW = 4
"""Runs up to which every step is represented."""

RULE = (
    f"Which completions are here: always all that answer a prompt at a step (at most {GROUP}). Of each run, for its spikes of the "
    f"gradient norm (at most {SPIKES}, the largest; without a spike, its largest gradient with attribution) the {SPIKE_PROMPTS} "
    "prompts of the largest shares; those prompts from every other run that was asked them at that step; then, of the last and the "
    "first step with token rows (of those with attribution, where there are any), the prompt of the largest token and the first "
    f"prompt; then, of up to {FEW} runs, the prompt of the largest token of every other step, evenly spread; in this order until the "
    "run's part of the file is full."
)


@dataclass
class Choice:
    """The completions selected from one run: (step, rollout) → why, in the order of the rule; and its spikes.

    Without a spike, the largest gradient with attribution takes its place.
    """

    run: Run
    wanted: dict[tuple[int, int], str] = field(default_factory=dict)
    spikes: list[Spike] = field(default_factory=list)

    def add(self, step: int, rollouts: Iterable[int], why: str) -> None:
        """Take the completions of the prompts of `rollouts` that were not taken yet."""
        rows = self.run.rollouts[self.run.rollouts["step"] == step].sort_values("rollout").set_index("rollout")
        for rollout in rollouts:
            group = rows["group"].get(rollout)
            same = rows.index[rows["group"] == group] if pd.notna(group) else rows.index[rows.index == rollout]
            for one in same[:GROUP]:
                self.wanted.setdefault((int(step), int(one)), why)


def completions_dropped(run: Run) -> bool:
    """Whether the run recorded completions that `export --to reduced` did not keep."""
    recorded = (run.config.get("recording") or {}).get("rollouts_every", 1) != 0
    return run.reduced is not None and recorded and not len(run.rollouts)


def choose(runs: Mapping[str, Run]) -> dict[str, Choice]:
    """RULE applied to every run that has completions."""
    choices = {name: Choice(run) for name, run in runs.items() if len(run.rollouts)}
    for name, choice in choices.items():
        found = explain_spikes(choice.run, SPIKE_TOKENS) or explain_largest(choice.run, SPIKE_TOKENS)
        choice.spikes = sorted(sorted(found, key=lambda one: -one.times)[:SPIKES], key=lambda one: one.step)
        for spike in choice.spikes:
            _add_spike(choices, name, spike)
    for choice in choices.values():
        run = choice.run
        with_text = set(map(int, run.rollouts["step"].unique()))
        steps = sorted(set(share_steps(run)) & with_text or set(run.token_steps) & with_text or with_text)
        for step in dict.fromkeys((steps[-1], steps[0])):  # a small budget is spent on the end of training first
            choice.add(step, largest_rollouts(run, [step]).values(), "largest token")
            choice.add(step, [int(run.rollouts.loc[run.rollouts["step"] == step, "rollout"].min())], "first prompt")
        for step, rollout in largest_rollouts(run, _spread(run.token_steps) if len(choices) <= FEW else []).items():
            choice.add(step, [rollout], "largest token")
    return choices


def of_step(run: Run, step: int) -> dict[str, Choice]:
    """All completions of one step, by prompt, that of the largest token first."""
    choice = Choice(run)
    choice.add(step, largest_rollouts(run, [step]).values(), "largest token")
    choice.add(step, run.rollouts.loc[run.rollouts["step"] == step, "rollout"].sort_values(), "step")
    return {run.name: choice}


def _add_spike(choices: Mapping[str, Choice], name: str, spike: Spike) -> None:
    """Take the prompts of a spike's largest tokens from its run, and from the others of its study."""
    choice, what = choices[name], "spike" if spike.z >= SPIKE_Z else "largest gradient"
    asked = choice.run.rollouts[choice.run.rollouts["step"] == spike.step].set_index("rollout")
    leading = [] if spike.tokens is None else spike.tokens["rollout"].unique()  # type: ignore[var-annotated]
    held = asked.reindex(leading).dropna(how="all")["prompt"]
    taken = held.fillna(pd.Series(held.index, held.index)).drop_duplicates()[:SPIKE_PROMPTS]
    choice.add(spike.step, map(int, taken.index), what)
    for other_name, other in choices.items():
        if other_name != name and ground_of(other.run) == ground_of(choice.run):
            rows = other.run.rollouts[other.run.rollouts["step"] == spike.step]
            same = rows[rows["prompt"].isin(taken)].drop_duplicates("prompt")["rollout"]
            other.add(spike.step, same, f"prompt of the {what} of {name}")


def _spread(steps: list[int]) -> list[int]:
    """The steps in an order in which any first part of them is spread evenly (halves, quarters and so on)."""
    order = sorted(range(len(steps)), key=lambda n: int(f"{n:020b}"[::-1], 2))
    return [steps[n] for n in order]


def largest_rollouts(run: Run, steps: list[int]) -> dict[int, int]:
    """Step → completion that holds its largest token: the largest |share|, or else the largest pull |c|·(1 − π)."""
    tokens = run.tokens(steps=steps, columns=["step", "rollout", "attribution", "loss_coef", "logp"])
    share = tokens["attribution"].abs().astype(float)
    pull = tokens["loss_coef"].astype(float).abs() * complement(tokens["logp"].to_numpy())
    size = share.where(share.groupby(tokens["step"]).transform("count") > 0, pull).dropna()
    at = size.groupby(tokens["step"]).idxmax()
    found = {int(step): int(tokens.loc[row, "rollout"]) for step, row in at.items()}  # type: ignore[call-overload]
    return {step: found[step] for step in steps if step in found}

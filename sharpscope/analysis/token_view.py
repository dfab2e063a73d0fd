"""The token view: which completions the page shows, by a rule that it states, and their tokens' numbers within a stated size."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from sharpscope.analysis.headline import leading_step, words_of
from sharpscope.analysis.spikes import (
    NOT_RECORDED,
    SPIKE_Z,
    Spike,
    explain_step,
    notable_steps,
    spike_scores,
)
from sharpscope.analysis.study import ground_of
from sharpscope.analysis.text import listed, short, shown
from sharpscope.analysis.token_values import needed_columns, with_values
from sharpscope.analysis.tokens import complement
from sharpscope.traces import TABLES, Run
from sharpscope.traces.reader import Pieces, piece_maker

Json = dict[str, object]
"""An object in the data of the page."""
BUDGET = 4_000_000
"""Bytes of token data in a report, divided evenly among its runs."""
RUN_BUDGET = 1_800_000
"""Most bytes of one run, however few there are."""
MOST_TOKENS = 4_000
"""Tokens of a completion that are shown with numbers; what follows is shown as text."""
MOST_TEXT = 20_000
"""Characters of a token, a completion's text or a prompt beyond which it is cut in the file."""
DIGITS = 3
ROUNDING = 1e-5
"""A mismatch or a distance to the reference of which no token has more is rounding, and is left out [nats]."""

COLUMNS = {
    "share": "attribution",
    "coef": "loss_coef",
    "mismatch": "mismatch",
    "kl": "kl",
    "logp": "logp",
    "entropy": "entropy",
    "weight": "weight",
    "score": "score_norm_local",
    "exact": "score_norm",
    "influence": "heldout_influence",
    "ratio": "ratio",
    "clipped": "clipped",
    "polarity": "polarity",
    "adv": "advantage",
} | {name: name for name in TABLES["tokens"].names if name.startswith("effect_")}
"""Name in the page → column of the tokens table, or value of `token_values`."""
CONSTANT = {
    "mismatch": 0.0,
    "kl": 0.0,
    "weight": 1.0,
    "ratio": 1.0,
    "clipped": 0.0,
}
"""Values of columns that are left out where every token has them."""


def token_view(
    runs: Mapping[str, Run], choices: Mapping[str, Choice] | None = None, budget: int = BUDGET
) -> dict[str, Any]:
    """Everything the token view shows: runs, prompts, token texts (`pieces`), completions, notes.

    A completion's `c` maps a name of COLUMNS to one number a token; a column without any number is left out. Every text is
    made visible by `shown`. At most `budget` bytes of completions, every run its equal part.
    """
    choices = choose(runs) if choices is None else choices
    share = min(RUN_BUDGET, budget // max(1, len(choices)))
    pieces: dict[str, int] = {}  # texts that repeat over the whole page → their numbers
    prompts: dict[str, int] = {}
    completions: list[Json] = []
    notes: list[str] = []
    for number, (name, choice) in enumerate(choices.items()):
        maker = piece_maker(choice.run)
        taken = _completions(choice, number, share, maker, pieces, prompts)
        completions += taken
        said = []
        if not choice.run.rows("tokens"):
            said.append(
                "no token rows were recorded (recording.tokens_every), so completions are plain text"
            )
        elif maker is None:
            said.append("the run saved no readable tokenizer, so tokens stand as their numbers")
        if len(taken) < len(choice.wanted):
            said.append(
                f"{len(taken)} of {len(choice.wanted)} chosen completions fit into the file"
            )
        notes += [f"{name}: {text}." for text in said]
    others = [name for name in runs if name not in choices]
    absent = [name for name in others if not runs[name].rows("rollouts")]
    if len(others) > len(absent):
        notes.append(f"{len(others) - len(absent)} more runs are not shown here, see the rule.")
    if absent:
        why = "no completions were recorded (recording.rollouts_every), or they were not kept when the runs were reduced"
        notes.append(f"{listed(absent, 4)}: {why}.")
    return {
        "runs": [shown(name) for name in choices],
        "methods": [shown(c.run.method) for c in choices.values()],
        "prompts": [shown(text) for text in prompts],
        "pieces": list(pieces),
        "completions": completions,
        "notes": [shown(note) for note in notes],
    }


def _completions(
    choice: Choice,
    number: int,
    budget: int,
    maker: Pieces | None,
    pieces: dict[str, int],
    prompts: dict[str, int],
) -> list[Json]:
    """The chosen completions of one run, the first ones that fit into `budget` bytes; the first always."""
    wanted = ["rollout", "position", "token_id", "update", *needed_columns(COLUMNS.values())]
    result: list[Json] = []
    steps: dict[int, tuple[pd.DataFrame, pd.DataFrame]] = {}
    used = 0
    # in the order of the rule: what does not fit is what says least
    for (step, rollout), why in choice.wanted.items():
        if step not in steps:
            chosen = [number for of, number in choice.wanted if of == step]
            rollouts = choice.run.frame("rollouts", step)
            rollouts = rollouts[rollouts["rollout"].isin(chosen)].set_index("rollout")
            tokens = choice.run.tokens(step, wanted)
            tokens = with_values(tokens[tokens["rollout"].isin(chosen)])
            steps[step] = rollouts, tokens
        rollouts, tokens = steps[step]
        if rollout not in rollouts.index:  # its part was found damaged since it was chosen
            continue
        row = rollouts.loc[rollout]
        own = tokens[tokens["rollout"] == rollout].sort_values("position")
        body, texts = _body(row, own, maker)
        completion = _head(row, number, step, rollout, why) | body
        prompt = _cut(row["prompt"])
        new = [text for text in dict.fromkeys(texts) if text not in pieces]
        if prompt not in prompts:
            new.append(prompt)
        # in the file a token is the number of its text, of about six bytes
        used += len(json.dumps(completion)) + 6 * len(texts) + len(json.dumps(new))
        if used > budget and result:
            break
        completion["p"] = prompts.setdefault(prompt, len(prompts))
        if "c" in completion:
            completion["t"] = [pieces.setdefault(text, len(pieces)) for text in texts]
        result.append(completion)
    return result


def _head(row: Any, number: int, step: int, rollout: int, why: str) -> Json:
    """What the page says about a completion as a whole."""
    names = {
        "g": "group",
        "reward": "reward",
        "adv": "advantage",
        "len": "length",
    }
    return {
        "r": number,
        "s": step,
        "n": rollout,
        "why": shown(why),
        "parts": shown(row["reward_parts"])[:300],
        **{name: short(row[column], DIGITS) for name, column in names.items()},
        "ok": None if pd.isna(row["correct"]) else bool(row["correct"]),
        "cut": not pd.isna(row["truncated"]) and bool(row["truncated"]),
    }


def _body(row: Any, tokens: pd.DataFrame, maker: Pieces | None) -> tuple[Json, list[str]]:
    """The numbers of a completion's tokens with their texts; without tokens, its text."""
    if tokens.empty:
        return {"text": shown(_cut(row["completion"]))}, []
    texts = words_of(tokens["token_id"], maker)
    kept = tokens.head(MOST_TOKENS)
    numbers = {}
    for name, column in COLUMNS.items():
        if column in kept:
            values = kept[column].to_numpy(dtype=float, na_value=math.nan)
            if _tells(name, values):
                numbers[name] = [short(value, DIGITS) for value in values]
    body: Json = {"c": numbers}
    positions = [int(position) for position in kept["position"]]
    if positions != list(range(len(positions))):
        body["at"] = positions
    rest = texts[MOST_TOKENS:]
    if rest:
        body["rest"] = shown(_cut("".join(rest)))
        body["more"] = len(rest)
    return body, [shown(_cut(text)) for text in texts[:MOST_TOKENS]]


def _tells(name: str, values: np.ndarray) -> bool:
    """Whether the values (tokens,) of a column say something: recorded, no rounding, and not as good as not there."""
    there = values[~np.isnan(values)]
    if name == "adv":  # one number of the completion, if it is not each token's own
        return len(np.unique(there)) > 1
    usual = CONSTANT.get(name)
    return len(there) > 0 and (usual is None or bool((np.abs(there - usual) > ROUNDING).any()))


def _cut(text: object) -> str:
    """A text of at most MOST_TEXT characters; what is missing was not recorded."""
    text = NOT_RECORDED if text is None else str(text)
    more = len(text) - MOST_TEXT
    if more <= 0:
        return text
    return f"{text[:MOST_TEXT]} … ({more:,} characters more in the traces)"


SPIKES = 4
"""Spikes of a run that are shown: those that are the most times the typical gradient."""
SPIKE_TOKENS = 8
SPIKE_PROMPTS = 3
GROUP = 16
"""Completions of a prompt that are taken, at most."""
FEW = 4
"""Runs up to which every step is represented."""
MOST_ROWS = 2_000_000
"""Token rows of a run among which the largest tokens of steps are looked for."""
MOST_RUNS = 24
"""Runs whose completions are shown, at most."""

RULE = (
    f"Which completions are here: always all that answer a prompt at a step (at most {GROUP}). Of each run, for its spikes of the "
    f"gradient norm (at most {SPIKES}, the largest; without a spike, its largest gradient with attribution), and of up to {FEW} runs for "
    f"the leading step (which shows the cause, or the last with effects), the {SPIKE_PROMPTS} prompts of the "
    "largest shares; those prompts from every other run that was asked them at that step; then the prompt of the "
    f"largest token of the last and the first step, and of up to {FEW} runs of every other step, evenly spread; in this order until "
    f"the run's part of the file is full. Of more than {MOST_RUNS} runs, those of the largest spikes, from each method in turn."
)


@dataclass
class Choice:
    """The completions selected from one run: (step, rollout) → why, in the order of the rule; and its spikes.

    Without a spike, the largest gradient with attribution takes its place.
    """

    run: Run
    wanted: dict[tuple[int, int], str] = field(default_factory=dict)
    spikes: list[Spike] = field(default_factory=list)
    _asked: dict[int, pd.DataFrame] = field(default_factory=dict)

    @cached_property
    def ground(self) -> str:
        """Only runs with equal grounds are compared."""
        return ground_of(self.run)

    def asked(self, step: int) -> pd.DataFrame:
        """`group` and `prompt` of the completions of a step by `rollout`, ascending."""
        if step not in self._asked:
            rows = self.run.frame("rollouts", step, ["rollout", "group", "prompt"])
            self._asked[step] = rows.sort_values("rollout").set_index("rollout")
        return self._asked[step]

    def add(self, step: int, rollouts: Iterable[int], why: str) -> None:
        """Take the completions of the prompts of `rollouts` that were not taken yet."""
        groups = self.asked(step)["group"]
        for rollout in rollouts:
            group = groups.get(rollout)
            same = groups == group if pd.notna(group) else groups.index == rollout
            for one in groups.index[same][:GROUP]:
                self.wanted.setdefault((int(step), int(one)), why)


def runs_shown(runs: Mapping[str, Run]) -> dict[str, Run]:
    """The runs with completions; of more than MOST_RUNS those of the largest spikes, from each method in turn."""
    there = {name: run for name, run in runs.items() if run.rows("rollouts")}
    if len(there) <= MOST_RUNS:
        return there
    spikes = {name: spike_scores(run)["times"].max() for name, run in there.items()}
    # the n-th largest of each method before the (n + 1)-th of any
    ordered = sorted(there, key=lambda name: -np.nan_to_num(spikes[name]))
    methods = pd.Series([there[name].method for name in ordered], ordered)
    turn = methods.groupby(methods).cumcount().sort_values(kind="stable")
    chosen = set(turn.index[:MOST_RUNS])
    return {name: run for name, run in there.items() if name in chosen}


def choose(runs: Mapping[str, Run]) -> dict[str, Choice]:
    """RULE applied to every run that has completions."""
    choices = {name: Choice(run) for name, run in runs_shown(runs).items()}
    few = len(choices) <= FEW
    for name, choice in choices.items():
        largest = sorted(notable_steps(choice.run, SPIKE_TOKENS), key=lambda one: -one.times)
        found = largest[:SPIKES]
        step = leading_step(choice.run) if few else None
        if step is not None and all(one.step != step for one in found):
            found.append(explain_step(choice.run, step, SPIKE_TOKENS))
        choice.spikes = sorted(found, key=lambda one: one.step)
        for spike in choice.spikes:
            _add_spike(choices, name, spike)
    for choice in choices.values():
        with_text = list(choice.run.step_rows("rollouts"))
        steps = [step for step in choice.run.token_steps if step in with_text] or with_text
        order = list(dict.fromkeys((steps[-1], steps[0], *_spread(steps))))
        order = _first_rows(choice.run, order)
        searched = order if few else order[:2]
        for step, rollout in largest_rollouts(choice.run, searched).items():
            choice.add(step, [rollout], "largest token")
    return choices


def _first_rows(run: Run, steps: list[int]) -> list[int]:
    """The first of the steps, two at least, with at most MOST_ROWS token rows: many more than a page can show."""
    rows = run.step_rows("tokens")
    sums = np.cumsum([rows.get(step, 0) for step in steps])
    return steps[: max(2, int(np.searchsorted(sums, MOST_ROWS, "right")))]


def of_step(run: Run, step: int) -> dict[str, Choice]:
    """All completions of one step, by prompt, that of the largest token first."""
    choice = Choice(run)
    choice.add(step, largest_rollouts(run, [step]).values(), "largest token")
    choice.add(step, choice.asked(step).index, "step")
    return {run.name: choice}


def _add_spike(choices: Mapping[str, Choice], name: str, spike: Spike) -> None:
    """Take the prompts of a spike's largest tokens from its run, and from the others of its study."""
    choice = choices[name]
    what = "spike" if spike.z >= SPIKE_Z else "leading step"
    leading = [] if spike.tokens is None else spike.tokens["rollout"].unique()  # type: ignore[var-annotated]
    held = choice.asked(spike.step).reindex(leading).dropna(how="all")["prompt"]
    taken = held.fillna(pd.Series(held.index, held.index)).drop_duplicates()[:SPIKE_PROMPTS]
    choice.add(spike.step, map(int, taken.index), what)
    for other_name, other in choices.items():
        if other_name == name or other.ground != choice.ground:
            continue
        there = other.asked(spike.step)
        same = there[there["prompt"].isin(taken)].drop_duplicates("prompt").index
        other.add(spike.step, same, f"prompt of the {what} of {name}")


def _spread(steps: list[int]) -> list[int]:
    """The steps in an order in which any first part of them is spread evenly (halves, quarters and so on)."""
    order = sorted(range(len(steps)), key=lambda n: int(f"{n:020b}"[::-1], 2))
    return [steps[n] for n in order]


def largest_rollouts(run: Run, steps: list[int]) -> dict[int, int]:
    """Step → completion with its largest token: by |effect on KL|, |share|, or the pull |c|·(1 − π), the first that is known.

    Where none is known it is the first completion.
    """
    first = run.frame("rollouts", steps, ["step", "rollout"]).groupby("step")["rollout"].min()
    wanted = ["effect_kl", "attribution", "loss_coef", "logp"]
    tokens = run.tokens(steps=steps, columns=["step", "rollout", *wanted])
    size = tokens["loss_coef"].astype(float).abs() * complement(tokens["logp"].to_numpy())
    for column in ("attribution", "effect_kl"):
        known = tokens[column].astype(float).abs()
        size = known.where(known.groupby(tokens["step"]).transform("count") > 0, size)
    size = size.dropna()
    largest = tokens.loc[size.groupby(tokens["step"]).idxmax()].set_index("step")["rollout"]
    return {step: int(largest.get(step, first[step])) for step in steps}

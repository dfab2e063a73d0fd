"""The headline, the same in the demo, `show` and the page: which tokens a gradient is made of, how few carry it, which layer grew."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import pandas as pd

from sharpscope.analysis.cause_sections import checked
from sharpscope.analysis.measures import accuracy_values
from sharpscope.analysis.sections import Marked, Section, records_of
from sharpscope.analysis.spikes import (
    SURE,
    Spike,
    concentration,
    notable_steps,
    recorded_by,
    step_shares,
)
from sharpscope.analysis.statistics import mean_interval
from sharpscope.analysis.study import Setting, Study, last_step, recorded_steps
from sharpscope.analysis.text import (
    interval_text,
    method_label,
    number,
    percent,
    real,
    sampling,
    told_apart,
    visible,
)
from sharpscope.rules.judging import SPIKE_WINDOW
from sharpscope.traces import Run
from sharpscope.traces.reader import Pieces, piece_maker

CANDIDATES = 40
"""Tokens with the largest shares among which equal ones are merged."""
AROUND = 7
"""Tokens on either side of a token in its sentence."""
WIDTH = 60
"""Characters on either side of it, and of the token."""
INSERTED = " ⋯ "
"""Stands in a sentence for tokens that were not drawn, such as a tool's answer."""
SHARE = "share of ‖∇L‖²"
_PLACE = [
    "rollout",
    "position",
    "loss_coef",
    "advantage",
]
"""Columns that say where a token is and which way its loss pushes it."""


@dataclass(frozen=True)
class Moved:
    """A token that a gradient pushes, with `count` equal ones merged (same text, direction, outcome and prompt).

    Attributes:
        share: of the update's ‖∇L‖², or another value of tokens that adds up, summed.
        probability: π before the step.
        sentence: where it stands; its direction is that in which its own loss pushes it.
        correct: whether its completion was right; None if that is not known.
    """

    share: float
    probability: float
    sentence: Marked
    correct: bool | None
    count: int

    @property
    def arrow(self) -> str:
        """Its direction."""
        return {1: "↑", -1: "↓"}.get(self.sentence.direction, "·")


def largest_update(run: Run) -> Spike | None:
    """The step whose tokens are shown: of the spikes with shares the one that is the most times the typical norm.

    Not that with the largest z, which also says how alike the steps before were. Without such a spike, the largest gradient with shares.
    """
    found = [spike for spike in notable_steps(run) if spike.tokens is not None]
    return max(found, key=lambda spike: spike.rank, default=None)


def leading_step(run: Run) -> int | None:
    """The step whose tokens say most of a run: the first that shows its cause, the last with effects, or the largest update."""
    if causes := checked(run).causes:
        return causes[0].step
    spike = largest_update(run)
    steps = recorded_steps(run, "effect_kl") or ([] if spike is None else [spike.step])
    return steps[-1] if steps else None


def moved_tokens(run: Run, step: int, top: int = 4) -> list[Moved]:
    """The tokens of a step with the largest |share|, equal ones merged; those that point against the others come last."""
    tokens = step_shares(run, step)
    if tokens.empty:
        return []
    outcomes = run.frame("rollouts", step, ["rollout", "correct", "group"]).set_index("rollout")
    largest = merged_tokens(run, step, tokens.join(outcomes, on="rollout"), "share")[:top]
    return sorted(largest, key=lambda one: (one.share < 0, -abs(one.share)))


def merged_tokens(run: Run, step: int, tokens: pd.DataFrame, column: str) -> list[Moved]:
    """The CANDIDATES tokens of a step with the largest |column|, with `probability`, `correct` and `group`; equal ones merged."""
    sizes = tokens[column].abs().sort_values(ascending=False, kind="stable")
    chosen = tokens.loc[sizes.index[:CANDIDATES]]
    # token, direction, outcome and prompt → what is alike in them
    merged: dict[tuple[object, ...], Moved] = {}
    for row, sentence in zip(chosen.to_dict("records"), sentences(run, step, chosen), strict=True):
        correct = None if pd.isna(row["correct"]) else bool(row["correct"])
        # a completion without a group has a prompt of its own
        group = ("alone", row["rollout"]) if pd.isna(row["group"]) else row["group"]
        key = (sentence.token, sentence.direction, correct, group)
        one = merged.get(key)
        if one is None:
            one = Moved(
                share=0.0,
                probability=row["probability"],
                sentence=sentence,
                correct=correct,
                count=0,
            )
        merged[key] = replace(one, share=one.share + row[column], count=one.count + 1)
    return sorted(merged.values(), key=lambda one: -abs(one.share))


def sentences(run: Run, step: int, chosen: pd.DataFrame) -> list[Marked]:
    """Each of the `chosen` tokens (rollout, position, loss_coef, advantage) in its sentence; ids without a readable tokenizer."""
    maker = piece_maker(run)
    tokens = run.tokens(steps=[step], columns=["rollout", "position", "token_id"])
    tokens = tokens[tokens["rollout"].isin(chosen["rollout"])].sort_values("position")
    by_rollout = {int(str(rollout)): rows for rollout, rows in tokens.groupby("rollout")}
    words: dict[int, list[str]] = {}
    result = []
    for row in chosen.to_dict("records"):
        rollout = int(row["rollout"])
        position = int(row["position"])
        rows = by_rollout[rollout]
        if rollout not in words:
            words[rollout] = words_of(rows["token_id"], maker)
        texts = words[rollout]
        positions = rows["position"].to_numpy()
        at = int(np.flatnonzero(positions == position)[0])
        inserted = np.diff(positions, append=positions[-1] + 1) > 1  # after each token
        ends = [INSERTED if gap else "" for gap in inserted]
        around = [text + end for text, end in zip(texts, ends, strict=True)]
        before = "".join(around[max(0, at - AROUND) : at])
        after = ends[at] + "".join(around[at + 1 : at + 1 + AROUND])
        marked = Marked(
            before=before[-WIDTH:],
            token=texts[at][:WIDTH],
            after=after[:WIDTH],
            direction=_direction(row),
            run=run.name,
            step=step,
            rollout=rollout,
            position=position,
        )
        result.append(marked)
    return result


def words_of(token_ids: pd.Series, maker: Pieces | None) -> list[str]:
    """The text of each token, or its number in brackets without a readable tokenizer."""
    ids = [int(one) for one in token_ids]
    return [f"⟨{one}⟩" for one in ids] if maker is None else maker(ids)


def _direction(row: Mapping[Hashable, float]) -> int:
    """1 if the loss makes the token more likely, -1 if less likely: the sign of -dL/d ln π, or else of the advantage."""
    for value in (-real(row.get("loss_coef")), real(row.get("advantage"))):
        if value and math.isfinite(value):
            return 1 if value > 0 else -1
    return 0


def concentration_text(run: Run, step: int) -> str:
    """How few tokens carry the gradient of a step; empty if it has no shares."""
    tokens = step_shares(run, step)
    if len(tokens) < 100:  # the largest hundredth would be less than one token
        return ""
    largest, sure, carried = concentration(tokens)
    said = f"1 % of the tokens carry {percent(largest)} of the gradient."
    if sure >= 0.01:
        what = "none" if carried < 0.005 else percent(carried)
        said += f" The {percent(sure)} that the model was sure of (π > {SURE}) carry {what}."
    return said


def moved_sections(runs: Sequence[Run], top: int = 4) -> list[Section]:
    """For each run that has shares the `top` tokens of its most informative step, how few carry its gradient, and the largest prompt."""
    result = []
    title = "Which tokens the gradient is made of"
    for run in runs:
        # a sample of tokens lacks the largest ones
        spike = None if run.reduced is not None else largest_update(run)
        if spike is None:
            continue
        first = step_sections(run, spike, top)[0]
        note = _moved_note(run, spike, first.note) if first.note else ""
        result.append(replace(first, title=f"{title}: {first.title}", note=note))
    if not result and runs:
        why = ": the run was reduced"
        if runs[0].reduced is None:
            why = recorded_by(runs[0], "recording.token_gradients_every")
        result.append(Section(title, f"No token's share of the gradient was kept{why}."))
    return result


def _moved_note(run: Run, spike: Spike, note: str) -> str:
    """What is said below the tokens of an update: how few carry it, `note`, the momentum, and the largest prompt."""
    said = [concentration_text(run, spike.step), note, momentum_text(run, spike.step)]
    if spike.sample:  # the prompt of a token that was not measured may be larger
        said.insert(0, f"Among {spike.sample}; others may have larger shares.")
    elif spike.prompts is not None:
        largest = spike.prompts["share"].iloc[0]
        prompts = told_apart(spike.prompts["prompt"].astype(str).tolist(), 90)
        said.append(f"Largest prompt: {percent(largest, sign=True)}, “{visible(prompts[0])}”")
    return " ".join(filter(None, said))


def momentum_text(run: Run, step: int) -> str:
    """How much of a step's movement its own batch made; empty if not recorded."""
    own = run.updates[run.updates["step"] == step]["batch_share"].astype(float).mean()
    if not math.isfinite(own):
        return ""
    return (
        f"{percent(own)} of ‖Δθ‖² of this step (in the optimizer's metric) come from its own batch, "
        "the rest from earlier ones through the momentum."
    )


def step_sections(run: Run, spike: Spike, top: int = 8) -> list[Section]:
    """The tokens, prompts and ranges of probability behind one update's gradient; all shares are of its square."""
    title = _spike_title(run, spike)
    if spike.missing or spike.prompts is None or spike.probabilities is None:
        return [Section(title, f"{spike.missing[0].upper()}{spike.missing[1:]}.")]
    first = spike.prompts.head(4)
    prompts = pd.DataFrame(
        {
            "share": [percent(share, 1, sign=True) for share in first["share"]],
            "prompt": told_apart([str(text) for text in first["prompt"]]),
        }
    )
    of = f" of {spike.sample}" if spike.sample else ""
    result = [
        _token_section(title, moved_tokens(run, spike.step, top)),
        Section(f"Prompts{of}", prompts, records=records_of(first)),
    ]
    ranges = spike.probabilities
    if ranges["share"].isna().all():  # a sample may hold too little of the gradient
        return result
    cells = pd.DataFrame(
        {
            "π": [f"{low:g} to {high:g}" for low, high in ranges[["low", "high"]].to_numpy()],
            SHARE: [percent(share, 1, sign=True) for share in ranges["share"]],
            "share of the tokens": [percent(share, 1) for share in ranges["tokens"]],
        }
    )
    if "error" in ranges:
        cells.insert(2, "± SE", [percent(error, 1) for error in ranges["error"]])
    scaled = f"Estimated from {spike.sample} and scaled to sum to 100 %." if spike.sample else ""
    return [*result, Section("Ranges of probability", cells, scaled, records=records_of(ranges))]


def _spike_title(run: Run, spike: Spike) -> str:
    """The update and its gradient norm, beside the typical one."""
    which = f", {spike.update}" if spike.update else ""
    title = f"{run.name}, step {spike.step}{which}: gradient norm {number(spike.grad_norm)}"
    if spike.typical > 0:
        title += f", {spike.times:.1f} × the typical {number(spike.typical)}"
    return f"{title}, z = {spike.z:.1f}" if math.isfinite(spike.z) else title


def token_rows(moved: Sequence[Moved], title: str, total: float = 1.0) -> pd.DataFrame:
    """Tokens as rows: token, answer, the share of `total` under `title`, and π."""
    rows = []
    for one in moved:
        times = f" (×{one.count})" if one.count > 1 else ""
        share = percent(one.share / total, 1, sign=True) + times
        answer = {True: "right", False: "wrong", None: ""}[one.correct]
        rows.append((one.sentence, answer, share, number(one.probability)))
    return pd.DataFrame(rows, columns=["token", "answer", title, "π"])


def _token_section(title: str, moved: Sequence[Moved]) -> Section:
    """The tokens that a gradient pushes, as a table and as numbers."""
    tokens = token_rows(moved, SHARE)
    tokens[SHARE] += ["" if one.share >= 0 else " against the rest" for one in moved]
    tokens.insert(0, "", [one.arrow for one in moved])
    tokens = tokens if tokens["answer"].any() else tokens.drop(columns="answer")
    records = []
    for one in moved:
        numbers = asdict(one)
        records.append(numbers.pop("sentence") | numbers)
    note = "↑ made more likely, ↓ less likely. All shares are of its square; those of all tokens sum to 100 %."
    return Section(title, tokens, note, records=records)


def trained_text(study: Study, settings: Sequence[Setting]) -> str:
    """What was trained and what it did to the accuracy, in words."""
    said = [*accuracy_texts(settings), *rotation_texts(settings)]
    seeds = max(len(setting.runs) for setting in settings)
    if seeds > 1 or len(settings) > 1:  # what a run alone is, its head says
        lengths = [last_step(run) for setting in settings for run in setting.runs.values()]
        steps = " to ".join(map(str, sorted({min(lengths), max(lengths)})))
        names = " and ".join(method_label(setting.label) for setting in settings)
        each = f", up to {seeds} seeds each" if seeds > 1 else ""
        said.insert(0, f"{names}: {steps} steps of {study.name}{each}.")
    return " ".join(said)


def rotation_texts(settings: Sequence[Setting]) -> list[str]:
    """How far token weights would turn the gradient of trainings that were recorded with `rotation=`."""
    said = []
    for setting in settings:
        for run in setting.runs.values():
            angles = run.updates["gradient_rotation"].dropna()
            method = run.info.get("rotation")
            if method and len(angles):
                each = f"{angles.mean():.1f}° on average over {len(angles)} updates (at most {angles.max():.1f}°)"
                said.append(
                    f"The weights of {method} would turn the gradient of {run.name} by {each}."
                )
    return said


def accuracy_texts(settings: Sequence[Setting]) -> list[str]:
    """Accuracy before and after of each split that training did not use, at each temperature, with its interval."""
    tables = []
    for setting in settings:
        for at, run in enumerate(setting.runs.values()):
            tables.append(accuracy_values(run).assign(setting=setting.label, run=at))
    whole = pd.concat(tables)
    names = {"heldout": "held-out prompts", "unseen": "prompts of sizes that training never saw"}
    said = []
    known = whole[whole["split"].isin(list(names))]
    for (split, heat), part in known.groupby(["split", "temperature"]):
        runs = part.groupby(["setting", "run"], sort=False)
        several = runs["step"].transform("size") > 1  # one evaluation is no before and after
        first = part[several].groupby(["setting", "run"], sort=False)["accuracy"].first()
        before = f"{percent(first.mean())} before, " if len(first) else ""
        after = []
        for label, last in runs.tail(1).groupby("setting", sort=False):
            mean, half = over_seeds(100 * last[["accuracy", "half"]])
            whose = f" ({method_label(str(label))})" if len(settings) > 1 else ""
            after.append(f"{interval_text(mean, half)} %{whose}")
        prompts = runs["prompts"].last().iloc[0]
        how = f"{sampling(float(str(heat)))}, {prompts} prompts"
        said.append(f"Accuracy on {names[str(split)]} ({how}): {before}{', '.join(after)} after.")
    return said


def over_seeds(values: pd.DataFrame) -> tuple[float, float]:
    """Mean and half of its interval of values with their halves (runs, 2): the run's own of one run, Student's t over several.

    Values that are not finite are left out; NaN where there is none.
    """
    table = values.to_numpy(float)
    finite = table[np.isfinite(table[:, 0])]
    if len(finite) < 2:
        return tuple(finite[0].tolist()) if len(finite) else (math.nan, math.nan)
    interval = mean_interval(finite[:, 0])
    mean = finite[:, 0].mean()
    return mean, math.nan if interval is None else interval.high - mean


def layer_norms(run: Run) -> pd.DataFrame:
    """step, update, group, grad_norm, update_norm: a row for each update and group of parameters [L2 norm]; empty if not recorded.

    `group` is `12.attention` in a decoder layer, elsewhere the kind alone (embedding, norm, head, other).
    """
    names = ["grad_norm_by_layer", "update_norm_by_layer"]
    rows = []
    known = run.updates.dropna(subset=names[:1])[["step", "update", *names]]
    for step, update, gradients, updates in known.itertuples(index=False):
        moved = json.loads(updates) if isinstance(updates, str) else {}
        for group, norm in json.loads(gradients).items():
            rows.append((step, update, group, norm, moved.get(group)))
    frame = pd.DataFrame(rows, columns=["step", "update", "group", "grad_norm", "update_norm"])
    return frame.astype({"grad_norm": float, "update_norm": float})


def layer_growth(run: Run, step: int) -> pd.DataFrame:
    """How each group's gradient in a step's largest update compares with the SPIKE_WINDOW updates before the step; empty if not recorded.

    Index: the group, the largest growth first. Columns: `grad_norm`, `typical` (median of the updates before), `growth` (their ratio)
    and `share` of the update's ‖∇L‖².
    """
    table = layer_norms(run)
    norms = table.pivot_table(index=["step", "update"], columns="group", values="grad_norm")
    here = norms[norms.index.get_level_values("step") == step]
    if here.empty:
        return pd.DataFrame()
    squares = here**2
    # of a step with several updates the one with the largest gradient
    present = here.iloc[int(squares.sum(axis=1).argmax())].dropna()
    earlier = norms[norms.index.get_level_values("step") < step]
    typical = earlier.tail(SPIKE_WINDOW).median().reindex(present.index)
    growth = (present / typical.where(typical > 0)).astype(float)
    share = present**2 / (present**2).sum()
    columns = {
        "grad_norm": present,
        "typical": typical,
        "growth": growth,
        "share": share,
    }
    return pd.DataFrame(columns).sort_values(["growth", "share"], ascending=False)


def growth_text(groups: pd.DataFrame) -> str:
    """Which group of `layer_growth` has the most of the gradient, and how much it grew, in a sentence."""
    most = groups.iloc[int(groups["share"].to_numpy().argmax())]
    said = f"{most.name} has the most of ‖∇L‖², {percent(most['share'])}"
    if math.isfinite(most["growth"]):
        said += f"; its gradient is {most['growth']:.3g} × its typical norm, the middle group's {groups['growth'].median():.2g} ×"
    return f"{said}."


def layer_tokens(run: Run, step: int) -> pd.DataFrame:
    """The leading tokens of a step with |c|·‖∇ ln π‖ by layer: rollout, position, loss_coef, advantage, then a column for each layer.

    The largest in all first. Empty where nothing was recorded.
    """
    norms = "score_norm_by_layer"
    tokens = run.tokens(steps=[step], columns=[*_PLACE, norms])
    tokens = tokens.dropna(subset=[norms]).reset_index(drop=True)
    by_layer = pd.DataFrame(list(map(json.loads, tokens.pop(norms))), dtype=float)
    by_layer = by_layer.mul(tokens["loss_coef"].abs().astype(float), axis=0)
    order = (by_layer**2).sum(axis=1).sort_values(ascending=False, kind="stable").index
    return tokens.join(by_layer).loc[order].reset_index(drop=True)


def layer_sections(run: Run, step: int, top: int = 6) -> list[Section]:
    """Which layer grew at a step, and its leading tokens in that layer; empty where norms by layer were not recorded."""
    groups = layer_growth(run, step)
    if groups.empty:
        return []
    shown = groups.head(top)
    cells = {
        "parameters": shown.index,
        "gradient norm": shown["grad_norm"].map(number),
        "× typical": shown["growth"].map(number),
        "of ‖∇L‖²": shown["share"].map(percent),
    }
    parts = [Section(f"Layers at step {step}", pd.DataFrame(cells), growth_text(groups))]
    tokens = layer_tokens(run, step)
    if len(tokens):
        layers = list(tokens.columns.drop(_PLACE))
        most = str(groups["share"].idxmax()).partition(".")[0]
        layer = most if most in layers else layers[0]
        tokens = tokens.sort_values(layer, ascending=False, kind="stable").head(top)
        where = f"layer {layer}" if layer.isdecimal() else f"the {layer}"
        in_all = (tokens[layers] ** 2).sum(axis=1) ** 0.5
        columns = {
            "token": sentences(run, step, tokens),
            f"|c|·‖∇ ln π‖ in {where}": list(map(number, tokens[layer])),
            "in all": list(map(number, in_all)),
        }
        parts.append(Section(f"Leading tokens by {where}", pd.DataFrame(columns)))
    return parts

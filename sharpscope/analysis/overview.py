"""The first screen of a report and of `show`: what moved the model, rotation, sharpness, results; one line of verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from sharpscope.analysis.comparison import Z, mean_over_steps
from sharpscope.analysis.frames import with_pooled
from sharpscope.analysis.spikes import Spike, explain_spikes, recorded_by
from sharpscope.analysis.statistics import accuracy_interval, contrast_interval, mean_interval
from sharpscope.analysis.study import Setting, Study, studies
from sharpscope.analysis.text import Grid, number, printable, sampling, told_apart
from sharpscope.analysis.token_text import piece_maker
from sharpscope.traces import Run

if TYPE_CHECKING:  # claims need the plotting library, which `show` does not
    from sharpscope.analysis.claims.base import Verdict

SETTINGS = 4
"""Settings that are shown without a pair; the others follow further down in the report."""
TOKENS = 3
PROMPTS = 2
AROUND = 7
"""Tokens on either side of a token in its sentence."""
WIDTH = 80
"""Characters of the token, and on either side of it."""

ROTATIONS = {
    "gradient_rotation": "gradient [°]",
    "update_rotation": "optimizer's step [°]",
    "noise_rotation": "noise [°]",
}
SHARPNESS = {"sam": "SAM sharpness", "critical_sharpness": "critical sharpness"}
NONE = (math.nan, math.nan)


@dataclass(frozen=True)
class Spot:
    """A token in its sentence, and its share of the squared gradient norm."""

    share: float
    probability: float
    rollout: int
    position: int
    before: str
    token: str
    after: str


@dataclass(frozen=True)
class Moved:
    """The tokens and prompts with the largest shares of one update: `prompts` are (share, text), `sample` as in `Spike`."""

    run: str
    step: int
    text: str
    spots: tuple[Spot, ...]
    prompts: tuple[tuple[float, str], ...]
    sample: str = ""


@dataclass(frozen=True)
class Part:
    """A quarter of the screen: a table, or the sentence that stands for it."""

    title: str
    grid: Grid | None
    text: str = ""


@dataclass(frozen=True)
class Overview:
    """The first screen.

    Attributes:
        name: the study that is shown.
        finding: what was found, in sentences computed from the traces.
        moved: updates whose tokens and prompts are shown; `moved_text` says what else is known, or why there are none.
        rotation, sharpness, result: the tables.
        more: what the screen leaves out; empty if nothing.
    """

    name: str
    finding: str
    moved: tuple[Moved, ...]
    moved_text: str
    rotation: Part
    sharpness: Part
    result: Part
    more: str = ""


@dataclass(frozen=True)
class Change:
    """A quantity of a run at its start and end, and the change, each with half of a 95 % interval (NaN: none)."""

    start: tuple[float, float]
    end: tuple[float, float]
    change: tuple[float, float]


@dataclass(frozen=True)
class Measure:
    """A quantity that changes over a run.

    `difference` is that of two runs of one seed at their ends, with half of its interval.
    """

    name: str
    change: Callable[[Run], Change | None]
    difference: Callable[[Run, Run], tuple[float, float] | None]


def overview(whole: Study, moved_text: str = "") -> Overview | None:
    """The first screen of the runs; None if no run has a step.

    Of several studies that with the most runs is shown, and of many settings the pair's, or those with the most seeds. A run
    alone has intervals over prompts (sharpness, accuracy) or steps (reward); several seeds have t-intervals over seeds.

    Args:
        whole: the runs, with the results of C3's reducer if its tokens were read.
        moved_text: why no token can be shown, if that is not because none was recorded.
    """
    every = [study for study in studies(whole) if study.settings]
    if not every:
        return None
    study = max(every, key=lambda one: len(one.each()))
    settings = _chosen(study)
    moved = _moved(study, settings)
    sharp = [measure for name in SHARPNESS if (measure := _sharpness_measure(settings, name)) is not None]
    results = _result_measures(settings)
    hidden = len(study.settings) - len(settings)
    parts = [f"{hidden} more settings" if hidden > 1 else "1 more setting"] if hidden else []
    parts += (
        [f"{len(every) - 1} other task or policy" if len(every) == 2 else f"{len(every) - 1} other tasks or policies"]
        if every[1:]
        else []
    )
    first = next(iter(settings[0].runs.values()))
    no_shares = f"No token's share of the gradient was recorded{recorded_by(first, 'recording.token_gradients_every')}."
    return Overview(
        study.name,
        _finding(study, settings, moved, sharp, results),
        moved,
        " ".join(filter(None, [_concentration(study, settings), "" if moved else moved_text or no_shares])),
        _rotation(settings, f"not recorded{recorded_by(first, 'recording.rotation_every')}"),
        _part(
            "Sharpness at start and end", study, settings, sharp, f"not recorded{recorded_by(first, 'probes.preset')}"
        ),
        _part("Result", study, settings, results, "no reward, loss or evaluation was recorded"),
        " and ".join(parts),
    )


def verdict_line(verdicts: Sequence[Verdict], source: str = "") -> str:
    """How many claims can be judged, which, and what the others need."""
    if not verdicts:
        return ""
    judged = [verdict for verdict in verdicts if verdict.verdict != "untestable"]
    text = f"{len(judged)} of {len(verdicts)} claims can be judged"
    by_outcome = [
        f"{outcome}: {', '.join(v.claim for v in judged if v.verdict == outcome)}"
        for outcome in ("supported", "refuted", "inconclusive")
        if any(v.verdict == outcome for v in judged)
    ]
    text += f" ({'; '.join(by_outcome)})" if by_outcome else ""
    if len(judged) < len(verdicts):
        text += f"; the others need more seeds or settings: see `{f'sharpscope power {source}'.strip()}`"
    return text + "."


def _chosen(study: Study) -> list[Setting]:
    """The two settings of the pairs, the baseline's first; without pairs, those with the most seeds."""
    pairs = study.pairing().pairs
    names = [name for pair in pairs[:1] for name in (pair.baseline, pair.treatment)]
    first = [
        setting
        for name in names
        for setting in study.settings
        if any(run is study.runs[name] for run in setting.runs.values())
    ]
    rest = sorted(
        (s for s in study.settings if s not in first), key=lambda s: (s.method != study.baseline, -len(s.runs))
    )
    return first or rest[:SETTINGS]


# -- what moved the model ----------------------------------------------------------------------------------------------


def largest_update(run: Run, tokens: int = TOKENS) -> Spike | None:
    """The largest spike with attribution; without one, the step with attribution whose gradient is the largest."""
    spikes = [s for s in explain_spikes(run, top=tokens, largest=1) if s.tokens is not None]
    return max(spikes, key=lambda s: -math.inf if math.isnan(s.z) else s.z) if spikes else None


def spots_of(run: Run, spike: Spike) -> list[Spot]:
    """The tokens of a spike in their sentences; ids where the run has no readable tokenizer."""
    if spike.tokens is None:
        return []
    maker = piece_maker(run)
    everything = run.tokens(steps=[spike.step], columns=["rollout", "position", "token_id"])
    result = []
    for row in spike.tokens.to_dict("records"):
        own = everything[everything["rollout"] == row["rollout"]].sort_values("position").reset_index(drop=True)
        ids = [int(token) for token in own["token_id"]]
        texts = [f"⟨{token}⟩" for token in ids] if maker is None else maker(ids)
        at = int(own.index[own["position"] == row["position"]][0])
        before, after = "".join(texts[max(0, at - AROUND) : at]), "".join(texts[at + 1 : at + 1 + AROUND])
        numbers = (float(row["attribution"]), float(row["probability"]), int(row["rollout"]), int(row["position"]))
        result.append(Spot(*numbers, before[-WIDTH:], texts[at][:WIDTH], after[:WIDTH]))
    return result


def _moved(study: Study, settings: Sequence[Setting]) -> tuple[Moved, ...]:
    """One update of the first run of each of the first two settings; of one setting, of its first run."""
    result = []
    for setting in settings[:2]:
        run = next(iter(setting.runs.values()))
        if run.reduced is not None or not run.rows("tokens"):
            continue  # a sample of tokens does not hold the largest ones
        spike = largest_update(run)
        if spike is None or spike.prompts is None:
            continue
        what = (
            "largest gradient with attribution"
            if math.isnan(spike.z)
            else f"spike, {spike.z:.1f} robust standard deviations"
        )
        shown = spike.prompts.head(PROMPTS)
        texts = told_apart([str(text) for text in shown["prompt"]], 90)
        result.append(
            Moved(
                run.name,
                spike.step,
                f"step {spike.step} ({what}), gradient norm {number(spike.grad_norm)}"
                + (f"; tokens of {spike.sample}" if spike.sample else ""),
                tuple(spots_of(run, spike)),
                tuple(zip(map(float, shown["attribution"]), texts, strict=True)),
                spike.sample,
            )
        )
    return tuple(result)


def _concentration(study: Study, settings: Sequence[Setting]) -> str:
    """The share of Σ|c|·‖∇ ln π‖ that the largest hundredth of the tokens holds; empty if norms were not recorded."""
    parts = []
    for setting in settings[:2]:
        results = study.results_of("C3", setting)
        if results:
            curves = [np.interp(0.99, np.linspace(0, 1, len(r.values["lorenz"])), r.values["lorenz"]) for r in results]
            parts.append(f"{1 - float(np.mean(curves)):.0%} ({setting.label})")
    return (
        f"The largest 1 % of the tokens hold {' and '.join(parts)} of the token gradients' summed norms."
        if parts
        else ""
    )


# -- rotation ------------------------------------------------------------------------------------------------------------


def rotation_of(run: Run, column: str) -> float:
    """Mean over the recorded steps [degrees]; NaN where it was not recorded."""
    return float(pd.to_numeric(run.steps[column], errors="coerce").mean()) if column in run.steps else math.nan


def _rotation(settings: Sequence[Setting], why: str) -> Part:
    title = "How far the method turned the gradient"
    rows = []
    for setting in settings:
        each = [[rotation_of(run, column) for run in setting.runs.values()] for column in ROTATIONS]
        if np.isfinite(each).any():
            rows.append((setting.label, *(_over_seeds([(value, math.nan) for value in values], 1) for values in each)))
    if not rows:
        return Part(title, None, why)
    note = "Mean angle to the reference objective's on the same rollouts. Noise: of one batch's gradient."
    return Part(title, Grid(title, ("setting", *ROTATIONS.values()), tuple(rows), note))


def interval_text(value: float, half: float) -> str:
    """`0.0431 ± 0.0012`: as many digits as two of the interval need; three significant ones without an interval."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else number(value)
    if not (math.isfinite(half) and half > 0):
        return f"{value:,.0f}" if abs(value) >= 1000 else number(value)
    digits = min(max(1 - math.floor(math.log10(half)), 0), 12)
    return f"{value:.{digits}f} ± {half:.{digits}f}"


# -- start and end -------------------------------------------------------------------------------------------------------


def _part(title: str, study: Study, settings: Sequence[Setting], measures: Sequence[Measure], why: str) -> Part:
    rows: list[tuple[str, ...]] = []
    single = True
    for measure in measures:
        name = measure.name  # stands once, in the measure's first row
        for setting in settings:
            changes = [change for run in setting.runs.values() if (change := measure.change(run)) is not None]
            if changes:
                single = single and len(changes) == 1
                cells = (_over_seeds([getattr(one, part) for one in changes]) for part in ("start", "end", "change"))
                rows.append((name, setting.label, *cells))
                name = ""
        difference = pair_difference(study, measure)
        if difference is not None:
            text, _, n = difference
            rows.append((name, f"{study.treatment} − {study.baseline}, {n} pair{'s' * (n > 1)}", "", text, ""))
    if not rows:
        return Part(title, None, why)
    note = "±: 95 % interval over prompts or steps of one run." if single else "±: 95 % interval over seeds."
    if not any("±" in cell for row in rows for cell in row):
        note = ""
    return Part(title, Grid(title, ("quantity", "setting", "start", "end", "change"), tuple(rows), note))


def pair_difference(study: Study, measure: Measure) -> tuple[str, tuple[float, float], int] | None:
    """(text, (mean, arm of the interval towards 0), number of pairs) of treatment − baseline at the end; None without pairs.

    One pair: over prompts or steps. Several: `contrast_interval` over pairs, whose arms may differ.
    """
    runs = [(study.finished[p.baseline], study.finished[p.treatment]) for p in study.pairing().pairs]
    differences = [one for pair in runs if (one := measure.difference(*pair)) is not None]
    if not differences:
        return None
    if len(differences) == 1:
        value, half = differences[0]
        return interval_text(value, half), (value, half), 1
    means = np.array([value for value, _ in differences])
    interval = contrast_interval(means)
    mean = float(means.mean())
    if interval is None:
        return interval_text(mean, math.nan), (mean, math.nan), len(differences)
    arm = mean - interval.low if mean > 0 else interval.high - mean
    return f"{number(mean)} [{number(interval.low)}, {number(interval.high)}]", (mean, arm), len(differences)


def _over_seeds(values: Sequence[tuple[float, float]], digits: int | None = None) -> str:
    """Mean over the runs that have a value ± half of its interval: the run's own of one run, a t-interval of several."""
    finite = [(value, half) for value, half in values if math.isfinite(value)]
    if not finite:
        return "–"
    mean, half = finite[0]
    if len(finite) > 1:
        numbers = [value for value, _ in finite]
        interval = mean_interval(numbers, "t")
        mean, half = float(np.mean(numbers)), math.nan if interval is None else interval.high - float(np.mean(numbers))
    if digits is None:
        return interval_text(mean, half)
    return f"{mean:.{digits}f}" + (f" ± {half:.{digits}f}" if math.isfinite(half) else "")


def _sharpness_measure(settings: Sequence[Setting], quantity: str) -> Measure | None:
    """A measure of sharpness at the middle radius on the training half of the probe set, of `nll` where it was probed."""
    runs = [run for setting in settings for run in setting.runs.values()]
    functionals = {str(name) for run in runs for name in _probed(run, quantity)["functional"].dropna().unique()}
    if not any(len(_probed(run, quantity)) for run in runs):
        return None
    functional = "nll" if "nll" in functionals else min(functionals, default="")
    return Measure(
        SHARPNESS[quantity],
        partial(_sharpness_change, quantity, functional),
        partial(_sharpness_difference, quantity, functional),
    )


def _sharpness_rows(run: Run, quantity: str, functional: str) -> pd.DataFrame:
    """Estimates at the middle radius on the training half of the probe set, or on an update, which has none; by step."""
    rows = _probed(run, quantity)
    rows = rows[rows["functional"].fillna("") == functional] if functional else rows
    rows = rows[~rows["probe_set"].fillna("").str.contains("/heldout@")]
    return _one_radius(rows).sort_values("step", kind="stable")


def _sharpness_change(quantity: str, functional: str, run: Run) -> Change | None:
    rows = _sharpness_rows(run, quantity, functional)
    if rows.empty:
        return None
    first, last = rows.iloc[0], rows.iloc[-1]
    ends = [(float(row["value"]), Z * float(row["prompt_std_error"])) for row in (first, last)]
    if first["step"] == last["step"]:
        return Change(ends[0], NONE, NONE)
    return Change(ends[0], ends[1], _paired(run, first, run, last))


def _sharpness_difference(quantity: str, functional: str, a: Run, b: Run) -> tuple[float, float] | None:
    """The last estimate of run `b` minus that of run `a`."""
    first, second = (_sharpness_rows(run, quantity, functional) for run in (a, b))
    return None if first.empty or second.empty else _paired(a, first.iloc[-1], b, second.iloc[-1])


def _one_radius(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows at the middle radius of the grid, which claims read too; all rows of a measure without a radius."""
    radii = np.sort(rows["rho"].dropna().unique())
    return rows[np.isclose(rows["rho"], radii[(len(radii) - 1) // 2], rtol=1e-6)] if len(radii) else rows


def _probed(run: Run, quantity: str) -> pd.DataFrame:
    """Estimates of a quantity over all parameters that have a value and converged."""
    rows = run.probes
    good = rows["value"].notna() & ~rows["converged"].isin([False]) & (rows["parameters"] == "all")
    return rows[good & (rows["quantity"] == quantity)]


def _paired(run_a: Run, a: pd.Series, run_b: Run, b: pd.Series) -> tuple[float, float]:
    """Difference b − a of two estimates, with half of its interval over the prompts that both were made on.

    NaN where the values by prompt were not recorded, or not on the same prompts. Estimates on the prompts of updates, which
    have no probe set, count as independent.
    """
    difference = float(b["value"]) - float(a["value"])
    if not a["probe_set"] and not b["probe_set"]:
        return difference, Z * math.hypot(float(a["prompt_std_error"]), float(b["prompt_std_error"]))
    if a["probe_set"] != b["probe_set"]:
        return difference, math.nan
    values = [_by_prompt(run, row) for run, row in ((run_a, a), (run_b, b))]
    if len(values[0]) < 2 or set(values[0].index) != set(values[1].index):
        return difference, math.nan
    each = (values[1] - values[0]).to_numpy(dtype=float)
    return difference, Z * float(each.std(ddof=1)) / math.sqrt(len(each))


def _by_prompt(run: Run, row: pd.Series) -> pd.Series:
    frame = run.probe_prompts
    same = np.ones(len(frame), dtype=bool)
    for key in ("step", "probe_set", "functional", "parameters", "quantity", "rho", "seed"):
        same &= (frame[key].isna() if pd.isna(row[key]) else frame[key] == row[key]).to_numpy(dtype=bool)
    return frame[same].drop_duplicates("prompt").set_index("prompt")["value"]


def _result_measures(settings: Sequence[Setting]) -> list[Measure]:
    """Reward (or loss) of the first and last third of the steps, and accuracy at the first and last evaluation."""
    runs = [run for setting in settings for run in setting.runs.values()]
    measures = []
    if any(run.steps["reward_mean"].notna().any() for run in runs):
        measures.append(_independent("reward", partial(_thirds, "reward_mean")))
    elif any(run.steps["loss"].notna().any() for run in runs):  # supervised fine-tuning
        measures.append(_independent("training loss", partial(_thirds, "loss")))
    for split, name in (("heldout", "held-out accuracy"), ("unseen", "unseen accuracy")):
        temperatures = {float(t) for run in runs for t in _evaluated(run, split)["temperature"].unique()}
        if temperatures:
            chosen = 1.0 if 1.0 in temperatures else min(temperatures)
            measures.append(_independent(f"{name}, {sampling(chosen)}", partial(_accuracy, split, chosen)))
    return measures


def _thirds(column: str, run: Run) -> Change | None:
    """Means over the first and the last third of the steps."""
    values = pd.to_numeric(run.steps.sort_values("step")[column], errors="coerce").to_numpy(dtype=float)
    if not np.isfinite(values).any():
        return None
    if len(values) == 1:
        return Change((float(values[0]), math.nan), NONE, NONE)
    third = max(1, len(values) // 3)
    (first, before), (last, after) = (mean_over_steps(part) for part in (values[:third], values[-third:]))
    return _change((first, Z * before), (last, Z * after))


def _evaluated(run: Run, split: str) -> pd.DataFrame:
    return run.eval[(run.eval["task"] == run.task) & (run.eval["split"] == split)]


def _accuracy(split: str, temperature: float, run: Run) -> Change | None:
    """Accuracy at the first and the last evaluation."""
    rows = _evaluated(run, split)
    rows = rows[rows["temperature"] == temperature]
    if rows.empty:
        return None
    first, last = (_pooled(rows[rows["step"] == step]) for step in (rows["step"].min(), rows["step"].max()))
    return Change(first, NONE, NONE) if rows["step"].nunique() == 1 else _change(first, last)


def _pooled(rows: pd.DataFrame) -> tuple[float, float]:
    """Accuracy over all levels, and the longer arm of its interval over prompts."""
    pooled = with_pooled(rows, "accuracy")
    accuracy = float(pooled.loc[pooled["level"] == "all", "value"].iloc[-1])
    levels = rows[rows["level"] != "all"] if (rows["level"] != "all").any() else rows
    weight = levels["n"] * levels["k"] / (levels["n"] * levels["k"]).sum()
    error = math.sqrt(float(((weight * levels["std_error"]) ** 2).sum(skipna=False)))
    prompts = int(levels["n"].sum())
    ends = accuracy_interval(accuracy, error, prompts, float((levels["n"] * levels["k"]).sum() / prompts))
    return accuracy, max(accuracy - ends.low, ends.high - accuracy)


def _change(start: tuple[float, float], end: tuple[float, float]) -> Change:
    return Change(start, end, (end[0] - start[0], math.hypot(start[1], end[1])))


def _independent(name: str, change_of: Callable[[Run], Change | None]) -> Measure:
    """A measure whose intervals at the ends of two runs are independent; computed once for a run, which several pairs may have."""
    change_of = cache(change_of)
    return Measure(name, change_of, partial(_independent_difference, change_of))


def _independent_difference(change_of: Callable[[Run], Change | None], a: Run, b: Run) -> tuple[float, float] | None:
    first, second = change_of(a), change_of(b)
    if first is None or second is None or not math.isfinite(second.end[0] - first.end[0]):
        return None
    return second.end[0] - first.end[0], math.hypot(first.end[1], second.end[1])


# -- the finding ---------------------------------------------------------------------------------------------------------


def _finding(
    study: Study,
    settings: Sequence[Setting],
    moved: Sequence[Moved],
    sharp: Sequence[Measure],
    results: Sequence[Measure],
) -> str:
    """One to four sentences: the largest token, rotation, and what changed or differs by more than its interval."""
    said = []
    if moved and moved[0].spots:
        one = moved[0]
        spot = max(one.spots, key=lambda each: abs(each.share))
        token = f"One token{f' of {one.sample}' if one.sample else ''}, {_quoted(spot.token)} (π = {number(spot.probability)}),"
        where = f"of the squared gradient norm of {one.run} at step {one.step}"
        said.append(
            f"{token} holds {spot.share:.0%} {where}."
            if spot.share >= 0
            else f"{token} points against the gradient of the others: its share {where} is {spot.share:.0%}."
        )
    pairs = study.pairing().pairs
    turned = [setting for setting in settings if setting.method != study.baseline][: 1 if pairs else None]
    for setting in turned:
        angle, noise = (
            _mean([rotation_of(run, column) for run in setting.runs.values()])
            for column in ("update_rotation", "noise_rotation")
        )
        if math.isfinite(angle):
            compared = f"; the noise of a batch turns the gradient by {noise:.0f}°" if math.isfinite(noise) else ""
            said.append(
                f"{setting.label} turns the optimizer's step by {angle:.1f}° from the reference objective's{compared}."
            )
    measures = [*sharp[:1], *results]
    if pairs:
        differences = [(measure.name, pair_difference(study, measure)) for measure in measures]
        known = [
            (name, difference)
            for name, difference in differences
            if difference is not None and math.isfinite(difference[1][1])
        ]
        clear = [f"{name} ({difference[0]})" for name, difference in known if abs(difference[1][0]) > difference[1][1]]
        unclear = [
            f"{name} ({difference[0]})" for name, difference in known if abs(difference[1][0]) <= difference[1][1]
        ]
        both = f"{study.treatment} − {study.baseline}"
        if clear:
            said.append(f"{both}, differences larger than their 95 % interval: {', '.join(clear)}.")
        if unclear:
            also = "no other difference" if clear else "no difference"
            said.append(f"{both}: {also} is larger than its 95 % interval: {', '.join(unclear)}.")
        if len(pairs) == 1 and known:
            said.append("One seed each says nothing about other seeds.")
    elif len(study.each()) == 1:
        run = study.each()[0][2]
        said += [text for measure in measures[:3] if (text := _changed(measure, run))]
    return " ".join(said)


def _changed(measure: Measure, run: Run) -> str:
    change = measure.change(run)
    if change is None or not math.isfinite(change.change[0]):
        return ""
    value, half = change.change
    arrow = f"{measure.name} went from {number(change.start[0])} to {number(change.end[0])}"
    if not math.isfinite(half):
        return f"{arrow[0].upper()}{arrow[1:]}."
    beyond = "more" if abs(value) > half else "no more"
    return f"{arrow[0].upper()}{arrow[1:]} (change {interval_text(value, half)}, {beyond} than its 95 % interval)."


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return float(np.mean(finite)) if finite else math.nan


def _quoted(token: str) -> str:
    return f"“{printable(token.replace(chr(10), '⏎').strip(' ') or '␣', 30)}”"


def probed_steps(run: Run, quantity: str) -> np.ndarray:
    """Values by step of a sharpness measure of one run, for a sparkline; empty if it was not recorded."""
    rows = _one_radius(_probed(run, quantity)).fillna({"functional": "", "probe_set": ""})
    if rows.empty:
        return np.zeros(0)
    first = rows.iloc[0]
    same = rows[(rows["functional"] == first["functional"]) & (rows["probe_set"] == first["probe_set"])]
    return same.groupby("step")["value"].mean().sort_index().to_numpy(dtype=float)

"""Counterfactual updates compared: differences between arms, paired by batch, with states as clusters.

A batch is one set of rollouts from which all arms learn, with its own completions for the outcomes; batches of one state are
independent given that state. A state is a checkpoint of a run. Within a state the sample of an interval is its batches; over
several states it is the states' means, since batches share what is special about a state.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from sharpscope.analysis.effects import removal_text
from sharpscope.analysis.headline import sentences
from sharpscope.analysis.sections import Section
from sharpscope.analysis.statistics import mean_interval
from sharpscope.analysis.text import SAME, number, percent
from sharpscope.traces import Run

COMPARISONS = {
    "step": "the optimizer's step as it is",
    "kl": "scaled to the KL of the reference's step",
}
"""How the arms' updates are compared."""
NOTE = (
    "One update of each method from the same state on the same completions, measured by importance weighting. Cells: "
    "difference to the reference with its 95 % interval; of the reference itself, its change. A negative difference of a failure "
    "means that the arm improves more."
)
ALL_STATES = "all states"

UNITS: dict[str, tuple[str, float]] = {
    "heldout_failure": ("points", 100.0),
    "train_failure": ("points", 100.0),
    "accuracy_greedy": ("points", 100.0),
    "entropy": ("millinats", 1000.0),
    "kl": ("millinats / token", 1000.0),
}
"""Outcome -> unit in tables and figures, and the factor that gives it."""

NAMES: dict[str, str] = {
    "heldout_failure": "held-out failure",
    "train_failure": "training failure",
    "accuracy_greedy": "held-out accuracy, greedy",
    "entropy": "entropy at fixed tokens",
    "kl": "KL to the start",
    "sam_sharpness": "SAM sharpness",
}
"""Outcome -> its name in tables and figures, in their order."""

_KEY = ["run", "fork", "step", "batch", "comparison", "outcome"]
_SERIES = ["fork", "comparison", "outcome", "arm", "reference"]


def fork_differences(forks: pd.DataFrame) -> pd.DataFrame:
    """Each arm's change and its difference from the reference's, by state and over all states.

    A row is an arm, comparison and outcome of one fork in one state, or in `all states`. Forks are pooled over runs that
    differ in their seed or method only, which gives them the same name. Only batches whose rows are valid for both arms
    count. The change is value − start, or the value of quantities that have no start, such as rotations.

    Args:
        forks: table `forks` of a run or of several, see `Run.forks`.

    Returns:
        Columns `state`, `fork`, `comparison`, `outcome`, `arm`, `reference`; `states` and `batches` used and `invalid` batches left out;
        `change` (mean) with `change_low`, `change_high`; `difference` with `low`, `high` (95 % t-interval) and `p`; `sd` of the
        difference over batches of one state.
    """
    rows = forks if "run" in forks else forks.assign(run="")
    pairs = _paired(rows)
    several = pairs.groupby(_SERIES)["run"].transform("nunique") > 1
    state = "step " + pairs["step"].astype(str)
    pairs["state"] = state.where(~several, pairs["run"].astype(str) + ", " + state)
    pairs = pairs.sort_values(["run", "step"], kind="stable")
    # without the columns of text, which take most of the time
    numbers = pairs[["both", "change", "difference"]]
    result = []
    for key, places in pairs.groupby(_SERIES, sort=False).groups.items():
        common = dict(zip(_SERIES, key, strict=True))  # type: ignore[call-overload]
        states = numbers.loc[places].groupby(pairs.loc[places, "state"], sort=False)
        used = {str(name): part[part["both"]] for name, part in states}
        invalid = states["both"].agg(lambda both: int((~both).sum()))
        for name, part in used.items():
            result.append({"state": name, **common, **_summary([part], invalid[name])})
        if len(used) > 1:
            pooled = _summary(list(used.values()), int(invalid.sum()))
            result.append({"state": ALL_STATES, **common, **pooled})
    return pd.DataFrame(result)


def _paired(rows: pd.DataFrame) -> pd.DataFrame:
    """Every row with the change of the reference arm on the same batch; `both`: valid and finite for both."""
    start = rows["start"].astype(float)
    # an outcome without any start, such as a rotation, is a quantity of the update: its value is the change
    changes = start.notna().groupby([rows["fork"], rows["outcome"]]).transform("any")
    changed = rows.assign(change=rows["value"].astype(float) - start.where(changes, 0.0))
    changed["valid"] = rows["valid"].fillna(False).astype(bool) & changed["change"].notna()
    keep = [*_KEY, "change", "valid"]
    of_reference = changed.loc[changed["arm"] == changed["reference"], keep]
    mine = changed[[*keep, "arm", "reference"]]
    joined = mine.merge(
        of_reference,
        on=_KEY,
        how="left",
        suffixes=("", "_of_reference"),
    )
    joined["both"] = joined["valid"] & joined["valid_of_reference"].fillna(False).astype(bool)
    joined["difference"] = joined["change"] - joined["change_of_reference"]
    return joined


def _summary(states: Sequence[pd.DataFrame], invalid: int) -> dict[str, float | int | None]:
    """Means and intervals over the batches of one state, or over the means of several; those without a batch are left out."""
    one = len(states) == 1
    states = [state for state in states if len(state)]
    if not states:
        nothing = dict.fromkeys(
            ("change", "change_low", "change_high", "difference", "low", "high", "p", "sd")
        )
        return {
            "states": 0,
            "batches": 0,
            "invalid": invalid,
            **nothing,
        }
    # batches of one state share what is special about it: over several states its mean is one value
    sample = (
        states[0]
        if one
        else pd.DataFrame([state[["change", "difference"]].mean() for state in states])
    )
    change, difference = (sample[name].to_numpy(dtype=float) for name in ("change", "difference"))
    within = [state["difference"].var() for state in states if len(state) > 1]
    found = map(mean_interval, (change, difference))
    ends = [(math.nan, math.nan) if one is None else (one.low, one.high) for one in found]
    return {
        "states": len(states),
        "batches": sum(map(len, states)),
        "invalid": invalid,
        "change": change.mean(),
        "change_low": ends[0][0],
        "change_high": ends[0][1],
        "difference": difference.mean(),
        "low": ends[1][0],
        "high": ends[1][1],
        "p": _p_value(difference),
        "sd": math.sqrt(np.mean(within)) if within else math.nan,
    }


def _p_value(values: np.ndarray) -> float:
    """Two-sided p of Student's t-test that the mean is 0; NaN for fewer than two values, 1 if all are 0."""
    if len(values) < 2 or not values.std():
        return math.nan if len(values) < 2 else 1.0 if values[0] == 0 else 0.0
    from scipy.stats import ttest_1samp  # slow to import

    return float(ttest_1samp(values, 0.0).pvalue)


def fork_sections(
    differences: pd.DataFrame, title: str = "", most: int | None = None
) -> list[Section]:
    """The tables of one fork's `fork_differences`: of each state the steps as they are, of the last one the matched ones too.

    `title`: before those of the tables; `most`: outcomes of a table, None: all.
    """
    turned = differences[differences["outcome"] == "update_rotation"].drop_duplicates(
        ["state", "arm"]
    )
    angles = turned.set_index(["state", "arm"])["change"]  # they do not depend on the comparison
    sections = []
    states = list(dict.fromkeys(differences["state"]))
    for state, (comparison, text) in itertools.product(states, COMPARISONS.items()):
        here = differences[
            (differences["state"] == state) & (differences["comparison"] == comparison)
        ]
        # the last state is that of all states, if there are several: it alone is shown at matched KL too
        if here.empty or (comparison != "step" and state != states[-1]):
            continue
        outcomes = [name for name in NAMES if name in set(here["outcome"])][:most]
        rows = []
        for arm, part in here.set_index("outcome").groupby("arm", sort=False):
            # of the reference its own change is shown: its difference is 0
            is_reference = arm == part["reference"].iloc[0]
            columns = (
                ("change", "change_low", "change_high")
                if is_reference
                else ("difference", "low", "high")
            )
            row = {"arm": f"{arm} (reference)" if is_reference else str(arm)}
            row["rotation of the update [°]"] = number(angles.get((state, arm)))
            for name in outcomes:
                unit, factor = UNITS.get(name, ("", 1.0))
                mean, low, high = (factor * part[column].get(name, math.nan) for column in columns)
                interval = "" if math.isnan(low) else f" [{low:+.3g}, {high:+.3g}]"
                row[f"{NAMES[name]} [{unit}]" if unit else NAMES[name]] = (
                    "–" if math.isnan(mean) else f"{mean:+.3g}{interval}"
                )
            shown = "heldout_failure" if "heldout_failure" in part.index else outcomes[0]
            main = part.loc[shown]  # the outcome of the p-value
            row[f"p ({NAMES.get(str(main.name), main.name)})"] = (
                "–" if is_reference else number(main["p"])
            )
            rows.append(
                row | {"batches": str(int(main["batches"])), "left out": str(int(main["invalid"]))}
            )
        sections.append(
            Section(f"{title}{state}, {text}", pd.DataFrame(rows), NOTE, "Counterfactual updates")
        )
    return sections


# -- What a step does with and without some tokens: `sharpscope fork RUN --step N --without top:K`

OUTCOMES = {
    "accuracy_greedy": "held-out accuracy, greedy",
    "accuracy": "held-out accuracy, sampled",
    "entropy": "entropy at fixed tokens [nats]",
    "kl": "KL from the state [nats / token]",
    "sam_sharpness": "SAM sharpness",
    "saturation": "its saturation",
    "grad_norm": "gradient norm",
    "update_norm": "update norm",
}
"""Outcome -> its name in the table, in its order."""
LAYERS = {"layer_gradient:": "Gradient norm by layer", "layer_update:": "Update norm by layer"}
ERRORS = "± is the standard error of the change over the prompts, for these completions."
LARGEST = 4
"""Groups of parameters that are shown, those whose gradient the leading tokens changed most."""
UNKNOWN = "–"
PREDICTED = (
    "Changes against the step with all tokens, in percent of what the step changes; ± is the standard error over parts of the prompts, "
    "and a smaller change is not distinguishable. "
    "kl, entropy: of the step's own completions; heldout, sharpness: expected failure on fixed held-out completions, and its SAM rise."
)
MOST = 0.5
"""The step is said to be less changed than the gradient if less than this of the gradient's norm is left, and more of its KL."""


def without_sections(run: Run, name: str) -> list[Section]:
    """What the step of the fork `name` did, arm by arm, the LARGEST changes of its layers, and its leading tokens."""
    rows = run.forks[run.forks["fork"] == name]
    settings = run.info["forks"][name]
    arms = list(dict.fromkeys(rows["arm"]))
    values = _by_arm(rows, arms, "value")
    step = int(settings["step"])
    to = settings["to"]
    one_step = to is None or to == step
    where = f"step {step}" if one_step else f"steps {step} to {to}"
    predictions = predictions_table(pd.DataFrame(settings["predictions"]))
    on = settings["on"]
    by_effect = settings["by"] == "effect"
    note = PREDICTED
    if by_effect and one_step:
        # its `heldout` is the expected failure
        predicts = removal_text(run, "failure" if on == "heldout" else on)
        note += f" Effects on {on}. {predicts}"
    said = prediction_sentences(predictions)
    if len(arms) == 3 and arms[2].endswith(" others"):
        said.append(tokens_verdict(values, arms, int(settings["sets"][0].partition(":")[2])))
    title = f"{run.name}, {where}: with all tokens, and without {', '.join(settings['sets'])}"
    parts = [
        Section(title, " ".join(said)),
        Section("Predicted and measured", predictions, note),
        Section("", outcome_table(rows, arms), ERRORS),
        *layer_changes(values),
    ]
    if settings["tokens"]:
        tokens = pd.DataFrame(settings["tokens"])
        ranking = f"effect on {on}" if by_effect else "share of ‖∇L‖²"
        parts.append(Section("The leading tokens", leading_tokens(run, step, tokens, ranking)))
    return parts


def _by_arm(rows: pd.DataFrame, arms: list[str], column: str) -> pd.DataFrame:
    """A column of the table `forks` by outcome and arm."""
    table = rows.pivot(index="outcome", columns="arm", values=column)
    return table.reindex(columns=arms).astype(float)


def outcome_table(rows: pd.DataFrame, arms: list[str]) -> pd.DataFrame:
    """Each outcome before the step and after that of each arm, with its standard error; `saturated` where it measures its ceiling."""
    starts = rows.drop_duplicates("outcome").set_index("outcome")["start"].astype(float)
    shown = [outcome for outcome in OUTCOMES if outcome in starts.index]
    table = pd.DataFrame({"outcome": [OUTCOMES[outcome] for outcome in shown]})
    table["before"] = [_outcome_text(outcome, starts[outcome]) for outcome in shown]
    values, errors, valid = (_by_arm(rows, arms, c) for c in ("value", "std_error", "valid"))
    for arm in arms:
        cells = []
        for outcome in shown:
            text = _outcome_text(outcome, values[arm][outcome], errors[arm][outcome])
            saturated = outcome == "sam_sharpness" and not valid[arm][outcome]
            cells.append(f"{text} (saturated)" if saturated else text)
        table[arm] = cells
    return table


def _outcome_text(outcome: str, value: float, error: float = math.nan) -> str:
    """A value, in percent if it is a share, with its standard error [percent] if that is known."""
    share = outcome.startswith(("accuracy", "saturation"))
    text = percent(value, 1) if share else number(value)
    return text if math.isnan(error) or math.isnan(value) else f"{text} ± {100 * error:.1f}"


def layer_changes(values: pd.DataFrame) -> list[Section]:
    """Norms by layer, of the groups of parameters whose norm the first set of tokens changed most."""
    sections = []
    for prefix, title in LAYERS.items():
        part = values[values.index.str.startswith(prefix)]
        part = part.set_axis(part.index.str.removeprefix(prefix).rename("parameters"))
        changes = (part.iloc[:, 0] - part.iloc[:, 1]).abs()
        order = changes.sort_values(ascending=False, kind="stable").index[:LARGEST]
        if len(part):
            sections.append(Section(title, part.loc[order].map(number).reset_index()))
    return sections


def leading_tokens(run: Run, step: int, tokens: pd.DataFrame, ranking: str) -> pd.DataFrame:
    """The tokens (rollout, position, score) with their score, and in their sentences where the trace has their text."""
    columns = ["rollout", "position", "loss_coef", "advantage", "logp"]
    known = run.tokens(steps=[step], columns=columns)
    tokens = tokens.merge(known, on=columns[:2], how="left")
    cells = tokens[columns[:2]].astype(str)
    share = ranking.startswith("share")
    cells[ranking] = [percent(x, 1, sign=True) if share else number(x) for x in tokens["score"]]
    if len(known) and tokens["logp"].notna().all():
        cells["token"] = pd.Series(list(sentences(run, step, tokens)), dtype=object)
        cells["π"] = np.exp(tokens["logp"]).map(number)
    return cells


def prediction_sentences(predictions: pd.DataFrame) -> list[str]:
    """A sentence for each arm: predicted and measured change of the step's KL."""
    said = []
    of_kl = predictions[predictions["outcome"] == "kl"]
    for arm, predicted, measured in of_kl[["tokens", "predicted", "measured"]].to_numpy():
        before = "" if predicted == UNKNOWN else f"predicted {predicted}, "
        said.append(f"The step's KL {arm}: {before}measured {measured}.")
    return said


def predictions_table(predictions: pd.DataFrame) -> pd.DataFrame:
    """Predicted and measured change of each outcome by each arm, in percent of the change by the step."""
    found = predictions.reindex(
        columns=["arm", "outcome", "step_change", "predicted", "measured", "std_error"]
    )
    scale = found["step_change"].abs()
    predicted, measured, error = (
        found[name].astype(float) / scale for name in ("predicted", "measured", "std_error")
    )

    def text(value: float, noise: float) -> str:
        """A change with its standard error, in words where that is larger."""
        if noise > abs(value):
            return SAME
        return percent(value, sign=True) + (f" ± {100 * noise:.0f}" if noise >= 0 else "")

    return pd.DataFrame(
        {
            "tokens": found["arm"],
            "outcome": found["outcome"],
            "change by the step": found["step_change"].map(number),
            "predicted": [percent(x, sign=True) if pd.notna(x) else UNKNOWN for x in predicted],
            "measured": list(map(text, measured, error)),
        }
    )


def tokens_verdict(values: pd.DataFrame, arms: list[str], top: int) -> str:
    """How much smaller the gradient's norm is without the leading tokens, and without random ones.

    `values`: outcome by arm; `arms`: the step as it was, without the leading tokens, and without random others.
    """
    whole, without, others = (float(values.at["grad_norm", arm]) for arm in arms)  # type: ignore[arg-type]
    less, random = (
        f"{percent(abs(1 - part / whole))} {'larger' if part > whole else 'smaller'}"
        for part in (without, others)
    )
    said = f"Without these {top} tokens the gradient's norm is {less} ({number(without)} in place of {number(whole)}), "
    said += f"without {top} random ones {random}."
    kl = values.loc["kl", arms].to_numpy(float)
    # a gradient that shrinks by half moves the model by half only if nothing rescales the step
    if without < MOST * whole and kl[1] > MOST * kl[0]:
        said += " The step is less changed than the gradient: clipping and the optimizer's moments bound it whatever the gradient's size."
    return said

"""Where training ended, as tables: the pair in many quantities, and every setting beside the baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sharpscope.analysis.claims.measures import TEMPERATURE, accuracy, evaluations, last_step, shared_curves
from sharpscope.analysis.statistics import contrast_interval, mean_interval
from sharpscope.analysis.study import Pairing, Setting, Study, per_run, studies
from sharpscope.analysis.tables.paper import Cell, Table
from sharpscope.analysis.tokens import INCLUSION, inverse_inclusion
from sharpscope.traces import Run

LATE = 0.2
"""Share of the steps, at the end, that a step quantity is averaged over."""
Measure = Callable[..., float | None]
"""(run, *others) → a number of the run at a step that the others have, too; None (or NaN) where there is none."""


@dataclass(frozen=True)
class Quantity:
    """One number of a run; `digits` after the point."""

    name: str
    measure: Measure
    digits: int = 3


def endpoint_tables(whole: Study) -> list[Table]:
    """`table_pair` and `table_settings`, each for every task and policy that has what it needs."""
    parts = studies(whole)
    made = [_pair_table(study, pairing) for study in parts if (pairing := study.pairing()).pairs]
    return [*made, *(table for study in parts if (table := _setting_table(study)) is not None)]


def _pair_table(study: Study, pairing: Pairing) -> Table:
    """Means of both methods in many quantities, and their differences paired by seed.

    The pairs are those of the setting that has the most of them, as in the claims. Intervals of differences: sign flips, from
    6 pairs on (from 15, BCa).
    """
    first, second = study.baseline, study.treatment
    rows: dict[str, dict[str, Cell | str]] = {}
    for quantity in _quantities(study, pairing):
        result = study.differences(pairing, partial(_both, quantity.measure))
        if len(result):
            a, b, d = (result[name].to_numpy(dtype=float) for name in ("baseline", "treatment", "difference"))
            rows[quantity.name] = {
                first: _mean(a, quantity.digits),
                second: _mean(b, quantity.digits),
                "difference": _difference(d, quantity.digits),
                "pairs": str(len(result)),
            }
    left = f"; {pairing.left_out} pairs of other settings left out" if pairing.left_out else ""
    steps = {len(study.finished[name].steps) for name in pairing.names}
    caption = (
        f"{second} and {first}, paired by seed. Study {study.name}, {pairing.setting}, {_span(steps)} steps{left}. Mean and 95 % "
        f"bootstrap interval over seeds; difference: {second} − {first}. Accuracies at temperature {TEMPERATURE:g}; `last`, "
        f"`first`: at the last and first step that both runs of a pair have; `late`: mean of the last {LATE:.0%} of the steps. "
        "Curvature and sharpness: training half of the probe set. Weight by the gradient carried: tokens counted by "
        "|c|·‖∇ log π‖/w (local norm). The intervals describe; the claims test."
    )
    return Table(f"{study.slug}pair", caption, rows, (first, second, "difference", "pairs"), stub="quantity")


def _setting_table(study: Study) -> Table | None:
    """Every setting (method, and what else was set) with finished runs; None for fewer than three of them.

    They are held against the baseline's setting with the most seeds; of equally many, the first by label.
    """
    finished = [s for s in study.settings if all(run.status == "finished" for run in s.runs.values())]
    if len(finished) < 3:
        return None
    own = [setting for setting in finished if setting.method == study.baseline]
    ground = max(own, key=lambda setting: len(setting.runs), default=None)  # sorted by label
    if ground is not None:
        finished = [ground, *(setting for setting in finished if setting is not ground)]
    rows = {setting.label: _setting_cells(setting, ground) for setting in finished}
    columns = ("seeds", "steps", *(quantity.name for quantity in SETTING_QUANTITIES))
    against = "" if ground is None else f"held-out less that of {ground.label}"
    if against:
        columns = (*columns, against)
        rows = {label: _renamed(cells, against) for label, cells in rows.items()}
    caption = (
        f"Every setting with finished runs. Study {study.name}, accuracy at temperature {TEMPERATURE:g} at each run's last "
        f"evaluation; late: mean of the last {LATE:.0%} of the steps; clipped: share of tokens, all steps; sharpness: SAM, `nll`, "
        "training half of the probe set, last round; weight by gradient: mean token weight, tokens counted by |c|·‖∇ log π‖/w "
        "(local norm), which is what the weights do to the gradient. Mean and 95 % bootstrap interval over seeds; differences "
        "paired by seed, uncorrected for how many are looked at."
    )
    return Table(f"{study.slug}settings", caption, rows, columns, stub="setting")


def _last_accuracy(split: str, run: Run, *others: Run) -> float | None:
    step = last_step(run, *others, split=split)
    return None if step is None else _accuracy_at(split, step, run)


def _accuracy_at(split: str, step: int, run: Run, *others: Run) -> float | None:
    result = accuracy(run, split, step)
    return None if result is None else result[0]


def _late(column: str, run: Run, *others: Run) -> float | None:
    """Mean of a step quantity over the last LATE of the steps."""
    steps = run.steps.sort_values("step")
    return _mean_known(steps[column].tail(max(1, round(LATE * len(steps)))))


def _geometric(column: str, run: Run, *others: Run) -> float | None:
    """Geometric mean of the positive values of a step quantity."""
    values = run.steps[column]
    mean = _mean_known(np.log(values[values > 0]))
    return None if mean is None else float(np.exp(mean))


def _whole(columns: Sequence[str], run: Run, *others: Run) -> float | None:
    """Mean over all steps of the sum of `columns`."""
    return _mean_known(run.steps[list(columns)].sum(axis=1, skipna=False))


def _mean_known(values: pd.Series) -> float | None:
    known = values.dropna()
    return float(known.mean()) if len(known) else None


def _by_pull(moment: int, run: Run, *others: Run) -> float | None:
    """Mean (`moment` 1) or standard deviation (2) of the token weight, tokens counted by the gradient they carry without it.

    That is |c|·‖∇ log π‖/w with the local norm. A plain mean over tokens is about tokens that carry none: most are near certain.
    """
    return _pull_moments(run)[moment - 1]


@per_run
def _pull_moments(run: Run) -> tuple[float, float]:
    """Mean and standard deviation of the weight by pull, over the recorded tokens that have a norm; NaN without any."""
    if not run.token_steps:
        return float("nan"), float("nan")
    tokens = run.tokens(run.token_steps, ["loss_coef", "score_norm_local", "weight", INCLUSION])
    weight = tokens["weight"].to_numpy(dtype=float)
    pull = tokens["loss_coef"].abs().to_numpy(dtype=float) * tokens["score_norm_local"].to_numpy(dtype=float)
    pull = pull * inverse_inclusion(tokens)
    good = np.isfinite(pull) & (pull > 0) & (weight > 0)
    if not good.any():
        return float("nan"), float("nan")
    weight, carried = weight[good], pull[good] / weight[good]
    mean = float(np.average(weight, weights=carried))
    return mean, float(np.average((weight - mean) ** 2, weights=carried) ** 0.5)


def _probed(quantity: str, functional: str, end: int, run: Run, *others: Run) -> float | None:
    """The first (`end` 0) or last (−1) probed value that converged in the run and in the others."""
    curves = shared_curves([run, *others], quantity, functional)
    shared = set(curves[0].index).intersection(*(curve.index for curve in curves[1:])) if curves else set()
    return float(curves[0][sorted(shared)[end]]) if curves and shared else None


SETTING_QUANTITIES = (
    Quantity("held-out", partial(_last_accuracy, "heldout")),
    Quantity("unseen", partial(_last_accuracy, "unseen")),
    Quantity("training", partial(_last_accuracy, "train")),
    Quantity("late reward", partial(_late, "reward_mean")),
    Quantity("late entropy [nats]", partial(_late, "entropy_mean")),
    Quantity("clipped", partial(_whole, ["clip_fraction_low", "clip_fraction_high"])),
    Quantity("sharpness", partial(_probed, "sam", "nll", -1), 4),
    Quantity("weight by gradient", partial(_by_pull, 1)),
)
PROBED = (("sam", "SAM sharpness", 4), ("largest", "largest eigenvalue", 2), ("trace", "trace of the Hessian", 1))


def _quantities(study: Study, pairing: Pairing) -> Iterator[Quantity]:
    runs = [study.finished[name] for name in pairing.names]
    for split, name in (("heldout", "held-out"), ("train", "training")):
        evaluated = sorted(set.intersection(*(set(evaluations(run, split)) for run in runs)))
        for step in [evaluated[i] for i in sorted({0, len(evaluated) // 2, len(evaluated) - 1})] if evaluated else []:
            yield Quantity(f"{name} accuracy, step {step}", partial(_accuracy_at, split, step))
    yield Quantity("unseen accuracy, last", partial(_last_accuracy, "unseen"))
    yield Quantity("reward, late", partial(_late, "reward_mean"), 2)
    yield Quantity("gradient norm, geometric mean [L2, parameters]", partial(_geometric, "grad_norm"), 4)
    yield Quantity("token entropy, late [nats]", partial(_late, "entropy_mean"), 4)
    yield Quantity("mean token weight", partial(_whole, ["weight_mean"]))
    yield Quantity("token weight by the gradient carried, mean", partial(_by_pull, 1))
    yield Quantity("token weight by the gradient carried, standard deviation", partial(_by_pull, 2))
    yield Quantity("effective sample size of the weights [share]", partial(_whole, ["weight_ess"]))
    yield Quantity("share of tokens clipped", partial(_whole, ["clip_fraction_low", "clip_fraction_high"]), 7)
    functionals = sorted({str(name) for run in runs for name in run.probes["functional"].dropna().unique()})
    for functional in ("nll", *(name for name in functionals if name != "nll")):
        for quantity, name, digits in PROBED:
            for end, when in ((0, "first"), (-1, "last")):
                yield Quantity(f"{name} of {functional}, {when}", partial(_probed, quantity, functional, end), digits)


def _both(measure: Measure, first: Run, second: Run) -> tuple[float | None, float | None]:
    return measure(first, second), measure(second, first)


def _setting_cells(setting: Setting, ground: Setting | None) -> dict[str, Cell | str]:
    steps = {len(run.steps) for run in setting.runs.values()}
    cells: dict[str, Cell | str] = {"seeds": str(len(setting.runs)), "steps": _span(steps)}
    for quantity in SETTING_QUANTITIES:
        values = _finite([quantity.measure(run) for run in setting.runs.values()])
        if len(values):
            cells[quantity.name] = _mean(values, quantity.digits)
    if ground is not None and setting is not ground:
        heldout = SETTING_QUANTITIES[0].measure
        both = [(ground.runs[seed], run) for seed, run in setting.runs.items() if seed in ground.runs]
        pairs = [(heldout(first, second), heldout(second, first)) for first, second in both]
        differences = _finite([None if a is None or b is None else b - a for a, b in pairs])
        if len(differences):
            cells["difference"] = _difference(differences, 3)
    return cells


def _renamed(cells: dict[str, Cell | str], against: str) -> dict[str, Cell | str]:
    return {against if name == "difference" else name: cell for name, cell in cells.items()}


def _finite(values: list[float | None]) -> NDArray[np.float64]:
    result = pd.Series([np.nan if value is None else value for value in values], dtype=float).to_numpy()
    return np.asarray(result[np.isfinite(result)], dtype=np.float64)


def _mean(values: NDArray[np.float64], digits: int) -> Cell:
    return Cell(float(values.mean()), mean_interval(values), len(values), digits)


def _difference(values: NDArray[np.float64], digits: int) -> Cell:
    return Cell(float(values.mean()), contrast_interval(values), len(values), digits, signed=True)


def _span(counts: set[int]) -> str:
    return f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"

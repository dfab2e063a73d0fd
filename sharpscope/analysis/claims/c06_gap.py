"""C6: sharpness predicts the generalization gap, over a declared grid of settings and given the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sharpscope.analysis.claims.base import (
    Claim,
    Condition,
    Confounder,
    Estimate,
    Evidence,
    Finding,
    Rule,
    Sample,
    Verdict,
    picture,
    rows_of,
    unfinished,
)
from sharpscope.analysis.claims.measures import (
    FUNCTIONAL,
    MEASURES,
    UNKNOWN_NOISE,
    gap,
    gap_noise,
    last_step,
    probe_rows,
    reliability,
    shared_curves,
    sharpness_curve,
    unreliable,
)
from sharpscope.analysis.figures.style import COLORS, MARKERS, Picture, finish, panels, styled
from sharpscope.analysis.statistics import (
    Granulated,
    contrast_interval,
    granulated_kendall,
    kendall,
    sign_flip_p,
    smallest_sign_flip_p,
)
from sharpscope.analysis.study import GRID, Study, grid_settings, most_common
from sharpscope.traces import Run

NAME = "C6"
MARGIN = 0.2
HELD = "learning rate"
FLOOR = 0.5
"""Reliability of the gap below which no sharpness can predict it."""
STRATA = "strata (method × seed × learning rate)"
LEAST_SHRINKAGE = 0.05
"""Share of the weights that decay must take off in a run for weight decay to be an axis of the grid."""


def grid_frame(study: Study) -> pd.DataFrame:
    """One row a run of the grid: run, method, seed, its settings, gap, and sharpness by each measure and `largest`.

    Left out: runs that differ in anything else than the grid's settings, method and seed from the greatest such family;
    and a second run of one method, seed and setting, which would count a comparison twice.
    """
    keys = list(GRID.values())
    runs = study.of(study.baseline, study.treatment)
    family = {name: study.setting_key(run, keys) for name, run in runs.items()}
    if not family:
        return pd.DataFrame()
    common = most_common(sorted(family.values()))
    inside = {name: run for name, run in sorted(runs.items()) if family[name] == common}
    measured = {name: run for name, run in inside.items() if all(len(probe_rows(run, q)) for q in MEASURES)}
    # one ruler for all: a radius that every run has, and one probe set
    curves = {q: shared_curves(list(measured.values()), q) for q in MEASURES} if measured else {}
    if not curves or any(result is None for result in curves.values()):
        return pd.DataFrame()
    rows = [
        row
        for key, (name, run) in enumerate(measured.items())
        if (row := _row(study, name, run, {q: result[key] for q, result in curves.items() if result is not None}))
        is not None
    ]
    if not rows:
        return pd.DataFrame()
    frame = pd.DataFrame(rows)
    return frame.drop_duplicates(["method", "seed", *(axis for axis in GRID if axis in frame)], ignore_index=True)


def _row(study: Study, name: str, run: Run, curves: dict[str, pd.Series]) -> dict[str, Any] | None:
    step = last_step(run)
    if step is None:
        return None
    measured = curves | {"largest": sharpness_curve(run, "largest")}
    value = gap(run, step)
    if value is None or not all(len(measured[q]) for q in MEASURES):
        return None
    # of the steps probed, the one nearest to the evaluation
    near = {
        q: float(curve.iloc[int(np.argmin(np.abs(curve.index.to_numpy() - step)))]) if len(curve) else np.nan
        for q, curve in measured.items()
    }
    return {
        "run": name,
        "step": step,
        "method": run.method,
        "seed": run.seed,
        **grid_settings(run),
        "gap": value,
        **near,
    }


def shrinkage(run: Run) -> float:
    """Share of a weight that AdamW's decay takes off over the run, 1 − Π(1 − lr·decay)."""
    decay = grid_settings(run).get("weight decay", 0.0)
    total = float((run.steps["lr"] * run.steps["updates"]).sum()) * decay
    return 1 - math.exp(-total)


def granulated(frame: pd.DataFrame, quantity: str, axes: list[str], held: list[str]) -> Granulated | None:
    """Granulated Kendall coefficient of sharpness and gap over `axes`, runs compared within equal `held` only."""
    return granulated_kendall(
        frame[quantity].to_numpy(),
        frame["gap"].to_numpy(),
        {axis: frame[axis].tolist() for axis in axes},
        list(frame[["method", "seed", *held]].itertuples(index=False, name=None)),
    )


def _axes(study: Study, frame: pd.DataFrame) -> tuple[list[str], list[str], str]:
    """Settings that vary, those of them that are axes of the grid, and why weight decay is none, if it is not."""
    varied = [axis for axis in GRID if axis in frame and frame[axis].nunique() > 1]
    shrunk = max((shrinkage(study.finished[name]) for name in frame["run"]), default=0.0)
    axes = [axis for axis in varied if axis != HELD]
    if "weight decay" not in axes or shrunk >= LEAST_SHRINKAGE:
        return varied, axes, ""
    axes.remove("weight decay")
    return varied, axes, f"; weight decay takes off at most {shrunk:.1%} of a weight, too little for an axis"


def test(study: Study) -> Finding:
    """Ψ of adaptive sharpness and gap over group size and weight decay, at fixed learning rate, method and seed."""
    frame = grid_frame(study)
    if not len(frame):
        return Finding(
            missing=f"no run has a gap and sam and asam sharpness of {FUNCTIONAL}, at a radius and on a probe set that all share"
        )
    varied, axes, why = _axes(study, frame)
    if not axes:
        return Finding(
            missing=f"no grid: the runs vary {', '.join(varied) or 'no setting'}{why}; group size or weight decay "
            "must vary at a fixed learning rate"
        )
    held = [name for name in varied if name not in axes]
    # Runs that no other run can be compared with (more seeds of one setting, other learning rates) are not in the grid.
    alone = frame.groupby(["method", "seed", *held])["run"].transform("size") == 1
    frame = frame[~alone].reset_index(drop=True)
    result = {q: granulated(frame, q, axes, held) for q in MEASURES}
    main = result["asam"]
    if main is None:
        return Finding(missing="no two runs of the grid differ in one setting alone")
    noise = [gap_noise(study.finished[row["run"]], int(row["step"])) for _, row in frame.iterrows()]
    if any(value is None for value in noise):
        return Finding(missing=UNKNOWN_NOISE, frames={"grid": frame})
    known = np.array(noise, dtype=float)
    strata = list(frame[["method", "seed", *held]].itertuples(index=False, name=None))
    reliable = reliability(frame["gap"].to_numpy(), known, strata)
    if reliable < FLOOR:
        return Finding(
            missing=unreliable(reliable, FLOOR, frame["gap"].to_numpy(), known) + why, frames={"grid": frame}
        )
    per_stratum = max(1, round(len(frame) / len(main.strata)))
    margin = study.terms.margin(NAME, MARGIN)
    return Finding(
        effect=_estimate("Ψ of adaptive sharpness and gap", main, ""),
        n=len(frame),
        evidence=Evidence(
            main.p_value,
            main.value > 0,
            sign_flip_p(main.strata, "less", shift=margin),
            main.smallest_p,
            smallest_sign_flip_p(len(main.strata), "less"),
        ),
        conditions=tuple(Condition(f"τ over {a} alone is not negative", v >= 0) for a, v in main.axes.items()),
        confounders=(
            Confounder("learning rate", "held fixed: runs are compared, and permuted, within one learning rate"),
            Confounder("group size, weight decay", "granulated: each τ compares runs that differ in one setting alone"),
            Confounder("method and seed", "held fixed in each comparison"),
            Confounder("a gap of noise", f"its reliability within strata must reach {FLOOR:g}; here {reliable:.2f}"),
            Confounder("scale of the weights", "adaptive sharpness; the plain one is beside it"),
        ),
        others=_others(frame, result, main, varied, held),
        rows=rows_of(frame["run"], "probes", ("step", "value", "rho"), f"functional {FUNCTIONAL}; sam, asam; train")
        + rows_of(frame["run"], "eval", ("step", "accuracy", "n"), "split heldout and train, temperature 1"),
        notes=(
            f"{main.pairs} compared pairs in {len(main.strata)} strata; axes: {', '.join(axes)}{why}",
            *unfinished(study),
        ),
        frames={"grid": frame},
        samples=(
            Sample(
                "Ψ of each stratum",
                main.strata,
                tuple(range(len(main.strata))),
                "higher",
                margin,
                runs=per_stratum,
                unit=STRATA,
            ),
        ),
    )


def _others(
    frame: pd.DataFrame, result: Mapping[str, Granulated | None], main: Granulated, varied: list[str], held: list[str]
) -> tuple[Estimate, ...]:
    """The other measures, each axis alone, and coefficients that do not hold the learning rate."""
    others = [
        _estimate(f"Ψ of {q}", g, "given the learning rate") for q, g in result.items() if q != "asam" and g is not None
    ]
    for axis, value in main.axes.items():
        others.append(Estimate(f"τ over {axis} alone", value, "Kendall τ"))
    if held:
        whole = granulated(frame, "asam", varied, [])
        if whole is not None:
            others.append(
                _estimate("Ψ with the learning rate as an axis", whole, "includes what the learning rate causes")
            )
    raw = kendall(frame["asam"].to_numpy(), frame["gap"].to_numpy())
    others.append(
        Estimate("plain Kendall τ over all runs", raw, "Kendall τ", n=len(frame), note="includes any common cause")
    )
    return tuple(others)


def _estimate(name: str, result: Granulated, note: str) -> Estimate:
    interval = contrast_interval(result.strata)
    return Estimate(name, result.value, "granulated Kendall τ", interval, result.p_value, result.pairs, note)


def gap_against_sharpness(grid: pd.DataFrame, quantity: str = "asam") -> Figure:
    """Generalization gap against sharpness (C6).

    Color: learning rate; marker: group size; hollow: more than the least decay; lines join cells that differ in decay only.

    `grid`: gap, the sharpness `quantity`, method, seed, and the grid's settings.
    """
    shorts = (("learning rate", "lr"), ("group size", "G"), ("weight decay", "decay"))
    named = {axis: short for axis, short in shorts if axis in grid}
    keys = {axis: sorted(grid[axis].unique()) for axis in named}
    with styled():
        figure, axes = panels(1, height=3.2)
        for values, rows in grid.groupby(list(named)) if named else [((), grid)]:
            at = dict(zip(named, values, strict=True))
            color, marker = (
                looks[keys[axis].index(at[axis]) % len(looks)] if axis in at else looks[0]
                for axis, looks in (("learning rate", COLORS), ("group size", MARKERS))
            )
            label = ", ".join(f"{named[axis]} {value:g}" for axis, value in at.items())
            fill: Literal["full", "none"] = (
                "none" if at.get("weight decay", 0) != keys.get("weight decay", [0])[0] else "full"
            )
            axes[0].plot(
                rows[quantity], rows["gap"], linestyle="none", marker=marker, color=color, label=label, fillstyle=fill
            )
            if "weight decay" not in at or fill == "none":
                continue  # a line for each, not for each of its ends
            rest = [axis for axis in at if axis != "weight decay"]
            alike = grid[(grid[rest] == rows[rest].iloc[0]).all(axis=1)] if rest else grid
            for _, same in alike.groupby(["method", "seed"]):
                ordered = same.sort_values("weight decay")
                axes[0].plot(ordered[quantity], ordered["gap"], color=color, linewidth=0.6, alpha=0.6)
        if (grid[quantity] > 0).all():
            axes[0].set_xscale("log")
        axes[0].set(xlabel=f"sharpness ({quantity}) [nats]", ylabel="training − held-out accuracy [share]")
        finish(figure, axes)
    return figure


def draw(verdict: Verdict, study: Study) -> Iterator[Picture]:
    """Gap against sharpness."""
    caption = "Generalization gap against adaptive sharpness over the grid"
    yield picture(verdict, "grid", "gap_against_sharpness", caption, gap_against_sharpness)


CLAIM = Claim(
    NAME,
    "sharpness predicts the generalization gap",
    "flat minima; tested after arXiv 1912.02178",
    Rule(
        "supported: the granulated Kendall coefficient of adaptive sharpness and gap at fixed learning rate is above 0 "
        "(permutation of the gap within learning rate, method and seed) and no axis alone is negative; refuted: it is "
        f"shown to be below {{margin}} (sign-flip test over strata); untestable where the gap's reliability is below {FLOOR:g}",
        "runs of the grid",
        8,
        MARGIN,
    ),
    "a grid learning rate × group size × weight decay with perturbation probes, of at least 5 strata (methods × seeds × learning "
    "rates), evaluated with enough answers for the gap to be reliable",
    test,
    draw=draw,
)

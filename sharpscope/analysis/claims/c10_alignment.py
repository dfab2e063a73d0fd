"""C10: alignment with probability is what matters: the treatment against its controls and a learning-rate sweep."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sharpscope.analysis.claims.base import (
    FINISHED_ONLY,
    PAIRED_BY_SEED,
    SAME_SETTINGS,
    Claim,
    Condition,
    Confounder,
    Finding,
    Rule,
    Verdict,
    difference_estimate,
    directional,
    every,
    picture,
    present,
    rows_of,
    unfinished,
)
from sharpscope.analysis.claims.c07_generalization import at_last_step, held_out
from sharpscope.analysis.claims.measures import last_step
from sharpscope.analysis.figures.draw import draw_points, t_interval
from sharpscope.analysis.figures.style import BLUE, GRAY, WIDTH, Picture, finish, panels, plain, styled
from sharpscope.analysis.statistics import contrast_interval
from sharpscope.analysis.study import GRID, Pair, Pairing, Study, grid_settings, most_common
from sharpscope.config.token_weights import PAPER_SIGMOID

NAME = "C10"
_CONSTANT = re.compile(r"weight\.(?:of\.)?(\w+)=(-?[0-9.]+(?:e-?[0-9]+)?)")
MARGIN = 0.02
MINIMUM = 7  # seeds of every rival
CONTROLS = {
    "shuffled": "the same weights, without their alignment with probability",
    "constant": "the same mean weight on every token",
    "reverse": "the weights reversed",
    "entropy": "weights that follow the position's entropy instead",
}


def sweep_pairings(study: Study) -> dict[float, Pairing]:
    """Learning rate → pairs of the treatment with the baseline at that other learning rate, all else equal."""
    rate = (GRID["learning rate"],)
    treated = study.of(study.treatment)
    if not treated:
        return {}
    main = most_common(sorted(study.setting_key(run) for run in treated.values()))
    inside = {name: run for name, run in sorted(treated.items()) if study.setting_key(run) == main}
    ground = study.setting_key(next(iter(inside.values())), rate)
    own = grid_settings(next(iter(inside.values()))).get("learning rate")
    by_seed = {run.seed: name for name, run in reversed(inside.items())}
    found: dict[float, list[Pair]] = {}
    seen: set[tuple[float, Any]] = set()
    for name, run in sorted(study.of(study.baseline).items()):
        other = grid_settings(run).get("learning rate")
        if other is None or other == own or study.setting_key(run, rate) != ground or run.seed not in by_seed:
            continue
        if (other, run.seed) not in seen:
            seen.add((other, run.seed))
            found.setdefault(other, []).append(Pair(run.seed, name, by_seed[run.seed]))
    return {value: Pairing(tuple(pairs)) for value, pairs in sorted(found.items())}


def comparisons(study: Study) -> dict[str, pd.DataFrame]:
    """Rival → seed, baseline (the rival's held-out accuracy), treatment, difference."""
    found = {}
    for suffix in CONTROLS:
        rival = f"{study.treatment}-{suffix}"
        found[rival] = at_last_step(study, study.pairing(baseline=rival), held_out)
    for value, pairing in sweep_pairings(study).items():
        found[f"{study.baseline} at lr {value:g}"] = at_last_step(study, pairing, held_out)
    return found


def test(study: Study) -> Finding:
    """Held-out accuracy of the treatment minus that of its strongest rival; it must beat every one."""
    frames = comparisons(study)
    controls = [f"{study.treatment}-{suffix}" for suffix in CONTROLS]
    lacking = [name for name in controls if not len(frames[name])]
    compared = {name: frame for name, frame in frames.items() if len(frame)}
    rivals, aside = _rivals(compared, controls)
    others = present(*(difference_estimate(f"against {name}", frame, UNIT) for name, frame in compared.items()))
    if lacking:
        return Finding(
            missing=f"no run of {', '.join(lacking)} that pairs with one of {study.treatment}", others=others
        )
    evidence = {name: directional(frame["difference"].to_numpy(), "higher", MARGIN) for name, frame in rivals.items()}
    # the rival that the treatment is least shown to beat: by direction first, then by p
    strongest = max(evidence, key=lambda name: (not evidence[name].as_claimed, evidence[name].p_supported))
    swept = [name for name in rivals if name not in controls]
    first = study.pairing(baseline=controls[0])
    names = {name for rival in controls for name in study.pairing(baseline=rival).names}
    return Finding(
        effect=difference_estimate(f"difference of held-out accuracy against {strongest}", compared[strongest], UNIT),
        n=min(len(frame) for frame in rivals.values()),
        evidence=every(evidence.values()),
        conditions=(Condition(f"{study.baseline} was run at other learning rates too", bool(swept)),),
        confounders=(
            Confounder(
                "size of the weights", "constant weights of the same mean, and a learning-rate sweep of the baseline"
            ),
            Confounder("spread of the weights", "the same weights shuffled over the tokens of each completion"),
            Confounder("entropy in place of probability", "weights that follow entropy"),
            Confounder(
                "best of many rivals", "every rival must be beaten: the largest p counts, so none is selected by chance"
            ),
            PAIRED_BY_SEED,
            SAME_SETTINGS,
            FINISHED_ONLY,
        ),
        others=others,
        rows=rows_of(
            sorted(names), "eval", ("step", "accuracy", "n"), "split heldout, temperature 1, last shared step"
        ),
        notes=(
            f"{study.treatment} at {first.setting or 'one setting'} against {len(controls)} controls and "
            f"{len(swept)} other learning rates",
            *(
                f"{name} has {len(frame)} seeds, too few for the rule: shown, not a rival"
                for name, frame in aside.items()
            ),
            *unfinished(study),
        ),
        frames={"comparisons": pd.concat([f.assign(rival=name) for name, f in compared.items()], ignore_index=True)},
    )


def _rivals(
    compared: dict[str, pd.DataFrame], controls: list[str]
) -> tuple[dict[str, pd.DataFrame], dict[str, pd.DataFrame]]:
    """Comparisons that the rule uses, and comparisons that are only shown.

    A learning rate with fewer than MINIMUM seeds (from a grid made for another purpose, say) cannot be tested; it is set
    aside if another one has enough seeds. If none has, all are used, and their number of seeds decides.
    """
    swept = [name for name in compared if name not in controls]
    enough = [name for name in swept if len(compared[name]) >= MINIMUM]
    aside = {name: compared[name] for name in swept if enough and name not in enough}
    return {name: frame for name, frame in compared.items() if name not in aside}, aside


UNIT = "share of completions, treatment − rival"


def shaping_ablation(comparisons: pd.DataFrame) -> Figure:
    """Held-out accuracy of the treatment minus that of each control and rival, with 95 % intervals over seeds (C10).

    `comparisons`: rival, seed, difference.
    """
    names = list(dict.fromkeys(comparisons["rival"]))
    with styled():
        figure, (axis,) = panels(1, height=0.4 + 0.25 * len(names))
        figure.set_figwidth(WIDTH)
        axis.axvline(0, color=GRAY, linewidth=0.8)
        draw_points(axis, comparisons, BLUE, x="difference", y="rival", order=names, interval=_contrast)
        axis.set_yticks(range(len(names)), [plain(name) for name in names])
        axis.set(xlabel="held-out accuracy, treatment − rival [share of completions]", ylabel="")
        finish(figure, [axis])
    return figure


def _contrast(values: Any) -> tuple[float, float]:
    interval = contrast_interval(np.asarray(values, dtype=float))
    return (np.nan, np.nan) if interval is None else (interval.low, interval.high)


def constants_sensitivity(values: pd.DataFrame) -> Figure:
    """Held-out accuracy against each constant of the shaping, all others as they are; bands over seeds.

    `values`: constant, setting (a number), seed, accuracy; the method's own setting is marked by `default` = True.
    """
    import seaborn as sns

    names = sorted(values["constant"].unique())
    with styled():
        figure, axes = panels(len(names), columns=3)
        for axis, name in zip(axes, names, strict=True):
            rows = values[values["constant"] == name]
            look = {"color": BLUE, "markersize": 4, "capsize": 0.1, "native_scale": True}
            sns.pointplot(rows, x="setting", y="accuracy", ax=axis, errorbar=t_interval, **look)
            for own in rows.loc[rows["default"], "setting"].unique():
                axis.axvline(own, color=GRAY, linewidth=0.8, linestyle="--")
            axis.set(xlabel=plain(name), ylabel="held-out accuracy [share]")
        finish(figure, axes)
    return figure


def constants_frame(study: Study) -> pd.DataFrame:
    """constant, setting, seed, accuracy (held-out, last evaluation), default; from labels such as grpo-sg+weight.tau=4.

    Runs that change one constant alone, and the method's own runs at each constant's default, where it has one.
    """
    rows = []
    for run in study.alike(*study.methods).values():
        step = last_step(run)
        accuracy = None if step is None else held_out(run, step)
        if accuracy is None:
            continue
        if run.method == study.treatment:
            rows += [(name, value, run.seed, accuracy, True) for name, value in PAPER_SIGMOID.items()]
        else:
            match = _CONSTANT.fullmatch(run.method.removeprefix(f"{study.treatment}+"))
            if match is not None and run.method.startswith(f"{study.treatment}+"):
                rows.append((match[1], float(match[2]), run.seed, accuracy, False))
    frame = pd.DataFrame(rows, columns=["constant", "setting", "seed", "accuracy", "default"])
    varied = frame.loc[~frame["default"].astype(bool), "constant"].unique()
    return frame[frame["constant"].isin(varied)].astype({"default": bool})


def draw(verdict: Verdict, study: Study) -> Iterator[Picture]:
    """Differences from every rival, and accuracy against each constant of the token weight."""
    caption = "Held-out accuracy against each control and rival, paired by seed"
    yield picture(verdict, "comparisons", "shaping_ablation", caption, shaping_ablation)
    frame, name = constants_frame(study), "constants_sensitivity"
    if len(frame):
        caption = "Held-out accuracy against each constant of the token weight; dashed: the published one."
        yield Picture(name, caption, constants_sensitivity(frame), claim=NAME)
    else:
        missing = f"constants: no run such as {study.treatment}+weight.tau=4 was evaluated"
        yield Picture(name, "", missing=missing, claim=NAME)


CLAIM = Claim(
    NAME,
    "alignment with probability is what matters",
    "arXiv 2511.00066 (its reversed weights do worse); the other controls are this project's",
    "primary",
    Rule(
        "supported: held-out accuracy is higher than with shuffled, constant, reversed and entropy-aligned "
        "weights and than the baseline at every other learning rate tried (the largest of the sign-flip p-values over "
        f"seeds; a rate with fewer than {MINIMUM} seeds counts only if none has as many); "
        f"refuted: it is shown to be higher than one of them by less than {MARGIN:g}",
        "pairs of runs with one seed, fewest over the rivals",
        MINIMUM,
        MARGIN,
    ),
    f"at least {MINIMUM} seeds of every control and of the baseline at two other learning rates",
    test,
    draw=draw,
)

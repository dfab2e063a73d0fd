"""Measures of a model in passes over it: norms, shares, effects, SAM sharpness, Hessian products; how they grow."""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import torch

from experiments.benchmarks.common import (
    SHAPES,
    Row,
    costs,
    described,
    model_of,
    peak,
    plain_forward,
    plain_gradient,
    random_model,
    random_rows,
    ratios,
    seconds,
)
from experiments.benchmarks.large import STEP_ROWS, write_large
from sharpscope.recording.schedule import ALL_EFFECTS, TRAINING
from sharpscope.surface import Objective, lm_surface, sharpness
from sharpscope.surface.language_model import token_batch
from sharpscope.tokens import Outcome, attribute, logp_gradient, score_norms
from sharpscope.tokens import effects as token_effects


def norms(model_name: str, repeats: int, length: int) -> list[Row]:
    """Local norms of all tokens of a row in forward and backward passes, and memory above weights and gradient."""
    model = model_of(model_name)
    ids, mask = random_rows(model, 1, length)
    gradient = plain_gradient(model, ids)
    gradient()  # allocates the gradient, which then counts as held
    score_norms(model, ids[:, :16], mask[:, :16])  # the self-check
    found = costs({"pass": gradient, "norms": lambda: score_norms(model, ids, mask)}, repeats)
    extra, plain = (
        peak(work) / 2**30 for work in (lambda: score_norms(model, ids, mask), gradient)
    )
    note = f"{length} tokens, {seconds(found['norms'])}; {described(model)}"
    return [
        Row.of_turns(
            "local norms of all tokens, forward and backward passes",
            ratios(found["norms"], found["pass"]),
            "passes",
            "≤ 0.9",
            "≤ 0.6",
            note,
        ),
        Row(
            "their memory above weights and gradient",
            extra,
            "GiB",
            "≤ 0.7",
            "",
            f"{note}; the pass {plain:.2f} GiB",
        ),
    ]


def exact(model_name: str, repeats: int, rows: int, length: int, tokens: int = 8) -> list[Row]:
    """Exact norms of all tokens against a loop of `autograd.grad` over a kept graph, which is timed on some tokens of a row."""
    model = model_of(model_name)
    ids, mask = random_rows(model, rows, length)
    places = torch.linspace(1, length - 1, tokens).long()
    parameters = [p for p in model.parameters() if p.requires_grad]

    def loop() -> None:
        logp = model(input_ids=ids[:1], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        for place in places.tolist():
            one = logp[place - 1, ids[0, place]]
            gradients = torch.autograd.grad(one, parameters, retain_graph=True)
            float(torch.stack([g.square().sum() for g in gradients]).sum())

    found = costs({"loop": loop, "exact": lambda: score_norms(model, ids, mask, "exact")}, repeats)
    turns = [ratio * int(mask.sum()) / tokens for ratio in ratios(found["loop"], found["exact"])]
    size = f"{rows} × {length} tokens, {seconds(found['exact'])}"
    note = f"{size}, the loop timed on {tokens}; {described(model)}"
    what = "exact norms of all tokens, speed of a loop"
    return [Row.of_turns(what, turns, "×", "≥ 2.5", "", note)]


def shares(model_name: str, repeats: int, rows: int, length: int) -> list[Row]:
    """Shares of one update beyond its gradient, in forward passes."""
    model = model_of(model_name)
    ids, mask = random_rows(model, rows, length)
    coef = mask.float()
    works: dict[str, Callable[[], object]] = {
        "forward": plain_forward(model, ids),
        "gradient": lambda: logp_gradient(model, ids, mask, coef),
        "shares": lambda: attribute(model, ids, mask, coef),
    }
    found = costs(works, repeats)
    whole, gradient = (ratios(found[name], found["forward"]) for name in ("shares", "gradient"))
    turns = [one - other for one, other in zip(whole, gradient, strict=True)]
    note = f"{rows} × {length} tokens, with the gradient {seconds(found['shares'])}"
    what = "shares of one update beyond the gradient, forward passes"
    return [Row.of_turns(what, turns, "passes", "≤ 2.5", "≤ 2.1", f"{note}; {described(model)}")]


OUTCOMES = ("kl", "entropy", "heldout", "sharpness")
"""Outcomes of the row `effects`: the first one, the first two, and all."""


def effects(model_name: str, repeats: int, rows: int, length: int) -> list[Row]:
    """Effects of all tokens of an AdamW update on one, two and four outcomes, in forward and backward passes over its rows.

    The update's gradient is at hand, as it is in a training; the outcomes `heldout` and `sharpness` have as many rows of their own.
    """
    model = model_of(model_name)
    ids, mask = random_rows(model, rows, length)
    gradient = plain_gradient(model, ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    gradient()
    optimizer.step()  # from here on it has its moments
    optimizer.zero_grad()
    gradient()
    held = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    coef = -mask / mask.sum()
    others = [
        dict(zip(("input_ids", "mask"), random_rows(model, rows, length, s), strict=True))
        for s in (1, 2)
    ]
    own = {"heldout": others[0], "sharpness": others[1]}
    outcomes = {kind: Outcome(kind=kind, **own.get(kind, {})) for kind in OUTCOMES}

    def of(count: int) -> Callable[[], object]:
        chosen = {kind: outcomes[kind] for kind in OUTCOMES[:count]}
        return lambda: token_effects(
            model, ids, mask, coef, optimizer, chosen, gradient=held, check="off"
        )

    counts = (1, 2, 4)
    found = costs({"pass": gradient} | {str(count): of(count) for count in counts}, repeats)
    made = []
    for count in counts:
        what = f"effects on {', '.join(OUTCOMES[:count])}, forward and backward passes"
        note = f"{rows} × {length} tokens, {seconds(found[str(count)])}; {described(model)}"
        limit = f"≤ {ALL_EFFECTS // TRAINING}" if count == len(OUTCOMES) else ""
        turns = ratios(found[str(count)], found["pass"])
        made.append(Row.of_turns(what, turns, "passes", limit, "", note))
    return made


def surface(model_name: str, repeats: int, prompts: int, length: int) -> list[Row]:
    """SAM with a standard error over prompts, and a Hessian product of nll, in gradients of the same rows."""
    model = model_of(model_name)
    ids, mask = random_rows(model, prompts, length)
    gradient = plain_gradient(model, ids)
    objective = Objective("nll", token_batch(ids, torch.ones_like(ids), mask))
    note = f"{prompts} prompts × {length} tokens; {described(model)}"
    rows = []
    with lm_surface(model, objective, check="off") as measured:

        def sam() -> None:
            loss, slope, base = measured.gradient_by_prompt()
            found = sharpness(measured, None, 0.05, "sam", at=(loss, slope), base=base)
            assert found.by_prompt is not None

        with torch.enable_grad():
            found = costs({"gradient": gradient, "sam": sam}, repeats)
        rows.append(
            Row.of_turns(
                "SAM with a standard error, forward and backward passes",
                ratios(found["sam"], found["gradient"]),
                "passes",
                "≤ 4",
                "≤ 3",
                note,
            )
        )
        few = objective.rows(torch.arange(min(8, prompts)))
    with lm_surface(model, few, check="off") as measured:
        vector = torch.randn(sum(p.numel() for p in measured.parameters))
        hessian = measured.hessian()
        works = {
            "gradient": plain_gradient(model, ids[: len(few.batch)]),
            "product": lambda: hessian @ vector,
        }
        found = costs(works, repeats)
    extra = max(one.extra for one in found["product"]) / 2**30
    note = f"{len(few.batch)} prompts; {extra:.2f} GiB above what is held"
    passes = ratios(found["product"], found["gradient"])
    what = "a Hessian product of nll, in gradients"
    return [*rows, Row.of_turns(what, passes, "gradients", "≤ 3.5", "≤ 2.5", note)]


LIMITS = {
    "length": 2.0,
    "batch": 1.1,
    "width": 2.0,
    "vocabulary": 1.1,
    "layers": 1.1,
    "runs": 1.1,
    "rows of one run": 1.1,
}
"""Axis -> the greatest allowed slope of log(seconds) over log(size)."""
FITTED = 4
"""Sizes of a slope, the largest ones."""
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "0.9m": {
        "length": (64, 128, 256, 512, 1024),
        "batch": (2, 4, 8, 16, 32),
        "width": (64, 128, 256, 512),
        "vocabulary": (624, 2_496, 9_984, 39_936),
        "layers": (2, 4, 8, 16),
        "runs": (2, 4, 8, 16),
        "rows of one run": (20_000, 80_000, 320_000, 1_280_000),
    },
    "135m": {
        "length": (32, 64, 128, 256),
        "batch": (1, 2, 4, 8),
        "width": (72, 144, 288, 576),
        "vocabulary": (768, 3_072, 12_288, 49_152),
        "layers": (4, 8, 15, 30),
    },
    "0.5b": {
        "length": (16, 32, 64, 128),
        "batch": (1, 2, 4, 8),
        "width": (112, 224, 448, 896),
        "vocabulary": (2_374, 9_496, 37_984, 151_936),
        "layers": (3, 6, 12, 24),
    },
}
"""Shape -> the sizes of each axis; the others are those of the shape, with two rows of 128 tokens, or one of 64."""


def growth(
    repeats: int, axes: list[str], shapes: list[str], out: Path | None, small: bool = False
) -> list[Row]:
    """Slopes of processor time over each axis, one of each repetition at the largest sizes; `out`: one figure of all."""
    curves: dict[tuple[str, str, str], list[list[float]]] = {}  # sizes of repetitions
    for base, axis in ((base, axis) for base in shapes for axis in axes if axis in SIZES[base]):
        for size in SIZES[base][axis][: 2 if small else None]:
            with tempfile.TemporaryDirectory() as folder:
                for name, found in costs(_works(base, axis, size, folder), repeats).items():
                    each = [one.cpu for one in found]
                    curves.setdefault((base, axis, name), []).append(each)
                    said = f"{base} {axis} {size} {name}: {seconds(found)}"
                    print(said, file=sys.stderr, flush=True)
    if out is not None:
        _picture({key: np.median(values, axis=1) for key, values in curves.items()}, out)
    rows = []
    for (base, axis, name), values in curves.items():
        sizes = SIZES[base][axis][: len(values)][-FITTED:]
        times = np.array(values[-FITTED:])
        slopes = np.polyfit(np.log(sizes), np.log(times), 1)[0].tolist()
        note = f"{sizes[0]:,} to {sizes[-1]:,}: {np.median(times[0]):.3g} to {np.median(times[-1]):.3g} s"
        what = f"{base}: growth of {name} with {axis}"
        rows.append(Row.of_turns(what, slopes, "(slope)", f"≤ {LIMITS[axis]:g}", "", note))
    return rows


def _works(base: str, axis: str, size: int, folder: str) -> dict[str, Callable[[], object]]:
    if axis in ("runs", "rows of one run"):
        source = next(path.parent for path in Path("data/example").rglob("run.json"))
        for number in range(size if axis == "runs" else 0):
            shutil.copytree(source, Path(folder) / "runs" / f"run-{number}")
        if axis != "runs":
            write_large(Path(folder) / "runs", size, min(size, STEP_ROWS))
        return {"analyze": lambda: _analyze(folder)}
    shape, tiny = dict(SHAPES[base]), base == "0.9m"
    if axis in shape:
        shape[axis] = size
    if axis == "width":
        shape["feed_forward"] = SHAPES[base]["feed_forward"] * size // SHAPES[base]["width"]
    model = random_model(shape)
    rows, length = (
        size if axis == "batch" else 1 + tiny,
        size if axis == "length" else 64 * (1 + tiny),
    )
    ids, mask = random_rows(model, rows, length)
    few = torch.zeros_like(ids)
    few[:, torch.linspace(1, length - 1, 8 if tiny else 2).long()] = 1
    return {
        "forward and backward": plain_gradient(model, ids, rows),
        "local norms": lambda: score_norms(model, ids, mask),
        "exact norms of some tokens": lambda: score_norms(model, ids, few, "exact"),
        "shares": lambda: attribute(model, ids, mask, mask.float()),
    }


def _analyze(folder: str) -> None:
    """`analyze` of the runs in a folder, in this process, to a new page.

    They are linked under a new path each time: what was read of a file is kept by its path.
    """
    from sharpscope.cli import main

    with tempfile.TemporaryDirectory() as place, redirect_stdout(io.StringIO()):
        shutil.copytree(f"{folder}/runs", f"{place}/runs", copy_function=os.link)
        try:
            main(["analyze", f"{place}/runs", "--out", f"{place}/page"])
        except SystemExit as end:
            if not end.code:
                return
        raise RuntimeError("analyze did not end, or not well")


def _picture(curves: dict[tuple[str, str, str], np.ndarray], out: Path) -> None:
    """A panel for each shape and axis: processor seconds over size."""
    from matplotlib.figure import Figure

    bases, axes = (list(dict.fromkeys(key[at] for key in curves)) for at in (0, 1))
    figure = Figure(figsize=(2.6 * len(axes), 2.4 * len(bases)), layout="constrained")
    panels = figure.subplots(len(bases), len(axes), squeeze=False)
    for panel in panels.flat:
        panel.set_axis_off()
    for (base, axis, name), values in curves.items():
        panel = panels[bases.index(base)][axes.index(axis)]
        panel.set_axis_on()
        panel.loglog(SIZES[base][axis][: len(values)], values, marker="o", label=name)
        panel.set(xlabel=axis, title=f"{base} parameters")
        shown = SIZES[base][axis]
        panel.set_xticks(
            shown,
            [
                f"{size:,}"
                if size < 10_000
                else f"{size // 1000}k"
                if size < 10**6
                else f"{size / 1e6:.3g}M"
                for size in shown
            ],
            fontsize=7,
        )
        panel.minorticks_off()
    for row in panels:
        row[0].set_ylabel("processor time [s]")
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names))
    figure.savefig(out, dpi=150)

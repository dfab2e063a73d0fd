"""The curvature benchmark as files: the numbers of every part measured so far, and a table with each setting."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

PARTS = ("product", "rounds", "eigenvalue", "trace", "memory")
SEEDS = 4  # of the eigenvalue on each batch
LAYERS = (2, 24)  # of the memory rows; 24 is Qwen2.5-0.5B itself
HEADING = ("| | ours | peer | ratio | required | hope |", "|---|---|---|---|---|---|")


def measure(part: str) -> dict[str, Any]:
    """One part, with the day, the threads and torch's version."""
    import torch

    from experiments.benchmarks import curvature
    from experiments.benchmarks.curvature_memory import peak_memory
    from experiments.benchmarks.probe_rounds import probe_rounds

    measured: dict[str, Callable[[], Any]] = {
        "eigenvalue": lambda: [curvature.eigenvalue(batch, SEEDS) for batch in curvature.BATCHES],
        "trace": curvature.trace,
        "product": curvature.product,
        "memory": lambda: [peak_memory(layers=layers) for layers in LAYERS],
        "rounds": probe_rounds,
    }
    began = time.perf_counter()
    found = measured[part]()
    return {
        "found": found,
        "day": date.today().isoformat(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "seconds": time.perf_counter() - began,
    }


def write(found: Mapping[str, Any], folder: Path) -> tuple[Path, Path]:
    """Put the parts into curvature.json, beside those that an earlier call left there, and write curvature.md from all."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers, text = folder / "curvature.json", folder / "curvature.md"
    known = json.loads(numbers.read_text(encoding="utf-8")) if numbers.is_file() else {}
    merged = {part: (known | dict(found))[part] for part in PARTS if part in known or part in found}
    numbers.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
    text.write_text(table(merged), encoding="utf-8")
    return text, numbers


def table(found: Mapping[str, Any]) -> str:
    """The table as Markdown, with every setting; parts that were not measured are named."""
    values = {part: found[part]["found"] for part in PARTS if part in found}
    rows = [line for part, lines in _ROWS.items() if part in values for line in lines(values[part])]
    missing = [part for part in PARTS if part not in found]
    text = ["# Curvature: cost against PyHessian and curvlinops", "", *_settings(found), ""]
    text += [*HEADING, *rows, ""]
    text += [f"Not measured: {', '.join(missing)}.", ""] if missing else []
    text += ["GPU numbers are missing: everything here was measured on a CPU.", ""]
    for part, lines in _NOTES.items():
        if part in values:
            text += [*lines(values[part]), ""]
    return "\n".join(text).rstrip() + "\n"


def _settings(found: Mapping[str, Any]) -> list[str]:
    when = [
        f"{part} {one['day']}, {one['threads']} threads, torch {one['torch']}, {one['seconds']:.0f} s"
        for part, one in found.items()
    ]
    return [
        "`python -m experiments.benchmarks curvature` writes this page. Policy: embedded Knights-and-Knaves one, float32, objective `nll` of",
        "completions that it drew itself. PyHessian 0.1 at its defaults (maxIter = 100, tol = 1e-3).",
        f"Measured: {'; '.join(when)}.",
    ]


def _eigenvalues(found: list[dict[str, Any]]) -> list[str]:
    groups = _by_batch(found)
    what = "Hessian products for the top eigenvalue at PyHessian's error: "
    rows = [*_eigenvalue(f"{what}{_runs(found)}", found, "≤ 0.5 | ≤ 0.25")] if len(found) > 1 else []
    for draws in groups:
        name = _batches(draws) if rows else f"{what}{_batches(draws)}"
        rows += _eigenvalue(name, draws, " | " if rows else "≤ 0.5 | ≤ 0.25")
    return rows


def _eigenvalue(what: str, found: list[dict[str, Any]], targets: str) -> list[str]:
    """The row of some batches' runs together, and the same with gradients."""
    runs = {side: [run for one in found for run in one[side]] for side in ("ours", "pyhessian")}
    ours, peer = (
        {what: statistics.mean(run[what] for run in runs[side]) for what in ("products", "gradients")}
        for side in ("ours", "pyhessian")
    )
    errors = [statistics.median(run["error"] for run in runs[side]) for side in ("ours", "pyhessian")]
    whole = [side["products"] + side["gradients"] / 2 for side in (ours, peer)]
    name = f"{what}; median relative errors {errors[0]:.1e} and {errors[1]:.1e}"
    with_gradients = (
        f"the same with gradients ({ours['gradients']:.2g} and {peer['gradients']:.2g}) at half a product each"
    )
    return [
        _row(name, ours["products"], peer["products"], ours["products"] / peer["products"], targets),
        _row(with_gradients, whole[0], whole[1], whole[0] / whole[1], " | "),
    ]


def _runs(found: list[dict[str, Any]]) -> str:
    return f"all {len(found)} batches below together, {sum(len(one['ours']) for one in found)} runs a side"


def _by_batch(found: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Draws of completions for the same prompts together."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in found:
        groups.setdefault((one["prompts"], one["samples"], one["split"]), []).append(one)
    return list(groups.values())


def _trace(one: dict[str, Any]) -> list[str]:
    what = (
        f"products for the trace at PyHessian's RMS error ({one['ours'][-1][1]:.3g} and {one['pyhessian_rms']:.3g}), "
        f"{_batch(one)}; half of ours are for the Krylov subspace"
    )
    return [_row(what, one["ours"][-1][0], one["pyhessian_products"], one["ratio"], "≤ 0.5 | ≤ 0.25")]


def _product(one: dict[str, Any]) -> list[str]:
    wall, processor = one["seconds"], one["processor_seconds"]
    return [
        _row(
            f"seconds of a product, graph kept (curvlinops {one['curvlinops']}), {_batch(one)}",
            wall["ours"],
            wall["curvlinops"],
            one["ratio"],
            "≤ 1.1 | ≤ 0.8",
        ),
        _row(
            "the same in processor seconds", processor["ours"], processor["curvlinops"], one["processor_ratio"], " | "
        ),
        _row(
            "the same, nothing kept between products, layers recomputed",
            wall["streamed"],
            wall["curvlinops"],
            one["streamed_ratio"],
            " | ",
        ),
    ]


def _memory(found: list[dict[str, Any]]) -> list[str]:
    return [
        _row(
            f"peak memory of a product beyond parameters and vectors against the logits [MiB]: {m['vocabulary']:,} words, width "
            f"{m['width']}, T = {m['tokens']}, batch 1, {m['layers']} layers ({m['parameters'] / 1e6:.0f} M parameters)",
            m["extra_mb"],
            m["logits_mb"],
            m["ratio"],
            "≤ 3 | ≤ 0.5",
        )
        for m in found
    ]


def _about_eigenvalues(found: list[dict[str, Any]]) -> list[str]:
    held = ", ".join(f"{one['reference']:.5g} ({one['rows']})" for one in found)
    converged = all(one["reference_converged"] for one in found)
    seeds = " and ".join(sorted({str(one["seeds"]) for one in found}))
    ratios = [one["ratio"] for one in found]
    above = sum(ratio > 0.5 for ratio in ratios)
    return [
        "**Eigenvalues.** 24 completions of 12 training prompts, evenly over the puzzles' sizes, are what the `standard` preset probes;",
        "the others are one completion of each of 8, 16 and 32 held-out prompts. How soon either side is there depends on which",
        "unlikely tokens were drawn, so several batches are measured, and what is required is required of all together: the ratio of",
        f"the means over all runs. Ratios of the single batches, in the order of the rows: {', '.join(f'{r:.2f}' for r in ratios)}; their",
        f"geometric mean is {statistics.geometric_mean(ratios):.2f}, and {above} of {len(ratios)} are above 0.5.",
        "For each seed PyHessian runs to its own stop; Lanczos is then stopped at the first product where its error is",
        f"no larger. Errors are against converged references (all converged: {'yes' if converged else 'NO'}; rows in",
        f"brackets): {held}; {seeds} seeds each. Both sides are counted alike: each builds its",
        "gradient's graph once (1 gradient); ours adds, to choose where to start, a forward pass of all rows with the backward pass of",
        "the last layer, and the gradients of six tokens, counted by their rows' share of the tokens up to the last of them. A gradient",
        "is 3 passes of the model, a product through its graph 6, so half a product. Neither side measures a residual, and both stop",
        "where the comparison wants them to: `curvature` itself goes on until residual and value stand still over three products at",
        "both ends of the spectrum, and measures each residual by one more.",
    ]


def _about_trace(one: dict[str, Any]) -> list[str]:
    return [
        f"**Trace.** Reference {one['reference']:.5g} ± {one['reference_std_error']:.2g}; {one['seeds']} seeds. PyHessian stops "
        "when its running mean stands still, with no error of its own.",
    ]


def _about_product(one: dict[str, Any]) -> list[str]:
    exact = one["float64"]
    errors = exact["float32_error"]
    nearer = "ours" if errors["ours"] < errors["curvlinops"] else "curvlinops'"
    return [
        f"**Products.** Medians of {one['repeats']}, the sides alternating. curvlinops runs with SiLU composed (it needs that); a",
        f"gradient takes {one['seconds']['gradient']:.3g} s. In float32 its product and ours differ by {one['difference']:.1e}",
        f"relative; in float64 by {exact['difference']:.1e} (streamed: {exact['streamed_difference']:.1e}), so the former is",
        f"rounding. Against the float64 product, the float32 ones err by {errors['ours']:.1e} (ours),",
        f"{errors['streamed']:.1e} (ours, streamed) and {errors['curvlinops']:.1e} (curvlinops): {nearer} is nearer.",
    ]


def _about_memory(found: list[dict[str, Any]]) -> list[str]:
    first = found[0]
    seconds = ", ".join(f"{m['seconds']:.0f} s with {m['layers']}" for m in found)
    return [
        f"**Memory.** Random weights in float32 at Qwen2.5-0.5B's shape, tied embeddings; the streamed product: nothing kept "
        "between products, each layer run again in the backward pass, the output layer in blocks of "
        f"{first['head_mb']:g} MiB. A process of its own; peak resident memory less what was resident before (weights and the",
        "vector) and the product itself, whose memory is taken at the start. glibc is held to its first threshold "
        "(MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_, 128 KiB): by itself it raises it and keeps some 20 MiB of freed "
        f"blocks a layer. One product took {seconds} layers.",
    ]


def _about_rounds(found: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "## A round of probes while training",
        "",
        "Embedded policy, Knights and Knaves, train and held-out prompts; a whole round as a run makes it: completions drawn, every",
        "objective, the preconditioned Hessian, the two-batch squared gradient norm.",
        "",
        "| preset | prompts (train + held-out) | functionals | seconds | processor seconds | estimates | not converged |",
        "|---|---|---|---|---|---|---|",
    ]
    for preset, one in found.items():
        prompts = f"{one['prompts']} + {one['heldout_prompts']}, {one['samples']} completions each"
        if "seconds" in one:
            cost = (
                f"{one['seconds']:.3g} | {one['processor_seconds']:.3g} | {one['estimates']} | {one['not_converged']}"
            )
        else:
            cost = f"not run: at most {one['products_at_most']:,.0f} products | | |"
        lines.append(f"| `{preset}` | {prompts} | {', '.join(one['functionals'])} | {cost} |")
    full = next((one for one in found.values() if "seconds" not in one), None)
    if full:
        several = len(full["functionals"])
        hours = full["seconds_at_most"] / 3600 * (1 + (several - 1) * full["samples"]) / several
        lines += [
            "",
            f"`full` is meant for a GPU or a single checkpoint: a product of its smallest objective takes {full['product_s']:.3g} s",
            f"here and the others have {full['samples']} times the rows, so that its bound is of the order of {hours:.0f} hours. It was",
            "not run.",
        ]
    return lines


_ROWS: dict[str, Callable[[Any], list[str]]] = {
    "eigenvalue": _eigenvalues,
    "trace": _trace,
    "product": _product,
    "memory": _memory,
}
_NOTES: dict[str, Callable[[Any], list[str]]] = {
    "eigenvalue": _about_eigenvalues,
    "trace": _about_trace,
    "product": _about_product,
    "memory": _about_memory,
    "rounds": _about_rounds,
}


def _batches(draws: list[dict[str, Any]]) -> str:
    if len(draws) == 1:
        return _batch(draws[0])
    first, tokens = draws[0], [one["tokens"] for one in draws]
    return (
        f"{first['rows']} completions ({first['prompts']} {first['split']} prompts), {len(draws)} draws, {min(tokens):,} to "
        f"{max(tokens):,} tokens"
    )


def _batch(one: dict[str, Any]) -> str:
    return f"{one['rows']} completions ({one['prompts']} {one['split']} prompts), {one['tokens']:,} tokens"


def _row(what: str, ours: float, peer: float, ratio: float, targets: str) -> str:
    return f"| {what} | {ours:.3g} | {peer:.3g} | {ratio:.2f} | {targets} |"

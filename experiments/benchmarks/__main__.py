"""Command line of the benchmarks: `python -m experiments.benchmarks NAME`, run from the repository's root.

Each measures speed as a ratio against a naive implementation or another library in the same run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sharpscope.errors import UserError

app = typer.Typer(
    no_args_is_help=True,
    help="Measure speed as a ratio against a naive implementation or another library in the same run.",
)


@app.command("step")
def step(
    steps: Annotated[
        int, typer.Option(help="Measured steps of ours; TRL makes a third (one more each warms up).")
    ] = 18,
    threads: Annotated[int | None, typer.Option(help="CPU threads for both sides.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any field of the run, as path=value.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = Path("experiments/benchmarks"),
) -> None:
    """A training step against TRL's GRPOTrainer on the same policy, prompts and limits.

    Example:

      python -m experiments.benchmarks step
    """
    from experiments.benchmarks.step import compare_with_trl
    from experiments.benchmarks.step import report as page

    text = page(compare_with_trl(steps, threads, set_ or ()))
    _show(text, out / "step.md")


@app.command("recording")
def recording(
    steps: Annotated[int, typer.Option(help="Steps of the default run.")] = 100,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any field of the run, as path=value.")] = None,
) -> None:
    """Share of a default run's time that recording takes.

    Example:

      python -m experiments.benchmarks recording
    """
    import json

    from experiments.benchmarks.recording import default_share

    typer.echo(json.dumps(default_share(steps, set_ or ()), indent=2))


@app.command("report")
def report(
    paths: Annotated[list[Path] | None, typer.Argument(help="Folders of runs; none: data/reference.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times that the page is opened.")] = 3,
) -> None:
    """Seconds to make a report, its size, and its first paint in headless Chromium.

    Example:

      python -m experiments.benchmarks report data/reference
    """
    import json

    from experiments.benchmarks.growth import report_cost

    typer.echo(json.dumps(report_cost(paths or [Path("data/reference")], repeats), indent=2))


@app.command("startup")
def startup(
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of each, of which the least counts.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the runs side by side.")] = 4,
    sharpscope: Annotated[Path | None, typer.Option(help="Another checkout to measure.")] = None,
) -> None:
    """Start-up times, the first token of a run, and two runs on the same cores.

    Example:

      python -m experiments.benchmarks startup
    """
    import os

    from experiments.benchmarks import startup as measure

    source = (sharpscope or measure.ROOT).resolve()
    typer.echo(f"cores: {len(os.sched_getaffinity(0))}, load: {os.getloadavg()[0]:.1f}")
    for name, (wall, cpu) in measure.commands(source, repeats).items():
        typer.echo(f"{name:8} {wall:6.2f} s, CPU {cpu:.2f} s (limit {measure.LIMITS[name]} s)")
    typer.echo(f"analyze imports torch: {measure.analyze_imports_torch(source)}")
    wall, cpu = measure.first_token(source, repeats)
    typer.echo(f"run draws its first token after {wall:.2f} s, CPU {cpu:.2f} s (limit {measure.FIRST_TOKEN_S} s)")
    typer.echo(f"generation_s of steps 1 to 3: {measure.generation_seconds(source)}")
    alone, both = measure.side_by_side(source, steps, repeats)
    typer.echo(
        f"{steps} steps: alone {alone:.1f} s, two runs at once {both:.1f} s, ratio {both / alone:.2f} (limit {measure.SIDE_BY_SIDE})"
    )


@app.command("tokens")
def tokens(
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes: does it run?")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each, of which the median counts.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads for both sides.")] = None,
    accuracy: Annotated[
        bool,
        typer.Option("--accuracy", help="Instead: how far the local tier is from the exact one, per architecture."),
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for the numbers and the table.")] = Path("experiments/benchmarks"),
) -> None:
    """Every token's gradient norm and share, against a loop of autograd on the embedded policy.

    Example:

      python -m experiments.benchmarks tokens --quick --out bench
    """
    from experiments.benchmarks import tokens as measured
    from experiments.benchmarks import tokens_accuracy, tokens_report
    from sharpscope.recording import environment

    environment.set_threads(threads)
    if accuracy:
        distances = tokens_accuracy.distances(*((2, 2) if quick else (400, 8)), tell=typer.echo)
        typer.echo(tokens_accuracy.report(distances))
        typer.echo(str(tokens_accuracy.write(distances, out)))
        return
    found = measured.run(quick=quick, repeats=repeats, tell=typer.echo)
    tokens_report.show(found)
    for path in tokens_report.write(found, out):
        typer.echo(str(path))


@app.command("token-stats")
def token_stats(
    vocabulary: Annotated[int, typer.Option(min=16, help="Size of the vocabulary.")] = 151_936,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each, of which the median counts.")] = 7,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads for both sides.")] = None,
) -> None:
    """All statistics of every token against log-softmax and gather alone.

    Example:

      python -m experiments.benchmarks token-stats
    """
    from experiments.benchmarks.token_stats import measure
    from sharpscope.recording import environment

    environment.set_threads(threads)
    found = measure(vocabulary=vocabulary, repeats=repeats)
    typer.echo(f"statistics / log-softmax + gather, {vocabulary:,} words: {found.ratio:.2f}")
    typer.echo(f"  against log-softmax in cache-sized blocks: {found.ratio_blocked:.2f}")
    typer.echo(f"  with the output layer on both sides: {found.ratio_with_head:.2f}")


@app.command("analyze")
def analyze(
    rows: Annotated[int, typer.Option(min=1000, help="Token rows of the synthetic run.")] = 10_000_000,
) -> None:
    """Analyze a synthetic run of millions of token rows: time, memory, bytes on disk.

    Example:

      python -m experiments.benchmarks analyze --rows 1000000
    """
    from experiments.benchmarks.analyze import bench_analyze

    typer.echo(bench_analyze(rows, on_progress=lambda text: typer.echo(f"  {text}", err=True)).to_json(), nl=False)


@app.command("curvature")
def curvature(threads: Annotated[int | None, typer.Option(min=1, help="CPU threads for both sides.")] = 1) -> None:
    """The top eigenvalue against PyHessian's, and a Hessian product with and without its graph kept.

    Example:

      python -m experiments.benchmarks curvature
    """
    from experiments.benchmarks.curvature import table
    from sharpscope.recording import environment

    environment.set_threads(threads)
    typer.echo(table())


@app.command("rollout")
def rollout(
    prompts: Annotated[int, typer.Option(min=1, help="Questions.")] = 24,
    group_size: Annotated[int, typer.Option(min=1, help="Conversations about each, all decoded together.")] = 8,
    slow: Annotated[int, typer.Option(min=1, help="Conversations played one at a time.")] = 24,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each side, of which the median counts.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads for both sides.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any field of the run, as path=value.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = Path("experiments/benchmarks"),
) -> None:
    """Conversations with a retriever, all together against one at a time with transformers' generate.

    Example:

      python -m experiments.benchmarks rollout --out bench
    """
    from experiments.benchmarks.rollout import compare_rollouts
    from experiments.benchmarks.rollout import report as page

    text = page(compare_rollouts(prompts, group_size, slow, repeats, threads, set_ or ()))
    _show(text, out / "rollout.md")


@app.command("generation")
def generation(
    task: Annotated[list[str] | None, typer.Option(help="Task with an embedded policy. Repeatable.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each side, of which the median counts.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads for both sides.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any field of the run, as path=value.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = Path("experiments/benchmarks"),
) -> None:
    """A step's completions against transformers' generate on the same batch: tokens per second.

    Example:

      python -m experiments.benchmarks generation --repeats 5 --out bench
    """
    from experiments.benchmarks.generation import compare_generation
    from experiments.benchmarks.generation import report as page

    text = page(*compare_generation(task or ["knights_knaves", "math"], repeats, threads, set_ or ()))
    _show(text, out / "generation.md")


@app.command("growth")
def growth(
    axis: Annotated[
        list[str] | None, typer.Option(help="length, batch, width, vocabulary, layers or runs. Repeatable.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each, of which the median counts.")] = 3,
    out: Annotated[Path | None, typer.Option(help="PNG file for the figures.")] = None,
) -> None:
    """How costs grow with length, batch, width, vocabulary, layers and number of runs: slopes of processor time.

    Example:

      python -m experiments.benchmarks growth --axis length --axis batch
    """
    from experiments.benchmarks import growth as measured
    from sharpscope.errors import nearest
    from sharpscope.recording import environment

    for name in axis or []:
        if name not in measured.AXES:
            raise UserError(f"--axis {name}: unknown{nearest(name, measured.AXES)}")
    environment.set_threads(1)
    curves = [curve for name in axis or measured.AXES for curve in measured.measure(name, repeats)]
    typer.echo(measured.table(curves))
    if out is not None:
        measured.picture(curves, out)
        typer.echo(f"written: {out}")


@app.command("laptop")
def laptop(
    shape: Annotated[str, typer.Option(help="qwen2.5-0.5b or tiny.")] = "qwen2.5-0.5b",
    layers: Annotated[int | None, typer.Option(min=1, help="Layers; without it those of the shape.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of norms and passes, alternating.")] = 2,
    part: Annotated[list[str] | None, typer.Option(help="norms or sam. Repeatable.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = Path("experiments/benchmarks"),
) -> None:
    """Local norms and SAM sharpness at the shape of a 0.5B model on a CPU: minutes and memory.

    Example:

      python -m experiments.benchmarks laptop --layers 2 --out bench
    """
    from experiments.benchmarks.laptop import PARTS, measure
    from experiments.benchmarks.laptop import report as page

    text = page([measure(name, shape, layers, threads, repeats) for name in part or PARTS])
    _show(text, out / "laptop.md")


@app.command("trl")
def trl(
    steps: Annotated[int, typer.Option(min=1, help="Measured steps (one more is run to warm up).")] = 10,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any field of the run, as path=value.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the table.")] = Path("experiments/benchmarks"),
) -> None:
    """What recording a TRL trainer costs: the same training with and without the recorder.

    Example:

      python -m experiments.benchmarks trl --steps 10
    """
    from experiments.benchmarks.trl import measure

    text = measure(steps, threads, set_ or ()).markdown()
    _show(text, out / "trl.md")


@app.command("cell")
def cell(
    shape: Annotated[list[str] | None, typer.Option(help="qwen2.5-0.5b, qwen2.5-3b or tiny. Repeatable.")] = None,
    steps: Annotated[int, typer.Option(min=2, help="Measured steps (one more is run to warm up).")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 256,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any field of the run, as path=value.")] = None,
    out: Annotated[Path | None, typer.Option(help="Add the table to this Markdown file.")] = None,
) -> None:
    """A step of the logic task at the shape of a real model, random weights: time, tokens per second, memory, recording.

    Meant for a GPU; nothing is downloaded.

    Examples:

      python -m experiments.benchmarks cell --shape qwen2.5-0.5b --shape qwen2.5-3b --out experiments/benchmarks/gpu.md

      python -m experiments.benchmarks cell --shape tiny --set rollout.prompts_per_step=4 --set rollout.max_new_tokens=16
    """
    from experiments.benchmarks.cell import measure_cell
    from experiments.benchmarks.cell import report as table

    text = table([measure_cell(name, steps, prompt_tokens, set_ or ()) for name in shape or ["qwen2.5-0.5b"]])
    typer.echo(text)
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(f"\n{text}")
        typer.echo(f"written: {out}")


def _show(text: str, path: Path) -> None:
    """Print a page and write it."""
    typer.echo(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    typer.echo(f"written: {path}")


def main() -> None:
    """Run one benchmark; a mistake in its options is one line."""
    try:
        app(prog_name="python -m experiments.benchmarks")
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()

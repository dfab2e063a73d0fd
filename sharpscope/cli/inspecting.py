"""`show`, `view`, `plot`, `tokens`, `analyze`, `diagnose`: look at recorded runs and at logs."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from sharpscope.cli.console import (
    Json,
    Runs,
    print_json,
    print_sections,
    read_pairs,
    say,
    tell,
)

if TYPE_CHECKING:
    from sharpscope.diagnose.report import Diagnosis


def show(
    runs: Runs,
    watch: Annotated[bool, Option("--watch", help="Refresh until the run ends (one run).")] = False,
    card: Annotated[
        Path | None, Option(help="Write a picture of the run to share (.png, .svg).")
    ] = None,
    json: Json = False,
) -> None:
    """Show a run: its tokens, curves, accuracy, sharpness and events. Of several, their differences.

    Examples:
      sharpscope show runs/first
      sharpscope show runs/grpo-s0 runs/grpo-sg-s0
      sharpscope show runs/first --card card.png
    """
    from sharpscope import analysis
    from sharpscope.errors import UserError

    if (watch or card) and len(runs) > 1:
        raise UserError(f"--{'watch' if watch else 'card'}: takes one run; give one folder")
    if card:
        from sharpscope.analysis.card import write_card
        from sharpscope.traces import load_run

        say(f"Written: {write_card(load_run(runs[0]), card)}")
        return
    if not watch:
        print_sections(analysis.path_sections(runs), json)
        return
    from rich.console import Console

    try:
        analysis.watch(runs[0], Console())
    except KeyboardInterrupt:
        say("stopped watching; the run continues")


def plot(
    sources: Annotated[
        list[str] | None, Argument(help="Run folders, a log or a CSV file, then the figure's name.")
    ] = None,
    out: Annotated[Path | None, Option(help="File (.png, .svg, .pdf). Default: NAME.png.")] = None,
    style: Annotated[str, Option(help="paper, notebook or dark.")] = "paper",
    width: Annotated[str, Option(help="one or two columns of a paper.")] = "two",
    choose: Annotated[
        list[str] | None,
        Option("--choose", help="A choice of the figure: column=weight, treatment=grpo-sg."),
    ] = None,
    list_: Annotated[bool, Option("--list", help="List the figures.")] = False,
) -> None:
    """Draw one figure of runs for a paper, a notebook or slides, and write its numbers as CSV beside it.

    Examples:
      sharpscope plot --list
      sharpscope plot runs/first gradient_norm --out norms.pdf --width one
      sharpscope plot runs/grpo-s0 runs/grpo-sg-s0 forest
      sharpscope plot output/trainer_state.json log --style dark
    """
    from sharpscope.analysis.plots import PLOTS, plot_named
    from sharpscope.errors import UserError

    if list_:
        for one in PLOTS.values():
            lines = textwrap.wrap(one.says, 79 - 22)
            say(f"{one.name:<21} " + f"\n{'':<22}".join(lines))
        return
    if not sources or len(sources) < 2:
        raise UserError("plot: give runs and a figure's name; `sharpscope plot --list` lists them")
    *paths, name = sources
    choices = read_pairs("--choose", choose or [], "column=weight")
    drawn = plot_named(name)(list(paths), style=style, width=width, **choices)
    written = drawn.save(out or Path(f"{name}.png"))
    say("Written: " + ", ".join(map(str, written)))


def tokens(
    run: Annotated[Path, Argument(help="Folder of a run.")],
    step: Annotated[
        int | None,
        Option(help="Step. Default: the one with the largest gradient, or the last with effects."),
    ] = None,
    by: Annotated[
        str | None,
        Option(
            help="effect; component, turn or staleness (sums); a column, or mismatch, entropy_change, kl, policy_coef. "
            "Default: attribution."
        ),
    ] = None,
    on: Annotated[
        str | None, Option(help="With --by effect: kl (the default), entropy, heldout, sharpness.")
    ] = None,
    top: Annotated[
        int | None, Option(min=1, help="Number of tokens. Default: 20; of each spike, 8.")
    ] = None,
    spikes: Annotated[
        bool, Option("--spikes", help="Steps with a large gradient, and their tokens.")
    ] = False,
    json: Json = False,
) -> None:
    """List the tokens with the largest shares of a step's ‖∇L‖² or the largest effects, or that are largest in another column.

    Examples:
      sharpscope tokens runs/first
      sharpscope tokens runs/first --spikes
      sharpscope tokens runs/first --by effect --on entropy
      sharpscope tokens runs/first --by component
      sharpscope tokens runs/first --step 10 --by score_norm --top 20
    """
    from sharpscope import analysis
    from sharpscope.errors import UserError
    from sharpscope.traces import load_run

    if spikes and not (step is None and by in (None, "attribution") and on is None):
        raise UserError(
            "--spikes: finds the steps itself and shows shares; leave out --step and --by"
        )
    loaded = load_run(run)
    found = (
        analysis.spike_sections(loaded, top=top or 8)
        if spikes
        else analysis.token_sections(loaded, step, by, top or 20, on)
    )
    print_sections(found, json)


def analyze(
    runs: Runs,
    out: Annotated[Path | None, Option(help="Default: `report` in the folder of the runs.")] = None,
    claims: Annotated[
        bool, Option("--claims", help="Test the published claims on these runs too.")
    ] = False,
    figures: Annotated[
        bool, Option("--figures", help="Write figures for papers too (PNG and SVG).")
    ] = False,
    open_: Annotated[bool, Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Write a self-contained page of runs: curves, tokens and differences, with its tables as CSV files.

    Examples:
      sharpscope analyze runs/
      sharpscope analyze runs/first runs/second --out report --open
    """
    from sharpscope import analysis

    written = analysis.analyze(runs, out, claims=claims, figures=figures, on_progress=tell)
    size = written.page.stat().st_size / 2**20
    drawn = f"{len(written.figures)} figures and " if written.figures else ""
    counts = f"{drawn}{len(written.tables)} tables"
    say(f"{counts}. Written: {written.out}/ (open {written.page}, {size:.1f} MiB, works offline)")
    if open_:
        typer.launch(written.page.resolve().as_uri())


def view(
    runs: Runs,
    live: Annotated[
        bool, Option("--live", help="Serve the page while a run is written, on this machine only.")
    ] = False,
    open_: Annotated[bool, Option("--open/--no-open", help="Open the browser.")] = True,
) -> None:
    """Open the page of runs in the browser; with --live it follows a run that is being written, until Ctrl-C.

    Examples:
      sharpscope view runs/first
      sharpscope view runs/first --live
    """
    if not live:
        analyze(runs, open_=open_)
        return
    from sharpscope.analysis.live import serve, wait_for_runs

    def ready(address: str) -> None:
        """Say where the page is."""
        typer.echo(f"Live at {address} (this machine only; Ctrl-C ends it)")
        if open_:
            typer.launch(address)

    try:
        wait_for_runs(list(runs), typer.echo)
        serve(list(runs), ready)
    except KeyboardInterrupt:
        typer.echo("no longer live; the run continues")


def diagnose(
    path: Annotated[
        Path,
        Argument(
            help="A run, trainer_state.json, JSON lines, CSV, printed text, a notebook, TensorBoard events, or their folder."
        ),
    ],
    other: Annotated[Path | None, Argument(help="A second log: say where the two part.")] = None,
    map_: Annotated[
        list[str] | None,
        Option(
            "--map", help="Name a key: --map reward=my/key; --map kl=none drops one. Repeatable."
        ),
    ] = None,
    run: Annotated[
        str | None, Option("--run", help="Name of one run, where the path holds several.")
    ] = None,
    html: Annotated[
        Path | None, Option("--html", help="Also write a page with charts to this file.")
    ] = None,
    json: Json = False,
) -> None:
    """Say what went wrong in a training run, when it began, and what to do next, from the log that exists.

    Examples:
      sharpscope diagnose output/trainer_state.json
      sharpscope diagnose runs/first
      sharpscope diagnose wandb.csv --map reward=my/score
      sharpscope diagnose run.log --html diagnosis.html
      sharpscope diagnose good.jsonl bad.jsonl
    """
    from sharpscope.diagnose import diagnose_runs, read_log
    from sharpscope.diagnose.causes import stopped_causes

    mapping = read_pairs("--map", map_ or [], "reward=my/score")
    if other is not None:
        from sharpscope.diagnose.compare import compare
        from sharpscope.errors import UserError

        if html is not None:
            raise UserError("--html: is of one log; leave the second path out")
        comparison = compare(read_log(path, mapping, run), read_log(other, mapping, run))
        if json:
            print_json(comparison.as_dict())
        else:
            say(comparison.text())
        return
    if stopped := stopped_causes(path):
        rows = [{"sentence": c.sentence, "step": c.step, "details": c.details} for c in stopped]
        lines = [line for c in stopped for line in (c.sentence, *c.details)]
        if json:
            print_json({"finding": stopped[0].sentence, "causes": rows, "findings": []})
        else:
            say("\n".join(lines))
        return
    found = diagnose_runs(path, mapping, run=run)
    if html is not None:
        from sharpscope.diagnose.page import write_page

        write_page(found, html)
    if json:
        dicts = [diagnosis.as_dict() | {"layers": _layers(diagnosis)} for diagnosis in found]
        print_json(dicts[0] if len(dicts) == 1 else {"runs": dicts})
    else:
        say(_runs_text(path, found))


TOLD_WHOLE = 6
"""Runs of one path whose whole diagnosis is printed; of more the first lines are."""


def _runs_text(path: Path, found: list[Diagnosis]) -> str:
    """The diagnoses of the runs of a path for a terminal."""
    if len(found) == 1:
        return _run_text(found[0])
    names = ", ".join(diagnosis.log.run for diagnosis in found)
    lines = [f"{path} holds {len(found)} runs: {names}. --run NAME shows one.", ""]
    if len(found) > TOLD_WHOLE:
        return "\n".join(lines + [f"{d.log.run}: {d.finding}" for d in found])
    return "\n".join(lines) + "\n" + "\n\n".join(_run_text(diagnosis) for diagnosis in found)


def _run_text(found: Diagnosis) -> str:
    layers = "".join(f"\nLayers at step {step}: {seen}" for step, seen in _layers(found).items())
    return found.text() + layers


def _layers(found: Diagnosis) -> dict[int, str]:
    """Which layer's gradient grew at the step of each finding about gradients or updates, where a run of ours recorded it."""
    if found.log.framework != "sharpscope" or not found.log.path.is_dir():
        return {}
    from sharpscope.analysis.headline import growth_text, layer_growth
    from sharpscope.traces import load_run

    run = load_run(found.log.path)
    steps = {
        f.step
        for f in found.findings
        if f.began.quantity in ("grad_norm", "update_norm", "kl_step")
    }
    grown = {step: layer_growth(run, step) for step in sorted(steps)}
    return {step: growth_text(groups) for step, groups in grown.items() if len(groups)}

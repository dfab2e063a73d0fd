"""`sharpscope fork` and `rotate`: single updates of several methods, or with and without some tokens, from the same state."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from sharpscope.cli.console import (
    METHODS,
    Model,
    Set,
    Task,
    check_names,
    print_sections,
    say,
    split,
    tell,
)

if TYPE_CHECKING:
    import pandas as pd

    from sharpscope.analysis.sections import Section
    from sharpscope.forks import Rotations


def fork(
    run: Annotated[
        Path | None, Argument(help="Folder of a run, whose checkpoints are the states.")
    ] = None,
    model: Annotated[
        str | None,
        Option(
            help="embedded:NAME, a model folder, or a hub id; of a recorded run its checkpoint."
        ),
    ] = None,
    task: Task = None,
    checkpoint: Annotated[
        list[str] | None, Option(help="50 or step-000050; 0: the start. Repeatable.")
    ] = None,
    step: Annotated[
        int | None,
        Option("--step", "--from", min=1, metavar="N", help="Step that --without makes again."),
    ] = None,
    to: Annotated[
        int | None, Option(min=1, metavar="N", help="Make all steps from --from to this one again.")
    ] = None,
    without: Annotated[
        list[str] | None,
        Option(
            "--without",
            "--without-tokens",
            help="top:K, prompt:I, completion:I or file:PATH: --step with and without these tokens. Repeatable.",
        ),
    ] = None,
    by: Annotated[str | None, Option(help="Ranking of top:K: effect (the default), share.")] = None,
    on: Annotated[
        str | None,
        Option(help="Outcome of the effect: kl (the default), entropy, heldout, sharpness."),
    ] = None,
    methods: Annotated[str | None, Option(help=f"{METHODS} The first is the reference.")] = None,
    batches: Annotated[
        int | None, Option(min=1, metavar="N", help="Batches of rollouts per state. Default: 30.")
    ] = None,
    outcomes: Annotated[
        str | None, Option(help="failure,entropy (the default), greedy, sharpness.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        Option(
            "--set", help="Field of the run, or fork.NAME (`sharpscope config fork`). Repeatable."
        ),
    ] = None,
    out: Annotated[
        Path | None, Option(help="Folder for the rows. Default: RUN, or forks/MODEL.")
    ] = None,
) -> None:
    """Compare single updates from the same state: of several methods, or of one step with and without its leading tokens.

    By default grpo, grpo-sg and its reverse and shuffled controls, from the last checkpoint. Rows go to the table
    `forks`. Repeat the command to continue after an interruption or with more batches.

    Examples:
      sharpscope fork --model embedded:knights_knaves --methods grpo,grpo-sg,ar --batches 10
      sharpscope fork runs/first --checkpoint 0 --checkpoint 50 --methods grpo,strong=grpo-sg+weight.U=4
      sharpscope fork runs/first --step 40 --without top:12 --by effect --on sharpness
      sharpscope fork runs/first --from 20 --to 40 --without prompt:3
    """
    given = _settings(set_ or []) | {"model": model, "task": task, "on_progress": tell}
    of_methods = {
        "methods": split(methods),
        "outcomes": split(outcomes),
        "batches": batches,
        "checkpoint": checkpoint,
        "out": out,
    }
    arms = {name: value for name, value in of_methods.items() if value}
    try:
        if not without and step is None:
            _methods(run, **given | arms)
        else:
            chosen = {"by": by, "on": on, "to": to}
            given |= {name: value for name, value in chosen.items() if value is not None}
            _without(run, step, without or [], next(iter(arms), None), **given)
    except KeyboardInterrupt:
        say("interrupted: what was measured is kept; repeat the command to continue", err=True)
        raise typer.Exit(130) from None


def _settings(texts: list[str]) -> dict[str, object]:
    """Fields of the fork, and `overrides` of the run, from `--set`."""
    from sharpscope.config import ForkSpec
    from sharpscope.settings import parse_overrides

    of_fork = [text for text in texts if text.startswith("fork.")]
    fork = parse_overrides(of_fork).get("fork")
    given = dict(fork) if isinstance(fork, dict) else {}
    known = [f"fork.{name}" for name in ForkSpec.model_fields]
    check_names("--set", [f"fork.{name}" for name in given], known)
    return given | {"overrides": [text for text in texts if text not in of_fork]}


def _methods(run: Path | None, **given: Any) -> None:
    """Make the updates of several methods; print the differences in the first outcome, a table for each state and comparison."""
    from sharpscope.analysis.forks import fork_differences, fork_sections
    from sharpscope.forks.experiment import measure_fork

    names = ("model", "task", "checkpoint", "overrides", "out", "on_progress")
    said = {name: given.pop(name, None) for name in names}
    said |= {name: said[name] or () for name in ("checkpoint", "overrides")}
    forked, name = measure_fork(run, **said, settings=given)
    differences = fork_differences(forked.forks[forked.forks["fork"] == name])
    print_sections(fork_sections(differences, most=1))
    say(f"Written: {forked.path}/traces/forks\nview:    sharpscope analyze {forked.path}")


def _without(
    run: Path | None,
    step: int | None,
    sets: list[str],
    extra: str | None,
    **given: Any,
) -> None:
    """Make a step, or several, with and without some tokens, and print what each does."""
    from sharpscope.analysis.forks import without_sections
    from sharpscope.errors import UserError
    from sharpscope.forks.without import without_tokens

    if not sets:
        raise UserError(
            f"--step {step}: makes a step again without some tokens; say which, as in --without top:12, "
            f"or compare methods from a checkpoint: --checkpoint {step}"
        )
    if run is None or step is None:
        raise UserError(
            f"--without {' '.join(sets)}: needs a run, --step and tokens, as in fork RUN --step 40 --without top:12"
        )
    if extra is not None:
        raise UserError(
            f"--{extra}: does not go with --without, which makes steps of the run as they were"
        )
    forked, name = without_tokens(run, step, sets, **given)
    print_sections(without_sections(forked, name))
    say(f"Written: {forked.path}/traces/forks (fork {name})")


def rotate(
    run: Annotated[Path | None, Argument(help="Folder of a run: its state and next batch.")] = None,
    model: Model = None,
    task: Task = None,
    methods: Annotated[str | None, Option(help=f"{METHODS} Default: all.")] = None,
    checkpoint: Annotated[
        str | None, Option(help="50 or step-000050; 0: the start. Default: the last.")
    ] = None,
    seed: Annotated[int | None, Option(help="Seed of the batch, with --model. Default: 0.")] = None,
    set_: Set = None,
    batches: Annotated[
        int | None, Option(min=1, help="Default: 4; 1 where more than 20 million weights train.")
    ] = None,
    warm_up: Annotated[
        int, Option(min=0, help="With --model: batches that fill the optimizer's moments.")
    ] = 0,
    measure: Annotated[
        bool, Option("--measure", help="Make each update, measure, take it back.")
    ] = False,
    plot: Annotated[
        bool, Option("--plot", help="Also plot token weights over logit and probability.")
    ] = False,
    out: Annotated[Path | None, Option(help="Folder. Default: rotation, or RUN/rotation.")] = None,
) -> None:
    """Show how far methods turn the gradient, and the optimizer's step, from plain GRPO's on several batches. Nothing is trained.

    A method with weights or masks is compared with itself at weights 1, any other with plain GRPO. A turn adds up over steps
    while the noise of a batch, also shown, averages out: the last column says after how many steps the turn is the larger one.

    Examples:
      sharpscope rotate --model embedded:knights_knaves --methods grpo-sg,ar,cispo
      sharpscope rotate --methods grpo-sg,strong=grpo-sg+weight.U=4,grpo+tokens.kind=high_entropy --seed 3
      sharpscope rotate runs/first --checkpoint 50 --methods grpo-sg,mine:flat_top --plot
    """
    from sharpscope.forks import rotate as compare

    out = out or (Path("rotation") if run is None else run / "rotation")
    rotations = compare(
        None if methods is None else split(methods),
        run=run,
        checkpoint=checkpoint,
        model=model,
        task=task,
        seed=seed,
        overrides=set_ or (),
        batches=batches,
        warm_up=warm_up,
        measure=measure,
        on_progress=tell,
    )
    print_sections(_sections(rotations))
    files = rotations.save(out, plot)
    say(f"Written: {out}/ ({', '.join(path.name for path in files)})")


def _sections(rotations: Rotations) -> list[Section]:
    """The batches, what the columns mean, a row for each method, those that turn the gradient furthest first, and why."""
    import pandas as pd

    from sharpscope.analysis.sections import Section
    from sharpscope.forks.rotating import STILL

    batch = rotations.batch
    where = f"{batch['run']}, step {batch['step']}" if batch["run"] else f"seed {batch['seed']}"
    title = (
        f"{batch['model']} on {batch['task']}, {where}: {batch['batches']} batches; the first has {batch['prompts']} prompts "
        f"({batch['informative_prompts']} with different rewards), {batch['completions']} completions, {batch['tokens']} tokens"
    )
    table = rotations.table.sort_values("gradient_rotation", ascending=False, kind="stable")
    named = table["method"] + table["reference"].map(lambda of: " *" if of == "unweighted" else "")
    columns = {
        "length": ("gradient_scale", "{:.2f}"),
        "used": ("gradient_used", "{:.1%}"),
        "dose": ("update_difference", "{:.2f}"),
        "steps": ("steps_to_pass", "{:,.0f}"),
    }
    shown = {
        name: table[column].map(form.format, na_action="ignore").fillna("–")
        for name, (column, form) in columns.items()
    }
    angles = {name: _ranged(table, f"{name}_rotation") for name in ("gradient", "update")}
    shown["steps"] = shown["steps"].mask(table["gradient_rotation"] < STILL, "–")
    frame = pd.DataFrame({"method": named} | angles | shown)
    of = "the batches" if batch["range_of"] == "batches" else "the two halves of the prompts"
    meaning = (
        f"gradient, update: angle to plain GRPO's gradient and to its optimizer's step, mean and range over {of} (*: to those of the "
        "method itself with all weights 1 and no token left out). length: length of the gradient, in that of plain GRPO's. used: "
        "share of plain GRPO's gradient that is on tokens which the method learns from too. dose: length of the difference between "
        "both steps, in that of plain GRPO's step. steps: number of steps after which the turn is larger than the noise, "
        "(tan noise / tan angle)²: a turn adds up over steps, the noise averages out."
    )
    return [
        Section(title, meaning),
        Section("", frame),
        Section("", "\n".join(_remarks(rotations, table.assign(named=named)))),
    ]


def _remarks(rotations: Rotations, table: pd.DataFrame) -> list[str]:
    """What is said of the methods of the table, called as in its column `named`, of the first batch, and of the noise."""
    from sharpscope.forks.rotating import STILL
    from sharpscope.policy.directions import NOISE_BOUND

    alike: dict[str, list[str]] = {}
    for _, row in table.iterrows():
        reason, *steps = row["verdict"].split("; ")  # the number of steps has a column
        if row["problem"] or steps or row["gradient_rotation"] < STILL:
            alike.setdefault(row["problem"] or reason, []).append(row["named"])
    remarks = [f"{', '.join(names)}: {said}" for said, names in alike.items()]
    recorded = rotations.batch["recorded"]
    if recorded is not None:
        same = "are those" if recorded else "are not those (another machine or version, or --set)"
        remarks.append(f"The first batch's completions {same} that the run recorded at this step.")
    noise = "not known (one prompt, or no method that is compared with plain GRPO)"
    if rotations.noise >= 0:
        noise = "about " + _ranged(table[table["reference"] == "grpo"], "noise").iloc[0]
    if rotations.noise >= NOISE_BOUND:
        noise = "at least 90°, the bound of its estimate (its two halves share no direction; take more prompts),"
    remarks.append(
        f"Noise of a batch: {noise} between its gradient (plain GRPO) and the expected one."
    )
    return remarks


def _ranged(table: pd.DataFrame, column: str) -> pd.Series:
    """Mean and range of an angle over batches, as `6.9° (6.4–7.2)`."""

    def shown(row: pd.Series) -> str:
        """One method's angle."""
        mean, low, high = (row[name] for name in (column, f"{column}_low", f"{column}_high"))
        if math.isnan(mean):
            return "–"
        return f"{mean:.1f}°" + (f" ({low:.1f}–{high:.1f})" if high > low else "")

    return table.apply(shown, axis=1)

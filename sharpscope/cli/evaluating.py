"""`eval`: evaluate a policy on a task."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from sharpscope.cli.console import Set, print_sections

if TYPE_CHECKING:
    import pandas as pd


def evaluate(
    model: Annotated[Path, Argument(help="Folder of a run, a checkpoint or a model, or embedded:NAME.")],
    task: Annotated[str | None, Option(help="Kind of a task. Default: that of the run or policy.")] = None,
    split: Annotated[
        list[str] | None, Option(help="Of a file, all is every row. Repeatable. Default: heldout, unseen.")
    ] = None,
    temperature: Annotated[list[float] | None, Option(help="0 is greedy. Repeatable. Default: 0, 1.")] = None,
    prompts: Annotated[int, Option(min=1, help="Prompts per level.")] = 500,
    samples: Annotated[int | None, Option(min=1, help="Completions per prompt above temperature 0.")] = None,
    k: Annotated[list[int] | None, Option("-k", min=1, help="k of the unbiased pass@k. Repeatable.")] = None,
    seed: Annotated[int, Option(help="Seed of sampling.")] = 0,
    set_: Set = None,
    out: Annotated[Path | None, Option(help="Folder for the results (eval.csv).")] = None,
) -> None:
    """Evaluate a policy on a task by split, level and temperature, with 95 % intervals over prompts.

    avg@n is the share of correct completions among n per prompt; pass@k is the probability that at least one of k is
    correct.

    Examples:
      sharpscope eval embedded:knights_knaves --prompts 500

      sharpscope eval path/or/hub-id --task dataset --set task.path=test.parquet --split all

      sharpscope eval runs/first --split heldout --temperature 1 --samples 16 -k 1 -k 8
    """
    from sharpscope.analysis.sections import Section
    from sharpscope.traces import check_free
    from sharpscope.training import evaluate_model

    if out is not None:
        check_free(out)

    rows = evaluate_model(
        str(model),
        task=task,
        splits=tuple(split) if split else None,
        temperatures=tuple(temperature or (0.0, 1.0)),
        prompts=prompts,
        samples=samples or max(k or [1]),
        seed=seed,
        pass_at=sorted(set(k or [])),
        overrides=set_ or (),
        on_progress=lambda text: typer.echo(f"  {text}", err=True),
    )
    print_sections([Section(str(rows[0]["task"]), _table(rows))])
    if out is not None:
        import pandas as pd

        out.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(rows).to_csv(out / "eval.csv", index=False)
        typer.echo(f"Written: {out}/eval.csv")


def _table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The results with their 95 % intervals, in percent."""
    import pandas as pd

    from sharpscope.analysis.statistics import accuracy_interval

    pass_at = sorted(int(name.removeprefix("pass_at_")) for name in rows[0] if re.fullmatch(r"pass_at_\d+", name))
    shown = []
    for row in rows:
        cells = {name: row[name] for name in ("split", "level")} | {"T": f"{row['temperature']:g}"}
        cells |= {"prompts": row["n"], "n": row["k"], "avg@n [95 %]": _with_interval(row, "accuracy")}
        cells |= {f"pass@{k} [95 %]": _with_interval(row, f"pass_at_{k}") if k <= row["k"] else "" for k in pass_at}
        if any(other["k"] > 1 for other in rows):
            interval = accuracy_interval(row["pass_at_k"], None, row["n"])
            cells["pass@n [95 %]"] = f"{row['pass_at_k']:.2%} {interval.percent(2)}"
        shown.append(cells | {"reward": f"{row['reward_mean']:+.3f}"})
    return pd.DataFrame(shown)


def _with_interval(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.2%} [{100 * row[f'{name}_low']:.2f}, {100 * row[f'{name}_high']:.2f}]"

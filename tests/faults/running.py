"""All faults, or some of them, and the table of what was tried and survived."""

from __future__ import annotations

import json
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sharpscope.errors import UserError, nearest
from tests.faults import damage, disks, killing, malformed, racing
from tests.faults.killing import Whole
from tests.faults.setting import Tried

WHOLE = {
    "kill_at_times": 34,
    "kill_at_operations": 33,
    "lose_power": 33,
    "refused_writes": 20,
    "file_size_limit": 10,
    "full_disk": 10,
    "read_only": 1,
    "flipped_bytes": 100_000,
    "cut_parts": 200,
    "damaged_checkpoints": 10,
    "race": 12,
    "stale_locks": 1,
    "reader": 4,
    "malformed_configs": 500,
    "malformed_files": 200,
}
"""Trials of each fault in the whole; for damaged parts at most, of each table; a 1 stands for a fixed list of cases."""
FAULTS = tuple(WHOLE)


def run_faults(only: Sequence[str], quick: bool, seed: int, tell: Callable[[str], None]) -> dict[str, Tried]:
    """Try the faults named in `only` (empty: all) and count what was survived. `quick` tries each a few times.

    Raises:
        UserError: no such fault.
    """
    for name in only:
        if name not in FAULTS:
            raise UserError(f"--only {name}: no such fault{nearest(name, FAULTS)}")
    chosen = [name for name in FAULTS if not only or name in only]
    count = {name: min(number, 3) if quick else number for name, number in WHOLE.items()}
    found = {}
    with tempfile.TemporaryDirectory(prefix="sharpscope-faults-") as folder:
        place = Path(folder)
        tell("training the runs to compare with")
        policy, whole = killing.whole_runs(place)
        for name in chosen:
            tell(f"{name} × {count[name]}")
            found[name] = _try(name, policy, whole, place / name, count[name], seed)
            tell(f"{name}: {found[name].survived} of {found[name].tried} survived, {found[name].seconds:.0f} s")
    return found


def _try(name: str, policy: Path, whole: list[Whole], place: Path, count: int, seed: int) -> Tried:
    place.mkdir()
    match name:
        case "kill_at_times":
            return killing.kill_at_times(policy, whole, place, count, seed)
        case "kill_at_operations":
            return killing.kill_at_operations(policy, whole, place, count, seed)
        case "lose_power":
            return killing.lose_power_at_operations(policy, whole, place, count, seed)
        case "refused_writes":
            return disks.refuse_operations(policy, whole, place, count, seed)
        case "file_size_limit":
            return disks.limit_file_size(policy, whole, place, count, seed)
        case "full_disk":
            return disks.fill_disk(policy, whole, place, count, seed)
        case "read_only":
            return disks.read_only(policy, whole, place)
        case "flipped_bytes":
            return damage.flip_bytes(whole, place, count, seed)
        case "cut_parts":
            return damage.cut_parts(whole, place, count, seed)
        case "damaged_checkpoints":
            return damage.damage_checkpoints(policy, whole, place, count, seed)
        case "race":
            return racing.race(policy, whole, place, count, seed)
        case "stale_locks":
            return racing.stale_locks(policy, whole, place)
        case "reader":
            return racing.read_while_writing(policy, whole, place, count)
        case "malformed_configs":
            return malformed.try_configs(policy, whole[0].run_dir, place, count, seed)
        case _:
            return malformed.try_files(policy, whole[0].run_dir, place, count, seed)


def write_table(found: dict[str, Tried], out: Path) -> list[Path]:
    """Lay what was found over faults.json in `out` (so that the whole can be run in pieces) and write faults.md anew."""
    out.mkdir(parents=True, exist_ok=True)
    kept: dict[str, dict[str, object]] = {}
    if (out / "faults.json").exists():
        kept = json.loads((out / "faults.json").read_text(encoding="utf-8"))["faults"]
    kept |= {name: asdict(tried) | {"date": time.strftime("%Y-%m-%d")} for name, tried in found.items()}
    kept = {name: kept[name] for name in FAULTS if name in kept}
    data = {"machine": platform.machine(), "system": platform.system(), "faults": kept}
    (out / "faults.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    (out / "faults.md").write_text(markdown(kept), encoding="utf-8")
    return [out / "faults.json", out / "faults.md"]


def markdown(kept: dict[str, dict[str, object]]) -> str:
    """The table of faults."""
    lines = ["| fault | tried | survived | survived means |", "|---|---|---|---|"]
    for tried in (Tried(**{key: value for key, value in row.items() if key != "date"}) for row in kept.values()):  # type: ignore[arg-type]
        note = f" ({tried.note})" if tried.note else ""
        lines.append(f"| {tried.fault}{note} | {tried.tried:,} | {tried.survived:,} | {tried.means} |")
    return "\n".join(lines) + "\n"


def main(
    only: Annotated[list[str] | None, typer.Option(help="A fault's name; repeatable. Default: all.")] = None,
    list_faults: Annotated[
        bool, typer.Option("--list-faults", help="Print the names and the number of trials.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Try each fault at most three times.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the trials.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the table; results of other faults are kept.")] = Path(
        "experiments/benchmarks"
    ),
) -> None:
    """Kill runs, fill disks, damage files, race processes and pass malformed input. About an hour on two cores."""
    if list_faults:
        for name, count in WHOLE.items():
            typer.echo(f"{name} × {count}")
        return
    found = run_faults(only or [], quick, seed, lambda text: typer.echo(f"  {text}", err=True))
    for name, tried in found.items():
        typer.echo(f"{name}: {tried.survived} of {tried.tried} survived{f' ({tried.note})' if tried.note else ''}")
        for failure in tried.failures[:10]:
            typer.echo(f"  {failure}")
    for path in write_table(found, out):
        typer.echo(f"written: {path}")
    if any(tried.failures for tried in found.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

"""The figures by name: each takes runs or a tidy frame, and returns its axes with the frame beside them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes

from sharpscope.analysis.plots.style import WIDTHS, Picture, picture, save_as, styled
from sharpscope.analysis.study import quiet
from sharpscope.errors import UserError, nearest
from sharpscope.traces import Run, Runs, load_runs

Source = Runs | Run | pd.DataFrame | str | Path | list[str | Path]
"""What a figure is made of: recorded runs, their folders, or the figure's own tidy frame (also as a CSV or Parquet file)."""
Draw = Callable[[Picture, pd.DataFrame], None]
READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    ".csv": pd.read_csv,
    ".parquet": pd.read_parquet,
}
"""Ending of a file that holds a figure's frame -> what reads it."""


class Drawn(NamedTuple):
    """A figure: its axes, and the numbers that they show. Jupyter shows it as a picture."""

    axes: list[Axes]
    frame: pd.DataFrame

    @property
    def figure(self) -> Picture:
        """The matplotlib figure."""
        found = self.axes[0].figure
        assert isinstance(found, Picture)
        return found

    def save(self, file: str | Path) -> list[Path]:
        """Write the figure (.png, .svg, .pdf) and its frame as a CSV file beside it; returns both paths.

        Raises:
            UserError: another ending, or a file cannot be written.
        """
        written = save_as(self.figure, Path(file))
        table = written.with_suffix(".csv")
        self.frame.to_csv(table, index=False)
        return [written, table]

    def _repr_png_(self) -> bytes:
        """The figure as PNG."""
        return self.figure._repr_png_()


@dataclass(frozen=True)
class Plot:
    """A figure that can be made.

    Attributes:
        name: by which it is asked for.
        says: what it shows, in one sentence.
        needs: columns of its frame.
        frame: runs, and choices of the figure -> the frame.
        draw: draws the frame into an empty figure.
        log: whether it is made from a log, as `sharpscope diagnose` reads it, and not from runs.
    """

    name: str
    says: str
    needs: tuple[str, ...]
    frame: Callable[..., pd.DataFrame]
    draw: Draw
    log: bool = False

    def __call__(
        self,
        data: Source,
        *,
        style: str = "notebook",
        width: str = "two",
        **choices: object,
    ) -> Drawn:
        """Draw the figure.

        Args:
            data: runs, their folders, or a frame with the columns `needs`.
            style: `paper`, `notebook` or `dark`.
            width: `one` or `two` columns of a paper.
            choices: of the frame, such as `column`; see each figure.

        Raises:
            UserError: the runs did not record what the figure shows, or a name is wrong.
        """
        if width not in WIDTHS:
            raise UserError(f"width {width}: must be one of {', '.join(WIDTHS)}")
        with quiet(), styled(style):
            frame = self.frame_of(data, **choices)
            figure = picture(WIDTHS[width])
            self.draw(figure, frame)
            figure.frame = frame
            return Drawn(list(figure.axes), frame)

    def frame_of(self, data: Source, **choices: object) -> pd.DataFrame:
        """The numbers that the figure shows, checked to have its columns and a row.

        Raises:
            UserError: the data have none.
        """
        known = inspect.signature(self.frame).parameters
        for name in choices:
            if name not in known:
                raise UserError(f"plot {self.name}: has no choice {name}{nearest(name, known)}")
        frame = self._read(data, **choices)
        if frame.empty:
            needed = (self.frame.__doc__ or "").strip().split("\n")[0].rstrip(".")
            raise UserError(f"plot {self.name}: nothing to show; it needs {needed}")
        lacks = [name for name in self.needs if name not in frame]
        if lacks:
            raise UserError(f"plot {self.name}: the frame has no column {lacks[0]}")
        return frame

    def _read(self, data: Source, **choices: object) -> pd.DataFrame:
        if isinstance(data, pd.DataFrame):
            return data
        files = [data] if isinstance(data, str | Path) else data
        if isinstance(files, list) and len(files) == 1:
            file = Path(files[0])
            if self.log:
                return self.frame(file, **choices)
            if file.suffix in READERS and file.is_file():
                return READERS[file.suffix](file)
        if self.log:
            raise UserError(f"plot {self.name}: give one log, such as trainer_state.json")
        return self.frame(runs_of(data), **choices)


def runs_of(data: Runs | Run | str | Path | list[str | Path]) -> Runs:
    """Runs as a collection."""
    if isinstance(data, Runs):
        return data
    if isinstance(data, Run):
        return Runs(data.path, {data.name: data}, {})
    found = load_runs(data)
    if not len(found):
        raise UserError(f"plot: no run below {data}; give the folder of a run")
    return found


PLOTS: dict[str, Plot] = {}
"""All figures by name, in the order in which they are listed."""


def plot(
    frame: Callable[..., pd.DataFrame], *needs: str, log: bool = False, name: str = ""
) -> Callable[[Draw], Plot]:
    """Register a drawing function as a figure of this frame; the first line of its docstring says what it shows."""

    def register(draw: Draw) -> Plot:
        """The function as a figure that can be asked for by its name."""
        says = (draw.__doc__ or "").strip().split("\n")[0]
        made = Plot(name or draw.__name__, says, needs, frame, draw, log)
        PLOTS[made.name] = made
        return made

    return register


def not_from_runs(_: Runs) -> pd.DataFrame:
    """A table of its own, as a frame or a file: such as `rotation.csv` and `weights.csv` of `sharpscope rotate`."""
    return pd.DataFrame()


def plot_named(name: str) -> Plot:
    """The figure of this name.

    Raises:
        UserError: there is none.
    """
    if name not in PLOTS:
        close = nearest(name, PLOTS) or f"; one of {', '.join(PLOTS)}"
        raise UserError(f"plot {name}: unknown{close}")
    return PLOTS[name]


def all_figures(runs: Runs) -> Iterator[tuple[str, Picture]]:
    """Name and figure, in the style of a paper, of every figure that the runs have the numbers of."""
    for name, one in PLOTS.items():
        try:
            yield name, one(runs, style="paper").figure
        except UserError:  # they did not record what it shows
            continue


@dataclass(frozen=True, repr=False)
class PlotsOf:
    """`run.plot`: every figure as a method, for Tab completion too."""

    data: Runs

    def __dir__(self) -> list[str]:
        return list(PLOTS)

    def __getattr__(self, name: str) -> Callable[..., Drawn]:
        if name not in PLOTS:
            raise AttributeError(f"no figure is called {name!r}{nearest(name, PLOTS)}")
        chosen = PLOTS[name]

        def draw(style: str = "notebook", width: str = "two", **choices: object) -> Drawn:
            """The chosen figure of these runs."""
            return chosen(self.data, style=style, width=width, **choices)

        draw.__name__ = name
        draw.__doc__ = f"{chosen.says}\n\n{Plot.__call__.__doc__}"
        return draw

    def __repr__(self) -> str:
        return f"figures: {', '.join(PLOTS)}"

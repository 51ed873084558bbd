"""``memprof watch``: a run's newest counters, while it goes."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memprof.cli.options import emit

if TYPE_CHECKING:
    from memprof.analysis.counters import Counters

__all__ = ["command"]


@click.command(name="watch", short_help="Show the newest counters of a running or finished job.")
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--once", is_flag=True, help="Print what is known now and end; so does a pipe.")
@click.option(
    "--interval", type=click.FloatRange(0.1, 3600), default=1.0, show_default=True, metavar="SECONDS",
    help="How often to look.",
)  # fmt: skip
@click.option(
    "--format", "style", type=click.Choice(["text", "json"]), default="text", show_default=True,
    help="json prints the newest lines of each rank once.",
)  # fmt: skip
def command(folder: Path, once: bool, interval: float, style: str) -> None:
    """Show the newest counters of the run in DIR: memory now and at its highest, by rank, phase and category.

    DIR is the trainer's output_dir or the _memprof folder in it. Ends when the training does.
    """
    ranks = _read(folder)
    if style == "json":
        _print_json(ranks)
    elif once or not sys.stdout.isatty():
        _print(ranks)
    else:
        _live(folder, interval)


def _read(folder: Path) -> list[Counters]:
    from memprof.analysis.counters import find_counters, read_counters

    return [read_counters(path) for path in find_counters(folder)]


def _print_json(ranks: list[Counters]) -> None:
    from memprof.reports.json import dumps

    rows = [{**r.about, "newest": r.newest, "peak": r.categories, "ended": r.ended} for r in ranks]
    emit(dumps({"schema": "memprof.watch/1", "ranks": rows}))


def _print(ranks: list[Counters]) -> None:
    import os

    from rich.console import Console

    from memprof.reports.terminal.watch import frame

    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=100, highlight=False, emoji=False, markup=False)
    with console.capture() as captured:
        console.print(frame(ranks, console.width, console.color_system is not None, _ascii_only()))
    emit("\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n")


def _live(folder: Path, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from memprof.reports.terminal.watch import frame

    console = Console(highlight=False, emoji=False, markup=False)
    colour = console.color_system is not None and not console.no_color
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            ranks = _read(folder)
            live.update(frame(ranks, console.width, colour, _ascii_only()), refresh=True)
            if all(r.ended is not None for r in ranks):
                return
            time.sleep(interval)


def _ascii_only() -> bool:
    return not (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")

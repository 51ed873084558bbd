"""``memprof watch``: a run's newest counters, while it goes."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memprof.cli.emit import Output, emit, output_options
from memprof.cli.inputs import name_other_runs
from memprof.cli.metrics import Address, serve
from memprof.reports.renderers import Answer

if TYPE_CHECKING:
    from memprof.analysis.counters import Counters


@click.command(name="watch")
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--once", is_flag=True, help="Print what is known now and end; so does a pipe.")
@click.option(
    "--interval", type=click.FloatRange(0.1, 3600), default=1.0, show_default=True, metavar="SECONDS",
    help="Look again after this long.",
)  # fmt: skip
@click.option(
    "--serve", "address", type=Address(), metavar="[HOST]:PORT",
    help="Serve the counters to Prometheus until Ctrl-C; without HOST, to this machine only.",
)  # fmt: skip
@output_options("watch", json_file=False)
def command(folder: Path, once: bool, interval: float, address: tuple[str, int] | None, output: Output) -> None:
    """Show the newest counters of the run in DIR: memory now and at its highest, by rank, phase and category.

    DIR is the trainer's output_dir or the _memprof folder in it. memprof watch ends when the training does.
    """
    ranks = _read(folder)
    name_other_runs(ranks[0].path.parent)
    if address is not None:
        serve(folder, address)
        return
    if output.style == "text" and not once and sys.stdout.isatty():
        _live(folder, interval)
        return
    rows = [_plain(rank) for rank in ranks]
    emit(Answer("watch", {"schema": "memprof.watch/1", "ranks": rows}, lambda: ranks), output)


def _plain(rank: Counters) -> dict[str, object]:
    from memprof.report.codec import to_builtins

    lines = {"newest": rank.newest, "peak": rank.recorded, "ended": rank.ended}
    return {
        **to_builtins(rank.about),
        **{name: None if line is None else to_builtins(line) for name, line in lines.items()},
    }


def _read(folder: Path) -> list[Counters]:
    from memprof.analysis.counters import find_counters, read_counters

    return [read_counters(path) for path in find_counters(folder)]


def _live(folder: Path, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from memprof.reports.renderers import draw
    from memprof.reports.terminal.screen import writable

    console = Console(highlight=False, emoji=False, markup=False)
    colour = console.color_system is not None and not console.no_color
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            ranks = _read(folder)
            shown = draw("watch", ranks, "text", console.width, colour)
            live.update(Text.from_ansi(writable(shown, sys.stdout)), refresh=True)
            if all(r.ended is not None for r in ranks):
                return
            time.sleep(interval)

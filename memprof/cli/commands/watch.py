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
from memprof.errors import InputError
from memprof.reports.renderers import Answer

if TYPE_CHECKING:
    from memprof.analysis.counters import Counters


@click.command(name="watch")
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option(
    "--once", is_flag=True, help="Print the current values once and exit. Implied when output is not a terminal."
)
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

    DIR is the trainer's output_dir or the _memprof folder in it. On a terminal, and with --serve, memprof watch waits
    for the run to begin. It ends when the training does.
    """
    from memprof.analysis.counters import read_run

    live = output.style == "text" and not once and sys.stdout.isatty()
    if live or address is not None:
        _wait_for_run(folder, interval)
    ranks = read_run(folder)
    name_other_runs(ranks[0].path.parent)
    if address is not None:
        serve(folder, address)
        return
    if live:
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


def _wait_for_run(folder: Path, interval: float) -> None:
    """Return when the run in ``folder`` has counters; print that memprof waits if it has none yet."""
    from memprof.analysis.counters import find_counters

    waiting = False
    while True:
        try:
            find_counters(folder)
            return
        except InputError as error:
            if not waiting:
                click.echo(f"memprof: waiting for a run. {error} End with Ctrl-C.", err=True)
            waiting = True
        time.sleep(interval)


def _live(folder: Path, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from memprof.analysis.counters import read_run
    from memprof.reports.renderers import draw
    from memprof.reports.terminal.screen import writable

    console = Console(highlight=False, emoji=False, markup=False)
    colour = console.color_system is not None and not console.no_color
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            ranks = read_run(folder)
            shown = draw("watch", ranks, "text", console.width, colour)
            live.update(Text.from_ansi(writable(shown, sys.stdout)), refresh=True)
            if all(r.ended is not None for r in ranks):
                return
            time.sleep(interval)

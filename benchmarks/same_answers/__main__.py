"""Keep the answers of two versions of memprof, and say where they differ."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from .collect import collect
from .compare import IGNORED, compare, lines
from .questions import KINDS

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_UNASKED = ("demo",)


@click.group(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    pass


@main.command("collect")
@click.option(
    "--memprof",
    "executable",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The memprof command to ask, in its own environment.",
)
@click.option("--snapshots", required=True, type=_FOLDER, help="Snapshots (*.pickle) to ask about.")
@click.option("--truth", required=True, type=_FOLDER, help="More of them, with labelled allocations.")
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Where answers are kept.")
@click.option(
    "--only", multiple=True, type=click.Choice(KINDS), help="Only this kind; may be repeated. Default: all but demo."
)
@click.option("--quick-demo", is_flag=True, help="With --only demo: the tiny random model.")
@click.option("--jobs", default=1, type=click.IntRange(1), show_default=True, help="Processes at a time.")
def collect_command(
    executable: Path, snapshots: Path, truth: Path, out: Path, only: tuple[str, ...], quick_demo: bool, jobs: int
) -> None:
    """Ask a memprof every question and keep the answers.

    Asks for the report, the comparison and the explanation of every snapshot, for three simulations,
    and with --only demo for the demo's categories. Exit codes and messages are kept too.
    """
    kinds = [kind for kind in KINDS if kind in (only or set(KINDS).difference(_UNASKED))]
    folders = {"snapshots": snapshots, "truth": truth}
    collect(executable.absolute(), folders, out, kinds, jobs=jobs, quick=quick_demo)


@main.command("compare")
@click.argument("before", type=_FOLDER)
@click.argument("after", type=_FOLDER)
@click.option(
    "--ignore",
    multiple=True,
    metavar="KEY",
    help="Leave out values below this key, such as notes or source.torch; may be repeated.",
)
@click.option("--only", multiple=True, type=click.Choice(KINDS), help="Only this kind; may be repeated.")
@click.option("--screens", is_flag=True, help="Compare printed text and Markdown too.")
def compare_command(before: Path, after: Path, ignore: tuple[str, ...], only: tuple[str, ...], screens: bool) -> None:
    """Say of each answer whether it is equal or which values differ.

    BEFORE and AFTER are folders that collect wrote. Exit code 1: an answer differs.
    """
    told = compare(before, after, ignored=(*IGNORED, *ignore), screens=screens, kinds=only or None)
    if not told.answers:
        raise click.UsageError(f"{before} and {after} hold no answers of this kind.")
    for line in lines(told, IGNORED):
        click.echo(line)
    sys.exit(0 if told.equal else 1)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.same_answers")

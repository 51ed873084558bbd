"""``memprof mcp``: memprof's commands for assistants, over the Model Context Protocol."""

from __future__ import annotations

from pathlib import Path

import click

from memprof.cli.options import redact_option
from memprof.errors import UsageError, how_to_install
from memprof.files import refuse_special


@click.command(name="mcp")
@click.argument("folders", type=click.Path(exists=True, path_type=Path), nargs=-1, metavar="[FOLDER]...")
@click.option("--largest", default="4GiB", show_default=True, metavar="SIZE", help="Read no file larger than this.")
@click.option(
    "--seconds", type=click.FloatRange(min=1), default=300.0, show_default=True, metavar="S",
    help="Stop a command after this many seconds.",
)  # fmt: skip
@click.option(
    "--characters", type=click.IntRange(min=1000), default=24_000, show_default=True, metavar="N",
    help="Cut answers at this length.",
)  # fmt: skip
@redact_option
def command(folders: tuple[Path, ...], largest: str, seconds: float, characters: int, redact: bool) -> None:
    """Answer an assistant over standard input and output: report, explain, compare, oom, simulate and advise, on files
    below FOLDER... (default: the current folder). Nothing else is read, and nothing is written except results of
    simulations (disable that with MEMPROF_CACHE=0).

    An assistant starts this itself: put command `memprof`, arguments `mcp` and your runs' folders into its settings.
    """
    from memprof.units import parse_size

    limit = parse_size(largest)
    for folder in folders:
        refuse_special(folder)
    try:
        from memprof.assistants.commands import Limits
        from memprof.assistants.server import make_server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("mcp", "anyio"):
            raise UsageError(f"memprof mcp needs the mcp package: {how_to_install('mcp')}.") from None
        raise
    try:
        make_server(list(folders) or [Path()], Limits(limit, seconds, characters), redact).run("stdio")
    except Exception as ended:
        if not _is_closed_pipe(ended):
            raise
        # All commands end quietly when their reader goes away.
        raise BrokenPipeError from None


def _is_closed_pipe(ended: BaseException) -> bool:
    """Tell whether every error, in nested groups too, means that the assistant is gone."""
    inner = getattr(ended, "exceptions", None)
    return isinstance(ended, BrokenPipeError) if inner is None else all(_is_closed_pipe(one) for one in inner)

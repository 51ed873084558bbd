"""``memprof explain``: each allocation alive at one instant, and how its category is known."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from memprof.cli.options import (
    analysed,
    device_option,
    emit,
    format_option,
    json_option,
    redact_option,
    rules_option,
)
from memprof.errors import UsageError

__all__ = ["command"]

_DEFAULT_TOP = 20


@click.command(name="explain", short_help="List each allocation alive at one instant.")
@click.argument("snapshot", type=click.Path(path_type=Path))
@click.option(
    "--at", default="peak", metavar="peak|device-peak|phase:NAME|TIME_US",
    help="The instant: the allocated peak (default), the device peak, a phase's peak, or a time in the recording.",
)  # fmt: skip
@click.option("--category", metavar="NAME", help="Only this category.")
@click.option("--address", metavar="ADDRESS", help="Only the allocation that holds this address (0x... or decimal).")
@click.option("--top", type=click.IntRange(min=1), metavar="N", help=f"The N largest; default: {_DEFAULT_TOP}.")
@click.option("--all", "everything", is_flag=True, help="Every one.")
@device_option
@format_option
@json_option
@rules_option
@redact_option
def command(
    snapshot: Path,
    at: str,
    category: str | None,
    address: str | None,
    top: int | None,
    everything: bool,
    device: int | None,
    style: str,
    json_file: Path | None,
    rules: Path | None,
    redact: bool,
) -> None:
    """List the allocations of SNAPSHOT alive at one instant, largest first.

    For each: its bytes, category and detail, the evidence with the rule's name, other categories it could be, the
    phase that made it, its lifetime and its stack.
    """
    if everything and top is not None:
        raise UsageError("--all and --top exclude each other; give one.")
    where = _address(address)
    analysis = analysed(snapshot, device, rules)
    found = analysis.explain(at, category, None if everything else top or _DEFAULT_TOP, where)
    answer: dict[str, Any] = {"schema": "memprof.explain/1", "allocations": found}
    if redact:
        from memprof.redact import redact as redacted

        answer = redacted(answer)
    _write(answer, json_file, style, at)


def _address(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return int(text, 0)
    except ValueError:
        raise UsageError(f"--address {text!r} is no address; write it like 0x7f0000000000 or in decimal.") from None


def _write(answer: dict[str, Any], json_file: Path | None, style: str, at: str) -> None:
    from memprof.reports.json import dumps, write_json

    to_stdout = json_file is not None and str(json_file) == "-"
    if json_file is not None and not to_stdout:
        write_json(answer, json_file)
        click.echo(f"JSON: {json_file}", err=True)
    if to_stdout or style == "json":
        emit(dumps(answer))
        return
    from memprof.reports.document.tables import single_allocations
    from memprof.reports.document.text import size

    rows = single_allocations(answer["allocations"])
    total = sum(row.bytes for row in rows)
    click.echo(
        f"{len(rows)} allocation{'' if len(rows) == 1 else 's'}, {size(total)}, alive at {at}, largest first", err=True
    )
    if style == "markdown":
        from memprof.reports.markdown import render_allocations

        emit(render_allocations(rows))
        return
    from memprof.reports.terminal.report import print_allocations

    print_allocations(rows, sys.stdout)

"""``memprof report``: one snapshot, or the ranks of one run, said in a table, a JSON file or a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memprof.cli.options import (
    analysed,
    device_option,
    format_option,
    json_option,
    print_report,
    redact_option,
    rules_option,
    save_json,
    working,
)
from memprof.errors import UsageError

if TYPE_CHECKING:
    from memprof.analysis import Analysis

__all__ = ["command"]


@click.command(name="report", short_help="Say where the memory of a snapshot went.")
@click.argument("snapshots", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="SNAPSHOT...")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE.html", help="Write the HTML page to FILE.html."
)
@device_option
@format_option
@json_option
@click.option(
    "--step", type=click.IntRange(min=0), metavar="N",
    help="Of a folder: the step to report; default: the newest that most ranks recorded.",
)  # fmt: skip
@click.option(
    "--allocations", default="50", metavar="N|all", help="How many of the largest allocations to list; default: 50."
)
@rules_option
@redact_option
def command(
    snapshots: tuple[Path, ...],
    output: Path | None,
    device: int | None,
    style: str,
    json_file: Path | None,
    step: int | None,
    allocations: str,
    rules: Path | None,
    redact: bool,
) -> None:
    """Say where the memory of SNAPSHOT went: what, in which phase, and how that is known.

    SNAPSHOT is a file from memprof or from torch.cuda.memory._dump_snapshot: a pickle (gzip'd or not) or JSON.
    Nothing in it is executed. Several of them (or their reports' JSON), or the folder of a run, are taken as the ranks
    of one run: the fullest is shown, all are put side by side, and those that are missing are named.
    """
    listed = _how_many(allocations)
    to_stdout = json_file is not None and str(json_file) == "-"
    if to_stdout and style == "markdown":
        raise UsageError("--json - prints JSON alone on standard output; drop --format markdown or name a file.")
    if len(snapshots) > 1 or snapshots[0].is_dir():
        from memprof.cli.rank_files import read_ranks

        ranks = read_ranks(snapshots, step, device, rules, listed)
        report, analysis = ranks.report, ranks.analysis
    else:
        if step is not None:
            raise UsageError("--step chooses among the recordings of a folder; this is one file.")
        analysis = analysed(snapshots[0], device, rules)
        report = analysis.to_dict(listed)
    if redact:
        from memprof.redact import redact as redacted

        report = redacted(report)
    save_json(report, None if to_stdout else json_file)
    _write_page(report, analysis, output, redact)
    print_report(report, "json" if to_stdout else style)


def _how_many(allocations: str) -> int | None:
    if allocations == "all":
        return None
    if not allocations.isdecimal():
        raise UsageError(f"--allocations {allocations!r} is neither a number nor 'all'.")
    return int(allocations)


def _write_page(report: dict[str, Any], analysis: Analysis | None, path: Path | None, redact: bool) -> None:
    if path is None:
        return
    from memprof.reports.document import build_document, document_of
    from memprof.reports.html import write_html

    with working("Writing the page"):
        if analysis is None:
            write_html(build_document(report), path)
        else:
            write_html(document_of(analysis, redact=redact, report=report if report["ranks"] else None), path)
    click.echo(f"Page: {path}", err=True)

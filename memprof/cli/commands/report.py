"""``memprof report``: one snapshot, or the ranks of one run, said in a table, a JSON file or a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from memprof.cli.advising import check_card, end_with_combination, estimated, seconds_option, simulated
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
    from memprof.analysis.analysis import Analysis

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
@click.option("--advise", is_flag=True, help="Find what would lower the peak by simulating the run with each change.")
@click.option("--gpu", metavar="NAME|SIZE", help="With --advise: the changes that make the run fit this card.")
@seconds_option
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
    advise: bool,
    gpu: str | None,
    seconds: float,
    rules: Path | None,
    redact: bool,
) -> None:
    """Say where the memory of SNAPSHOT went: what, in which phase, and how that is known.

    SNAPSHOT is a file from memprof or from torch.cuda.memory._dump_snapshot: a pickle (gzip'd or not) or JSON.
    Nothing in it is executed. Several of them (or their reports' JSON), or the folder of a run, are taken as the ranks
    of one run: the fullest is shown, all are put side by side, and those that are missing are named.

    What would lower the peak is estimated from the recorded sizes, at once. With --advise each change is simulated
    instead, which needs TRL and takes minutes. Exit code 4: nothing was found that makes the run fit --gpu.
    """
    _check_advice(advise, gpu)
    listed = _how_many(allocations)
    to_stdout = json_file is not None and str(json_file) == "-"
    if to_stdout and style == "markdown":
        raise UsageError("--json - prints JSON alone on standard output; drop --format markdown or name a file.")
    if len(snapshots) > 1 or snapshots[0].is_dir():
        from memprof.cli.inputs import read_ranks

        ranks = read_ranks(snapshots, step, device, rules, listed)
        report, analysis = ranks.report, ranks.analysis
    else:
        if step is not None:
            raise UsageError("--step chooses among the recordings of a folder; this is one file.")
        analysis = analysed(snapshots[0], device, rules)
        report = analysis.to_dict(listed)
    if advise:
        report = simulated(estimated(report), gpu, seconds)
    if redact:
        from memprof.redact import redact as redacted

        report = redacted(report)
    save_json(report, None if to_stdout else json_file)
    _write_page(report, analysis, output, redact, report if report["ranks"] or advise else None)
    print_report(report, "json" if to_stdout else style)
    if advise and style == "text" and not to_stdout:
        _print_changes(report)
    end_with_combination(report)


def _check_advice(advise: bool, gpu: str | None) -> None:
    if not advise:
        if gpu is not None:
            raise UsageError("--gpu asks which changes make the run fit a card: add --advise.")
        if click.get_current_context().get_parameter_source("seconds") is ParameterSource.COMMANDLINE:
            raise UsageError("--seconds is for simulating: add --advise.")
        return
    check_card(gpu)
    from memprof.cli.commands.simulate import need_torch

    try:
        need_torch()
    except UsageError as error:
        raise UsageError(f"--advise simulates: {error} Without --advise a report has estimates.") from None


def _print_changes(report: dict[str, Any]) -> None:
    """Below the table, which has only the first of them."""
    from memprof.reports.document.build import build_document
    from memprof.reports.terminal.report import print_changes

    print_changes(build_document(report))


def _how_many(allocations: str) -> int | None:
    if allocations == "all":
        return None
    if not allocations.isdecimal():
        raise UsageError(f"--allocations {allocations!r} is neither a number nor 'all'.")
    return int(allocations)


def _write_page(
    report: dict[str, Any],
    analysis: Analysis | None,
    path: Path | None,
    redact: bool,
    more: dict[str, Any] | None,
) -> None:
    """``more`` is the report where it says more than the analysis."""
    if path is None:
        return
    from memprof.reports.document.build import build_document, document_of
    from memprof.reports.html.page import write_html

    with working("Writing the page"):
        if analysis is None:
            write_html(build_document(report), path)
        else:
            write_html(document_of(analysis, redact=redact, report=more), path)
    click.echo(f"Page: {path}", err=True)

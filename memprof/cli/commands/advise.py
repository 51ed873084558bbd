"""``memprof advise``: what would lower a recorded run's peak, and by how much."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memprof.cli.advising import check_card, end_with_combination, estimated, seconds_option, simulated
from memprof.cli.inputs import GivenRun, read_run
from memprof.cli.options import (
    device_option,
    emit,
    format_option,
    json_option,
    redact_option,
    save_json,
    working,
)
from memprof.errors import UsageError

if TYPE_CHECKING:
    from memprof.reports.document.model import Document

__all__ = ["command"]


@click.command(name="advise", short_help="What would lower a run's peak.")
@click.argument("source", type=click.Path(path_type=Path), metavar="SNAPSHOT|DIR|REPORT.json")
@click.option("--gpu", metavar="NAME|SIZE", help="Find the changes that make the run fit this card, such as 24GB.")
@seconds_option
@click.option("--estimate", "only_estimate", is_flag=True, help="Simulate nothing: recorded sizes only, at once.")
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Processes; default: one a core.")
@click.option("--no-cache", is_flag=True, help="Simulate again what is already known.")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE.html", help="Write the run's page.")
@device_option
@format_option
@json_option
@redact_option
def command(
    source: Path,
    gpu: str | None,
    seconds: float,
    only_estimate: bool,
    workers: int | None,
    no_cache: bool,
    output: Path | None,
    device: int | None,
    style: str,
    json_file: Path | None,
    redact: bool,
) -> None:
    """Say what would lower the peak of a run: changes to its settings, ranked by the bytes each saves at the peak, with
    what each costs and whether gradients stay the same. Each change is evaluated by simulating the changed run.

    SOURCE is a snapshot, a folder of the callback's (the recording with the highest peak is taken), or a report's JSON.

    Exit code 4: --gpu was given, and no set of changes was found that fits it.
    """
    to_stdout = json_file is not None and str(json_file) == "-"
    if to_stdout and style == "markdown":
        raise UsageError("--json - prints JSON alone on standard output; drop --format markdown or name a file.")
    check_card(gpu)
    if gpu is not None and only_estimate:
        raise UsageError("--gpu is answered by simulating, and --estimate simulates nothing; drop one of them.")
    given = read_run(source, device)
    report = estimated(given.report)
    if not only_estimate:
        report = _simulated(report, gpu, seconds, workers, not no_cache)
    if redact:
        from memprof.redact import redact as redacted

        report = redacted(report)
    document = _document(report, given, redact, output is not None)
    if output is not None:
        from memprof.reports.html.page import write_html

        write_html(document, output)
        click.echo(f"Page: {output}", err=True)
    save_json(report, None if to_stdout else json_file)
    _print(document, "json" if to_stdout else style)
    end_with_combination(report)


def _simulated(
    report: dict[str, Any], gpu: str | None, seconds: float, workers: int | None, use_cache: bool
) -> dict[str, Any]:
    """Where what simulates is not installed, estimates and a note; unless a card was asked about."""
    from memprof.cli.commands.simulate import need_torch

    try:
        need_torch()
    except UsageError as error:
        if gpu is not None:
            raise
        return {**report, "notes": [f"{str(error).rstrip('.')}; savings are estimates.", *report["notes"]]}
    return simulated(report, gpu, seconds, workers, use_cache)


def _document(report: dict[str, Any], given: GivenRun, redact: bool, page: bool) -> Document:
    from memprof.reports.document.build import build_document, document_of

    if page and given.analysis is not None:
        with working("Writing the page"):
            return document_of(given.analysis, redact=redact, report=report)
    return build_document(report)


def _print(document: Document, style: str) -> None:
    if style == "json":
        from memprof.reports.json import dumps

        emit(dumps(document.report))
        return
    if style == "markdown":
        from memprof.reports.markdown import render_advice

        emit(render_advice(document.advice))
        return
    from memprof.reports.terminal.report import print_advice

    print_advice(document)

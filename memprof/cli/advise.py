"""``memprof advise``: what would lower a recorded run's peak, and by how much."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memprof.cli.options import (
    device_option,
    emit,
    format_option,
    json_option,
    redact_option,
    save_json,
    working,
)
from memprof.cli.runs import GivenRun, read_run
from memprof.errors import UsageError

if TYPE_CHECKING:
    from memprof.reports.model import Document

__all__ = ["command"]


@click.command(name="advise", short_help="What would lower a run's peak.")
@click.argument("source", type=click.Path(path_type=Path), metavar="SNAPSHOT|DIR|REPORT.json")
@click.option("--gpu", metavar="NAME|SIZE", help="Find the changes that make the run fit this card, such as 24GB.")
@click.option(
    "--seconds", type=click.FloatRange(min=0), default=180.0, show_default=True, metavar="S",
    help="Stop starting simulations after this long; what is left is estimated.",
)  # fmt: skip
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
    if gpu is not None:
        from memprof.simulate.gpus import find_gpu

        find_gpu(gpu)
        if only_estimate:
            raise UsageError("--gpu is answered by simulating, and --estimate simulates nothing; drop one of them.")
    given = read_run(source, device)
    report = {**given.report, "advice": _estimates(given.report)}
    if not only_estimate:
        report |= _simulated(report, gpu, seconds, workers, not no_cache)
    if redact:
        from memprof.redact import redact as redacted

        report = redacted(report)
    document = _document(report, given, redact, output is not None)
    if output is not None:
        from memprof.reports.html import write_html

        write_html(document, output)
        click.echo(f"Page: {output}", err=True)
    save_json(report, None if to_stdout else json_file)
    _print(document, "json" if to_stdout else style)
    if "combination" in report and not report["combination"]["fits"]:
        sys.exit(4)


def _estimates(report: dict[str, Any]) -> list[dict[str, Any]]:
    from memprof.advice import estimated_advice

    return estimated_advice(report)


# -- simulating --------------------------------------------------------------------------------------------------------


def _simulated(
    report: dict[str, Any], gpu: str | None, seconds: float, workers: int | None, use_cache: bool
) -> dict[str, Any]:
    from memprof.advice.advise import simulated_parts
    from memprof.cli.plan import progress
    from memprof.cli.simulate import need_torch
    from memprof.plan.cache import cache_folder

    try:
        need_torch()
    except UsageError as error:
        if gpu is not None:
            raise
        return {"notes": [f"{str(error).rstrip('.')}; savings are estimates.", *report["notes"]]}
    with progress() as told:
        return simulated_parts(
            report, cache_folder() / "models", gpu=gpu, seconds=seconds, workers=workers, use_cache=use_cache,
            progress=told,
        )  # fmt: skip


# -- saying it ---------------------------------------------------------------------------------------------------------


def _document(report: dict[str, Any], given: GivenRun, redact: bool, page: bool) -> Document:
    from memprof.reports.document import build_document, document_of

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
    from memprof.reports.terminal_advice import print_advice

    print_advice(document)

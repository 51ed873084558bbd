"""``memprof advise``: what would lower a recorded run's peak, and by how much."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from memprof.cli.advising import check_card, estimated, simulated
from memprof.cli.answers import fits_asked_card, redacted, report_answer
from memprof.cli.emit import Output, emit, output_options
from memprof.cli.inputs import read_run
from memprof.cli.options import RECORDING, device_option, redact_option, seconds_option, snapshot_option
from memprof.errors import UsageError

if TYPE_CHECKING:
    from memprof.analysis.analysis import Analysis
    from memprof.report import Report


@click.command(name="advise")
@click.argument("source", type=RECORDING, metavar="SNAPSHOT|DIR|REPORT.json")
@click.option("--gpu", metavar="NAME|SIZE", help="Find the changes that make the run fit this GPU, such as 24GB.")
@seconds_option
@click.option("--estimate", "only_estimate", is_flag=True, help="Simulate nothing: estimate from recorded sizes.")
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Simulate in N processes; default: one a core."
)
@click.option("--no-cache", is_flag=True, help="Simulate again what is already known.")
@output_options("advise", page="Write the run's HTML page to FILE.html.")
@device_option
@snapshot_option
@redact_option
def command(
    source: Path,
    gpu: str | None,
    seconds: float,
    only_estimate: bool,
    workers: int | None,
    no_cache: bool,
    output: Output,
    device: int | None,
    number: int | None,
    redact: bool,
) -> None:
    """Find what would lower a run's peak: changes to its settings, the one that saves most first, with what each costs
    and whether gradients stay the same.

    memprof simulates each changed run, or estimates one that it cannot simulate, and says so. Of DIR it takes the
    recording with the highest peak.

    Exit code 4: no set of changes was found that makes the run fit --gpu.
    """
    check_card(gpu)
    run = read_run(source, device, number)
    report = estimated(run.report, gpu if only_estimate else None, analysis=run.analysis)
    if not only_estimate:
        report = _simulated(report, run.analysis, gpu, seconds, workers, not no_cache)
    answer = report_answer("advise", redacted(report, redact, run.analysis), run.analysis, redact=redact)
    emit(answer, output, fits=fits_asked_card(report))


def _simulated(
    report: Report, analysis: Analysis | None, gpu: str | None, seconds: float, workers: int | None, use_cache: bool
) -> Report:
    """Simulate the changes; without TRL keep the estimates and note it."""
    from memprof.cli.simulating import need_torch

    try:
        need_torch()
    except UsageError as error:
        return estimated(report, gpu, str(error), analysis)
    return simulated(report, gpu, seconds, workers, use_cache, analysis)

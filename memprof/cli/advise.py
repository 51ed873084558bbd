"""``memprof advise``: what would lower a recorded run's peak, and by how much."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
from memprof.errors import InputError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

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
    """The report's parts that simulating gives; without simulating, a note that says why."""
    from memprof.simulate.like import place_model, settings_like

    try:
        _need_torch()
        likeness = settings_like(report["source"])
    except (InputError, UsageError) as error:
        if gpu is not None:
            raise
        return {"notes": [f"{str(error).rstrip('.')}; savings are estimates.", *report["notes"]]}
    from memprof.plan.cache import cache_folder

    settings = place_model(likeness, cache_folder() / "models")
    with _progress() as told:
        return _evaluated(report, settings, list(likeness.assumed), gpu, seconds, workers, use_cache, told)


def _evaluated(
    report: dict[str, Any],
    settings: Any,
    assumed: list[str],
    gpu: str | None,
    seconds: float,
    workers: int | None,
    use_cache: bool,
    told: Callable[[int, int], None] | None,
) -> dict[str, Any]:
    import os

    from memprof.advice.combine import combine
    from memprof.advice.estimate import run_of
    from memprof.advice.evaluate import evaluate_advice
    from memprof.plan.runner import runner

    notes = [*(f"Simulating this run: {words}." for words in assumed)]
    with runner(None, workers=workers, progress=told, use_cache=use_cache) as machine:
        batch = workers or max(1, min(os.cpu_count() or 1, 4))
        found = evaluate_advice(report, settings, machine, seconds=seconds, batch=batch)
    notes += [f"Not simulated: {name.replace('_', ' ')}, {why.rstrip('.')}." for name, why in found.refused.items()]
    changed: dict[str, Any] = {"advice": found.entries, "unchanged": _unchanged(report, found.base, assumed)}
    if gpu is not None:
        on_card = settings.with_(device="cuda")
        shift = _beyond(report, found.base) if settings.device == "cuda" else 0
        with runner(gpu, workers=workers, progress=told, use_cache=use_cache) as machine:
            together = combine(on_card, gpu, machine, run_of(report), shift=shift, seconds=max(seconds, 60.0) * 3)
        changed["combination"] = together.to_dict()
    return {**changed, "notes": [*notes, *report["notes"]]}


def _unchanged(report: dict[str, Any], base: dict[str, Any], assumed: list[str]) -> dict[str, Any]:
    measured = int(report["peak"]["allocated_bytes"])
    return {"measured_bytes": measured, "simulated_bytes": int(base["peak_bytes"]), "assumed": assumed}


def _beyond(report: dict[str, Any], base: dict[str, Any]) -> int:
    """What the recorded run reserved beyond its own simulation; nothing for a run that is a simulation itself."""
    reserved = report["device_peak"]["reserved_bytes"]
    if report["source"]["kind"] != "cuda" or reserved is None or base["device_peak_bytes"] is None:
        return 0
    return int(reserved - base["device_peak_bytes"])


def _need_torch() -> None:
    from memprof.cli.simulate import need_torch

    need_torch()


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    from memprof.cli.plan import _progress as progress

    with progress() as told:
        yield told


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

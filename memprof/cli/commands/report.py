"""``memprof report``: one snapshot, or the ranks of one run, as a table, a JSON file or a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from memprof.cli import options
from memprof.cli.answers import fits_asked_card, redacted, report_answer
from memprof.cli.emit import Output, emit, output_options
from memprof.cli.inputs import GivenRun, analysed, known_report, reuse_freed_memory
from memprof.cli.progress import working
from memprof.errors import UsageError

if TYPE_CHECKING:
    from memprof.analysis.source_files import SourceText
    from memprof.executors import ExecutorChoice
    from memprof.report import Report

_LISTED = 50


@click.command(name="report")
@click.argument("snapshots", type=options.RECORDING, nargs=-1, required=True, metavar="SNAPSHOT...")
@output_options("report", page="Write the HTML page to FILE.html.")
@options.device_option
@options.snapshot_option
@click.option(
    "--step", type=click.IntRange(min=0), metavar="N",
    help="Report this step of a folder; default: the newest that most ranks recorded.",
)  # fmt: skip
@click.option(
    "--capacity", metavar="NAME|SIZE",
    help="Report how far the run was from running out of memory on this GPU (4090, 24GB). Default: the recorded GPU.",
)  # fmt: skip
@click.option(
    "--role", metavar="NAME", help="Report this role of a folder (actor, reference, ...); default: who trains."
)
@options.executor_option
@click.option(
    "--keep-json", is_flag=True, help="Save each rank's report next to its snapshot; the next report reads it instead."
)
@click.option(
    "--allocations", default=str(_LISTED), metavar="N|all", help="List the N largest allocations; default: 50."
)
@click.option("--advise", is_flag=True, help="Simulate the run with each change that could lower its peak.")
@click.option("--gpu", metavar="NAME|SIZE", help="With --advise: find the changes that make the run fit this GPU.")
@options.seconds_option
@click.option(
    "--source", "source_folder", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR",
    help="Show the code of the program's lines on the page, from its files below DIR; default: as recorded.",
)  # fmt: skip
@options.rules_option
@options.no_cache_option
@options.redact_option
def command(
    snapshots: tuple[Path, ...],
    output: Output,
    device: int | None,
    number: int | None,
    step: int | None,
    role: str | None,
    capacity: str | None,
    executor: ExecutorChoice | None,
    keep_json: bool,
    allocations: str,
    advise: bool,
    gpu: str | None,
    seconds: float,
    source_folder: Path | None,
    rules: Path | None,
    redact: bool,
) -> None:
    """Show where the memory of SNAPSHOT went: what for, in which phase, and how that is known.

    SNAPSHOT is a pickle (gzip'd or not) or JSON, from memprof or torch.cuda.memory._dump_snapshot; memprof executes
    nothing in it. A report's JSON is read too; it has no timeline. Give several, or the folder of a run, to put its
    ranks side by side. A folder that verl, slime, torchtitan or another framework wrote may hold steps and roles:
    --step and --role choose.

    The report estimates what would lower the peak; --advise simulates each change instead, which needs TRL and takes
    minutes. Exit code 4: no changes were found that make the run fit --gpu.
    """
    _check_advice(advise, gpu)
    if source_folder is not None and (output.page is None or redact):
        raise UsageError("--source shows code on the page: give -o FILE.html, and no --redact.")
    card = None if capacity is None else _capacity(capacity)
    whole = output.page is not None or redact
    how = _Reading(device, rules, _how_many(allocations), executor, keep_json, whole, number)
    run = _read(snapshots, step, role, how, output)
    report = run.report
    if advise:
        from memprof.cli.advising import estimated, simulated

        report = simulated(estimated(report, analysis=run.analysis), gpu, seconds, analysis=run.analysis)
    report = report if card is None else _on_card(report, card)
    kind = "report_and_changes" if advise else "report"
    texts = None if source_folder is None else _texts(source_folder, run)
    shown = redacted(report, redact, run.analysis)
    answer = report_answer(kind, shown, run.analysis, redact=redact, texts=texts)
    emit(answer, output, fits=fits_asked_card(report))


def _capacity(gpu: str) -> int:
    """Return the memory of a GPU, by its name or size; UsageError for neither."""
    from memprof.config.gpus import capacity_bytes

    return capacity_bytes(gpu)


def _texts(folder: Path, run: GivenRun) -> Mapping[str, SourceText]:
    """Return the texts of the program's files below a folder; UsageError where there are none."""
    from memprof.analysis.source_files import by_file, texts_below

    files = list(by_file(run.report.source_lines))
    if not files:
        raise UsageError(f"--source {folder}: no stack of this recording names a file of the program.")
    created = None if run.analysis is None else run.analysis.snapshot.run.created
    if not (texts := texts_below(folder, files, created)):
        named = ", ".join(files[:3]) + (" ..." if len(files) > 3 else "")
        raise UsageError(f"--source {folder}: none of the program's files lies below it ({named}).")
    return texts


def _on_card(report: Report, n_bytes: int) -> Report:
    """Return the report with another GPU's memory, and the headline about it."""
    from msgspec.structs import replace

    from memprof.analysis.headline import with_headline
    from memprof.report.run import Capacity

    return with_headline(replace(report, capacity=Capacity(bytes=n_bytes, source="option")))


def _check_advice(advise: bool, gpu: str | None) -> None:
    if not advise:
        if gpu is not None:
            raise UsageError("--gpu requires --advise here: it finds the changes that make the run fit that GPU.")
        if click.get_current_context().get_parameter_source("seconds") is ParameterSource.COMMANDLINE:
            raise UsageError("--seconds is for simulating: add --advise.")
        return
    from memprof.cli.advising import check_card
    from memprof.cli.simulating import need_torch

    check_card(gpu)

    try:
        need_torch()
    except UsageError as error:
        raise UsageError(f"--advise simulates: {error} Without --advise a report has estimates.") from None


def _how_many(allocations: str) -> int | None:
    if allocations == "all":
        return None
    if not allocations.isdecimal():
        raise UsageError(f"--allocations {allocations!r} is neither a number nor 'all'.")
    return int(allocations)


@dataclass(frozen=True)
class _Reading:
    """How files are read. ``listed``: how many allocations to list, None for all. ``whole``: more than the report is
    needed. ``number``: of the snapshot in a file with several."""

    device: int | None
    rules: Path | None
    listed: int | None
    executor: ExecutorChoice | None
    keep_json: bool
    whole: bool
    number: int | None


def _read(snapshots: tuple[Path, ...], step: int | None, role: str | None, how: _Reading, output: Output) -> GivenRun:
    if role is not None and not (len(snapshots) == 1 and snapshots[0].is_dir()):
        raise UsageError("--role chooses among the dumps of a folder; give one folder.")
    if len(snapshots) > 1 or snapshots[0].is_dir():
        if how.number is not None:
            raise UsageError("--snapshot chooses in one file; give one file.")
        return _read_ranks(snapshots, step, role, how, output)
    if step is not None:
        raise UsageError("--step chooses among the recordings of a folder; this is one file.")
    if how.keep_json:
        raise UsageError("--keep-json saves the reports of several ranks. For one file use --json FILE.")
    if how.executor is not None:
        raise UsageError(f"--executor {how.executor} shares out the ranks of a run; this is one file.")
    report = known_report(snapshots[0])
    if report is not None:
        if how.device is not None or how.rules is not None or how.number is not None:
            raise UsageError("--device, --rules and --snapshot need the snapshot; this is a report's JSON.")
        return GivenRun(snapshots[0], report, None)
    return _read_one(snapshots[0], how)


def _read_one(path: Path, how: _Reading) -> GivenRun:
    from memprof.advice.analyze_with_advice import ReportBuilder

    report = ReportBuilder(how.device, how.rules, how.listed, how.number)
    if not how.whole:
        reuse_freed_memory(path)
        with working(f"Reading {path.name}", path):
            return GivenRun(path, report(path), None)
    analysis = analysed(path, how.device, how.rules, how.number)
    return GivenRun(path, report.report_of(analysis, path), analysis)


def _read_ranks(
    places: tuple[Path, ...], step: int | None, role: str | None, how: _Reading, output: Output
) -> GivenRun:
    """Read the ranks of one run; read the shown rank's snapshot whole for a page or for more allocations."""
    from msgspec.structs import replace

    from memprof.advice.analyze_with_advice import ReportBuilder
    from memprof.analysis.ranks.reading import RanksReader, read_ranks
    from memprof.report.files import write_answer

    as_usual = how.device is None and how.rules is None
    if how.keep_json and any("://" in str(place) for place in places):
        raise UsageError("--keep-json writes next to the snapshots, but a URL can only be read.")
    if how.keep_json and not as_usual:
        raise UsageError("--keep-json can't be combined with --device or --rules.")
    builder = ReportBuilder(how.device, how.rules, advice=how.keep_json)
    reader = RanksReader(builder, as_usual, write_answer if how.keep_json else None)
    with working("Reading the ranks", places[0]):
        read = read_ranks(places, reader, step=step, role=role, executor=how.executor or "local")
    report, shown = read.report, read.shown.snapshot
    complete = read.from_json or how.keep_json
    enough = complete and output.page is None and how.listed == _LISTED
    if shown is None or enough or known_report(shown) is not None:
        return GivenRun(read.shown.path, report, None)
    run = _read_one(shown, how)
    peak = replace(report.peak, allocations=run.report.peak.allocations)
    if not complete:
        report = replace(report, advice=run.report.advice, headline=run.report.headline)
    return GivenRun(shown, replace(report, peak=peak), run.analysis if output.page or how.listed != _LISTED else None)

"""``memprof compare``: runs side by side."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memprof.cli.answers import compared_document, comparison_answer, redacted, redacted_parts
from memprof.cli.emit import Output, emit, output_options
from memprof.cli.inputs import analysed, chosen_file
from memprof.cli.options import RECORDING, device_option, redact_option, rules_option
from memprof.errors import AboveLimit, InputError, UsageError

if TYPE_CHECKING:
    from memprof.analysis.compare import ComparisonColumn
    from memprof.report import Report
    from memprof.report.comparison import Comparison
    from memprof.reports.document.model import Document


@dataclass(frozen=True)
class _Column:
    """Hold one run that was read; ``label`` is empty where the file has none, ``document`` has its timeline."""

    path: Path
    label: str
    run: ComparisonColumn
    document: Document | None


@click.command(name="compare")
@click.argument("inputs", type=RECORDING, nargs=-1, required=True, metavar="A B...")
@output_options("compare", page="Write the HTML page to FILE.html.")
@click.option("--label", "labels", multiple=True, metavar="TEXT", help="Name a run; give it once for each, in order.")
@click.option("--capacity", metavar="NAME|SIZE", help="Report which runs fit a GPU, such as 4090 or 24GB.")
@click.option(
    "--published", metavar="unsloth-2025", help="Add a published table's columns: unsloth-2025 (Unsloth against TRL)."
)
@click.option(
    "--fail-above", metavar="PERCENT",
    help="Exit with 1 if a later run's allocated peak exceeds the first's by more than this, such as 2%.",
)  # fmt: skip
@device_option
@rules_option
@redact_option
def command(
    inputs: tuple[Path, ...],
    output: Output,
    labels: tuple[str, ...],
    capacity: str | None,
    published: str | None,
    fail_above: str | None,
    device: int | None,
    rules: Path | None,
    redact: bool,
) -> None:
    """Put runs side by side and show what differs; the others are compared with the first.

    Each of A B... is a snapshot, a report's JSON, a folder (its recording with the highest peak) or a comparison's JSON
    (each of its runs). With --published, one run is enough.
    """
    from msgspec.structs import replace

    from memprof.analysis.compare import compare, over_limit
    from memprof.analysis.headline import headline_of_comparison
    from memprof.config.gpus import capacity_bytes

    size, limit = None if capacity is None else capacity_bytes(capacity), _percent(fail_above)
    columns = [c for path in inputs for c in _read(path, device, rules, redact, output.page is not None)]
    columns += _published(published)
    answer = compare(_labelled(columns, labels, redact), size)
    only_in = redacted_parts(answer.allocations_only_in, redact)
    answer = replace(answer, allocations_only_in=only_in)
    answer = replace(answer, headline=headline_of_comparison(answer))
    failures = over_limit(answer, limit) if limit is not None else []
    emit(comparison_answer(answer, [c.document for c in columns]), output)
    if failures:
        raise AboveLimit(f"more than {fail_above} above: {'; '.join(failures)}.")


def _percent(text: str | None) -> float | None:
    if text is None:
        return None
    number = text.strip().removesuffix("%").strip()
    if not number.replace(".", "", 1).isdecimal():
        raise UsageError(f"--fail-above {text!r} is no percentage; write it like 2%.")
    return float(number)


def _read(path: Path, device: int | None, rules: Path | None, redact: bool, page: bool) -> list[_Column]:
    from memprof.report import Report
    from memprof.report.comparison import Comparison
    from memprof.report.files import read_answer, schema_of

    path = chosen_file(path)
    answer = read_answer(path)
    if answer is None:
        return [_snapshot(path, device, rules, redact, page)]
    if isinstance(answer, Report):
        return [_report(path, "", answer, redact)]
    if isinstance(answer, Comparison):
        return _comparison(path, answer, redact)
    raise InputError(
        f"{path}: {schema_of(answer)!r:.60} cannot be compared; give snapshots, memprof.report/1 or memprof.compare/1."
    )


def _snapshot(path: Path, device: int | None, rules: Path | None, redact: bool, page: bool) -> _Column:
    from memprof.analysis.allocations.holdings import holdings_of_analysis
    from memprof.analysis.compare import ComparisonColumn, badge_of

    analysis = analysed(path, device, rules)
    report = redacted(analysis.report, redact, analysis)
    document = compared_document(analysis, page, redact)
    return _Column(
        path, "", ComparisonColumn("", badge_of(report), report, held=holdings_of_analysis(analysis)), document
    )


def _report(path: Path, label: str, report: Report, redact: bool) -> _Column:
    from memprof.analysis.allocations.differences import holdings_of_report
    from memprof.analysis.compare import ComparisonColumn, badge_of

    report = redacted(report, redact)
    return _Column(path, label, ComparisonColumn("", badge_of(report), report, held=holdings_of_report(report)), None)


def _comparison(path: Path, comparison: Comparison, redact: bool) -> list[_Column]:
    from memprof.analysis.compare import ComparisonColumn

    return [
        _report(path, run.label, run.report, redact)
        if run.report is not None
        else _Column(path, run.label, ComparisonColumn("", run.badge, published=run.published), None)
        for run in comparison.runs
    ]


def _published(name: str | None) -> list[_Column]:
    if name is None:
        return []
    from memprof.analysis.compare import ComparisonColumn
    from memprof.analysis.published_tables import published_columns

    return [
        _Column(Path(), rows.label, ComparisonColumn("", "published", published=rows), None)
        for rows in published_columns(name)
    ]


def _labelled(columns: list[_Column], labels: tuple[str, ...], redact: bool) -> list[ComparisonColumn]:
    """Label the runs: by the user's words, the file's own, or the part in which their paths differ."""
    from memprof.analysis.compare import distinct, short_names

    own = [c for c in columns if c.run.published is None]
    if labels and len(labels) != len(own):
        raise UsageError(f"{len(labels)} times --label for {len(own)} runs; give one for each or none.")
    paths = short_names([c.path for c in columns])
    if redact:
        from memprof.redact import redact_text

        paths = [redact_text(path) for path in paths]
        columns = [dataclasses.replace(c, label=redact_text(c.label)) for c in columns]
    given = iter(labels)
    heads = [
        next(given) if labels and c.run.published is None else c.label or path
        for c, path in zip(columns, paths, strict=True)
    ]
    return [dataclasses.replace(c.run, label=head) for c, head in zip(columns, distinct(heads), strict=True)]

"""Make answers of what commands found: reports and comparisons, ready for :func:`memprof.cli.emit.emit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from memprof.reports.renderers import Answer

if TYPE_CHECKING:
    from memprof.analysis.analysis import Analysis
    from memprof.analysis.source_files import SourceText
    from memprof.report import Report
    from memprof.report.base import Model
    from memprof.report.comparison import Comparison
    from memprof.reports.document.model import Document

_M = TypeVar("_M", bound="Model")
# Fewer than in a page of one run: several timelines share a page.
_EXACT_EVENTS = 100_000


def report_answer(
    kind: str,
    report: Report,
    analysis: Analysis | None = None,
    *,
    redact: bool = False,
    texts: Mapping[str, SourceText] | None = None,
) -> Answer:
    """Make the answer of a command that reports one run.

    ``kind`` is one of :data:`memprof.reports.renderers.ANSWERS`; ``report`` is redacted already where that was asked
    for; ``analysis`` is what it was made of, for a page with the timeline, which ``redact`` concerns too; ``texts`` are
    of the program's files, by path, in place of those that were recorded.
    """

    def document() -> Document:
        from memprof.reports.document.build import build_document

        return build_document(report, texts=texts)

    def page() -> Document:
        from memprof.reports.document.build import document_of

        assert analysis is not None
        return document_of(analysis, redact=redact, report=report, texts=texts)

    return Answer(kind, report, document, None if analysis is None else page)


def comparison_answer(comparison: Comparison, documents: Sequence[Document | None]) -> Answer:
    """Make the answer of a comparison; ``documents`` are the runs' own, if their timelines are known."""
    from memprof.reports.document.comparison import build_comparison

    return Answer(
        "compare", comparison, lambda: build_comparison(comparison), lambda: build_comparison(comparison, documents)
    )


def compared_document(analysis: Analysis | None, page: bool, redact: bool = False) -> Document | None:
    """Make the document of one of the runs compared, with its timeline, where a page is to show it."""
    if analysis is None or not page:
        return None
    from memprof.reports.document.build import document_of

    return document_of(analysis, redact=redact, exact=_EXACT_EVENTS)


def redacted(answer: _M, redact: bool, analysis: Analysis | None = None) -> _M:
    """Return an answer ready to share: with ``--redact``, a copy without paths, names and tokens, and without those of
    machines and users that the snapshot of ``analysis`` gives away."""
    if not redact:
        return answer
    from memprof.report import codec

    return codec.redacted(answer, _told(analysis))


def redacted_parts(parts: Sequence[_M], redact: bool, analysis: Analysis | None = None) -> tuple[_M, ...]:
    """Return parts of an answer ready to share, as :func:`redacted` does."""
    if not redact:
        return tuple(parts)
    from memprof.report import codec

    return codec.redacted_parts(parts, _told(analysis))


def _told(analysis: Analysis | None) -> object:
    from msgspec import to_builtins

    return None if analysis is None else to_builtins(analysis.snapshot.run_without_sources)


def fits_asked_card(report: Report) -> bool:
    """Tell whether changes that make the run fit ``--gpu`` were found; True without ``--gpu``."""
    return report.combination is None or report.combination.fits

"""Make the model's classes of the plain data that tests write down, as reading memprof's JSON does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from memprof.reports.document import build, comparison, summary
from memprof.reports.document.comparison import ComparisonDocument
from memprof.reports.document.model import AllocationRow, Document, Room
from memprof.reports.document.plan import PlanDocument
from memprof.reports.document.tables import allocation_rows

from memprof.analysis.allocations.alike import TimedGroup, fold
from memprof.analysis.curves import Series, SeriesSpan
from memprof.report import Report
from memprof.report.allocations import Allocation, AllocationGroup
from memprof.report.base import Model
from memprof.report.codec import from_builtins
from memprof.report.comparison import Comparison
from memprof.report.plan import Plan
from memprof.text import clean_text
from memprof.vocabulary import Category

_M = TypeVar("_M", bound=Model)


def typed(plain: Mapping[str, Any], kind: type[_M]) -> _M:
    """Return a part of the model, its text as the reader of JSON cleans it."""
    return from_builtins(_clean(plain), kind)


def report_of(plain: Mapping[str, Any]) -> Report:
    return typed(plain, Report)


def comparison_of(plain: Mapping[str, Any]) -> Comparison:
    return typed(plain, Comparison)


def rows_of(groups: Iterable[Mapping[str, Any]], whole: int, *how: Any) -> tuple[AllocationRow, ...]:
    return allocation_rows([_group(group) for group in groups], whole, *how)


def build_document(
    report: Mapping[str, Any],
    series: Mapping[str, Any] | None = None,
    label: str | None = None,
    allocations: Sequence[Mapping[str, Any]] | None = None,
    elsewhere: Sequence[Mapping[str, Any]] = (),
) -> Document:
    """Fill the document of a report written as plain data."""
    groups = None if allocations is None else [_group(group) for group in allocations]
    others = fold(typed(allocation, Allocation) for allocation in elsewhere)
    points = None if series is None else series_of(series)
    return build.build_document(report_of(report), points, label, groups, others)


def build_comparison(plain: Mapping[str, Any], documents: Sequence[Document | None] = ()) -> ComparisonDocument:
    """Lay out a comparison written as plain data."""
    return comparison.build_comparison(comparison_of(plain), documents)


def build_plan(plain: Mapping[str, Any]) -> PlanDocument:
    """Lay out a plan written as plain data."""
    return PlanDocument(typed(plain, Plan))


def room_of(report: Mapping[str, Any]) -> Room | None:
    return summary.room_of(report_of(report))


def series_of(plain: Mapping[str, Any]) -> Series:
    """Return a timeline's points written as plain data."""
    names = ("phase", "step", "start_point", "end_point")
    spans = ({name: span[name] for name in names} for span in plain["phase_spans"])
    return Series(
        instants=plain["instant"],
        time_us=plain["time_us"],
        spans=tuple(SeriesSpan(**span) for span in spans),
        categories={Category(name): points for name, points in plain["categories"].items()},
        reserved=plain["reserved"],
        peak_point=plain["peak_point"],
    )


def _group(plain: Mapping[str, Any]) -> AllocationGroup:
    """Return a group of allocations; a single one is a group of one."""
    found = {"count": 1, "each_bytes": plain["bytes"], **plain}
    return typed(found, TimedGroup if "lives" in found else AllocationGroup)


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {clean_text(key): _clean(item) for key, item in value.items()}
    return [_clean(item) for item in value] if isinstance(value, (list, tuple)) else value

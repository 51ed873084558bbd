"""Make the model's classes of the plain data that tests write down, as reading memprof's JSON does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from memprof.reports.document import analysed, build, comparison, summary
from memprof.reports.document.comparison import ComparisonDocument
from memprof.reports.document.model import AllocationRow, Document, Room
from memprof.reports.document.plan import PlanDocument
from memprof.reports.document.tables import allocation_rows

from memprof.report import Report
from memprof.report.base import Model
from memprof.report.codec import from_builtins
from memprof.report.comparison import Comparison
from memprof.report.plan import Plan
from memprof.text import clean_text

_M = TypeVar("_M", bound=Model)


def typed(plain: Mapping[str, Any], kind: type[_M]) -> _M:
    """Return a part of the model, its text as the reader of JSON cleans it."""
    return from_builtins(_clean(plain), kind)


def report_of(plain: Mapping[str, Any]) -> Report:
    return typed(plain, Report)


def comparison_of(plain: Mapping[str, Any]) -> Comparison:
    return typed(plain, Comparison)


def rows_of(groups: Iterable[Mapping[str, Any]], whole: int, *how: Any) -> tuple[AllocationRow, ...]:
    return allocation_rows(analysed.groups_of(_grouped(group) for group in groups), whole, *how)


def build_document(
    report: Mapping[str, Any],
    series: Mapping[str, Any] | None = None,
    label: str | None = None,
    allocations: Sequence[Mapping[str, Any]] | None = None,
    elsewhere: Sequence[Mapping[str, Any]] = (),
) -> Document:
    """Fill the document of a report written as plain data."""
    groups = None if allocations is None else analysed.groups_of(_grouped(group) for group in allocations)
    others = analysed.fold(analysed.allocations_of(_clean(allocation) for allocation in elsewhere))
    points = None if series is None else analysed.series_of(series)
    return build.build_document(report_of(report), points, label, groups, others)


def build_comparison(plain: Mapping[str, Any], documents: Sequence[Document | None] = ()) -> ComparisonDocument:
    """Lay out a comparison written as plain data."""
    return comparison.build_comparison(comparison_of(plain), documents)


def build_plan(plain: Mapping[str, Any]) -> PlanDocument:
    """Lay out a plan written as plain data."""
    return PlanDocument(typed(plain, Plan))


def room_of(report: Mapping[str, Any]) -> Room | None:
    return summary.room_of(report_of(report))


def _grouped(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return an allocation as a group of one."""
    found: dict[str, Any] = _clean({"count": 1, "each_bytes": group["bytes"], **group})
    return found


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {clean_text(key): _clean(item) for key, item in value.items()}
    return [_clean(item) for item in value] if isinstance(value, (list, tuple)) else value

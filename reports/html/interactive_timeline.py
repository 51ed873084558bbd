"""Make what the page's script draws of a timeline: plotly's figure, and its points, thinned where needed and packed."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from memprof.reports.document.model import AllocationRow, Document, Individuals, TimelineSeries
from memprof.reports.document.text import category_label, phase_label, phase_short, thousands
from memprof.reports.figures import FigureJson, timeline_json
from memprof.reports.html.opened import Opened
from memprof.reports.palette import PATTERNS, slug
from memprof.reports.thinning import thinned
from numpy.typing import NDArray

from memprof.vocabulary import Phase

_Lives = tuple[tuple[int | None, int | None], ...]
#: Name, colour, bytes of each, lifetimes, whether alive at the peak, reference, whether inferred.
_Drawn = tuple[str, str, int, _Lives, int, str | None, bool]

# Real runs take one to two bytes an event, packed. What takes more than this in all is thinned until it fits, which
# keeps the page below 3 MB with plotly's 2.
MAX_PACKED = 650_000
# The code of an allocation that the recording does not free.
_NOT_FREED = 255
# The phase axis travels in whole numbers, this many to a unit.
PHASE_UNIT = 1_000_000


class Band(msgspec.Struct, frozen=True, array_like=True):
    """A group of alike allocations that are drawn one by one.

    ``site`` is the line of the program; ``shape`` its shape and dtype, if recorded; ``opens`` a reference; ``inferred``
    whether only a lifetime, a shape or a set of sizes says what it is.
    """

    name: str
    category: str
    shape: str
    allocated_in: str
    site: str
    opens: str | None
    inferred: bool


class IndividualData(msgspec.Struct, frozen=True, kw_only=True):
    """The allocations that are drawn one by one.

    ``points`` are the packed columns of ``_BAND_COLUMNS``, a row for each of ``n_points`` allocations: the number of
    its group, the events that allocated and freed it (-1: before the recording), the times of both on the recording's
    clock (-1: not recorded), its address and bytes, and the index in ``phases`` of the phase that freed it.
    """

    groups: tuple[Band, ...]
    columns: tuple[str, ...]
    n_points: int
    points: str
    phases: tuple[str, ...]
    words: str


_BAND_COLUMNS = ("group", "begin", "end", "born", "died", "address", "size", "freed_in")


class TimelineData(msgspec.Struct, frozen=True, kw_only=True):
    """What the page's script draws a timeline from, as it reads it: spans and allocations are lists of values.

    ``figure`` is plotly's, as ``Analysis.figure`` returns it, without the points; these are packed in ``columns``.
    """

    figure: FigureJson
    n_points: int
    columns: tuple[str, ...]
    points: str
    spans: tuple[tuple[str, str, int | None, int, int, str], ...]
    patterns: dict[str, str]
    labels: dict[str, str]
    peak_point: int
    failed_point: int | None
    clock_us: int
    unit: int
    timed: bool
    allocations: tuple[_Drawn, ...]
    individual: IndividualData | None


def timeline_data(whole: TimelineSeries, document: Document, most: int, opened: Opened) -> TimelineData:
    """Collect what the script draws a timeline from, its points packed into ``most`` bytes or nearly so."""
    timeline, points = _fitted(whole, most)
    last = len(timeline.time_us) - 1
    spans = (
        (slug(s.phase), phase_label(s.phase), s.step, s.start_point, min(s.end_point, last), phase_short(s.phase))
        for s in timeline.spans
    )
    # The largest at the peak, and at the other phases' peaks: of those the panel says which are alive.
    largest = [(row, 1) for row in document.allocations] + [(row, 0) for row in document.elsewhere]
    return TimelineData(
        figure=timeline_json(timeline, points=False),
        n_points=len(timeline.time_us),
        columns=tuple(_columns(timeline)),
        points=points,
        spans=tuple(spans),
        patterns=PATTERNS,
        labels={c: category_label(c) for c in timeline.categories},
        peak_point=timeline.peak_point,
        failed_point=timeline.failed.point if timeline.failed else None,
        clock_us=timeline.clock_us,
        unit=timeline.unit,
        timed=timeline.timed,
        allocations=tuple(_drawn(row, at_peak, opened) for row, at_peak in largest),
        individual=_individual(document.individuals, opened) if document.individuals else None,
    )


def _individual(individuals: Individuals, opened: Opened) -> IndividualData:
    found, phases = individuals.found, tuple(Phase)
    numbers = [len(phases) if code == _NOT_FREED else code for code in found.freed_in.tolist()]
    times = (found.born_us, found.died_us)
    columns = (found.group, found.begin, found.end, *times, found.address, found.size, numbers)
    n, rest = len(found.group), found.count - len(found.group)
    others = f"; grey: the {thousands(rest)} others, summed" if rest else ""
    return IndividualData(
        groups=tuple(_band(row, opened) for row in individuals.rows),
        columns=_BAND_COLUMNS,
        n_points=n,
        points=pack_columns(columns),
        phases=(*(phase_label(phase).lower() for phase in phases), ""),
        words=f"{thousands(n)} largest allocations, each its own band{others}",
    )


def _band(row: AllocationRow, opened: Opened) -> Band:
    name = row.name or row.detail or row.label
    return Band(name, slug(row.category), row.shape, row.phase_label.lower(), row.site, opened(row), row.guessed)


def _drawn(row: AllocationRow, at_peak: int, opened: Opened) -> _Drawn:
    name = row.name or row.site or row.detail or row.label
    return name, slug(row.category), row.group.each_bytes, row.lives, at_peak, opened(row), row.guessed


def _columns(timeline: TimelineSeries) -> dict[str, Sequence[int] | NDArray[np.int64]]:
    """Name everything drawn, in whole numbers: events, microseconds, parts of the phase axis, bytes."""
    columns: dict[str, Sequence[int] | NDArray[np.int64]] = {
        "event": timeline.instants or range(len(timeline.time_us)),
        "time": timeline.time_us,
        "phase": np.rint(np.array(timeline.phase_x) * PHASE_UNIT).astype(np.int64),
        **timeline.categories,
    }
    if timeline.reserved is not None:
        columns["reserved"] = timeline.reserved
    return columns


def _fitted(timeline: TimelineSeries, most: int) -> tuple[TimelineSeries, str]:
    """Pack the points, thinned where they would take more than ``most`` bytes; returns the thinned timeline too."""
    points = pack_columns(_columns(timeline).values())
    while len(points) > most and len(timeline.time_us) > 5000:
        timeline = thinned(timeline, len(timeline.time_us) // 2)
        points = pack_columns(_columns(timeline).values())
    return timeline, points


def pack_columns(columns: Iterable[Sequence[int] | NDArray[np.int64]]) -> str:
    """Pack whole numbers as differences, their bytes of equal weight side by side, gzip'd, in base64.

    An event changes one category: nearly every difference is zero, and 200k events take some hundred kilobytes.
    """
    planes = []
    for column in columns:
        steps = np.diff(np.asarray(column, dtype=np.int64), prepend=0).astype("<i8")
        planes.append(steps.view(np.uint8).reshape(-1, 8).T.tobytes())
    return base64.b64encode(gzip.compress(b"".join(planes), 6, mtime=0)).decode()

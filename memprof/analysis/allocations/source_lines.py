"""Add up allocations by the line of the program's own files that asked for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.analysis.allocations.places import is_users
from memprof.report.allocations import SourceLine
from memprof.snapshot.model import I64
from memprof.vocabulary import Category

if TYPE_CHECKING:
    from memprof.analysis.views import Views

_MOST_LINES = 300
_CATEGORIES = list(Category)


def source_lines(views: Views) -> tuple[SourceLine, ...]:
    """Return the program's lines, those that allocated most of the peak first, at most 300."""
    places, site_of = _sites(views)
    if not places:
        return ()
    line, n_sites = views.timeline, len(places)
    site = site_of[line.stack]
    rows = views.peak.rows
    rows = rows[site[rows] >= 0]
    at_peak = np.zeros((n_sites, len(_CATEGORIES)), np.int64)
    np.add.at(at_peak, (site[rows], views.attribution.category[rows]), line.size[rows])
    counts = np.bincount(site[rows], minlength=n_sites)
    own, sums = _own_peaks(views, site, n_sites), at_peak.sum(axis=1)
    chosen = np.lexsort((np.arange(n_sites), -own, -sums))[:_MOST_LINES]
    return tuple(
        SourceLine(
            file=file,
            line=number,
            function=function,
            bytes=int(sums[i]),
            count=int(counts[i]),
            own_peak_bytes=int(own[i]),
            categories={_CATEGORIES[c]: int(at_peak[i, c]) for c in np.flatnonzero(at_peak[i])},
        )
        for i in chosen.tolist()
        if own[i]
        for file, number, function in (places[i],)
    )


def _sites(views: Views) -> tuple[list[tuple[str, int, str]], I64]:
    """List the program's lines on stacks, and return for each stack the index of its innermost one, -1 for none."""
    table = views.snapshot.stacks
    users = [is_users(str(frame)) and not views.stacks.is_own(frame) for frame in table.frames]
    known: dict[tuple[str, int], int] = {}
    places: list[tuple[str, int, str]] = []
    site_of = np.full(len(table.stacks), -1, np.int64)
    for number, stack in enumerate(table.stacks):
        frame = next((table.frames[f] for f in stack if users[f]), None)
        if frame is None or frame.line < 0:
            continue
        site = known.setdefault((frame.file, frame.line), len(known))
        if site == len(places):
            places.append((frame.file, frame.line, frame.function))
        site_of[number] = site
    return places, site_of


def _own_peaks(views: Views, site: I64, n_sites: int) -> I64:
    """Return for each line the most bytes of its allocations that were in use at once."""
    line = views.timeline
    counted = site >= 0
    older = counted & (line.alloc_event < 0)
    base = np.zeros(n_sites, np.int64)
    np.add.at(base, site[older], line.size[older])
    born, died = counted & (line.alloc_event >= 0), counted & (line.free_event < line.n_events)
    # Small numbers sort faster: one for each event, in the order of time.
    which = np.full(line.n_events, -1, np.int16 if n_sites < 1 << 15 else np.int64)
    change = np.zeros(line.n_events, np.int64)
    which[line.alloc_event[born]], change[line.alloc_event[born]] = site[born], line.size[born]
    which[line.free_event[died]], change[line.free_event[died]] = site[died], -line.size[died]
    events = np.flatnonzero(which >= 0)
    if not len(events):
        return base
    events = events[np.argsort(which[events], kind="stable")]
    starts = np.flatnonzero(np.diff(which[events], prepend=-1))
    running = np.cumsum(change[events])
    before = running[starts] - change[events[starts]]
    highest: I64 = base.copy()
    sites = which[events[starts]].astype(np.int64)
    highest[sites] += np.maximum(np.maximum.reduceat(running, starts) - before, 0)
    return highest

"""Merge the reports of many ranks: the fullest rank's own, with every rank's summary and their comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from memprof.analysis.ranks.across import across
from memprof.analysis.ranks.run_folders import places_of_run
from memprof.errors import InputError
from memprof.report import Report
from memprof.report.base import MOST_RANKS
from memprof.report.ranks import MissingRank, RankSummary


def merged(
    report: Report, ranks: Iterable[RankSummary], world_size: int | None, missing: Iterable[MissingRank]
) -> Report:
    """Return the report of the rank to be shown in full with ``ranks`` (by number) and ``across_ranks`` added.

    Raises:
        InputError: there are two summaries of one rank.
    """
    entries = sorted(ranks, key=lambda r: r.rank)
    count = Counter(r.rank for r in entries)
    twice = [rank for rank in count if count[rank] > 1]
    if twice:
        raise InputError(
            f"rank {twice[0]} is there twice ({_files_of(entries, twice[0])}), so these are not the ranks of one run; "
            "compare runs with `memprof compare`, or give the folder they are in."
        )
    return replace(report, ranks=tuple(entries), across_ranks=across(entries, world_size, missing))


def _files_of(entries: Iterable[RankSummary], rank: int) -> str:
    return " and ".join(Path(r.file).name if r.file else "a file" for r in entries if r.rank == rank)


def fullest(ranks: Iterable[RankSummary]) -> int:
    """Choose the rank to show first: one that ran out of memory, else the highest peak, else the lowest number."""
    return max(ranks, key=lambda r: (r.oom is not None, r.peak.active_bytes, -r.rank)).rank


def world_size_of(claims: Iterable[int | None], present: Iterable[int], unreadable: Iterable[int] = ()) -> int | None:
    """Return how many ranks the run had at least, from its recordings' claims and the ranks' numbers.

    Args:
        claims: the number of ranks in each recording.
        present: the numbers of the ranks that were read.
        unreadable: the numbers of ranks whose recordings cannot be read.

    Returns:
        None if every recording claims 1 and no rank up to the highest number is missing.

    Raises:
        InputError: the recordings come from runs of different sizes, or a number is none that a rank has.
    """
    sizes = sorted({n for n in claims if n is not None and n > 1})
    if len(sizes) > 1:
        raise InputError(
            f"these recordings are of a run of {sizes[0]} ranks and of one of {sizes[-1]}; compare runs with "
            "`memprof compare`."
        )
    there = set(present)
    highest = max({0, *there, *unreadable})
    if highest > MOST_RANKS:  # every rank that is missing is listed
        raise InputError(f"a recording is called rank {highest}, which no run has; rename it.")
    return max([*sizes, highest + 1]) if sizes or len(there) <= highest else None


def missing_ranks(present: Iterable[int], world_size: int | None, folder: Path | None = None) -> list[MissingRank]:
    """List the ranks without a recording, with the last line of their counters file where there is one."""
    there = set(present)
    return [_missing(rank, folder) for rank in range(world_size or 0) if rank not in there]


def _missing(rank: int, folder: Path | None) -> MissingRank:
    unknown = MissingRank(rank=rank, last_step=None, peak_allocated_bytes=None)
    if folder is None:
        return unknown
    from memprof.analysis.counters import read_counters

    for place in places_of_run(folder):
        path = place / f"counters.rank-{rank}.jsonl"
        if not path.is_file():
            continue
        try:
            steps = read_counters(path).steps
        except InputError:
            return unknown
        peaks = [peak for row in steps if (peak := row.size("peak_allocated")) is not None]
        last = steps[-1].step if steps else None
        return MissingRank(rank=rank, last_step=last, peak_allocated_bytes=max(peaks, default=None))
    return unknown

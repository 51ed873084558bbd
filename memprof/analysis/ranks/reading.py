"""Read the recordings of a run's ranks, each in any process, and merge their reports.

:func:`read_ranks` chooses what belongs together, :class:`RanksReader` reads one recording. A report's JSON beside a
snapshot saves reading the snapshot where it is newer than it, made of it and whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from memprof.analysis.ranks.files import RecordingFile, choose, find_recordings, recording_of, report_beside
from memprof.analysis.ranks.groups import DumpGroup, dump_rows, sort_dumps
from memprof.analysis.ranks.merge import fullest, merged, missing_ranks, world_size_of
from memprof.analysis.ranks.run_folders import other_runs, places_of_run
from memprof.analysis.ranks.summary import rank_summary
from memprof.errors import InputError, UsageError
from memprof.executors import ExecutorChoice, answers, open_executor
from memprof.report import Report
from memprof.report.files import read_answer
from memprof.report.ranks import RankSummary
from memprof.report.ranks import Recording as ListedRecording
from memprof.snapshot.reader import memory_to_report
from memprof.text import numbered

#: Makes the report of a snapshot; importable by name, as it runs in other processes.
Maker = Callable[[Path], Report]
#: Writes a report's JSON to a file.
Keeper = Callable[[Report, Path], None]

# The memory of a process in addition to what it reads: 60 MB measured for a small file.
_BESIDE = 100 << 20
# Starting a process costs as much as reading a few megabytes.
_WORTH = 16 << 20
_MEMRAY = b"memray"
_MOST_NAMED = 5


@dataclass(frozen=True)
class ReadRank:
    """Hold one recording that was read: its ``report``, or ``why`` there is none.

    ``from_json`` tells that the report's JSON was there, ``note`` why one that is there was not used.
    """

    report: Report | None
    why: str = ""
    from_json: bool = False
    note: str = ""


@dataclass(frozen=True)
class RanksReader:
    """Reads a recording: its report's JSON where it stands for the snapshot, else the snapshot.

    Attributes:
        make: makes the report of a snapshot.
        as_usual: no other device or rules are asked for than those of the JSON beside a snapshot.
        keep: writes the report beside a snapshot that has none; None where none is to be written.
    """

    make: Maker
    as_usual: bool = True
    keep: Keeper | None = None

    def __call__(self, recording: RecordingFile) -> ReadRank:
        """Read one recording; never raises for a file that cannot be used."""
        try:
            known, note = self.ready(recording)
            return known or self._made(recording, note)
        except InputError as error:
            return ReadRank(None, str(error))
        except OSError as error:
            return ReadRank(None, f"{recording.path}: cannot be read ({error.strerror or error}).")

    def ready(self, recording: RecordingFile) -> tuple[ReadRank | None, str]:
        """Return the report from a recording's JSON, else None and why the JSON cannot replace the snapshot.

        Raises:
            InputError: there is no snapshot, and the JSON cannot be used.
        """
        if recording.report is None or not (self.as_usual or recording.snapshot is None):
            return None, ""
        if recording.snapshot is None:
            return ReadRank(_rank_report(recording.report), from_json=True), ""
        report, note = _standing_for(recording.snapshot, recording.report)
        return (None if report is None else ReadRank(report, from_json=True)), note

    def _made(self, recording: RecordingFile, note: str) -> ReadRank:
        snapshot = recording.path
        own = _report_or_none(snapshot)
        if own is not None:
            return ReadRank(own, from_json=True)
        _refuse_strangers(snapshot)
        report = self.make(snapshot)
        if self.keep is not None:
            note = " ".join(filter(None, [note, _kept(self.keep, report, report_beside(snapshot))]))
        return ReadRank(report, note=note)


def _kept(keep: Keeper, report: Report, place: Path) -> str:
    """Write a report beside its snapshot, never over another's file; return a note where that cannot be done."""
    with suppress(InputError):  # a damaged report of memprof's may be replaced
        if place.exists() and _report_or_none(place) is None:
            return f"{place.name} is not a report of memprof's and was left as it is."
    try:
        keep(report, place)
    except InputError as error:
        return f"Not saved: {error}"
    return ""


def _standing_for(snapshot: Path, beside: Path) -> tuple[Report | None, str]:
    """Return the report beside a snapshot where it was made of it, else None and why not."""
    try:
        report = _report_or_none(beside)
        if report is None:
            return None, ""
    except InputError:
        return None, f"{beside.name} is damaged; its snapshot was read."
    if beside.stat().st_mtime_ns < snapshot.stat().st_mtime_ns:
        return None, f"{beside.name} is older than its snapshot, which was read."
    files, size = report.source.files, report.source.file_bytes
    if [Path(file).name for file in files] != [snapshot.name] or size not in (None, snapshot.stat().st_size):
        return None, f"{beside.name} was not made from {snapshot.name}, which was read."
    return report, ""


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


def _refuse_strangers(snapshot: Path) -> None:
    """Refuse a file that has a snapshot's name but not its first bytes."""
    with snapshot.open("rb") as file:
        first = file.read(len(_MEMRAY))
    if not first:
        raise InputError(f"{snapshot}: the file is empty; the process died before it wrote, or still writes.")
    if first == _MEMRAY:
        raise InputError(f"{snapshot}: a recording of memray, about host memory; open it with memray.")


# ---- the ranks of one run --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RanksRead:
    """A run's merged report, and the recording of the rank that it shows in full.

    ``from_json`` tells that the rank's report was read from its JSON, so that it is whole whatever the reader leaves
    out.
    """

    report: Report
    shown: RecordingFile
    from_json: bool


def read_ranks(
    places: Sequence[Path],
    reader: RanksReader,
    *,
    step: int | None = None,
    role: str | None = None,
    executor: Executor | ExecutorChoice | str | None = None,
) -> RanksRead:
    """Read the ranks in one folder, or those of the files named, and merge their reports.

    Of a folder with dumps of several roles, processes or times the ranks of one role are merged, and ``recordings``
    of the report lists every dump that is there. A dump of a folder that cannot be read is left out and named; of
    files named one by one, each has to be readable.

    Args:
        places: one folder, or the files of the ranks.
        step: default: the newest that most ranks recorded.
        role: default: who trains.
        executor: reads the ranks, an executor or which one to open; None for this process.

    Raises:
        InputError: files that cannot be read, or are not the ranks of one run.
        UsageError: a folder among several files, or a step or role that was not recorded.
    """
    files = _Files(reader, ExecutorChoice.named(executor) if isinstance(executor, str) else executor)
    if len(places) == 1 and places[0].is_dir():
        found, group, rows = _of_folder(places[0], files, step, role)
        group.notes += [others] if (others := other_runs(group.shown[0].path.parent)) else []
        return _merged(places[0], found, group, rows)
    if folder := next((p for p in places if p.is_dir()), None):
        raise UsageError(f"{folder} is a folder: give one folder alone, or the files of the ranks.")
    if len({p.resolve() for p in places}) < len(places):
        raise UsageError("the same file is given twice; give the files of different ranks.")
    found = [recording_of(p) for p in places]
    chosen = choose(found, step) if step is not None else found
    group = DumpGroup(chosen)
    files.read_into(group, chosen)
    if group.refused:
        raise InputError(next(iter(group.refused.values())))
    return _merged(None, found, group, [])


@dataclass
class _Files:
    """Reads recordings, each once: those with a report beside them here, the others by the executor."""

    reader: RanksReader
    executor: Executor | ExecutorChoice | None

    def read_into(self, group: DumpGroup, recordings: Sequence[RecordingFile]) -> None:
        """Read what is not yet known of ``recordings``."""
        unread = [r for r in recordings if r.path not in group.reports and r.path not in group.refused]
        reads: dict[Path, ReadRank] = {}
        if self.executor in (None, ExecutorChoice()):  # parsing JSON takes less than sending it
            reads = {r.path: known for r in unread if (known := self._ready(r)) is not None}
        todo = [r for r in unread if r.path not in reads]
        with self._opened(todo) as executor:
            reads |= zip((r.path for r in todo), answers(executor, self.reader, todo), strict=True)
        for recording in unread:
            read = reads[recording.path]
            group.add(recording, read.report, read.why)
            group.from_json |= {recording.path} if read.from_json else set()
        group.notes += _few([note for r in unread if (note := reads[r.path].note)])

    def _ready(self, recording: RecordingFile) -> ReadRank | None:
        with suppress(InputError, OSError):
            return self.reader.ready(recording)[0]
        return None

    def _opened(self, todo: Sequence[RecordingFile]) -> AbstractContextManager[Executor | None]:
        if not isinstance(self.executor, ExecutorChoice):
            return nullcontext(self.executor)
        sizes = [_size(r.path) for r in todo]
        if self.executor.kind == "local" and sum(sizes) < _WORTH:
            return nullcontext(None)
        needed = max((memory_to_report(r.path, size) for r, size in zip(todo, sizes, strict=True)), default=0)
        return open_executor(self.executor, len(todo), _BESIDE + needed)


def _of_folder(
    folder: Path, files: _Files, step: int | None, role: str | None
) -> tuple[list[RecordingFile], DumpGroup, list[ListedRecording]]:
    """Choose and read the recordings of a folder; where all of the chosen are damaged, the next best ones."""
    found = left = find_recordings(folder)
    refused: dict[Path, str] = {}
    while True:
        group = DumpGroup(choose(left, step))
        _with_failures(left, group, step)
        sort_dumps(group, files.read_into, role)
        refused |= group.refused
        if group.shown:
            break
        left = [r for r in left if r.path not in refused]
        if not left or step is not None:
            raise InputError(next(iter(refused.values())))
    group.refused = refused
    if refused:
        named = [why.replace(f"{folder}{os.sep}", "", 1) for why in refused.values()]
        more = f" And {len(named) - _MOST_NAMED} more." if len(named) > _MOST_NAMED else ""
        group.notes.append(f"Left out, for they cannot be read: {' '.join(named[:_MOST_NAMED])}{more}")
    return found, group, dump_rows(folder, found, group)


def _with_failures(found: Sequence[RecordingFile], group: DumpGroup, step: int | None) -> None:
    """Show a rank that later ran out of memory as it was then; name other newer recordings of few ranks."""
    chosen = group.shown
    at, roles = chosen[0].step, {r.role for r in chosen}
    newer = [r for r in found if step is None and at is not None and (r.step or 0) > at and r.role in roles]
    failed: list[RecordingFile] = []
    for recording in newer:
        report = _readable(recording.report) if recording.report is not None else None
        if report is not None and report.oom is not None:
            group.shown = [*(r for r in group.shown if r.rank != recording.rank), recording]
            failed.append(recording)
    if failed:
        ranks, steps, several = _ranks_and_steps(failed)
        shown = "they are shown as they were" if several else "it is shown as it was"
        group.notes.append(f"{ranks} ran out of memory in {steps}; {shown} then.")
    if others := [r for r in newer if r not in failed]:
        ranks, steps, several = _ranks_and_steps(others)
        have = "have newer recordings" if several else "has a newer recording"
        group.notes.append(f"{ranks} {have}, of {steps} (see --step).")


def _few(notes: list[str]) -> list[str]:
    """Return the first of the notes about single files, and how many more there are."""
    more = len(notes) - _MOST_NAMED
    return notes if more <= 0 else [*notes[:_MOST_NAMED], f"And {more} more notes like these, of other recordings."]


def _ranks_and_steps(recordings: Sequence[RecordingFile]) -> tuple[str, str, bool]:
    """Name the ranks and the steps of recordings, and tell whether there are several ranks."""
    ranks = {r.rank for r in recordings if r.rank is not None}
    steps = {r.step for r in recordings if r.step is not None}
    return numbered("Rank", ranks), numbered("step", steps), len(ranks) > 1


def _merged(
    folder: Path | None, found: Sequence[RecordingFile], group: DumpGroup, rows: Sequence[ListedRecording]
) -> RanksRead:
    notes = group.notes
    here: list[_Rank] = []
    nameless: list[str] = []
    for number, recording in enumerate(group.shown):
        report = group.reports[recording.path]
        rank = _rank(recording, report, number, nameless)
        here.append(_Rank(recording, report, rank_summary(report, rank, str(recording.path))))
    notes += _few(nameless)
    if folder is not None:
        here = _of_newest_run(here, notes)
    elif not all(rank.report.source.is_of_run(here[0].report.source) for rank in here):
        raise InputError("these recordings are of several runs; compare runs with `memprof compare`.")
    claims = [rank.report.source.world_size for rank in here]
    told = _told_by_rank_0(folder, {r.summary.rank for r in here}, group.shown[0].step, claims)
    summaries = [*(rank.summary for rank in here), *told]
    present = [s.rank for s in summaries]
    alike = {(r.step, r.role) for r in group.shown}
    unreadable = {r.rank for r in found if r.path in group.refused and (r.step, r.role) in alike and r.rank is not None}
    world = world_size_of(claims, present, unreadable)
    highest = fullest(rank.summary for rank in here)
    shown = next(rank for rank in here if rank.summary.rank == highest)
    if group.from_json and len(group.reports) > 1:
        notes.append(
            f"{len(group.from_json)} of {len(group.reports)} recordings were read from the JSON of their reports."
        )
    report = replace(
        shown.report,
        source=replace(shown.report.source, rank=highest, world_size=world or len(summaries)),
        notes=(*shown.report.notes, *notes),
        recordings=tuple(rows) if len(rows) > len(group.shown) else shown.report.recordings,
    )
    missing = missing_ranks(present, world, folder)
    from_json = shown.recording.path in group.from_json
    return RanksRead(merged(report, summaries, world, missing), shown.recording, from_json)


@dataclass(frozen=True)
class _Rank:
    """A rank to show: its recording, its own report, and that in short."""

    recording: RecordingFile
    report: Report
    summary: RankSummary


def _rank(recording: RecordingFile, report: Report, number: int, notes: list[str]) -> int:
    """Number a rank by what the recording says, else by the file's name, else by its place on the command line."""
    source = report.source
    if source.rank is not None and (source.world_size or 1) > 1:
        return source.rank
    if recording.rank is not None:
        return recording.rank
    notes.append(f"{recording.path.name} does not say which rank it is of: it is called rank {number} here.")
    return number


def _of_newest_run(ranks: list[_Rank], notes: list[str]) -> list[_Rank]:
    """Keep the newest run: a folder may hold files of an earlier one with more ranks."""

    def order(rank: _Rank) -> tuple[tuple[bool, float], int]:
        return rank.report.source.run_order, rank.recording.path.stat().st_mtime_ns

    newest = max(ranks, key=order).report.source
    kept = [r for r in ranks if r.report.source.world_size == newest.world_size and r.report.source.is_of_run(newest)]
    others = [rank for rank in ranks if rank not in kept]
    if others:
        left = ", ".join(str(rank.summary.rank) for rank in others)
        size = others[0].report.source.world_size
        which = "an earlier run" if size == newest.world_size else f"another run, of {size} ranks,"
        notes.append(f"Files of {which} were left out (rank {left}).")
    return kept


def _told_by_rank_0(
    folder: Path | None, present: set[int], step: int | None, claims: Sequence[int | None]
) -> list[RankSummary]:
    """Find ranks whose files are elsewhere, by the summaries rank 0 received when the run ended."""
    for place in places_of_run(folder) if folder is not None and step is not None else ():
        path = place / f"step-{step:06d}.ranks.json"
        report = _readable(path) if path.is_file() else None
        if report is not None and report.source.world_size in claims:
            return [s for s in report.ranks if s.rank not in present]
    return []


# ---- reports' JSON ---------------------------------------------------------------------------------------------------


def _report_or_none(path: Path) -> Report | None:
    """Read a report's JSON; None where the file is something else, and the snapshot has to say.

    Raises:
        InputError: it is damaged.
    """
    answer = read_answer(path)
    return answer if isinstance(answer, Report) else None


def _readable(path: Path) -> Report | None:
    try:
        return _report_or_none(path)
    except InputError:
        return None


def _rank_report(path: Path) -> Report:
    report = _report_or_none(path)
    if report is None:
        raise InputError(f"{path}: no report of memprof; give snapshots, or the JSON of `memprof report --json`.")
    return report

"""Find the recordings of a run's processes in a folder, and choose those that belong together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from memprof.analysis.ranks.dump_names import DumpName, dump_name
from memprof.analysis.ranks.run_folders import earlier_runs, run_folders
from memprof.errors import InputError, UsageError
from memprof.snapshot.remote import walk

# File names of the callback and of memprof.attach; names of other tools are read by dump_names.
_OURS = re.compile(r"step-(\d{1,12})\.rank-(\d{1,6})\.(pickle|json)")
_SUFFIXES = (".pickle", ".pkl", ".json", ".pickle.gz", ".pkl.gz", ".json.gz")
_PICKLES = (".pickle", ".pickle.gz")
_JSON = (".json", ".json.gz")
# Frameworks put steps, roles and replicas into folders below the one they are given.
_DEEPEST = 5


@dataclass(frozen=True)
class RecordingFile(DumpName):
    """Hold one recording of one process: a snapshot, its report's JSON, or both, and what the path says of it.

    A ``rank`` of None is in the file.
    """

    snapshot: Path | None = None
    report: Path | None = None

    @property
    def path(self) -> Path:
        """Return the snapshot, or the report where there is no snapshot."""
        path = self.snapshot or self.report
        assert path is not None, "a recording is made of at least one file"
        return path


def find_recordings(place: Path) -> list[RecordingFile]:
    """Find the recordings in ``place``, or in the newest ``_memprof`` below it that has any, else in all folders below.

    Of folders that are numbered by run (``actor``, ``actor-2``) the newest run's is taken.

    Raises:
        InputError: the folder does not exist or cannot be read, or holds no recording.
    """
    for folder in (place, *run_folders(place)):
        try:
            files = [path for path in folder.iterdir() if path.is_file() and not path.is_symlink()]
        except OSError as error:
            if folder == place:
                raise InputError(f"{place}: cannot be read ({error.strerror or error}).") from None
            continue
        if found := _ours(files, folder):
            return found
    files = [path for path in _entries_below(place) if not path.is_symlink()]
    if found := _ours(files, place) or _theirs(files, place):
        return found
    strangers = [path for path in files if path.name.endswith(_PICKLES)]
    if len(strangers) == 1:
        return [RecordingFile(snapshot=strangers[0])]
    there = (
        f"; the {len(strangers)} pickles there say no rank in their names: give them one by one" if strangers else ""
    )
    raise InputError(
        f"{place}: no recordings there, in its _memprof or in folders below{there}; give the output_dir of a run with "
        "the callback, or a folder of snapshots with rank0, rank1, ... in their names."
    )


def not_read(place: Path, found: Iterable[RecordingFile]) -> tuple[list[Path], list[Path]]:
    """List the pickles below ``place`` that are not read, relative to it: those not known as snapshots, and links."""
    known = {path for r in found for path in (r.snapshot, r.report)}
    strangers: list[Path] = []
    links: list[Path] = []
    for path in _entries_below(place):
        if not path.name.endswith(_PICKLES):
            continue
        if path.is_symlink():
            links.append(path.relative_to(place))
        elif path not in known and not _OURS.fullmatch(path.name):
            strangers.append(path.relative_to(place))
    return strangers, links


def _entries_below(place: Path) -> Iterator[Path]:
    """Yield the files below ``place`` in order, links too, without hidden folders."""
    for folder, folders, names in walk(place):
        deep = len(folder.relative_to(place).parts)
        folders[:] = sorted(f for f in folders if not f.startswith(".") and deep < _DEEPEST)
        yield from (folder / name for name in sorted(names))


def _ours(files: Iterable[Path], place: Path) -> list[RecordingFile]:
    """Return memprof's own recordings by step and rank; a snapshot and its report are one recording."""
    files = [path for path in files if _OURS.fullmatch(path.name)]
    earlier = earlier_runs({path.parent for path in files if path.parent != place})
    found: dict[tuple[Path, int, int], dict[str, Path]] = {}
    for path in sorted(files):
        if path.parent not in earlier and (match := _OURS.fullmatch(path.name)):
            key = path.parent, int(match.group(1)), int(match.group(2))
            found.setdefault(key, {})[match.group(3)] = path
    recordings = []
    for (folder, step, rank), kinds in found.items():
        named = dump_name(folder.relative_to(place) / "rank0") or DumpName()
        recordings.append(RecordingFile(rank, step, named.role, snapshot=kinds.get("pickle"), report=kinds.get("json")))
    return sorted(recordings, key=lambda r: (r.step or 0, r.rank or 0, r.role or ""))


def _theirs(files: Iterable[Path], place: Path) -> list[RecordingFile]:
    """Return the snapshots that other tools and frameworks wrote, by what their paths say; with reports beside them."""
    there = [path for path in files if path.name.endswith(_SUFFIXES)]
    known = set(there)
    beside = {report_beside(path) for path in there if not path.name.endswith(_JSON)}
    found = []
    for path in there:
        if path in beside:
            continue
        named = dump_name(path.relative_to(place))
        if named is None or (named.rank is None and path.name.endswith((*_JSON, ".pkl", ".pkl.gz"))):
            continue
        report = report_beside(path)
        found.append(_named(path, named, report if report != path and report in known else None))
    return sorted(found, key=_order)


def report_beside(snapshot: Path) -> Path:
    """Return where the JSON of a snapshot's report lies beside it."""
    name = snapshot.name.removesuffix(".gz")
    return snapshot.with_name(f"{name.rpartition('.')[0] or name}.json")


def _order(recording: RecordingFile) -> tuple[object, ...]:
    r = recording
    return (
        r.step or 0, r.out_of_memory, r.role or "", r.rank or 0, r.time or "", r.count or 0, r.pid or 0, str(r.path),
    )  # fmt: skip


def _named(path: Path, said: DumpName, report: Path | None = None) -> RecordingFile:
    return RecordingFile(**vars(said), snapshot=path, report=report)


def recording_of(path: Path) -> RecordingFile:
    """Return the recording of one file named on the command line."""
    if match := _OURS.fullmatch(path.name):
        rank, step = int(match.group(2)), int(match.group(1))
        return (
            RecordingFile(rank, step, report=path)
            if match.group(3) == "json"
            else RecordingFile(rank, step, snapshot=path)
        )
    named = dump_name(Path(*path.parts[-2:])) or DumpName()
    return _named(path, replace(named, step=None, out_of_memory=False))


def choose(recordings: Iterable[RecordingFile], step: int | None = None) -> list[RecordingFile]:
    """Choose the recordings of one step: ``step``, else the newest that most ranks recorded.

    Of a framework's dumps, those written when memory ran out come first. There can be several of one rank: of other
    roles, processes or times. A rank without a recording of that step is left out, because figures of different steps
    cannot be compared.

    Raises:
        UsageError: there is no recording of the requested step.
    """
    by_step: dict[tuple[int | None, bool], list[RecordingFile]] = {}
    for recording in recordings:
        by_step.setdefault((recording.step, recording.out_of_memory), []).append(recording)
    if step is not None:
        wanted = [r for (at, _), group in by_step.items() if at == step for r in group]
        if not wanted:
            steps = sorted({s for s, _ in by_step if s is not None})
            known = ", ".join(map(str, steps)) or "no known number"
            raise UsageError(f"--step {step}: not recorded; there are recordings of step {known}.")
        return wanted

    def worth(key: tuple[int | None, bool]) -> tuple[bool, int, int]:
        at, out_of_memory = key
        return out_of_memory, len({r.rank for r in by_step[key]}), -1 if at is None else at

    return by_step[max(by_step, key=worth)]

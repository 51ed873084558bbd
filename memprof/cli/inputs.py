"""A run given on the command line: a snapshot, a folder of recordings, or a report's JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memprof.analysis.ranks.files import Recording, choose, find_recordings, recording_of
from memprof.cli.options import analysed, working
from memprof.errors import InputError, UsageError

if TYPE_CHECKING:
    from memprof.analysis.analysis import Analysis

__all__ = [
    "GivenRun",
    "Ranks",
    "read_ranks",
    "read_run",
]

@dataclass(frozen=True)
class GivenRun:
    """A run's report; its analysis where the file was a snapshot."""

    path: Path
    report: dict[str, Any]
    analysis: Analysis | None


def read_run(path: Path, device: int | None = None) -> GivenRun:
    """The run at ``path``; of a folder of the callback's, the recording with the highest peak.

    Raises:
        InputError: there is none, or it cannot be used.
        UsageError: the snapshot holds nothing of ``device``.
    """
    from memprof.analysis.report_files import read_memprof_json

    if path.is_dir():
        path = _highest_of(path)
    data = read_memprof_json(path)
    if data is None:
        analysis = analysed(path, device, None)
        return GivenRun(path, analysis.to_dict(), analysis)
    if data["schema"] != "memprof.report/1":
        raise InputError(f"{path}: {data['schema']!r:.60} is no report; give a snapshot or memprof.report/1.")
    from memprof.reports.json import validate

    try:
        validate(data)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return GivenRun(path, data, None)


def _highest_of(folder: Path) -> Path:
    """By the reports beside the snapshots; where there are none, the newest snapshot."""
    from memprof.analysis.report_files import read_memprof_json

    places = (folder, folder / "_memprof")
    snapshots = [p for place in places for p in sorted(place.glob("*.pickle"))]
    peaks: dict[Path, int] = {}
    for path in (p for place in places for p in sorted(place.glob("*.json"))):
        data = read_memprof_json(path)
        if data is not None and data["schema"] == "memprof.report/1":
            peaks[path] = int(data["peak"]["allocated_bytes"])
    if peaks:
        best = max(peaks, key=lambda path: peaks[path])
        beside = best.with_suffix(".pickle")
        return beside if beside in snapshots else best
    if not snapshots:
        raise InputError(f"{folder}: no snapshot (*.pickle) and no report (*.json) in it or in its _memprof.")
    return max(snapshots, key=lambda path: path.stat().st_mtime)


@dataclass
class Ranks:
    """The ranks of one run, read.

    ``report`` is the merged one; ``analysis`` that of the rank it shows in full, None where only its JSON is there.
    """

    report: dict[str, Any]
    analysis: Analysis | None


@dataclass
class _Reader:
    """Reads recordings: a report's JSON where it is as new as the snapshot, else the snapshot itself."""

    device: int | None
    rules: Path | None
    listed: int | None
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    summaries: dict[int, dict[str, Any]] = field(default_factory=dict)
    paths: dict[int, Recording] = field(default_factory=dict)

    def report(self, recording: Recording) -> dict[str, Any]:
        """The report of one recording."""
        path = recording.report
        as_asked = self.device is None and self.rules is None
        if path is not None and (recording.snapshot is None or (as_asked and not _older(path, recording.snapshot))):
            return _read_report(path)
        assert recording.snapshot is not None
        data = _report_or_none(recording.snapshot)
        return analysed(recording.snapshot, self.device, self.rules).to_dict(self.listed) if data is None else data

    def analysis(self, recording: Recording) -> Analysis | None:
        """The attributed snapshot behind a recording, where there is one."""
        if recording.snapshot is None or _report_or_none(recording.snapshot) is not None:
            return None
        return analysed(recording.snapshot, self.device, self.rules)


def read_ranks(
    places: Sequence[Path], step: int | None, device: int | None, rules: Path | None, listed: int | None
) -> Ranks:
    """The ranks in one folder, or of the files named.

    Raises:
        InputError: files that cannot be read, or are not the ranks of one run.
        UsageError: a folder among several files, a step that nobody recorded.
    """
    from memprof.analysis.ranks import rank_summary
    from memprof.analysis.ranks.merge import fullest, merged, missing_ranks, world_size_of

    folder, chosen, notes = _chosen(places, step)
    reader = _Reader(device, rules, listed)
    claims, summaries, by_rank = [], [], {}
    with working(f"Reading {len(chosen)} ranks"):
        for number, recording in enumerate(chosen):
            report = reader.report(recording)
            claims.append(report["source"].get("world_size"))
            rank = _rank(recording, report, number, notes)
            summaries.append(_summary(rank_summary, report, rank, recording))
            by_rank[rank] = (recording, report)
    if folder is not None:
        _leave_out_older_runs(claims, summaries, by_rank, notes)
    summaries += _told_by_rank_0(folder, {s["rank"] for s in summaries}, chosen[0].step, claims)
    world = world_size_of(claims, [s["rank"] for s in summaries])
    here = [s for s in summaries if s["rank"] in by_rank]
    shown = fullest(here)
    recording, report = by_rank[shown]
    analysis = reader.analysis(recording)
    if analysis is not None:
        report = analysis.to_dict(listed)
    report = {**report, "source": {**report["source"], "rank": shown, "world_size": world or len(summaries)}}
    report["notes"] = [*report["notes"], *notes]
    answer = merged(report, summaries, world, missing_ranks([s["rank"] for s in summaries], world, folder))
    return Ranks(answer, analysis)


def _chosen(places: Sequence[Path], step: int | None) -> tuple[Path | None, list[Recording], list[str]]:
    if len(places) == 1 and places[0].is_dir():
        found = find_recordings(places[0])
        chosen = choose(found, step)
        return places[0], *_with_failures(found, chosen, step)
    if folder := next((p for p in places if p.is_dir()), None):
        raise UsageError(f"{folder} is a folder: give one folder alone, or the files of the ranks.")
    if len({p.resolve() for p in places}) < len(places):
        raise UsageError("the same file is given twice; give the files of different ranks.")
    recordings = [recording_of(p) for p in places]
    return None, choose(recordings, step) if step is not None else recordings, []


def _with_failures(
    found: Sequence[Recording], chosen: list[Recording], step: int | None
) -> tuple[list[Recording], list[str]]:
    """A rank that later ran out of memory is shown as it was then; other newer recordings of few ranks are named."""
    notes: list[str] = []
    at = chosen[0].step
    newer = [r for r in found if step is None and at is not None and (r.step or 0) > at]
    for recording in newer:
        report = _report_or_none(recording.report) if recording.report is not None else None
        if report is not None and report.get("oom"):
            chosen = [*(r for r in chosen if r.rank != recording.rank), recording]
            notes.append(
                f"Rank {recording.rank} ran out of memory in step {recording.step}; it is shown as it was then."
            )
        else:
            notes.append(f"Rank {recording.rank} has a newer recording, of step {recording.step} (see --step).")
    return chosen, notes


def _rank(recording: Recording, report: dict[str, Any], number: int, notes: list[str]) -> int:
    """A rank's number: what the recording says, else the file's name, else its place on the command line."""
    source = report["source"]
    if type(source.get("rank")) is int and (source.get("world_size") or 1) > 1:
        return int(source["rank"])
    if recording.rank is not None:
        return recording.rank
    notes.append(f"{recording.path.name} does not say which rank it is of: it is called rank {number} here.")
    return number


def _summary(make: Any, report: dict[str, Any], rank: int, recording: Recording) -> dict[str, Any]:
    try:
        summary: dict[str, Any] = make(report, rank, str(recording.path))
    except InputError as error:
        raise InputError(f"{recording.path}: {error}") from None
    return summary


def _leave_out_older_runs(
    claims: list[Any], summaries: list[dict[str, Any]], by_rank: dict[int, Any], notes: list[str]
) -> None:
    """A folder may hold files of an earlier run with more ranks: those of the newest file's run stay."""
    newest = max(range(len(claims)), key=lambda i: by_rank[summaries[i]["rank"]][0].path.stat().st_mtime_ns)
    others = [i for i in range(len(claims)) if claims[i] != claims[newest]]
    if not others:
        return
    left = ", ".join(str(summaries[i]["rank"]) for i in others)
    notes.append(f"Files of another run, of {claims[others[0]]} ranks, were left out (rank {left}).")
    for i in reversed(others):
        del by_rank[summaries[i]["rank"]], summaries[i], claims[i]


def _told_by_rank_0(
    folder: Path | None, present: set[int], step: int | None, claims: list[Any]
) -> list[dict[str, Any]]:
    """Ranks whose files are elsewhere, from what they told rank 0 when the run ended."""
    from memprof.analysis.ranks import check_summary

    for place in (folder, folder / "_memprof") if folder is not None and step is not None else ():
        path = place / f"step-{step:06d}.ranks.json"
        data = _report_or_none(path) if path.is_file() else None
        if data is not None and data["source"].get("world_size") in claims:
            told = [check_summary(s) for s in data.get("ranks") or []]
            return [s for s in told if s["rank"] not in present]
    return []


def _older(report: Path, snapshot: Path) -> bool:
    return report.stat().st_mtime_ns < snapshot.stat().st_mtime_ns


def _report_or_none(path: Path) -> dict[str, Any] | None:
    """A report's JSON; None where the file is something else, or damaged: the snapshot then has to say."""
    from memprof.analysis.report_files import read_memprof_json

    data = read_memprof_json(path)
    if data is None or data["schema"] != "memprof.report/1":
        return None
    if not all(isinstance(data.get(name), kind) for name, kind in (("source", dict), ("peak", dict), ("notes", list))):
        raise InputError(f"{path}: a report without source, peak or notes; write it again.")
    return data


def _read_report(path: Path) -> dict[str, Any]:
    data = _report_or_none(path)
    if data is None:
        raise InputError(f"{path}: no report of memprof; give snapshots, or the JSON of `memprof report --json`.")
    return data

"""Turn what a command line names into reports: find the files, read them, attribute snapshots, merge ranks.

:func:`read_run` reads one run, :func:`read_ranks` the ranks of one, :func:`analysed` and :func:`read_report` a single
file. Where a report's JSON lies beside a snapshot and is as new, it saves reading the snapshot again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memprof.cli.progress import working
from memprof.errors import InputError, UsageError

if TYPE_CHECKING:
    from memprof.analysis.analysis import Analysis
    from memprof.analysis.ranks.files import Recording

__all__ = ["GivenRun", "analysed", "known_report", "read_ranks", "read_report", "read_run"]

_REPORT = "memprof.report/1"


@dataclass(frozen=True)
class GivenRun:
    """A run's report; ``analysis`` is what it was made of, None where only the report's JSON is there.

    Of several ranks the report is the merged one, and the analysis that of the rank it shows in full.
    """

    path: Path
    report: dict[str, Any]
    analysis: Analysis | None


# ---- one run ---------------------------------------------------------------------------------------------------------


def analysed(path: Path, device: int | None = None, rules: Path | None = None) -> Analysis:
    """Read the snapshot at ``path`` and attribute it.

    Raises:
        InputError: the file, or the file of rules, cannot be used.
        UsageError: the snapshot holds nothing of ``device``.
    """
    from memprof.advice.advised import analyze
    from memprof.snapshot import load_snapshot

    rule_set = None
    if rules is not None:
        from memprof.attribution.rules import load_rules

        rule_set = load_rules(rules)
    with working(f"Reading {path.name}"):
        return analyze(load_snapshot(path), device, rule_set)


def read_run(path: Path, device: int | None = None) -> GivenRun:
    """Read the run at ``path``: a snapshot, a report's JSON, or a folder, whose highest peak is taken.

    Raises:
        InputError: there is none, or it cannot be used.
        UsageError: the snapshot holds nothing of ``device``.
    """
    if path.is_dir():
        path = _highest_of(path)
    report = known_report(path)
    if report is not None:
        return GivenRun(path, report, None)
    analysis = analysed(path, device)
    return GivenRun(path, analysis.to_dict(), analysis)


def known_report(path: Path) -> dict[str, Any] | None:
    """Read a report's JSON; None where the file is a snapshot.

    Raises:
        InputError: the JSON is another answer of memprof's, or not what its schema says.
    """
    from memprof.analysis.report_files import read_memprof_json

    data = read_memprof_json(path)
    if data is None:
        return None
    if data["schema"] != _REPORT:
        raise InputError(f"{path}: {data['schema']!r:.60} is no report; give a snapshot or {_REPORT}.")
    return read_report(path, data)


def read_report(path: Path, data: dict[str, Any]) -> dict[str, Any]:
    """Return JSON that was read from ``path``, held against its schema.

    Raises:
        InputError: it is not what the schema says.
    """
    from memprof.reports.json import validate

    try:
        validate(data)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return data


def _highest_of(folder: Path) -> Path:
    """Choose by the reports beside the snapshots; without any, take the newest snapshot."""
    from memprof.analysis.ranks.run_folders import places_of_run
    from memprof.analysis.report_files import read_memprof_json

    places = places_of_run(folder)
    snapshots = [p for place in places for p in sorted(place.glob("*.pickle"))]
    peaks: dict[Path, int] = {}
    for path in (p for place in places for p in sorted(place.glob("*.json"))):
        data = read_memprof_json(path)
        if data is not None and data["schema"] == _REPORT:
            peaks[path] = int(data["peak"]["allocated_bytes"])
    if peaks:
        best = max(peaks, key=lambda path: peaks[path])
        beside = best.with_suffix(".pickle")
        return beside if beside in snapshots else best
    if not snapshots:
        raise InputError(f"{folder}: no snapshot (*.pickle) and no report (*.json) in it or in its _memprof.")
    return max(snapshots, key=lambda path: path.stat().st_mtime)


# ---- the ranks of one run --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reader:
    """Reads recordings as the command's options ask, each once."""

    device: int | None
    rules: Path | None
    listed: int | None
    known: dict[Path, dict[str, Any]] = field(default_factory=dict)

    def report(self, recording: Recording) -> dict[str, Any]:
        """Read the report's JSON where it is as new as the snapshot and says what is asked, else the snapshot."""
        if recording.path not in self.known:
            self.known[recording.path] = self._read(recording)
        return self.known[recording.path]

    def _read(self, recording: Recording) -> dict[str, Any]:
        path = recording.report
        as_asked = self.device is None and self.rules is None
        if path is not None and (recording.snapshot is None or (as_asked and not _older(path, recording.snapshot))):
            return _rank_report(path)
        assert recording.snapshot is not None
        data = _report_or_none(recording.snapshot)
        return analysed(recording.snapshot, self.device, self.rules).to_dict(self.listed) if data is None else data

    def analysis(self, recording: Recording) -> Analysis | None:
        """Attribute the snapshot behind a recording, where there is one."""
        if recording.snapshot is None or _report_or_none(recording.snapshot) is not None:
            return None
        return analysed(recording.snapshot, self.device, self.rules)


def read_ranks(
    places: Sequence[Path],
    step: int | None,
    device: int | None,
    rules: Path | None,
    listed: int | None,
    role: str | None = None,
) -> GivenRun:
    """Read the ranks in one folder, or those of the files named, and merge their reports.

    Of a folder with dumps of several roles, processes or times the ranks of one role are merged, and ``recordings``
    of the report lists every dump that is there.

    Raises:
        InputError: files that cannot be read, or are not the ranks of one run.
        UsageError: a folder among several files, a step or a role that nobody recorded.
    """
    from memprof.analysis.ranks import rank_summary
    from memprof.analysis.ranks.merge import fullest, merged, missing_ranks, world_size_of
    from memprof.cli.dump_groups import dump_rows, sort_dumps

    folder, found, chosen, notes = _chosen(places, step)
    reader = _Reader(device, rules, listed)
    rows = []
    if folder is not None:
        group = sort_dumps(chosen, reader.report, role)
        chosen, rows = group.shown, dump_rows(folder, found, group)
        notes += group.notes
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
    report |= {"recordings": rows} if len(rows) > len(chosen) else {}
    answer = merged(report, summaries, world, missing_ranks([s["rank"] for s in summaries], world, folder))
    return GivenRun(recording.path, answer, analysis)


def _chosen(
    places: Sequence[Path], step: int | None
) -> tuple[Path | None, list[Recording], list[Recording], list[str]]:
    """Choose the recordings to read; returns the folder they are in, all that are there, those to read, and notes."""
    from memprof.analysis.ranks.files import choose, find_recordings, recording_of

    if len(places) == 1 and places[0].is_dir():
        found = find_recordings(places[0])
        chosen = choose(found, step)
        return places[0], found, *_with_failures(found, chosen, step)
    if folder := next((p for p in places if p.is_dir()), None):
        raise UsageError(f"{folder} is a folder: give one folder alone, or the files of the ranks.")
    if len({p.resolve() for p in places}) < len(places):
        raise UsageError("the same file is given twice; give the files of different ranks.")
    recordings = [recording_of(p) for p in places]
    return None, recordings, choose(recordings, step) if step is not None else recordings, []


def _with_failures(
    found: Sequence[Recording], chosen: list[Recording], step: int | None
) -> tuple[list[Recording], list[str]]:
    """Show a rank that later ran out of memory as it was then; name other newer recordings of few ranks."""
    notes: list[str] = []
    at = chosen[0].step
    roles = {r.role for r in chosen}
    newer = [r for r in found if step is None and at is not None and (r.step or 0) > at and r.role in roles]
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
    """Number a rank by what the recording says, else by the file's name, else by its place on the command line."""
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
    """Keep the newest file's run: a folder may hold files of an earlier one with more ranks."""
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
    """Find ranks whose files are elsewhere in what they told rank 0 when the run ended."""
    from memprof.analysis.ranks import check_summary
    from memprof.analysis.ranks.run_folders import places_of_run

    for place in places_of_run(folder) if folder is not None and step is not None else ():
        path = place / f"step-{step:06d}.ranks.json"
        data = _report_or_none(path) if path.is_file() else None
        if data is not None and data["source"].get("world_size") in claims:
            told = [check_summary(s) for s in data.get("ranks") or []]
            return [s for s in told if s["rank"] not in present]
    return []


def _older(report: Path, snapshot: Path) -> bool:
    return report.stat().st_mtime_ns < snapshot.stat().st_mtime_ns


def _report_or_none(path: Path) -> dict[str, Any] | None:
    """Read a report's JSON; None where the file is something else or damaged, and the snapshot has to say."""
    from memprof.analysis.report_files import read_memprof_json

    data = read_memprof_json(path)
    if data is None or data["schema"] != _REPORT:
        return None
    if not all(isinstance(data.get(name), kind) for name, kind in (("source", dict), ("peak", dict), ("notes", list))):
        raise InputError(f"{path}: a report without source, peak or notes; write it again.")
    return data


def _rank_report(path: Path) -> dict[str, Any]:
    data = _report_or_none(path)
    if data is None:
        raise InputError(f"{path}: no report of memprof; give snapshots, or the JSON of `memprof report --json`.")
    return data

"""Put the other ranks' figures, when a distributed training ends, beside rank 0's, in its page, table and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memprof.integrations.callback.distributed import FAILED_SECONDS, MOST_TOLD, NORMAL_SECONDS, Gathering
from memprof.integrations.run_recorder.output import Result

from memprof.files import write_whole
from memprof.recording.guard import FailureGuard

if TYPE_CHECKING:
    from memprof.reports.document.model import Document

    from memprof.report import Report
    from memprof.report.ranks import RankSummary

# A page about another rank costs its analysis: only for one that clearly stands higher.
_CLEARLY = 1.005
# Snapshots of ranks that wrote no report: so many are analysed when training ends.
_MOST_READ = 4

Summaries = dict[int, dict[int, "RankSummary"]]  # by rank, by step


def summaries_of(result: Result, rank: int) -> list[RankSummary]:
    """Return a summary of each of this rank's newest recordings, and of the highest."""
    from memprof.analysis.ranks.summary import rank_summary

    paths = list(result.reports)
    highest = [path for path in paths[:-MOST_TOLD] if path == result.highest]
    reports = [(path, result.reports[path]) for path in (*highest, *paths[len(highest) - MOST_TOLD :])]
    return [rank_summary(report, rank, path.name) for path, report in reports]


def put_ranks_together(result: Result, folder: Path, gathering: Gathering, failed: bool) -> None:
    """Wait on rank 0 for the others and write the merged JSON, page and table; elsewhere send summaries to it; only
    warn."""
    lost = f"the ranks put together; try `memprof report {folder}`"
    FailureGuard("run", lost)(_tell_or_merge, result, folder, gathering, failed)


def _tell_or_merge(result: Result, folder: Path, gathering: Gathering, failed: bool) -> None:
    if gathering.rank != 0:
        from memprof.report.codec import to_builtins

        gathering.tell([to_builtins(summary) for summary in summaries_of(result, gathering.rank)])
    elif gathering.world_size > 1 and result.reports:
        _merge(result, folder, gathering, gathering.told(FAILED_SECONDS if failed else NORMAL_SECONDS))


def _merge(result: Result, folder: Path, gathering: Gathering, told: Mapping[int, list[Any]]) -> None:
    from memprof.analysis.ranks.merge import fullest, merged, missing_ranks
    from memprof.report.codec import to_json

    known = _known(result, folder, gathering, told)
    step = _step(known)
    chosen = {rank: s for rank, steps in known.items() if (s := _of_step(steps, step)) is not None}
    summaries = list(chosen.values())
    shown = fullest(summaries)
    world = gathering.world_size
    missing = missing_ranks(chosen, world, folder)
    path = folder / f"step-{step:06d}.rank-{gathering.rank}.pickle"
    own = result.reports.get(path)
    if own is None:
        return  # rank 0 has no recording of the step that the others have
    other = shown != gathering.rank and _stands_out(chosen, shown, gathering.rank)
    there = _report_of(folder / str(chosen[shown].file)) if other else None
    whole = merged(own if there is None else there, summaries, world, missing)
    write_whole(folder / f"step-{step:06d}.ranks.json", to_json(whole))
    document = result.document if there is None and result.drawn == path else None
    if document is None:
        document = _document_of(folder / str(chosen[shown].file) if there is not None else path)
    if document is not None:
        _show(result, folder, document, whole)


def _known(result: Result, folder: Path, gathering: Gathering, told: Mapping[int, list[Any]]) -> Summaries:
    """Return every summary at hand: rank 0's own, those told, and of the other ranks what their files in reach say."""
    from memprof.analysis.ranks.files import find_recordings
    from memprof.analysis.ranks.summary import check_summary

    found: Summaries = {}
    for summary in summaries_of(result, gathering.rank):
        _add(found, summary)
    for rank, said in told.items():
        for summary in said:
            if (checked := check_summary(summary)).rank == rank:
                _add(found, checked)
    told_already = {(rank, step) for rank, steps in found.items() for step in steps}
    own_steps, unread = set(found.get(gathering.rank, {})), 0
    for recording in find_recordings(folder):
        other, step = recording.rank, recording.step
        if other is None or other >= gathering.world_size or step not in own_steps or (other, step) in told_already:
            continue
        # A rank that died may have written its snapshot and no report: a few are read here, for the rest there is
        # `memprof report`.
        if recording.report is None and (unread := unread + 1) > _MOST_READ:
            continue
        read = _from_file(recording.path if recording.report is None else recording.report, other, gathering.began)
        if read is not None:
            _add(found, read)
    return found


def _from_file(path: Path, rank: int, since: float) -> RankSummary | None:
    """Return a rank's summary from what it wrote in this training; None where that is older, or damaged."""
    from memprof.analysis.ranks.summary import rank_summary

    try:
        report = _report_of(path) if path.stat().st_mtime >= since else None
        return None if report is None else rank_summary(report, rank, path.with_suffix(".pickle").name)
    except Exception:
        return None


def _report_of(path: Path) -> Report | None:
    """Return the report of a recording: its JSON, or the snapshot analysed; None where neither can be had."""
    from memprof.report.files import read_report

    try:
        written = path.with_suffix(".json")
        if written.is_file() and (report := read_report(written)) is not None:
            return report
        from memprof.advice.analyze_with_advice import analyze

        return analyze(path).report
    except Exception:
        return None


def _add(found: Summaries, summary: RankSummary) -> None:
    name = summary.file or ""
    digits = name.removeprefix("step-").partition(".")[0]
    if digits.isdigit():
        found.setdefault(summary.rank, {})[int(digits)] = summary


def _step(known: Summaries) -> int:
    """Return the step most ranks recorded; of several the one with the highest peak of any rank."""
    steps = {step for by_step in known.values() for step in by_step}

    def weight(step: int) -> tuple[int, int, int]:
        there = [by_step[step] for by_step in known.values() if step in by_step]
        return len(there), max(s.peak.active_bytes for s in there), step

    return max(steps, key=weight)


def _of_step(by_step: Mapping[int, RankSummary], step: int) -> RankSummary | None:
    """Return a rank's summary of the step; of the step it ran out of memory in, where that came later."""
    later = [by_step[s] for s in sorted(by_step) if s > step and by_step[s].oom is not None]
    return later[-1] if later else by_step.get(step)


def _stands_out(chosen: Mapping[int, RankSummary], shown: int, own: int) -> bool:
    highest, mine = chosen[shown], chosen.get(own)
    if mine is None:
        return True
    return highest.oom is not None or highest.peak.active_bytes > _CLEARLY * mine.peak.active_bytes


def _document_of(path: Path) -> Document | None:
    """Return the document of a snapshot, None where it cannot be reached from here or not be shown."""
    try:
        from memprof.reports.document.build import document_of

        from memprof.advice.analyze_with_advice import analyze
        from memprof.snapshot import load_snapshot

        return document_of(analyze(load_snapshot(path)))
    except Exception:
        return None


def _show(result: Result, folder: Path, document: Document, whole: Report) -> None:
    from memprof.reports.document.page_title import title_of
    from memprof.reports.document.ranks import ranks_of
    from memprof.reports.html.report import write_html
    from memprof.reports.terminal import report as terminal

    document = document._replace(report=whole, ranks=ranks_of(whole), title=title_of(whole))
    result.table = terminal.render_short(document)
    write_html(document, folder / "report.html")
    result.page = folder / "report.html"

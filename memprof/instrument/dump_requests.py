"""Ask workers, from the driver that started them, to dump now, and make one page of all."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memprof.errors import InputError, UsageError
from memprof.files import write_whole
from memprof.instrument.attach import REQUEST, attached


def request_dump(output_dir: str | os.PathLike[str]) -> None:
    """Ask, from the driver, every worker that writes below ``output_dir`` to dump at the end of its phase; InputError
    where the folder cannot be written to."""
    folder = Path(output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / REQUEST, str(time.time()))
    except OSError as error:
        raise InputError(f"{folder}: cannot be written to ({error.strerror or error}).") from None


def collect(workers: Sequence[Any], output_dir: str | os.PathLike[str], role: str | None = None) -> dict[str, Any]:
    """Have Ray actors dump now, from the driver, and put their reports into one page; return the merged
    ``memprof.report/1``.

    Each worker writes its snapshot where it runs; its report (kilobytes) comes back through Ray. ``report.html`` and
    the merged JSON are written to ``output_dir``, on the driver's machine. ``role``: which attachment of each worker;
    those with nothing attached are passed over.

    Raises:
        UsageError: Ray is not installed.
        InputError: no worker has anything attached, or the page cannot be written.
    """
    try:
        import ray
    except ImportError:
        raise UsageError(
            "collect() asks Ray actors; Ray is not installed. request_dump() works through files."
        ) from None
    from memprof.analysis.ranks.merge import fullest, merged, missing_ranks, world_size_of
    from memprof.analysis.ranks.summary import rank_summary
    from memprof.report import Report
    from memprof.report.codec import from_builtins, to_builtins
    from memprof.report.files import write_answer
    from memprof.reports.document.build import build_document
    from memprof.reports.html.report import write_html

    told = ray.get([w.__ray_call__.remote(_answer, role) for w in workers])
    answers = [from_builtins(answer, Report) for answer in told if answer is not None]
    if not answers:
        raise InputError("no worker has anything attached: call memprof.attach(...) in each of them.")
    reports = {a.source.rank or 0: a for a in answers}
    summaries = [rank_summary(report, rank) for rank, report in reports.items()]
    world = world_size_of([a.source.world_size for a in answers], reports)
    whole = merged(reports[fullest(summaries)], summaries, world, missing_ranks(reports, world))
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    write_answer(whole, folder / "ranks.json")
    write_html(build_document(whole), folder / "report.html")
    return to_builtins(whole)


def _answer(_worker: Any, role: str | None) -> dict[str, Any] | None:
    """Dump and answer, in the worker's process."""
    watch = attached(role)
    if watch is None:
        return None
    path = watch.dump("the driver asked for it")
    return None if path is None else watch.report(path)

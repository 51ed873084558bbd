"""Summarise one rank's report in a few kilobytes, enough for every comparison between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from memprof.analysis.report_files import problem
from memprof.errors import InputError

_PEAK = ("allocated_bytes", "active_bytes", "reserved_bytes", "non_torch_bytes", "phase", "step")
_DEVICE_PEAK = ("reserved_bytes", "non_torch_bytes", "phase", "step")
_OOM = ("requested_bytes", "device_free_bytes", "phase", "step")


def rank_summary(report: Mapping[str, Any], rank: int | None = None, file: str | None = None) -> dict[str, Any]:
    """Summarise one rank's report (an entry of ``ranks`` in ``memprof.report/1``); sizes in bytes.

    Args:
        report: the rank's own ``memprof.report/1``.
        rank: its number, where the report does not know it.
        file: the name of the recording; default: the report's own.

    Raises:
        InputError: the report lacks a figure that a summary needs.
    """
    try:
        source, peak = report["source"], report["peak"]
        files = source["files"]
        summary = {
            "rank": source["rank"] if rank is None else rank,
            "node": source.get("node"),
            "device": source["device"],
            "device_name": source.get("device_name"),
            "device_total_bytes": source["device_total_bytes"],
            "file": file if file is not None else files[0] if files else None,
            "history": source["history"],
            "tokens": _tokens(report, peak["step"]),
            "peak": {**{name: peak.get(name) for name in _PEAK}, "categories": _present(peak["categories"])},
            "device_peak": {name: report["device_peak"].get(name) for name in _DEVICE_PEAK},
            "own_peaks": _present(report["own_peaks"]),
            "phases": _highest(report["phases"]),
            "host": report["host"],
            "oom": None if report["oom"] is None else {name: report["oom"].get(name) for name in _OOM},
        }
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(f"a rank's report lacks a figure of its summary ({error!r}); write it again.") from None
    return check_summary(summary)


def check_summary(summary: Any) -> dict[str, Any]:
    """Return the summary after checking its figures, as it may come from another machine or version.

    Raises:
        InputError: it cannot be used.
    """
    if isinstance(summary, dict) and problem("rank", summary) is None:
        return summary
    rank = summary.get("rank") if isinstance(summary, dict) else None
    raise InputError(f"the summary of rank {str(rank)[:12]} is damaged or of another version; write its report again.")


def _present(categories: Mapping[str, int]) -> dict[str, int]:
    return {category: n for category, n in categories.items() if n}


def _highest(phases: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each phase at its highest peak, in the order in which they first ran."""
    found: dict[str, dict[str, Any]] = {}
    for span in phases:
        known = found.setdefault(span["phase"], {"phase": span["phase"], "peak_bytes": -1, "categories": {}})
        if span["peak_bytes"] > known["peak_bytes"]:
            known |= {"peak_bytes": span["peak_bytes"], "categories": _present(span["categories"])}
    return list(found.values())


def _tokens(report: Mapping[str, Any], step: int | None) -> int | None:
    """Return the tokens of the peak's step, or of the only step where the peak lies outside any step."""
    steps = (report.get("growth") or {}).get("steps") or []
    at = [s["tokens"] for s in steps if s["step"] == step or len(steps) == 1]
    return at[0] if at else None

"""Fill *What would lower the peak* from a report's ``advice`` and ``combination``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memprof.reports.document.model import Advice, Advised, Combination
from memprof.reports.document.text import phase_label, plain

from memprof.units import gib

NOTHING_KNOWN = "memprof knows no change of settings that would lower this peak."


def advised(report: Mapping[str, Any]) -> Advised:
    """Collect everything a renderer says of advice; without advice, the changes are empty."""
    changes = tuple(_change(entry, report) for entry in report.get("advice") or [])
    return Advised(changes, _basis(changes, report), _combination(report.get("combination")))


def _change(entry: Mapping[str, Any], report: Mapping[str, Any]) -> Advice:
    return Advice(
        action=plain(entry["action"]),
        saves_bytes=entry["saves_bytes"],
        costs=plain(entry["costs"]),
        basis=plain(entry["basis"]),
        setting=plain(entry.get("setting") or ""),
        exact=bool(entry["exact"]),
        after_bytes=entry.get("peak_after_bytes"),
        of_bytes=_whole_step(entry, report),
        limit=_limit(entry),
        also=_also(entry, report),
    )


def _whole_step(entry: Mapping[str, Any], report: Mapping[str, Any]) -> int | None:
    """Return what a step that ran out of memory needs in all, where the saving counts from that and not the peak."""
    after = entry.get("peak_after_bytes")
    if after is None or entry["basis"] != "estimated" or not (report.get("oom") or {}).get("ahead"):
        return None
    whole = int(entry["saves_bytes"] + after)
    return whole if whole > report["peak"]["allocated_bytes"] else None


def _limit(entry: Mapping[str, Any]) -> str:
    moved, after = entry.get("moves_to"), entry.get("peak_after_bytes")
    if not moved:
        return ""
    left = f", at {gib(after)} GiB" if after is not None else ""
    return plain(f"It saves no more because the peak is then in {phase_label(moved).lower()}{left}.")


def _also(entry: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    words = []
    if entry.get("peak") == "device":
        most = "up to " if entry["basis"] == "estimated" else ""
        words.append(f"This is about what the device holds: {most}{gib(entry['saves_bytes'])} GiB less reserved.")
    elif (device := entry.get("device_saves_bytes")) is not None and device != entry["saves_bytes"]:
        words.append(f"The device's peak changes by {gib(-device)} GiB.")
    if entry.get("host_bytes"):
        words.append(f"Takes {gib(entry['host_bytes'])} GiB of host memory.")
    words.append(_time(entry.get("time_ratio")))
    return " ".join(words)


def _time(ratio: float | None) -> str:
    """Say what a change costs in time; that nothing estimates it, where nothing does."""
    if not ratio:
        return "Time not estimated."
    change = round(100 * (ratio - 1))
    if not change:
        return "Time of a step: about the same (estimated)."
    return f"Time of a step: {'+' if change > 0 else '−'}{abs(change)} % (estimated)."


def _basis(changes: Sequence[Advice], report: Mapping[str, Any]) -> str:
    """Say how the savings were found, and how far off the simulator was on the unchanged run."""
    kinds = {a.basis for a in changes}
    if not kinds:
        return ""
    order = "the first to begin with, then by what each saves at the peak" if len(changes) > 1 else "at the peak"
    whole = next((a.of_bytes for a in changes if a.of_bytes), None)
    if "simulated" not in kinds:
        counted = f"; counted from the {gib(whole)} GiB that the step needs in all" if whole else ""
        return f"{order}, estimated from recorded sizes{counted}"
    unchanged = report.get("unchanged")
    words = f"{order}, found by simulating the changed run"
    if unchanged and report["source"]["kind"] != "simulated":
        error = 100 * (unchanged["simulated_bytes"] - unchanged["measured_bytes"]) / max(unchanged["measured_bytes"], 1)
        where = "above" if error > 0 else "below"
        words += f"; simulated unchanged, this run peaks {abs(error):.1f} % {where} what was measured"
    return words


def _combination(found: Mapping[str, Any] | None) -> Combination | None:
    if not found:
        return None
    settings = tuple(plain(c["setting"]) for c in found["changes"])
    return Combination(plain(found["sentence"]), bool(found["fits"]), settings)

"""Fill *What would lower the peak* from a report's ``advice`` and ``combination``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memprof.reports.document.model import Advice, Advised, Combination
from memprof.reports.document.text import gib, phase_label, plain

__all__ = ["advised"]

# A change that keeps the gradients goes first if it saves at least this share of what the best one saves.
_NEAR = 0.4
_ALIKE = 0.75


def advised(report: Mapping[str, Any]) -> Advised:
    """Collect everything a renderer says of advice; without advice, the changes are empty."""
    changes = tuple(_change(entry, report) for entry in report.get("advice") or [])
    return Advised(_first(report, changes), changes, _basis(changes, report), _combination(report.get("combination")))


def _change(entry: Mapping[str, Any], report: Mapping[str, Any]) -> Advice:
    return Advice(
        action=plain(entry["action"]),
        saves_bytes=entry["saves_bytes"],
        costs=plain(entry["costs"]),
        basis=plain(entry["basis"]),
        setting=plain(entry.get("setting") or ""),
        exact=bool(entry["exact"]),
        toll=int(entry.get("toll") or 0),
        after_bytes=entry.get("peak_after_bytes"),
        limit=_limit(entry),
        also=_also(entry, report),
    )


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
    return " ".join(words)


def _first(report: Mapping[str, Any], changes: Sequence[Advice]) -> str:
    """Name the change to begin with: of those that keep the gradients the one that saves most, unless they save little.

    What lies idle in the allocator comes first only where it would have saved a run that ran out of memory.
    """
    idle = {i for i, entry in enumerate(report.get("advice") or []) if entry.get("peak") == "device"}
    would_do = bool((report.get("oom") or {}).get("fits_defragmented"))
    open_ = [a for i, a in enumerate(changes) if (i in idle) == would_do] or list(changes)
    if not open_:
        return ""
    best = max(open_, key=lambda a: a.saves_bytes)
    kept = [a for a in open_ if a.exact and a.saves_bytes >= _NEAR * best.saves_bytes]
    chosen = _cheapest(kept) if kept else best
    how = "simulated" if chosen.basis == "simulated" else "an estimate"
    same = "; gradients stay the same" if chosen.exact else ""
    return f"First thing to change: {_lower(chosen.action)}. It saves {gib(chosen.saves_bytes)} GiB ({how}{same})."


def _cheapest(changes: Sequence[Advice]) -> Advice:
    """Choose, of the changes that save nearly as much as the best of them, the one that asks for least."""
    most = max(a.saves_bytes for a in changes)
    near = [a for a in changes if a.saves_bytes >= _ALIKE * most]
    return min(near, key=lambda a: (a.toll, -a.saves_bytes))


def _lower(words: str) -> str:
    return words[:1].lower() + words[1:]


def _basis(changes: Sequence[Advice], report: Mapping[str, Any]) -> str:
    """Say how the savings were found, and how far off the simulator was on the unchanged run."""
    kinds = {a.basis for a in changes}
    if not kinds:
        return ""
    if "simulated" not in kinds:
        return "ranked by what each saves at the peak, estimated from recorded sizes"
    unchanged = report.get("unchanged")
    words = "ranked by what each saves at the peak, found by simulating the changed run"
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

"""Report every device of a snapshot: a model may lie on several, and the report is about one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memprof.analysis.views import Views
from memprof.attribution.pipeline import attribute
from memprof.timeline.timeline import build_timeline
from memprof.units import format_gib
from memprof.vocabulary import CATEGORY_LABELS, Category

if TYPE_CHECKING:
    from memprof.attribution.rules import RuleSet

_MOST_NAMED = 8
_OF_PEAK = ("allocated_bytes", "active_bytes", "reserved_bytes", "not_in_history_bytes", "time_us", "phase", "step")


def devices_report(analysis: Views, rules: RuleSet | None = None) -> list[dict[str, Any]]:
    """Return each device's own peak, in order of the devices; empty where the snapshot holds one device.

    Args:
        analysis: the device that the report is about.
        rules: the stack rules it was attributed with; default: the packaged ones.
    """
    snapshot = analysis.snapshot
    if len(snapshot.devices) < 2:
        return []
    return [_device(_view(analysis, device, rules), device == analysis.timeline.device) for device in snapshot.devices]


def devices_note(rows: list[dict[str, Any]]) -> str | None:
    """Say which device a report is about, and what the others held at most; None where no other held anything."""
    others = [row for row in rows if not row["shown"] and row["peak"]["allocated_bytes"]]
    if not others:
        return None
    shown = next(row["device"] for row in rows if row["shown"])
    named = "; ".join(f"device {row['device']} {_held(row)}" for row in others[:_MOST_NAMED])
    more = f"; {len(others) - _MOST_NAMED} more in the JSON" if len(others) > _MOST_NAMED else ""
    return (
        f"This file holds {len(rows)} devices and this report is about device {shown}. The others' own peaks: "
        f"{named}{more}. --device N reports another"
    )


def _held(row: dict[str, Any]) -> str:
    peak = row["peak"]
    category, most = max(peak["categories"].items(), key=lambda item: item[1], default=("", 0))
    words = f"{format_gib(peak['allocated_bytes'])} GiB in {peak['phase']}"
    return f"{words} (most of it {CATEGORY_LABELS[Category(category)].lower()})" if most else words


def _view(analysis: Views, device: int, rules: RuleSet | None) -> Views:
    if device == analysis.timeline.device:
        return analysis
    timeline = build_timeline(analysis.snapshot, device)
    return Views(analysis.snapshot, timeline, attribute(analysis.snapshot, timeline, rules))


def _device(view: Views, shown: bool) -> dict[str, Any]:
    facts = view.snapshot.device_facts(view.timeline.device)
    peak, device_peak = view.peak, view.device_peak
    return {
        "device": view.timeline.device,
        "device_name": facts.name,
        "device_total_bytes": facts.total_bytes,
        "shown": shown,
        "peak": {
            **{name: getattr(peak, name) for name in _OF_PEAK},
            "categories": {category: n for category, n in peak.categories.items() if n},
        },
        "device_peak_bytes": None if device_peak is None else device_peak.reserved_bytes,
    }

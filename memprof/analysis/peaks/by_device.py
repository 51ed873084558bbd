"""Report every device of a snapshot: a model may lie on several, and the report is about one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memprof.analysis.views import Views
from memprof.attribution.pipeline import attribute
from memprof.report.peaks import Device, PeakOfDevice
from memprof.timeline.timeline import build_timeline
from memprof.units import format_gib
from memprof.vocabulary import CATEGORY_LABELS

if TYPE_CHECKING:
    from memprof.attribution.rules import RuleSet

_MOST_NAMED = 8


def devices_report(analysis: Views, rules: RuleSet | None = None) -> tuple[Device, ...]:
    """Return each device's own peak, in order of the devices; empty where the snapshot holds one device.

    Args:
        analysis: the device that the report is about.
        rules: the stack rules it was attributed with; default: the packaged ones.
    """
    snapshot = analysis.snapshot
    if len(snapshot.devices) < 2:
        return ()
    shown = analysis.timeline.device
    return tuple(_device(_view(analysis, device, rules), device == shown) for device in snapshot.devices)


def devices_note(rows: Sequence[Device]) -> str | None:
    """Say which device a report is about, and what the others held at most; None where no other held anything."""
    others = [row for row in rows if not row.shown and row.peak.allocated_bytes]
    if not others:
        return None
    shown = next(row.device for row in rows if row.shown)
    named = "; ".join(f"device {row.device} {_held(row)}" for row in others[:_MOST_NAMED])
    more = f"; {len(others) - _MOST_NAMED} more in the JSON" if len(others) > _MOST_NAMED else ""
    return (
        f"This file has {len(rows)} devices and this report is about device {shown}. The others' own peaks: "
        f"{named}{more}. --device N reports another"
    )


def _held(row: Device) -> str:
    peak = row.peak
    words = f"{format_gib(peak.allocated_bytes)} GiB in {peak.phase}"
    if not peak.categories:
        return words
    return f"{words} (most of it {CATEGORY_LABELS[max(peak.categories, key=lambda c: peak.categories[c])].lower()})"


def _view(analysis: Views, device: int, rules: RuleSet | None) -> Views:
    if device == analysis.timeline.device:
        return analysis
    timeline = build_timeline(analysis.snapshot, device)
    return Views(analysis.snapshot, timeline, attribute(analysis.snapshot, timeline, rules))


def _device(view: Views, shown: bool) -> Device:
    facts = view.snapshot.device_facts(view.timeline.device)
    peak, device_peak = view.peak, view.device_peak
    return Device(
        device=view.timeline.device,
        device_name=facts.name,
        device_total_bytes=facts.total_bytes,
        shown=shown,
        peak=PeakOfDevice(
            allocated_bytes=peak.allocated_bytes,
            active_bytes=peak.active_bytes,
            reserved_bytes=peak.reserved_bytes,
            not_in_history_bytes=peak.not_in_history_bytes,
            time_us=peak.time_us,
            phase=peak.phase,
            step=peak.step,
            categories=peak.present,
        ),
        device_peak_bytes=None if device_peak is None else device_peak.reserved_bytes,
    )

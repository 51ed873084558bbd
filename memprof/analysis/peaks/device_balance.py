"""Say where a device ran out of memory that others, less used, would have had."""

from __future__ import annotations

from collections.abc import Iterable

from memprof.report import Report
from memprof.report.peaks import Device
from memprof.units import amount

# Devices are unevenly used if even use would lower the highest peak by this share.
_UNEVEN = 0.2
_DATA_PARALLEL = "torch/nn/parallel/"
_MOST_NAMED = 8


def uneven_devices(report: Report, missing_bytes: int) -> str:
    """Return a sentence if memory ran out because the devices are unevenly used; "" if that is not the cause.

    It is one if the same bytes, spread evenly, would fit on every device that is used, with what was missing.
    """
    used = [device for device in report.devices if device.peak.allocated_bytes]
    failed = next((device for device in used if device.shown), None)
    if report.oom is None or failed is None or len(used) < 2:
        return ""
    asked = report.oom.requested_bytes
    highest = failed.peak.allocated_bytes + asked
    even = (sum(device.peak.allocated_bytes for device in used) + asked) // len(used)
    if highest - even < max(_UNEVEN * highest, missing_bytes) or not all(
        even <= _room(device, failed) for device in used
    ):
        return ""
    others = sorted((d for d in used if d is not failed), key=lambda device: -device.peak.allocated_bytes)
    named = [f"device {d.device} at {amount(d.peak.allocated_bytes)}" for d in others[:_MOST_NAMED]]
    more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
    words = f"The devices are unevenly used: device {failed.device} peaks at {amount(failed.peak.allocated_bytes)}, "
    words += f"{', '.join(named)}{more}; spread evenly, each needs {amount(even)}. "
    if _under_data_parallel(report):
        words += "torch.nn.DataParallel computes the loss on one device; DistributedDataParallel uses all evenly. "
    return words


def _room(device: Device, failed: Device) -> int:
    """Return what fits on a device: its memory, or what was allocated on the one that ran out of memory."""
    return device.device_total_bytes or failed.device_total_bytes or failed.peak.allocated_bytes


def _under_data_parallel(report: Report) -> bool:
    stacks: Iterable[Iterable[str]] = (
        report.oom.stack if report.oom else (), *(group.stack for group in report.peak.largest)
    )  # fmt: skip
    return any(_DATA_PARALLEL in frame and "/distributed.py" not in frame for stack in stacks for frame in stack)

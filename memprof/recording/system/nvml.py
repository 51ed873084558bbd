"""Ask the driver who holds a device's memory: NVIDIA's management library through ``nvidia-ml-py``.

Never fatal. Where the library is missing or refuses, a sentence says so once, and nothing is asked again. ROCm has no
such library here: there the figures stay unknown. (Written from the library's sources; untested on hardware.)
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

_MISSING = "NVML is not available (pip install nvidia-ml-py): non-PyTorch memory is unknown"


@dataclass(frozen=True)
class DeviceMemory:
    """A device's memory at one moment, in bytes: ``own`` is this process's share and ``others`` what other processes
    hold, None where the driver does not tell; ``processes`` are ``(pid, bytes or None)`` of all of them."""

    total: int
    used: int
    own: int | None
    others: int | None
    processes: tuple[tuple[int, int | None], ...]


class DeviceMeter:
    """Ask NVML (``library``; ``pynvml`` where not given) about one device, or slice of one (MIG), by the UUID that
    torch gives.

    Of a slice torch may know the parent's UUID only: ``visible`` is the value of ``CUDA_VISIBLE_DEVICES``. ``reason``
    says why nothing can be read, or what a reading lacks; ``mig`` tells whether the device is a slice, None where not
    known.
    """

    def __init__(self, uuid: str, visible: str | None = None, library: Any = None, silent: str = "") -> None:
        self.reason = silent and f"{silent}: non-PyTorch memory is unknown"
        self.mig: bool | None = None
        self._library = library
        self._handle: Any = None
        if silent:
            return
        try:
            if library is None:
                import pynvml

                self._library = pynvml
            self._library.nvmlInit()
            self._handle = self._find(uuid, visible)
            self.mig = bool(self._library.nvmlDeviceIsMigDeviceHandle(self._handle))
        except ImportError:
            self.reason = _MISSING
        except Exception as error:
            self._handle = None if self.mig is None and self._handle is None else self._handle
            if self._handle is None:
                self.reason = f"NVML reports an error ({error}): non-PyTorch memory is unknown"

    def _find(self, uuid: str, visible: str | None) -> Any:
        """Return the handle; the last name's error where none is known."""
        bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
        slices = [part.strip() for part in (visible or "").split(",") if part.strip().startswith("MIG-")]
        names = [*(slices if len(slices) == 1 else []), f"GPU-{bare}", f"MIG-{bare}"]
        for name in names[:-1]:
            try:
                return self._library.nvmlDeviceGetHandleByUUID(name)
            except Exception:
                continue
        return self._library.nvmlDeviceGetHandleByUUID(names[-1])

    def read(self) -> DeviceMemory | None:
        """Return the device now; None where nothing can be read (after a failure nothing is asked again)."""
        if self._handle is None:
            return None
        try:
            memory = self._library.nvmlDeviceGetMemoryInfo(self._handle)
            listed = self._library.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except Exception as error:
            self._handle = None
            self.reason = f"NVML stopped answering ({error}): non-PyTorch memory is unknown from then on"
            return None
        processes = tuple((int(p.pid), None if p.usedGpuMemory is None else int(p.usedGpuMemory)) for p in listed)
        own, others = self._shares(processes)
        return DeviceMemory(int(memory.total), int(memory.used), own, others, processes)

    def _shares(self, processes: tuple[tuple[int, int | None], ...]) -> tuple[int | None, int | None]:
        known = dict(processes)
        pid = os.getpid()
        if pid not in known:
            # In a container the driver names processes by numbers of another namespace; one alone can only be ours.
            if len(known) != 1:
                self.reason = "the driver does not list this process (a container with its own process numbers?)"
                return None, None
            pid = next(iter(known))
        others = [n for p, n in processes if p != pid]
        return known[pid], None if None in others else sum(n for n in others if n is not None)

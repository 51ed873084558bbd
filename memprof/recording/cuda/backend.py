"""The few calls the CUDA history makes into torch, in one place.

Some are private and have grown arguments from torch 2.6 to 2.13; what an older torch lacks is said by ``can_*``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["CudaBackend", "TorchCuda"]


class CudaBackend(Protocol):
    """What :class:`memprof.recording.cuda.history.CudaHistory` needs of torch; sizes in bytes."""

    can_skip: bool
    can_tag: bool

    def history_enabled(self) -> bool: ...

    def record(self, context: str | None, stacks: str, max_entries: int, skip: list[str], clear: bool) -> None: ...

    def stop(self) -> None: ...

    def snapshot(self) -> dict[str, Any]: ...

    def segments(self) -> list[dict[str, Any]]:
        """The allocator's state without the history: cheap."""
        ...

    def stats(self, device: int) -> dict[str, Any]: ...

    def reset_peaks(self, device: int) -> None: ...

    def tag(self, text: str) -> None: ...

    def current_tag(self) -> str: ...

    def watch_oom(self, observer: Callable[[int, int, int, int], None]) -> None: ...

    def limit(self, device: int, nbytes: int | None) -> None:
        """Let this process reserve no more than ``nbytes`` of a device; None lifts the limit."""
        ...


class TorchCuda:
    """The real one."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._memory = torch.cuda.memory
        self._accepted = set(inspect.signature(self._memory._record_memory_history).parameters)
        snapshot_options = inspect.signature(torch.cuda.memory_snapshot).parameters
        self.can_skip = "skip_actions" in self._accepted and "include_traces" in snapshot_options
        self.can_tag = hasattr(self._memory, "_set_memory_metadata")

    def history_enabled(self) -> bool:
        return bool(self._torch._C._cuda_isHistoryEnabled())

    def record(self, context: str | None, stacks: str, max_entries: int, skip: list[str], clear: bool) -> None:
        arguments: dict[str, Any] = {"context": context, "stacks": stacks, "max_entries": max_entries}
        if skip:
            arguments["skip_actions"] = skip
        if clear and "clear_history" in self._accepted:
            arguments["clear_history"] = True
        if "global_record_annotations" in self._accepted:
            arguments["global_record_annotations"] = True
        self._memory._record_memory_history("all", **arguments)

    def stop(self) -> None:
        self._memory._record_memory_history(None)

    def snapshot(self) -> dict[str, Any]:
        return dict(self._memory._snapshot())

    def segments(self) -> list[dict[str, Any]]:
        return list(self._torch.cuda.memory_snapshot(include_traces=False))  # type: ignore[no-untyped-call]

    def stats(self, device: int) -> dict[str, Any]:
        return dict(self._torch.cuda.memory_stats_as_nested_dict(device))

    def reset_peaks(self, device: int) -> None:
        self._torch.cuda.reset_peak_memory_stats(device)

    def tag(self, text: str) -> None:
        if self.can_tag:
            self._memory._set_memory_metadata(text)

    def current_tag(self) -> str:
        return str(self._memory._get_memory_metadata()) if self.can_tag else ""

    def watch_oom(self, observer: Callable[[int, int, int, int], None]) -> None:
        attach = getattr(self._torch._C, "_cuda_attach_out_of_memory_observer", None)
        if attach is not None:
            attach(observer)

    def limit(self, device: int, nbytes: int | None) -> None:
        total = int(self._torch.cuda.get_device_properties(device).total_memory)
        fraction = 1.0 if nbytes is None else min(1.0, nbytes / total)
        self._torch.cuda.set_per_process_memory_fraction(fraction, device)

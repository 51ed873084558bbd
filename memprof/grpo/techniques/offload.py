"""Keep layer inputs in host memory between forward and backward, and copy them while the device computes.

A layer's input is copied out on a stream of its own while the layer runs, and copied back while the layer after it is
recomputed: at most two inputs are on their way out and two on their way in. Without a device to copy from, the same
code runs without streams.

Pinned memory is handed out in powers of two, so that a buffer of 160 MiB would hold 256. Inputs are therefore packed
into a few large slabs, which are kept for the next step.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

_ALIGN = 512
_LARGEST_SLAB = 1 << 30
#: inputs on their way out of the device at a time, and on their way back.
_IN_FLIGHT = 2


class HostPool:
    """Host memory in slabs that are a power of two long, given out in parts and taken back; ``pin``: page-locked."""

    def __init__(self, *, pin: bool) -> None:
        self.pin = pin
        self._slabs: list[torch.Tensor] = []
        self._free: list[list[tuple[int, int]]] = []
        # Parts come back from finalizers, which may run in the middle of `take`: appending is all they do.
        self._returned: deque[tuple[int, int, int]] = deque()

    @property
    def held_bytes(self) -> int:
        """Count the bytes of all slabs, used or not."""
        return sum(slab.numel() for slab in self._slabs)

    @property
    def used_bytes(self) -> int:
        """Count the bytes given out, alignment included."""
        self._take_back()
        return self.held_bytes - sum(stop - start for parts in self._free for start, stop in parts)

    def take(self, n_bytes: int) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """Return ``n_bytes`` of memory as ``uint8`` and the token to give them back with."""
        self._take_back()
        need = -(-max(1, n_bytes) // _ALIGN) * _ALIGN
        for index, parts in enumerate(self._free):
            for place, (start, stop) in enumerate(parts):
                if stop - start >= need:
                    parts[place : place + 1] = [(start + need, stop)] if stop - start > need else []
                    return self._slabs[index][start : start + n_bytes], (index, start, start + need)
        size = _power_of_two(max(need, min(8 * need, _LARGEST_SLAB)))
        self._slabs.append(host_memory(size, self.pin))
        self._free.append([(0, size)])
        return self.take(n_bytes)

    def give(self, token: tuple[int, int, int]) -> None:
        self._returned.append(token)

    def _take_back(self) -> None:
        while self._returned:
            index, start, stop = self._returned.popleft()
            merged: list[tuple[int, int]] = []
            for part in sorted([*self._free[index], (start, stop)]):
                if merged and merged[-1][1] == part[0]:
                    merged[-1] = (merged[-1][0], part[1])
                else:
                    merged.append(part)
            self._free[index] = merged


def host_memory(n_bytes: int, pin: bool) -> torch.Tensor:
    """Allocate one slab. A function, so that a simulation can keep the host's memory apart from the device's."""
    return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=pin)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


class _Parked:
    """One tensor in host memory. The graph owns it; when it goes, its memory goes back to the pool."""

    def __init__(self, tensor: torch.Tensor, pool: HostPool, layer: int, before: _Parked | None) -> None:
        self.arriving: tuple[torch.Tensor, Any] | None = None
        raw, token = pool.take(tensor.numel() * tensor.element_size())
        self.host = raw.view(tensor.dtype).view(tensor.shape)
        self.device, self.layer = tensor.device, layer
        self.before = None if before is None else weakref.ref(before)
        weakref.finalize(self, pool.give, token)

    def __del__(self) -> None:
        # Fetched ahead and never used, because the graph was thrown away: its memory is free only once it has arrived.
        if self.arriving is not None and self.arriving[1] is not None:
            torch.cuda.current_stream(self.device).wait_event(self.arriving[1])


class Offloader:
    """Save tensors for backward in host memory; see the module's text. One per model.

    CUDA (and ROCm) devices copy on a side stream from pinned memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams = device.type == "cuda"
        self.pool = HostPool(pin=self.streams)
        self._side: Any = torch.cuda.Stream(device) if self.streams else None  # type: ignore[no-untyped-call]
        self._leaving: deque[tuple[torch.Tensor, Any]] = deque()
        self._last: weakref.ref[_Parked] | None = None

    def __deepcopy__(self, memo: Any) -> Offloader:
        """Make a new one: a copied model offloads by itself."""
        return Offloader(self.device)

    @contextmanager
    def saving(self, layer: int) -> Iterator[None]:
        """Send the device's tensors saved for backward inside to host memory. ``layer`` counts up through the model."""

        def pack(tensor: torch.Tensor) -> Any:
            ours = tensor.device.type == self.device.type and tensor.numel() > 0
            return self._park(tensor, layer) if ours and tensor.is_floating_point() else tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, self._fetch):
            yield

    def _park(self, tensor: torch.Tensor, layer: int) -> _Parked:
        last = self._last() if self._last is not None else None
        before = last if last is not None and last.layer == layer - 1 else None
        parked = _Parked(tensor, self.pool, layer, before)
        with torch.no_grad(), self._on_side():
            parked.host.copy_(tensor, non_blocking=self.streams)
        # The tensor must not be freed before it has been copied. Waiting for the copy of the one before the last,
        # instead of `record_stream`, gives its memory back at a known place in the program.
        self._leaving.append((tensor.detach(), self._event()))  # its memory, not its graph
        self._let_go(_IN_FLIGHT)
        self._last = weakref.ref(parked)
        return parked

    def _fetch(self, parked: Any) -> torch.Tensor:
        if not isinstance(parked, _Parked):
            return parked  # type: ignore[no-any-return]
        self._let_go(0)
        if parked.arriving is None:
            self._start(parked)
        assert parked.arriving is not None
        tensor, arrived = parked.arriving
        parked.arriving = None
        if arrived is not None:
            torch.cuda.current_stream(parked.device).wait_event(arrived)
        before = parked.before() if parked.before is not None else None
        if before is not None and before.arriving is None:
            self._start(before)
        return tensor

    def _start(self, parked: _Parked) -> None:
        tensor = torch.empty(parked.host.shape, dtype=parked.host.dtype, device=parked.device)
        with torch.no_grad(), self._on_side():
            tensor.copy_(parked.host, non_blocking=self.streams)
        parked.arriving = (tensor, self._event())

    def _let_go(self, most: int) -> None:
        while len(self._leaving) > most:
            tensor, copied = self._leaving.popleft()
            if copied is not None:
                torch.cuda.current_stream(tensor.device).wait_event(copied)

    def _on_side(self) -> Any:
        """Work on the side stream, after everything the compute stream has been given so far."""
        if not self.streams:
            return nullcontext()
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        return torch.cuda.stream(self._side)

    def _event(self) -> Any:
        return self._side.record_event() if self.streams else None

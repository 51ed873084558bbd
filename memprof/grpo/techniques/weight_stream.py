"""Bring groups of weights from host memory to a device one after the other, the next while this one is computed with.

Weights that are mapped from files cannot be copied without stopping the device: a group is first copied into one of two
pinned buffers, by the host, and from there on a stream of its own. Without a device to copy to, the same code runs
without streams and buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from memprof.grpo.techniques import offload

_ALIGN = 512


class WeightStream:
    """Copies of weights on ``device``; one for a model, whose two buffers are as large as its largest group."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams = device.type == "cuda"
        self._side: Any = torch.cuda.Stream(device) if self.streams else None  # type: ignore[no-untyped-call]
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._sent: list[Any] = [None, None]

    def __deepcopy__(self, memo: Any) -> WeightStream:
        """Make a new one: a copied model has buffers of its own."""
        return WeightStream(self.device)

    def over(self, groups: Sequence[Sequence[torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
        """Yield each group's copies on the device; they go when the next group is asked for, whose copies are under way
        while the caller works with this one: two groups are on the device at a time."""
        coming: tuple[list[torch.Tensor], Any] | None = None
        try:
            for number, group in enumerate(groups):
                copies, arrived = coming or self._send(group, *self._room(group), number)
                coming = None
                # Before the caller's work, so that the copies need not wait for it.
                room = self._room(groups[number + 1]) if number + 1 < len(groups) else None
                self._wait(arrived)
                yield copies
                copies.clear()  # not only here: the loop over these groups holds the list too
                if room is not None:
                    coming = self._send(groups[number + 1], *room, number + 1)
                    room = None
        finally:
            if coming is not None:  # thrown away: its memory is free only once it has arrived
                self._wait(coming[1])

    def _room(self, group: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """Allocate a group's copies; return them and when the memory is free of what was in it before."""
        room = [torch.empty_like(tensor, device=self.device) for tensor in group]
        return room, torch.cuda.current_stream(self.device).record_event() if self.streams else None

    def _send(
        self, group: Sequence[torch.Tensor], room: list[torch.Tensor], free: Any, number: int
    ) -> tuple[list[torch.Tensor], Any]:
        """Start to fill ``room`` with ``group``; return it and when that is done."""
        sources = self._staged(group, number % 2) if self.streams else list(group)
        if self.streams:
            self._side.wait_event(free)
        with torch.cuda.stream(self._side) if self.streams else nullcontext():
            for copy, source in zip(room, sources, strict=True):
                copy.copy_(source, non_blocking=self.streams)
        arrived = self._side.record_event() if self.streams else None
        self._sent[number % 2] = arrived
        return room, arrived

    def _staged(self, group: Sequence[torch.Tensor], which: int) -> list[torch.Tensor]:
        """Copy a group into a pinned buffer, once what was sent from there before has left."""
        if self._sent[which] is not None:
            self._sent[which].synchronize()
        sizes = [-(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN for tensor in group]
        buffer = self._buffers[which]
        if buffer is None or buffer.numel() < sum(sizes):
            buffer = self._buffers[which] = offload.host_memory(sum(sizes), True)
        staged, start = [], 0
        for tensor, size in zip(group, sizes, strict=True):
            part = buffer[start : start + tensor.numel() * tensor.element_size()]
            staged.append(part.view(tensor.dtype).view(tensor.shape).copy_(tensor))
            start += size
        return staged

    def _wait(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

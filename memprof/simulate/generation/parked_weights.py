"""Simulate ``park_weights``: weights and optimizer state leave the card while an engine beside them is awake."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from memprof.allocator.model import CachingAllocator
from memprof.grpo.techniques.offload import HostPool

if TYPE_CHECKING:
    from memprof.simulate.recorder.session import FakeSession

NEVER_RUN = "park_weights was never run with a real engine: parameters and optimizer state were moved, vLLM is modelled"


class ParkedWeights:
    """Parks what :class:`memprof.grpo.parking.WeightParking` parks; the host memory is kept from one time to the next.

    Args:
        session: whose device and host are meant.
    """

    def __init__(self, session: FakeSession) -> None:
        self._session = session
        self._host = HostPool(pin=True)

    @contextmanager
    def parked(self, model: Any, optimizer: Any) -> Iterator[None]:
        """Free the device memory of ``model`` and ``optimizer`` while open, and count both copies."""
        from memprof.grpo.parking import tensors_of

        recorder, book = self._session.fake_recorder, self._session.book
        storages = recorder.storages
        moved = {storages.address_of(t.untyped_storage()): t for t in tensors_of(model, optimizer)}
        moved.pop(0, None)
        with recorder.work.apart():  # the copies are counted below, not the allocation of what they go to
            tokens = [self._host.take(tensor.untyped_storage().nbytes())[1] for tensor in moved.values()]
        total = sum(tensor.untyped_storage().nbytes() for tensor in moved.values())
        recorder.work.to_host(2 * total, *recorder.phase_and_step())
        for tensor in moved.values():
            storages.take_away(tensor)
        heap = recorder.allocator
        assert isinstance(heap, CachingAllocator)  # an engine runs on CUDA
        heap.empty_cache()
        yield
        heap.empty_cache()  # the engine's memory was its own
        for before, tensor in moved.items():
            storages.birth(tensor)
            book.moved(before, storages.address_of(tensor.untyped_storage()))
        for token in tokens:
            self._host.give(token)
        if NEVER_RUN not in self._session.notes:
            self._session.notes.append(NEVER_RUN)

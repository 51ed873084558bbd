"""Model a vLLM engine in the training process: a share of the card, taken while it is awake.

``park_weights`` is modelled too: weights and optimizer state leave the card while the engine is awake.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from memprof.allocator.model import CachingAllocator
from memprof.config.model_shape import ModelShape
from memprof.config.settings import Settings
from memprof.errors import UsageError
from memprof.grpo.techniques.offload import HostPool
from memprof.simulate.recorder.flops import Tally
from memprof.simulate.recorder.session import FakeSession
from memprof.vocabulary import Category

NEVER_RUN = "park_weights has run with a real engine on a CPU only: weights and state were moved, vLLM is modelled"


class ColocatedEngine:
    """Take ``vllm_gpu_memory_utilization`` of the card for its weights, graphs and cache; asleep, it takes nothing.

    Raises:
        UsageError: the card is not known.
    """

    def __init__(self, settings: Settings, session: FakeSession, config: Any) -> None:
        total = session.recorder.device().total_bytes
        if total is None:
            raise UsageError("--generation vllm uses a fraction of the GPU: it requires --gpu.")
        self._session, self._settings, self._config = session, settings, config
        self._bytes = int(total * settings.vllm_gpu_memory_utilization)
        self._host = HostPool(pin=True)  # kept from one time to the next
        self._sleeps = settings.engine_sleeps
        if not self._sleeps:
            self._take()

    def generate(self, trainer: Any, sequences: int) -> None:
        """Wake up, generate for so many of a trainer's prompts, and sleep again where that is enabled."""
        self._count_work(sequences)
        parks = self._settings.park_weights
        with self._parked(trainer.model, trainer.optimizer) if parks else nullcontext():
            if self._sleeps:
                address = self._take()
                self._session.fake_recorder.blocks.release(address)

    def _count_work(self, sequences: int) -> None:
        """Count a decode step's weights and cache, as many sequences together as the engine's cache holds."""
        shape, told = ModelShape.of(self._config), self._settings
        weights = 2 * shape.parameters  # bf16, the engine's own copy
        cache = max(1, shape.kv_cache_bytes(told.sequence_length, 2))  # layers that keep a state grow by nothing
        together = max(1, min(sequences, (self._bytes - weights) // cache))
        rounds = math.ceil(sequences / together)
        read = weights + together * shape.kv_cache_bytes(told.sequence_length - told.completion_length // 2, 2)
        prompts = 2 * shape.parameters * sequences * told.prompt_length
        tally = Tally(fused={(prompts, 0, weights): 1.0})
        tally.fused[2 * shape.parameters * together, 0, read] = float(rounds * told.completion_length)
        self._session.fake_recorder.work.add(tally, 1)

    def _take(self) -> int:
        session = self._session
        return session.fake_recorder.blocks.hold(self._bytes, Category.INFERENCE_ENGINE, "vLLM's share")

    @contextmanager
    def _parked(self, model: Any, optimizer: Any) -> Iterator[None]:
        """Free the device memory that :class:`memprof.grpo.cpu_offload.WeightOffload` frees, and count both copies."""
        from memprof.grpo.cpu_offload import tensors_of

        recorder, book = self._session.fake_recorder, self._session.book
        storages = recorder.storages
        moved = {storages.address_of(t.untyped_storage()): t for t in tensors_of(model, optimizer)}
        moved.pop(0, None)
        with recorder.work.apart():  # the copies are counted below, not the allocation of what they go to
            tokens = [self._host.take(tensor.untyped_storage().nbytes())[1] for tensor in moved.values()]
        total = sum(tensor.untyped_storage().nbytes() for tensor in moved.values())
        recorder.work.to_host(2 * total)
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

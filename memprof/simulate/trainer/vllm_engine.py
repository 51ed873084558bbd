"""Model a vLLM engine in the training process: a share of the card, taken while it is awake."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from memprof.config.model_shape import ModelShape
from memprof.config.settings import Settings
from memprof.errors import UsageError
from memprof.simulate.generation.parked_weights import ParkedWeights
from memprof.simulate.recorder.flops import Tally
from memprof.vocabulary import Category

if TYPE_CHECKING:
    from memprof.simulate.recorder.session import FakeSession


class ColocatedEngine:
    """Take ``vllm_gpu_memory_utilization`` of the card for its weights, graphs and cache; asleep, it takes nothing.

    Raises:
        UsageError: the card is not known.
    """

    def __init__(self, settings: Settings, session: FakeSession | None, config: Any) -> None:
        total = session.recorder.device().total_bytes if session is not None else None
        if session is None or total is None:
            raise UsageError("--generation vllm takes a share of the card: say which one with --gpu.")
        self._session, self._settings, self._config = session, settings, config
        self._bytes = int(total * settings.vllm_gpu_memory_utilization)
        self._parking = ParkedWeights(session)
        self._sleeps = settings.vllm_enable_sleep_mode
        if not self._sleeps:
            self._take()

    def generate(self, trainer: Any, sequences: int) -> None:
        """Wake up, generate for so many of a trainer's prompts, and sleep again where that is enabled."""
        self._count_work(sequences)
        parked: AbstractContextManager[None] = nullcontext()
        if self._settings.park_weights:
            parked = self._parking.parked(trainer.model, trainer.optimizer)
        with parked:
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
        recorder = self._session.fake_recorder
        recorder.work.add(tally, 1, *recorder.phase_and_step())

    def _take(self) -> int:
        session = self._session
        return session.fake_recorder.blocks.hold(self._bytes, Category.INFERENCE_ENGINE, "vLLM's share")

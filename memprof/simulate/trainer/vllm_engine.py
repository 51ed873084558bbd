"""Model a vLLM engine in the training process: a share of the card, taken while it is awake."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memprof.config.settings import Settings
from memprof.errors import UsageError
from memprof.vocabulary import Category

if TYPE_CHECKING:
    from memprof.simulate.recorder.session import FakeSession

__all__ = ["ColocatedEngine"]


class ColocatedEngine:
    """Take ``vllm_gpu_memory_utilization`` of the card for its weights, graphs and cache; asleep, it takes nothing.

    Raises:
        UsageError: the card is not known.
    """

    def __init__(self, settings: Settings, session: FakeSession | None) -> None:
        total = session.recorder.device().total_bytes if session is not None else None
        if session is None or total is None:
            raise UsageError("--generation vllm takes a share of the card: say which one with --gpu.")
        self._session = session
        self._bytes = int(total * settings.vllm_gpu_memory_utilization)
        self._sleeps = settings.vllm_enable_sleep_mode
        if not self._sleeps:
            self._take()

    def generate(self) -> None:
        """Wake up, generate, and sleep again where that is enabled."""
        if self._sleeps:
            address = self._take()
            self._session.fake_recorder.release(address)

    def _take(self) -> int:
        session = self._session
        return session.fake_recorder.hold(self._bytes, Category.INFERENCE_ENGINE, session.book, "vLLM's share")

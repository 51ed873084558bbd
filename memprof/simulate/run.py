"""One simulation from its settings to a snapshot."""

from __future__ import annotations

from typing import Any

from memprof.allocator import CachingAllocator, OutOfMemory, parse_settings
from memprof.errors import MemprofError
from memprof.record.protocol import DeviceInfo
from memprof.simulate.settings import Settings

__all__ = ["simulate_settings"]


def simulate_settings(settings: Settings, *, capacity: int | None = None, stacks: bool = True) -> dict[str, Any]:
    """Execute one GRPO step on fake tensors; the result is a raw snapshot, as ``_snapshot()`` would have returned it.

    Args:
        settings: the run.
        capacity: bytes the device has for this process; a step that needs more ends in an OOM that the snapshot holds.
        stacks: keep the Python stack of every allocation.

    Raises:
        InputError: the model cannot be found or its code needs real values.
        UsageError: options that cannot be satisfied.
    """
    from memprof.simulate.fakes import fake_world
    from memprof.simulate.models import load_config
    from memprof.simulate.recorder import FakeRecorder, Tracking
    from memprof.simulate.session import FakeSession
    from memprof.simulate.trl_recipe import run_trl, selected_of

    import trl  # noqa: F401  (loaded before the fake world opens: it makes constants)
    import transformers.masking_utils  # noqa: F401

    config = load_config(settings.model)
    cuda = settings.device == "cuda"
    heap = CachingAllocator(parse_settings(settings.alloc_conf), capacity)
    recorder = FakeRecorder(heap, DeviceInfo(0, settings.device, "simulated", capacity), cuda=cuda, stacks="python" if stacks else None)
    session = FakeSession(recorder, settings.to_dict())
    wanted = None if settings.attn == "auto" else settings.attn
    with fake_world(cuda=cuda, attention=wanted), Tracking(recorder, settings.padding == "none", selected_of(settings)):
        session.start()
        try:
            run_trl(settings, config, recorder, session)
        except OutOfMemory:
            pass
        finally:
            session.stop()
        return session.to_raw()

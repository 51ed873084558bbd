"""Hold the gradient buckets of DistributedDataParallel, which is modelled, not executed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memprof.vocabulary import Category

if TYPE_CHECKING:
    from memprof.simulate.recorder.session import FakeSession

_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20  # torch's defaults, in bytes


def hold_buckets(model: Any, session: FakeSession) -> None:
    """Hold flat copies of every trainable gradient from now on, as many buckets as torch would make."""
    sizes = [p.numel() * p.element_size() for p in model.parameters() if p.requires_grad]
    filled, limit = 0, _FIRST_BUCKET
    for size in reversed(sizes):
        filled += size
        if filled >= limit:
            session.fake_recorder.blocks.hold(filled, Category.COMMUNICATION, "gradient bucket")
            filled, limit = 0, _BUCKET
    if filled:
        session.fake_recorder.blocks.hold(filled, Category.COMMUNICATION, "gradient bucket")

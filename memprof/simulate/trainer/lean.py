"""The lean trainer, told that fake tensors are on a GPU; what it asks of the machine, the simulated one answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from memprof.simulate.recorder.repeats import alike_rounds
from memprof.vocabulary import Category

if TYPE_CHECKING:
    from memprof.simulate.recorder.session import FakeSession

__all__ = ["lean_on_cuda", "reference_of", "together"]

# Of the pieces a micro-batch is cut into, those executed.
_PIECES = 2

Change = tuple[Any, str, Any]


def lean_on_cuda(session: FakeSession | None) -> list[Change]:
    """The lean trainer as it runs on a GPU: Triton's passes, long sequences' defaults, pinned host memory, and as many
    sequences generating together as the simulated card has room for."""
    from memprof.grpo import device as machine
    from memprof.grpo.loss import fused_loss
    from memprof.grpo.loss.passes import shape_passes
    from memprof.grpo.step import micro_batch, pieces, scoring
    from memprof.grpo.techniques import attention_kernels, offload, segment_attention

    def pinned(n_bytes: int, pin: bool) -> Any:
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)

    def few(*given: Any) -> Any:
        """Pieces are alike here, and from the second on gradients are there: the rest would only repeat it."""
        planned = plan(*given)
        return planned if any(piece.prompt is not None for piece in planned) else planned[:_PIECES]

    plan = pieces.plan
    return [
        (fused_loss, "passes_for", lambda device: shape_passes()),
        (machine, "device_kind", _cuda),
        (machine, "free_bytes", lambda device: _free_bytes(session)),
        (offload, "_host_memory", pinned),
        (segment_attention, "attention_kernel", attention_kernels.gpu_kernel),
        (micro_batch, "plan", few),
        (scoring, "plan", few),
        *([_passes_counted(session), *_rounds_repeated(session)] if session is not None else []),
    ]


def reference_of(load: Callable[..., Any], session: FakeSession | None) -> list[Change]:
    """What the lean trainer's own ``load_reference`` reads a checkpoint with; ``session``: it is the host's memory."""
    import trl.trainer.utils as utils

    def on_host(*args: Any, **kwargs: Any) -> Any:
        if session is None:
            return load(*args, **kwargs)
        session.fake_recorder.paused += 1
        model = load(*args, **kwargs)
        session.fake_recorder.paused -= 1
        session.host_bytes += sum(p.numel() * p.element_size() for p in model.parameters())
        for tensor in (*model.parameters(), *model.buffers()):
            session.fake_recorder.disown(tensor)
        return model

    return [(utils, "create_model_from_path", on_host)]


def together(trainer: Any, prompt_ids: list[Any], session: FakeSession | None) -> int:
    """Sequences the lean trainer would generate at once; where it chose them by free memory, a note says so.

    The last generation's is told: in the first there is no optimizer state yet.
    """
    from memprof.grpo.generation import sequences_together

    size = sequences_together(trainer.step_context(), prompt_ids)
    if session is not None and trainer.args.generation_batch is None and _free_bytes(session) < _UNKNOWN:
        note = f"{_CHOSEN}: {size} of {len(prompt_ids)} sequences generate together, by the card's free memory"
        session.notes[:] = [*(n for n in session.notes if not n.startswith(_CHOSEN)), note]
    return size


_CHOSEN = "generation_batch"
_UNKNOWN = 1 << 62  # of a card that was not named: room for all


def _free_bytes(session: FakeSession | None) -> int:
    """What torch could still get on the simulated card: all that is not outside torch and not in use."""
    recorder = session.fake_recorder if session is not None else None
    total = recorder.device().total_bytes if recorder is not None else None
    if session is None or recorder is None or total is None:
        return _UNKNOWN
    return max(0, total - (session.non_torch or 0) - recorder.allocated)


def _cuda(device: torch.device) -> str:
    return "cuda"


def _rounds_repeated(session: FakeSession) -> list[Change]:
    """An MLP's tiles and the head's chunks, which are alike but for the last."""
    from memprof.grpo.loss import fused_loss
    from memprof.grpo.rows import parts_of
    from memprof.grpo.techniques import tiled_mlp

    def parts(total: int, size: int) -> Iterator[slice]:
        return alike_rounds(session.fake_recorder, list(parts_of(total, size)))

    return [(tiled_mlp, "parts_of", parts), (fused_loss, "parts_of", parts)]


def _passes_counted(session: FakeSession) -> Change:
    """The reference's weights are the host's; what passes over the device is counted."""
    from memprof.grpo.reference import HostReference

    passes_over = HostReference._here

    @contextlib.contextmanager
    def here(self: Any, tensors: Any) -> Iterator[None]:
        tensors = list(tensors)
        with passes_over(self, tensors):
            for tensor in tensors:
                session.book.claim(tensor, Category.REFERENCE_MODEL, "streamed", None)
            yield

    return (HostReference, "_here", here)

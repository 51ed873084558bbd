"""Build a model as transformers loads a checkpoint onto the device: room for all weights first, then each in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memprof.allocator.model import CachingAllocator
from memprof.compat.versions import installed, release
from memprof.simulate.fake_cuda.nf4 import Linear4bit, Nf4, quantize
from memprof.simulate.recorder.session import FakeSession
from memprof.simulate.trainer.models import build_model

_GIB = 1024**3
# Releases of transformers whose threads load weights while others are quantised; how many is a matter of time.
_AHEAD = ((5,), (5, 4))


def load_model(config: Any, dtype: str, session: FakeSession, nf4: Nf4 | None = None) -> Any:
    """Build a model of fake tensors in the order, and with the blocks, of ``from_pretrained(device_map="auto")``.

    TRL loads a policy that is given by name so, every 4-bit policy and every reference model. The weights then lie side
    by side in one segment; weights that are moved one by one leave a rest in many segments. transformers' threads load
    in turns: the order here is the sorted one, which a model that is quantised on the way is loaded in.

    Raises:
        InputError: as :func:`memprof.simulate.trainer.models.build_model`.
    """
    if nf4 is not None and (note := ahead_note(installed("transformers") or "")) is not None:
        session.notes.append(note)
    return build_model(config, dtype, nf4=nf4, before=lambda model: _in_order(model, session))


def ahead_note(transformers: str) -> str | None:
    """Say of a release of transformers that it reserves more than is simulated while it loads 4-bit weights."""
    if not _AHEAD[0] <= release(transformers) < _AHEAD[1]:
        return None
    return (
        f"transformers {transformers} loads weights ahead of quantising them, as many as its threads find time for: "
        "reserved memory is higher than simulated. Use transformers 5.4, or set HF_DEACTIVATE_ASYNC_LOAD=1."
    )


def _in_order(model: Any, session: FakeSession) -> Iterator[Any]:
    """Take and give back what transformers asks for first; yield the tensors in the order of loading."""
    recorder = session.fake_recorder
    heap = recorder.allocator
    packed = {id(m.weight): m for m in model.modules() if isinstance(m, Linear4bit)}
    if isinstance(heap, CachingAllocator):
        recorder.blocks.scratch([8])  # accelerate touches the device before it asks how much is free
        recorder.blocks.scratch([warm_up_bytes(sum(p.nbytes for p in model.parameters()), heap)])
    table: list[Any] = []
    for _, parameter in sorted(model.named_parameters(), key=lambda item: _natural(item[0])):
        layer = packed.get(id(parameter))
        if layer is None:
            yield parameter
        else:
            yield from quantize(layer, table)
    model.memprof_table = table  # bitsandbytes keeps it for good


def warm_up_bytes(weights: int, heap: CachingAllocator) -> int:
    """Return the bytes of the block that transformers takes before it loads ``weights`` bytes; 0: it takes none."""
    unused = heap.reserved - heap.allocated
    if weights - unused > unused:
        wanted = weights - unused
    elif weights - unused > 1.5 * _GIB:
        free = None if heap.capacity is None else heap.capacity - heap.reserved
        wanted = 0 if free is not None and unused + 1 > free else unused + 1
    else:
        wanted = 0
    if heap.capacity is not None:
        wanted = min(wanted, int(heap.capacity - 1.2 * _GIB))
    return max(wanted // 2 * 2, 0)


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Sort layers by their number."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]

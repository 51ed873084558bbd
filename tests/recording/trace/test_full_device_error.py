"""A capacity: the tensor trace refuses what a device of that size would refuse."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.utils import find_executable_batch_size
from torch.utils.checkpoint import checkpoint

from memprof import record
from memprof.errors import UsageError
from memprof.recording.cuda.history import CudaHistory
from memprof.recording.trace.tensor_trace import TensorTrace
from memprof.snapshot import load_snapshot
from tests.recording.fake_cuda import Allocator


@pytest.fixture
def small() -> Iterator[TensorTrace]:
    gc.collect()  # what earlier tests left must not die in here
    recorder = TensorTrace(torch.device("cpu"), capacity=0)
    recorder.start()
    # A megabyte beside whatever this process holds already.
    recorder._capacity = recorder._allocated + 2**20
    yield recorder
    recorder.stop()


def test_a_capacity_is_enforced_to_the_byte_and_what_was_refused_is_gone(small: TensorTrace) -> None:
    kept = torch.empty(2**19, dtype=torch.uint8)
    told: list[int] = []
    small.on_oom = lambda: told.append(small._allocated)
    before = small._allocated
    with pytest.raises(torch.OutOfMemoryError, match=r"CPU out of memory\. Tried to allocate 512\.00 KiB") as caught:
        torch.empty(2**19 + 1, dtype=torch.uint8)
    found = small.oom()
    assert found is not None
    assert (found.requested_bytes, found.device_free_bytes) == (2**19 + 1, 2**19)
    assert found.stack[0].startswith(__file__)
    assert told == [before] == [small._allocated]
    frames = [frame for frame, _ in traceback.walk_tb(caught.tb)]
    held = [v for f in frames for v in f.f_locals.values() if isinstance(v, torch.Tensor) and v is not kept]
    assert held == []
    fits = torch.empty(2**19, dtype=torch.uint8)
    assert small._allocated == before + fits.nbytes
    with pytest.raises(torch.OutOfMemoryError):
        kept.untyped_storage().resize_(2**19 + 1)
    assert kept.nbytes == 2**19


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_capacity_holds_inside_backward_and_under_checkpointing(small: TensorTrace, reentrant: bool | None) -> None:
    layer = torch.nn.Linear(64, 64)
    x = torch.ones(64, 64, requires_grad=True)
    where: list[str] = []

    def block(value: torch.Tensor) -> torch.Tensor:
        if torch._C._current_graph_task_id() != -1:
            where.append("recomputed")
            torch.empty(2**21, dtype=torch.uint8)
        return layer(value).relu()

    def grow(_grad: torch.Tensor) -> None:
        where.append("backward")
        torch.empty(2**21, dtype=torch.uint8)

    if reentrant is None:
        x.register_hook(grow)
        loss = block(x).sum()
    else:
        loss = checkpoint(block, x, use_reentrant=reentrant).sum()
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    assert where == ["backward" if reentrant is None else "recomputed"]
    assert small.guard.failure is None


def test_a_batch_halved_after_an_error_fits(small: TensorTrace) -> None:
    """What accelerate's ``find_executable_batch_size`` does with such an error."""
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=8)
    def step(batch: int) -> int:
        tried.append(batch)
        return int(torch.zeros(batch, 2**18, dtype=torch.uint8).shape[0])

    assert step() in tried
    assert tried[0] == 8
    assert tried[-1] <= 4


def test_the_recording_tells_of_it(tmp_path: Path) -> None:
    big = torch.zeros(2**20, dtype=torch.uint8)
    with pytest.raises(torch.OutOfMemoryError), record(tmp_path / "a.pickle", capacity="1GiB"):
        torch.empty(2**30, dtype=torch.uint8)
    run = load_snapshot(tmp_path / "a.pickle").run
    assert run.oom is not None
    assert run.oom.requested_bytes == 2**30
    assert run.oom.device_free_bytes is not None
    assert 0 <= run.oom.device_free_bytes <= 2**30 - big.nbytes
    assert run.device is not None
    assert run.device.total_bytes == 2**30


@pytest.mark.parametrize("capacity", ["a lot", 0, "0GB"])
def test_a_capacity_that_is_none(tmp_path: Path, capacity: str | int) -> None:
    with pytest.raises(UsageError, match=r"GPU"), record(tmp_path / "a.pickle", capacity=capacity):
        pass


def test_on_cuda_torchs_own_limit_is_set_and_lifted() -> None:
    allocator = Allocator()
    history = CudaHistory(torch.device("cuda", 0), capacity=2**30, backend=allocator)
    history.start()
    history.stop()
    assert [c for c in allocator.calls if c.startswith("limit")] == ["limit 1073741824", "limit as before"]

"""Layer inputs in host memory: the pool's parts, what is sent away, the order of copies on a device's streams."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from memprof.grpo.techniques import offload  # noqa: E402
from memprof.grpo.techniques.checkpointing import apply_checkpointing  # noqa: E402
from memprof.grpo.techniques.offload import HostPool, Offloader  # noqa: E402
from tests.grpo.tiny_models import body_of, build, gradients, tokens  # noqa: E402

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9000), st.booleans()), max_size=40))
def test_parts_of_the_pool_never_overlap_and_all_come_back(requests: list[tuple[int, bool]]) -> None:
    pool = HostPool(pin=False)
    alive: list[tuple[Any, Any, int]] = []
    for mark, (size, drop) in enumerate(requests):
        part, token = pool.take(size)
        assert part.numel() == size
        part.fill_(mark % 251)
        alive.append((part, token, mark))
        if drop:
            _, token, _ = alive.pop(len(alive) // 2)
            pool.give(token)
        for other, _, written in alive:
            assert (other == written % 251).all()
    assert pool.used_bytes >= sum(part.numel() for part, _, _ in alive)
    for _, token, _ in alive:
        pool.give(token)
    assert pool.used_bytes == 0
    held = pool.held_bytes
    for size, _ in requests[:1]:
        pool.take(size)
    assert pool.held_bytes == held


def test_slabs_are_powers_of_two_and_hold_many() -> None:
    """160 MiB pinned by itself holds 256; in slabs of 1 GiB six fit one. (On the meta device: nothing is touched.)"""
    pool = HostPool(pin=False)
    with torch.device("meta"):
        for _ in range(12):
            pool.take(160 << 20)
    assert pool.held_bytes == 2 << 30


def forward(model: Any) -> Any:
    return body_of(model)(input_ids=tokens(17)[None], use_cache=False).last_hidden_state.sum()


def test_all_inputs_but_the_last_are_sent_away_and_nothing_else() -> None:
    model = build(num_hidden_layers=4)
    offloader = apply_checkpointing(model, "offloaded").offloader
    assert offloader is not None
    loss = forward(model)
    boundary = 17 * 32 * 4
    assert offloader.pool.used_bytes == 3 * -(-boundary // 512) * 512
    loss.backward()
    del loss
    gc.collect()
    assert offloader.pool.used_bytes == 0
    held = offloader.pool.held_bytes
    forward(model).backward()
    assert offloader.pool.held_bytes == held  # the next step uses the same memory


def test_a_graph_that_is_thrown_away_gives_its_memory_back() -> None:
    model = build(num_hidden_layers=3)
    offloader = apply_checkpointing(model, "offloaded").offloader
    loss = forward(model)
    assert offloader.pool.used_bytes > 0
    del loss
    gc.collect()
    assert offloader.pool.used_bytes == 0


class _SaveInputs(torch.autograd.Function):
    """How checkpoints of torch 2.1 to 2.11 save their inputs: in the graph of an empty tensor of the host's."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> Any:
        ctx.save_for_backward(*tensors)
        return torch.empty((0,))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing comes back through it")


def test_the_empty_tensor_that_older_checkpoints_save_is_not_sent_away() -> None:
    offloader = Offloader(CPU)
    dummy, given = torch.empty((0,), requires_grad=True), torch.ones(7, 3)
    with offloader.saving(0):
        saver = _SaveInputs.apply(dummy, given)
    assert offloader.pool.used_bytes == 512, "the input and nothing else"
    empty, back = saver.grad_fn.saved_tensors
    assert empty.shape == (0,)
    assert (back == 1).all()


def test_tensors_of_another_device_stay_where_they_are() -> None:
    """On a GPU some inputs may be the host's: they need no copy and have no stream."""
    offloader = Offloader(torch.device("meta"))
    with offloader.saving(0):
        saver = _SaveInputs.apply(torch.empty((0,), requires_grad=True), torch.ones(7, 3))
    assert offloader.pool.used_bytes == 0
    assert (saver.grad_fn.saved_tensors[1] == 1).all()


def test_backward_may_run_twice() -> None:
    model = build(num_hidden_layers=3)
    apply_checkpointing(model, "offloaded")
    loss = forward(model)
    loss.backward(retain_graph=True)
    once = gradients(model)
    loss.backward()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, once[name])


class Device:
    """A stand-in for a GPU's streams: work runs when the host asks for it or when another stream waits for it.

    Each stream is a list of work not done yet; a copy on the side stream happens as late as it can, so a wait that was
    forgotten shows as a wrong value.
    """

    def __init__(self) -> None:
        self.current = self.main = Stream(self)
        self.log: list[str] = []


class Stream:
    def __init__(self, owner: Device) -> None:
        self.owner, self.device, self.pending = owner, CPU, []

    def record_event(self) -> Any:
        return (self, len(self.pending))

    def wait_event(self, event: Any) -> None:
        stream, count = event
        done, stream.pending[:count] = stream.pending[:count], [None] * count
        for work in done:
            if work is not None:
                work()

    def wait_stream(self, other: Stream) -> None:
        """The main stream of the stand-in runs at once: there is nothing to wait for."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()

    @contextmanager
    def on(stream: Stream) -> Any:
        device.current, before = stream, device.current
        yield
        device.current = before

    copy = torch.Tensor.copy_

    def lazy(self: Any, source: Any, non_blocking: bool = False) -> Any:
        if device.current is device.main:
            return copy(self, source)
        device.current.pending.append(lambda: copy(self, source))
        device.log.append("out" if source.requires_grad or device.current.out else "in")
        return self

    monkeypatch.setattr(Stream, "out", False, raising=False)
    monkeypatch.setattr(offload.torch.cuda, "stream", on)
    monkeypatch.setattr(offload.torch.cuda, "current_stream", lambda _=None: device.main)
    monkeypatch.setattr(torch.Tensor, "copy_", lazy)
    return device


def test_every_copy_is_waited_for_where_streams_run_late(device: Device) -> None:
    """Gradients are right although the side stream does nothing before it is waited for."""
    model = build(num_hidden_layers=5)
    forward(model).backward()
    true = gradients(model)
    offloader = apply_checkpointing(model, "offloaded").offloader
    assert isinstance(offloader, Offloader)
    offloader.streams, offloader._side = True, Stream(device)
    forward(model).backward()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, true[name])
    assert len(device.log) == 8  # four inputs out, four back
    assert len(offloader._leaving) <= 2


def test_what_was_fetched_ahead_is_waited_for_when_its_graph_is_thrown_away(device: Device) -> None:
    """Backward stops half way; the memory of the copy on its way in must not be used before it has landed."""
    model = build(num_hidden_layers=5)
    offloader = apply_checkpointing(model, "offloaded").offloader
    assert isinstance(offloader, Offloader)
    offloader.streams, offloader._side = True, Stream(device)
    loss = forward(model)
    third = list(body_of(model).layers[3].parameters())
    torch.autograd.grad(loss, third)  # fetches the fourth layer's input, and the third's ahead
    late = [work for work in offloader._side.pending if work is not None]
    del loss
    gc.collect()
    assert late
    assert not [work for work in offloader._side.pending if work is not None]

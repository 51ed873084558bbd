"""Layer inputs in host memory: the pool's parts, what is sent away, the order of copies on a device's streams."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from memprof.grpo.techniques import offload  # noqa: E402
from memprof.grpo.techniques.checkpointing import apply_checkpointing  # noqa: E402
from memprof.grpo.techniques.offload import HostPool, Offloader  # noqa: E402
from tests.grpo.techniques.streams import Device, Stream  # noqa: E402
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


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(offload.torch.cuda, "stream", device.on)
    monkeypatch.setattr(offload.torch.cuda, "current_stream", lambda _=None: device.main)
    monkeypatch.setattr(offload, "host_memory", device.host_memory)
    return device


def offloading(model: Any, device: Device) -> Offloader:
    """Take a model's offloader to the stand-in's streams."""
    offloader = apply_checkpointing(model, "offloaded").offloader
    assert isinstance(offloader, Offloader)
    offloader.streams, offloader._side = True, device.side
    return offloader


def a_step(model: Any) -> None:
    forward(model).backward()
    gc.collect()


def a_step_thrown_away_half_way(model: Any) -> None:
    """Backward stops after the fourth layer, whose input was fetched with the third's ahead."""
    loss = forward(model)
    torch.autograd.grad(loss, list(body_of(model).layers[3].parameters()))
    del loss
    gc.collect()


def test_copies_and_computation_are_ordered(device: Device) -> None:
    """In two steps, whatever a device runs late: no copy before what it copies, no use before its copy, no reuse."""
    model = build(num_hidden_layers=5)
    a_step(model)
    true = gradients(model)
    offloader = offloading(model, device)
    with device:
        a_step(model)
        assert device.copies["side"] == 8  # four inputs out, four back
        assert len(offloader._leaving) <= 2
        for name, grad in gradients(model).items():
            torch.testing.assert_close(grad, true[name])
        a_step_thrown_away_half_way(model)
        a_step(model)
    assert device.races == []


@pytest.mark.parametrize(
    ("left_out", "step", "found"),
    [
        (("wait_stream", "_park"), a_step, "copy_ on side does not wait for"),
        (("wait_stream", "_start"), a_step, "copy_ on side does not wait for empty on main"),
        (("wait_event", "_fetch"), a_step, "on main does not wait for copy_ on side"),
        (("wait_event", "_let_go"), a_step, "freed on main while copy_ on side may use it"),
        (("wait_event", "__del__"), a_step_thrown_away_half_way, "freed on main while copy_ on side may use it"),
    ],
)
def test_no_wait_can_be_left_out(
    device: Device, monkeypatch: pytest.MonkeyPatch, left_out: tuple[str, str], step: Any, found: str
) -> None:
    """Each wait of the offloader, by who asks for it: without it the stand-in finds an order that is wrong."""
    kind, asking = left_out
    wait = getattr(Stream, kind)

    def unless_left_out(self: Stream, other: Any) -> None:
        frame = sys._getframe(1)
        if frame.f_code.co_name == "_on_side":
            frame = frame.f_back
        if frame.f_code.co_name != asking:
            wait(self, other)

    monkeypatch.setattr(Stream, kind, unless_left_out)
    model = build(num_hidden_layers=5)
    offloading(model, device)
    with device:
        step(model)
        step(model)
    assert any(found in race for race in device.races), device.races

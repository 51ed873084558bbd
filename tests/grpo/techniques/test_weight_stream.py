"""Weights that are copied ahead arrive in order, and no buffer or memory is used before it is free."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from memprof.grpo.techniques import weight_stream  # noqa: E402
from memprof.grpo.techniques.weight_stream import WeightStream  # noqa: E402
from tests.grpo.techniques.streams import Device, Event, Stream  # noqa: E402


def groups(count: int = 6) -> list[list[Any]]:
    torch.manual_seed(0)
    return [[torch.randn(8, 4), torch.randn(3), torch.randn(())] for _ in range(count)]


def total(stream: WeightStream, weights: Any, stop: int = 99) -> list[Any]:
    """Something computed with each group, on the compute stream."""
    found = []
    for number, copies in enumerate(stream.over(weights)):
        found.append(sum((copy * 2).sum() for copy in copies))
        del copies
        gc.collect(1)
        if number == stop:
            break
    return found


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "stream", device.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: device.main)
    monkeypatch.setattr(weight_stream.offload, "host_memory", device.host_memory)
    return device


def streamed(device: Device, weights: Any) -> WeightStream:
    for group in weights:
        device.keep_on_host(group)
    stream = WeightStream(torch.device("cpu"))
    stream.streams, stream._side = True, device.side
    return stream


def test_without_streams_they_are_copies() -> None:
    weights = groups()
    stream = WeightStream(torch.device("cpu"))
    for group, copies in zip(weights, stream.over(weights), strict=True):
        assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in zip(group, copies, strict=True))
    assert stream._buffers == [None, None]


def test_copies_and_computation_are_ordered(device: Device) -> None:
    weights = groups()
    meant = [sum((weight * 2).sum() for weight in group) for group in weights]
    stream = streamed(device, weights)
    with device:
        for stop in (99, 2, 99):  # a pass that is given up half way, and one after it
            found = total(stream, weights, stop)
            assert torch.equal(torch.stack(found), torch.stack(meant[: len(found)]))
    assert device.copies["side"] >= 3 * 6 * 2
    assert device.races == []


@pytest.mark.parametrize(
    ("kind", "asking", "found"),
    [
        ("wait_event", "_send", "copy_ on side does not wait for"),
        ("wait_event", "_wait", "on main does not wait for copy_ on side"),
        ("synchronize", "_staged", "copy_ on host does not wait for copy_ on side"),
    ],
)
def test_no_wait_can_be_left_out(
    device: Device, monkeypatch: pytest.MonkeyPatch, kind: str, asking: str, found: str
) -> None:
    owner: Any = Stream if kind == "wait_event" else Event
    wait = getattr(owner, kind)

    def unless_left_out(self: Any, *given: Any) -> None:
        if sys._getframe(1).f_code.co_name != asking:
            wait(self, *given)

    monkeypatch.setattr(owner, kind, unless_left_out)
    weights = groups()
    stream = streamed(device, weights)
    with device:
        total(stream, weights)
    assert any(found in race for race in device.races), device.races

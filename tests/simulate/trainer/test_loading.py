"""A model that is loaded by name lies in memory as transformers puts it there."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from memprof.allocator.model import CachingAllocator
from memprof.errors import UsageError
from memprof.simulate.trainer.loading import ahead_note, warm_up_bytes

_MIB = 1024**2


@pytest.mark.parametrize(
    ("freed", "weights", "expected"),
    [
        (0, 988_065_536, 988_065_536),
        (8, 988_065_536, 985_968_384),  # as transformers 5.23 asked for on an H100: a segment was there
        (900 * _MIB, 1000 * _MIB, 0),  # nearly all of it is there
        (4000 * _MIB, 6000 * _MIB, 4000 * _MIB),  # one byte more than is unused, in pairs
    ],
)
def test_room_is_taken_for_what_is_not_there_already(freed: int, weights: int, expected: int) -> None:
    heap = CachingAllocator()
    if freed:
        address, _ = heap.malloc(freed)
        heap.free(address)
    assert warm_up_bytes(weights, heap) == expected


def test_a_full_card_is_left_some_room() -> None:
    assert warm_up_bytes(10 * 1024**3, CachingAllocator(capacity=10 * 1024**3)) == 2 * int(8.8 * 1024**3 // 2)


def test_weights_loaded_by_name_lie_in_one_segment(settings_for: Callable[..., Any]) -> None:
    from memprof.simulate.run import simulate_settings

    settings = settings_for(model="Qwen/Qwen2.5-0.5B-Instruct", generation="none", dtype="bfloat16")
    weights = 988_065_536
    moved, named = (simulate_settings(settings, stacks=False, by_name=flag) for flag in (False, True))
    alone, by_name = moved["device_traces"][0], named["device_traces"][0]
    assert next(e["size"] for e in alone if e["action"] == "segment_alloc") < weights // 2
    first = next(e for e in by_name if e["action"] == "segment_alloc" and e["size"] > weights // 2)
    inside = range(first["addr"], first["addr"] + first["size"])
    large = [e for e in by_name if e["action"] == "alloc" and e["addr"] in inside][1 : 1 + 24 * 5 + 1]
    assert [e["size"] for e in large[:4]] == [151_936 * 896 * 2, 4864 * 896 * 2, 4864 * 896 * 2, 4864 * 896 * 2]
    assert all(one["addr"] + one["size"] == other["addr"] for one, other in pairwise(large))


def test_loading_by_name_is_refused_where_it_is_not_known(settings_for: Callable[..., Any]) -> None:
    from memprof.simulate.run import simulate_settings

    with pytest.raises(UsageError, match="one GPU"):
        simulate_settings(settings_for(gpus=2), stacks=False, by_name=True)


@pytest.mark.parametrize(("version", "ahead"), [("4.57.1", False), ("5.0.0", True), ("5.3.0", True), ("5.4.0", False)])
def test_transformers_that_loads_ahead_of_quantising_is_named(version: str, ahead: bool) -> None:
    """Of 5.3.0 the wheel has the threads for every model, of 5.4.0 for those that are not quantised on the way."""
    assert (ahead_note(version) is not None) == ahead
    if ahead:
        assert f"transformers {version}" in str(ahead_note(version))

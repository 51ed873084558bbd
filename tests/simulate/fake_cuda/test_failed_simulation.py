"""A simulation that failed changes nothing of the next one in the same process."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.trl]

_Simulate = Callable[[], Any]


class _Fault(Exception):
    pass


@pytest.fixture
def simulate(settings_for: Any) -> _Simulate:
    """Simulate a run with autocast, an adapter, recomputation, a reference and generation."""
    from memprof.config.gpus import gpu_of
    from memprof.simulate.run import simulate_settings

    settings = settings_for(
        dtype="float32",
        beta=0.1,
        lora_r=8,
        per_device_train_batch_size=2,
        num_generations=2,
        gradient_checkpointing=True,
    )
    return lambda: simulate_settings(settings, gpu=gpu_of("24GB"))


def _told(raw: Any) -> Any:
    """Return what a snapshot tells. Blocks given back in a row are sorted, and stacks begin below this file."""
    events: list[Any] = []
    freed: list[Any] = []
    for event in raw["device_traces"][0]:
        here = (event["action"], event.get("addr"), event["size"], event["stream"])
        if event["action"].startswith("free_"):
            freed.append(here)
            continue
        stack = [(f["filename"], f["line"]) for f in event["frames"] if "site-packages" in f["filename"]]
        events += [*sorted(freed), (*here, event["user_metadata"], stack)]
        freed = []
    facts = {name: value for name, value in raw["memprof"].items() if name != "created"}
    held = [(block["address"], block["size"], block["state"]) for s in raw["segments"] for block in s["blocks"]]
    return held, events, sorted(freed), facts


def _fails(simulate: _Simulate, place: Any, name: str, count: int) -> None:
    """Simulate with an error at the call so many of a function and at all after it: also without shortcuts it fails."""
    calls = iter(range(count))
    original = getattr(place, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            raise _Fault
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(place, name, failing)
        with pytest.raises(_Fault):
            simulate()


def _count(simulate: _Simulate, place: Any, name: str) -> int:
    calls: list[None] = []
    original = getattr(place, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(place, name, counted)
        simulate()
    return len(calls)


def test_a_failure_leaves_the_next_simulation_as_it_is(simulate: _Simulate) -> None:
    import torch

    from memprof.simulate.recorder.recorder import FakeRecorder

    expected = _told(simulate())
    for place, name, count in (
        (FakeRecorder, "see", 2500),  # in training
        (torch, "clear_autocast_cache", 0),  # on the way out of autocast, whose state then stays
    ):
        _fails(simulate, place, name, count)
    assert _told(simulate()) == expected


@pytest.mark.heavy
def test_a_failure_anywhere_leaves_the_next_simulation_as_it_is(simulate: _Simulate) -> None:
    from memprof.simulate.recorder.recorder import FakeRecorder

    expected = _told(simulate())
    calls = _count(simulate, FakeRecorder, "see")
    chosen = sorted(random.Random(24).sample(range(calls), 50))
    for number, count in enumerate(chosen):
        _fails(simulate, FakeRecorder, "see", count)
        if number % 5 == 4:
            assert _told(simulate()) == expected, chosen[number - 4 : number + 1]


@pytest.mark.parametrize(
    ("last", "package"),
    [("torch.nn", "transformers"), ("memprof.simulate.fake_cuda.fakes", "transformers"), ("memprof.grpo.loss", None)],
)
def test_an_error_below_a_library_is_told_as_its_own(last: str, package: str | None) -> None:
    """Also where the fake world passes a library's mistake on; but not where memprof's own code is executed."""
    from memprof.simulate.run import _failing_package

    call: Callable[[], None] = lambda: None  # noqa: E731
    for name in (last, "transformers.models.llama", "memprof.simulate.run"):
        frame: dict[str, Any] = {"__name__": name, "call": call}
        exec("def run():\n    call()\n    raise AttributeError" if name == last else "def run():\n    call()", frame)
        call = frame["run"]
    with pytest.raises(AttributeError) as error:
        call()
    assert _failing_package(error.value) == package

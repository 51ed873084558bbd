"""An operation answered from the result it had before makes what torch's fake mode would make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402

from memprof.simulate.shortcuts.results import KnownResults, known_results  # noqa: E402

_ATEN = torch.ops.aten
_Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], tuple[Any, Any]]


@pytest.fixture
def known() -> KnownResults:
    found = known_results()
    assert found is not None  # this torch's is known
    return found


def _dispatched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, None]:
    return func(*args, **kwargs), None


def _arguments() -> dict[str, Any]:
    return {
        "wide": torch.zeros(4, 6), "other": torch.zeros(4, 6), "long": torch.zeros(4, 6, dtype=torch.int64),
        "grad": torch.zeros(4, 6, requires_grad=True), "flat": torch.zeros(24), "half": torch.zeros(4, 6).bfloat16(),
        "part": torch.zeros(4, 8)[:, 1:7],
    }  # fmt: skip


def _operations(t: dict[str, Any]) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Yield operations that differ in one thing only: in what they compute, make of it, or in whose memory."""
    wide, other = t["wide"], t["other"]
    for one in (wide, t["long"], t["grad"].detach(), t["half"], t["part"]):
        for number in (2, 2.0, True):
            yield _ATEN.mul.Scalar, (one, number), {}
        yield _ATEN.add.Tensor, (one, other), {}
        yield _ATEN.t.default, (one,), {}
        yield _ATEN.sum.dim_IntList, (one, [0]), {}
        yield _ATEN.sum.dim_IntList, (one, [1], True), {}
        yield _ATEN._to_copy.default, (one,), {"dtype": torch.float64}
        yield _ATEN.clone.default, (one,), {"memory_format": torch.contiguous_format}
        yield _ATEN.split.Tensor, (one, 2), {}
        yield _ATEN.unbind.int, (one, 1), {}
        yield _ATEN.add_.Tensor, (one, 1), {}
        yield _ATEN.slice.Tensor, (one, 1, 2, 5), {}
        yield _ATEN.max.dim, (one, 1), {}
    yield _ATEN._unsafe_view.default, (wide, [6, 4]), {}
    yield _ATEN._unsafe_view.default, (t["flat"], [6, 4]), {}
    yield _ATEN.cat.default, ([wide, other],), {}
    yield _ATEN.cat.default, ([wide, wide], 1), {}
    yield _ATEN.mm.default, (wide, _ATEN.t.default(other)), {}
    yield _ATEN._foreach_add.Scalar, ([wide, other], 1), {}
    yield _ATEN._foreach_add_.Scalar, ([wide, other], 1), {}
    yield _ATEN.mul.out, (wide, other), {"out": t["part"]}
    yield _ATEN.zeros_like.default, (wide,), {"dtype": torch.bool}
    yield _ATEN.empty_like.default, (_ATEN.t.default(wide),), {}
    yield getattr(_ATEN.random_, "from"), (t["long"], 0, 5), {"generator": torch.Generator()}
    for made in (_ATEN.empty.memory_format, _ATEN.zeros.default):
        yield made, ([4, 6],), {"device": torch.device("cpu")}
        yield made, ([4, 6],), {"device": torch.device("meta"), "dtype": torch.bfloat16}
    yield _ATEN.arange.default, (6,), {"device": torch.device("cpu")}


def _facts(out: Any, t: dict[str, Any]) -> Any:
    """Return all that can be told of a result, and in whose memory it lies."""
    if isinstance(out, (list, tuple)):
        return type(out), [_facts(part, t) for part in out]
    if not isinstance(out, torch.Tensor):
        return out
    storage = out.untyped_storage()
    whose = [name for name, one in t.items() if one.untyped_storage()._cdata == storage._cdata]
    same = [name for name, one in t.items() if one is out]
    keys, attributes = torch._C._dispatch_key_set(out), sorted(set(vars(out)) - {"_memprof_scalar"})
    return (
        type(out), tuple(out.shape), out.stride(), out.dtype, out.device, out.storage_offset(), out.requires_grad,
        storage.nbytes(), str(keys), attributes, whose, same,
    )  # fmt: skip


def _told(run: _Run, times: int) -> list[list[Any]]:
    with FakeTensorMode(), torch.no_grad():
        rounds = []
        for _ in range(times):
            t = _arguments()
            rounds.append([_facts(run(*operation)[0], t) for operation in _operations(t)])
        return rounds


def test_a_known_result_is_what_torch_makes(known: KnownResults) -> None:
    (expected,) = _told(_dispatched, 1)
    first, second, third = _told(known.run, 3)
    assert first == second == third == expected


def test_a_known_operation_is_not_executed_again(known: KnownResults) -> None:
    with FakeTensorMode() as mode, torch.no_grad():
        one = torch.zeros(3, 5)
        _, number = known.run(_ATEN.mul.Tensor, (one, one), {})
        _, empty = known.run(_ATEN.empty.memory_format, ([3, 5],), {"device": torch.device("cpu")})
        mode.dispatch = None  # whatever asks torch's fake mode now, fails
        made, alike = known.run(_ATEN.mul.Tensor, (one, one), {})
        assert type(made) is FakeTensor
        assert alike == number
        assert alike is not None
        assert made.untyped_storage()._cdata != one.untyped_storage()._cdata
        assert known.run(_ATEN.empty.memory_format, ([3, 5],), {"device": torch.device("cpu")})[1] == empty is not None


def test_what_hangs_on_values_is_always_asked_for(known: KnownResults) -> None:
    from torch._subclasses.fake_tensor import DynamicOutputShapeException

    with FakeTensorMode():
        for _ in range(2):
            with pytest.raises(DynamicOutputShapeException):
                known.run(_ATEN.nonzero.default, (torch.zeros(3),), {})


def test_an_argument_that_changes_is_no_known_result(known: KnownResults) -> None:
    with FakeTensorMode(), torch.no_grad():
        for _ in range(2):
            source, target = torch.zeros(6), torch.zeros(0)
            known.run(_ATEN.mul.out, (source, source), {"out": target})
            assert target.shape == (6,)


def test_a_simulation_is_the_same(settings_for: Callable[..., Any]) -> None:
    from memprof.config.gpus import find_gpu
    from memprof.simulate.run import simulate_settings
    from memprof.simulate.shortcut_switches import without
    settings = settings_for(lora_r=4, beta=0.1, gradient_accumulation_steps=2)
    one = simulate_settings(settings, gpu=find_gpu("H100"), stacks=False)
    with without("results"):
        other = simulate_settings(settings, gpu=find_gpu("H100"), stacks=False)
    assert len(one["device_traces"][0]) == len(other["device_traces"][0]) > 1000
    assert _taken(one) == _taken(other)
    assert one["memprof"]["estimated_time"] == other["memprof"]["estimated_time"] is not None


def _taken(raw: dict[str, Any]) -> list[Any]:
    """List what was taken; in which order a set of tensors is let go differs from one simulation to the next."""
    events = [event for event in raw["device_traces"][0] if event["action"] == "alloc"]
    return [(event["size"], event["user_metadata"]) for event in events]


def test_another_torch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_DisableTorchDispatch")
    assert known_results() is None

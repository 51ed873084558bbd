"""A program's own classes: what they raise ends no recording, and none of their code runs because of one."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from memprof import phase, record
from memprof.recording.session import Session
from memprof.recording.trace.tensor_trace import TensorTrace


class Broken(Exception):
    """Has no text either."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    __str__ = __repr__


def broken(*_: Any, **__: Any) -> Any:
    raise Broken


class OddTensor(torch.Tensor):
    grad = is_leaf = shape = dtype = device = layout = is_meta = property(broken)  # type: ignore[assignment]
    untyped_storage = __len__ = __bool__ = __repr__ = broken  # type: ignore[assignment]


class Counting(torch.nn.Parameter):
    calls: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_attributes_of_a_subclass_are_not_read(tmp_path: Path) -> None:
    before = torch.ones(2**18).as_subclass(OddTensor)
    with record(tmp_path / "a.pickle", kind="trace") as session:
        after = torch.add(before, 1)
        with phase("forward"):
            torch.ones(3)
    raw = session.to_raw()
    assert session.guard.failure is None
    assert raw["memprof"]["notes"] == []
    assert 2**20 in [event["size"] for event in raw["device_traces"][0]]
    assert type(after) is OddTensor


def test_a_torch_function_is_called_as_without_a_recording(tmp_path: Path) -> None:
    def step() -> list[str]:
        weight, given = Counting(torch.ones(4, 4)), torch.ones(2, 4, requires_grad=True)
        Counting.calls = []
        torch.mm(given, weight).as_subclass(torch.Tensor).sum().backward()
        return Counting.calls

    plain = step()
    with record(tmp_path / "a.pickle", kind="trace"):
        assert step() == plain == ["mm"]


_METHODS = ("named_parameters", "parameters", "named_modules", "named_buffers", "__len__", "__bool__")
MODELS = {name: type(name, (torch.nn.Linear,), {name: broken}) for name in _METHODS}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_read_is_noted(name: str, tmp_path: Path) -> None:
    model = MODELS[name](4, 4)
    with record(tmp_path / "a.pickle", kind="trace", model=model) as session, phase("forward"):
        model(torch.ones(2, 4))
    notes = session.to_raw()["memprof"]["notes"]
    assert session.guard.failure is None
    is_read = name in ("parameters", "__len__", "__bool__")
    assert is_read != any("model could not be read completely (Broken)" in note for note in notes)


def test_what_a_failure_had_on_its_stack_is_not_kept() -> None:
    class Fails(TensorTrace):
        def set_tags(self, _: Any) -> None:
            kept = torch.ones(3)
            alive.append(weakref.ref(kept))
            raise Broken

    alive: list[weakref.ref[torch.Tensor]] = []
    session = Session(Fails(torch.device("cpu")))
    session.start()
    with pytest.warns(UserWarning, match="stopped watching .Broken"), phase("forward"):
        pass
    assert isinstance(session.guard.failure, Broken)
    assert [one() for one in alive] == [None]
    assert "cut short by an error inside memprof: Broken" in session.to_raw()["memprof"]["notes"][0]
    gc.collect()


FIRST = """
import os, sys, torch, memprof, warnings
state = lambda: (dict(os.environ), list(warnings.filters), torch.manual_seed, vars(torch)["__getattr__"])
before = state()
with memprof.record(sys.argv[1], kind="trace"), memprof.phase("forward"):
    torch.ones(3)
assert state() == before, {k: v for k, v in os.environ.items() if before[0].get(k) != v}
assert "torch._dynamo" not in sys.modules and "torch._inductor" not in sys.modules
"""


def test_a_process_s_first_recording_does_not_import_torch_s_compiler(tmp_path: Path) -> None:
    """Torch does so when it makes stacks readable, which changes the environment, warnings' filters and functions."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR")}
    done = subprocess.run(
        [sys.executable, "-c", FIRST, str(tmp_path / "a.pickle")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

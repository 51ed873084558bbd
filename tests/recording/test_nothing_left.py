"""However a recording is made and however it ends, the process is as it was before: ways to record × ways to end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from memprof.integrations.callback.options import Options
from torch.utils._python_dispatch import TorchDispatchMode

import memprof
from memprof.compat.optional_packages import THREAD_START
from memprof.instrument.attach import attach
from memprof.instrument.loop import PlainLoop
from memprof.recording.cuda.history import CudaHistory
from memprof.recording.kv_caches import CacheWatch
from memprof.recording.phases import ACTIVE
from memprof.recording.recorder import DeviceInfo
from memprof.recording.session import Session
from memprof.recording.trace.tensor_trace import TensorTrace
from tests.recording.state import Bystander, differences, fingerprint
from tests.recording.test_cuda_history import _Fractions, _Limited

Body = Callable[[Any], None]
Way = Callable[[Path, Any, Any, Body], None]


@contextlib.contextmanager
def by_record(folder: Path, model: Any, optimizer: Any) -> Iterator[Any]:
    with memprof.record(folder / "a.pickle", model=model, optimizer=optimizer, device="cpu") as session:
        yield session


@contextlib.contextmanager
def by_attach(folder: Path, model: Any, optimizer: Any) -> Iterator[Any]:
    attachment = attach(model, optimizer, output_dir=folder, kind="trace", device="cpu")
    try:
        yield attachment._recorder.session
    finally:
        attachment.detach()


@contextlib.contextmanager
def by_session(folder: Path, model: Any, optimizer: Any, recorder: Any = None) -> Iterator[Any]:
    session = Session(recorder or TensorTrace(torch.device("cpu"), capacity=10**9))
    session.add_model(model, "policy")
    try:
        with contextlib.suppress(RuntimeError):  # a start that fails
            session.start()
        yield session
    finally:
        session.stop()
        folder.mkdir(exist_ok=True)
        session.write(folder / "b.pickle")


def by_cuda(folder: Path, model: Any, optimizer: Any) -> contextlib.AbstractContextManager[Any]:
    recorder = CudaHistory(torch.device("cuda", 0), backend=_ALLOCATOR, capacity=6 * 10**9)
    return by_session(folder, model, optimizer, recorder)


@contextlib.contextmanager
def by_cuda_in_a_users_history(folder: Path, model: Any, optimizer: Any) -> Iterator[Any]:
    _ALLOCATOR.record("all", "python", 77, ["free_completed"], True)
    own = dict(_ALLOCATOR.recording or {})
    try:
        with by_cuda(folder, model, optimizer) as session:
            yield session
    finally:
        assert _ALLOCATOR.recording == own
        _ALLOCATOR.stop()


def overlapping(way: Callable[..., contextlib.AbstractContextManager[Any]]) -> Any:
    """Two recordings of which the first ends first."""

    @contextlib.contextmanager
    def both(folder: Path, model: Any, optimizer: Any) -> Iterator[Any]:
        with contextlib.ExitStack() as second, way(folder / "first", model, optimizer) as session:
            second.enter_context(way(folder / "second", model, optimizer))
            yield session

    return both


def inside(way: Callable[[Path, Any, Any], contextlib.AbstractContextManager[Any]]) -> Way:
    def recorded(folder: Path, model: Any, optimizer: Any, body: Body) -> None:
        with way(folder, model, optimizer) as session:
            body(session)

    return recorded


def by_callback(folder: Path, model: Any, optimizer: Any, body: Body) -> None:
    """A trainer with memprof's callback; ``body`` runs in a step's forward."""

    class Training(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(8, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            body(_running())
            return {"loss": self.inner(x).sum()}

    arguments = transformers.TrainingArguments(
        str(folder / "out"), max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    callback = memprof.MemProfCallback(steps=[1], output_dir=folder / "c", table=False, report=False, kind="trace")
    rows = [{"x": torch.ones(8), "labels": torch.ones(1)}] * 4
    trainer = transformers.Trainer(Training(), arguments, train_dataset=rows, callbacks=[callback])
    handlers = list(trainer.callback_handler.callbacks)
    trainer.train()
    assert trainer.callback_handler.callbacks == handlers


def by_run(folder: Path, model: Any, optimizer: Any, body: Body) -> None:
    """What `memprof run` does with a script that has no trainer."""
    loop = PlainLoop(Options(output_dir=folder / "loop", report=False), table=False)
    loop.begin()
    try:
        model(torch.ones(4, 8))
        body(_running())
    finally:
        loop.end()


def _running() -> Any:
    return ACTIVE[-1] if ACTIVE else None


_FRACTION = _Fractions()
_ALLOCATOR = _Limited(_FRACTION)
WAYS: dict[str, Way] = {
    "record": inside(by_record),
    "attach": inside(by_attach),
    "trace session": inside(by_session),
    "CUDA session": inside(by_cuda),
    "CUDA, user's history": inside(by_cuda_in_a_users_history),
    "two traces": inside(overlapping(by_session)),
    "two CUDA sessions": inside(overlapping(by_cuda)),
    "callback": by_callback,
    "memprof run": by_run,
}
ENDS = ("normally", "error", "interrupt", "exit", "memprof fails", "start fails", "stopped twice", "thread fails")


class _Broken(RuntimeError):
    pass


def work(model: Any, optimizer: Any) -> Bystander:
    with memprof.phase("forward"):
        loss = model(torch.ones(4, 8)).sum()
    with memprof.phase("backward"):
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    thread = threading.Thread(target=torch.ones, args=(100,))
    thread.start()
    thread.join()
    return Bystander()


def run(way: Way, end: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Bystander]:
    """Record a step and let it end; return threads that outlive the recording, the first of them from before."""
    bystanders = [Bystander()]
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    raises: dict[str, BaseException] = {"error": ValueError(), "interrupt": KeyboardInterrupt(), "exit": SystemExit()}

    def broken(*_: Any) -> None:
        raise _Broken(end)

    if end == "start fails":
        monkeypatch.setattr(CacheWatch, "start", broken)

    def body(session: Any) -> None:
        if end == "memprof fails" and session is not None:
            monkeypatch.setattr(type(session.recorder), "set_tags", broken)
        bystanders.append(work(model, optimizer))
        if end in raises:
            raise raises[end]
        if end == "thread fails":
            thread = threading.Thread(target=torch.ones, args=("no size",))
            thread.start()
            thread.join()
        if end == "stopped twice" and session is not None:
            session.stop()
            session.stop()

    with contextlib.suppress(*(type(error) for error in raises.values())):
        way(folder, model, optimizer, body)
    return bystanders


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("way", WAYS)
def test_the_process_is_as_it_was(way: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaHistory, "other_device", lambda self, i: DeviceInfo(i, "cuda", "x", 24 * 10**9))
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with monkeypatch.context() as broken:
        bystanders = run(WAYS[way], "normally", tmp_path, broken)  # what is imported late is
    assert list(tmp_path.rglob("*.pickle")), "it has been recorded"
    untouched = Bystander().state()
    assert [one.state() for one in bystanders] == [untouched] * len(bystanders)
    before = fingerprint(_FRACTION)
    with monkeypatch.context() as broken:
        bystanders = run(WAYS[way], end, tmp_path, broken)
    assert len(bystanders) > 1
    assert [one.state() for one in bystanders] == [untouched] * len(bystanders)
    assert differences(before, fingerprint(_FRACTION)) == []
    assert (_ALLOCATOR.recording, _ALLOCATOR.text) == (None, "")


def test_the_fingerprint_sees_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(_FRACTION)
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    monkeypatch.setattr(_FRACTION, "value", 1.0)
    monkeypatch.setenv("MEMPROF_LEFT", "1")
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    found = differences(before, fingerprint(_FRACTION))
    handle.remove()
    assert set(found) == {"hooks", "environment", "objects", "threading.Thread.start"}


def test_a_bystander_sees_what_is_left_on_its_thread() -> None:
    class Left(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    starts = THREAD_START.get()

    def with_mode(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def entered(*given: Any) -> None:
            Left().__enter__()
            function(*given)

        return starts(entered, *args, **kwargs)

    clean = Bystander().state()
    owner, name = THREAD_START.place()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, with_mode)
        left = Bystander().state()
    assert {key: value for key, value in left.items() if value != clean[key]} == {"dispatch modes": ["Left"]}
